r"""Values, slopes and curvatures attained on a domain, found by sampling and cheap ascent.

For points :math:`u, u'` of the domain and unit :math:`v, w` all of these are attained, the last
where it exists, and no certificate may be below them:

.. math:: \|f(u)\|,\quad \frac{\|f(u) - f(u')\|}{\|u - u'\|},\quad \|Df(u)^\top w\|,\quad
    \frac{\|(Df(u) - Df(u'))^\top w\|}{\|u - u'\|},\quad \|D^2\langle w, f\rangle(u)v\| .

Directions come from power iterations with difference quotients, which need not be accurate: a poor direction only
makes the attack weaker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from judges.function import Target

# Gradients and values in double precision are trusted to this relative error when they are subtracted.
TRUST = 1e-11
_DIFFERENCE = 1e-4


@dataclass
class Suprema:
    """The largest values met so far."""

    bound: float = 0.0
    lipschitz: float = 0.0
    smoothness: float = 0.0
    points: list[Tensor] = field(default_factory=list)

    def meet(self, name: str, value: float) -> None:
        if math.isfinite(value):
            setattr(self, name, max(getattr(self, name), value))


def attack(target: Target, *, seed: int = 0, starts: int = 2, steps: int = 2) -> Suprema:
    """Search the domain from several random points, on its boundary and inside."""
    generator = torch.Generator().manual_seed(seed)
    found = Suprema()
    outputs = target.value(target.center).numel()
    for start in range(starts):
        u = _random_point(target, generator, start)
        w = _unit(_normal(outputs, generator))
        v = _unit(_normal(target.center.numel(), generator))
        for _ in range(steps):
            u, w = _grow_value(target, found, u, w)
            u, v, w = _grow_slope(target, found, u, v, w)
            u, v, w = _grow_curvature(target, found, u, v, w)
        found.points.append(u)
    _compare(target, found, generator, outputs)
    return found


def _random_point(target: Target, generator: torch.Generator, start: int) -> Tensor:
    """On the boundary along a dense or a sparse direction, or inside."""
    direction = _normal(target.center.numel(), generator)
    if start % 3 == 1:
        direction = direction * (torch.rand(direction.shape, generator=generator) < 0.2)
    fraction = 1.0 if start % 2 == 0 else float(torch.rand((), generator=generator))
    return target.center + (target.farthest(direction) - target.center) * fraction


def _grow_value(target: Target, found: Suprema, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the conditional gradient method for ‖f‖: to the farthest point along the gradient."""
    value = target.value(u)
    found.meet("bound", float(value.norm()))
    outward = _unit(value) if bool(value.any()) else w
    slope = target.gradient(u, outward)
    found.meet("lipschitz", float(slope.norm()))
    farther = target.farthest(slope)
    reached = target.value(farther)
    found.meet("bound", float(reached.norm()))
    _meet_difference(found, u, farther, value, reached)
    return (farther, w) if float(reached.norm()) >= float(value.norm()) else (u, w)


def _grow_slope(target: Target, found: Suprema, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One power iteration for Df, then a step of the point along the growth of ⟨w, Df v⟩."""
    slope = target.gradient(u, w)
    v = _unit(slope) if bool(slope.any()) else v
    pushed = target.value(u + _DIFFERENCE * v) - target.value(u - _DIFFERENCE * v)
    w = _unit(pushed) if bool(pushed.any()) else w
    slope = target.gradient(u, w)
    found.meet("lipschitz", float(slope.norm()))
    v = _unit(slope) if bool(slope.any()) else v
    growth = target.gradient(u + _DIFFERENCE * v, w) - slope
    farther = target.farthest(growth)
    at_farther = target.gradient(farther, w)
    found.meet("lipschitz", float(at_farther.norm()))
    _meet_gradients(found, u, farther, slope, at_farther)
    return (farther if float(at_farther.norm()) > float(slope.norm()) else u), v, w


def _grow_curvature(
    target: Target, found: Suprema, u: Tensor, v: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Alternating steps for D²f, then the curvature at the two ends of the domain in the found direction."""
    for _ in range(2):
        bent = target.bend(u, w, v)
        v = _unit(bent) if bool(bent.any()) else v
        turned = target.value(u + _DIFFERENCE * v) - 2 * target.value(u) + target.value(u - _DIFFERENCE * v)
        w = _unit(turned) if bool(turned.any()) else w
    best = float(target.bend(u, w, v).norm())
    found.meet("smoothness", best)
    for end in (target.farthest(v), target.farthest(-v)) if target.radius > 0 else ():
        bent = float(target.bend(end, w, v).norm())
        found.meet("smoothness", bent)
        if bent > best:
            u, best = end, bent
    return u, v, w


def _compare(target: Target, found: Suprema, generator: torch.Generator, outputs: int) -> None:
    """Differences between the points met, seen from one direction, and their halves."""
    points = [target.center, *found.points]
    w = _unit(_normal(outputs, generator))
    values = [target.value(u) for u in points]
    slopes = [target.gradient(u, w) for u in points]
    for j in range(len(points)):
        found.meet("bound", float(values[j].norm()))
        for i in range(j):
            _meet_difference(found, points[i], points[j], values[i], values[j])
            _meet_gradients(found, points[i], points[j], slopes[i], slopes[j])


def _meet_difference(found: Suprema, a: Tensor, b: Tensor, at_a: Tensor, at_b: Tensor) -> None:
    found.meet("lipschitz", _ratio(a, b, at_a, at_b))


def _meet_gradients(found: Suprema, a: Tensor, b: Tensor, at_a: Tensor, at_b: Tensor) -> None:
    found.meet("smoothness", _ratio(a, b, at_a, at_b))


def _ratio(a: Tensor, b: Tensor, at_a: Tensor, at_b: Tensor) -> float:
    distance = float((a - b).norm())
    change = float((at_a - at_b).norm()) - TRUST * float(at_a.norm() + at_b.norm())
    return max(0.0, change) / distance if distance > 0 else 0.0


def _normal(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=generator)


def _unit(vector: Tensor) -> Tensor:
    size = float(vector.norm())
    return vector / size if 0 < size < math.inf else vector
