"""Constants of losses: those of certificates, never exceeded, reached where the docstrings say so."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from objectives.zoo import LABELS, LOSSES, SHAPE, SOFT, WEIGHT, real
from surefoot import objectives as o
from surefoot.objectives.constants import logistic_loss

SMOOTH = [name for name, loss in LOSSES.items() if loss.smooth]


def dense(loss: o.Objective, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian by torch's own differentiation."""
    gradient = torch.func.grad(loss)(outputs)
    hessian = torch.autograd.functional.hessian(loss, outputs)
    return gradient, hessian.reshape(outputs.numel(), outputs.numel())


def points(radius: float) -> list[Tensor]:
    """Outputs within a radius, most of them at its end; far out if it is infinite."""
    found = [torch.zeros(SHAPE, dtype=torch.float64)]
    for seed in range(8):
        point = real(100 + seed) * torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) ** (
            seed % 3 * 2
        )
        size = float(2.0 ** (seed - 4)) if math.isinf(radius) else radius * (1.0 if seed % 2 else 0.3)
        found.append(point * size / point.norm())
    return found


def ascended(loss: o.Objective, radius: float) -> list[Tensor]:
    """Points where gradients and curvatures are large, by steps along them, projected onto the ball."""
    found = []
    for start in points(radius)[1:4]:
        point = start
        for step in range(4):
            direction = loss.gradient(point)
            if step % 2:
                direction = loss.hessian_vector_product(point, direction)
            point = point + direction * (radius / (1e-12 + float(direction.norm())))
            point = point * min(1.0, radius / float(point.norm()))
            found.append(point)
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("radius", [0.5, 5.0, math.inf])
def test_no_point_of_the_ball_exceeds_the_constants(name, radius):
    loss = LOSSES[name]
    constants = loss.constants(SHAPE, radius=radius)
    assert constants.smooth == constants.smoothness.is_finite
    assert constants.convex
    assert bool(constants.flags) != constants.smooth
    for point in points(radius) + ([] if math.isinf(radius) else ascended(loss, radius)):
        gradient, hessian = dense(loss, point)
        assert float(gradient.norm()) <= float(constants.lipschitz) * (1 + 1e-12)
        assert float(torch.linalg.matrix_norm(hessian, 2)) <= float(constants.smoothness) * (1 + 1e-12)
        assert float(torch.linalg.eigvalsh(hessian).min()) >= -1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_differ_by_no_more_than_the_smoothness(name):
    loss, near = LOSSES[name], points(2.0)
    limit = float(loss.constants(SHAPE, radius=2.0).smoothness)
    for a, b in pairwise(near):
        change = float((loss.gradient(a) - loss.gradient(b)).norm())
        assert change <= limit * float((a - b).norm()) * (1 + 1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("radius", [0.3, 4.0])
def test_they_are_those_of_a_certificate(name, radius):
    loss = LOSSES[name]
    certificate = sf.certify(
        nn.Identity(), real(), objective=loss, wrt="input", domain=sf.ProductBall(radius), input_norm=None
    )
    constants = loss.constants(real(), radius=radius)
    assert float(certificate.smoothness) == pytest.approx(float(constants.smoothness), rel=1e-9)
    assert float(certificate.lipschitz) == pytest.approx(float(constants.lipschitz), rel=1e-9)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_known_constants(count):
    """ERRATA 12 and 13: √2 and 1/2 of a sample, 1/√n and 1/n of that for the mean."""
    logistic = o.CrossEntropy().constants((count, 2))
    assert float(logistic.lipschitz) == pytest.approx(math.sqrt(2 / count))
    assert float(logistic.smoothness) == pytest.approx(0.5 / count)
    binary = o.BinaryCrossEntropy().constants((count, 3))
    assert float(binary.lipschitz) == pytest.approx(math.sqrt(3 / count))
    assert float(binary.smoothness) == pytest.approx(0.25 / count)
    huber = o.Huber(delta=0.7).constants((count, 3))
    assert float(huber.lipschitz) == pytest.approx(0.7 * math.sqrt(3 / count))
    assert float(huber.smoothness) == pytest.approx(1 / count)
    square = o.Square(torch.full((count, 1), 2.0)).constants((count, 1), radius=3.0)
    assert float(square.lipschitz) == pytest.approx((2 * math.sqrt(count) + 3) / count)
    assert float(square.smoothness) == pytest.approx(1 / count)


def test_constants_without_targets_hold_for_all_of_them():
    cases = {
        "labels": o.CrossEntropy(),
        "weights": o.CrossEntropy(weight=(0.5, 2.0, 3.0), label_smoothing=0.2),
        "ignored": o.CrossEntropy(weight=WEIGHT, ignore_index=2),
        "sum": o.CrossEntropy(weight=WEIGHT, label_smoothing=0.5, reduction="sum", scale=3.0),
        "binary": o.BinaryCrossEntropy(weight=WEIGHT, pos_weight=5.0),
        "huber": o.Huber(delta=0.2),
        "margin": o.SoftMargin(),
    }
    generator = torch.Generator().manual_seed(0)
    for name, loss in cases.items():
        whatever = loss.constants(SHAPE)
        assert whatever.smoothness.is_finite, name
        for _ in range(20):
            y = torch.rand(SHAPE, generator=generator, dtype=torch.float64)
            if isinstance(loss, o.CrossEntropy):
                y = torch.randint(3, SHAPE[:1], generator=generator)
                y[0] = 2 * (y[0] == 2) if loss.ignore_index is None else 0  # a sample with a weight that counts
            known = loss.bound_to(y).constants(SHAPE)
            assert known.lipschitz <= whatever.lipschitz * (1 + 1e-12), name
            assert known.smoothness <= whatever.smoothness * (1 + 1e-12), name


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_are_those_of_dense_matrices(name):
    loss, point, direction = LOSSES[name], real(20), real(21)
    gradient, hessian = dense(loss, point)
    point.requires_grad_()
    assert torch.allclose(loss.gradient(point), gradient, rtol=1e-12, atol=1e-15)
    product = loss.hessian_vector_product(point, direction)
    assert torch.allclose(product.flatten(), hessian @ direction.flatten(), rtol=1e-10, atol=1e-14)
    assert not product.requires_grad
    assert not loss.gradient(point).requires_grad
    assert loss.gradient(point.float()).dtype == torch.float32
    assert loss.hessian_vector_product(point.float(), direction).dtype == torch.float32


def test_the_table_of_the_paper():
    square, logistic = LOSSES["square"], LOSSES["labels"]
    printed_square = square.constants(SHAPE, radius=2.0, table="paper")
    assert float(printed_square.smoothness) == pytest.approx(1 / 6)
    assert printed_square.lipschitz >= square.constants(SHAPE, radius=2.0).lipschitz
    printed_logistic = logistic.constants(SHAPE, table="paper")
    assert float(printed_logistic.lipschitz) == pytest.approx(2 / math.sqrt(6))
    assert float(printed_logistic.smoothness) == pytest.approx(2 / 6)
    assert not printed_logistic.flags
    for loss in (LOSSES["huber"], LOSSES["weighted labels"], o.CrossEntropy(LABELS, ignore_index=0)):
        with pytest.raises(o.ObjectiveError, match="the paper gives no constants"):
            loss.constants(SHAPE, table="paper")


@pytest.mark.parametrize("marked", [1, 4, 7])
def test_labels_with_many_ones_break_the_paper_and_are_flagged(marked):
    """The attained slope of log Σ exp - ⟨y, ·⟩ exceeds what is printed exactly where that is flagged."""
    claimed = logistic_loss(8, marked)
    label = torch.zeros(8, dtype=torch.float64)
    label[:marked] = 1.0
    scores = torch.zeros(8, dtype=torch.float64)
    scores[7] = 40.0
    attained = float((torch.softmax(scores, dim=0) - label).norm())
    assert (attained > float(claimed.lipschitz)) == bool(claimed.unsound)


def test_what_does_not_fit_is_refused():
    with pytest.raises(o.ObjectiveError, match="radius"):
        LOSSES["square"].constants(SHAPE, radius=-1.0)
    with pytest.raises(o.ObjectiveError, match="'certified' or 'paper'"):
        LOSSES["square"].constants(SHAPE, table="printed")
    with pytest.raises(o.ObjectiveError, match="tensor or its shape"):
        LOSSES["square"].constants("outputs")
    with pytest.raises(o.ObjectiveError, match="6×3 and 6"):
        o.Square(LABELS).constants(SHAPE)
    with pytest.raises(o.ObjectiveError, match="shape of the outputs"):
        LOSSES["square"].hessian_vector_product(real(), real()[:1])


def test_on_meta_only_shapes_matter():
    targets = SOFT.to("meta")
    assert o.CrossEntropy(targets).constants(SHAPE).smoothness.is_finite
    assert o.Huber(targets).constants(SHAPE, radius=1.0).smoothness <= 1 / 6 + 1e-9


@pytest.mark.parametrize("gap", [30.0, 700.0, 712.0, 744.0, 800.0, 1e5])
@pytest.mark.parametrize("share", [0.01, 0.9, 1.01, 50.0])
def test_probabilities_that_underflow_at_the_centre_count_where_the_domain_brings_them_back(
    gap: float, share: float
):
    """On the way from scores (gap, 0) to a tie, at a distance of gap/√2, the curvature p(1 - p)·2 rises to 1/2."""
    centre, radius = torch.tensor([[gap, 0.0]], dtype=torch.float64), share * gap / math.sqrt(2)
    loss = o.CrossEntropy(torch.tensor([0]))
    certificate = sf.certify(nn.Identity(), centre, objective=loss, domain=sf.Ball(radius), wrt="input")
    for part in (0.0, 0.5, 1.0):
        nearest = torch.sigmoid(torch.tensor(-max(gap - part * radius * math.sqrt(2), 0.0), dtype=torch.float64))
        assert float(2 * nearest * (1 - nearest)) <= float(certificate.smoothness) * (1 + 1e-9)
    assert certificate.smoothness <= 0.5 + 1e-12
