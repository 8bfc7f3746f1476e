"""Certificates of transformers: masks, norms and normalisations as real models write them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.families import FAMILIES, certified

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "families.md"


@pytest.mark.parametrize("name", ["deberta", "cohere", "fnet", "clip both", "convnextv2"])
def test_families_have_finite_constants(name: str) -> None:
    row = certified(name)
    assert math.isfinite(row.lipschitz)
    assert math.isfinite(row.smoothness)


def test_a_finite_mask_costs_nothing() -> None:
    by_hand, fused = certified("llama eager"), certified("llama")
    assert by_hand.lipschitz == pytest.approx(fused.lipschitz, rel=0.01)
    assert by_hand.smoothness == pytest.approx(fused.smoothness, rel=0.01)


def test_the_page_has_every_family_and_only_kinks_are_infinite() -> None:
    lines = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines[2:]}
    assert rows.keys() == FAMILIES.keys()
    assert sum(row[1] != "∞" for row in rows.values()) >= 60
    for row in rows.values():
        assert row[2] != "∞" or "kink" in row[4]
