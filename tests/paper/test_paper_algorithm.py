"""Algorithm 4 as printed and with errata 5 and 7: by hand, against the lemmas behind it, and under attack."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_judges import Balls, Network, attack, batch_normalise, normal

from surefoot import paper
from surefoot.magnitude import Magnitude

positive = st.floats(1e-2, 1e2)
functions = st.builds(
    lambda m, a, b, v, j: paper.Smooth.of(
        bound=m, lipschitz=a, smoothness=b, value_at_zero=v, jacobian_at_zero=min(a, j)
    ),
    st.one_of(positive, st.just(math.inf)),
    st.one_of(positive, st.just(math.inf)),
    st.one_of(st.just(0.0), positive),
    st.one_of(st.just(0.0), positive),
    positive,
)
layers = st.builds(
    paper.Computation,
    st.builds(paper.Biaffine.of, positive, positive, st.one_of(st.just(0.0), positive), positive),
    st.lists(functions, max_size=3).map(tuple),
)
chains = st.lists(layers, min_size=1, max_size=4)
SETTINGS = settings(deadline=None, derandomize=True, max_examples=60)


def close(first, second):
    same = first.log2 == second.log2  # covers zero and infinity
    return same or abs(first.log2 - second.log2) < 1e-9


@given(chains, positive, positive)
@SETTINGS
def test_corrected_algorithm_is_lemma_smooth_gen_on_composed_layers(chain, radius, start):
    """The proof of Prop. smoothdeep: constants of a∘b by the chain rule, then Lemma smooth_gen."""
    trace = paper.algorithm_4(chain, radius, start, corrected=True)
    composed = []
    for layer, record in zip(chain, trace.layers, strict=True):
        inner = paper.composition(layer.nonlinear, record.biaffine_bound)
        state, parameters = record.biaffine_lipschitz_state, record.biaffine_lipschitz_parameters
        composed.append(
            paper.Bivariate(
                inner.bound,
                parameters * inner.lipschitz,
                state * inner.lipschitz,
                parameters**2 * inner.smoothness,
                layer.biaffine.smoothness * inner.lipschitz + parameters * state * inner.smoothness,
                state**2 * inner.smoothness,
                Magnitude.infinity(),
                Magnitude.infinity(),
                Magnitude.infinity(),
            )
        )
    lemma = paper.lemma_smooth_gen(composed, radius, start, as_printed=False)
    assert close(trace.result.bound, lemma.bound)
    assert close(trace.result.lipschitz, lemma.lipschitz)
    assert close(trace.result.smoothness, lemma.smoothness)


@given(chains, positive, positive)
@SETTINGS
def test_corrected_is_never_larger_than_printed(chain, radius, start):
    printed = paper.algorithm_4(chain, radius, start).result
    corrected = paper.algorithm_4(chain, radius, start, corrected=True).result
    assert corrected.bound <= printed.bound * (1 + 1e-9)
    assert corrected.lipschitz <= printed.lipschitz * (1 + 1e-9)
    assert corrected.smoothness <= printed.smoothness * (1 + 1e-9)


@given(chains, positive, positive, st.floats(1.0, 10.0), st.booleans(), st.booleans())
@SETTINGS
def test_monotone_in_the_radius_and_in_the_input(chain, radius, start, factor, keep, corrected):
    small = paper.algorithm_4(chain, radius, start, keep, corrected).result
    for large in (
        paper.algorithm_4(chain, radius * factor, start, keep, corrected).result,
        paper.algorithm_4(chain, radius, start * factor, keep, corrected).result,
    ):
        assert small.bound <= large.bound * (1 + 1e-9)
        assert small.lipschitz <= large.lipschitz * (1 + 1e-9)
        assert small.smoothness <= large.smoothness * (1 + 1e-9)


@given(chains, positive, positive)
@SETTINGS
def test_around_zero_nothing_changes_and_elsewhere_a_larger_ball_covers_it(chain, radius, start):
    """Around u* with ‖u*‖ = c the ball of radius R lies in the ball of radius R + c around zero."""
    same = paper.algorithm_4(paper.around_point(chain, 0.0), radius, start, corrected=True).result
    assert same == paper.algorithm_4(chain, radius, start, corrected=True).result
    moved = paper.algorithm_4(paper.around_point(chain, 0.7), radius, start, corrected=True).result
    covering = paper.algorithm_4(chain, radius + 0.7, start, corrected=True).result
    assert close(moved.bound, covering.bound)
    assert close(moved.lipschitz, covering.lipschitz)
    assert close(moved.smoothness, covering.smoothness)


ACTIVATIONS = {
    "softplus": (torch.nn.functional.softplus, lambda batch, width: paper.softplus(batch * width)),
    "sigmoid": (torch.sigmoid, lambda batch, width: paper.sigmoid(batch * width)),
    "softmax": (lambda z: z.softmax(dim=1), lambda batch, width: paper.softmax(width, batch)),
    "batch_norm": (batch_normalise(0.5), lambda batch, width: paper.batch_norm(width, batch, 0.5)),
}
NETWORKS = {
    "affine": (2, [1, 2, 1], [[], []]),
    "one neuron": (1, [1, 1, 1], [["softplus"], []]),
    "soft-plus": (2, [2, 2, 2], [["softplus"], ["softplus"]]),
    "classifier": (2, [2, 3, 2], [["softplus"], ["softmax"]]),
    "normalised": (3, [2, 2, 2], [["softplus", "batch_norm"], ["sigmoid"]]),
    "deep": (1, [1, 2, 2, 1], [["sigmoid"], ["softplus"], []]),
}


def build(name):
    batch, widths, names = NETWORKS[name]
    network = Network(batch, widths, [[ACTIVATIONS[key][0] for key in row] for row in names])
    computations = [
        paper.Computation(
            paper.fully_connected(batch), tuple(ACTIVATIONS[key][1](batch, width) for key in row), str(row)
        )
        for width, row in zip(widths[1:], names, strict=True)
    ]
    return network, computations, normal(batch, widths[0], seed=5)


@pytest.mark.parametrize("radius", [0.3, 1.5])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_resist_an_attack(name, radius):
    network, computations, inputs = build(name)
    radii = [radius * (1 + 0.5 * k) for k in range(len(computations))]
    found = attack(lambda u: network(inputs, u), Balls(network.sizes, radii), starts=6)
    for corrected in (False, True):
        result = paper.algorithm_4(computations, radii, float(inputs.norm()), corrected=corrected).result
        assert result.flags == ()
        for claimed, value in zip((result.bound, result.lipschitz, result.smoothness), found, strict=True):
            assert value <= float(claimed) * (1 + 1e-10)


@pytest.mark.parametrize("name", ["one neuron", "soft-plus", "classifier"])
def test_networks_around_a_point_resist_an_attack(name):
    network, computations, inputs = build(name)
    centre = normal(sum(network.sizes), seed=8)
    norms = [float(block.norm()) for block in centre.split(network.sizes)]
    radii = [0.2, 0.4]
    moved = paper.around_point(computations, norms)
    result = paper.algorithm_4(moved, radii, float(inputs.norm()), corrected=True).result
    found = attack(lambda u: network(inputs, u), Balls(network.sizes, radii, centre), starts=6)
    for claimed, value in zip((result.bound, result.lipschitz, result.smoothness), found, strict=True):
        assert value <= float(claimed) * (1 + 1e-10)


def test_residual_network_resists_an_attack():
    """x_t = softplus(W x_{t-1} + c + x_{t-2}), as layers on (x_t; x_{t-1}) from (x_0; 0)."""
    network = Network(1, [2, 2, 2, 2], [[], [], []])
    inputs = normal(1, 2, seed=6)

    def residual_network(parameters):
        previous, state = torch.zeros_like(inputs), inputs
        for index, block in enumerate(parameters.split(network.sizes)):
            new = torch.nn.functional.softplus(network.layer(index, state, block) + previous)
            previous, state = state, new
        return torch.cat([state, previous], 1).reshape(-1)

    computation = paper.Computation(*paper.residual(paper.fully_connected(), (paper.softplus(2),)))
    result = paper.algorithm_4([computation] * 3, 0.8, float(inputs.norm()), corrected=True).result
    found = attack(residual_network, Balls(network.sizes, [0.8] * 3), starts=5)
    assert result.flags == ()
    for claimed, value in zip((result.bound, result.lipschitz, result.smoothness), found, strict=True):
        assert value <= float(claimed) * (1 + 1e-10)


def test_the_bound_is_attained_by_a_product_of_scalars():
    """ERRATA 7: |u_2 u_1 x| ≤ R²|x|; the printed line says 4R²|x|."""
    layer = paper.Computation(paper.Biaffine.of(1.0))
    assert float(paper.algorithm_4([layer] * 2, 3.0, 2.0, corrected=True).result.bound) == pytest.approx(18.0)
    assert float(paper.algorithm_4([layer] * 2, 3.0, 2.0).result.bound) == pytest.approx(4 * 18.0)


def test_dropping_the_value_at_zero_is_flagged_and_exceeded():
    """ERRATA 4: at u = 0 a soft-plus network of width 50 has norm log 2·√50 = 4.9."""
    layer = paper.Computation(paper.fully_connected(), (paper.softplus(50),))
    dropped = paper.algorithm_4([layer], 0.1, 1.0, keep_value_at_zero=False).result
    kept = paper.algorithm_4([layer], 0.1, 1.0).result
    value = float(torch.nn.functional.softplus(torch.zeros(50, dtype=torch.float64)).norm())
    assert [flag[:8] for flag in dropped.flags] == ["ERRATA 4"]
    assert value > float(dropped.bound)
    assert value <= float(kept.bound)
    assert kept.flags == ()
    relu = paper.Computation(paper.fully_connected(), (paper.relu(),))
    assert paper.algorithm_4([relu], 0.1, 1.0, keep_value_at_zero=False).result.flags == ()


def test_trace_prints_as_a_table():
    flagged = paper.Computation(paper.convolution(3, 1, 4), (paper.relu(),), "conv")
    text = str(paper.algorithm_4([flagged, paper.Computation(paper.fully_connected(4))], 1.0, 1.0))
    heading, first, second, note = text.splitlines()
    assert heading.split() == ["layer", "m_{t,0}", "m_t", "ℓ_t", "L_t"]
    assert first.split()[:2] == ["conv", "*"]
    assert second.split()[0] == "2"
    assert note.startswith("* ERRATA 2")


def test_wrong_number_of_radii_is_refused_and_records_are_frozen():
    layer = paper.Computation(paper.fully_connected())
    with pytest.raises(ValueError, match="2 radii for a chain of 1"):
        paper.algorithm_4([layer], [1.0, 2.0], 1.0)
    with pytest.raises(ValueError, match="3 radii for a chain of 1"):
        paper.algorithm_4([layer], torch.ones(3), 1.0)
    with pytest.raises(FrozenInstanceError):
        layer.name = "other"
