"""Passes that are traced once, against automatic differentiation at every point, and steps by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from judges.layered import MODELS, build, objectives
from judges.steps import DenseModel
from surefoot import zoo
from surefoot.chain import Chain, autodiff, traced
from surefoot.chain.autodiff import Autodiff
from surefoot.chain.recorded import Recorded
from surefoot.chain.traced import Traced
from surefoot.oracles import problem as problems
from surefoot.oracles.gauss_newton import Primal
from surefoot.oracles.problem import Problem

NAMES = ["mlp", "residual", "dense", "resnet18", "vgg16-batchnorm", "vit", "gpt", "autoencoder"]


def of_zoo(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    options = zoo.small_options(name)
    model = zoo.build(name, **options).to(dtype)
    return model, zoo.example_input(name, batch=3, dtype=dtype, **options)


def at(chain: Chain, parameters: dict[str, Tensor]) -> tuple[Autodiff, Recorded]:
    """The oracle that is made now, and what automatic differentiation records at the same point."""
    oracle = chain.autodiff(parameters)
    assert isinstance(oracle, Autodiff)
    values = {path: value.detach().clone() for path, value in parameters.items()}
    return oracle, Recorded(chain.graph, values, chain.inputs, values)


def agree(oracle: Autodiff, judge: Recorded, digits: float = 1e-10) -> None:
    """All passes of both, for random slopes and directions."""
    output, leaves = oracle.value, judge.pull([torch.zeros_like(o) for o in judge.outputs])
    slope, along = torch.randn_like(output), {path: torch.randn_like(value) for path, value in leaves.items()}
    torch.testing.assert_close(output, judge.outputs[0].detach(), rtol=digits, atol=digits)
    expected = judge.pull([slope])
    size = max(float(value.abs().max()) for value in expected.values())
    found, sums = oracle.pullback(slope), {path: value.clone() for path, value in along.items()}
    oracle.pull_onto(sums, slope)
    for path, value in expected.items():
        torch.testing.assert_close(found[path], value, rtol=digits, atol=digits * size)
        torch.testing.assert_close(sums[path], along[path] + value, rtol=digits, atol=digits * (size + 1))
    (change,) = judge.push(along)
    torch.testing.assert_close(
        oracle.pushforward(along), change, rtol=digits, atol=digits * float(change.abs().max())
    )


@pytest.mark.parametrize("name", NAMES)
def test_passes_are_those_of_automatic_differentiation_at_every_point(name: str) -> None:
    model, x = of_zoo(name)
    chain = Chain(model, x)
    oracle = chain.autodiff()
    oracle.trace()
    assert isinstance(oracle._way, Traced), name
    assert oracle.calls == 0
    for move in (0.0, 0.1, -0.3):
        parameters = {
            path: value.detach() + move * torch.randn_like(value) for path, value in chain.parameters.items()
        }
        elsewhere, judge = at(chain, parameters)
        assert isinstance(elsewhere._way, Traced)
        agree(elsewhere, judge)
        assert elsewhere.calls == 3


def test_what_is_held_is_read_anew() -> None:
    """Inputs, buffers and frozen parameters are arguments of the passes, not constants in them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    model[3].bias.requires_grad_(False)
    x = torch.randn(5, 3, dtype=torch.float64)
    Chain(model, x).autodiff().trace()
    model[1].running_mean += 1.0
    model[3].bias.data += 2.0
    other = torch.randn(5, 3, dtype=torch.float64)
    oracle = Chain(model, other).autodiff()
    torch.testing.assert_close(oracle.value, model(other).detach())
    slope = torch.randn(5, 2, dtype=torch.float64)
    trained = {path: value for path, value in model.named_parameters() if value.requires_grad}
    expected = torch.autograd.grad(model(other), list(trained.values()), slope)
    found = oracle.pullback(slope)
    assert found.keys() == trained.keys()
    for (path, _), value in zip(trained.items(), expected, strict=True):
        torch.testing.assert_close(found[path], value)


def test_a_model_in_single_precision_is_traced_in_double_too() -> None:
    model, x = of_zoo("mlp", torch.float32)
    chain = Chain(model, x)
    wide = {path: value.detach().double() for path, value in chain.parameters.items()}
    for parameters, digits in ((chain.parameters, 1e-4), (wide, 1e-12)):
        first = chain.autodiff(parameters)
        first.trace()
        assert isinstance(first._way, Traced)
        agree(*at(chain, {path: value.detach() for path, value in parameters.items()}), digits)


def test_tensors_of_another_kind_are_recorded() -> None:
    model, x = of_zoo("mlp")
    Chain(model, x).autodiff().trace()
    turned = x.T.contiguous().T
    oracle = Chain(model, turned).autodiff()
    assert isinstance(oracle._way, Recorded)
    torch.testing.assert_close(oracle.value, model(turned).detach())


def test_parameters_that_are_not_read_and_paths_that_are_missing_count_as_zero() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).tanh()

    model, x = Model().double(), torch.ones(3, 2, dtype=torch.float64)
    chain = Chain(model, x)
    recorded = chain.autodiff()
    along = {"used.bias": torch.ones(2, dtype=torch.float64)}
    expected, slope = recorded.pushforward(along), torch.ones(3, 2, dtype=torch.float64)
    gradient = recorded.pullback(slope)
    oracle = chain.autodiff()
    oracle.trace()
    torch.testing.assert_close(oracle.pushforward(along), expected)
    found = oracle.pullback(slope)
    assert found.keys() == gradient.keys()
    for path, value in gradient.items():
        torch.testing.assert_close(found[path], value)


def test_second_derivatives_are_recorded_where_passes_are_traced() -> None:
    model, x = of_zoo("mlp")
    chain = Chain(model, x)
    along = {path: torch.randn_like(value) for path, value in chain.parameters.items()}
    first = chain.autodiff()
    slope, curved = torch.randn_like(first.value), torch.randn_like(first.value)
    expected = first.bent(along, slope, curved)
    first.trace()
    found = chain.autodiff().bent(along, slope, curved)
    for path, value in expected.items():
        torch.testing.assert_close(found[path], value)


@pytest.mark.parametrize("wrong", ["push", "pull"])
def test_passes_that_do_not_agree_are_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = of_zoo("mlp")
    chain = Chain(model, x)
    oracle = chain.autodiff()
    slope = torch.randn_like(oracle.value)
    expected = oracle.pullback(slope)

    def bad(*args: Any) -> traced.Passes | None:
        passes = traced.trace(*args)
        right = getattr(passes, wrong)
        setattr(passes, wrong, lambda *given: tuple(1.01 * part for part in right(*given)))
        return passes

    monkeypatch.setattr(autodiff, "trace", bad)
    oracle.trace()
    for one in (oracle, chain.autodiff()):
        assert isinstance(one._way, Recorded)
        for path, value in expected.items():
            torch.testing.assert_close(one.pullback(slope)[path], value)


def test_random_numbers_are_not_traced() -> None:
    def run(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (values["u"] * torch.rand(3),)

    with pytest.raises(RuntimeError, match="cannot be traced"):
        traced.Passes(run, {"u": torch.ones(3)}, {"u": "u"})


def test_products_with_zeros_are_left_out() -> None:
    """The input does not vary, so the first layer pushes one product, as it pulls one."""
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.ones(2, 5).double()
    chain = Chain(model, x)
    names = {leaf.path: leaf.name for leaf in chain.graph.parameters}
    values = chain.graph.bind(chain.parameters, chain.inputs)
    passes = traced.Passes(
        lambda given: chain.graph.run({p: given[n] for p, n in names.items()}, [x]), values, names
    )
    code = passes.push.__self__.code  # type: ignore[attr-defined]
    assert code.count("aten.addmm.default") == 3
    assert "zeros" not in code


def test_a_tensor_that_is_added_to_itself_is_not_added_to_zero() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y + y + y.tanh() * y.tanh()

    chain = Chain(Twice().double(), torch.ones(4, 3, dtype=torch.float64))
    chain.autodiff().trace()
    oracle, judge = at(chain, {path: value.detach() for path, value in chain.parameters.items()})
    assert isinstance(oracle._way, Traced)
    agree(oracle, judge)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_dense_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_LARGE", 0)
    model, x = build(name)
    chain, objective = Chain(model, x), objectives(x.shape[0])["labels"]
    Problem(chain, objective).trace()
    problem = Problem(chain, objective)
    assert isinstance(problem.autodiff._way, Traced)  # type: ignore[union-attr]
    step = Primal(problem).solve(1e-2, 1e-12)
    judge = DenseModel(model, x, objective)
    assert judge.error(step, "gauss_newton") < 1e-8, step.status


def test_an_optimizer_traces_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are those without a trace, up to round-off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x, y, start = torch.randn(20, 8).double(), torch.randint(0, 3, (20,)), torch.nn.utils.parameters_to_vector
    weights = start(model.parameters()).detach().clone()
    found = []
    for size in (1 << 40, 0):
        monkeypatch.setattr(problems, "_LARGE", size)
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
        optimizer = sf.optim.GaussNewton(model, sf.CrossEntropy(), solver="primal")
        for _ in range(4):
            optimizer.step(x, y)
        found.append(start(model.parameters()).detach().clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)
