r"""Derivatives of every tensor in what linear layers add to a sample: at the centre, and how far they move.

Let :math:`G_{z,k}` be the derivative of row n of a tensor z in the injection :math:`e_{k,n}` of linear layer k
(:mod:`surefoot.calculus.adjoint.samples`), hats local derivatives at the computed centre and what the chain rule
makes of them. Row by row

.. math:: G_z - \hat G_z = \sum_i J_i(G_{x_i} - \hat G_{x_i}) + b_z, \qquad
    b_z = (J_i - \hat J_i)\hat G_{x_i}, \quad \|J_i - \hat J_i\| \le \sum_j C_{ij}\,s(x_j) .

So :math:`G_z - \hat G_z` is the sum of all :math:`b_y`, each carried from y to z. Sorted by the first linear
layer m that lies on the way, it is what arrives from after the last layer (``near``, carried by products of
norms) plus :math:`G_{z,m}` times what arrived at the layer m (``arrived``): with the exact Jacobians of all
samples at the centre,

.. math:: \|G_{z,k} - \hat G_{z,k}\| \le \mathrm{near}_{z,k} + \sum_m\big(\|\hat G_{z,m}\| +
    \|G_{z,m} - \hat G_{z,m}\|\big)\,\mathrm{arrived}_{m,k},

where only later layers m > k occur on the right. A change of the weight of layer k is an injection
:math:`\dot W_kx_{k,n}`; by the mean-value inequality a row moves by at most what the variables can make of
:math:`\|G_{z,k}\|\|x_{k,n}\|`, which sharpens the enclosures that the next operation is bounded by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from surefoot.calculus.adjoint.centre import Centre
from surefoot.calculus.adjoint.samples import Samples, Source
from surefoot.calculus.forward import Pass, Step, enclose
from surefoot.domains import Region
from surefoot.enclosure import Enclosure, measure, row_norms
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.call import Slot

Enclosures = Mapping[str, Enclosure]


@dataclass(frozen=True)
class Rows:
    """Bounds of derivatives in injections, samples × linear layers."""

    centre: Magnitude  # at the centre
    near: Magnitude  # of the part of the change that has passed no linear layer
    change: Magnitude  # of the distance to the centre over the domain
    norms: Magnitude  # by products of norms over the domain
    # the same with the slack of every operation added to its norm, which round-off is relative to
    sizes: Magnitude

    @property
    def domain(self) -> Magnitude:
        """Over the domain."""
        return minimum(self.centre + self.change, self.norms)


@dataclass(frozen=True)
class Variable:
    """A weight or a bias: the layer it belongs to, and what it is multiplied by in each sample."""

    position: int  # among the variables
    layer: int  # its linear layer
    size: Magnitude  # norms of what it is multiplied by at the centre
    spread: Magnitude  # how far that moves
    multiplies: bool  # whether it is a weight, so that it meets its input

    @property
    def reach(self) -> Magnitude:
        """Norms of what it is multiplied by over the domain."""
        return self.size + self.spread


@dataclass(frozen=True)
class Entrywise(Enclosure):
    """An enclosure with one more claim."""

    # how far any entry of a row may be from the centre, for each row, or a tensor with one number for each entry.
    # A row that moves by s in norm may move by as much in one entry, but the result of a linear layer moves by
    # less in each than in all.
    entries: Magnitude | Tensor | None = None

    @classmethod
    def of(cls, enclosure: Enclosure, entries: Magnitude | Tensor) -> Entrywise:
        """The same enclosure with that claim."""
        return cls(**{field.name: getattr(enclosure, field.name) for field in fields(Enclosure)}, entries=entries)

    def radius(self) -> Tensor | None:
        """How far each entry may be from the centre: a tensor that broadcasts against the value."""
        if self.entries is None or not isinstance(self.value, Tensor):
            return super().radius()
        if isinstance(self.entries, Tensor):
            return super().radius()
        rows = minimum(self.entries, self.row_spread(len(self.entries))).tensor(self.value)
        return rows.reshape(-1, *[1] * (self.value.dim() - 1))

    def entry_radius(self) -> Tensor | None:
        """The same with one number for each entry where that is known."""
        return self.entries if isinstance(self.entries, Tensor) else self.radius()


@dataclass(frozen=True)
class Tangents:
    """The forward pass once more, with derivatives sample by sample."""

    result: Pass  # the pass with sharper enclosures
    rows: Mapping[str, Rows]  # the derivatives of every tensor that varies and has rows
    variables: Sequence[Variable]  # the weights and biases of the layers
    sources: Sequence[Source]  # the layers
    count: int  # the number of samples
    slack: Mapping[str, tuple[float, float]]  # of the derivatives of every operation; see :class:`Samples`
    ways: Ways  # how far rows move


class Ways:
    r"""How far rows of tensors and costates, or any of their entries, move from the centre of a domain.

    By the mean-value inequality a row whose slopes in the variables of a group g have the norm :math:`\ell_g` over
    the domain moves by at most :math:`\sum_g\ell_gr_g`, :math:`r_g` the radius of the group. With a smaller domain
    inside, of radii :math:`r'_g \le r_g`, for which the row moves by at most m, it moves by at most

    .. math:: m + \sum_g\ell_g(r_g - r'_g) ,

    which is less, as slopes are smaller inside. *Proof.* A point :math:`u + d` of the domain is reached by way of
    :math:`u + d'`, :math:`d'_g = d_g\min(1, r'_g/\|d_g\|)`, which is inside, and from there on a straight line,
    which stays in the domain, as that is convex, and :math:`\|d_g - d'_g\| \le r_g - r'_g`.
    """

    def __init__(self, region: Region, inside: Ways | None = None) -> None:
        if inside is not None and not inside.lies_in(region):
            raise ValueError("a domain that is said to be inside is not")
        self.region, self.moves = region, dict[tuple[str, str], Magnitude]()
        self._known = {} if inside is None else inside.moves
        self._inner = [0.0 if inside is None else inside.region.groups[g][1] for g in range(len(region.groups))]

    def lies_in(self, region: Region) -> bool:
        """Whether a region has the same groups of variables, none with a smaller radius."""
        ours, theirs = self.region.groups, region.groups
        same = self.region.variables == region.variables and [m for m, _ in ours] == [m for m, _ in theirs]
        return same and all(a[1] <= b[1] for a, b in zip(ours, theirs, strict=True))

    def move(self, name: str, what: str, slopes: Magnitude) -> Magnitude:
        """How far each row may move, from slopes over the domain, rows × variables."""
        known = self._known.get((name, what))
        total = Magnitude.zero((len(slopes),)) if known is None else known
        for (members, radius), inner in zip(self.region.groups, self._inner, strict=True):
            way = radius if known is None else (radius - inner) * (1 + 2.0**-50)
            total = total + slopes[:, list(members)].norm(axis=1) * way
        self.moves[name, what] = total
        return total


def tangents(first: Pass, samples: Samples, centre: Centre, inside: Ways | None = None) -> Tangents:
    """Enclose every tensor of a pass again, each by what is known of the derivatives of those before it, and of
    how far rows move on a smaller domain inside.
    """
    ways = Ways(first.region, inside)
    graph, region, sources, count = first.graph, first.region, samples.sources, centre.count
    assert graph is not None
    layers = {source.name: k for k, source in enumerate(sources)}
    enclosures = {name: e for name, e in first.enclosures.items() if name in graph.leaves or e.is_constant}
    steps: list[Step] = []
    rows: dict[str, Rows] = {}
    arrived: dict[int, Magnitude] = {}
    variables: list[Variable] = []
    for node in (step.node for step in first.steps):
        step, enclosed = enclose(graph, node, first.enclosures[node.name].value, enclosures, region)
        steps.append(step)
        if enclosed.value is not None and enclosed.shape[:1] == (count,):
            layer = layers.get(node.name)
            zero, slack = Magnitude.zero((count, len(sources))), samples.slack[node.name][0]
            carried = _carried(step, rows, enclosures, zero, slack)
            if layer is not None:
                arrived[layer] = carried.near
                carried = _injected(carried, layer)
                variables += _variables(sources[layer], layer, enclosures, count)
            rows[node.name] = _settled(carried, arrived, centre.jacobians.get(node.name), centre.error)
            slopes = in_variables(rows[node.name].domain, variables, region)
            enclosed = moved_at_most(enclosed, ways.move(node.name, "rows", slopes))
            enclosed = replace(enclosed, lipschitz=minimum(enclosed.lipschitz, slopes.norm(axis=0)))
            if layer is not None:
                entries = _entry_slopes(sources[layer], slopes, rows, variables, enclosures, region)
                enclosed = Entrywise.of(enclosed, ways.move(node.name, "entries", entries) + enclosed.error)
        enclosures[node.name] = enclosed
    result = replace(first, enclosures=enclosures, steps=tuple(steps))
    return Tangents(result, rows, tuple(variables), sources, count, samples.slack, ways)


def in_variables(injected: Magnitude, variables: Iterable[Variable], region: Region) -> Magnitude:
    """Bounds in every variable, from those in the injections of every layer (samples × layers)."""
    parts = (((slice(None), v.position), injected[:, v.layer] * v.reach) for v in variables)
    return placed((len(injected), len(region.variables)), parts)


def placed(shape: tuple[int, ...], parts: Iterable[tuple[Any, Magnitude]]) -> Magnitude:
    """An array with amounts added at some of its indices."""
    log2 = np.full(shape, -np.inf)
    for index, amount in parts:
        log2[index] = (Magnitude(log2[index]) + amount).log2
    return Magnitude(log2)


def moved_at_most(enclosed: Enclosure, moves: Magnitude) -> Enclosure:
    """An enclosure whose rows in exact arithmetic move by at most so much."""
    moves = minimum(moves + enclosed.error, enclosed.row_spread(len(moves)))
    spread = minimum(enclosed.spread, moves.norm())
    size, peak = measure(enclosed.value)
    return replace(
        enclosed,
        rows=moves,
        spread=spread,
        bound=maximum(size, minimum(enclosed.bound, size + spread)),
        peak=maximum(peak, minimum(enclosed.peak, peak + moves.max())),
    )


def jacobian_change(step: Step, slot: Slot, enclosures: Enclosures, count: int) -> Magnitude:
    """How far each row of the Jacobian in a slot may be from that at the centre."""
    total = Magnitude.zero((count,))
    for pair, other in step.partners(slot):
        total = total + step.row_moves(other, enclosures, count) * step.bounds.curvature[pair]
    sharper = {} if step.bounds.jacobian_change is None else step.bounds.jacobian_change()
    return minimum(total, sharper.get(slot, total))


def _carried(step: Step, rows: Mapping[str, Rows], enclosures: Enclosures, zero: Magnitude, slack: float) -> Rows:
    """The derivatives of a result, from those of its arguments; how far they move is not yet known."""
    centre = near = norms = sizes = zero
    for slot in step.row_slots & step.names.keys():
        argument, jacobian = rows[step.names[slot]], step.bounds.jacobian[slot]
        centre, norms = centre + argument.centre * jacobian, norms + argument.norms * jacobian
        sizes = sizes + argument.sizes * (jacobian + slack)
        change = jacobian_change(step, slot, enclosures, len(zero))
        near = near + argument.near * jacobian + argument.centre * change[:, None]
    return Rows(centre, near, zero, norms, sizes)


def _injected(carried: Rows, layer: int) -> Rows:
    """The same for the result of a layer, which has derivative one in its own injection."""
    unit = np.zeros(carried.centre.shape)
    unit[:, layer] = 1.0
    one, zero = Magnitude.of(unit), Magnitude.zero(unit.shape)
    return Rows(carried.centre + one, zero, zero, carried.norms + one, carried.sizes + one)


def _settled(carried: Rows, arrived: Mapping[int, Magnitude], exact: Magnitude | None, error: float) -> Rows:
    """Take over what was computed at the centre, and solve the triangular system of the module for how far it
    moves, from the last layer to the first.
    """
    centre, near, norms = carried.centre, carried.near, carried.norms
    if exact is not None:
        centre = minimum(centre, exact + carried.sizes * error)
    change = np.array(near.log2)
    for k in sorted(arrived, reverse=True):
        total = minimum(Magnitude(change[:, k]), norms[:, k] + centre[:, k])
        change[:, k] = total.log2
        slope = minimum(centre[:, k] + total, norms[:, k])
        change[:, :k] = (Magnitude(change[:, :k]) + arrived[k][:, :k] * slope[:, None]).log2
    return Rows(centre, near, Magnitude(change), norms, carried.sizes)


def _variables(source: Source, layer: int, enclosures: Enclosures, count: int) -> list[Variable]:
    found = []
    if source.weight is not None:
        inputs = enclosures[source.step.node.args[0].name]
        size, spread = row_norms(inputs.value), inputs.row_spread(count)
        found.append(Variable(source.weight, layer, size, spread, multiplies=True))
    if source.bias is not None:
        one, zero = Magnitude.of(np.ones(count)), Magnitude.zero((count,))
        found.append(Variable(source.bias, layer, one, zero, multiplies=False))
    return found


def _entry_slopes(
    source: Source,
    slopes: Magnitude,
    rows: Mapping[str, Rows],
    variables: Iterable[Variable],
    enclosures: Enclosures,
    region: Region,
) -> Magnitude:
    """Slopes of any entry of the result of a linear layer, from those of its rows.

    Its own weight and bias reach one entry as they reach all; the others come through one row of the weight.
    """
    own = [position for position in (source.weight, source.bias) if position is not None]
    through = np.full(slopes.shape, -np.inf)
    if source.reads is not None:
        largest = row_norms(source.matrix).max() + weight_spread(source, enclosures)
        through = (in_variables(rows[source.reads].domain, variables, region) * largest).log2.copy()
    through[:, own] = slopes.log2[:, own]
    return minimum(Magnitude(through), slopes)


def weight_spread(source: Source, enclosures: Enclosures) -> Magnitude:
    """How far the weight of a layer may be from its centre."""
    return enclosures[source.step.node.args[1].name].spread
