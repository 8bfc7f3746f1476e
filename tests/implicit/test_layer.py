"""Values, derivatives and errors of layers that minimise, against exact minimisers; what is refused."""

from __future__ import annotations

from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev

import surefoot as sf
from implicit.inner_problems import CASES, MU, Case, RidgeOfSample, Shifted, Soft, numbers
from surefoot.errors import UnsupportedOperation
from surefoot.implicit import ArgMin, Constants, ImplicitError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at its first jvp
X = numbers(3, 2)


def value(layer: ArgMin, x: Tensor, a: Tensor) -> Tensor:
    return functional_call(layer, {"zeta.a": a}, (x,))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_derivatives_are_exact(case: Case) -> None:
    layer = ArgMin(case.zeta(), 3, batched=case.batched)
    x, a = case.x, layer.zeta.a.detach()
    weights = numbers(*layer(x).shape, seed=9)

    def mine(x: Tensor, a: Tensor) -> Tensor:
        return (value(layer, x, a).sin() * weights).sum()

    def theirs(x: Tensor, a: Tensor) -> Tensor:
        return (case.exact(x, a).sin() * weights).sum()

    def close(transform: Any) -> bool:
        pairs = zip(transform(mine)(x, a), transform(theirs)(x, a), strict=True)
        return all(torch.allclose(p, q, rtol=0, atol=1e-8) for p, q in pairs)

    assert torch.allclose(value(layer, x, a), case.exact(x, a), rtol=0, atol=1e-9)
    assert close(lambda f: grad(f, (0, 1)))
    assert close(lambda f: hessian(f, 0))
    assert close(lambda f: jacrev(jacrev(f, 1), 0))
    assert close(lambda f: jacfwd(jacfwd(f, 1), 1))
    several = torch.stack([a, 2 * a])
    expected = torch.stack([case.exact(x, other) for other in several])
    assert torch.allclose(torch.vmap(lambda other: value(layer, x, other))(several), expected, atol=1e-8)
    assert torch.allclose(layer.float()(x.float()).double(), case.exact(x, a), atol=1e-4)
    assert layer(x.float()).dtype == torch.float32


def test_as_many_derivatives_are_exact_as_asked_for() -> None:
    a, move, x = numbers(5, 3, seed=1), numbers(5, 3, seed=6), CASES["ridge per sample"].x[:1]
    zero = torch.zeros((), dtype=a.dtype)

    def third(function: Any) -> Tensor:
        return jacfwd(hessian(lambda t: function(x, a + t * move).sum()))(zero)

    exact = third(RidgeOfSample.solution)
    layers = [ArgMin(RidgeOfSample(), 3, order=order) for order in (2, 3)]
    two, three = (third(lambda x, a, layer=layer: value(layer, x, a)) for layer in layers)
    assert torch.allclose(three, exact, rtol=1e-8)
    assert not torch.allclose(two, exact, rtol=1e-3)


def test_minimisers_of_any_shape_several_inputs_and_a_start() -> None:
    layer = ArgMin(lambda x, w, beta: 0.5 * ((beta - x) ** 2).sum() + 0.5 * w * (beta**4).sum(), (2, 3))
    x, w = numbers(4, 2, 3), torch.rand(4, dtype=torch.float64)
    beta = layer(x, w)
    assert torch.allclose(beta - x + 2 * w[:, None, None] * beta**3, torch.zeros_like(x), atol=1e-9)
    assert layer.solution(x, w, start=beta).iterations < layer.solution(x, w).iterations / 2
    assert torch.allclose(layer(x, w, start=beta), beta)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("tolerance", [0.3, 1e-2])
def test_errors_of_inexact_solutions_are_bounded(order: int, tolerance: float) -> None:
    """Lemma approximplicitgrad for one correction, its refinement for two; both against a solution to 1e-13."""
    zeta = Soft()
    exact, rough = ArgMin(zeta, 3, tolerance=1e-13), ArgMin(zeta, 3, tolerance=tolerance, order=order)

    def jacobian(layer: ArgMin, x: Tensor) -> Tensor:
        parts = jacrev(lambda x, a: value(layer, x, a)[0], (0, 1))(x, zeta.a.detach())
        return torch.cat([part.reshape(3, -1) for part in parts], dim=1)

    for x in CASES["soft-plus"].x.split(1):
        solution = rough.solution(x)
        assert 0 < (solution.beta - exact(x).detach()).norm() <= solution.error_bound[0] <= 1.0
        wrong = torch.linalg.matrix_norm(jacobian(rough, x) - jacobian(exact, x), 2)
        assert 0 < wrong <= solution.gradient_error_bound[0]


def test_the_lemma_with_the_constants_of_the_paper() -> None:
    """One μ, L and H: the error of the derivative is H/μ (1 + L/μ) times the distance, which is ‖g‖/μ."""
    constants, x = Constants(MU, 5.0, 3.0), CASES["soft-plus"].x
    solution = ArgMin(Soft(), 3, constants=constants, tolerance=0.1, order=1).solution(x)
    factor = 3.0 / MU * (1 + 5.0 / MU)
    assert torch.allclose(solution.gradient_error_bound, factor * solution.error_bound, rtol=1e-9)
    assert torch.allclose(solution.error_bound, solution.residual / MU, rtol=1e-5)
    sharper = ArgMin(Soft(), 3, constants=constants, tolerance=1e-6).solution(x)
    assert bool((sharper.gradient_error_bound < 1e-3 * solution.gradient_error_bound).all())
    beyond = ArgMin(Soft(), 3, constants=Constants(MU, 5.0, 3e9), tolerance=0.1).solution(x)
    assert bool(beyond.gradient_error_bound.isinf().all())
    assert ArgMin(Soft(), 3, constants=Constants(MU)).solution(x).gradient_error_bound is None
    assert ArgMin(lambda x, beta: (beta - x).cosh().sum(), 3).solution(x).error_bound is None


@pytest.mark.parametrize("c", [0.05, 1.0, 1e6])
def test_errors_of_values_and_gradients_hold_with_fifty_digits(c: float) -> None:
    zeta, x = Shifted(c), torch.tensor([[0.3], [-2.0], [5.0]], dtype=torch.float64)
    # a layer that is not solved exactly, and one that is
    for tolerance, most in ((1e-12, 1e-9), (0.05, 10.0)):
        layer = ArgMin(zeta, 1, tolerance=tolerance)
        evaluation = sf.evaluate(layer, x, Total())
        certificate = sf.certify(layer, x, objective=Total(), domain=sf.Ball(0.1))
        with mp.workdps(50):
            total = sum(zeta.exact(float(entry))[0] for entry in x)
            slope = sum(zeta.exact(float(entry))[1] for entry in x)
            assert abs(mp.mpf(evaluation.value) - total) <= evaluation.error <= most * (1 + 1 / c)
            assert abs(slope) <= float(certificate.lipschitz)


class Total(nn.Module):
    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ArgMin(lambda x, b: -(b**2).sum() + (x * b).sum(), 2)(X), "its Hessian has eigenvalue -2"),
        (lambda: ArgMin(lambda x, b: (x * b).sum(), 2)(X), "not strongly convex: its Hessian has eigenvalue 0"),
        (lambda: ArgMin(lambda x, b: b.exp().sum(), 2, max_iterations=5)(X), "did not reach the tolerance"),
        (lambda: ArgMin(lambda x, b: (-b.sum()).exp() + (b[0] - b[1]) ** 2, 2)(X), "infimum lies at infinity"),
        (lambda: ArgMin(lambda x, b: (b.log() * x).sum(), 2)(X), "not finite at iteration 0"),
        (lambda: ArgMin(RidgeOfSample(2, 2), 2)(X.log()), r"not finite at iteration 0 \(row 0\)"),
        (lambda: ArgMin(lambda x, b: (b - x) ** 2, 2)(X), r"returned a tensor of shape \(2,\).*one sample"),
        (lambda: ArgMin(lambda x, w, b: ((b - x) ** 2).sum() * w.sum(), 2)(X, X[:2]), "same number of samples"),
        (lambda: ArgMin(RidgeOfSample(), 3)(), "without input"),
        (lambda: ArgMin(RidgeOfSample(), 3)(1.0), "of type float"),
        (lambda: ArgMin(RidgeOfSample(), 3)(X[:0]), "batch is empty"),
        (lambda: ArgMin(RidgeOfSample(), 3)(X, start=X), r"start has shape \(3, 2\)"),
        (lambda: ArgMin(lambda x, b: ((b - weight * x) ** 2).sum(), 2)(X), "asks for gradients and is neither"),
        (lambda: ArgMin(RidgeOfSample(), 3, tolerance=0.0), "tolerance is 0.0"),
        (lambda: ArgMin(RidgeOfSample(), 3, max_iterations=0), "max_iterations is 0"),
        (lambda: ArgMin(RidgeOfSample(), 3, order=0), "order is 0"),
        (lambda: ArgMin(RidgeOfSample(), 3, constants=1.0), "constants is 1.0"),
        (lambda: ArgMin(RidgeOfSample(), 0), "shape of a minimiser is 0"),
        (lambda: Constants(0.0), "strong convexity is 0.0"),
        (lambda: Constants(1.0, smoothness=2.0), "one was given"),
        (lambda: Constants(1.0, -2.0, 0.0), "constant is -2.0"),
        (lambda: Constants(1.0, {"x": 1.0}, {}).slope("y"), "no entry for 'y'"),
        (lambda: ArgMin(Soft(), 3, constants=Constants(9.0)).solution(numbers(4, 3)), "convexity of 9 was decl"),
        (lambda: sf.cost(nn.Sequential(nn.Linear(2, 3), ArgMin(Soft(), 3)).double(), X), "depends on the data"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ImplicitError, match=message):
        call()


weight = nn.Parameter(torch.ones(2, dtype=torch.float64))


def test_an_error_says_how_far_the_solver_came() -> None:
    with pytest.raises(ImplicitError, match=r"gradient norm reached: .*Raise max_iterations") as error:
        ArgMin(Soft(), 3, max_iterations=1)(numbers(4, 3))
    assert error.value.residual > 1e-6


@pytest.mark.parametrize(
    ("zeta", "constants", "message"),
    [
        (lambda x, b: (b - x).square().sum(), None, r"'surefoot.argmin' in module '1'.*Pass constants"),
        (lambda x, b: (b - x).square().sum(), Constants(2.0), r"Pass constants=sf.implicit.Constants"),
        (
            lambda x, b: b.square().sum() + torch.special.i0(0 * b).sum() - (x * b).sum(),
            Constants(1.0, 3.0, 1.0),
            r"cannot be proved.*'aten.special_i1'.*write ζ in operations",
        ),
        (
            lambda x, b: nn.functional.softplus(b + x, threshold=0.5).sum() + b.square().sum(),
            Constants(1.0, 3.0, 1.0),
            "soft-plus jumps at its threshold",
        ),
    ],
)
def test_what_cannot_be_certified(zeta: Any, constants: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), ArgMin(zeta, 2, constants=constants)).double()
    with pytest.raises(UnsupportedOperation, match=message):
        sf.certify(model, X, domain=sf.Ball(0.1))
    with pytest.raises(UnsupportedOperation, match=message):
        sf.evaluate(model, X, Total())
