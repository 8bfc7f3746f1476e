"""Every loss with every option: certificates, segments, Gauss-Newton and Newton steps, descent."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from objectives.zoo import LOSSES, real
from surefoot import objectives as o
from surefoot.calculus.segment.along import Along

LOGARITHMS = ("likelihood", "divergence")


def network(name: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers, *([nn.LogSoftmax(dim=1)] if name in LOGARITHMS else [])).double(), real(30)


def along(model: nn.Module, x: Tensor, loss: o.Objective, direction: dict[str, Tensor], step: Tensor) -> Tensor:
    here = {path: value.detach() + step * direction[path] for path, value in model.named_parameters()}
    return loss(torch.func.functional_call(model, here, (x,)))


def random_direction(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for path, value in model.named_parameters()
    }


SHARP = ("labels", "all at once", "binary", "huber", "likelihood")


@pytest.mark.parametrize(("name", "radius"), [*((name, 0.1) for name in LOSSES), *((name, 0.0) for name in SHARP)])
def test_certificates_hold(name, radius):
    (model, x), loss, domain = network(name), LOSSES[name], sf.Ball(radius)
    certificate = sf.certify(model, x, objective=loss, domain=domain)
    found = sf.estimate(model, x, objective=loss, domain=domain, starts=1, steps=3 if radius else 1)
    for what in ("bound", "lipschitz", "smoothness"):
        assert float(getattr(found, what)) <= float(getattr(certificate, what)) * (1 + 1e-9), what
    assert certificate.smoothness.is_finite or (name == "absolute" and "Huber" in certificate.reasons[0])
    if radius == 0.0:
        sharp = 12 if name in LOGARITHMS else 6
        assert float(certificate.smoothness) <= sharp * float(found.smoothness), "not sharp"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("order", "length"), [(2, 0.05), (3, 0.3), (4, 1.0)])
def test_taylor_models_enclose_the_loss_along_a_segment(name, order, length):
    (model, x), loss = network(name), LOSSES[name]
    direction = random_direction(model, order)
    (found,) = Along(model, x, loss).expand(direction, length, order)
    assert found.tail is not None
    rest, error = float(found.rest), float(found.error)
    assert error <= 1e-9 * (1 + rest * length**order)
    assert abs(float(along(model, x, loss, direction, torch.zeros(()).double())) - float(found.value)) <= error
    for part in (0.01, 0.1, 0.3, 0.5, 0.8, 1.0):
        step = torch.tensor(part * length, dtype=torch.float64)
        exact = float(along(model, x, loss, direction, step))
        known = sum(float(c) * float(step) ** j for j, c in enumerate(found.coefficients) if c is not None)
        assert abs(exact - known) <= rest * float(step) ** found.order + error + 1e-13


@pytest.mark.parametrize("name", LOSSES)
def test_coefficients_are_derivatives(name):
    (model, x), loss = network(name), LOSSES[name]
    direction = random_direction(model, 9)
    (found,) = Along(model, x, loss).expand(direction, 1e-6, 3)
    function = partial(along, model, x, loss, direction)
    zero = torch.zeros((), dtype=torch.float64)
    for order, coefficient in enumerate(found.coefficients):
        expected = float(function(zero)) / (1, 1, 2)[order]
        assert float(coefficient) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        function = torch.func.grad(function)
    assert found.order == (2 if "huber" in name or name == "absolute" else 3)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "absolute"])
def test_short_segments_of_an_affine_model_are_sharp(name):
    """The rest of a model of order 2 is then half the second derivative, all of which is the loss's own."""
    loss, x, model = LOSSES[name], real(30), nn.Linear(3, 3).double()
    direction = random_direction(model, 9)
    zero = torch.zeros((), dtype=torch.float64)
    second = torch.func.grad(torch.func.grad(lambda step: along(model, x, loss, direction, step)))(zero)
    (found,) = Along(model, x, loss).expand(direction, 1e-7, 2)
    rest = 0.0 if found.tail is None else float(found.tail[0, 0])
    assert 0.5 * float(second) <= rest * (1 + 1e-6) + 1e-12
    assert rest <= 0.5 * float(second) * 1.001 + 1e-9


@pytest.mark.parametrize("name", LOSSES)
def test_certified_descent_never_ascends(name):
    (model, x), loss = network(name), LOSSES[name]
    optimizer = sf.optim.CertifiedDescent(model, loss.bound_to(None), proof="segment")
    values = [float(optimizer.step(x, loss.targets)) for _ in range(20)]
    assert all(after <= before for before, after in pairwise(values))
    assert values[-1] < 0.99 * values[0]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "absolute"])
def test_second_order_steps_minimise_their_models(name):
    (model, x), loss = network(name), LOSSES[name]
    parameters = {path: value.detach() for path, value in model.named_parameters()}
    sizes = [value.numel() for value in parameters.values()]

    def outputs(flat: Tensor) -> Tensor:
        parts = [p.reshape(v.shape) for p, v in zip(flat.split(sizes), parameters.values(), strict=True)]
        return torch.func.functional_call(model, dict(zip(parameters, parts, strict=True)), (x,))

    point = torch.cat([value.flatten() for value in parameters.values()])
    jacobian = torch.func.jacrev(outputs)(point).reshape(-1, point.numel())
    curvature = torch.autograd.functional.hessian(loss, outputs(point)).reshape(len(jacobian), len(jacobian))
    gradient = torch.func.grad(lambda flat: loss(outputs(flat)))(point)
    gauss_newton = jacobian.T @ curvature @ jacobian
    newton = torch.func.hessian(lambda flat: loss(outputs(flat)))(point)
    kappa, chain = 8.0, sf.Chain(model, x)
    steps = {
        "dual": (sf.oracles.gauss_newton(chain, loss, kappa=kappa, method="dual"), gauss_newton),
        "dynamic": (sf.oracles.gauss_newton(chain, loss, kappa=kappa, method="dynamic"), gauss_newton),
        "newton": (sf.oracles.newton(chain, loss, kappa=kappa), newton),
    }
    for method, (step, matrix) in steps.items():
        identity = torch.eye(len(point), dtype=torch.float64)
        expected = -torch.linalg.solve(matrix + step.kappa * identity, gradient)
        found = torch.cat([step.direction[path].flatten() for path in parameters])
        assert torch.allclose(found, expected, rtol=1e-7, atol=1e-9), method
