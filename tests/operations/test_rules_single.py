"""Every registered rule: its claims hold wherever they are attacked, and are attained somewhere."""

from __future__ import annotations

import math

import pytest

from operations.catalogue import CASES, GAPS, at_point, built, settings
from operations.harness import SETTINGS, study
from surefoot.operations import rules

OPERATIONS = sorted(CASES)
_OUTCOMES = ("bound", "peak", "spread", "rows")


def test_every_rule_has_cases() -> None:
    ours = {
        name for name in rules() if name.startswith(("aten.", "surefoot.", "getitem"))
    }  # not those of other tests
    assert set(OPERATIONS) == ours
    assert all(CASES.values())


@pytest.mark.parametrize("op", OPERATIONS)
def test_claims_hold(op: str) -> None:
    for k in range(len(CASES[op])):
        at_point(op, k)
        for setting in settings(k):
            study(built(op, k), setting)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("op", OPERATIONS)
def test_claims_hold_under_longer_attacks(op: str, seed: int) -> None:
    for k in range(len(CASES[op])):
        for setting in SETTINGS:
            study(built(op, k), setting, seed=seed, starts=6, thorough=True)


@pytest.mark.parametrize("op", OPERATIONS)
def test_jacobians_and_curvatures_are_attained(op: str) -> None:
    """For every argument, and every pair with a curvature, some case comes up to what is claimed."""
    best: dict[str, float] = {}
    for k in range(len(CASES[op])):
        found = at_point(op, k)
        for (operation, what), ratio in found.ratios.items():
            counts = operation == op and what not in _OUTCOMES and not what.startswith("change")
            if counts and math.isfinite(found.claims[operation, what]):
                best[what] = max(best.get(what, 0.0), ratio)
    assert best or op == "getitem"
    for what, ratio in best.items():
        assert ratio >= 1 - GAPS.get((op, what), 1e-6), (what, ratio)
