r"""The forward pass: from enclosures of the leaves to an enclosure of every tensor.

With :math:`J_i` and :math:`C_{ij}` the rule's Jacobian and curvature bounds of :math:`z = f(x_1, …, x_k)`,

.. math::
    \ell_z = \sum_i J_i\,\ell_{x_i}, \qquad
    s_z \le \min\Big(\sum_i J_i s_{x_i} + \epsilon,\ \mathrm{reach}(\ell_z) + e_z\Big), \qquad
    m_z = \min(\text{rule},\ \|\hat z\| + s_z)

(:math:`\ell` a vector over the variables). The first is the chain rule; the second the mean-value inequality,
from the arguments or from the variables. :math:`\epsilon` is the round-off of computing this one operation at
the centre in double precision (:mod:`surefoot.operations.evaluation`); errors of earlier operations arrive through
the spreads.

What no variable enters is folded, with an error that counts like a spread (:mod:`surefoot.calculus.folding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from surefoot.calculus.folding import folded
from surefoot.domains import Region
from surefoot.enclosure import Enclosure, measure, remembered, unknown_constant
from surefoot.graph.structure import Graph, Node, Spec
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.operations.call import Bounds, Call, Pair, Slot
from surefoot.operations.common import rows_of
from surefoot.operations.evaluation import roundoff, value_of
from surefoot.operations.record import record_of, rule_for

_QUICKER = 8.0  # how many times as fast a product of matrices is as a convolution


@dataclass(frozen=True)
class Step:
    """One operation of the pass: what its rule claimed, which tensor that varies sits in which slot, which slots
    share the rows of the result, and in which slots there are constants that are off by an error.
    """

    node: Node
    bounds: Bounds
    names: Mapping[Slot, str]
    row_slots: frozenset[Slot] = frozenset()
    inexact: Mapping[Slot, str] = field(default_factory=dict)

    @property
    def light(self) -> Step:
        """The same without what depends on centre values."""
        numbers = replace(self.bounds, curvature_along=None, rows_along=None, change_along=None)
        return replace(self, bounds=replace(numbers, entries_along=None, jacobian_change=None))

    def partners(self, slot: Slot) -> list[tuple[Pair, Slot]]:
        """The pairs with curvature of a slot, each with the other slot, if that varies or is not exact."""
        pairs = [(pair, pair[pair[0] == slot]) for pair in self.bounds.curvature if slot in pair]
        return [(pair, other) for pair, other in pairs if other in self.names or other in self.inexact]

    def argument(self, slot: Slot, enclosures: Mapping[str, Enclosure]) -> Enclosure:
        """The enclosure of what sits in a slot that may be off its centre."""
        return enclosures[self.names[slot] if slot in self.names else self.inexact[slot]]

    @property
    def work(self) -> float:
        """The multiplications of the operation, in units of those of products of matrices."""
        slower = _QUICKER if "conv" in self.node.op else 1.0
        return slower * self.node.numel * (self.bounds.reduction + 1.0)

    def row_moves(self, slot: Slot, enclosures: Mapping[str, Enclosure], count: int) -> Magnitude:
        """How far what each row of the result reads in a slot may be from the centre."""
        return row_moves(self.argument(slot, enclosures), slot in self.row_slots, count)


@dataclass(eq=False)
class Shared:
    """What passes over domains around one centre have in common. The first of them fills it in.

    Whoever hands it to passes owns the leaves and does not write to them: norms of what it holds are kept as well.
    """

    values: dict[str, Any] = field(default_factory=dict)  # at the centre, by name
    constants: dict[str, Enclosure] = field(default_factory=dict)  # what no variable enters
    costates: list[Any] = field(default_factory=list)  # the one pass backwards at the centre, if there was one


@dataclass(frozen=True)
class Pass:
    """The outcome of a forward pass: enclosures and steps, in order; the graph if centre values are kept, and what
    other passes around the same centre may share.
    """

    region: Region
    enclosures: Mapping[str, Enclosure]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    graph: Graph | None = None
    shared: Shared | None = None

    def without_values(self) -> Pass:
        """The same without centre values and what depends on them."""
        enclosures = {name: replace(e, value=None) for name, e in self.enclosures.items()}
        steps = tuple(step.light for step in self.steps)
        return replace(self, enclosures=enclosures, steps=steps, graph=None, shared=None)


def forward(
    graph: Graph, leaves: Mapping[str, Enclosure], region: Region, keep: bool = False, shared: Shared | None = None
) -> Pass:
    """Run the rules over the graph, from enclosures of the leaves.

    Centre values are kept for a pass backwards, or dropped as soon as no later operation reads them. If they are
    kept, what passes over other domains around the same centre computed is taken over.
    """
    shared = shared if keep else None
    enclosures = dict(leaves)
    if shared is not None:
        for name, leaf in leaves.items():
            value = shared.values.setdefault(name, remembered(leaf.value))
            enclosures[name] = replace(leaf, value=value)
    steps: list[Step] = []
    for node in graph.nodes:
        if shared is not None and node.name in shared.constants:
            enclosures[node.name] = shared.constants[node.name]
            continue
        value = None if shared is None else shared.values.get(node.name)
        if value is None:
            value = value_of(node, {name: enclosures[name].value for name in node.inputs})
        if all(enclosures[name].is_constant for name in node.inputs):
            enclosures[node.name] = _constant(graph, Call(node, enclosures), value, enclosures, region)
        else:
            step, enclosures[node.name] = enclose(graph, node, value, enclosures, region)
            steps.append(step if keep else step.light)
        if shared is not None:
            shared.values[node.name] = remembered(value)
            if enclosures[node.name].is_constant:
                shared.constants[node.name] = enclosures[node.name]
        for name in () if keep else graph.finished[node.name]:
            enclosures[name] = replace(enclosures[name], value=None)
    return Pass(region, enclosures, tuple(steps), graph.outputs, graph if keep else None, shared)


def enclose(
    graph: Graph, node: Node, value: Any, enclosures: Mapping[str, Enclosure], region: Region
) -> tuple[Step, Enclosure]:
    """What the rule of an operation that varies claims, and the enclosure of its result around a centre value,
    ``None`` if that is not known.
    """
    call = Call(node, enclosures)
    bounds = rule_for(node, graph)(call)
    names = {slot: name for slot, name in call.names.items() if slot in call.varying}
    rows = frozenset(slot for slot in rows_of(call) & names.keys() if names[slot] not in region.radii)
    inexact = {slot: name for slot, name in call.names.items() if slot in call.inexact}
    return Step(node, bounds, names, rows, inexact), _enclose(call, bounds, value, region)


def _enclose(call: Call, bounds: Bounds, value: Any, region: Region) -> Enclosure:
    """The enclosure of a result, around its centre where that is known and finite."""
    lipschitz = joined(bounds, {slot: e.lipschitz for slot, e in call.varying.items()})
    if bounds.lipschitz is not None:
        lipschitz = minimum(lipschitz, bounds.lipschitz)
    if value is not None:
        size, peak = measure(value)
        if size.is_finite:
            return _around_centre(call, bounds, value, size, peak, lipschitz, region)
    infinite = Magnitude.infinity()
    bound, peak = _sizes(call, _from_zero(call, bounds), bounds.peak)
    return Enclosure(call.node.spec, None, bound, peak, infinite, None, infinite, lipschitz)


def joined(bounds: Bounds, slopes: Mapping[Slot, Magnitude]) -> Magnitude:
    """The slopes of a result in every variable, from those of its arguments."""
    parts = stack([slope * bounds.jacobian[slot] for slot, slope in slopes.items()])
    return parts.norm(axis=0) if bounds.orthogonal else parts.sum(axis=0)


def _around_centre(
    call: Call, bounds: Bounds, value: Any, size: Magnitude, peak: Magnitude, lipschitz: Magnitude, region: Region
) -> Enclosure:
    rounding = roundoff(call, bounds, value, size)
    moving = {slot: (_slope(bounds, slot), e) for slot, e in {**call.varying, **call.inexact}.items()}
    local = _combine([slope * e.spread for slope, e in moving.values()], bounds.orthogonal)
    if bounds.spread is not None:
        local = minimum(local, bounds.spread)
    error = _combine([slope * e.error for slope, e in moving.values()], bounds.orthogonal)
    error = error + rounding
    spread = minimum(local + rounding, region.reach(lipschitz) + error)
    rows = _rows(call, bounds, rounding)
    move = spread
    if rows is not None:
        spread = minimum(spread, rows.norm())
        move = minimum(rows.max(), spread)
    bound, reach = size + spread, peak + move
    if bounds.bound is not None:  # ‖z − ẑ‖ ≤ ‖z‖ + ‖ẑ‖
        bound, spread = minimum(bound, bounds.bound), minimum(spread, bounds.bound + size)
    if bounds.peak is not None:
        reach = minimum(reach, bounds.peak)
    bound, reach = _sizes(call, bound, reach)
    # Readers also use bound and peak for the computed centre, which round-off may have put outside.
    bound, reach = maximum(bound, size), maximum(reach, peak)
    return Enclosure(call.node.spec, value, bound, reach, spread, rows, error, lipschitz)


def _slope(bounds: Bounds, slot: Slot) -> Magnitude:
    """The Jacobian in a slot; a rule may know none in one that must not vary."""
    return bounds.jacobian.get(slot, Magnitude.infinity())


def _sizes(call: Call, bound: Magnitude, peak: Magnitude | None) -> tuple[Magnitude, Magnitude]:
    """Norm and largest entry, each sharpened by the other: ‖z‖∞ ≤ ‖z‖₂ ≤ √n ‖z‖∞."""
    peak = bound if peak is None else minimum(peak, bound)
    return minimum(bound, peak * Magnitude.of(call.numel).sqrt()), peak


def _combine(terms: list[Magnitude], orthogonal: bool) -> Magnitude:
    total = Magnitude(np.array([term.log2 for term in terms]))
    return total.norm() if orthogonal else total.sum()


def _rows(call: Call, bounds: Bounds, rounding: Magnitude) -> Magnitude | None:
    """Row spreads: the rule's own, or the Jacobians times those of the arguments whose rows are those of the
    result and the spreads of the others.
    """
    if not call.shape:
        return None
    count = call.shape[0]
    if bounds.rows is not None:
        return bounds.rows + rounding if bounds.rows.shape == (count,) else None
    slots = rows_of(call)
    if not any(e.rows is not None for slot, e in call.varying.items() if slot in slots):
        return None
    moves = {slot: row_moves(e, slot in slots, count) for slot, e in {**call.varying, **call.inexact}.items()}
    return stack([move * _slope(bounds, slot) for slot, move in moves.items()]).sum(axis=0) + rounding


def row_moves(e: Enclosure, rowed: bool, count: int) -> Magnitude:
    """How far what each row of a result reads of an argument may be from the centre: a row of it, or all."""
    return e.row_spread(count) if rowed else Magnitude(np.full(count, e.spread.log2))


def _from_zero(call: Call, bounds: Bounds) -> Magnitude:
    """A bound that needs no centre: the rule's own, or from the value at zero and the Jacobians."""
    best = Magnitude.infinity() if bounds.bound is None else bounds.bound
    if bounds.offset is None:
        return best
    moves = [bounds.jacobian[slot] * e.bound for slot, e in call.slots.items() if slot in bounds.jacobian]
    total = _combine(moves, bounds.orthogonal) if moves else Magnitude.zero()
    return minimum(best, bounds.offset + total)


def _constant(
    graph: Graph, call: Call, value: Any, enclosures: Mapping[str, Enclosure], region: Region
) -> Enclosure:
    """A tensor that does not vary: its value if known, otherwise what the rule says of its size."""
    variables = len(region.variables)
    if value is not None:
        return folded(graph, call.node, value, enclosures, variables)
    unknown = unknown_constant(call.node.spec, variables)
    if record_of(call.node).bounds is None or not call.slots or not _real(call.node):
        return unknown
    bounds = rule_for(call.node, graph)(call)
    bound, peak = _sizes(call, _from_zero(call, bounds), bounds.peak)
    return replace(unknown, bound=bound, peak=peak)


def _real(node: Node) -> bool:
    return all(isinstance(spec, Spec) and spec.dtype.is_floating_point for spec in node.specs)
