"""Formulas that pull costates back, or push tangents forward, are within their proved errors of the exact ones,
judged with 200 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import flint
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from judges.exact import stored, truth
from judges.exact_numbers import exactly
from surefoot.calculus.adjoint.gradient import proved_gradient, push
from surefoot.calculus.analysis import Analysis
from surefoot.magnitude import Magnitude
from surefoot.operations.pushing import Pushed

D = torch.float64


class Applied(nn.Module):
    """A function of parameters, weighed by the batch."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.of = nn.ParameterList([nn.Parameter(p) for p in parameters])

    def forward(self, weights: Tensor) -> Tensor:
        return (weights * self.function(*self.of)).sum()


def groups(mean: float, spread: float = 1.0, *shape: int) -> Tensor:
    return mean + spread * torch.randn(*(shape or (2, 4, 3)), dtype=D)


def fixed(x: Tensor) -> Tensor:
    statistics = torch.arange(1.0, 5.0, dtype=D)
    return F.batch_norm(x, statistics, statistics / 3, None, None, False, 0.0, 1e-3)


NORMALISATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "layer": lambda x, eps: F.layer_norm(x, (4, 3), None, None, eps),
    "root": lambda x, eps: F.rms_norm(x, (3,), None, eps),
    "group": lambda x, eps: F.group_norm(x, 2, None, None, eps),
    "batch": lambda x, eps: F.batch_norm(x, None, None, None, None, True, 0.0, eps),
    "instance": lambda x, eps: F.instance_norm(x, None, None, None, None, True, 0.0, eps),
    "fixed": lambda x, eps: fixed(x),
}
OTHERS: dict[str, Callable[..., Tensor]] = {
    "length": lambda x: torch.linalg.vector_norm(x, dim=(0, 2)),
    "by tensor": lambda x, y: x / y,
    "copied": lambda x, y: x[:, :1] / y[:1],
    "variance": lambda x: x.var(dim=(1, 2), unbiased=False),
    "deviation": lambda x: x.std(dim=1, keepdim=True),
    "direction": lambda x: F.normalize(x, dim=1),
    "weight norm": lambda v, g: torch._weight_norm(v, g[:, :1, :1], 0),
    "prelu": lambda x, w: F.prelu(x, w[0, :, 0]),
    "one prelu": lambda x, w: F.prelu(x, w[0, 0, :1]),
    "pool": lambda x: F.max_pool1d(x, 2, 1, 1),
    "adaptive": lambda x: F.adaptive_max_pool1d(x, 2),
    "squares": lambda x: F.max_pool2d(x.reshape(1, 2, 4, 3), 2, 1, padding=1, ceil_mode=True),
    "logarithm": lambda x: F.log_softmax(x, 1),
    "sum of exponentials": lambda x: torch.logsumexp(x, (0, 2)),
    "product": lambda x, y: x @ y[0].mT,
}
EXPONENTIAL = ("logarithm", "sum of exponentials")


def larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a, b)


def pooled(x: Tensor) -> Tensor:
    """Along the last dimension, in windows of two with one entry of padding."""
    return torch.cat([x[..., :1], larger(x[..., 1:], x[..., :-1]), x[..., -1:]], -1)


# The same in operations that the judge has rules for.
WRITTEN: dict[str, Callable[..., Tensor]] = {
    "prelu": lambda x, w: torch.where(x > 0, x, w[:1, :, :1] * x),
    "one prelu": lambda x, w: torch.where(x > 0, x, w[0, 0, :1] * x),
    "pool": pooled,
    "adaptive": lambda x: larger(x[..., 1:], x[..., :-1]),
    "squares": lambda x: pooled(pooled(x.reshape(1, 2, 4, 3)).transpose(2, 3)).transpose(2, 3),
    "weight norm": lambda v, g: g[:, :1, :1] * v / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True),
    "direction": lambda x: x / torch.linalg.vector_norm(x, dim=1, keepdim=True),
}


def within(
    function: Callable[..., Tensor],
    *parameters: Tensor,
    sharp: float,
    written: Callable[..., Tensor] | None = None,
) -> None:
    """Gradients are off by no more than is proved, and that is a small part of what they are made of."""
    torch.manual_seed(7)
    model = Applied(function, *parameters)
    with torch.no_grad():
        weights = torch.randn_like(function(*parameters))
    analysis = Analysis.of(model, weights)
    proved, result = proved_gradient(analysis), analysis.over(sf.Ball(0.0))
    names = {leaf.path: leaf.name for leaf in analysis.reading.graph.parameters}
    moves = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    pushed = push(result, {names[path]: move for path, move in moves.items()}, result.outputs[0])
    if any(isinstance(step.node.spec, tuple) for step in result.steps):
        assert pushed is None
        pushed = Pushed(torch.zeros(()), Magnitude.infinity())
    along, products = -exactly(float(pushed.value)), 0.0
    with flint.ctx.workprec(200):
        judged = Applied(written or function, *parameters)
        exact = iter(truth(lambda: judged(weights), judged, {p: stored(p) for p in judged.parameters()}).gradient)
        for name, _ in model.named_parameters():
            gradient = [next(exact) for _ in range(moves[name].numel())]
            steps = [exactly(m) for m in moves[name].reshape(-1).tolist()]
            along += sum((g * m for g, m in zip(gradient, steps, strict=True)), flint.arb(0))
            products += float(proved.slopes[name].norm() * moves[name].norm())
            wrong = [
                g - exactly(c) for g, c in zip(gradient, proved.slopes[name].reshape(-1).tolist(), strict=True)
            ]
            size = sum((w * w for w in wrong), flint.arb(0)).sqrt()
            assert size <= flint.arb(proved.errors[name]), name
            assert proved.errors[name] <= sharp * float(proved.slopes[name].norm()) + 1e-300, name
        assert abs(along) <= flint.arb(float(pushed.error))
        assert pushed.error <= sharp * products + 1e-300 or not pushed.error.is_finite


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1.0])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1e3, 1.0), (1e7, 1.0), (1.0, 1e-9), (0.0, 1e100)])
@pytest.mark.parametrize("name", NORMALISATIONS)
def test_normalisations(name: str, mean: float, spread: float, eps: float) -> None:
    torch.manual_seed(1)
    x = groups(mean, spread)
    within(lambda t: NORMALISATIONS[name](t, eps), x, sharp=1e-6)


@pytest.mark.parametrize("spread", [1.0, 1e-9, 1e150])
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, spread: float) -> None:
    torch.manual_seed(2)
    spread = min(spread, 30.0) if name in EXPONENTIAL else spread  # beyond, exponentials leave the judge's range
    pair = groups(0.1 * spread, spread), groups(3.0, 0.1)
    function = OTHERS[name]
    count = function.__code__.co_argcount
    within(function, *pair[:count], sharp=1e-9, written=WRITTEN.get(name))


@pytest.mark.parametrize("name", ["length", "deviation", "direction", "weight norm"])
def test_a_group_of_zeros_does_not_spoil_the_others(name: str) -> None:
    torch.manual_seed(3)
    x, y = groups(0.0), groups(3.0)
    x[:, 0], x[0] = 0.0, 0.0
    function = OTHERS[name]
    parameters = (x, y)[: function.__code__.co_argcount]
    model = Applied(function, *parameters)
    with torch.no_grad():
        weights = torch.randn_like(function(*parameters)).nan_to_num(0.0)
    proved = proved_gradient(Analysis.of(model, weights))
    assert all(bool(torch.isfinite(slope).all()) for slope in proved.slopes.values())


def adjugate(a: Tensor) -> tuple[Tensor, Tensor]:
    """Of matrices of two rows, in operations that the judge has rules for: the inverse and the determinant."""
    p, q, r, s = (a[..., i, j] for i in range(2) for j in range(2))
    determinant = p * s - q * r
    rows = torch.stack([torch.stack([s, -q], -1), torch.stack([-r, p], -1)], -2)
    return rows / determinant[..., None, None], determinant


SQUARE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "inverse": (torch.linalg.inv, lambda a: adjugate(a)[0]),
    "flagged inverse": (lambda a: torch.linalg.inv_ex(a)[0], lambda a: adjugate(a)[0]),
    "solution": (lambda a: torch.linalg.solve(a, 1 + a[..., :1]), lambda a: adjugate(a)[0] @ (1 + a[..., :1])),
    "logarithm of the determinant": (torch.logdet, lambda a: adjugate(a)[1].log()),
}


@pytest.mark.parametrize("near", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("name", SQUARE)
def test_inverses(name: str, near: float) -> None:
    """Of matrices that are near to singular ones."""
    torch.manual_seed(3)
    function, written = SQUARE[name]
    turned = torch.linalg.qr(torch.randn(3, 2, 2, dtype=D))[0]
    a = turned @ torch.diag(torch.tensor([1.0, near], dtype=D)) @ turned.mT
    within(function, a, sharp=1e-11 / near**2, written=written)
