"""What the calculus reads after rewriting is the function that was written, in operations with sharp constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from operations.case import traced
from operations.harness import claims, study
from operations.tensors import away, real
from surefoot.calculus.prepare import prepared
from surefoot.operations.captured import capture

_ALLOWED = torch.tensor([[True, False, True], [False, True, True]])
_FORBIDDING = real(2, 3).masked_fill(~_ALLOWED, -math.inf)
_BELOW = torch.ones(3, 3, dtype=torch.bool).tril()

attend = F.scaled_dot_product_attention


def _normalised(x: Tensor) -> Tensor:
    moved = x - x.mean(-1, keepdim=True)
    return moved * torch.rsqrt(moved.pow(2).mean(-1, keepdim=True) + 0.1)


def _in_real_arithmetic(x: Tensor) -> Tensor:
    """A cast on the way, as mixed precision writes it."""
    return (x.to(torch.float64).contiguous() * 2.0).clone().tanh()


_query, _key, _value = real(1, 1, 2, 2), real(1, 1, 3, 2, seed=1), real(1, 1, 3, 1, seed=2)
_scores = real(1, 3, 3)

# What is written, the operations it becomes (but for constants and layout), and the arguments.
PATTERNS: dict[str, tuple[Callable[..., Tensor], list[str], list[Tensor]]] = {
    "attention": (attend, ["matmul", "mul", "masked_softmax", "matmul"], [_query, _key, _value]),
    "causal attention": (
        lambda q, k, v: attend(q, k, v, is_causal=True),
        ["matmul", "mul", "masked_softmax", "matmul"],
        [_query, _key, _value],
    ),
    "boolean mask": (
        lambda q, k, v: attend(q, k, v, attn_mask=_ALLOWED),
        ["matmul", "mul", "masked_softmax", "matmul"],
        [_query, _key, _value],
    ),
    "real mask": (
        lambda q, k, v: attend(q, k, v, attn_mask=_FORBIDDING, scale=0.3),
        ["matmul", "mul", "add", "masked_softmax", "matmul"],
        [_query, _key, _value],
    ),
    "mask that varies": (
        lambda q, k, v, m: attend(q, k, v, attn_mask=m),
        ["matmul", "mul", "finite_part", "add", "masked_softmax", "matmul"],
        [_query, _key, _value, real(1, 1, 2, 3)],
    ),
    "mask as input": (
        lambda q, k, v, m: attend(q, k, v, attn_mask=m),
        ["matmul", "mul", "masked_softmax", "matmul"],
        [_query, _key, _value, _ALLOWED],
    ),
    "grouped queries": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        ["repeat_interleave", "repeat_interleave", "matmul", "mul", "masked_softmax", "matmul"],
        [real(1, 2, 1, 2), _key[:, :, :2], _value[:, :, :2]],
    ),
    "shared keys": (
        attend,
        ["matmul", "mul", "masked_softmax", "matmul"],
        [real(2, 1, 1, 2), _key, _value],
    ),
    "filled mask": (lambda s: torch.softmax(s.masked_fill(~_BELOW, -math.inf), -1), ["masked_softmax"], [_scores]),
    "chosen mask": (lambda s: torch.softmax(torch.where(_BELOW, s, -math.inf), 2), ["masked_softmax"], [_scores]),
    "added mask": (
        lambda s: torch.softmax(s + torch.full((3, 3), -math.inf).triu(1), -1),
        ["add", "masked_softmax"],
        [_scores],
    ),
    "finite mask": (
        lambda s: torch.softmax(s.masked_fill(~_BELOW, -9.0), -1),
        ["masked_fill", "softmax"],
        [_scores],
    ),
    "rms": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1), ["rms_norm"], [real(2, 3)]),
    "rms, divided": (lambda x: x / torch.sqrt((x * x).mean(1, keepdim=True) + 0.1), ["rms_norm"], [real(2, 3)]),
    "rms, power": (lambda x: (x.square().mean(-1, True) + 0.1) ** -0.5 * x, ["rms_norm"], [real(2, 3)]),
    "layer norm": (_normalised, ["layer_norm"], [real(2, 3)]),
    "layer norm, variance": (
        lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True, unbiased=False) + 0.1).sqrt(),
        ["layer_norm"],
        [real(2, 3)],
    ),
    "other dimension": (
        lambda x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 0.1),
        ["scalar", "mean", "scalar", "mul"],
        [real(2, 3)],
    ),
    "scaled eps": (
        lambda x: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 0.1, alpha=2)),
        ["scalar", "mean", "scalar", "mul"],
        [real(2, 3)],
    ),
    "unbiased variance": (
        lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 0.1).sqrt(),
        ["mean", "sub", "var", "scalar", "div"],
        [real(2, 3)],
    ),
    "direction": (lambda x: F.normalize(x, dim=-1), ["unit"], [away(2, 3)]),
    "direction, whole": (lambda x: x / x.norm(), ["unit"], [away(2, 3)]),
    "cosine": (
        lambda x, y: F.cosine_similarity(x, y, dim=0),
        ["unit", "unit", "sum", "matmul"],
        [away(2, 3), away(2, 1)],
    ),
    "gated": (lambda x: F.glu(x, 1), ["scalar", "mul"], [real(2, 4)]),
    "silu": (lambda x: x * torch.sigmoid(x), ["scalar"], [real(2, 3)]),
    "softsign": (lambda x: x / (1 + x.abs()), ["scalar"], [away(2, 3, least=0.1)]),
    "tanhshrink": (lambda x: x - torch.tanh(x), ["scalar"], [real(2, 3)]),
    "gelu by hand": (
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ["scalar"],
        [real(2, 3)],
    ),
    "square": (lambda x: x * x, ["scalar"], [real(2, 3)]),
    "polynomial": (lambda x: 2 * x**3 - x.square() + 3, ["scalar"], [real(2, 3)]),
    "residual": (lambda x: x + F.gelu(x), ["scalar"], [real(2, 3)]),
    "tensor as number": (lambda x: torch.sin(x * torch.tensor(0.5)), ["scalar"], [real(2, 3)]),
    "rounded number": (
        lambda x: torch.sin(x * torch.tensor(2.0, dtype=torch.float32).sqrt()),
        ["mul", "scalar"],
        [real(2, 3)],
    ),
    "whole numbers": (lambda x: x + torch.sin(torch.arange(3) * 0.5), ["add"], [real(2, 3)]),
    "broadcast": (lambda x: x * x[:1], ["mul"], [real(2, 3)]),
    "casts": (_in_real_arithmetic, ["scalar"], [real(2, 3)]),
    "infinite limit": (lambda x: x.clamp(max=math.inf).sin(), ["scalar"], [real(2, 3)]),
}
_LAYOUT = {"transpose", "slice", "narrow", "permute", "reshape"}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    """Numbers that a function makes on its own are judged in double precision, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str) -> None:
    function, operations, tensors = PATTERNS[name]
    case = traced(function, *tensors)
    varying = [node for node in case.graph.nodes if node.name not in case.graph.constant_names]
    kept = [node.op.rpartition(".")[2] for node in varying]
    assert [op for op in kept if op not in _LAYOUT] == operations
    (found,) = case.graph.run({}, tensors)
    torch.testing.assert_close(found, function(*tensors))
    for setting in ("point", "rows"):
        study(case, setting, starts=2)


def test_numbers_are_taken_as_they_are() -> None:
    """A number rounded to single precision is not the number that the model defines."""
    exact = traced(lambda x: torch.sin(x * torch.tensor(0.5)), real(2))
    assert float(claims(exact, "unknown").jacobian["x"]) == pytest.approx(0.5)


class _Cell(nn.Module):
    """A recurrent cell applied twice."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.cell(x))
        return state[0] + state[1] if isinstance(state, tuple) else state


class _Layer(nn.Module):
    """A recurrent layer: its outputs and its last states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        output, last = self.layer(x)
        return (output, *last) if isinstance(last, tuple) else (output, last)


_RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh cell": (lambda: _Cell(nn.RNNCell(2, 2)), (3, 2)),
    "relu cell": (lambda: _Cell(nn.RNNCell(2, 2, nonlinearity="relu", bias=False)), (3, 2)),
    "gru cell": (lambda: _Cell(nn.GRUCell(2, 2)), (3, 2)),
    "lstm cell": (lambda: _Cell(nn.LSTMCell(2, 2)), (3, 2)),
    "tanh layer": (lambda: _Layer(nn.RNN(2, 3, batch_first=True)), (2, 3, 2)),
    "relu layer": (lambda: _Layer(nn.RNN(2, 3, nonlinearity="relu", bias=False)), (3, 2, 2)),
    "gru layer": (lambda: _Layer(nn.GRU(2, 2, num_layers=2, bidirectional=True)), (3, 2, 2)),
    "lstm layer": (lambda: _Layer(nn.LSTM(2, 2, bidirectional=True, batch_first=True)), (2, 3, 2)),
    "one sequence": (lambda: _Layer(nn.LSTM(2, 2)), (3, 2)),
}


@pytest.mark.parametrize("name", _RECURRENT)
def test_recurrent_layers_are_unrolled(name: str) -> None:
    build, shape = _RECURRENT[name]
    torch.manual_seed(0)
    model, x = build().double(), real(*shape)
    graph = prepared(capture(model, x))
    found = graph.run(dict(model.named_parameters()), [x])
    expected = model(x) if isinstance(model(x), tuple) else (model(x),)
    torch.testing.assert_close(found, expected)
    assert not any("rnn" in node.op or "gru" in node.op or "lstm" in node.op for node in graph.nodes)


def test_states_of_a_gated_network_stay_below_one() -> None:
    torch.manual_seed(0)
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 20, 3)
    model = _Layer(layer)
    certificate = sf.certify(model, x, domain=sf.Ball(2.0))
    states = sum(part.numel() for part in model(x))
    assert certificate.bound <= states**0.5 * (1 + 1e-9)
