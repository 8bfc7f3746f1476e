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

from dataclasses import dataclass, replace

import numpy as np

from surefoot.calculus.adjoint.centre import Centre
from surefoot.calculus.adjoint.entrywise import Entrywise
from surefoot.calculus.adjoint.samples import Samples, Source
from surefoot.calculus.forward import Pass, Step, forward
from surefoot.domains import Region
from surefoot.enclosure import Enclosure, measure, row_norms
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.call import Slot


@dataclass(frozen=True)
class Rows:
    """Bounds of derivatives in injections, samples × linear layers.

    Attributes:
        centre: at the centre.
        near: of the part of the change that has passed no linear layer.
        change: of the distance to the centre over the domain.
        norms: by products of norms over the domain, which round-off is relative to.
    """

    centre: Magnitude
    near: Magnitude
    change: Magnitude
    norms: Magnitude

    @property
    def domain(self) -> Magnitude:
        """Over the domain."""
        return minimum(self.centre + self.change, self.norms)


@dataclass(frozen=True)
class Variable:
    """A weight or a bias: the layer it belongs to, and what it is multiplied by in each sample.

    Attributes:
        position: among the variables.
        layer: its linear layer.
        size: norms of what it is multiplied by at the centre.
        spread: how far that moves.
        multiplies: whether it is a weight, so that it meets its input.
    """

    position: int
    layer: int
    size: Magnitude
    spread: Magnitude
    multiplies: bool

    @property
    def reach(self) -> Magnitude:
        """Norms of what it is multiplied by over the domain."""
        return self.size + self.spread


def reach(region: Region, slopes: Magnitude) -> Magnitude:
    """How far each row may move on the domain, from slopes rows × variables; see :meth:`Region.reach`."""
    total = Magnitude.zero((len(slopes),))
    for members, radius in region.groups:
        total = total + slopes[:, list(members)].norm(axis=1) * radius
    return total


class Tangents:
    """The forward pass once more, with derivatives sample by sample.

    Attributes:
        rows: the derivatives of every tensor that varies and has rows.
        variables: the weights and biases of the layers.
        result: the pass with sharper enclosures.
    """

    def __init__(self, first: Pass, separate: Samples, centre: Centre) -> None:
        assert first.graph is not None
        self.first, self.known = first, centre
        self.layer = {source.name: k for k, source in enumerate(separate.sources)}
        self.sources = separate.sources
        self.zero = Magnitude.zero((centre.count, len(self.layer)))
        self.rows: dict[str, Rows] = {}
        self.arrived: dict[int, Magnitude] = {}
        self.variables: list[Variable] = []
        leaves = {name: first.enclosures[name] for name in first.graph.leaves}
        self.enclosures = {name: e for name, e in first.enclosures.items() if name in leaves or e.is_constant}
        self.result = forward(first.graph, leaves, first.region, keep=True, sharpen=self._sharpened)

    def slopes(self, injected: Magnitude) -> Magnitude:
        """Bounds in every variable, from those in the injections of every layer (samples × layers)."""
        log2 = np.full((self.known.count, len(self.first.region.variables)), -np.inf)
        total = Magnitude(log2)
        for variable in self.variables:
            part = log2.copy()
            part[:, variable.position] = (injected[:, variable.layer] * variable.reach).log2
            total = total + Magnitude(part)
        return total

    def jacobian_change(self, step: Step, slot: Slot) -> Magnitude:
        """How far each row of the Jacobian in a slot may be from that at the centre."""
        total = Magnitude.zero((self.known.count,))
        for pair, curvature in step.bounds.curvature.items():
            for first, second in {pair, pair[::-1]}:
                if first != slot or second not in step.names:
                    continue
                moves = self.enclosures[step.names[second]]
                if second in step.row_slots:
                    total = total + moves.row_spread(self.known.count) * curvature
                else:
                    total = total + moves.spread * curvature
        own = {} if step.bounds.jacobian_change is None else step.bounds.jacobian_change()
        return minimum(total, own.get(slot, total))

    def _sharpened(self, step: Step, enclosed: Enclosure) -> Enclosure:
        if enclosed.value is not None and enclosed.shape[:1] == (self.known.count,):
            self.rows[step.node.name] = self._differentiated(step)
            enclosed = self._enclosed(step, enclosed)
        self.enclosures[step.node.name] = enclosed
        return enclosed

    def _differentiated(self, step: Step) -> Rows:
        """The derivatives of a result."""
        name = step.node.name
        centre = near = norms = self.zero
        for slot in step.row_slots & step.names.keys():
            argument, jacobian = self.rows[step.names[slot]], step.bounds.jacobian[slot]
            centre, norms = centre + argument.centre * jacobian, norms + argument.norms * jacobian
            near = near + argument.near * jacobian
            near = near + argument.centre * column(self.jacobian_change(step, slot))
        if name in self.layer:
            layer = self.layer[name]
            self.arrived[layer], near = near, self.zero
            unit = np.zeros(self.zero.shape)
            unit[:, layer] = 1.0
            centre, norms = centre + Magnitude.of(unit), norms + Magnitude.of(unit)
            self.variables += self._variables(self.sources[layer], layer)
        exact = self.known.jacobians.get(name)
        if exact is not None:
            centre = minimum(centre, exact + norms * self.known.error)
        return Rows(centre, near, self._change(centre, near, norms), norms)

    def _change(self, centre: Magnitude, near: Magnitude, norms: Magnitude) -> Magnitude:
        """Solve the triangular system of the module, from the last layer to the first."""
        found = np.array(near.log2)
        domain: dict[int, Magnitude] = {}
        for k in sorted(self.arrived, reverse=True):
            total = near[:, k]
            for m, slope in domain.items():
                total = total + slope * self.arrived[m][:, k]
            total = minimum(total, norms[:, k] + centre[:, k])
            found[:, k] = total.log2
            domain[k] = minimum(centre[:, k] + total, norms[:, k])
        return Magnitude(found)

    def _variables(self, source: Source, layer: int) -> list[Variable]:
        count, found = self.known.count, []
        if source.weight is not None:
            inputs = self.enclosures[source.step.node.args[0].name]
            found.append(
                Variable(source.weight, layer, row_norms(inputs.value), inputs.row_spread(count), multiplies=True)
            )
        if source.bias is not None:
            one, zero = Magnitude.of(np.ones(count)), Magnitude.zero((count,))
            found.append(Variable(source.bias, layer, one, zero, multiplies=False))
        return found

    def _enclosed(self, step: Step, enclosed: Enclosure) -> Enclosure:
        slopes = self.slopes(self.rows[step.node.name].domain)
        moves = minimum(reach(self.first.region, slopes) + enclosed.error, enclosed.row_spread(self.known.count))
        spread = minimum(enclosed.spread, moves.norm())
        size, peak = measure(enclosed.value)
        sharper = replace(
            enclosed,
            rows=moves,
            spread=spread,
            bound=maximum(size, minimum(enclosed.bound, size + spread)),
            peak=maximum(peak, minimum(enclosed.peak, peak + moves.max())),
            lipschitz=minimum(enclosed.lipschitz, slopes.norm(axis=0)),
        )
        if step.node.name not in self.layer:
            return sharper
        entries = reach(self.first.region, self._entry_slopes(self.layer[step.node.name], slopes))
        return Entrywise.of(sharper, entries + enclosed.error)

    def _entry_slopes(self, layer: int, slopes: Magnitude) -> Magnitude:
        """The same for any entry of the result of a linear layer.

        Its own weight and bias reach one entry as they reach all; the others come through one row of the weight.
        """
        source = self.sources[layer]
        own = [position for position in (source.weight, source.bias) if position is not None]
        through = np.full(slopes.shape, -np.inf)
        if source.reads is not None:
            largest = row_norms(source.matrix).max() + self.weight_spread(source)
            through = (self.slopes(self.rows[source.reads].domain) * largest).log2.copy()
        through[:, own] = slopes.log2[:, own]
        return minimum(Magnitude(through), slopes)

    def weight_spread(self, source: Source) -> Magnitude:
        """How far the weight of a layer may be from its centre."""
        return self.enclosures[source.step.node.args[1].name].spread


def column(rows: Magnitude) -> Magnitude:
    """One number per row, to be multiplied with several."""
    return Magnitude(np.asarray(rows.log2)[:, None])
