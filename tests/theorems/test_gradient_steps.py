"""Momentum, random batches and step sizes per block: no run breaks what is promised."""

from __future__ import annotations

import itertools
import math

import flint
import pytest
import torch
from flint import arb, arb_mat
from torch import Tensor, nn

import surefoot as sf
from judges.exact import stored
from surefoot.calculus.analysis import Analysis
from surefoot.guarantees import GuaranteeError
from surefoot.norms.verified import largest_eigenvalue, smallest_eigenvalue
from surefoot.theorems import (
    DampedGaussNewton,
    FastHeavyBall,
    GradientDescent,
    HeavyBall,
    Profile,
    StochasticDescent,
)
from surefoot.theorems.bending import Here, bending, layered_bending
from surefoot.theorems.layered import read_layers
from surefoot.theorems.linear import jacobian_rows
from surefoot.theorems.pieces import Pieces
from theorems.small_networks import BITS, Exact, data, distance, linearised, middle, perceptron, square, trained

_HAIR = arb(1 + 2.0**-40)


def nearly_solved(scale: float, count: int = 3) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network whose residual is about this."""
    model = perceptron(2, 40, 1)
    x, y = data(count, 2, 1)
    trained(model, x, y, 3)
    return model, x, model(x).detach() + scale * y


@pytest.mark.parametrize(("scale", "kind"), [(0.005, HeavyBall), (1e-6, FastHeavyBall)])
def test_the_heavy_ball_keeps_its_promise(scale: float, kind: type) -> None:
    model, x, y = nearly_solved(scale)
    verdict = sf.convergence(model, x, sf.Square(y), method="momentum")
    assert verdict.proved, str(verdict)
    statement = verdict.statement
    assert isinstance(statement, kind)
    assert isinstance(statement, HeavyBall | FastHeavyBall)
    assert verdict.step_size is not None
    assert verdict.momentum is not None
    factor = statement.excess if isinstance(statement, FastHeavyBall) else 1.0
    exact = Exact(model, square(model, x, y))
    with flint.ctx.workprec(BITS):
        start = u = exact.start()
        moved = [arb(0)] * len(u)
        (first,) = exact.values(u)
        for k in range(1, 13):
            slope = exact.gradient(u)
            step, beta = arb(verdict.step_size), arb(verdict.momentum)
            moved = middle([beta * d - step * g for d, g in zip(moved, slope, strict=True)])
            u = middle([a + d for a, d in zip(u, moved, strict=True)])
            (value,) = exact.values(u)
            assert value <= arb(factor) * first * arb(statement.rate) ** k * _HAIR
            assert distance(start, u) <= arb(statement.radius)
    assert verdict.iterations(1e-30) > verdict.iterations(1e-20) > 0


@pytest.mark.parametrize("scale", [0.02, 1e-5])
def test_damped_gauss_newton_keeps_its_promise(scale: float) -> None:
    """The steps with the κ that is proved, solved in 200 bits."""
    model, x, y = nearly_solved(scale)
    verdict = sf.convergence(model, x, sf.Square(y), method="damped")
    assert verdict.proved, str(verdict)
    statement = verdict.statement
    assert isinstance(statement, DampedGaussNewton)
    assert 0 < statement.rate < (0.9 if scale > 1e-3 else 0.1)
    outputs, loss = Exact(model, lambda: model(x)), Exact(model, square(model, x, y))
    with flint.ctx.workprec(BITS):
        start = u = outputs.start()
        (first,) = loss.values(u)
        shift = arb_mat([[arb(statement.kappa * len(x)) * (i == j) for j in range(len(x))] for i in range(len(x))])
        for k in range(1, 9):
            jacobian = outputs.jacobian(u)
            apart = [[value - t] for value, t in zip(outputs.values(u), stored(y).reshape(-1), strict=True)]
            step = jacobian.transpose() * (jacobian * jacobian.transpose() + shift).solve(arb_mat(apart))
            u = middle([a - step[i, 0] for i, a in enumerate(u)])
            (value,) = loss.values(u)
            assert value <= first * arb(statement.rate) ** k * _HAIR
            assert distance(start, u) <= arb(statement.radius)
    assert verdict.iterations(1e-30) > verdict.iterations(1e-20) > 0
    assert "the damping" in str(verdict)


def test_what_is_missing_of_damped_steps_is_enough() -> None:
    model, x, y = nearly_solved(1.0)
    verdict = sf.convergence(model, x, sf.Square(y), method="damped")
    assert not verdict.proved
    here = model(x).detach()
    closer = here + (y - here) / (1.01 * verdict.missing)
    assert sf.convergence(model, x, sf.Square(closer), method="damped").proved
    with pytest.raises(GuaranteeError, match="exact solutions"):
        sf.convergence(model, x, sf.Square(y), sf.Ridge(0.1), method="damped")


def test_damped_steps_keep_the_rate_that_was_proved_before_them() -> None:
    model, x, y = nearly_solved(0.02)
    verdict = sf.convergence(model, x, sf.Square(y), method="damped")
    optimizer = sf.GaussNewton(model, sf.Square(), damping=verdict.statement.kappa, adapt=False)
    first = optimizer.value(x, y)
    for k in range(verdict.iterations(1e-6 * first)):
        optimizer.step(x, y)
        assert optimizer.value(x, y) <= first * verdict.rate ** (k + 1) * (1 + 1e-9)
    assert optimizer.value(x, y) <= 1e-6 * first


def test_the_proved_steps_are_those_of_torch() -> None:
    model, x, y = nearly_solved(1e-6)
    verdict = sf.convergence(model, x, sf.Square(y), method="momentum")
    optimizer = torch.optim.SGD(model.parameters(), lr=verdict.step_size or 0.0, momentum=verdict.momentum or 0.0)
    eps = 1e-22
    for _ in range(verdict.iterations(eps)):
        optimizer.zero_grad()
        loss = sf.Square(y)(model(x))
        loss.backward()
        optimizer.step()
    assert sf.Square(y)(model(x)) <= eps


def test_near_a_solution_momentum_is_proved_to_be_faster() -> None:
    model, x, y = nearly_solved(1e-6)
    fast = sf.convergence(model, x, sf.Square(y), method="momentum")
    plain = sf.convergence(model, x, sf.Square(y), method="gradient")
    assert 5 * fast.iterations(1e-20) <= plain.iterations(1e-20)


def test_the_fast_rate_is_attained_by_a_linear_model() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x, y = data(4, 6, 1)
    verdict = sf.convergence(model, x, sf.Square(y), method="momentum")
    statement = verdict.statement
    assert isinstance(statement, FastHeavyBall)
    weight = sum(p.numel() for p in model.parameters())
    jacobian, residual = linearised(model, x, y)
    assert jacobian.shape == (4, weight)
    gain = verdict.step_size * statement.weight  # type: ignore[operator]
    r, before = residual, residual
    norms = []
    for _ in range(400):
        r, before = r - gain * (jacobian @ (jacobian.mT @ r)) + statement.momentum * (r - before), r
        norms.append(float(r.norm()))
    attained = (norms[-1] / norms[199]) ** (2 / 200)
    assert attained <= statement.rate * (1 + 1e-3)
    assert attained >= statement.rate * 0.95


def test_the_rate_of_batches_of_a_linear_model_is_that_of_one_step() -> None:
    """The expectation of the squared length of J⁺r over all batches of one step, against the bound."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x, y = data(4, 6, 1)
    verdict = sf.convergence(model, x, sf.Square(y), method="stochastic")
    statement = verdict.statement
    assert isinstance(statement, StochasticDescent)
    jacobian, _ = linearised(model, x, y)
    worst = torch.linalg.svd(jacobian).Vh[3]  # where J is smallest
    steps = [worst - statement.step_size * row * (row @ worst) for row in jacobian]
    mean = float(torch.stack(steps).square().sum(1).mean())
    assert mean <= statement.rate * (1 + 1e-9)
    assert 1 - mean <= 2.5 * (1 - statement.rate)


def test_little_momentum_is_gradient_descent() -> None:
    numbers = (1.0, 2.0, Profile(((0.5, 0.1),)), 0.1, 0.5, 0.1, 1.0)
    plain, ball = GradientDescent(*numbers, 1.0), HeavyBall(*numbers, 1e-6, 1.0)
    assert plain.holds
    assert plain.factor <= ball.factor <= 1.2 * plain.factor
    assert plain.rate <= ball.rate <= 1 - 0.9 * (1 - plain.rate)


@pytest.mark.parametrize("momentum", [0.3, 0.9])
def test_a_chosen_momentum_is_used(momentum: float) -> None:
    model, x, y = nearly_solved(1e-4)
    verdict = sf.convergence(model, x, sf.Square(y), method="momentum", momentum=momentum)
    assert verdict.proved
    assert verdict.momentum == momentum
    assert f"momentum {momentum}" in verdict.verdict


def shares(model: nn.Module, x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of the samples times their number, at some weights."""
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(u, model.parameters())
    jacobian, residual = linearised(model, x, y)
    nn.utils.vector_to_parameters(before, model.parameters())
    return residual.square().sum() / (2 * len(x)), jacobian * residual[:, None]


def residual_at(model: nn.Module, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """The residual at some weights."""
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(u, model.parameters())
    found = (model(x) - y).reshape(-1).detach()
    nn.utils.vector_to_parameters(before, model.parameters())
    return found


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_expectation_over_all_batches_is_not_above_its_bound(batch_size: int) -> None:
    """Every sequence of batches of three steps, drawn with replacement: the loss, and the length of J⁺r."""
    model, x, y = nearly_solved(1e-6)
    verdict = sf.convergence(model, x, sf.Square(y), method="stochastic", batch_size=batch_size)
    statement = verdict.statement
    assert verdict.proved
    assert isinstance(statement, StochasticDescent)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    first, _ = shares(model, x, y, start)
    inverse = torch.linalg.pinv(linearised(model, x, y)[0])
    least = float((inverse @ residual_at(model, x, y, start)).norm())
    reached = [start]
    for k in range(1, 4 if batch_size == 1 else 3):
        following = []
        for u in reached:
            loss, slopes = shares(model, x, y, u)
            centre = slopes.mean(0)
            batches = list(itertools.product(range(len(x)), repeat=batch_size))
            steps = torch.stack([slopes[list(batch)].mean(0) for batch in batches])
            assert (steps - centre).square().sum(1).mean() <= statement.variance * loss
            following += [u - statement.step_size * step for step in steps]
        reached = following
        mean = torch.stack([shares(model, x, y, u)[0] for u in reached]).mean()
        assert mean <= statement.excess * first * statement.rate**k * (1 + 1e-9)
        lengths = [(inverse @ residual_at(model, x, y, u)).square().sum() for u in reached]
        assert torch.stack(lengths).mean() <= least**2 * statement.rate**k * (1 + 1e-9)
        assert max(float((u - start).norm()) for u in reached) <= statement.radius


def test_a_random_run_stays_below_what_is_probable() -> None:
    """By Ville's inequality the loss is ever above ten times its bound with a probability of a tenth."""
    model, x, y = nearly_solved(1e-6)
    verdict = sf.convergence(model, x, sf.Square(y), method="stochastic", confidence=0.8)
    assert verdict.proved
    assert isinstance(verdict.statement, StochasticDescent)
    assert verdict.rate is not None
    start = u = nn.utils.parameters_to_vector(model.parameters()).detach()
    first, _ = shares(model, x, y, u)
    generator = torch.Generator().manual_seed(0)
    for k in range(300):
        loss, slopes = shares(model, x, y, u)
        assert loss <= 10 * verdict.statement.excess * first * verdict.rate**k + 1e-28
        u = u - (verdict.step_size or 0.0) * slopes[int(torch.randint(len(x), (), generator=generator))]
    assert (u - start).norm() <= (verdict.radius or 0.0)
    assert "with a probability of at least" in verdict.verdict
    assert verdict.iterations(float(first) / 2) > verdict.iterations(float(first)) > 0


def test_more_confidence_needs_a_smaller_residual() -> None:
    model, x, y = nearly_solved(1e-2)
    low, high = (sf.convergence(model, x, sf.Square(y), method="stochastic", confidence=c) for c in (0.9, 0.999))
    assert 2 * low.missing <= high.missing < math.inf
    closer = model(x).detach() + (y - model(x).detach()) / (1.01 * low.missing)
    assert sf.convergence(model, x, sf.Square(closer), method="stochastic", confidence=0.9).proved


@pytest.mark.parametrize("sizes", [(2, 6, 1), (2, 5, 4, 2)])
def test_numbers_in_the_weighted_norm_bound_those_of_the_scaled_jacobian(sizes: tuple[int, ...]) -> None:
    model = perceptron(*sizes)
    with torch.no_grad():
        model[-1].weight.mul_(0.05)
    x, y = data(3, sizes[0], sizes[-1])
    analysis = Analysis.of(model, x)
    layered = read_layers(analysis)
    assert layered is not None
    weights = Pieces(model, [(None, x, y)], sf.Square()).block_weights()
    assert max(weights.values()) > min(weights.values()) == 1
    jacobian, _ = linearised(model, x, y)
    roots = torch.cat([torch.full((p.numel(),), weights[name]) for name, p in model.named_parameters()]).sqrt()
    values = torch.linalg.svdvals(jacobian / roots)
    for known in (layered, jacobian_rows(analysis)):
        gram = known.times(0, y.numel(), known, y.numel(), {path: 1 / weight for path, weight in weights.items()})  # type: ignore[arg-type]
        low, high = math.sqrt(max(smallest_eigenvalue(gram), 0.0)), math.sqrt(largest_eigenvalue(gram))
        assert low <= float(values[-1]) * (1 + 1e-12) <= low * (1 + 1e-4)
        assert float(values[0]) <= high * (1 + 1e-12) <= float(values[0]) * (1 + 1e-6)
    u = nn.utils.parameters_to_vector(model.parameters()).detach()
    generator = torch.Generator().manual_seed(0)
    for radius in (0.0, 0.3):
        by_layers = layered_bending(Here(lambda: [layered]), radius, weights)
        bounds = [by_layers.constant, bending(analysis, radius, weights=weights).constant]
        step = torch.randn(len(u), dtype=torch.float64, generator=generator)
        there = u + radius * step / step.norm() / roots
        for _ in range(20):
            v = torch.randn(len(u), dtype=torch.float64, generator=generator)
            v = v / v.norm() / roots
            h = 1e-4
            nn.utils.vector_to_parameters(there, model.parameters())
            middle_value = model(x).detach()
            ends = []
            for sign in (1, -1):
                nn.utils.vector_to_parameters(there + sign * h * v, model.parameters())
                ends.append(model(x).detach())
            bent = float(((ends[0] + ends[1] - 2 * middle_value) / h**2).norm())
            assert bent <= min(bounds) * (1 + 1e-5) + 1e-6
        nn.utils.vector_to_parameters(u, model.parameters())


@pytest.mark.parametrize("method", ["gradient", "momentum"])
def test_step_sizes_per_block_keep_their_promise(method: str) -> None:
    model, x, y = nearly_solved(1e-3)
    verdict = sf.convergence(model, x, sf.Square(y), method=method, per_block=True)  # type: ignore[arg-type]
    assert verdict.proved
    sizes, weights = verdict.block_step_sizes, verdict.weights
    assert sizes is not None
    assert weights is not None
    assert len(set(sizes.values())) > 1
    assert verdict.rate is not None
    assert isinstance(verdict.statement, GradientDescent | HeavyBall)
    beta = verdict.momentum or 0.0
    u = {name: p.detach().clone() for name, p in model.named_parameters()}
    start, moved = dict(u), {name: torch.zeros_like(p) for name, p in u.items()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = sf.Square(y)(torch.func.functional_call(model, values, (x,)))
        return result

    first = loss(u)
    for k in range(1, 40):
        slopes = torch.func.grad(loss)(u)
        moved = {name: beta * moved[name] - sizes[name] * slopes[name] for name in u}
        u = {name: p + moved[name] for name, p in u.items()}
        assert loss(u) <= first * verdict.rate**k * (1 + 1e-9)
        far = sum(weights[name] * float((p - start[name]).square().sum()) for name, p in u.items())
        assert math.sqrt(far) <= verdict.statement.radius
    assert verdict.to_dict()["block_step_sizes"] == sizes


def test_other_networks_have_steps_per_block_and_batches_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    objective = sf.Square(model(x).detach() + 1e-7)
    for method in ("gradient", "stochastic"):
        verdict = sf.convergence(model, x, objective, method=method, per_block=True)  # type: ignore[arg-type]
        assert verdict.proved
        assert set(verdict.block_step_sizes or {}) == set(dict(model.named_parameters()))


def test_samples_that_interact_cannot_be_drawn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.BatchNorm1d(12), nn.Linear(12, 1)).double()
    x, _ = data(4, 2, 1)
    verdict = sf.convergence(model, x, sf.Square(model(x).detach()), method="stochastic")
    assert not verdict.proved
    assert "no batch can be drawn" in str(verdict)


def test_what_does_not_go_together_is_refused() -> None:
    model, x, y = nearly_solved(1e-3)
    for method in ("momentum", "stochastic"):
        with pytest.raises(GuaranteeError, match="without a regulariser"):
            sf.convergence(model, x, sf.Square(y), sf.Ridge(0.1), method)  # type: ignore[arg-type]
    with pytest.raises(GuaranteeError, match="between 0 and 1"):
        sf.convergence(model, x, sf.Square(y), method="momentum", momentum=1.0)
    with pytest.raises(GuaranteeError, match="goes with method='momentum'"):
        sf.convergence(model, x, sf.Square(y), method="gradient", momentum=0.5)
    with pytest.raises(GuaranteeError, match="at least one sample"):
        sf.convergence(model, x, sf.Square(y), method="stochastic", batch_size=0)
    with pytest.raises(GuaranteeError, match="Ridge or no regulariser"):
        sf.convergence(model, x, sf.Square(y), sf.objectives.PseudoHuber(0.1), "newton")  # type: ignore[arg-type]
    with pytest.raises(GuaranteeError, match="no step sizes"):
        sf.convergence(model, x, sf.Square(y), per_block=True)
