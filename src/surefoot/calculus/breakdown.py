r"""Where the constants of a certificate come from: one row per operation, and reasons for infinite ones.

What a smaller radius or a larger ε would do to the smoothness, without certifying again.

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
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from surefoot.calculus.assemble import Term, terms, weighted_curvature
from surefoot.calculus.forward import Pass, Step
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.norms import nonnegative_norm
from surefoot.operations.call import Pair, Slot, label
from surefoot.operations.record import record_of

_MOST_ENTRIES = 5e7  # of all matrices together
_SHARPEST = 64  # variables up to which every matrix is worth a sharp norm


def largest_slope(step: Step, parameters: AbstractSet[str]) -> Magnitude | None:
    """The largest slope in an argument that is not a parameter of the operation itself."""
    slopes = [step.bounds.jacobian[slot] for slot, name in step.names.items() if name not in parameters]
    return maximum(*slopes) if slopes else None


def largest_curvature(step: Step) -> Magnitude:
    """The largest curvature between arguments that vary."""
    return maximum(*(curvature for _, _, curvature in _curvatures(step)))


def smoothness_by_tensor(result: Pass) -> dict[str, Magnitude]:
    """The smoothness of every result as a function of the variables: the recursion of
    :mod:`surefoot.calculus.assemble` with a matrix per tensor, and the norms of those.

    Where the matrices would be too many, all variables count as one: larger, and cheap.
    """
    slopes = {name: e.lipschitz for name, e in result.enclosures.items()}
    if len(result.region.variables) ** 2 * len(result.steps) > _MOST_ENTRIES:
        slopes = {name: stack([slope.norm()]) for name, slope in slopes.items()}
    matrices: dict[str, Magnitude] = {}
    last_reader = {name: step.node.name for step in result.steps for name in step.names.values()}
    norms: dict[str, Magnitude] = {}
    for step in result.steps:
        count = len(slopes[step.node.name])
        total = Magnitude.zero((count, count))
        for slot, name in step.names.items():
            if name in matrices:
                total = total + matrices[name] * step.bounds.jacobian[slot]
        for first, second, curvature in _curvatures(step):
            outer = slopes[step.names[first]][:, None] * slopes[step.names[second]][None, :]
            total = total + outer * curvature
            if first != second:
                total = total + Magnitude(outer.log2.T) * curvature
        matrices[step.node.name] = total
        norms[step.node.name] = nonnegative_norm(total) if count <= _SHARPEST else _quick_norm(total)
        for name in set(step.names.values()) & matrices.keys():
            if last_reader[name] == step.node.name:
                del matrices[name]
    return norms


def _quick_norm(matrix: Magnitude) -> Magnitude:
    """The spectral norm of a symmetric matrix is at most its Frobenius norm, and at most its largest row sum."""
    return minimum(matrix.norm(), matrix.sum(axis=1).max())


def _curvatures(step: Step) -> list[tuple[str, str, Magnitude]]:
    """The curvatures between arguments that vary."""
    return [
        (first, second, curvature)
        for (first, second), curvature in step.bounds.curvature.items()
        if first in step.names and second in step.names and not curvature.is_zero
    ]


_INNOCENT = "its arguments are not bounded over the domain"


def shares(summands: Sequence[Term]) -> dict[str, float]:
    """How much of the smoothness each operation contributes, by the norm of its summands."""
    logs: dict[str, list[float]] = {}
    for term in summands:
        logs.setdefault(term.step.node.name, []).append(float(term.size.log2))
    if not logs:
        return {}
    top = max(max(values) for values in logs.values())
    if math.isinf(top):
        infinite = [name for name, values in logs.items() if max(values) == top]
        return {name: 1.0 / len(infinite) for name in infinite}
    sizes = {name: sum(2.0 ** (value - top) for value in values) for name, values in logs.items()}
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items()}


def reasons(summands: Sequence[Term]) -> list[str]:
    """For every kind of operation that makes the smoothness infinite: where it is and what to do.

    Those that have a reason of their own come first; the others read, or are read by, what these make infinite.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for term in summands:
        if not term.weight.is_finite or not term.left.is_finite or not term.right.is_finite:
            node = term.step.node
            why = term.step.bounds.reason or _INNOCENT
            found.setdefault((label(node), why), {})[node.name] = node.module or "model"
    found = dict(sorted(found.items(), key=lambda item: item[0][1] == _INNOCENT))
    return [f"{_places(list(nodes.values()))} ({name}): {why}" for (name, why), nodes in found.items()]


def _places(modules: list[str]) -> str:
    """The first of several places, and how many more there are."""
    return modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")


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
