"""What a loss gets that is added in one file of at most 15 lines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from objectives import pseudo_huber
from objectives.pseudo_huber import PseudoHuber
from surefoot.calculus.segment.along import Along
from surefoot.magnitude import Magnitude
from surefoot.objectives import Objective, ObjectiveError
from surefoot.operations.call import Bounds, Call
from surefoot.operations.losses import LossFacts, separable
from surefoot.operations.record import operation
from surefoot.report import render_report
from surefoot.scalar import ScalarFunction


def problem() -> tuple[nn.Sequential, Tensor, PseudoHuber]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(6, 3).double(), PseudoHuber(2 * torch.randn(6, 2).double())


def test_it_is_short():
    assert len(Path(pseudo_huber.__file__).read_text().splitlines()) <= 15


def test_its_facts_and_its_value_are_derived():
    _, _, loss = problem()
    assert (loss.convex, loss.smooth, loss.nonnegative, loss.quadratic) == (True, True, True, False)
    outputs = torch.randn(6, 2).double()
    expected = ((outputs - loss.targets).square() + 1).sqrt().sub(1).sum()
    assert float(loss(outputs)) == pytest.approx(float(expected) / 6, rel=1e-14)
    assert float(PseudoHuber(loss.targets, reduction="sum", scale=2.0)(outputs)) == pytest.approx(
        2 * float(expected)
    )
    with pytest.raises(TypeError, match="has no option delta"):
        PseudoHuber(delta=2.0)


def test_a_function_that_is_not_convex_is_refused():
    r = ScalarFunction.variable()
    with pytest.raises(sf.errors.SurefootError, match="no convex function"):
        separable("example.valley", r**4.0 - r**2.0)


def test_constants_hold_for_all_targets_and_are_reached():
    everywhere = PseudoHuber().constants((1, 1))
    assert float(everywhere.lipschitz) == pytest.approx(1.0, rel=1e-6)
    assert float(everywhere.smoothness) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("radius", [0.0, 0.2])
def test_certificate(radius):
    model, x, loss = problem()
    certificate = sf.certify(model, x, objective=loss, domain=sf.Ball(radius))
    attack = sf.estimate(model, x, objective=loss, domain=sf.Ball(radius), starts=1, steps=3)
    for what in ("bound", "lipschitz", "smoothness"):
        assert float(getattr(attack, what)) <= float(getattr(certificate, what)) * (1 + 1e-9), what
    assert certificate.nonnegative
    assert certificate.damping > 0
    assert "pseudo_huber" in str(certificate.by_operation())


def test_segment():
    model, x, loss = problem()
    direction = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    (expansion,) = Along(model, x, loss).expand(direction, 0.3, 4)
    assert expansion.order == 4
    assert expansion.tail is not None
    rest, error = float(expansion.rest), float(expansion.error)
    for step in (0.0, 0.1, 0.3):
        there = {path: value.detach() + step * direction[path] for path, value in model.named_parameters()}
        exact = float(loss(torch.func.functional_call(model, there, (x,))))
        polynomial = sum(float(c) * step**j for j, c in enumerate(expansion.coefficients) if c is not None)
        assert abs(exact - polynomial) <= rest * step**4 + error


def test_steps_descend():
    model, x, loss = problem()
    optimizer = sf.optim.CertifiedDescent(model, loss.bound_to(None), proof="segment")
    values = [float(optimizer.step(x, loss.targets)) for _ in range(5)]
    assert all(after < before for before, after in pairwise(values))


def test_second_order_steps():
    model, x, loss = problem()
    chain, kappa = sf.Chain(model, x), 8.0
    parameters = {path: value.detach() for path, value in model.named_parameters()}
    sizes = [value.numel() for value in parameters.values()]

    def outputs(flat: Tensor) -> Tensor:
        parts = [p.reshape(v.shape) for p, v in zip(flat.split(sizes), parameters.values(), strict=True)]
        return torch.func.functional_call(model, dict(zip(parameters, parts, strict=True)), (x,))

    point = torch.cat([value.flatten() for value in parameters.values()])
    jacobian = torch.func.jacrev(outputs)(point).reshape(-1, point.numel())
    curvature = torch.autograd.functional.hessian(loss, outputs(point)).reshape(len(jacobian), len(jacobian))
    gradient = torch.func.grad(lambda flat: loss(outputs(flat)))(point)
    newton = torch.autograd.functional.hessian(lambda flat: loss(outputs(flat)), point)
    for step, matrix in (
        (sf.oracles.gauss_newton(chain, loss, kappa=kappa, method="dual"), jacobian.T @ curvature @ jacobian),
        (sf.oracles.newton(chain, loss, kappa=kappa), newton),
    ):
        expected = -torch.linalg.solve(matrix + step.kappa * torch.eye(len(point)).double(), gradient)
        direction = torch.cat([step.direction[path].flatten() for path in parameters])
        assert torch.allclose(direction, expected, rtol=1e-7, atol=1e-9)


def test_report():
    model, x, loss = problem()
    certificate = sf.certify(model, x, objective=loss, domain=sf.Ball(0.1))
    assert "pseudo_huber" in render_report([("own", certificate)])


def test_a_loss_that_is_no_sum_over_the_entries_states_its_bounds():
    def length(outputs: Tensor) -> Tensor:
        return (1 + outputs.square().sum()).sqrt()

    @operation("example.length", loss=LossFacts(length, convex=True, smooth=True, nonnegative=True))
    def bounds(call: Call) -> Bounds:
        return Bounds(
            jacobian={"outputs": Magnitude.of(1.0)},
            curvature={("outputs", "outputs"): Magnitude.of(1.0)},
            bound=call["outputs"].bound + 1.0,
            reduction=call["outputs"].numel,
        )

    class Length(Objective):
        operation = "example.length"
        takes_targets = False

        def check(self, outputs, targets):
            if not outputs.dtype.is_floating_point:
                raise ObjectiveError("Length reads real outputs")

    (model, x, _), loss = problem(), Length()
    certificate = sf.certify(model, x, objective=loss, domain=sf.Ball(0.1))
    attack = sf.estimate(model, x, objective=loss, domain=sf.Ball(0.1), starts=1, steps=3)
    assert float(attack.smoothness) <= float(certificate.smoothness) < float("inf")
    assert certificate.nonnegative
    with pytest.raises(sf.oracles.OracleError, match="not a sum over the rows"):
        sf.oracles.gauss_newton(sf.Chain(model, x), loss, method="dual")
    assert sf.oracles.gauss_newton(sf.Chain(model, x), loss, method="dynamic").solved
