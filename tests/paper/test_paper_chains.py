"""Compositions, chains of Lipschitz and smooth computations, chains in their input, and objectives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_judges import Balls, Network, ascend, attack, curvature_norm, normal

from surefoot import paper
from surefoot.magnitude import Magnitude

SLACK = 1 + 1e-10
positive = st.floats(1e-3, 1e3)


def assert_bounds(result, found):
    """The three claimed numbers are not below what the attack found."""
    for claimed, value in zip((result.bound, result.lipschitz, result.smoothness), found, strict=True):
        assert value <= float(claimed) * SLACK


def spectral(matrix):
    return float(torch.linalg.matrix_norm(matrix, ord=2))


@pytest.mark.parametrize("radius", [0.1, 1.0, 4.0])
def test_restriction_to_a_ball_resists_an_attack_and_is_attained(radius):
    """x²/2 is not Lipschitz; on a ball its slope is R and its size R²/2."""
    square = paper.Smooth.of(smoothness=1.0, value_at_zero=0.0, jacobian_at_zero=0.0)
    assert float(paper.restricted_lipschitz(square, radius)) == pytest.approx(radius)
    assert float(paper.restricted_bound(square, radius)) == pytest.approx(radius**2)
    softplus = paper.softplus(2)
    function = torch.nn.functional.softplus
    value, slope, _ = attack(function, Balls([2], [radius]))
    assert slope <= float(paper.restricted_lipschitz(softplus, radius)) * SLACK
    assert value <= float(paper.restricted_bound(softplus, radius)) * SLACK
    assert float(paper.restricted_lipschitz(softplus, radius)) == pytest.approx(min(1.0, 0.5 + radius / 4))


COMPOSITION = (
    (lambda z: z * z / 2, paper.Smooth.of(smoothness=1.0, value_at_zero=0.0, jacobian_at_zero=0.0)),
    (torch.nn.functional.softplus, paper.softplus(3)),
    (lambda z: z.softmax(dim=0), paper.softmax(3)),
    (torch.sigmoid, paper.sigmoid(3)),
)


@pytest.mark.parametrize("order", [(0,), (1,), (0, 1), (1, 0), (1, 2), (0, 1, 3), (3, 0, 2, 1)])
@pytest.mark.parametrize("radius", [0.5, 2.0])
def test_composition_resists_an_attack(order, radius):
    def function(point):
        for index in order:
            point = COMPOSITION[index][0](point)
        return point

    result = paper.composition([COMPOSITION[index][1] for index in order], radius)
    assert_bounds(result, attack(function, Balls([3], [radius])))
    assert result.flags == ()


def soft_layer(seed, state_scale, parameter_scale):
    """φ(x,u) = softplus(Ax + Bu) on R³ × R²; its constants jointly and per argument."""
    state, parameters = state_scale * normal(3, 3, seed=seed), parameter_scale * normal(3, 2, seed=seed + 50)
    joint = spectral(torch.cat([state, parameters], 1))
    a, b = spectral(state), spectral(parameters)
    value = math.log(2) * math.sqrt(3)
    together = paper.Smooth.of(
        lipschitz=joint, smoothness=joint**2 / 4, value_at_zero=value, jacobian_at_zero=joint / 2
    )
    numbers = (math.inf, b, a, b * b / 4, a * b / 4, a * a / 4, value, b / 2, a / 2)
    apart = paper.Bivariate(*(Magnitude.of(number) for number in numbers))
    return (lambda x, u: torch.nn.functional.softplus(state @ x + parameters @ u)), together, apart


def chain_function(layers, start):
    def function(parameters):
        state = start
        for layer, block in zip(layers, parameters.split(2), strict=True):
            state = layer(state, block)
        return state

    return function


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.3, 1.5])
def test_lemmas_on_chains_resist_an_attack(depth, scale):
    layers, together, apart = zip(*(soft_layer(10 * k, scale, 1.0) for k in range(depth)), strict=True)
    start, radii = normal(3, seed=99), [0.5 + 0.5 * k for k in range(depth)]
    found = attack(chain_function(layers, start), Balls([2] * depth, radii))
    norm = float(start.norm())
    everywhere = paper.lemma_smooth(together)
    restricted = paper.corollary_restricted(together, radii, norm)
    general = paper.lemma_smooth_gen(apart, radii, norm, as_printed=False)
    for result in (everywhere, restricted, general):
        assert_bounds(result, found)
    assert restricted.lipschitz <= everywhere.lipschitz
    assert restricted.smoothness <= everywhere.smoothness


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=6), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=50)
def test_lemma_smooth_is_lemma_smooth_gen_with_equal_constants(pairs, as_printed):
    unknown = Magnitude.infinity()
    apart = [
        paper.Bivariate(*(Magnitude.of(z) for z in (math.inf, a, a, b, b, b)), unknown, unknown, unknown)
        for a, b in pairs
    ]
    first = paper.lemma_smooth(pairs)
    second = paper.lemma_smooth_gen(apart, 1.0, 1.0, as_printed)
    assert first.lipschitz.log2 == pytest.approx(second.lipschitz.log2, abs=1e-10)
    assert first.smoothness.log2 == pytest.approx(second.smoothness.log2, abs=1e-10)


def test_corollary_holds_for_products_that_are_not_lipschitz():
    """φ(x,u) = x∘u + x/2: L = 1, ℓ = ∞."""
    layer = paper.Smooth.of(smoothness=1.0, value_at_zero=0.0, jacobian_at_zero=0.5)
    start, radii = normal(2, seed=7), [0.7, 1.3, 0.4]
    result = paper.corollary_restricted([layer] * 3, radii, float(start.norm()))
    function = chain_function([lambda x, u: x * u + x / 2] * 3, start)
    assert_bounds(result, attack(function, Balls([2] * 3, radii)))
    assert result.lipschitz.is_finite
    assert not paper.lemma_smooth([layer] * 3).lipschitz.is_finite


def test_printed_radii_of_lemma_smooth_gen_are_flagged_and_exceeded():
    """ERRATA 6 with φ(x,u) = x²/2 + u, x_0 = 2, R = 0.1: the printed ℓ is 1.1, the network has 2.3."""
    numbers = (math.inf, 1.0, math.inf, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    layer = paper.Bivariate(*(Magnitude.of(number) for number in numbers))
    printed = paper.lemma_smooth_gen([layer, layer], 0.1, 2.0)
    proved = paper.lemma_smooth_gen([layer, layer], 0.1, 2.0, as_printed=False)
    assert [flag[:8] for flag in printed.flags] == ["ERRATA 6"]
    assert proved.flags == ()

    def function(parameters):
        return ((2.0 + parameters[0]) ** 2 / 2 + parameters[1]).reshape(1)

    found = attack(function, Balls([1, 1], [0.1, 0.1]))
    assert found[0] > float(printed.bound)
    assert found[1] > float(printed.lipschitz)
    assert_bounds(proved, found)


def test_swapped_radii_are_not_flagged_where_they_do_not_matter():
    layers = [soft_layer(10 * k, 1.0, 1.0)[2] for k in range(2)]
    far = paper.lemma_smooth_gen(layers, 50.0, 50.0)  # the minimum is the global constant
    assert far.flags == ()
    numbers = (math.inf, math.inf, math.inf, 1.0, 1.0, 1.0, 0.0, 0.3, 0.3)
    symmetric = paper.Bivariate(*(Magnitude.of(number) for number in numbers))
    assert paper.lemma_smooth_gen([symmetric], 0.7, 1.9).flags == ()


def test_chain_as_function_of_its_input_resists_an_attack():
    network = Network(1, [3, 4, 3], [[torch.nn.functional.softplus], [lambda z: z.softmax(dim=1)]])
    parameters = normal(sum(network.sizes), seed=11)
    norms = [float(block.norm()) for block in parameters.split(network.sizes)]
    layers = (
        paper.Computation(paper.fully_connected(), (paper.softplus(4),)),
        paper.Computation(paper.fully_connected(), (paper.softmax(3),)),
    )
    pieces = [
        part for layer, norm in zip(layers, norms, strict=True) for part in paper.fix_parameters(layer, norm)
    ]
    for radius in (0.3, 3.0):
        result = paper.smooth_state(pieces, radius)
        found = attack(lambda z: network(z.reshape(1, 3), parameters), Balls([3], [radius]))
        assert_bounds(result, found)
        assert result.flags == ()


@pytest.mark.parametrize("radius", [0.2, 1.0])
def test_objective_resists_an_attack(radius):
    """Square loss (not Lipschitz, so ℓ̃_h is the restricted one) and logistic loss, with a ridge."""
    network = Network(2, [2, 3, 3], [[torch.nn.functional.softplus], []])
    inputs, label = normal(2, 2, seed=21), normal(6, seed=22)
    layers = [
        paper.Computation(paper.fully_connected(2), (paper.softplus(6),)),
        paper.Computation(paper.fully_connected(2)),
    ]
    radii = [radius, 2 * radius]
    chain = paper.algorithm_4(layers, radii, float(inputs.norm())).result
    domain = Balls(network.sizes, radii)
    hot = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)

    def square(parameters):
        return (network(inputs, parameters) - label).square().sum() / 2 + 0.15 * parameters.square().sum()

    def logistic(parameters):
        scores = network(inputs, parameters).reshape(2, 3)
        return (scores.logsumexp(dim=1) - scores @ hot).mean() + 0.15 * parameters.square().sum()

    centre_gradient = float((network(inputs, domain.centre) - label).norm())
    diameter = paper.diameter_of_balls(radii)
    quadratic = paper.square_loss(math.inf, float(label.norm()))
    first = paper.objective(chain, quadratic, 0.3, centre_gradient, diameter)
    second = paper.objective(chain, paper.supervised([paper.logistic_loss(3)] * 2), 0.3)
    starts = domain.starts(6, seed=3)
    for function, claimed in ((square, first), (logistic, second)):
        vector = lambda u, f=function: f(u).reshape(1)  # noqa: E731
        assert ascend(lambda u, v=vector: curvature_norm(v, u), starts, domain.project) <= float(
            claimed.smoothness
        )
        assert claimed.flags == ()
    gradient = ascend(lambda u: float((network(inputs, u) - label).norm()), starts, domain.project)
    assert gradient <= float(first.restricted_lipschitz)
    assert not paper.objective(chain, quadratic).smoothness.is_finite
