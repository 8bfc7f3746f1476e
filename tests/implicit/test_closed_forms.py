"""Ridge regression as a layer, against its closed form: values, gradients and Hessians."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev

from implicit.inner_problems import RidgeOfBatch, RidgeOfSample, numbers
from surefoot.implicit import ArgMin

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at its first jvp
OPTIONS = [
    {"solver": solver, "linear": linear, "differentiate": differentiate, "tolerance": 1e-12}
    for solver, linear, differentiate in itertools.product(
        ("newton", "gradient"), ("cholesky", "cg"), ("implicit", "unroll")
    )
    if linear == "cholesky" or (solver, differentiate) == ("newton", "implicit")
]
X, A = numbers(4, 5), numbers(5, 3, seed=1)
WEIGHTS = numbers(4, 3, seed=9)


def layer_value(layer: ArgMin, x: Tensor, a: Tensor) -> Tensor:
    return functional_call(layer, {"zeta.a": a}, (x,))


def close(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return all(torch.allclose(a, b, rtol=0, atol=1e-8) for a, b in pairs)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, list(o.values())[:3])))
def test_one_minimiser_per_sample(options: dict[str, Any]) -> None:
    layer = ArgMin(RidgeOfSample(), 3, **options)

    def mine(x: Tensor, a: Tensor) -> Tensor:
        return (layer_value(layer, x, a).sin() * WEIGHTS).sum()

    def theirs(x: Tensor, a: Tensor) -> Tensor:
        return (RidgeOfSample.solution(x, a).sin() * WEIGHTS).sum()

    assert close(layer_value(layer, X, A), RidgeOfSample.solution(X, A))
    assert close(grad(mine, (0, 1))(X, A), grad(theirs, (0, 1))(X, A))
    if options["solver"] == "gradient" and options["differentiate"] == "unroll":
        return  # hundreds of iterations: their second derivatives take long
    for k in (0, 1):
        assert close(hessian(mine, k)(X, A), hessian(theirs, k)(X, A))
    assert close(jacrev(jacrev(mine, 0), 1)(X, A), jacrev(jacrev(theirs, 0), 1)(X, A))
    assert close(jacfwd(jacfwd(mine, 1), 1)(X, A), hessian(theirs, 1)(X, A))


@pytest.mark.parametrize("options", OPTIONS[:3], ids=lambda o: "-".join(map(str, list(o.values())[:3])))
def test_one_minimiser_of_the_batch(options: dict[str, Any]) -> None:
    zeta = RidgeOfBatch()
    layer = ArgMin(zeta, 3, batched=False, **options)
    x, scale, weights = numbers(6, 3), zeta.scale.detach(), numbers(3)

    def mine(x: Tensor, scale: Tensor) -> Tensor:
        return (functional_call(layer, {"zeta.scale": scale}, (x,)).sin() * weights).sum()

    def theirs(x: Tensor, scale: Tensor) -> Tensor:
        return (RidgeOfBatch.solution(x, scale, zeta.y).sin() * weights).sum()

    assert layer(x).shape == (3,)
    assert close(layer(x).detach(), RidgeOfBatch.solution(x, scale, zeta.y))
    assert close(grad(mine, (0, 1))(x, scale), grad(theirs, (0, 1))(x, scale))
    for k in (0, 1):
        assert close(hessian(mine, k)(x, scale), hessian(theirs, k)(x, scale))


def test_double_backward_of_plain_autograd() -> None:
    layer = ArgMin(RidgeOfSample(), 3)
    a = A.clone().requires_grad_()
    found = []
    for function in (lambda: layer_value(layer, X, a), lambda: RidgeOfSample.solution(X, a)):
        (slope,) = torch.autograd.grad((function().sin() * WEIGHTS).sum(), a, create_graph=True)
        (second,) = torch.autograd.grad((slope * A.cos()).sum(), a)
        found.append((slope.detach(), second))
    assert close(found[0], found[1])


def test_third_derivatives_with_a_third_correction() -> None:
    """Exact up to the order that is asked for, and not beyond."""

    def third(order: int) -> Tensor:
        layer = ArgMin(RidgeOfSample(), 3, order=order)
        return jacfwd(hessian(lambda t: layer_value(layer, X[:1], A + t * B).sum()))(
            torch.zeros((), dtype=A.dtype)
        )

    B = numbers(5, 3, seed=6)
    exact = jacfwd(hessian(lambda t: RidgeOfSample.solution(X[:1], A + t * B).sum()))(
        torch.zeros((), dtype=A.dtype)
    )
    assert torch.allclose(third(3), exact, rtol=1e-8)
    assert not torch.allclose(third(2), exact, rtol=1e-3)


def test_minimisers_of_any_shape_and_several_inputs() -> None:
    layer = ArgMin(lambda x, w, beta: 0.5 * ((beta - x) ** 2).sum() + 0.5 * w * (beta**2).sum(), (2, 3))
    x, w = numbers(4, 2, 3), torch.rand(4, dtype=torch.float64)
    assert close(layer(x, w), x / (1 + w)[:, None, None])


def test_vmap_over_parameters_and_over_inputs() -> None:
    layer = ArgMin(RidgeOfSample(), 3)
    several = torch.stack([A, 2 * A])
    expected = torch.stack([RidgeOfSample.solution(X, a) for a in several])
    assert close(torch.vmap(lambda a: layer_value(layer, X, a))(several), expected)
    slopes = torch.vmap(grad(lambda x, a: layer_value(layer, x[None], a).sum(), 1), (0, None))(X, A)
    judged = torch.vmap(grad(lambda x, a: RidgeOfSample.solution(x[None], a).sum(), 1), (0, None))(X, A)
    assert close(slopes, judged)


def test_single_precision_stays_single() -> None:
    layer = ArgMin(RidgeOfSample().float(), 3)
    found = layer(X.float())
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), RidgeOfSample.solution(X, A), atol=1e-5)


def test_a_start_changes_the_work_and_not_the_result() -> None:
    layer = ArgMin(RidgeOfSample(), 3, solver="gradient")
    solution = layer.solution(X)
    again = layer.solution(X, start=solution.beta)
    assert again.iterations < solution.iterations / 2
    assert close(layer(X, start=solution.beta), layer(X))
