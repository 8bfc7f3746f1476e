"""Inner problems that have no solution, and layers that are not posed as they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit.inner_problems import RidgeOfSample, numbers
from surefoot.implicit import ArgMin, Constants, Energy, ImplicitError

X = numbers(3, 2)


@pytest.mark.parametrize(
    ("zeta", "options", "message"),
    [
        (lambda x, b: -(b**2).sum() + (x * b).sum(), {}, r"not strongly convex: its Hessian has eigenvalue -2"),
        (lambda x, b: -(b**2).sum() + (x * b).sum(), {"linear": "cg"}, "not strongly convex"),
        (lambda x, b: (x * b).sum(), {}, "not strongly convex: its Hessian has eigenvalue 0"),
        (lambda x, b: (x * b).sum(), {"solver": "gradient", "max_iterations": 50}, "did not reach the tolerance"),
        (lambda x, b: torch.exp(b).sum(), {"max_iterations": 5}, "did not reach the tolerance"),
        (lambda x, b: torch.exp(-b.sum()) + (b[0] - b[1]) ** 2, {}, "the infimum lies at infinity"),
        (lambda x, b: (b.log() * x).sum(), {}, "not finite at iteration 0"),
        (lambda x, b: b.square().sum() + torch.sqrt(b - 1).sum(), {"solver": "gradient"}, "not finite"),
    ],
)
def test_problems_without_a_solution(zeta: Any, options: dict[str, Any], message: str) -> None:
    layer = ArgMin(zeta, 2, **options)
    with pytest.raises(ImplicitError, match=message):
        layer(X)


def test_the_error_carries_the_residual_and_the_model_is_untouched() -> None:
    zeta = RidgeOfSample(2, 2)
    before = zeta.a.detach().clone()
    layer = ArgMin(zeta, 2, solver="gradient", max_iterations=2)
    with pytest.raises(ImplicitError, match=r"gradient norm reached: .*Raise max_iterations") as caught:
        layer(X)
    gradient = caught.value.residual
    assert gradient is not None
    assert gradient > 1e-6
    assert torch.equal(zeta.a.detach(), before)
    assert zeta.a.grad is None


def test_nan_input() -> None:
    with pytest.raises(ImplicitError, match=r"not finite at iteration 0 \(row 1\)"):
        ArgMin(RidgeOfSample(2, 2), 2)(torch.where(torch.arange(3)[:, None] == 1, torch.nan, X))


def test_a_value_that_is_no_number() -> None:
    with pytest.raises(ImplicitError, match=r"returned a tensor of shape \(2,\), not one number.*one sample"):
        ArgMin(lambda x, b: (b - x) ** 2, 2)(X)


def test_inputs_that_do_not_fit() -> None:
    layer = ArgMin(lambda x, w, b: ((b - x) ** 2).sum() * w.sum(), 2)
    with pytest.raises(ImplicitError, match="same number of samples"):
        layer(X, X[:2])
    with pytest.raises(ImplicitError, match="without input"):
        layer()
    with pytest.raises(ImplicitError, match="of type float"):
        layer(X, 1.0)
    with pytest.raises(ImplicitError, match="batch is empty"):
        layer(X[:0], X[:0])
    with pytest.raises(ImplicitError, match=r"start has shape \(2,\)"):
        layer(X, X, start=torch.zeros(2))


def test_parameters_that_would_get_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def zeta(x: Tensor, beta: Tensor) -> Tensor:
        return ((beta - weight * x) ** 2).sum()

    with pytest.raises(ImplicitError, match="asks for gradients and is neither its input nor its parameter"):
        ArgMin(zeta, 2)(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "lbfgs"}, "solver is 'lbfgs'"),
        ({"linear": "lu"}, "linear is 'lu'"),
        ({"differentiate": "no"}, "differentiate is 'no'"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"max_iterations": 0}, "max_iterations is 0"),
        ({"order": 0}, "order is 0"),
        ({"constants": 1.0}, "constants is 1.0"),
        ({"shape": 0}, "shape of a minimiser is 0"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImplicitError, match=message):
        ArgMin(RidgeOfSample(), **{"shape": 3, **options})


def test_constants_that_cannot_be() -> None:
    for arguments, message in (
        ({"strong_convexity": 0.0}, "strong convexity is 0.0"),
        ({"strong_convexity": 1.0, "smoothness": 2.0}, "one was given"),
        ({"strong_convexity": 1.0, "smoothness": -2.0, "hessian_lipschitz": 0.0}, "constant is -2.0"),
    ):
        with pytest.raises(ImplicitError, match=message):
            Constants(**arguments)
    with pytest.raises(ImplicitError, match="no entry for 'y'"):
        Constants(1.0, {"x": 1.0}, {}).slope("y")
    with pytest.raises(ImplicitError, match="potential is 'cube'"):
        Energy(2, 2, potential="cube")  # type: ignore[arg-type]
    layer = ArgMin(RidgeOfSample(2, 2), 2, constants=Constants(100.0))
    with pytest.raises(ImplicitError, match="strong convexity of 100 was declared"):
        layer.solution(X)
