"""The four rules of Lemma smooth_elt_wise and the lemma on bilinear maps, against sampled suprema."""

from __future__ import annotations

import pytest
import torch
from paper_judges import ascend, curvature_norm, jacobian_norm, normal, tensor_norm, value_norm

from surefoot import paper
from surefoot.magnitude import Magnitude
from surefoot.paper.chains import concatenate_bilinear

SCALES = (0.5, 1.0, 2.0)
MATRICES = [scale * normal(2, 2, seed=k) for k, scale in enumerate(SCALES)]


def piece(matrix):
    """x -> sigmoid(Mx), with ℓ = ‖M‖/4 and L = ‖M‖²/10, m = √2."""
    return lambda point: torch.sigmoid(matrix @ point)


def constants(matrix):
    norm = float(torch.linalg.matrix_norm(matrix, ord=2))
    return paper.Smooth.of(
        bound=2.0**0.5,
        lipschitz=norm / 4,
        smoothness=norm**2 / 10,
        value_at_zero=0.5**0.5,
        jacobian_at_zero=norm / 4,
    )


PIECES = [piece(matrix) for matrix in MATRICES]
PARTS = [constants(matrix) for matrix in MATRICES]

RULES = {
    "stack_separate": (
        lambda z: torch.cat([f(part) for f, part in zip(PIECES, z.split(2), strict=True)]),
        paper.stack_separate(PARTS),
        6,
    ),
    "stack_separate, maximum": (
        lambda z: torch.cat([f(part) for f, part in zip(PIECES, z.split(2), strict=True)]),
        paper.stack_separate(PARTS, as_printed=False),
        6,
    ),
    "sum_separate": (
        lambda z: sum(f(part) for f, part in zip(PIECES, z.split(2), strict=True)),
        paper.sum_separate(PARTS),
        6,
    ),
    "stack_shared": (lambda z: torch.cat([f(z) for f in PIECES]), paper.stack_shared(PARTS), 2),
    "sum_shared": (lambda z: sum(f(z) for f in PIECES), paper.sum_shared(PARTS), 2),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_resist_an_attack(name):
    function, result, size = RULES[name]
    zero = torch.zeros(size, dtype=torch.float64)
    starts = [zero] + [scale * normal(size, seed=k) for k in range(6) for scale in (0.3, 1.0)]
    assert ascend(lambda z: value_norm(function, z), starts) <= float(result.bound)
    assert ascend(lambda z: jacobian_norm(function, z), starts) <= float(result.lipschitz)
    assert ascend(lambda z: curvature_norm(function, z), starts) <= float(result.smoothness)
    assert value_norm(function, zero) <= float(result.value_at_zero) * (1 + 1e-12)
    assert jacobian_norm(function, zero) <= float(result.jacobian_at_zero) * (1 + 1e-12)


def linear(slope):
    return paper.Smooth.of(lipschitz=slope, smoothness=0.0, value_at_zero=0.0, jacobian_at_zero=slope)


def test_curvatures_are_attained_by_squares():
    """With 3x²/2 and 4y²/2: stacked 4, summed 4; with a shared x: stacked 5, summed 7."""
    parts = [paper.Smooth.of(smoothness=3.0), paper.Smooth.of(smoothness=4.0)]
    printed = [
        rule(parts) for rule in (paper.stack_separate, paper.sum_separate, paper.stack_shared, paper.sum_shared)
    ]
    assert [float(result.smoothness) for result in printed] == pytest.approx([4.0, 4.0, 5.0, 7.0])
    weights = torch.tensor([3.0, 4.0], dtype=torch.float64)
    judged = [
        curvature_norm(lambda z: weights * z**2 / 2, torch.ones(2, dtype=torch.float64)),
        curvature_norm(lambda z: (weights * z**2 / 2).sum().reshape(1), torch.ones(2, dtype=torch.float64)),
        curvature_norm(lambda z: weights * z[0] ** 2 / 2, torch.ones(1, dtype=torch.float64)),
        curvature_norm(lambda z: (weights * z[0] ** 2 / 2).sum().reshape(1), torch.ones(1, dtype=torch.float64)),
    ]
    assert judged == pytest.approx([4.0, 4.0, 5.0, 7.0])


@pytest.mark.parametrize("seed", range(4))
def test_concatenated_bilinear_maps_have_the_largest_smoothness(seed):
    """ERRATA 11: the maximum, and it is attained."""
    tensors = {
        (i, j): (1 + i + 2 * j) * normal(2, 2, 2, seed=10 * seed + 2 * i + j) for i in range(2) for j in range(2)
    }
    whole = torch.zeros(8, 4, 4, dtype=torch.float64)  # (outputs, x, u)
    for (i, j), tensor in tensors.items():
        start = 2 * (i + 2 * j)
        whole[start : start + 2, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = tensor
    pieces = [tensor_norm(tensor, starts=30, rounds=60) for tensor in tensors.values()]
    claimed = concatenate_bilinear([Magnitude.of(piece) for piece in pieces])
    assert tensor_norm(whole, starts=30, rounds=60) == pytest.approx(float(claimed), rel=1e-6)
    with pytest.raises(ValueError, match="bilinear"):
        concatenate_bilinear([])
