"""The page on tightness says of every row what its numbers say."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tightness.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_network_has_a_row():
    assert len(rows()) == 16
    assert {row[0] for row in rows()} == {"softplus", "tanh"}


def test_missed_targets_are_marked_and_no_bound_is_below_the_truth():
    for _, _, _, median, worst, target, _ in rows():
        typical, largest = float(median.strip("*")), float(worst)
        assert 1.0 <= typical <= largest
        limit = float(target.removeprefix("≤ ").removesuffix(" (missed)"))
        assert target.endswith("(missed)") == (largest > limit)
