"""All cases, by operation, and by how much some bounds are known not to be attained."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from operations import (
    cases_arithmetic,
    cases_choices,
    cases_convolution,
    cases_implicit,
    cases_layout,
    cases_losses,
    cases_nonlinear,
    cases_ordered,
    cases_pooling,
    cases_products,
    cases_writing,
)
from operations.case import Case
from operations.harness import SETTINGS, Study, study

_FAMILIES = (
    cases_arithmetic,
    cases_choices,
    cases_convolution,
    cases_implicit,
    cases_layout,
    cases_losses,
    cases_nonlinear,
    cases_ordered,
    cases_pooling,
    cases_products,
    cases_writing,
)

CASES: dict[str, list[Callable[[], Case]]] = {
    op: thunks for family in _FAMILIES for op, thunks in family.CASES.items()
}

# Where a docstring says that a bound is approached only: how near the cases come.
GAPS = {
    ("surefoot.scalar", "x"): 1e-4,  # the width of the tables
    ("surefoot.scalar", "x,x"): 1e-3,
}


@cache
def built(op: str, k: int) -> Case:
    return CASES[op][k]()


@cache
def at_point(op: str, k: int) -> Study:
    """What is found when nothing moves."""
    return study(built(op, k), "point")


def settings(k: int) -> list[str]:
    """All settings for the first case of an operation; for further ones row spreads and one that takes turns."""
    others = [setting for setting in SETTINGS if setting not in ("point", "rows")]
    return list(SETTINGS[1:]) if k == 0 else ["rows", others[k % len(others)]]
