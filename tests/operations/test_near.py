"""Quadratic models of operations have the first two derivatives they should, up to their proved errors."""

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
from surefoot.calculus.analysis import Analysis
from surefoot.objectives import BinaryCrossEntropy, Huber
from surefoot.operations.call import Call
from surefoot.operations.record import record_of

D = torch.float64


class Of(nn.Module):
    """A function of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        super().__init__()
        self.function, self.x = function, nn.Parameter(x)

    def forward(self, factor: Tensor) -> Tensor:
        return self.function(self.x * factor)


LABELS = torch.tensor([0, 2, 1, 1])
CASES: dict[str, tuple[Callable[[Tensor], Tensor], sf.objectives.Objective | None]] = {
    "soft-max": (lambda x: F.softmax(x, -1), None),
    "layer": (lambda x: F.layer_norm(x, (3,), None, None, 1e-5), None),
    "root": (lambda x: F.rms_norm(x, (3,), None, 1e-5), None),
    "group": (lambda x: F.group_norm(x, 1, None, None, 1e-5), None),
    "logarithm": (lambda x: F.log_softmax(x, -1), None),
    "sum of exponentials": (lambda x: torch.logsumexp(x, (1,)), None),
    "length": (lambda x: torch.linalg.vector_norm(x, dim=1), None),
    "direction": (lambda x: F.normalize(x, dim=1), None),
    "variance": (lambda x: x.var(dim=1, unbiased=False), None),
    "deviation": (lambda x: x.std(dim=1, keepdim=True), None),
    "entropy": (lambda x: x, sf.CrossEntropy(LABELS)),
    "square": (lambda x: x, sf.Square(torch.ones(4, 3, dtype=D))),
    "logistic": (lambda x: x, BinaryCrossEntropy(torch.ones(4, 3, dtype=D))),
    "huber": (lambda x: x, Huber(torch.ones(4, 3, dtype=D), delta=0.7)),
}


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (0.0, 20.0), (1e5, 1.0), (0.0, 1e-6)])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_at_the_centre(name: str, mean: float, spread: float) -> None:
    torch.manual_seed(5)
    function, objective = CASES[name]
    x, one = mean + spread * torch.randn(4, 3, dtype=D), torch.ones((), dtype=D)
    model = Of(function, x)
    result = Analysis.of(model, one, objective if objective is not None else Total()).over(sf.Ball(0.0))
    step = next(s for s in result.steps if record_of(s.node).near is not None)
    move = torch.zeros(4, 3, dtype=D, requires_grad=True)
    near = record_of(step.node).near(Call(step.node, result.enclosures), move)
    weights = torch.randn(near.change.shape, dtype=D)
    direction = torch.randn(4, 3, dtype=D)
    (slope,) = torch.autograd.grad((near.change * weights).sum(), move, create_graph=True)
    (bent,) = torch.autograd.grad((slope * direction).sum(), move)

    def judged() -> Tensor:
        return function(model.x) if objective is None else objective(model.x)

    with flint.ctx.workprec(200):
        listed = weights.reshape(-1).tolist()
        fact = truth(judged, model, {model.x: stored(model.x)}, {model.x: direction}, listed)
        for computed, exact, bound in (
            (slope, fact.gradient, near.first),
            (bent, fact.bent, near.second * float(direction.norm())),
        ):
            wrong = [e - exactly(c) for c, e in zip(computed.reshape(-1).tolist(), exact, strict=True)]
            size = sum((w * w for w in wrong), flint.arb(0)).sqrt()
            assert size <= flint.arb(bound * float(weights.norm()) * (1 + 1e-9))


class Total(nn.Module):
    """The sum of all outputs."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.sum()
