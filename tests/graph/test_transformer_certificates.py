"""Certificates of transformers: masks, norms and normalisations as real models write them."""

from __future__ import annotations

import math

import pytest
from benchmarks.families import certified

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["deberta", "cohere", "clip both", "convnextv2"])
def test_families_have_finite_constants(name: str) -> None:
    assert all(math.isfinite(constant) for constant in certified(name)[:2])


def test_a_finite_mask_costs_nothing() -> None:
    by_hand, fused = certified("llama eager"), certified("llama")
    assert by_hand[:2] == pytest.approx(fused[:2], rel=0.01)
