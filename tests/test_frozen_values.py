"""Values and errors of networks are those that were frozen (``benchmarks/frozen_values.py``), or sharper."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from benchmarks.frozen_values import FILE, TYPES, Case, cases

import surefoot as sf

FROZEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
SMALL = [case for case in cases() if not case.name.startswith(("MNIST", "digits, residual", "784"))]


def test_every_case_is_frozen() -> None:
    assert {case.name for case in cases()} == set(FROZEN)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_errors_are_not_larger_and_values_agree(case: Case, dtype: str) -> None:
    frozen = FROZEN[case.name][dtype]
    if "refused" in frozen:
        return
    model, x = case.subject(TYPES[dtype])
    with torch.no_grad():
        found = sf.evaluate(model, x, case.loss)
    assert found.error <= 1.05 * frozen["error"]
    assert abs(found.value - frozen["value"]) <= found.error + frozen["error"]
