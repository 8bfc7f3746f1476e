"""The line search ends, whatever the numbers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from surefoot.optim.point import Point
from surefoot.optim.wolfe import search


@dataclass
class Line:
    """A point of a function of one number."""

    value: float
    derivative: float

    def slope(self, direction: Tensor) -> float:
        return self.derivative

    def foresee(self, decrease: float) -> None:
        """What a proof of it would have to decide."""


def along(value: Any, derivative: Any, first: float) -> tuple[Any, int]:
    tried = []

    def trial(step: float) -> Point:
        tried.append(step)
        return cast(Point, Line(value(step), derivative(step)))

    found = search(trial(0.0), torch.ones(1), trial, first)
    return found, len(tried) - 1


@pytest.mark.parametrize("first", [0.0, 5e-324, 1e-323, 2.0**-1060])
def test_steps_that_underflow_end_the_search(first: float) -> None:
    found, trials = along(lambda t: 1.0 + (t > 0), lambda t: -1.0, first)
    assert found is None
    assert trials <= 12


def test_a_parabola_is_stepped_down() -> None:
    for first in (1e-6, 1.0, 100.0):
        found, _ = along(lambda t: (t - 3.0) ** 2, lambda t: 2 * (t - 3.0), first)
        assert found is not None
        assert found.point.value < 9.0
        assert abs(found.point.derivative) <= 0.9 * 6.0


def test_what_only_rises_is_given_up_early() -> None:
    found, trials = along(lambda t: 1.0 + t, lambda t: -1.0, 1.0)
    assert found is None
    assert trials <= 6
