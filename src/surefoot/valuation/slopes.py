r"""How steep and how curved operations are, from the sizes of their arguments alone.

The rules of the calculus are asked over enclosures that hold no values: a tensor that varies is known by bounds on
its norm and its largest entry, a parameter by its value and how far it may be from there. What they claim holds at
all points whose tensors are within these bounds, so that a run of steps asks them now and then and not each time.
The bounds are twice the sizes at the point where they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.prepare import as_scalar
from surefoot.enclosure import Enclosure, Spec, constant, measure, unknown_constant
from surefoot.graph import Graph, Node
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.record import Form, record_of, rule_for
from surefoot.scalar import ScalarFunction, supremum
from surefoot.valuation.tape import Run, Tape, norms

_LEAST = 2.0**-460
_FAR = 32.0  # beyond, the suprema of scalar functions are those over the whole line
_NONE = Magnitude.zero((0,))
_ZERO, _INFINITE = Magnitude.zero(), Magnitude.infinity()


@dataclass(frozen=True)
class Slope:
    """What is claimed of one operation.

    Attributes:
        node: the operation.
        jacobian: by name of the argument.
        curvature: by names of two arguments.
        product: on the bilinear part, by the norms of the two factors; ``None`` for what is no product.
        reduction: how many numbers are added up for one entry.
        breaks: where a scalar function has kinks, if it is otherwise as curved as the curvature says.
        pointwise: whether the rule says enough only where the values of the arguments are known.
    """

    node: Node
    jacobian: Mapping[str, float]
    curvature: Mapping[tuple[str, str], float]
    product: tuple[str, str, float] | None = None
    reduction: int = 1
    breaks: tuple[float, ...] = ()
    pointwise: bool = False


@dataclass
class Slopes:
    """The slopes of all operations of a tape, and the sizes up to which they hold.

    Attributes:
        by_name: of each operation, by name.
        norms: of tensors that vary.
        peaks: likewise, of those whose largest entry matters.
        slices: likewise, of factors that meet matrix by matrix: the norm of one of their matrices.
        weights: the parameters where the rules were asked, and how far they may be from there.
    """

    by_name: dict[str, Slope]
    norms: dict[str, float]
    peaks: dict[str, float] = field(default_factory=dict)
    slices: dict[str, float] = field(default_factory=dict)
    weights: dict[str, tuple[Tensor, float]] = field(default_factory=dict)

    @cached_property
    def kinks(self) -> dict[str, tuple[str, tuple[float, ...]]]:
        """Of scalar functions with kinks, the argument and where they are."""
        return {name: (slope.node.inputs[0], slope.breaks) for name, slope in self.by_name.items() if slope.breaks}

    def hold(self, run: Run, errors: Mapping[str, float]) -> bool:
        """Whether all tensors, and all within the errors of them, are inside."""
        sizes, parameters = run.sizes, run.parameters
        if any(not sizes[name] + errors.get(name, 0.0) <= bound for name, bound in self.norms.items()):
            return False
        apart = norms(parameters[name].detach() - value for name, (value, _) in self.weights.items())
        radii = (radius for _, radius in self.weights.values())
        if any(not distance <= radius for distance, radius in zip(apart, radii, strict=True)):
            return False
        largest = {name: float(run.values[name].detach().abs().amax()) for name in self.peaks}
        matrices = {name: largest_matrix(run.values[name]) for name in self.slices}
        return all(
            size + errors.get(name, 0.0) <= bounds[name]
            for found, bounds in ((largest, self.peaks), (matrices, self.slices))
            for name, size in found.items()
        )


def slopes_of(tape: Tape, run: Run, drift: float, *, several: bool = False) -> Slopes:
    """The slopes around a point, for parameters that move by a part ``drift`` of their norm.

    Args:
        tape: the operations.
        run: a pass at the point.
        several: whether they are to hold for other inputs and targets too, up to a size.

    Raises:
        UnsupportedOperation: naming an operation that has no rule.
    """
    found = Slopes({}, {})
    enclosures: dict[str, Enclosure] = {}
    loose = tape.of_batch if several else frozenset()
    for name, leaf in tape.graph.leaves.items():
        value = run.values[name].detach()
        if name in loose:
            enclosures[name] = _sized(found, name, leaf.spec, value, fixed=True)
        elif name in run.parameters:
            enclosures[name] = _parameter(found, name, value, drift)
        else:
            enclosures[name] = constant(value, 0)
    varying = {node.name for node in tape.varying}
    for node in tape.graph.nodes:
        asked = as_scalar(tape.graph, node)
        if node.name in varying or _worth_asking(asked):
            slope = _asked(found, tape.graph, asked, enclosures)
            found.by_name[node.name] = _by_matrices(found, slope, run, varying)
        value, fixed = run.values[node.name], node.name not in varying
        if fixed and node.name not in loose:
            enclosures[node.name] = _valued(node, value)
        else:
            enclosures[node.name] = _sized(found, node.name, node.spec, value, fixed=fixed)
    found.norms.pop(tape.output)  # which nothing reads
    return found


def _worth_asking(node: Node) -> bool:
    """Whether something that no parameter enters has a rule, and may be rounded."""
    record = record_of(node)
    return record.bounds is not None and record.form_of(node) is not Form.LAYOUT and bool(node.inputs)


def _parameter(found: Slopes, name: str, value: Tensor, drift: float) -> Enclosure:
    size, peak = measure(value)
    radius = maximum(size, 0.5 * value.numel() ** 0.5 if value.dim() < 2 or size.is_zero else 0.0) * drift
    found.weights[name] = value.clone(), float(radius) * (1 - 2.0**-40)
    spec = Spec(tuple(value.shape), value.dtype)
    return Enclosure(spec, value, size + radius, peak + radius, radius, None, _ZERO, _NONE)


def _valued(node: Node, value: Any) -> Enclosure:
    """A tensor that does not vary, by its value."""
    size, peak = measure(value)
    first = constant(value if isinstance(value, Tensor) else value[0], 0)
    return replace(first, spec=node.spec, value=value, bound=size, peak=peak)


def _sized(found: Slopes, name: str, spec: Spec | tuple[Spec, ...], value: Any, *, fixed: bool) -> Enclosure:
    """A tensor by its sizes alone."""
    real = [part.detach() for part in _parts(value) if part.is_floating_point()]
    size, peak = measure(real) if real else (_ZERO, _ZERO)
    bound, reach = (Magnitude.of(_doubled(float(amount))) for amount in (size, peak))
    if not real and fixed:
        return unknown_constant(spec, 0)
    found.norms[name] = float(bound) * (1 - 2.0**-40)
    return Enclosure(spec, None, bound, reach, _INFINITE, None, _INFINITE, _NONE, is_constant=fixed)


def _doubled(size: float) -> float:
    """A power of two, at least twice a size and less than eight times; not below what norms underflow to."""
    return math.inf if not size < 1e300 else 2.0 ** (math.ceil(math.log2(max(size, _LEAST))) + 2)


def _parts(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _asked(found: Slopes, graph: Graph, node: Node, enclosures: Mapping[str, Enclosure]) -> Slope:
    """What the rule of an operation says where only norms are bounded; if that is too little, with bounds on the
    largest entries too, which then have to be checked.
    """
    rule, record = rule_for(node, graph), record_of(node)
    reached = {name: replace(e, peak=maximum(e.bound, _FAR)) for name, e in enclosures.items() if e.value is None}
    blunt = rule(Call(node, {**enclosures, **reached}))
    if node.op == "surefoot.scalar" and (_is_finite(blunt) or _pieces(node.args[1])[0]):
        return slope_of(node, blunt)
    sharp = rule(Call(node, enclosures))
    if record.epsilon is not None or not all(amount.is_finite for amount in sharp.jacobian.values()):
        return replace(slope_of(node, sharp), pointwise=True)
    if _same(blunt, sharp):
        return slope_of(node, blunt)
    found.peaks |= {name: float(enclosures[name].peak) * (1 - 2.0**-40) for name in node.inputs if name in reached}
    return slope_of(node, sharp)


def _by_matrices(found: Slopes, slope: Slope, run: Run, varying: set[str]) -> Slope:
    r"""Where both factors vary and meet matrix by matrix, :math:`\|\delta A_kB_k\| \le \|\delta A_k\|\|B_k\|`: the
    slope in one is at most the largest norm of a matrix of the other.
    """
    if slope.product is None or slope.node.op not in ("aten.matmul", "aten.bmm"):
        return slope
    first, second, bilinear = slope.product
    shapes = [run.values[name].shape for name in (first, second)]
    if not {first, second} <= varying or len(shapes[0]) < 3 or shapes[0][:-2] != shapes[1][:-2] or first == second:
        return slope
    jacobian = dict(slope.jacobian)
    for name, other in ((first, second), (second, first)):
        found.slices[other] = _doubled(largest_matrix(run.values[other]))
        jacobian[name] = min(jacobian[name], bilinear * found.slices[other])
    return replace(slope, jacobian=jacobian)


def largest_matrix(value: Tensor) -> float:
    """The largest norm of the matrices that the last two dimensions make, rounded up."""
    if not value.numel():
        return 0.0
    return float(torch.linalg.vector_norm(value.detach(), dim=(-2, -1)).amax()) * (1 + 2.0**-30) + 2.0**-500


def slope_of(node: Node, bounds: Bounds) -> Slope:
    """What bounds say, by names of tensors; of a function with kinks, how curved its pieces are."""
    names = Use(node, lambda name: ()).names
    jacobian: dict[str, float] = {}
    for slot, amount in bounds.jacobian.items():
        jacobian[names[slot]] = jacobian.get(names[slot], 0.0) + float(amount)
    curvature: dict[tuple[str, str], float] = {}
    for (first, second), amount in bounds.curvature.items():
        pair = names[first], names[second]
        curvature[pair] = curvature.get(pair, 0.0) + float(amount)
    record, product = record_of(node), None
    if record.form_of(node) is Form.PRODUCT and record.factors in bounds.curvature:
        first, second = record.factors
        product = names[first], names[second], float(bounds.curvature[first, second])
    breaks: tuple[float, ...] = ()
    if node.op == "surefoot.scalar" and not _is_finite(bounds):
        breaks, bend = _pieces(node.args[1])
        curvature = dict.fromkeys(curvature, bend)
    return Slope(node, jacobian, curvature, product, bounds.reduction, breaks)


def _is_finite(bounds: Bounds) -> bool:
    return all(amount.is_finite for amount in (*bounds.jacobian.values(), *bounds.curvature.values()))


def _same(first: Bounds, second: Bounds) -> bool:
    """Whether the first says no less than the second, slot by slot."""
    pairs: list[tuple[Mapping[Any, Magnitude], Mapping[Any, Magnitude]]] = [
        (first.jacobian, second.jacobian),
        (first.curvature, second.curvature),
    ]
    return all(
        a.keys() == b.keys() and all(float(a[key]) <= float(b[key]) * (1 + 1e-9) for key in a) for a, b in pairs
    )


def _pieces(function: ScalarFunction) -> tuple[tuple[float, ...], float]:
    """The breaks of a piecewise function of x itself, and how curved its pieces are on the whole line."""
    last = function.steps[-1]
    if last.op != "piecewise" or function.steps[last.operands[0]].op != "variable":
        return (), math.inf
    bend = max(supremum(piece, 2) for piece in last.pieces)
    return (last.parameters, float(bend)) if math.isfinite(bend) else ((), math.inf)
