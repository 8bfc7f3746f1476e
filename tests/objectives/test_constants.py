"""Constants of losses: never exceeded, reached where the docstrings say so, the same derivatives as dense ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from objectives.zoo import LABELS, LOSSES, SHAPE, real
from surefoot import objectives as o


def points(radius: float) -> list[Tensor]:
    """Outputs within a radius, half of them at its end; far out if it is infinite; and steps along gradients."""
    sizes = [2.0 ** (seed - 4) if math.isinf(radius) else radius * (1 - 0.7 * (seed % 2)) for seed in range(8)]
    starts = [real(100 + seed) ** (1 + seed % 3) for seed in range(8)]
    return [torch.zeros(SHAPE).double(), *(y * size / y.norm() for y, size in zip(starts, sizes, strict=True))]


def ascended(loss: o.Objective, radius: float) -> list[Tensor]:
    """Points where gradients and curvatures are large, by steps along them, projected onto the ball."""
    reached = []
    for point in points(radius)[1:4]:
        for step in range(4):
            direction = loss.gradient(point)
            if step % 2:
                direction = loss.hessian_vector_product(point, direction)
            point = point + direction * (radius / (1e-12 + float(direction.norm())))
            point = point * min(1.0, radius / float(point.norm()))
            reached.append(point)
    return reached


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("radius", [0.5, 5.0, math.inf])
def test_no_point_of_the_ball_exceeds_the_constants(name, radius):
    loss = LOSSES[name]
    constants = loss.constants(SHAPE, radius=radius)
    for point in points(radius) + ([] if math.isinf(radius) else ascended(loss, radius)):
        gradient = torch.func.grad(loss)(point)
        hessian = torch.autograd.functional.hessian(loss, point).reshape(point.numel(), point.numel())
        assert float(gradient.norm()) <= float(constants.lipschitz) * (1 + 1e-12)
        assert float(torch.linalg.matrix_norm(hessian, 2)) <= float(constants.smoothness) * (1 + 1e-12)
        assert float(torch.linalg.eigvalsh(hessian).min()) >= -1e-12
        direction = real(21)
        product = loss.hessian_vector_product(point, direction)
        assert torch.allclose(loss.gradient(point), gradient, rtol=1e-12, atol=1e-15)
        assert torch.allclose(product.flatten(), hessian @ direction.flatten(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_known_constants(count):
    """ERRATA 12 and 13: √2 and 1/2 of a sample, 1/√n and 1/n of that for the mean."""
    expected = {
        o.CrossEntropy(): ((count, 2), math.sqrt(2 / count), 0.5 / count),
        o.BinaryCrossEntropy(): ((count, 3), math.sqrt(3 / count), 0.25 / count),
        o.Huber(delta=0.7): ((count, 3), 0.7 * math.sqrt(3 / count), 1 / count),
        o.Square(torch.full((count, 1), 2.0)): ((count, 1), (2 * math.sqrt(count) + 3) / count, 1 / count),
    }
    for loss, (shape, slope, bend) in expected.items():
        constants = loss.constants(shape, radius=3.0 if isinstance(loss, o.Square) else math.inf)
        assert float(constants.lipschitz) == pytest.approx(slope, rel=1e-4)
        assert float(constants.smoothness) == pytest.approx(bend, rel=1e-4)


def test_constants_without_targets_hold_for_all_of_them():
    generator = torch.Generator().manual_seed(0)
    cases = [
        o.CrossEntropy(label_smoothing=0.2),
        o.CrossEntropy(weight=(0.5, 2.0, 3.0), label_smoothing=0.5, reduction="sum", scale=3.0),
        o.BinaryCrossEntropy(weight=(0.2, 0.0, 3.0), pos_weight=5.0),
        o.Huber(delta=0.2),
        o.SoftMargin(),
    ]
    for loss in cases:
        constants = loss.constants(SHAPE)
        for _ in range(20):
            y = torch.rand(SHAPE, generator=generator, dtype=torch.float64)
            if isinstance(loss, o.CrossEntropy):
                y = torch.randint(3, SHAPE[:1], generator=generator)
            bound = loss.bound_to(y).constants(SHAPE)
            assert bound.lipschitz <= constants.lipschitz * (1 + 1e-12)
            assert bound.smoothness <= constants.smoothness * (1 + 1e-12)
    with pytest.raises(o.ObjectiveError, match="bind them"):
        o.CrossEntropy(weight=(0.5, 2.0, 3.0)).constants(SHAPE)
    assert o.CrossEntropy(LOSSES["soft labels"].targets.to("meta")).constants(SHAPE).smoothness.is_finite


@pytest.mark.parametrize("name", LOSSES)
def test_certificates_hold_and_are_not_above_the_constants(name):
    torch.manual_seed(0)
    model, x, loss = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), real(30), LOSSES[name]
    certificate = sf.certify(model, x, objective=loss, domain=sf.Ball(0.1))
    attack = sf.estimate(model, x, objective=loss, domain=sf.Ball(0.1), starts=1, budget=100)
    for what in ("bound", "lipschitz", "smoothness"):
        assert float(getattr(attack, what)) <= float(getattr(certificate, what)) * (1 + 1e-9), what
    outputs = sf.certify(nn.Identity(), real(), objective=loss, wrt="input", domain=sf.Ball(0.3))
    constants = loss.constants(real(), radius=0.3 + float(real().norm()))
    assert float(outputs.smoothness) <= float(constants.smoothness) * (1 + 1e-3)


class Spread(nn.Module):
    def forward(self, outputs):
        return (1 + outputs.square().sum(dim=1)).sqrt().mean()


def test_any_module_is_a_loss():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), real(30)
    loss = o.as_objective(Spread())
    assert isinstance(loss, o.OwnLoss)
    assert not loss.convex
    point = real(1)
    assert torch.allclose(loss.gradient(point), torch.func.grad(Spread())(point))
    for objective in (Spread(), o.OwnLoss(Spread(), convex=True, nonnegative=True)):
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))
        attack = sf.estimate(model, x, objective=objective, domain=sf.Ball(0.1), starts=1, budget=100)
        assert float(attack.smoothness) <= float(certificate.smoothness) < math.inf
    for wrong, words in (
        (lambda: o.as_objective("loss"), "one number"),
        (lambda: o.as_objective(Spread(), LABELS), "no loss with targets"),
        (lambda: loss.constants(SHAPE), "states no constants"),
        (lambda: LOSSES["square"].constants(SHAPE, radius=-1.0), "radius"),
        (lambda: LOSSES["square"].constants("outputs"), "tensor or its shape"),
        (lambda: LOSSES["square"].hessian_vector_product(real(), real()[:1]), "shape of the outputs"),
    ):
        with pytest.raises(o.ObjectiveError, match=words):
            wrong()
