"""Scalar functions, normalisations, soft-max, variances and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from operations.case import Case, Fixed, operation
from operations.tensors import away, real, yes_or_no
from surefoot.calculus.prepare import scalar
from surefoot.operations.attention import finite_part, masked_softmax
from surefoot.operations.scaled import unit
from surefoot.scalar import ScalarFunction

aten = torch.ops.aten
Thunk = Callable[[], Case]

_x = ScalarFunction.variable()


def _scalar(function: ScalarFunction, value: torch.Tensor) -> Case:
    return operation(scalar, value, function, op="surefoot.scalar")


def _masked(scores: torch.Tensor, mask: object, causal: bool) -> Case:
    return operation(masked_softmax, scores, mask, causal, op="surefoot.masked_softmax")


def _forbidding(*shape: int) -> torch.Tensor:
    """A real mask: a bias, and minus infinity in places."""
    return real(*shape).masked_fill(yes_or_no(*shape) & ~torch.eye(*shape[-2:], dtype=torch.bool), -math.inf)


def _moments() -> torch.Tensor:
    """Two classes whose probabilities q, 1 - q maximise q(1 - q)(1 - 2q)."""
    q = (3 - math.sqrt(3)) / 6
    return torch.tensor([[0.0, math.log((1 - q) / q)]], dtype=torch.float64)


def _batch(x: torch.Tensor, *, running: bool = False) -> Case:
    if not running:
        return operation(aten.batch_norm.default, x, None, None, None, None, True, 0.0, 0.1, False)
    mean, var = real(x.shape[1]), real(x.shape[1]).square() + 0.1
    return operation(aten.batch_norm.default, x, None, None, Fixed(mean), Fixed(var), False, 0.0, 0.1, False)


def _instance(x: torch.Tensor, *, running: bool = False) -> Case:
    mean, var = (Fixed(real(x.shape[1])), Fixed(real(x.shape[1]).square() + 0.1)) if running else (None, None)
    return operation(aten.instance_norm.default, x, None, None, mean, var, not running, 0.0, 0.1, False)


def _smallest_norm(*shape: int, eps: float) -> torch.Tensor:
    """Along (1, 0, …, -1) with the mean square that maximises the curvature, ε/4."""
    x = torch.zeros(shape, dtype=torch.float64)
    x[..., 0], x[..., -1] = 1.0, -1.0
    return x * math.sqrt(eps / 4 * shape[-1] / 2)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int) -> torch.Tensor:
    """The operation written out: PyTorch's own second derivative of it is not symmetric."""
    dims = [k for k in range(v.dim()) if dim == -1 or k != dim]
    return g * v / v.square().sum(dim=dims, keepdim=True).sqrt()


CASES: dict[str, list[Thunk]] = {
    "surefoot.scalar": [
        lambda: _scalar(ScalarFunction.named("tanh"), real(3, 2)),
        lambda: _scalar(ScalarFunction.named("gelu"), real(2, 3)),
        lambda: _scalar(ScalarFunction.named("relu"), away(3, 2, least=0.5)),
        lambda: _scalar(ScalarFunction.named("tanhshrink"), 1e-3 * real(3)),
        lambda: _scalar(ScalarFunction.named("sigmoid"), real()),
        lambda: _scalar(_x * _x * _x - 2.0 * _x + 7.0, real(2, 2)),
        lambda: _scalar(ScalarFunction.apply("exp", _x), real(0, 2)),
        lambda: _scalar(ScalarFunction.apply("log", _x * _x + 1.0), real(4)),
    ],
    "aten.prelu": [
        lambda: operation(aten.prelu.default, away(2, 2, 2, least=0.5), real(2)),
        lambda: operation(aten.prelu.default, real(2, 3), real(1)),
        lambda: operation(aten.prelu.default, -1 - real(3, 3).abs(), real(3)),
        lambda: operation(aten.prelu.default, 2 + real(3, 2).abs(), real(2)),
        lambda: operation(aten.prelu.default, real(3), real(1)),
    ],
    "aten._prelu_kernel": [lambda: operation(aten._prelu_kernel.default, away(2, 2, 2), away(1, 2, 1))],
    "aten.batch_norm": [
        lambda: _batch(real(4, 2)),
        lambda: _batch(real(2, 2, 3)),
        lambda: _batch(real(3, 2), running=True),
        lambda: _batch(real(2, 2, 2), running=True),
        lambda: _batch(torch.zeros(4, 2, dtype=torch.float64)),
        lambda: _batch(_smallest_norm(2, 4, eps=0.1).T.contiguous()),
    ],
    "aten.instance_norm": [
        lambda: _instance(real(2, 2, 3)),
        lambda: _instance(real(2, 2, 2), running=True),
        lambda: _instance(torch.zeros(1, 2, 3, dtype=torch.float64)),
        lambda: _instance(_smallest_norm(2, 1, 3, eps=0.1)),
    ],
    "aten.layer_norm": [
        lambda: operation(aten.layer_norm.default, real(3, 4), [4], None, None, 0.1, False),
        lambda: operation(aten.layer_norm.default, real(2, 3), [2, 3], None, None, 0.1, False),
        lambda: operation(aten.layer_norm.default, 5 * real(2, 2, 3), [3], None, None, 1e-3, False),
        lambda: operation(aten.layer_norm.default, torch.zeros(1, 3).double(), [3], None, None, 0.1, False),
        lambda: operation(aten.layer_norm.default, _smallest_norm(2, 3, eps=0.1), [3], None, None, 0.1, False),
        lambda: operation(aten.layer_norm.default, real(3, 1), [1], None, None, 0.1, False),
        lambda: operation(aten.layer_norm.default, real(3, 2), [2], None, None, 0.1, False),
    ],
    "aten.rms_norm": [
        lambda: operation(aten.rms_norm.default, real(3, 4), [4], None, 0.1),
        lambda: operation(aten.rms_norm.default, 3 * real(2, 2, 2), [2], None, 1e-2),
        lambda: operation(aten.rms_norm.default, torch.zeros(1, 3).double(), [3], None, 0.1),
        lambda: operation(aten.rms_norm.default, _smallest_norm(2, 3, eps=0.1), [3], None, 0.1),
        lambda: operation(aten.rms_norm.default, real(3, 1), [1], None, 0.1),
    ],
    "aten.group_norm": [
        lambda: operation(aten.group_norm.default, real(2, 2, 3), 2, None, None, 0.1, False),
        lambda: operation(aten.group_norm.default, real(3, 4), 1, None, None, 0.1, False),
        lambda: operation(aten.group_norm.default, torch.zeros(1, 4).double(), 1, None, None, 0.1, False),
        lambda: operation(aten.group_norm.default, _smallest_norm(1, 4, eps=0.1), 1, None, None, 0.1, False),
    ],
    "aten.softmax": [
        lambda: operation(aten.softmax.int, real(3, 2), -1),
        lambda: operation(aten.softmax.int, 3 * real(3, 2), 0),
        lambda: operation(aten.softmax.int, real(2, 3, 2), 1),
        lambda: operation(aten.softmax.int, torch.zeros(2, 3).double(), 1),
        lambda: operation(aten.softmax.int, torch.zeros(1, 2).double(), 1),
        lambda: operation(aten.softmax.int, _moments(), 1),
        lambda: operation(aten.softmax.int, torch.tensor([[9.0, 0.0, 1.0]]).double(), 1),
        lambda: operation(aten.softmax.int, real(3, 1), 1),
        lambda: operation(aten.softmax.int, real(), 0),
    ],
    "aten._softmax": [
        lambda: operation(aten._softmax.default, torch.zeros(1, 2).double(), 1, False),
        lambda: operation(aten._softmax.default, _moments(), 1, False),
    ],
    "surefoot.masked_softmax": [
        lambda: _masked(real(2, 2, 2), None, True),
        lambda: _masked(real(3, 3), yes_or_no(3, 3) | torch.eye(3, dtype=torch.bool), False),
        lambda: _masked(real(1, 3, 3), Fixed(_forbidding(3, 3)), False),
        lambda: _masked(real(2, 2), torch.tensor([[False, False], [True, True]]), False),
        lambda: _masked(torch.zeros(2, 2).double(), None, True),
        lambda: _masked(torch.cat([_moments(), _moments()]), None, True),
        lambda: _masked(real(2, 3), real(2, 3, seed=1), False),
    ],
    "surefoot.finite_part": [lambda: operation(finite_part, real(3, 2), op="surefoot.finite_part")],
    "aten.log_softmax": [
        lambda: operation(aten.log_softmax.int, real(3, 4), 1),
        lambda: operation(aten.log_softmax.int, real(3, 2), 0),
        lambda: operation(aten.log_softmax.int, torch.zeros(2, 2).double(), 1),
        lambda: operation(aten.log_softmax.int, real(3, 1), 1),
        lambda: operation(aten.log_softmax.int, torch.tensor([[40.0, 0.0, 1.0]]).double(), 1),
    ],
    "aten._log_softmax": [lambda: operation(aten._log_softmax.default, torch.zeros(2, 2).double(), 1, False)],
    "aten.logsumexp": [
        lambda: operation(aten.logsumexp.default, real(3, 3), [1]),
        lambda: operation(aten.logsumexp.default, real(3, 2, 2), [0, 2], True),
        lambda: operation(aten.logsumexp.default, torch.zeros(2, 2).double(), [1]),
        lambda: operation(aten.logsumexp.default, real(3, 1), [1]),
    ],
    "aten.var": [
        lambda: operation(aten.var.default, real(3, 3)),
        lambda: operation(aten.var.dim, real(3, 2, 2), [1, 2], False),
        lambda: operation(aten.var.correction, real(3, 3), [0], correction=0, keepdim=True),
        lambda: operation(aten.var.correction, real(3, 4), [-1], correction=2),
    ],
    "aten.std": [
        lambda: operation(aten.std.correction, away(3, 4), [1]),
        lambda: operation(
            aten.std.dim, torch.tensor([[2.0, -2.0, 1.0, -1.0], [3.0, -3.0, 2.0, -2.0]]).double(), [1]
        ),
        lambda: operation(aten.std.default, torch.zeros(2, 2).double()),
    ],
    "aten.linalg_vector_norm": [
        lambda: operation(aten.linalg_vector_norm.default, away(3, 2), 2, [1]),
        lambda: operation(aten.linalg_vector_norm.default, real(3, 2)),
        lambda: operation(aten.linalg_vector_norm.default, away(3, 2), 2.0, [0], True),
        lambda: operation(aten.linalg_vector_norm.default, away(3, 1), 2.0, [1]),
        lambda: operation(aten.linalg_vector_norm.default, torch.zeros(2, 2).double(), 2, [1]),
    ],
    "surefoot.unit": [
        lambda: operation(unit, away(3, 2), [1], 1e-3, op="surefoot.unit"),
        lambda: operation(unit, away(2, 2, 2), [0, 2], 0.5, op="surefoot.unit"),
        lambda: operation(unit, away(2, 2), None, 0.0, op="surefoot.unit"),
        lambda: operation(unit, 0.1 * real(3, 2), [1], 1.0, op="surefoot.unit"),
    ],
    "aten._weight_norm": [
        lambda: operation(_weight_norm, away(2, 3), real(2, 1), 0, op="aten._weight_norm"),
        lambda: operation(_weight_norm, away(2, 2, 2), away(2, 1, 1), 0, op="aten._weight_norm"),
        lambda: operation(_weight_norm, away(3, 2), real(1, 2), 1, op="aten._weight_norm"),
        lambda: operation(_weight_norm, real(2, 2), real(2, 1), 0, op="aten._weight_norm"),
        lambda: operation(_weight_norm, away(2, 2), real(1, 1), -1, op="aten._weight_norm"),
    ],
}
