r"""What a smaller radius or a larger ε would do to the smoothness, without certifying again.

The part of an operation in the smoothness is :math:`w_zC_{ij}\|\ell_{x_i}\|\|\ell_{x_j}\|`
(:mod:`surefoot.calculus.assemble`). Weights and Lipschitz constants are sums of products of slopes, so the
recursions are run once with the slopes as they are and once with those that a change would leave:

* *half the radius.* A layer's slope in its state is a norm of its weights, :math:`a + cr` on a ball of radius
  :math:`r`, with :math:`c \ge 1`. Half the radius leaves at most the part :math:`1 - \frac12\,r/\text{slope}` of
  it, and at most :math:`1 - \frac12\,r/(\|w^*\| + r)`. Bounds of the states fall too; that is not counted.
* *ten times the ε of every normalisation.* Its slope is :math:`s = (\rho^2 + \epsilon)^{-1/2}`; the new one is
  :math:`(s^{-2} + 9\epsilon)^{-1/2}`, and its curvature falls by the square of that ratio
  (:mod:`surefoot.operations.normalised_groups`).

What comes out is advice about an upper bound, not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from surefoot.calculus.assemble import terms, weighted_curvature
from surefoot.calculus.forward import Pass, Step
from surefoot.magnitude import Magnitude, stack
from surefoot.operations.call import Pair, Slot
from surefoot.operations.record import record_of

# Which parts of its slopes and curvatures a change leaves to an operation; what is not named stays.
Change = tuple[Mapping[Slot, float], Mapping[Pair, float]]


def bits_gained(result: Pass, change: Callable[[Step], Change]) -> dict[str, float]:
    """By how many powers of two the part of each operation in the smoothness falls; at least 0."""
    before, after = _parts(result), _parts(_changed(result, change))
    falls = {name: size - after.get(name, math.inf) for name, size in before.items()}
    return {name: fall if 0 < fall < math.inf else 0.0 for name, fall in falls.items()}


def _parts(result: Pass) -> dict[str, float]:
    """The logarithm of the part of each operation."""
    slopes = {name: e.lipschitz for name, e in result.enclosures.items()}
    for step in result.steps:
        joined = stack([slopes[name] * step.bounds.jacobian[slot] for slot, name in step.names.items()])
        slopes[step.node.name] = joined.norm(axis=0) if step.bounds.orthogonal else joined.sum(axis=0)
    logs: dict[str, float] = {}
    for term in terms(result, weighted_curvature(result), slopes):
        part = Magnitude(logs.get(term.step.node.name, -math.inf))
        logs[term.step.node.name] = (part + term.size).log2
    return logs


def _changed(result: Pass, change: Callable[[Step], Change]) -> Pass:
    steps = []
    for step in result.steps:
        slopes, curvatures = change(step)
        jacobian = {slot: size * slopes.get(slot, 1.0) for slot, size in step.bounds.jacobian.items()}
        curvature = {pair: size * curvatures.get(pair, 1.0) for pair, size in step.bounds.curvature.items()}
        steps.append(replace(step, bounds=replace(step.bounds, jacobian=jacobian, curvature=curvature)))
    return replace(result, steps=tuple(steps))


def half_the_radius(result: Pass) -> Callable[[Step], Change]:
    """The change of every operation that multiplies a state by a variable."""
    variables = set(result.region.variables)

    def change(step: Step) -> Change:
        left: dict[Slot, float] = {}
        for pair, curvature in step.bounds.curvature.items():
            if curvature.is_zero or not set(pair) <= step.names.keys():
                continue
            for state, weight in (pair, pair[::-1]):
                if step.names[state] not in variables and step.names[weight] in variables:
                    moved = _moved(result, step, state, weight)
                    left[state] = min(left.get(state, 1.0), 1.0 - 0.5 * moved)
        return left, {}

    return change


def _moved(result: Pass, step: Step, state: Slot, weight: Slot) -> float:
    """How much of the slope in a state is due to the radius of the weight, between 0 and 1."""
    leaf = result.enclosures[step.names[weight]]
    if not leaf.spread.is_finite:  # around the origin, without values: all of it
        return 1.0
    radius, slope = leaf.spread.log2, step.bounds.jacobian[state].log2
    if radius == -math.inf or not math.isfinite(slope):
        return 0.0
    return min(1.0, max(2.0 ** min(radius - slope, 0.0), 2.0 ** min(radius - leaf.bound.log2, 0.0)))


def ten_times_epsilon(step: Step) -> Change:
    """The change of a normalisation."""
    epsilon = epsilon_of(step)
    if epsilon is None:
        return {}, {}
    slopes = {slot: float(size) for slot, size in step.bounds.jacobian.items() if size.is_finite}
    left = dict.fromkeys(step.bounds.jacobian, 1.0)
    left |= {slot: (1.0 + 9.0 * epsilon * slope * slope) ** -0.5 for slot, slope in slopes.items()}
    return left, {pair: left[pair[0]] * left[pair[1]] for pair in step.bounds.curvature}


def epsilon_of(step: Step) -> float | None:
    """The ε of a normalisation, ``None`` for other operations."""
    slot = record_of(step.node).epsilon
    epsilon = None if slot is None else step.node.arguments[slot]
    return float(epsilon) if isinstance(epsilon, float | int) and epsilon > 0 else None
