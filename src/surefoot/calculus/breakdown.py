"""Where the constants of a certificate come from: one row per operation, and reasons for infinite ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from surefoot.calculus.assemble import Term
from surefoot.calculus.forward import Pass, Step
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.norms import nonnegative_norm
from surefoot.operations.call import label

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
