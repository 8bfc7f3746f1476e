r"""The second derivative over the domain, from what is known at the centre and how far everything moves.

In the injections of two linear layers (:mod:`surefoot.calculus.adjoint.tangents`) it is, row by row,

.. math:: M^{tk} = \sum_z\sum_{ij} G_{x_i,t}^\top\,\Phi_{z,ij}\,G_{x_j,k},

with :math:`\Phi_z` the second derivative of an operation contracted with its costate. Products change by at most

.. math:: \|M^{tk} - \hat M^{tk}\| \le \sum_z\sum_{ij} \|G_{x_i,t}\|\,\|\Phi - \hat\Phi\|\,\|G_{x_j,k}\|
    + \|G_{x_i,t} - \hat G_{x_i,t}\|\,\|\hat\Phi\|\,\|G_{x_j,k}\|
    + \|\hat G_{x_i,t}\|\,\|\hat\Phi\|\,\|G_{x_j,k} - \hat G_{x_j,k}\| .

A change of the variables is an injection :math:`\dot W_kx_k` (a bias: x = 1), so the second derivative between
two variables is :math:`\sum_n(\dot W_tx_t)^\top M^{tk}(\dot W_kx_k) + \lambda_t^\top\dot W_tG_{x_t,k}\dot W_kx_k`
and the latter with t and k exchanged, and its distance to that at the centre follows in the same way. Costates of
the results of linear layers have the derivatives :math:`M^{tk}\dot W_kx_k + G_{x_k,t}^\top\dot
W_k^\top\lambda_k`, which bounds how far they move.

*Round-off.* What is computed at the centre is a sum of products of local derivatives, each off by a relative
:math:`(k + 16)^2u` of its norm (:mod:`surefoot.calculus.forward`), or of one for second derivatives that are
smaller than one. To first order the result is off by the sum of these times the product of the norms; the second
order is smaller by factors of u, and the result is doubled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from surefoot.calculus.adjoint.centre import Centre
from surefoot.calculus.adjoint.entrywise import Entrywise
from surefoot.calculus.adjoint.tangents import Rows, Tangents, Variable, reach
from surefoot.calculus.forward import Step
from surefoot.enclosure import Enclosure, row_norms
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Pair


class Cotangents:
    """Follows the backward pass: sharpens costates, and collects how far second derivatives move.

    Attributes:
        change: of the second derivatives in injections, samples × layers × layers.
        norms: the same derivatives by products of norms, which round-off is relative to.
    """

    def __init__(self, tangents: Tangents, centre: Centre) -> None:
        self.tangents, self.known = tangents, centre
        layers = len(tangents.layer)
        self.change = self.norms = Magnitude.zero((centre.count, layers, layers))
        self.costates: dict[int, Enclosure] = {}
        self.slopes: dict[int, Magnitude] = {}
        steps = tangents.result.steps
        self.readers = Counter(name for step in steps for name in step.names.values())

    def sharpened(self, name: str, costate: Enclosure) -> Enclosure:
        """The costate of a tensor, all of whose readers have been seen."""
        layer = self.tangents.layer.get(name)
        if layer is None:
            return self._entrywise(name, costate)
        slopes = self.slopes[layer] = self.tangents.slopes(self._curvature[:, layer, :]) + self._through_weights(
            layer
        )
        moves = minimum(
            reach(self.tangents.first.region, slopes) + costate.error, costate.row_spread(self.known.count)
        )
        spread = minimum(costate.spread, moves.norm())
        bound = minimum(costate.bound, costate.centre_norm + spread)
        costate = replace(costate, rows=moves, spread=spread, bound=bound, peak=minimum(costate.peak, bound))
        self.costates[layer] = costate
        return costate

    def _entrywise(self, name: str, costate: Enclosure) -> Enclosure:
        r"""The costate of what one linear layer alone reads, entry by entry.

        An entry is the product of a column of the weight and the costate of the layer, so it depends on the
        variables as the latter does, times the norm of the column, and on that weight itself.
        """
        layers = [k for k, source in enumerate(self.tangents.sources) if source.reads == name]
        if self.readers[name] != 1 or len(layers) != 1:
            return costate
        source = self.tangents.sources[layers[0]]
        largest = row_norms(source.matrix.mT).max() + self.tangents.weight_spread(source)
        slopes = self.slopes[layers[0]] * largest
        if source.weight is not None:
            own, part = self.costates[layers[0]], np.full(slopes.shape, -np.inf)
            part[:, source.weight] = (row_norms(own.value) + own.row_spread(self.known.count)).log2
            slopes = slopes + Magnitude(part)
        return Entrywise.of(costate, reach(self.tangents.first.region, slopes) + costate.error)

    @property
    def _curvature(self) -> Magnitude:
        """The second derivatives in injections over the domain."""
        return self.known.curvature + self.norms * self.known.error + self.change

    def _through_weights(self, layer: int) -> Magnitude:
        """How the costate of a layer depends on later weights, through which it comes: samples × variables."""
        log2 = np.full((self.known.count, len(self.tangents.first.region.variables)), -np.inf)
        total = Magnitude(log2)
        for variable in self.tangents.variables:
            reads = self._reads(variable)
            if reads is None or variable.layer not in self.costates:
                continue
            costate, part = self.costates[variable.layer], log2.copy()
            sizes = row_norms(costate.value) + costate.row_spread(self.known.count)
            part[:, variable.position] = (reads.domain[:, layer] * sizes).log2
            total = total + Magnitude(part)
        return total

    def _reads(self, variable: Variable) -> Rows | None:
        """The derivatives of the input that a weight multiplies, if that varies."""
        name = self.tangents.sources[variable.layer].reads
        return self.tangents.rows[name] if variable.multiplies and name is not None else None

    def pass_on(self, step: Step, costate: Enclosure, fixed: Enclosure) -> None:
        """Add what an operation contributes to the second derivatives."""
        pairs = [pair for pair in step.bounds.curvature if set(pair) <= step.row_slots & step.names.keys()]
        if not pairs:
            return
        sizes = self._sizes(fixed)
        forms = self._forms(step, fixed, sizes)
        moves = self._moves(step, costate, forms)
        for pair in pairs:
            for first, second in {pair, pair[::-1]}:
                left, right = (self.tangents.rows[step.names[slot]] for slot in (first, second))
                form, move = forms[pair], moves[pair]
                moved = _outer(left.domain, move, right.domain) + _outer(left.change, form, right.domain)
                self.change = self.change + moved + _outer(left.centre, form, right.change)
                rough = sizes * (step.bounds.curvature[pair] + 1.0)
                self.norms = self.norms + _outer(left.norms, rough, right.norms)

    def _sizes(self, costate: Enclosure) -> Magnitude:
        count = self.known.count
        if costate.value.dim() and costate.value.shape[0] == count:
            return row_norms(costate.value)
        return Magnitude(np.full(count, costate.bound.log2))

    def _forms(self, step: Step, fixed: Enclosure, sizes: Magnitude) -> dict[Pair, Magnitude]:
        """The contracted second derivatives at the centre, row by row."""
        own: Mapping[Pair, Magnitude] = {} if step.bounds.rows_along is None else step.bounds.rows_along(fixed)
        norms = {pair: sizes * amount for pair, amount in step.bounds.curvature.items()}
        return {pair: minimum(amount, own.get(pair, amount)) for pair, amount in norms.items()}

    def _moves(self, step: Step, costate: Enclosure, forms: Mapping[Pair, Magnitude]) -> dict[Pair, Magnitude]:
        """How far they move over the domain; where the rule does not say, at most as both together."""
        sizes = self._sizes(costate) + costate.row_spread(self.known.count)
        either = {pair: sizes * amount + forms[pair] for pair, amount in step.bounds.curvature.items()}
        own: Mapping[Pair, Magnitude] = {}
        if step.bounds.change_along is not None:
            own = step.bounds.change_along(costate)
        return {pair: minimum(amount, own.get(pair, amount)) for pair, amount in either.items()}

    def matrix(self) -> Magnitude:
        """Bounds of the second derivative over the domain, between variables."""
        count = len(self.tangents.first.region.variables)
        log2 = np.full((count, count), -np.inf)
        total = Magnitude(log2)
        for first in self.tangents.variables:
            for second in self.tangents.variables:
                amount = self._between(first, second) + self._mixed(first, second) + self._mixed(second, first)
                part = log2.copy()
                part[first.position, second.position] = amount.sum().log2
                total = total + Magnitude(part)
        return self.known.matrix + total

    def _between(self, first: Variable, second: Variable) -> Magnitude:
        """The change and round-off of the part in the second derivatives in injections."""
        t, k = first.layer, second.layer
        norms = self.norms[:, t, k] * self.known.error
        centre = self.known.curvature[:, t, k] + norms
        moved = first.spread * second.reach + first.size * second.spread
        return (self.change[:, t, k] + norms) * first.reach * second.reach + centre * moved

    def _mixed(self, weight: Variable, other: Variable) -> Magnitude:
        """The same for the part where a weight meets its input, which another variable moves."""
        reads = self._reads(weight)
        if reads is None:
            return Magnitude.zero((self.known.count,))
        costate, k = self.costates[weight.layer], other.layer
        size = row_norms(costate.value)
        rounded = reads.norms[:, k] * self.known.error
        moved = (reads.change[:, k] + rounded) * other.reach + reads.centre[:, k] * other.spread
        return costate.row_spread(self.known.count) * reads.domain[:, k] * other.reach + size * moved


def _outer(left: Magnitude, form: Magnitude, right: Magnitude) -> Magnitude:
    """Products for every sample and pair of layers."""
    first, second = np.asarray(left.log2)[:, :, None], np.asarray(right.log2)[:, None, :]
    return Magnitude(first) * Magnitude(np.asarray(form.log2)[:, None, None]) * Magnitude(second)
