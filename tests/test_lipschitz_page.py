"""The page on Lipschitz constants in the input says of every network what its numbers say."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lipschitz.md"
ROUNDING = 1 + 1e-4  # of the numbers on the page


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_network_has_a_row() -> None:
    kinds = [row[0].split()[0] for row in rows()]
    assert (kinds.count("random"), kinds.count("digits"), kinds.count("LipSDP's")) == (10, 5, 2)


def test_no_number_is_larger_than_that_of_another_method() -> None:
    for _, layers, product, fast, eclipse, certified, *_ in rows():
        ours, hidden = float(certified.strip("*")), layers.count("-") - 1
        assert ours < float(fast) < float(product)
        if eclipse not in ("refused", "not run"):
            assert ours <= float(eclipse) * ROUNDING
            assert hidden == 1 or ours < float(eclipse)


def test_ties_and_gaps_are_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for words in (
        "With one hidden layer ECLipsE solves the same problem",
        "Where it refuses",
        "where it is not run",
    ):
        assert words in " ".join(text.split())
