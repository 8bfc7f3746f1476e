"""Two verdicts about convergence that are to say the same."""

from __future__ import annotations

import pytest

import surefoot as sf


def assert_same_verdict(found: sf.theorems.Convergence, expected: sf.theorems.Convergence) -> None:
    """All numbers are equal up to round-off, the rest as it is."""
    assert (found.proved, found.theorem, found.obstacles) == (
        expected.proved,
        expected.theorem,
        expected.obstacles,
    )
    assert found.missing == pytest.approx(expected.missing, rel=1e-10)
    for one, other in zip(found.hypotheses, expected.hypotheses, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-10)
