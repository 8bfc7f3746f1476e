"""Derivatives of minimisers are within their proved errors of the exact ones, judged with fifty digits."""

from __future__ import annotations

from functools import partial
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.calculus.adjoint.gradient import proved_gradient, push
from surefoot.calculus.analysis import Analysis
from surefoot.errors import UnsupportedOperation
from surefoot.implicit import ArgMin, Constants
from surefoot.implicit.proved import Minimum

D = torch.float64


class Shifted(nn.Module):
    """ζ = softplus(β) + cβ²/2 − (xu)β for each number; x and u are one number each per sample."""

    def __init__(self, c: float, odd: bool = False) -> None:
        super().__init__()
        self.c, self.odd, self.u = c, odd, nn.Parameter(torch.tensor([0.7], dtype=D))

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        value = (F.softplus(beta) + 0.5 * self.c * beta.square() - x * self.u * beta).sum()
        return value + torch.special.i0(torch.zeros_like(beta) * beta).sum() if self.odd else value


class Total(nn.Module):
    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.sum()


def exact(c: float, x: float, u: float) -> tuple[Any, Any]:
    """The minimiser and its derivative in u."""
    beta = mp.findroot(lambda b: 1 / (1 + mp.exp(-b)) + mp.mpf(c) * b - mp.mpf(x) * mp.mpf(u), mp.mpf(x) * u / c)
    s = 1 / (1 + mp.exp(-beta))
    return beta, mp.mpf(x) / (s * (1 - s) + mp.mpf(c))


@pytest.mark.parametrize("linear", ["cholesky", "cg"])
@pytest.mark.parametrize("c", [0.05, 1.0, 1e6])
def test_derivatives(c: float, linear: Any) -> None:
    layer = ArgMin(Shifted(c), 1, constants=Constants(strong_convexity=c), linear=linear)
    x = torch.tensor([[0.3], [-2.0], [5.0]], dtype=D)
    analysis = Analysis.of(layer, x, Total())
    found, result = proved_gradient(analysis), analysis.over(sf.Ball(0.0))
    (name,) = result.region.variables
    pushed = push(result, {name: torch.ones(1, dtype=D)}, result.outputs[0])
    assert pushed is not None
    with mp.workdps(50):
        truth = [exact(c, float(entry), 0.7) for entry in x]
        slope = sum(s for _, s in truth)
        error = mp.mpf(found.errors["zeta.u"])
        assert abs(mp.mpf(found.value) - sum(b for b, _ in truth)) <= float(
            result.enclosures[result.outputs[0]].error
        )
        assert abs(mp.mpf(float(found.slopes["zeta.u"])) - slope) <= error <= 1e-9 * abs(slope)
        assert abs(mp.mpf(float(pushed.value)) - slope) <= mp.mpf(float(pushed.error)) <= 1e-9 * abs(slope)


def test_the_least_curvature_is_a_lower_bound() -> None:
    layer = ArgMin(Shifted(0.1), 1, constants=Constants(strong_convexity=0.1))
    x, u = torch.tensor([[0.3], [-2.0]], dtype=D), layer.zeta.u.detach()
    minimum = Minimum.of(layer.problem(2), (x, u), layer(x).detach(), 0.1)
    assert minimum is not None
    with mp.workdps(50):
        logistic = [1 / (1 + mp.exp(-exact(0.1, float(entry), 0.7)[0])) for entry in x]
        least = min(s * (1 - s) for s in logistic) + mp.mpf(0.1)
        assert least - mp.mpf(1e-12) <= minimum.least_curvature() <= least


@pytest.mark.parametrize("constants", [Constants(1.0, 3.0, 1.0), Constants(1.0)], ids=["declared", "derived"])
def test_what_is_not_made_of_operations_with_rules_is_refused(constants: Constants) -> None:
    x = torch.tensor([[0.3]], dtype=D)
    plain, odd = (ArgMin(Shifted(1.0, odd), 1, constants=constants) for odd in (False, True))
    assert not sf.certify(plain, x, objective=Total(), domain=sf.Ball(0.1)).remarks
    with pytest.raises(UnsupportedOperation, match=r"cannot be proved.*'aten.special_i1'.*write ζ in operations"):
        sf.certify(odd, x, objective=Total(), domain=sf.Ball(0.1))
    with pytest.raises(UnsupportedOperation, match="cannot be proved"):
        sf.evaluate(odd, x, Total())


@pytest.mark.parametrize("constants", [Constants(1.0, 3.0, 1.0), Constants(1.0)], ids=["declared", "derived"])
def test_a_softplus_that_jumps_is_refused(constants: Constants) -> None:
    def zeta(x: torch.Tensor, beta: torch.Tensor, threshold: float) -> torch.Tensor:
        return torch.nn.functional.softplus(beta + x, threshold=threshold).sum() + 0.5 * beta.square().sum()

    x = torch.tensor([[-2.0]], dtype=D)
    for threshold in (20.0, 0.5):
        layer = ArgMin(partial(zeta, threshold=threshold), 1, constants=constants)
        if threshold == 20.0:
            assert sf.certify(layer, x, wrt="input", domain=sf.Ball(0.1)).smoothness.is_finite
        else:
            with pytest.raises(UnsupportedOperation, match="soft-plus jumps at its threshold"):
                sf.certify(layer, x, wrt="input", domain=sf.Ball(0.1))


def test_an_evaluation_knows_how_far_the_solver_is_off() -> None:
    x = torch.tensor([[0.3], [-2.0], [5.0]], dtype=D)
    layer = ArgMin(Shifted(1.0), 1, constants=Constants(1.0, 30.0, 1.0), tolerance=0.1)
    found = sf.evaluate(layer, x, Total())
    with mp.workdps(50):
        truth = sum(exact(1.0, float(entry), 0.7)[0] for entry in x)
        assert 1e-12 < abs(mp.mpf(found.value) - truth) <= found.error
