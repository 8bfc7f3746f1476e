r"""How steep and how curved operations are, from the sizes of their arguments alone.

The rules of the calculus are asked over enclosures that hold no values: a tensor that varies is known by bounds on
its norm and its largest entry, a parameter by its value and how far it may be from there. What they claim holds at
all points whose tensors are within these bounds, so that a run of steps asks them now and then and not each time.
The bounds are twice the sizes at the point where they are asked. Where a tensor leaves its bounds, new ones are
drawn around it and its readers are asked again: what is claimed of the others does not rest on it.

A product :math:`\beta(x, w)` of a tensor and a parameter needs no bounds. Its slope in x is linear in w, so with
the bilinear norm C and any other value :math:`w_0` of the parameter

.. math:: \|\beta(\cdot, w)\| \le \|\beta(\cdot, w_0)\| + C\|w - w_0\| :

it is asked once at :math:`w_0`, its *anchor*, and grows with the distance.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from surefoot.enclosure import Enclosure, Spec, constant, measure, unknown_constant
from surefoot.errors import UnsupportedOperation
from surefoot.graph import Graph, Node
from surefoot.graph.nodes import in_double
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.record import Form, record_of, rule_for
from surefoot.valuation.kinks import only_chooses, pieces
from surefoot.valuation.passes import Plan, Run, bounds_of, lengths_between
from surefoot.valuation.tape import Tape

_ANYWHERE = 1e3  # how far a parameter may move that no slope depends on
_WORTH = 2.0**-6  # a move of a parameter, relative to its norm, after which its products are worth asking again
_ROOM = 1.25  # for largest entries, which multiply errors in products
_LEAST = 2.0**-460
_GENTLE = 2.0  # slopes up to which costates are not measured on both sides
_STEEP = 2.0**10  # slopes beyond which a function that is not linear in each argument is asked at the values
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
        anchor: the parameter of a product, at whose value the slope in the other factor was asked; else empty.
        parts: the operations between its arguments and its result, where it stands for all of them.
    """

    node: Node
    jacobian: Mapping[str, float]
    curvature: Mapping[tuple[str, str], float]
    product: tuple[str, str, float] | None = None
    reduction: int = 1
    breaks: tuple[float, ...] = ()
    pointwise: bool = False
    anchor: str = ""
    parts: tuple[Node, ...] = ()

    def at(self, distances: Mapping[str, float]) -> Mapping[str, float]:
        """The Jacobian where parameters are so far from where the rules were asked."""
        if not self.anchor or not distances[self.anchor]:
            return self.jacobian
        assert self.product is not None
        first, second, bilinear = self.product
        other = second if self.anchor == first else first
        if other not in self.jacobian:
            return self.jacobian
        slope = (self.jacobian[other] + bilinear * distances[self.anchor]) * (1 + 2.0**-50)
        return {**self.jacobian, other: slope}

    @cached_property
    def needs_values(self) -> bool:
        """Whether slope or error are computed from the values of the arguments."""
        stated = self.node.op != "surefoot.scalar" and record_of(self.node).error is not None
        return self.pointwise or stated

    @cached_property
    def kind(self) -> str:
        """How it rounds (:mod:`surefoot.valuation.rounding`)."""
        record, node = record_of(self.node), self.node
        scalar = node.op == "surefoot.scalar"
        if not record.rounds_at(node) or (scalar and only_chooses(node.args[1])):
            return "exact"
        if scalar:
            return "scalar"
        if record.loss is not None and record.loss.quadratic:
            return "squares"
        return "linear" if record.form_of(node) is Form.LINEAR else "other"

    @cached_property
    def moves_only(self) -> bool:
        """Whether it leaves the numbers of one tensor as they are, all or some."""
        return self.kind == "exact" and not self.needs_values and list(self.jacobian.values()) == [1.0]

    @cached_property
    def underflow(self) -> float:
        """What underflows take away, where no argument is larger than 1."""
        return math.sqrt(self.node.numel) * (self.reduction + 16.0) ** 2 * 2.0**-1000


@dataclass
class Slopes:
    """The slopes of all operations of a tape, and the sizes up to which they hold.

    Attributes:
        tape: the operations.
        by_name: of each of them, by name.
        norms: of tensors that vary.
        peaks: likewise, of those whose largest entry matters.
        weights: the parameters where the rules were asked, how far they may be from there, and their norms.
        enclosures: of all tensors: what the rules were told.
    """

    tape: Tape
    by_name: dict[str, Slope]
    norms: dict[str, float]
    peaks: dict[str, float] = field(default_factory=dict)
    weights: dict[str, tuple[Tensor, float, float]] = field(default_factory=dict)
    enclosures: dict[str, Enclosure] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        """What the next pass is to note and to keep.

        The costate of what is read by one scalar function alone, of moderate slope, is at most the slope times
        the costate of its result, and need not be measured.
        """
        keep = {*self.peaks}
        readers: dict[str, list[Slope]] = {}
        for name, slope in self.by_name.items():
            if name not in self.tape.special and slope.needs_values:
                keep |= {name, *slope.node.inputs}
            for argument in slope.node.inputs:
                readers.setdefault(argument, []).append(slope)
        inner = {
            name
            for name, (first, *others) in readers.items()
            if not others and first.node.op == "surefoot.scalar" and first.jacobian.get(name, math.inf) <= _GENTLE
        }
        known = {name: (value, size) for name, (value, _, size) in self.weights.items()}
        return Plan(frozenset(keep), self.tape.rounding - inner, known)

    def outside(self, run: Run, errors: Mapping[str, float]) -> list[str]:
        """The tensors that are not inside, or may not be, within their errors."""
        sizes = run.sizes
        names = [name for name, bound in self.norms.items() if not sizes[name] + errors.get(name, 0.0) <= bound]
        distances = self.distances(run)
        names += [name for name in self._bound if not distances[name] <= self.weights[name][1]]
        largest = {name: float(run.values[name].detach().abs().amax()) for name in self.peaks}
        return names + [name for name, s in largest.items() if not s + errors.get(name, 0.0) <= self.peaks[name]]

    def renew(self, run: Run, names: frozenset[str], drift: float, errors: Mapping[str, float]) -> None:
        """Draw new bounds around these tensors, as they are in a pass, and ask their readers again."""
        for name in names:
            self.peaks.pop(name, None)
            if name in self.weights:
                self.enclosures[name] = _parameter(self, name, in_double(run.parameters[name].detach()), drift)
            else:
                old, apart = self.enclosures[name], errors.get(name, 0.0)
                self.enclosures[name] = _sized(self, run, name, old.spec, apart, fixed=old.is_constant)
        for name in self.by_name:
            asked, anchor = self.tape.asked[name], self.by_name[name].anchor
            if anchor in names if anchor else not names.isdisjoint(asked.inputs):
                self.by_name[name] = _asked(self, self.tape.graph, asked, self.enclosures)
        self.__dict__.pop("plan", None)
        self.__dict__.pop("_bound", None)

    def moved(self, run: Run, *, narrow: bool) -> frozenset[str]:
        """The parameters whose neighbourhood is worth drawing anew where errors are to be smaller: anchors that
        are far away and, to make it narrower, those that are not only anchors.
        """
        distances = self.distances(run)
        anchors = {slope.anchor for slope in self.by_name.values()} - {""}
        others = self._bound - self.tape.added if narrow else frozenset()
        return others | {n for n in anchors if distances[n] > _WORTH * self.weights[n][2]}

    @cached_property
    def _bound(self) -> frozenset[str]:
        """The parameters that have to stay where they are: those that are not only anchors."""
        read = ((slope.anchor, name) for slope in self.by_name.values() for name in slope.node.inputs)
        return frozenset(name for anchor, name in read if name in self.weights and name != anchor)

    def distances(self, run: Run) -> Mapping[str, float]:
        """How far the parameters of a pass are from where the rules were asked."""
        if run.is_from(self.plan):
            return run.distances
        here = [in_double(run.parameters[name].detach()) for name in self.weights]
        apart = bounds_of(here, lengths_between(here, [value for value, _, _ in self.weights.values()]))
        return dict(zip(self.weights, apart, strict=True))


def slopes_of(
    tape: Tape, run: Run, drift: float, *, several: bool = False, errors: Mapping[str, float] | None = None
) -> Slopes:
    """The slopes around a point.

    Args:
        tape: the operations.
        run: a pass at the point.
        drift: how far parameters may be from there, relative to their norms.
        several: whether they are to hold for other inputs and targets too, up to a size.
        errors: how far tensors may be off, where that is more than their size.

    Raises:
        UnsupportedOperation: naming an operation that has no rule.
    """
    found = Slopes(tape, {}, {})
    enclosures = found.enclosures
    loose = tape.of_batch if several else frozenset()
    apart = errors or {}
    for name, leaf in tape.graph.leaves.items():
        value = in_double(run.values[name].detach())
        if name in loose:
            enclosures[name] = _sized(found, run, name, leaf.spec, 0.0, fixed=True)
        elif name in run.parameters:
            enclosures[name] = _parameter(found, name, value, drift)
        else:
            enclosures[name] = constant(value, 0)
    varying = {node.name for node in tape.varying}
    for node in tape.graph.nodes:
        asked = tape.asked[node.name]
        if node.name in varying or _worth_asking(asked):
            with contextlib.nullcontext() if node.name in varying else contextlib.suppress(UnsupportedOperation):
                found.by_name[node.name] = _asked(found, tape.graph, asked, enclosures)
        fixed = node.name not in varying
        if fixed and node.name not in loose:
            enclosures[node.name] = _valued(node, run.values[node.name])
        else:
            wide = apart.get(node.name, 0.0)
            enclosures[node.name] = _sized(found, run, node.name, node.spec, wide, fixed=fixed)
    found.norms.pop(tape.output, None)  # nothing reads it
    return found


def _worth_asking(node: Node) -> bool:
    """Whether something that no parameter enters has a rule, and may be off, itself or by what it reads."""
    return record_of(node).bounds is not None and bool(node.inputs) and node.is_real


def _parameter(found: Slopes, name: str, value: Tensor, drift: float) -> Enclosure:
    size, peak = measure(value)
    least = 0.5 * value.numel() ** 0.5 if value.dim() < 2 or size.is_zero else _LEAST
    radius = maximum(size, least) * (_ANYWHERE if name in found.tape.added else drift)
    value = value.clone()
    found.weights[name] = value, float(radius) * (1 - 2.0**-40), float(size) * (1 + 2.0**-40)
    spec = Spec(tuple(value.shape), value.dtype)
    return Enclosure(spec, value, size + radius, peak + radius, radius, None, _ZERO, _NONE)


def _valued(node: Node, value: Any) -> Enclosure:
    """A tensor that does not vary, by its value."""
    parts = tuple(in_double(part.detach()) for part in _parts(value))
    size, peak = measure(parts)
    whole = parts[0] if isinstance(value, Tensor) else parts
    return replace(constant(parts[0], 0), spec=node.spec, value=whole, bound=size, peak=peak)


def _sized(
    found: Slopes, run: Run, name: str, spec: Spec | tuple[Spec, ...], apart: float, *, fixed: bool
) -> Enclosure:
    """A tensor by its sizes alone; its largest entry is at most its norm where the values were not kept."""
    specs = spec if isinstance(spec, tuple) else (spec,)
    if not any(part.dtype.is_floating_point for part in specs):
        return unknown_constant(spec, 0) if fixed else replace(unknown_constant(spec, 0), is_constant=False)
    peak = run.sizes[name]
    if name in run.values:
        real = [part.detach() for part in _parts(run.values[name]) if part.is_floating_point()]
        peak = float(measure(real)[1])
    apart = math.inf if math.isnan(apart) else apart
    bound = Magnitude.of(_doubled(run.sizes[name] + 2 * apart))
    reach = Magnitude.of(_ROOM * max(peak + 2 * apart, _LEAST)) if name in run.values else bound
    found.norms[name] = float(bound) * (1 - 2.0**-40)
    return Enclosure(spec, None, bound, reach, _INFINITE, None, _INFINITE, _NONE, is_constant=fixed)


def _doubled(size: float) -> float:
    """A power of two that is at least twice a size and less than eight times, or what norms may underflow to."""
    return math.inf if not size < 1e300 else 2.0 ** (math.ceil(math.log2(max(size, _LEAST))) + 2)


def _parts(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _asked(found: Slopes, graph: Graph, node: Node, enclosures: Mapping[str, Enclosure]) -> Slope:
    """What the rule of an operation says where only norms are bounded; if that is too little, with bounds on the
    largest entries too, which then have to be checked.
    """
    rule, record = rule_for(node, graph), record_of(node)
    names = Use(node, lambda name: ()).names
    if record.form_of(node) is Form.PRODUCT and len(record.factors) == 2:
        anchors = [name for name in (names.get(slot, "") for slot in record.factors) if name in found.weights]
        if len(anchors) == 1:
            size, peak = measure(found.weights[anchors[0]][0])
            told = {name: _without_value(enclosures[name]) for name in node.inputs}
            told[anchors[0]] = replace(enclosures[anchors[0]], bound=size, peak=peak, spread=_ZERO)
            slope = slope_of(node, rule(Call(node, told)))
            if slope.product is not None and math.isfinite(slope.product[2]):
                return replace(slope, anchor=anchors[0])
    reached = {
        name: replace(enclosures[name], peak=maximum(enclosures[name].bound, _FAR))
        for name in node.inputs if enclosures[name].value is None
    }  # fmt: skip
    blunt = rule(Call(node, {**enclosures, **reached}))
    if node.op == "surefoot.scalar" and (_is_moderate(blunt, _GENTLE) or pieces(node.args[1])[0]):
        return slope_of(node, blunt)
    sharp = rule(Call(node, enclosures))
    whole = _as_one(found, node, sharp)
    if whole is not None:
        read = (name for name in whole.jacobian if name in reached)
        found.peaks |= {name: float(enclosures[name].peak) * (1 - 2.0**-40) for name in read}
        return whole
    if node.op == "surefoot.scalar" and not _is_moderate(sharp):  # an exponential: it depends on where
        return replace(slope_of(node, sharp), pointwise=True)
    # a quotient is steep where its divisor is near zero, and only the values tell whether it is
    steep = any(not a <= _STEEP for a in sharp.jacobian.values())
    divides = steep and record.form_of(node) in (Form.QUOTIENT, Form.OTHER)
    if divides or record.epsilon is not None or not all(a.is_finite for a in sharp.jacobian.values()):
        return replace(slope_of(node, sharp), pointwise=True)
    moves = {slot for slot in sharp.jacobian if names[slot] not in found.weights}  # parameters are exact
    if record.form_of(node) is Form.PRODUCT and _same(blunt, sharp, moves):
        return slope_of(node, blunt)
    if _same(blunt, sharp, set(sharp.jacobian)):
        return slope_of(node, blunt)
    found.peaks |= {name: float(enclosures[name].peak) * (1 - 2.0**-40) for name in node.inputs if name in reached}
    return slope_of(node, sharp)


def _as_one(found: Slopes, node: Node, bounds: Bounds) -> Slope | None:
    """An operation that only names its first argument, as the function of other arguments that this is by all
    operations between; ``None`` for others.
    """
    if bounds.instead is None or found.tape.single or not _is_finite(bounds.instead):
        return None
    slope = slope_of(node, bounds.instead)
    jacobian = {name: amount for name, amount in slope.jacobian.items() if amount}
    parts = found.tape.between(frozenset(jacobian), node.inputs[0])
    simple = parts and all(part.name in found.by_name and not found.by_name[part.name].parts for part in parts)
    return replace(slope, jacobian=jacobian, parts=parts) if simple else None


def _without_value(enclosure: Enclosure) -> Enclosure:
    """A constant by its sizes alone: slopes in the parameters it is multiplied with are not wanted."""
    if not enclosure.is_constant or not isinstance(enclosure.value, Tensor):
        return enclosure
    real = enclosure.value.is_floating_point()
    return replace(enclosure, value=None, spread=_INFINITE, error=_INFINITE) if real else enclosure


def slope_of(node: Node, bounds: Bounds) -> Slope:
    """What bounds say, by names of tensors; of a function with kinks, how curved its pieces are."""
    names = Use(node, lambda name: ()).names
    jacobian: dict[str, float] = {}
    for slot, amount in bounds.jacobian.items():
        jacobian[names[slot]] = jacobian.get(names[slot], 0.0) + float(amount)
    curvature: dict[tuple[str, str], float] = {}
    for (first, second), amount in bounds.curvature.items():
        pair = names[first], names[second]
        twice = 2 if first != second and pair[0] == pair[1] else 1  # both orders, in one tensor
        curvature[pair] = curvature.get(pair, 0.0) + twice * float(amount)
    record, product = record_of(node), None
    if record.form_of(node) is Form.PRODUCT and record.factors in bounds.curvature:
        first, second = record.factors
        product = names[first], names[second], float(bounds.curvature[first, second])
    breaks: tuple[float, ...] = ()
    if node.op == "surefoot.scalar" and not _is_finite(bounds):
        breaks, bend = pieces(node.args[1])
        curvature = dict.fromkeys(curvature, bend)
    return Slope(node, jacobian, curvature, product, bounds.reduction, breaks)


def _is_finite(bounds: Bounds) -> bool:
    return all(amount.is_finite for amount in (*bounds.jacobian.values(), *bounds.curvature.values()))


def _is_moderate(bounds: Bounds, steepest: float = _STEEP) -> bool:
    return _is_finite(bounds) and all(amount <= steepest for amount in bounds.jacobian.values())


def _same(first: Bounds, second: Bounds, slots: set[str]) -> bool:
    """Whether the first says no less than the second in these slots."""
    pairs: list[tuple[Mapping[Any, Magnitude], Mapping[Any, Magnitude], Any]] = [
        (first.jacobian, second.jacobian, slots),
        (first.curvature, second.curvature, second.curvature),
    ]
    return all(
        a.keys() == b.keys() and all(float(a[key]) <= float(b[key]) * (1 + 1e-9) for key in keys)
        for a, b, keys in pairs
    )
