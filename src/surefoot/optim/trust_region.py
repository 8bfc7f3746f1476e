r"""Damping by the length of steps: trust regions.

The minimiser v of :math:`m + \frac\kappa2\|\cdot\|^2` minimises the model m on the ball of radius ‖v‖. Proof: for
:math:`\|w\| \le \|v\|`, :math:`m(v) \le m(w) + \frac\kappa2(\|w\|^2 - \|v\|^2) \le m(w)`. So a step on a ball is a
damped step whose κ is to be found. ‖v(κ)‖ falls as κ grows, and 1/‖v(κ)‖ is nearly linear in κ, so a few secants
do (Hebden 1973; Moré, The Levenberg-Marquardt algorithm: implementation and theory, 1978). Solvers keep what does
not depend on κ, so other values of κ cost little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from surefoot.optim.stored import norm_of
from surefoot.oracles.problem import Step

_SLACK = 0.2  # by which a length may differ from the radius, relative to it
_SECANTS = 6
_WIDEST = 100.0  # factor between neighbouring values of κ
_GOOD, _POOR = 0.75, 0.25  # ratios of the actual to the predicted decrease


def on_ball(
    solver: Callable[[float], Step],
    kappa: float,
    radius: float,
    least: float,
    norm: Callable[[Mapping[str, Tensor]], float] = norm_of,
) -> tuple[Step, float]:
    """A step of about this length and its length; a shorter one where κ is not allowed to be smaller.

    Args:
        solver: κ ↦ the minimiser of the damped model.
        kappa: a guess of κ.
        radius: the length that is wanted.
        least: the smallest κ.
        norm: of directions.
    """
    last: tuple[float, float] | None = None  # κ and 1/‖v‖
    for k in range(_SECANTS):
        step = solver(kappa)
        kappa, length = step.kappa, norm(step.direction)
        short = length < (1 - _SLACK) * radius
        if not (short or length > (1 + _SLACK) * radius) or length == 0:
            break
        if (short and (kappa <= least or step.doubled)) or k == _SECANTS - 1:
            break
        wanted = kappa * length / radius
        if last is not None and last[1] != 1 / length:
            wanted = kappa + (1 / radius - 1 / length) * (kappa - last[0]) / (1 / length - last[1])
        last = kappa, 1 / length
        kappa = max(min(max(wanted, kappa / _WIDEST), kappa * _WIDEST), least)
    return step, length


def next_radius(radius: float, length: float, ratio: float) -> float:
    """The radius after a step of this length with this ratio of the actual to the predicted decrease."""
    if ratio < _POOR:
        return length / 4
    return max(radius, 2 * length) if ratio > _GOOD and length >= (1 - _SLACK) * radius else radius
