"""The printed constants of layers: what is flagged is exceeded by an example, what is not resists an attack."""

from __future__ import annotations

import math

import pytest
import torch
from paper_judges import (
    ascend,
    batch_normalise,
    curvature_norm,
    jacobian_norm,
    normal,
    tensor_norm,
    value_norm,
)

from surefoot import paper

DIMENSION, BATCH, EPSILON = 4, 3, 0.3


def rows(function):
    """A function of a (batch, features) matrix as a function of a vector."""
    return lambda point: function(point.reshape(BATCH, DIMENSION)).reshape(-1)


SMOOTH_FUNCTIONS = {
    "softplus": (rows(torch.nn.functional.softplus), paper.softplus(BATCH * DIMENSION)),
    "sigmoid": (rows(torch.sigmoid), paper.sigmoid(BATCH * DIMENSION)),
    "softmax": (rows(lambda z: z.softmax(dim=1)), paper.softmax(DIMENSION, BATCH)),
    "average_pool": (
        lambda point: torch.nn.functional.avg_pool2d(point.reshape(3, 2, 2), 2).reshape(-1),
        paper.average_pool(),
    ),
    "average_pool overlapping": (
        lambda point: torch.nn.functional.avg_pool2d(point.reshape(1, 3, 4), 2, 1).reshape(-1),
        paper.average_pool(),
    ),
    "batch_norm": (rows(batch_normalise(EPSILON)), paper.batch_norm(DIMENSION, BATCH, EPSILON)),
    "batch_norm appendix": (
        rows(batch_normalise(EPSILON)),
        paper.batch_norm(DIMENSION, BATCH, EPSILON, "appendix"),
    ),
}


@pytest.mark.parametrize("name", SMOOTH_FUNCTIONS)
def test_unflagged_smooth_functions_resist_an_attack(name):
    function, constants = SMOOTH_FUNCTIONS[name]
    starts = [scale * normal(12, seed=k) for k in range(8) for scale in (0.1, 1.0, 5.0)]
    zero = torch.zeros(12, dtype=torch.float64)
    assert constants.unsound == ()
    assert ascend(lambda z: value_norm(function, z), starts, rounds=60) <= float(constants.bound)
    assert ascend(lambda z: jacobian_norm(function, z), starts, rounds=60) <= float(constants.lipschitz)
    assert ascend(lambda z: curvature_norm(function, z), starts, rounds=60) <= float(constants.smoothness)
    assert value_norm(function, zero) <= float(constants.value_at_zero)
    assert jacobian_norm(function, zero) <= float(constants.jacobian_at_zero)


@pytest.mark.parametrize(
    ("function", "constants"),
    [
        (torch.relu, paper.relu()),
        (lambda z: torch.nn.functional.max_pool2d(z.reshape(1, 4, 4), 2), paper.max_pool(2, 2)),
        (lambda z: torch.nn.functional.max_pool2d(z.reshape(1, 4, 4), 2, 3), paper.max_pool(2, 3)),
    ],
)
def test_kinked_functions_are_one_lipschitz(function, constants):
    assert constants.unsound == ()
    assert not constants.smoothness.is_finite
    for seed in range(300):
        point, other = normal(16, seed=seed), normal(16, seed=seed + 1000) * (0.01 if seed % 2 else 1.0)
        slope = (function(point + other) - function(point)).norm() / other.norm()
        assert float(slope) <= float(constants.lipschitz) * (1 + 1e-12)


def test_overlapping_max_pool_is_flagged_and_exceeded():
    constants = paper.max_pool(3, 1)
    assert [flag[:9] for flag in constants.unsound] == ["ERRATA 15"]
    spike = torch.zeros(1, 5, 5, dtype=torch.float64)
    spike[0, 2, 2] = 1.0
    pooled = torch.nn.functional.max_pool2d(spike, 3, 1)
    assert float(pooled.norm() / spike.norm()) == 3.0 > float(constants.lipschitz)  # √9 patches, ⌈3/1⌉


def linear_part_of_convolution(kernel, stride, batch, side):
    """The matrix that copies the intercepts to the outputs, from the layer itself."""
    layer = torch.nn.Conv2d(1, 2, kernel, stride, dtype=torch.float64)
    image = torch.zeros(batch, 1, side, side, dtype=torch.float64)
    matrix = torch.func.jacrev(lambda bias: torch.conv2d(image, layer.weight * 0, bias, stride))(layer.bias)
    return matrix.reshape(-1, 2), math.prod(matrix.shape[2:4])


@pytest.mark.parametrize("linear_part", ["main text", "appendix"])
@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 1, 3), (3, 1, 4), (3, 1, 5), (2, 2, 2), (3, 2, 9)])
def test_linear_part_of_a_convolution_is_flagged_exactly_where_it_is_exceeded(kernel, stride, side, linear_part):
    matrix, positions = linear_part_of_convolution(kernel, stride, BATCH, side)
    constants = paper.convolution(kernel, stride, BATCH, positions, linear_part)
    norm = float(torch.linalg.matrix_norm(matrix, ord=2))
    assert norm == pytest.approx(math.sqrt(BATCH * positions))  # ERRATA 2
    exceeded = norm > float(constants.lipschitz_parameters) * (1 + 1e-9)
    assert exceeded == bool(constants.unsound)
    assert paper.convolution(kernel, stride, BATCH).unsound  # without the positions: never promised


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 1, 0), (2, 2, 0), (3, 2, 1), (1, 1, 0)])
def test_bilinear_part_of_a_convolution_resists_an_attack(kernel, stride, padding):
    constants = paper.convolution(kernel, stride, BATCH)
    sizes = (2, 2, 6, 6), (3, 2, kernel, kernel)
    image, weight = normal(*sizes[0], seed=3), normal(*sizes[1], seed=4)
    for _ in range(40):  # alternating power iteration: the gradient of half the squared norm in each argument
        image = image / image.norm()
        weight = weight / weight.norm()
        image, weight = (
            torch.func.grad(lambda z: torch.conv2d(z, weight, None, stride, padding).square().sum() / 2)(image),  # noqa: B023
            torch.func.grad(lambda w: torch.conv2d(image, w, None, stride, padding).square().sum() / 2)(weight),  # noqa: B023
        )
    image, weight = image / image.norm(), weight / weight.norm()
    ratio = float(torch.conv2d(image, weight, None, stride, padding).norm())
    assert 0.5 * float(constants.smoothness) <= ratio <= float(constants.smoothness) * (1 + 1e-9)


def test_fully_connected_constants_are_attained():
    constants = paper.fully_connected(BATCH)

    def bilinear(point):
        return (point[:6].reshape(BATCH, 2) @ point[6:].reshape(2, 2)).reshape(-1)

    hessian = torch.func.jacrev(torch.func.jacrev(bilinear))(torch.zeros(10, dtype=torch.float64))
    assert tensor_norm(hessian) == pytest.approx(float(constants.smoothness))
    copies = torch.func.jacrev(lambda bias: bias.expand(BATCH, 2))(torch.zeros(2, dtype=torch.float64))
    norm = float(torch.linalg.matrix_norm(copies.reshape(-1, 2), ord=2))
    assert norm == pytest.approx(float(constants.lipschitz_parameters))
    assert constants.unsound == ()


def test_residual_state_constant_resists_an_attack():
    for seed in range(20):
        linear = normal(3, 3, seed=seed) * (0.1 + 0.3 * seed)
        norm = float(torch.linalg.matrix_norm(linear, ord=2))
        identity, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
        augmented = torch.cat([torch.cat([linear, identity], 1), torch.cat([identity, zero], 1)], 0)
        biaffine, _ = paper.residual(paper.Biaffine.of(1.0, 1.0, norm), ())
        assert float(torch.linalg.matrix_norm(augmented, ord=2)) <= float(biaffine.lipschitz_state)
        assert float(torch.linalg.matrix_norm(augmented, ord=2)) <= (norm + math.sqrt(norm**2 + 4)) / 2 + 1e-9


def test_residual_bound_is_flagged_only_where_finite_and_is_exceeded():
    biaffine = paper.fully_connected()
    bounded = paper.Smooth.of(bound=1.0, lipschitz=0.25, smoothness=0.1, value_at_zero=0.5, jacobian_at_zero=0.25)
    _, (flagged,) = paper.residual(biaffine, (bounded,))
    assert [flag[:9] for flag in flagged.unsound] == ["ERRATA 14"]
    state = torch.tensor([0.0, 5.0], dtype=torch.float64)  # (ω₁, ω₂)
    image = torch.stack([torch.sigmoid(state[0]), state[1]])
    assert float(image.norm()) > float(flagged.bound)
    assert float(image.norm()) <= math.sqrt(1.0 + 25.0)  # √(m_a² + sup‖ω₂‖²)
    _, (unflagged,) = paper.residual(biaffine, (paper.softplus(1),))
    assert unflagged.unsound == ()
    assert not unflagged.bound.is_finite


def test_residual_function_resists_an_attack():
    _, (constants,) = paper.residual(paper.fully_connected(), (paper.sigmoid(3),))

    def augmented(point):
        return torch.cat([torch.sigmoid(point[:3]), point[3:]])

    starts = [normal(6, seed=k) for k in range(10)]
    assert ascend(lambda z: jacobian_norm(augmented, z), starts) <= float(constants.lipschitz) * (1 + 1e-12)
    assert ascend(lambda z: curvature_norm(augmented, z), starts) <= float(constants.smoothness)


@pytest.mark.parametrize(("strength", "convexity"), [(0.2, 1.0), (3.0, 0.5), (10.0, 0.1)])
def test_implicit_function_resists_an_attack(strength, convexity):
    """f(α,β) = μ‖β‖²/2 + s log cosh(aᵀα + bᵀβ): its minimiser is -(s/μ) tanh(t) b with t + k tanh t = aᵀα."""
    first, second = normal(2, seed=5), normal(3, seed=6)
    joint = torch.cat([first, second])
    quadratic = convexity * torch.diag(torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    largest = float(torch.linalg.eigvalsh(quadratic + strength * torch.outer(joint, joint)).max())
    hessian_lipschitz = strength * float(joint.norm()) ** 3 * 4 / (3 * math.sqrt(3))
    constants = paper.implicit_function(largest, convexity, hessian_lipschitz, 0.0)

    k = strength * float(second.norm()) ** 2 / convexity
    t = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    scale = strength / convexity * float(second.norm())
    slope = scale * float(first.norm()) / (t.cosh() ** 2 + k)
    curvature = scale * float(first.norm()) ** 2 * 2 * t.cosh() ** 3 * t.sinh().abs() / (t.cosh() ** 2 + k) ** 3
    assert float(slope.max()) <= float(constants.lipschitz)
    assert float(curvature.max()) <= float(constants.smoothness)
    ratio = float(slope.max())
    assert float(curvature.max()) <= hessian_lipschitz / convexity * (1 + ratio**2)  # the sharper one
