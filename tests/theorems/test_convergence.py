"""Each theorem attacked: the run is continued in 200-bit arithmetic and never breaks a promise."""

from __future__ import annotations

import json
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
from surefoot.theorems import GradientDescent, Interpolation, Profile, StronglyConvex, linear
from surefoot.theorems.pieces import Pieces
from surefoot.theorems.samples import outputs_of_samples
from theorems.small_networks import (
    BITS,
    Exact,
    data,
    distance,
    gauss_newton,
    linearised,
    middle,
    perceptron,
    square,
    trained,
)

_HAIR = arb(1 + 2.0**-40)  # far more than 200 bits lose in a run


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.ReLU])
@pytest.mark.parametrize(("sizes", "steps"), [((2, 10, 1), 3), ((2, 10, 1), 9), ((2, 6, 5, 1), 12)])
def test_gauss_newton_keeps_its_promise(activation: type[nn.Module], sizes: tuple[int, ...], steps: int) -> None:
    model = perceptron(*sizes, activation=activation)
    x, y = data(3, sizes[0], 1)
    trained(model, x, y, steps)
    if activation is nn.ReLU:  # steps across kinks may go in circles
        y = model(x).detach() + 1e-5 * y
    verdict = sf.convergence(model, x, sf.Square(y))
    if not verdict.proved:
        assert verdict.missing > 1
        assert steps == 3
        return
    statement = verdict.statement
    assert isinstance(statement, Interpolation)
    exact = Exact(model, lambda: model(x))
    with flint.ctx.workprec(BITS):
        run = [exact.start()]
        for _ in range(6):
            run.append(gauss_newton(exact, run[-1], y))
        for k, u in enumerate(run):
            far, residual = statement.after(k)
            wanted = stored(y).reshape(-1)
            left = distance(exact.values(u), list(wanted))
            assert distance(u, run[-1]) <= arb(far) * _HAIR + arb(2) ** -150
            assert distance(u, run[0]) <= arb(statement.distance) * _HAIR
            assert left <= arb(residual) * _HAIR + arb(2) ** -150
        for eps in (1e-6, 1e-20, 1e-60):
            steps_needed = verdict.iterations(eps)
            assert steps_needed <= 10
            if steps_needed < len(run):
                (value,) = Exact(model, square(model, x, y)).values(run[steps_needed])
                assert value <= arb(eps) * _HAIR


def test_gauss_newton_is_proved_after_some_steps_and_not_at_once() -> None:
    model = perceptron(2, 6, 1)
    x, y = data(4, 2, 1)
    assert not sf.convergence(model, x, sf.Square(y)).proved
    trained(model, x, y, 8)
    assert sf.convergence(model, x, sf.Square(y)).proved
    assert sf.convergence(model, x, sf.Square(y), effort="low").proved


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_what_is_missing_is_enough(activation: type[nn.Module]) -> None:
    """A residual that many times smaller, at the same weights, is proved."""
    model = perceptron(2, 8, 1, activation=activation)
    x, y = data(4, 2, 1)
    verdict = sf.convergence(model, x, sf.Square(y))
    assert not verdict.proved
    assert verdict.missing < math.inf
    here = model(x).detach()
    closer = here + (y - here) / (1.01 * verdict.missing)
    assert sf.convergence(model, x, sf.Square(closer)).proved


def test_gradient_descent_keeps_its_promise() -> None:
    model = perceptron(2, 40, 1)
    x, y = data(3, 2, 1)
    trained(model, x, y, 3)
    nearby = model(x).detach() + 0.01 * y
    verdict = sf.convergence(model, x, sf.Square(nearby), method="gradient")
    assert verdict.proved
    assert isinstance(verdict.statement, GradientDescent)
    assert verdict.step_size is not None
    assert verdict.rate is not None
    assert verdict.radius is not None
    exact = Exact(model, square(model, x, nearby))
    with flint.ctx.workprec(BITS):
        start = u = exact.start()
        (first,) = exact.values(u)
        for k in range(1, 9):
            slope = exact.gradient(u)
            u = middle([a - arb(verdict.step_size) * g for a, g in zip(u, slope, strict=True)])
            (value,) = exact.values(u)
            assert value <= first * arb(verdict.rate) ** k * _HAIR
            assert distance(start, u) <= arb(verdict.radius)
    assert verdict.iterations(1.001 * float(first.mid())) == 0
    assert verdict.iterations(1e-12) > verdict.iterations(1e-6) > 0


def minimised(model: nn.Module, x: torch.Tensor, objective: nn.Module, ridge: sf.Ridge) -> None:
    named = dict(model.named_parameters())
    search = torch.optim.LBFGS(
        model.parameters(),
        max_iter=400,
        tolerance_grad=1e-13,
        tolerance_change=1e-18,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        search.zero_grad()
        loss = objective(model(x)) + ridge(named)
        loss.backward()
        return loss

    search.step(closure)


@pytest.mark.parametrize("method", ["newton", "gradient"])
@pytest.mark.parametrize("loss", ["cross-entropy", "square"])
def test_a_strict_minimum_is_where_it_is_said_to_be(method: str, loss: str) -> None:
    model = perceptron(2, 3, 2)
    x, y = data(6, 2, 2)
    objective = sf.CrossEntropy(y.argmax(1)) if loss == "cross-entropy" else sf.Square(y)
    ridge = sf.Ridge(0.1)
    minimised(model, x, objective, ridge)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-8 * torch.randn_like(p))
    verdict = sf.convergence(model, x, objective, ridge, method=method)  # type: ignore[arg-type]
    assert verdict.proved, str(verdict)
    statement = verdict.statement
    assert isinstance(statement, StronglyConvex)
    assert verdict.rate is not None
    weight = dict(model.named_parameters())

    def whole() -> torch.Tensor:
        return objective(model(x)) + 0.05 * sum((p * p).sum() for p in weight.values())

    exact = Exact(model, whole)
    with flint.ctx.workprec(BITS):
        start = u = exact.start()
        limit = start
        for _ in range(5):
            limit = newton(exact, limit)
        assert distance(start, limit) <= arb(statement.distance)
        assert exact.values(start)[0] - exact.values(limit)[0] <= arb(statement.gap) * _HAIR + arb(2) ** -150
        for _ in range(3):
            before = distance(u, limit)
            if method == "newton":
                u = newton(exact, u)
            else:
                slope = exact.gradient(u)
                u = middle([a - arb(statement.step_size) * g for a, g in zip(u, slope, strict=True)])
            assert distance(u, limit) <= before * arb(verdict.rate) * _HAIR + arb(2) ** -150
    assert verdict.iterations(1e-30) >= 1


def newton(exact: Exact, u: list[arb]) -> list[arb]:
    step = exact.hessian(u).solve(arb_mat([[g] for g in exact.gradient(u)]))
    return middle([a - step[k, 0] for k, a in enumerate(u)])


def test_no_stationary_point_where_none_is_promised() -> None:
    model = perceptron(2, 4, 1)
    x, y = data(5, 2, 1)
    verdict = sf.convergence(model, x, sf.Square(y), sf.Ridge(0.1), method="newton")
    assert not verdict.proved
    assert verdict.nothing is not None
    assert verdict.nothing.holds
    assert "No stationary point is within" in str(verdict)
    minimised(model, x, sf.Square(y), sf.Ridge(0.1))
    near = sf.convergence(model, x, sf.Square(y), sf.Ridge(0.1), method="newton")
    assert near.proved
    assert near.nothing is None


def test_a_linear_model_is_solved_in_one_step() -> None:
    model = nn.Linear(6, 1).double()
    x, y = data(3, 6, 1)
    verdict = sf.convergence(model, x, sf.Square(y))
    assert verdict.proved
    assert isinstance(verdict.statement, Interpolation)
    assert verdict.statement.h < 1e-200
    assert verdict.iterations(1e-100) <= 1


def test_a_network_of_another_kind_is_proved_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    here = model(x).detach()
    verdict = sf.convergence(model, x, sf.Square(here + 1e-5))
    assert verdict.proved
    assert "zero loss" in str(verdict)
    far = sf.convergence(model, x, sf.Square(here + 3.0))
    assert not far.proved
    assert far.missing > 1


def test_a_jacobian_that_does_not_fit_into_memory_is_computed_by_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)).double()
    x = torch.randn(4, 1, 3, 3, dtype=torch.float64)
    targets = model(x).detach() + 1e-5
    written = sf.convergence(model, x, sf.Square(targets))
    dense = linearised(model, x, targets)[0]
    monkeypatch.setattr(linear, "_ENTRIES", 0)
    monkeypatch.setattr(linear, "_PANEL_ENTRIES", 3 * dense.shape[1])
    analysis = Analysis.of(model, x)
    jacobian = linear.jacobian_rows(analysis, outputs_of_samples(analysis))
    assert isinstance(jacobian, linear.Panels)
    assert jacobian.panel == 3
    ((start, stop, found),) = Pieces(model, [(None, x, targets)], sf.Square()).gram().panels()
    apart = (found.value - dense @ dense.mT).tril().abs()
    assert (start, stop) == (0, 8)
    assert bool((apart <= found.error + 1e-14).all())
    assert float(found.error.max()) < 1e-9
    panels = sf.convergence(model, x, sf.Square(targets))
    assert panels.proved
    assert panels.distance == pytest.approx(written.distance, rel=1e-6)
    assert sf.convergence(model, x, sf.Square(targets), method="gradient", per_block=True).proved


def test_half_is_the_border_for_a_constant_profile() -> None:
    """h = ½ gives t* = 2η; beyond there is none."""
    at = Interpolation(1.0, Profile(((2.0, 0.5),)), 1.0, 1.0, 1.0)
    assert at.holds
    assert at.h == 0.5
    assert 2.0 <= at.distance <= 2.0 + 1e-9
    beyond = Interpolation(1.0, Profile(((4.0, 0.51),)), 1.0, 1.0, 1.0)
    assert not beyond.holds
    assert 0.51 <= beyond.h <= 0.51 * (1 + 1e-12)
    assert beyond.distance == math.inf


def test_newtons_iterates_of_the_majorant_are_those_of_kantorovich() -> None:
    h, eta = 0.4, 1.0
    statement = Interpolation(eta, Profile(((2.0, h),)), 1.0, 1.0, 1.0)
    root = (1 - math.sqrt(1 - 2 * h)) / h
    t = 0.0
    for k in range(5):
        assert statement.after(k)[0] == pytest.approx(root - t, rel=1e-9, abs=1e-12)
        t -= (h / 2 * t * t - t + eta) / (h * t - 1)


def test_a_profile_that_grows_covers_more_than_its_largest_value() -> None:
    grows = Profile.of([(1.0, 1.0), (0.5, 0.1), (0.25, 0.0)])
    flat = Profile.of([(1.0, 1.0)])
    assert grows.room()[0] > flat.room()[0] == pytest.approx(0.5)
    assert Profile.of([(1.0, 0.5), (0.5, 2.0)]).steps == ((0.5, 0.5), (1.0, 0.5))


def test_it_is_written_as_sentences_and_json() -> None:
    model = perceptron(2, 10, 1)
    x, y = data(3, 2, 1)
    trained(model, x, y, 6)
    for targets in (y, y + 5):
        verdict = sf.convergence(model, x, sf.Square(targets))
        assert str(verdict).startswith(("Gauss-Newton from here converges", "Convergence of Gauss-Newton"))
        document = json.loads(verdict.to_json())
        assert document["proved"] is verdict.proved
        assert document["schema"] == "surefoot/convergence/1"
        assert [h["symbol"] for h in document["hypotheses"]] == [h.symbol for h in verdict.hypotheses]
    assert "times smaller" in str(verdict)
    assert verdict.rate is None
    assert verdict.distance is None


def test_refusals_explain_themselves() -> None:
    model = perceptron(2, 4, 1)
    x, y = data(3, 2, 1)
    with pytest.raises(GuaranteeError, match="method='newton'"):
        sf.convergence(model, x, sf.Square(y), sf.Ridge(0.1))
    with pytest.raises(GuaranteeError, match="one of 'gauss_newton'"):
        sf.convergence(model, x, sf.Square(y), method="adam")  # type: ignore[arg-type]
    with pytest.raises(GuaranteeError, match="bound to targets"):
        sf.convergence(model, x, nn.MSELoss())
    with pytest.raises(sf.errors.ObjectiveError, match="no targets"):
        sf.convergence(model, x, sf.Square())
    with pytest.raises(GuaranteeError, match="not proved"):
        sf.convergence(model, x, sf.Square(y + 9)).iterations(1e-3)


def test_too_many_equations_and_equal_samples_are_said() -> None:
    model = perceptron(2, 2, 1)
    x, y = data(30, 2, 1)
    assert "not onto" in str(sf.convergence(model, x, sf.Square(y)))
    wide = perceptron(2, 20, 1)
    same = torch.cat([x[:1], x[:1]])
    verdict = sf.convergence(wide, same, sf.Square(y[:2]))
    assert not verdict.proved
    assert "two samples may be equal" in str(verdict)


def test_the_unit_at_a_kink_is_named() -> None:
    model = perceptron(2, 10, 1, activation=nn.ReLU)
    x, y = data(3, 2, 1)
    verdict = sf.convergence(model, x, sf.Square(y))
    assert not verdict.proved
    assert any("may meet a kink in sample" in text for text in verdict.obstacles)


def test_the_weights_are_left_alone() -> None:
    model = perceptron(2, 10, 1)
    x, y = data(3, 2, 1)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for method in ("gauss_newton", "gradient", "newton"):
        sf.convergence(model, x, sf.Square(y), method=method)  # type: ignore[arg-type]
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(model.parameters()))


def test_nothing_is_proved_if_the_batch_size_makes_samples_equal() -> None:
    class Third(nn.Module):
        """It reads the column whose number is that of the samples, which is the same for all of them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = perceptron(1, 16, 1), nn.Linear(1, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            column = x[:, len(x) - 1 : len(x)]
            result: Tensor = self.inner(column) + self.outer(column)
            return result

    torch.manual_seed(0)
    model, x = Third(), torch.randn(3, 5, dtype=torch.float64)
    x[:, 2] = 1.0
    y = model(x).detach() + 1e-6 * torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    assert not sf.convergence(model, x, sf.Square(y)).proved  # equal inputs, other targets
