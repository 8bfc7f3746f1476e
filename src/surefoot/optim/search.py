r"""A line search that pays for as little as it can.

A step t along a direction of slope :math:`s_0 < 0` is good if

.. math:: f(t) \le f(0) + c_1ts_0 \quad\text{and}\quad f'(t) \ge c_2s_0

(Wolfe's conditions): it descends, and it is not much too short, so that quasi-Newton updates keep their matrices
positive. A trial that fails the first costs a value, a third of a gradient; only one that passes costs the
gradient too, which the next step needs anyway. Between a step that is too short and one that is too long the next
trial is the minimiser of a parabola (Lewis and Overton, Nonsmooth optimization via quasi-Newton methods,
Mathematical Programming 141, 2013, for the bracketing, which ends for every function that is bounded below along
the direction).

Where all of the slope is round-off, trials go up however short they are. Near a step of zero :math:`(f(t) -
f(0))/t` of a function that descends goes down with t; where it does not any more, the search is given up.
"""

from __future__ import annotations

import math

from torch import Tensor

from surefoot.optim.problem import Point

_DECREASE, _CURVATURE = 1e-4, 0.9
_FAILURES = 4  # shorter and shorter trials after which the function itself has to show that it descends
_PART = 0.1  # of a decrease: errors up to that prove it, and still do where the next is not much below it


def search(
    start: Point,
    direction: Tensor,
    first: float,
    slope: float,
    curvature: bool,
    trials: int,
    least: float,
) -> tuple[float, Point] | None:
    """A step that is good, or at least descends enough, and where it leads; ``None`` if there is none.

    Args:
        start: where the direction starts.
        direction: along which the function descends.
        first: the first step size to try.
        slope: the derivative along the direction.
        curvature: whether a step may be too short.
        trials: how many are tried.
        least: a decrease below which a step is of no use. It is about the slope times the step, so that shorter
            steps are not tried.
    """
    value = start.value
    low, low_value, low_slope = 0.0, value, slope
    high, high_value = math.inf, math.inf
    best: tuple[float, Point] | None = None
    rises: list[float] = []  # by the step, of trials that went up
    step = first
    for _ in range(trials):
        if not step > 0 or -slope * step < least:
            break
        point = start.problem.near(start, direction, step)
        if not point.value <= value + _DECREASE * step * slope or not point.value < value:
            high, high_value = step, point.value
            rises.append((point.value - value) / step)
            if best is None and len(rises) > _FAILURES and rises[-1] > 0.9 * rises[-2] > 0:
                return None
        else:
            best = step, point
            point.foresee(_PART * (value - point.value))
            if not curvature:
                break
            end_slope = float(point.gradient @ direction)
            if end_slope >= _CURVATURE * slope:
                break
            before, before_slope, low, low_value, low_slope = low, low_slope, step, point.value, end_slope
            if high == math.inf:
                # Further out: where the slope would vanish if it went on as it does, twice to eight times as far.
                bend = low_slope - before_slope
                root = low - low_slope * (low - before) / bend if bend > 0 else math.inf
                step = min(max(root, 2 * low), 8 * low)
                continue
        # The minimiser of the parabola through both ends with this slope at the first, well inside.
        width = high - low
        bend = high_value - low_value - low_slope * width
        part = -low_slope * width / (2 * bend) if 0 < bend < math.inf else 0.1
        step = low + min(max(part, 0.1), 0.6) * width
        if not low < step < high or width < 1e-12 * high:
            break
    return best
