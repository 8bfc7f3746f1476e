"""What the errata say holds instead of a printed constant: valid under attack, and attained where claimed."""

from __future__ import annotations

import math

import pytest
import torch
from paper_judges import ascend, batch_normalise, curvature_norm, jacobian_norm, normal, value_norm

from surefoot import paper


def test_erratum_3_bound_of_batch_normalisation_is_the_root():
    function = batch_normalise(1e-3)
    point = 1e3 * torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    assert value_norm(function, point) == pytest.approx(math.sqrt(4))
    assert value_norm(function, point) <= math.sqrt(4)


def test_erratum_3_positions_that_are_not_counted_are_flagged():
    """Images of 4×4 positions, 2 channels, 3 samples: √96 is reached, and δm = 6 counts no positions."""
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    size = float(torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-12).norm())
    printed = paper.batch_norm(2, 3, 1e-12, positions=16)
    assert float(printed.bound) < size
    assert any("ERRATA 3" in flag for flag in printed.unsound)
    assert not paper.batch_norm(2, 3 * 16, 1e-12).unsound
    assert size <= float(paper.batch_norm(2, 3 * 16, 1e-12).bound)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 30.0])
def test_erratum_3_slope_of_batch_normalisation_is_attained_at_zero(epsilon):
    function = lambda z: batch_normalise(epsilon)(z.reshape(4, 2)).reshape(-1)  # noqa: E731
    at_zero = jacobian_norm(function, torch.zeros(8, dtype=torch.float64))
    assert at_zero == pytest.approx(epsilon**-0.5)
    starts = [normal(8, seed=k) * scale for k in range(5) for scale in (0.1, 1.0)]
    assert ascend(lambda z: jacobian_norm(function, z), starts) <= epsilon**-0.5 * (1 + 1e-12)


@pytest.mark.parametrize(("samples", "epsilon"), [(2, 0.1), (4, 1.0), (5, 9.0)])
def test_erratum_3_curvature_of_batch_normalisation_is_attained(samples, epsilon):
    """κ = (3/2)(4/5)^{5/2}, at a centred row of norm √(mε)/2."""
    claimed = 1.5 * 0.8**2.5 / math.sqrt(samples) / epsilon
    function = lambda z: batch_normalise(epsilon)(z.reshape(samples, 2)).reshape(-1)  # noqa: E731
    row = normal(samples, seed=3)
    row = row - row.mean()
    row = row / row.norm() * math.sqrt(samples * epsilon) / 2
    point = torch.stack([row, torch.zeros_like(row)], dim=1).reshape(-1)
    hessian = torch.func.jacrev(torch.func.jacrev(function))(point)
    direction = point / point.norm()
    along = float(torch.einsum("nij,n,i,j->", hessian, direction, direction, direction))
    assert abs(along) == pytest.approx(claimed, rel=1e-10)
    starts = [normal(2 * samples, seed=k) * math.sqrt(epsilon) for k in range(6)] + [point]
    assert ascend(lambda z: curvature_norm(function, z), starts) <= claimed * (1 + 1e-9)


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_erratum_13_softmax(classes):
    function = lambda z: z.softmax(dim=0)  # noqa: E731
    starts = [normal(classes, seed=k) * scale for k in range(8) for scale in (0.5, 2.0)]
    rare = torch.full((classes,), -40.0, dtype=torch.float64)
    rare[:2] = torch.tensor([math.log(2 + math.sqrt(3)), 0.0], dtype=torch.float64)  # σ'' is largest there
    starts += [rare, torch.cat([torch.zeros(2, dtype=torch.float64), rare[2:]])]
    slope = ascend(lambda z: jacobian_norm(function, z), starts)
    curvature = ascend(lambda z: curvature_norm(function, z), starts)
    assert slope == pytest.approx(0.5)
    assert curvature == pytest.approx(math.sqrt(2) / (3 * math.sqrt(3)), rel=1e-7)
    assert slope <= 0.5 * (1 + 1e-12)
    assert curvature <= math.sqrt(6) / 9 * (1 + 1e-9)


def test_erratum_13_logistic_loss():
    label = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    function = lambda z: (z.logsumexp(dim=0) - label @ z).reshape(1)  # noqa: E731
    wrong = torch.tensor([-40.0, 40.0, -40.0], dtype=torch.float64)
    even = torch.tensor([0.0, 0.0, -40.0], dtype=torch.float64)
    assert jacobian_norm(function, wrong) == pytest.approx(math.sqrt(2))
    assert curvature_norm(function, even) == pytest.approx(0.5)
    starts = [normal(3, seed=k) for k in range(10)] + [wrong, even]
    assert ascend(lambda z: jacobian_norm(function, z), starts) <= math.sqrt(2) * (1 + 1e-12)
    assert ascend(lambda z: curvature_norm(function, z), starts) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 3), (3, 1), (3, 2), (2, 1)])
def test_erratum_15_average_pooling(kernel, stride):
    """√(patches over one entry)/k bounds the norm; disjoint patches attain 1/k."""
    side = 6
    function = lambda z: torch.nn.functional.avg_pool2d(z.reshape(1, side, side), kernel, stride).reshape(-1)  # noqa: E731
    norm = jacobian_norm(function, torch.zeros(side * side, dtype=torch.float64))
    claimed = math.ceil(kernel / stride) / kernel
    assert norm <= claimed * (1 + 1e-12) <= 1 + 1e-12
    if stride == kernel:
        assert norm == pytest.approx(1 / kernel)


def test_third_derivative_of_softplus_needs_other_brackets_than_printed():
    """Printed -sinh/(2(1+cosh²)) would give 0.177 for the sigmoid; -sinh/(2(1+cosh)²) gives √3/18 ≤ 1/10."""
    x = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    second = torch.func.vmap(torch.func.grad(torch.func.grad(torch.sigmoid)))(x)
    assert torch.allclose(second, -x.sinh() / (2 * (1 + x.cosh()) ** 2), atol=1e-12)
    assert float(second.abs().max()) == pytest.approx(math.sqrt(3) / 18, rel=1e-6)
    assert float((x.sinh() / (2 * (1 + x.cosh() ** 2))).max()) == pytest.approx(math.sqrt(2) / 8, rel=1e-6)
