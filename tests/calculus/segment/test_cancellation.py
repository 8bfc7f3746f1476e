"""Taylor coefficients along a segment are within their errors where digits cancel: judged with sixty digits."""

from __future__ import annotations

import mpmath as mp
import pytest
import torch

from surefoot.operations.scalar_taylor import composed
from surefoot.scalar import ScalarFunction
from surefoot.taylor import TaylorModel

x = ScalarFunction.variable()
apply = ScalarFunction.apply
D = torch.float64
CASES = {
    "(tanh + 1e7) - 1e7": ((apply("tanh", x) + 1e7) - 1e7, mp.tanh),
    "tanhshrink": (ScalarFunction.named("tanhshrink"), lambda t: t - mp.tanh(t)),
    "exp - 1": (apply("exp", x) - 1.0, mp.expm1),
    "1 - tanh^2": (1.0 - apply("tanh", x) ** 2.0, lambda t: 1 / mp.cosh(t) ** 2),
    "log of exp": (apply("log", 1.0 + apply("exp", x)), lambda t: mp.log1p(mp.exp(t))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [1e-9, 1e-3, 0.5, 3.0, 19.0])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_model_contains_the_function(name: str, at: float, order: int) -> None:
    function, exact = CASES[name]
    slope, length = 1.0, 1e-6
    coefficients = (torch.tensor([[at]], dtype=D), torch.tensor([[slope]], dtype=D), *[None] * (order - 2))
    model = composed(function, TaylorModel(coefficients, length, None, rowwise=True))
    with mp.workdps(60):
        rest, *errors = (mp.mpf(bound) for bound in model.tail[0].tolist())
        for j in (0, 1):
            derivative = mp.diff(exact, mp.mpf(at), j, h=mp.mpf(10) ** -20)
            assert abs(derivative - mp.mpf(float(model.coefficients[j]))) <= errors[j] + mp.mpf(10) ** -35
        for part in (0.0, 0.1, 0.7, 1.0):
            eta = mp.mpf(part * length)
            terms = [mp.mpf(float(c)) * eta**j for j, c in enumerate(model.coefficients) if c is not None]
            off = abs(exact(mp.mpf(at) + eta * slope) - mp.fsum(terms))
            assert off <= rest * eta**order + sum(error * eta**j for j, error in enumerate(errors))
