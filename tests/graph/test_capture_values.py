"""The graph computes what the model computes, also where the model is written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from surefoot import zoo
from surefoot.graph import Graph
from surefoot.operations.captured import capture


class Function(nn.Module):
    """A function of a linear map of the input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def assert_same(model: nn.Module, x: Any, tolerance: float = 1e-12) -> Graph:
    """The graph, whose values are the model's at the present weights and at others."""
    inputs = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
    graph = capture(model, x)
    for _ in range(2):
        with torch.no_grad():
            values = graph.run(dict(model.named_parameters()), inputs)
            expected = model(**x) if isinstance(x, dict) else model(*inputs)
            expected = expected if isinstance(expected, tuple) else (expected,)
            assert len(values) == len(expected)
            for value, wanted in zip(values, expected, strict=True):
                assert value.dtype == wanted.dtype
                assert torch.allclose(value, wanted, rtol=tolerance, atol=tolerance)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return graph


def in_place_relu(y: Tensor) -> Tensor:
    return functional.relu_(y)


def in_place_sum(y: Tensor) -> Tensor:
    z = torch.tanh(y)
    z += y
    z *= 2
    return z


def slice_assignment(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[:, 0] = y[:, 1]
    out[:, 1:] = torch.sin(y[:, 1:])
    out[0] += 1
    return out


def uninitialised_memory(y: Tensor) -> Tensor:
    out = torch.empty(2, *y.shape, dtype=y.dtype)
    out[0], out[1] = y, -y
    return out


def masked_assignment(y: Tensor) -> Tensor:
    out = y.clone()
    out[:, torch.tensor([True, False, True, False])] = 0.0
    out.clamp_(max=0.5)
    return out


def write_through_a_view(y: Tensor) -> Tensor:
    z = y.clone()
    z.view(-1)[::2].mul_(3)
    z.t()[0].fill_(1.0)
    return z


def in_place_activation(y: Tensor) -> Tensor:
    return functional.elu(functional.leaky_relu(y, inplace=True), inplace=True)


def accumulate(y: Tensor) -> Tensor:
    out = torch.zeros(3, 4, dtype=y.dtype)
    out.index_add_(0, torch.tensor([0, 1, 1]), y[:3])
    return out.scatter_(1, torch.tensor([[0], [1], [2]]), 7.0)


IN_PLACE = [
    in_place_relu, in_place_sum, slice_assignment, uninitialised_memory, masked_assignment, write_through_a_view,
    in_place_activation, accumulate,
]  # fmt: skip


@pytest.mark.parametrize("function", IN_PLACE)
def test_harmless_writing_in_place_is_read_as_a_function(function: Callable[[Tensor], Tensor]) -> None:
    model = Function(function).double()
    graph = assert_same(model, torch.randn(5, 4, dtype=torch.float64))
    assert not any(node.target._schema.is_mutable for node in graph.nodes if hasattr(node.target, "_schema"))


def test_batch_norm_in_training_with_writing_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.BatchNorm1d(4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    assert_same(model, x)
    assert_same(model.eval(), x)


def test_running_the_graph_updates_no_running_statistics() -> None:
    model, x = (
        nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)),
        torch.randn(4, 3, 5),
    )
    graph = capture(model, x)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    graph.run(dict(model.named_parameters()), [x])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, padding_mode="circular"), (2, 2, 7)),
    "conv2d same": (lambda: nn.Conv2d(2, 4, 3, padding="same", groups=2), (2, 2, 5, 5)),
    "conv transpose": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (2, 2, 4, 4)),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 3, 6, 6)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d((2, 3)), (2, 3, 6, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "layer norm, two dimensions": (lambda: nn.LayerNorm((4, 5)), (3, 4, 5)),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), (3, 4, 5)),
    "rms norm with its own eps": (lambda: nn.RMSNorm(5), (3, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 4)),
    "instance norm, running": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 4, 4)),
    "instance norm, eval": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(), (2, 3, 4, 4),
    ),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(), (2, 3, 4, 4)),
    "batch norm without parameters": (lambda: nn.BatchNorm2d(3, affine=False), (2, 3, 4, 4)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 3, 3)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (1, 4, 3, 3)),
    "prelu": (lambda: nn.PReLU(4), (3, 4)),
    "bilinear": (lambda: Pairing(nn.Bilinear(4, 4, 3)), (3, 4)),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (2, 5, 3)),
    "gru": (lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True), (5, 2, 3)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 5, 4)),
    "transformer layer, eval": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (2, 5, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
    "spectral norm, eval": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), (2, 4)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), (2, 4)),
    "fourier": (lambda: Function(lambda y: torch.fft.irfft(torch.fft.rfft(y)[..., :2], n=4)), (3, 4)),
    "sorted": (lambda: Function(lambda y: y.sort().values + y.topk(4).values + y.max(1, True).values), (3, 4)),
    "unbound": (lambda: Function(lambda y: sum(k * part for k, part in enumerate(y.unbind(1)))), (3, 4)),
}  # fmt: skip


class Pairing(nn.Module):
    """A bilinear layer on the input and itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x + 1)


class ThenInPlace(nn.Module):
    """A layer, and then something in place, so that the whole program is rewritten."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = (y[0] if isinstance(y, tuple) else y).clone()
        y += 1
        return y


def layer(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    model = make().double()
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.dim():  # statistics that have been running
            buffer.add_(torch.rand_like(buffer))
    return model, torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name: str) -> None:
    model, x = layer(name)
    assert_same(model, x)
    assert_same(ThenInPlace(model), x)


@pytest.mark.parametrize(
    "name", [name for name in LAYERS if "norm" in name and name.split()[0] not in ("weight", "spectral")]
)
def test_normalisations_are_read_alike_however_they_are_traced(name: str) -> None:
    model, x = layer(name)
    alone = [node.op for node in capture(model, x).nodes]
    assert [node.op for node in capture(ThenInPlace(model), x).nodes][: len(alone)] == alone


def test_inputs_by_name() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True).double()
    q, k, v = (torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(3))
    assert_same(model, {"value": v, "query": q, "key": k})
    assert_same(nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True).double(), (q, k))


def test_a_new_batch_size_is_a_new_capture() -> None:
    model = zoo.mlp(sizes=(3, 4, 2)).double()
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, dtype=torch.float64)
        assert assert_same(model, x).inputs[0].spec.shape == (batch, 3)


def test_frozen_parameters_may_be_given_other_values() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    x = torch.randn(4, 3)
    graph = capture(model, x)
    other = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    expected = torch.func.functional_call(model, other, (x,))
    assert torch.allclose(graph.run(other, [x])[0], expected)
    assert torch.allclose(graph.run(dict(model.named_parameters()), [x])[0], model(x))


def test_running_asks_for_what_it_needs() -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    graph = capture(model, x)
    with pytest.raises(KeyError, match="no value was given for parameter 'bias'"):
        graph.run({"weight": model.weight}, [x])
    with pytest.raises(ValueError, match="reads 1 inputs, got 2"):
        graph.run(dict(model.named_parameters()), [x, x])
