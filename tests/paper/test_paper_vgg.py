"""Section 5: one test per claim."""

from __future__ import annotations

import math

import pytest

from surefoot import paper


@pytest.fixture(scope="module")
def study():
    return paper.application()


def test_lipschitz_constant_of_vgg_by_the_recursion_without_the_package():
    """m ← 2cm + c√128, ℓ ← c(ℓ + m + √128) with c = 3 thirteen times, then c = 1 three times; soft-max 2."""
    bound, lipschitz, root = 1.0, 0.0, math.sqrt(128)
    for c in [3.0] * 13 + [1.0] * 3:
        lipschitz = c * lipschitz + (c * bound + c * root)
        bound = c * bound + (c * bound + c * root)
    assert float(paper.application().vgg.lipschitz) == pytest.approx(2 * lipschitz, rel=1e-10)


def test_smooth_vgg_agrees_when_the_value_at_zero_is_dropped(study):
    assert study.relative_difference <= 1e-4
    assert study.relative_difference == 0.0  # not merely close: no minimum is reached by the curvature
    assert any(flag.startswith("ERRATA 4") for flag in study.smooth_dropped.flags)


def test_smooth_vgg_is_359_times_larger_when_it_is_kept(study):
    assert study.factor == pytest.approx(358.87, abs=0.01)
    assert not any(flag.startswith("ERRATA 4") for flag in study.smooth_kept.flags)


def select(study, epsilon):
    return [entry for entry in study.batch_norm if entry.epsilon == epsilon]


def test_small_epsilon_increases_the_lipschitz_constant(study):
    assert all(entry.increases[0] for entry in select(study, 1e-2))


def test_small_epsilon_increases_the_smoothness(study):
    assert all(entry.increases[1] for entry in select(study, 1e-2))


def test_large_epsilon_decreases_the_lipschitz_constant(study):
    assert all(entry.normalised.lipschitz <= entry.smooth.lipschitz for entry in select(study, 1e2))


def test_large_epsilon_decreases_the_smoothness(study):
    assert all(entry.normalised.smoothness <= entry.smooth.smoothness for entry in select(study, 1e2))


def test_the_bound_of_batch_normalisation_does_not_explain_the_gain(study):
    """The paper's explanation: it enters where the constants grow, and not where they shrink."""
    for entry in study.batch_norm:
        if entry.epsilon == 1e-2:
            assert entry.active_bounds >= 10
        elif entry.reading.normalised_over == "every entry":
            assert entry.active_bounds == 0


def test_only_readings_with_a_valid_intercept_are_not_flagged(study):
    unflagged = [name for name, result in study.readings if not result.flags]
    assert unflagged == ["l^u = √(m·positions), as holds", "ERRATA 2, 5 and 7 applied"]


def test_comparisons_hold_for_the_constants_that_hold():
    """With ERRATA 2, 5 and 7 applied and ‖a(0)‖ kept, the four inequalities remain."""
    reading = paper.Reading(linear_part="proved", normalised_over="images")
    smooth = paper.algorithm_4(paper.smooth_vgg(reading=reading), 1.0, 1.0, corrected=True).result
    small = paper.algorithm_4(paper.batch_norm_vgg(1e-2, reading=reading), 1.0, 1.0, corrected=True).result
    large = paper.algorithm_4(paper.batch_norm_vgg(1e2, reading=reading), 1.0, 1.0, corrected=True).result
    assert small.flags == smooth.flags == large.flags == ()
    assert large.lipschitz <= smooth.lipschitz <= small.lipschitz
    assert large.smoothness <= smooth.smoothness <= small.smoothness
