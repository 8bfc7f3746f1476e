"""The paper's statements give the numbers that were frozen, to the last digit, with the same flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from frozen_statements import CALLS, numbers

FROZEN = json.loads((Path(__file__).parent / "frozen.json").read_text(encoding="utf-8"))


def test_every_call_is_frozen() -> None:
    assert CALLS.keys() == FROZEN.keys()


@pytest.mark.parametrize("name", FROZEN)
def test_numbers_are_those_that_were_frozen(name: str) -> None:
    for number, expected in zip(numbers(CALLS[name]()), FROZEN[name], strict=True):
        assert number == (pytest.approx(expected, rel=1e-14) if isinstance(expected, float) else expected)
