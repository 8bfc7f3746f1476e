"""Where the constants come from: the share of each operation, and why a constant is infinite.

A program has many small operations; a *row* joins those of one module that follow each other and move or add
numbers to the product, scalar function or fused operation that they prepare or finish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.bounds.size import Sizes, Step, Term
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.norms import nonnegative_norm
from surefoot.program.ir import Node
from surefoot.program.scalars import Scalar

_MOST_ENTRIES = 5e7  # of all matrices together
_SHARPEST = 64  # variables up to which every matrix is worth a sharp norm
_LINEAR = {"matmul": "linear", "conv_input": "transposed convolution", "conv": "convolution", "mul": "product"}


@dataclass(frozen=True)
class Group:
    """Operations that are shown as one: the last one has the result."""

    label: str
    steps: tuple[Step, ...]

    @property
    def last(self) -> Node:
        return self.steps[-1].node


def label(node: Node) -> str:
    """What to call an operation."""
    if node.primitive.kind == "scalar":
        return str(node.options["function"])
    return _LINEAR.get(node.primitive.name, node.primitive.name)


def groups(result: Sizes) -> list[Group]:
    """The operations of the model in rows; those of a program's costates are left out."""
    last = max(result.program.costates, default=max((step.node.index for step in result.steps), default=-1))
    rows: list[list[Step]] = []
    for step in result.steps:
        if step.node.index > last:
            break
        plain = step.node.primitive.kind == "linear"
        same = bool(rows) and rows[-1][-1].node.path == step.node.path
        if same and (plain or all(each.node.primitive.kind == "linear" for each in rows[-1])):
            rows[-1].append(step)
        else:
            rows.append([step])
    return [Group(_label_of(row), tuple(row)) for row in rows]


def _label_of(row: Sequence[Step]) -> str:
    heads = [step.node for step in row if step.node.primitive.kind != "linear"]
    return label(heads[0] if heads else row[-1].node)


def shares(summands: Sequence[Term]) -> dict[int, float]:
    """How much of the smoothness each operation contributes, by the norm of its summands."""
    logs: dict[int, list[float]] = {}
    for term in summands:
        logs.setdefault(term.step.node.index, []).append(float(term.size.log2))
    if not logs:
        return {}
    top = max(max(values) for values in logs.values())
    if math.isinf(top):
        infinite = [index for index, values in logs.items() if max(values) == top]
        return {index: 1.0 / len(infinite) for index in infinite}
    sizes = {index: sum(2.0 ** (value - top) for value in values) for index, values in logs.items()}
    total = sum(sizes.values())
    return {index: size / total for index, size in sizes.items()}


_INNOCENT = "its arguments are not bounded over the domain"


def reasons(summands: Sequence[Term]) -> list[str]:
    """For every kind of operation that makes the smoothness infinite: where it is and what to do.

    Those that have a reason of their own come first; the others read, or are read by, what these make infinite.
    """
    causes: dict[tuple[str, str], dict[int, str]] = {}
    for term in summands:
        if not term.weight.is_finite or not term.left.is_finite or not term.right.is_finite:
            node = term.step.node
            causes.setdefault((label(node), _reason(term.step)), {})[node.index] = node.path or "model"
    ordered = sorted(causes.items(), key=lambda item: item[0][1] == _INNOCENT)
    return [f"{_places(list(nodes.values()))} ({name}): {why}" for (name, why), nodes in ordered]


def _reason(step: Step) -> str:
    """Why a rule claims no finite constant, and what to do about it."""
    claim, node = step.claim, step.node
    if all(each.is_finite for each in (*claim.slopes.values(), *claim.bends.values())):
        return _INNOCENT
    name = label(node)
    if node.primitive.kind == "selection":
        return (
            "the largest of several entries has a kink where another one becomes the largest: use average pooling "
            "(surefoot.smooth), or shrink the domain"
        )
    if node.primitive.name in ("normalize", "rstd"):
        return "divides by a deviation that may be zero: give it an ε above zero, or shrink the domain"
    if not all(slope.is_finite for slope in claim.slopes.values()):
        return f"'{name}' jumps or has an unbounded slope within reach: use another, or shrink the domain"
    return (
        f"'{name}' has a kink or an unbounded curvature within reach: use a smooth activation such as soft-plus "
        "(surefoot.smooth), or shrink the domain"
    )


def _places(modules: list[str]) -> str:
    """The first of several places, and how many more there are."""
    return modules[0] + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")


def largest_slope(result: Sizes, group: Group) -> Magnitude | None:
    """The product of the largest slopes of a row, in arguments that are no parameters themselves."""
    total = None
    own = {result.program.inputs[name] for name in result.region.variables if name in result.program.parameters}
    decisive = [step for step in group.steps if step.node.primitive.kind != "linear"] or group.steps
    for step in decisive:
        slopes = [
            slope
            for k, slope in step.claim.slopes.items()
            if result.depends[step.arguments[k]] and not _is_variable(result, step.arguments[k], own)
        ]
        if slopes:
            total = maximum(*slopes) if total is None else total * maximum(*slopes)
    return total


def _is_variable(result: Sizes, index: int, own: set[int]) -> bool:
    """Whether a tensor is a variable, or one that was only laid out anew."""
    node = result.program.nodes[index]
    while node.primitive.name in ("permute", "reshape", "expand"):
        node = result.program.nodes[node.inputs[0]]
    return node.index in own


def largest_curvature(result: Sizes, group: Group) -> Magnitude:
    """The largest curvature of the operations of a row, between arguments that vary."""
    bends = [
        bend
        for step in group.steps
        for pair, bend in step.claim.bends.items()
        if all(result.depends[step.arguments[k]] for k in pair)
    ]
    return maximum(Magnitude.zero(), *bends)


def smoothness_by_tensor(result: Sizes) -> dict[int, Magnitude]:
    """The smoothness of every result as a function of the variables: the recursion of :mod:`surefoot.bounds.size`
    with a matrix per tensor, and the norms of those.

    Where the matrices would be too many, all variables count as one: larger, and cheap.
    """
    slopes: dict[int, Magnitude] = {index: size.lipschitz for index, size in result.sizes.items()}
    if len(result.region.variables) ** 2 * len(result.steps) > _MOST_ENTRIES:
        slopes = {index: stack([slope.norm()]) for index, slope in slopes.items()}
    matrices: dict[int, Magnitude] = {}
    norms: dict[int, Magnitude] = {}
    last_reader = {index: step.node.index for step in result.steps for index in step.arguments}
    for step in result.steps:
        count = len(slopes[step.node.index])
        total = Magnitude.zero((count, count))
        for k, slope in step.claim.slopes.items():
            if step.arguments[k] in matrices:
                total = total + matrices[step.arguments[k]] * slope
        for (i, j), bend in step.claim.bends.items():
            if bend.is_zero:
                continue
            left, right = slopes[step.arguments[i]], slopes[step.arguments[j]]
            if left.is_zero or right.is_zero:
                continue
            outer = left[:, None] * right[None, :]
            total = total + outer * bend
            if i != j:
                total = total + Magnitude(outer.log2.T) * bend
        matrices[step.node.index] = total
        norms[step.node.index] = nonnegative_norm(total) if count <= _SHARPEST else _quick_norm(total)
        for index in set(step.arguments) & matrices.keys():
            if last_reader[index] == step.node.index:
                del matrices[index]
    return norms


def _quick_norm(matrix: Magnitude) -> Magnitude:
    """The spectral norm of a symmetric matrix is at most its Frobenius norm, and at most its largest row sum."""
    return minimum(matrix.norm(), matrix.sum(axis=1).max())


def by_group(values: Mapping[int, float], group: Group) -> float:
    """The sum of what the operations of a row have."""
    return sum(values.get(step.node.index, 0.0) for step in group.steps)


_THRESHOLD = 20.0  # beyond it torch's soft-plus returns βx/β


def remarks(result: Sizes) -> list[str]:
    """One sentence if soft-plus may get beyond the threshold where torch leaves the smooth function."""
    gaps = []
    for step in result.steps:
        if step.node.primitive.kind != "scalar":
            continue
        function: Scalar = step.node.options["function"]
        if (function.name, function.order) != ("softplus", 0):
            continue
        (beta,) = function.parameters
        if result.sizes[step.arguments[0]].high * beta > _THRESHOLD:
            gaps.append(math.log1p(math.exp(-_THRESHOLD)) / beta * max(1.0, beta))
    if not gaps:
        return []
    return [
        "soft-plus is certified without the jump of torch's, which returns the argument itself beyond a threshold "
        f"that may be within reach: its entries and slopes are off by up to {max(gaps):.1e}"
    ]
