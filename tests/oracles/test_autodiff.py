"""The automatic-differentiation oracle: value, pull-backs and push-forwards after one forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot import zoo
from surefoot.chain import Chain
from surefoot.errors import ChainError
from surefoot.oracles import Autodiff

NAMES = ["mlp", "residual", "dense", "resnet18", "vgg16-batchnorm", "vit", "gpt", "autoencoder"]


def of_zoo(name: str) -> tuple[nn.Module, Tensor]:
    options = zoo.small_options(name)
    model = zoo.build(name, **options).double()
    return model, zoo.example_input(name, batch=3, dtype=torch.float64, **options)


def like(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {path: torch.randn_like(value) for path, value in parameters.items()}


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    return sum((a[path] * b[path]).sum() for path in a)  # type: ignore[return-value]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12 * float(1 + b.detach().abs().max()))


def gradients(model: nn.Module, outputs: Sequence[Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    trainable = {path: value for path, value in model.named_parameters() if value.requires_grad}
    found = torch.autograd.grad(outputs, list(trainable.values()), slopes, allow_unused=True, retain_graph=True)
    return {
        path: torch.zeros_like(value) if gradient is None else gradient
        for (path, value), gradient in zip(trainable.items(), found, strict=True)
    }


def tangent(model: nn.Module, x: Any, direction: Mapping[str, Tensor]) -> Any:
    parameters = {path: value.detach() for path, value in model.named_parameters()}
    full = {path: direction.get(path, torch.zeros_like(value)) for path, value in parameters.items()}

    def run(values: dict[str, Tensor]) -> Any:
        statistics = {path: value + 0 for path, value in model.named_buffers()}  # to be written to
        return torch.func.functional_call(model, values | statistics, (x,))

    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward mode
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when forward mode is first used
        return torch.func.jvp(run, (parameters,), (full,))[1]


@pytest.mark.parametrize("name", NAMES)
def test_value_pullback_and_pushforward(name: str) -> None:
    model, x = of_zoo(name)
    chain = Chain(model, x)
    oracle = chain.autodiff()
    output = model(x)
    assert close(oracle.value, output)
    assert not oracle.value.requires_grad
    for _ in range(2):
        slope, direction = torch.randn_like(output), like(chain.parameters)
        pulled, pushed = oracle.pullback(slope), oracle.pushforward(direction)
        expected = gradients(model, [output], [slope])
        assert pulled.keys() == expected.keys() == chain.parameters.keys()
        assert all(close(pulled[path], expected[path]) for path in expected)
        assert close(pushed, tangent(model, x, direction))
        assert torch.allclose((slope * pushed).sum(), dot(pulled, direction), rtol=1e-10)
    assert oracle.calls == 4


def test_calls_after_the_forward_pass_run_no_second_one() -> None:
    class Counter(TorchDispatchMode):
        tanh = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.tanh += "aten.tanh.default" in str(func)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    chain = Chain(model, torch.randn(5, 3))
    with Counter() as counter:
        oracle = chain.autodiff()
        assert counter.tanh == 1
        for _ in range(3):
            oracle.pullback(torch.randn(5, 2))
            oracle.pushforward(like(chain.parameters))
        assert counter.tanh == 1
    assert oracle.calls == 6


def test_the_derivative_is_taken_at_the_given_parameters() -> None:
    model, x = of_zoo("mlp")
    other = like(dict(model.named_parameters()))
    oracle = Chain(model, x).autodiff(other)
    slope = torch.randn_like(oracle.value)
    with torch.no_grad():
        for path, value in model.named_parameters():
            value.copy_(other[path])
    expected = gradients(model, [model(x)], [slope])
    found = oracle.pullback(slope)
    assert all(close(found[path], expected[path]) for path in expected)


def test_a_direction_without_some_parameters_is_zero_there() -> None:
    model, x = of_zoo("mlp")
    oracle = Chain(model, x).autodiff()
    path = next(iter(dict(model.named_parameters())))
    direction = {path: torch.randn_like(model.get_parameter(path))}
    assert close(oracle.pushforward(direction), tangent(model, x, direction))
    assert torch.equal(oracle.pushforward({}), torch.zeros_like(oracle.value))


class Several(nn.Module):
    """Outputs that depend on both, on the input alone, on parameters alone, and on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.idle = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.one(x))
        return self.two(y), y, x.sin(), self.two.weight.square().sum(), torch.ones(2, dtype=x.dtype)


def test_several_outputs() -> None:
    model, x = Several().double(), torch.randn(4, 3, dtype=torch.float64)
    chain = Chain(model, x)
    oracle = chain.autodiff()
    outputs = model(x)
    assert isinstance(oracle.value, tuple)
    assert all(close(value, output) for value, output in zip(oracle.value, outputs, strict=True))
    slopes = [torch.randn_like(output) for output in outputs]
    direction = like(chain.parameters)
    varying = [k for k, output in enumerate(outputs) if output.requires_grad]
    expected = gradients(model, [outputs[k] for k in varying], [slopes[k] for k in varying])
    found, pushed = oracle.pullback(slopes), oracle.pushforward(direction)
    assert all(close(found[path], expected[path]) for path in expected)
    assert all(close(a, b) for a, b in zip(pushed, tangent(model, x, direction), strict=True))
    total = sum((slope * value).sum() for slope, value in zip(slopes, pushed, strict=True))
    assert torch.allclose(total, dot(found, direction), rtol=1e-12)


def test_parameters_that_the_output_does_not_depend_on_have_gradient_zero() -> None:
    model, x = Several().double(), torch.randn(4, 3, dtype=torch.float64)
    chain = Chain(model, x)
    oracle = chain.autodiff()
    found = oracle.pullback([torch.randn_like(value) for value in oracle.value])
    assert torch.equal(found["idle.weight"], torch.zeros(2, 2, dtype=torch.float64))
    pushed = oracle.pushforward({"idle.weight": torch.ones(2, 2, dtype=torch.float64)})
    assert all(not value.any() for value in pushed)


def test_frozen_parameters_do_not_vary() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].weight.requires_grad_(False)
    x = torch.randn(5, 3, dtype=torch.float64)
    chain = Chain(model, x)
    oracle = chain.autodiff(dict(model.named_parameters()))
    output, slope = model(x), torch.randn(5, 2, dtype=torch.float64)
    expected, found = gradients(model, [output], [slope]), oracle.pullback(slope)
    assert found.keys() == expected.keys() == {"0.bias", "2.weight", "2.bias"}
    assert all(close(found[path], expected[path]) for path in expected)
    direction = like(chain.parameters)
    assert close(oracle.pushforward(direction), tangent(model, x, direction))
    with pytest.raises(ChainError, match=r"no trainable parameter '0\.weight'"):
        oracle.pushforward({"0.weight": torch.ones(4, 3, dtype=torch.float64)})


def test_a_model_without_parameters_has_an_empty_derivative() -> None:
    x = torch.randn(2, 3)
    oracle = Chain(nn.Tanh(), x).autodiff()
    assert torch.equal(oracle.value, torch.tanh(x))
    assert oracle.pullback(torch.ones(2, 3)) == {}
    assert torch.equal(oracle.pushforward({}), torch.zeros(2, 3))


def test_tied_parameters_add_up() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    model, x = Tied().double(), torch.randn(4, 3, dtype=torch.float64)
    slope = torch.randn(4, 3, dtype=torch.float64)
    found, expected = Chain(model, x).autodiff().pullback(slope), gradients(model, [model(x)], [slope])
    assert found.keys() == expected.keys()
    assert all(close(found[path], expected[path]) for path in expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(4, 2, batch_first=True), nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True),
        nn.GRU(4, 4, batch_first=True), nn.RMSNorm(4), nn.GroupNorm(1, 5), nn.BatchNorm1d(5), nn.PReLU(),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Conv1d(5, 3, 3), nn.Bilinear(4, 4, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_layers_have_both_directions(layer: nn.Module) -> None:
    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(4, 4), layer

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            many = {nn.MultiheadAttention: 3, nn.Bilinear: 2}.get(type(self.layer), 1)
            result = self.layer(*[y] * many)
            return result[0] if isinstance(result, tuple) else result

    model, x = Used().double(), torch.randn(2, 5, 4, dtype=torch.float64)
    chain = Chain(model, x)
    oracle = chain.autodiff()
    output, slope, direction = model(x), torch.randn_like(oracle.value), like(chain.parameters)
    expected, found = gradients(model, [output], [slope]), oracle.pullback(slope)
    assert all(close(found[path], expected[path]) for path in expected)
    assert torch.allclose((slope * oracle.pushforward(direction)).sum(), dot(found, direction), rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_element_type_is_kept(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).to(dtype), torch.randn(4, 3, dtype=dtype)
    chain = Chain(model, x)
    oracle = chain.autodiff()
    assert oracle.value.dtype == dtype
    assert {value.dtype for value in oracle.pullback(torch.ones(4, 2, dtype=dtype)).values()} == {dtype}
    assert oracle.pushforward(like(chain.parameters)).dtype == dtype


def test_on_the_meta_device_there_are_shapes() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(10**5, 10**5), nn.Tanh()), torch.empty(2, 10**5)
        chain = Chain(model, x)
        oracle = chain.autodiff()
        assert oracle.pullback(torch.empty(2, 10**5))["0.weight"].shape == (10**5, 10**5)
        assert oracle.pushforward({"0.bias": torch.empty(10**5)}).device.type == "meta"


def test_the_model_is_not_touched() -> None:
    model, x = of_zoo("mlp")
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    flags = [(value.requires_grad, value.grad, value._version) for value in model.parameters()]
    chain = Chain(model, x)
    oracle = chain.autodiff()
    oracle.pullback(torch.ones_like(oracle.value))
    oracle.pushforward(like(chain.parameters))
    for value, (requires_grad, grad, version) in zip(model.parameters(), flags, strict=True):
        assert value.requires_grad == requires_grad
        assert value.grad is grad
        assert value._version == version
    assert not x.requires_grad
    assert torch.equal(first.grad, torch.ones_like(first))


def test_it_works_wherever_gradients_are_off() -> None:
    model, x = of_zoo("mlp")
    chain = Chain(model, x)
    slope, direction = torch.randn_like(chain.value()).detach(), like(chain.parameters)
    on = chain.autodiff()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            off = chain.autodiff({path: value.clone() for path, value in chain.parameters.items()})
            pulled, pushed = off.pullback(slope), off.pushforward(direction)
        assert all(close(pulled[path], value) for path, value in on.pullback(slope).items())
        assert close(pushed, on.pushforward(direction))
        assert not pushed.requires_grad


def test_what_does_not_fit_is_refused() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    oracle = Chain(model, x).autodiff()
    with pytest.raises(ChainError, match=r"the slope has shape \(2,\), the value has shape \(4, 2\)"):
        oracle.pullback(torch.ones(2))
    with pytest.raises(ChainError, match=r"returns 1 tensors, got 2 slopes"):
        oracle.pullback([torch.ones(4, 2), torch.ones(4, 2)])
    with pytest.raises(ChainError, match=r"the slope has dtype torch.float64"):
        oracle.pullback(torch.ones(4, 2, dtype=torch.float64))
    with pytest.raises(ChainError, match=r"the direction of 'weight' has shape \(3, 2\)"):
        oracle.pushforward({"weight": torch.ones(3, 2)})
    with pytest.raises(ChainError, match=r"no trainable parameter 'wieght'"):
        oracle.pushforward({"wieght": torch.ones(2, 3)})
    assert oracle.calls == 0


def test_the_oracle_can_be_made_from_a_graph_alone() -> None:
    model, x = of_zoo("mlp")
    chain = Chain(model, x)
    oracle = Autodiff(chain.graph, [x], dict(model.named_parameters()))
    assert close(oracle.value, model(x))
