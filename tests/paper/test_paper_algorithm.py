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


def test_one_layer_by_hand():
    """L_b = 2, l^u = 3, l^x = 5, ‖b(0,0)‖ = 7, R = 1/2, ‖x‖ = 3, then two functions."""
    square = paper.Smooth.of(smoothness=0.5, value_at_zero=1.0, jacobian_at_zero=0.0)
    other = paper.Smooth.of(lipschitz=4.0, smoothness=0.25, value_at_zero=0.0, jacobian_at_zero=1.0)
    layer = paper.Computation(paper.Biaffine.of(2.0, 3.0, 5.0, 7.0), (square, other), "first")
    trace = paper.algorithm_4([layer], 0.5, 3.0)
    (record,) = trace.layers
    assert float(record.biaffine_lipschitz_state) == pytest.approx(6.0)
    assert float(record.biaffine_lipschitz_parameters) == pytest.approx(9.0)
    assert float(record.biaffine_bound) == pytest.approx(29.5)
    first, second = record.inner
    assert [float(z) for z in (first.restricted_lipschitz, first.bound, first.lipschitz, first.smoothness)] == (
        pytest.approx([14.75, 1 + 14.75 * 29.5, 14.75, 0.5])
    )
    assert [
        float(z) for z in (second.restricted_lipschitz, second.bound, second.lipschitz, second.smoothness)
    ] == (pytest.approx([4.0, 1744.5, 59.0, 0.5 * 4 + 0.25 * 14.75**2]))
    assert float(trace.result.bound) == pytest.approx(1744.5)
    assert float(trace.result.lipschitz) == pytest.approx(9 * 59)
    assert float(trace.result.smoothness) == pytest.approx(81 * 56.390625)
    once = paper.algorithm_4([layer], 0.5, 3.0, corrected=True).layers[0]
    assert float(once.biaffine_bound) == pytest.approx(2 * 3 * 0.5 + 5 * 3 + 3 * 0.5 + 7)


def test_two_layers_by_hand():
    """Second layer L_b = 1, l^u = 2, l^x = 3, R = 4 and a(z) with ℓ = 2, L = 5 after (m, ℓ, L) = (6, 7, 11)."""
    first = paper.Computation(
        paper.Biaffine.of(0.0, 7.0),
        (paper.Smooth.of(bound=6.0, lipschitz=1.0, smoothness=11 / 49, value_at_zero=0.0, jacobian_at_zero=1.0),),
    )
    second = paper.Computation(
        paper.Biaffine.of(1.0, 2.0, 3.0),
        (paper.Smooth.of(lipschitz=2.0, smoothness=5.0, value_at_zero=0.0, jacobian_at_zero=2.0),),
    )
    trace = paper.algorithm_4([first, second], [4.0, 4.0], 1.0)
    before = trace.layers[0]
    assert [float(z) for z in (before.bound, before.lipschitz, before.smoothness)] == pytest.approx([6, 7, 11])
    # ℓ^x_0 = 7, ℓ^u_0 = 8, ℓ^0 = 2, L^0 = 5
    assert float(trace.result.lipschitz) == pytest.approx(7 * 2 * 7 + 8 * 2)
    assert float(trace.result.smoothness) == pytest.approx(
        11 * 7 * 2 + 49 * 5 * 49 + 2 * (8 * 7 * 5 + 2) * 7 + 64 * 5
    )


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


def test_unrestricted_slope_is_followed_literally():
    """ERRATA 5: a function without Lipschitz constant is harmless first and makes L infinite later."""
    square = paper.Smooth.of(smoothness=1.0, value_at_zero=0.0, jacobian_at_zero=0.0)
    curved = paper.softplus(3)
    biaffine = paper.fully_connected()
    early = [paper.Computation(biaffine, (square, curved))]
    late = [paper.Computation(biaffine, (curved, square))]
    assert paper.algorithm_4(early, 1.0, 1.0).result.smoothness.is_finite
    assert not paper.algorithm_4(late, 1.0, 1.0).result.smoothness.is_finite
    assert paper.algorithm_4(late, 1.0, 1.0, corrected=True).result.smoothness.is_finite


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


def test_flags_are_kept_per_layer_and_for_the_whole():
    clean = paper.Computation(paper.fully_connected(4), (paper.relu(),), "clean")
    flagged = paper.Computation(paper.convolution(3, 1, 4), (paper.relu(), paper.max_pool(3, 2)), "flagged")
    trace = paper.algorithm_4([flagged, clean, flagged], 1.0, 1.0)
    assert [len(layer.flags) for layer in trace.layers] == [2, 0, 2]
    assert trace.result.flags == flagged.unsound


def test_radii_may_be_a_list_or_a_tensor():
    chain = [paper.Computation(paper.fully_connected(), (paper.softplus(2),))] * 2
    listed = paper.algorithm_4(chain, [0.5, 2.0], 1.0).result
    assert listed == paper.algorithm_4(chain, torch.tensor([0.5, 2.0]), 1.0).result
    assert listed.lipschitz > paper.algorithm_4(chain, 0.5, 1.0).result.lipschitz


def test_trace_prints_as_a_table():
    flagged = paper.Computation(paper.convolution(3, 1, 4), (paper.relu(),), "conv")
    text = str(paper.algorithm_4([flagged, paper.Computation(paper.fully_connected(4))], 1.0, 1.0))
    heading, first, second, note = text.splitlines()
    assert heading.split() == ["layer", "m_{t,0}", "m_t", "ℓ_t", "L_t"]
    assert first.split()[:2] == ["conv", "*"]
    assert second.split()[0] == "2"
    assert note.startswith("* ERRATA 2")


def test_a_thousand_layers_print_their_number():
    layer = paper.Computation(paper.Biaffine.of(1.0), (paper.relu(),))
    result = paper.algorithm_4([layer] * 1000, 10.0, 1.0, corrected=True).result
    assert str(result.bound) == "1.001e+1000"
    assert float(result.lipschitz) == math.inf
    assert result.lipschitz.log2 == pytest.approx(math.log2(1000) + 999 * math.log2(10), rel=1e-12)


def test_wrong_number_of_radii_is_refused_and_records_are_frozen():
    layer = paper.Computation(paper.fully_connected())
    with pytest.raises(ValueError, match="2 radii for a chain of 1"):
        paper.algorithm_4([layer], [1.0, 2.0], 1.0)
    with pytest.raises(ValueError, match="3 radii for a chain of 1"):
        paper.algorithm_4([layer], torch.ones(3), 1.0)
    with pytest.raises(FrozenInstanceError):
        layer.name = "other"
