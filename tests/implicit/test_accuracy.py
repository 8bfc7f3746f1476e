"""Problems without a closed form, against SciPy and finite differences; what is proved about inexact solutions."""

from __future__ import annotations

import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacrev

from implicit.inner_problems import MU, Logistic, central_hessian, numbers
from surefoot.implicit import ArgMin, Constants

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
X = numbers(3, 4)


def test_values_are_those_of_scipy() -> None:
    zeta = Logistic()
    found = ArgMin(zeta, 3)(X).detach()
    for row, x in zip(found, X, strict=True):

        def value(beta: object, x: Tensor = x) -> tuple[float, object]:
            point = torch.as_tensor(beta).requires_grad_()
            loss = zeta(x, point)
            return float(loss.detach()), torch.autograd.grad(loss, point)[0].numpy()

        judge = scipy.optimize.minimize(value, torch.zeros(3).double().numpy(), jac=True, tol=1e-13)
        assert torch.allclose(row, torch.as_tensor(judge.x), atol=1e-6)


@pytest.mark.parametrize(
    ("solver", "linear"), [("newton", "cholesky"), ("newton", "cg"), ("gradient", "cholesky")]
)
def test_derivatives_are_those_of_differences(solver: str, linear: str) -> None:
    layer = ArgMin(Logistic(), 3, solver=solver, linear=linear, tolerance=1e-13)
    a, weights = layer.zeta.a.detach(), numbers(3, 3)

    def loss(x: Tensor, a: Tensor) -> Tensor:
        return (functional_call(layer, {"zeta.a": a}, (x,)).exp() * weights[: len(x)]).sum()

    move = 1e-5 * numbers(4, 3, seed=5)
    slope = (loss(X, a + move) - loss(X, a - move)) / 2e-5
    assert torch.allclose((grad(loss, 1)(X, a) * move).sum() / 1e-5, slope, atol=1e-8)

    def values(points: Tensor) -> Tensor:
        """At many inputs at once."""
        return layer(points).detach().exp() @ weights[0]

    found = hessian(lambda x: loss(x[None], a))(X[0])
    assert torch.allclose(found, central_hessian(values, X[0], 1e-3), atol=1e-6)


@pytest.mark.parametrize("solver", ["newton", "gradient"])
def test_unrolled_and_implicit_derivatives_agree(solver: str) -> None:
    zeta, found = Logistic(), []
    zeta.a.data *= 0.5
    for differentiate in ("implicit", "unroll"):
        layer = ArgMin(zeta, 3, solver=solver, differentiate=differentiate, tolerance=1e-12)

        def loss(a: Tensor, layer: ArgMin = layer) -> Tensor:
            return functional_call(layer, {"zeta.a": a}, (X,)).exp().sum()

        found.append((grad(loss)(zeta.a.detach()), hessian(loss)(zeta.a.detach())))
    for implicit, unrolled in zip(*found, strict=True):
        assert torch.allclose(implicit, unrolled, atol=1e-7)


def constants(zeta: Logistic, x: Tensor) -> Constants:
    r"""Of one sample with ζ = Σ s(x_k a_k·β) + …, s = softplus, s' ≤ 1, s'' ≤ 1/4, |s'''| ≤ 1/10, over ‖β‖ ≤ 2.

    With t_k = x_k a_k·β, g = Σ s'(t_k)x_k a_k + μβ. In β: ∂g = Σ s''x_k²a_ka_kᵀ, in x_k: a_k(s' + s''t_k), in a_k:
    x_k(s'I + s''x_k a_kβᵀ); one more derivative in β adds a factor x_k a_k, and one of s.
    """
    a, beta = zeta.a.detach(), 2.0
    size = x.abs() * a.norm(dim=1)
    own = float((size**3).sum()) / 10
    by_x = float((a.norm(dim=1) * (size * 0.5 + size**2 * beta / 10)).norm())
    by_a = float((x.abs() * (size * 0.5 + 0.1 * size**2 * beta + 0.25 * size)).norm())
    slopes = {
        "x": float((a.norm(dim=1) * (1 + 0.25 * size * beta)).norm()),
        "a": float((x.abs() * (1 + 0.25 * size * beta)).norm()),
        "beta": float((size**2).sum()) / 4 + MU,
    }
    return Constants(MU, slopes, {("beta", "beta"): own, ("x", "beta"): by_x, ("a", "beta"): by_a})


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
def test_errors_of_inexact_solutions_are_bounded(order: int, tolerance: float) -> None:
    """Lemma approximplicitgrad for one correction, its refinement for two; both against a solution to 1e-13."""
    zeta = Logistic()
    for k in range(len(X)):
        x = X[k : k + 1]
        known = constants(zeta, x[0])
        rough = ArgMin(zeta, 3, solver="gradient", constants=known, tolerance=tolerance, order=order)
        exact = ArgMin(zeta, 3, tolerance=1e-13)
        solution = rough.solution(x)
        assert solution.error_bound is not None
        assert solution.gradient_error_bound is not None
        distance = (solution.beta - exact(x).detach()).norm()
        assert 0 < distance <= solution.error_bound[0] <= 1.0

        def jacobian(layer: ArgMin, x: Tensor = x) -> Tensor:
            found = jacrev(lambda x, a: functional_call(layer, {"zeta.a": a}, (x,))[0], (0, 1))(x, zeta.a.detach())
            return torch.cat([part.reshape(3, -1) for part in found], dim=1)

        wrong = torch.linalg.matrix_norm(jacobian(rough) - jacobian(exact), 2)
        assert 0 < wrong <= solution.gradient_error_bound[0]


def test_the_lemma_with_the_constants_of_the_paper() -> None:
    """One μ, L and H: the bound is H/μ (1 + L/μ) times that of the distance."""
    layer = ArgMin(Logistic(), 3, constants=Constants(MU, 5.0, 3.0), tolerance=1e-2, solver="gradient", order=1)
    solution = layer.solution(X)
    factor = 3.0 / MU * (1 + 5.0 / MU)
    assert torch.allclose(solution.gradient_error_bound, factor * solution.error_bound, rtol=1e-9)
    assert torch.allclose(solution.error_bound, solution.residual / MU, rtol=1e-5)
    sharper = ArgMin(Logistic(), 3, constants=Constants(MU, 5.0, 3.0), tolerance=1e-6, solver="gradient")
    assert bool((sharper.solution(X).gradient_error_bound < 1e-3 * solution.gradient_error_bound).all())


def test_without_constants_nothing_is_promised() -> None:
    solution = ArgMin(Logistic(), 3).solution(X)
    assert solution.error_bound is None
    assert solution.gradient_error_bound is None
    assert "solved in" in solution.status
    declared = ArgMin(Logistic(), 3, constants=Constants(MU)).solution(X)
    assert declared.error_bound is not None
    assert declared.gradient_error_bound is None
