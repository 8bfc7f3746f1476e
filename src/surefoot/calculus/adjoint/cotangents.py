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

*Round-off.* What automatic differentiation computes at the centre is a sum over paths of products of local
derivatives: Jacobians on the way up from either layer and on the way down from the loss, so each operation occurs
at most twice, and one second derivative. Let :math:`\delta_z = 2(k + 16)^2u \ge \gamma_{(k+16)^2}`, k the number
of terms that the operation z adds up. A local derivative with norm J is computed as a matrix that is off by at
most :math:`\delta_z(J + b_z)`, the additions of the products included (as in :mod:`surefoot.calculus.forward`,
:math:`\||A||x|\| \le k\|A\|\|x\|`). The slack :math:`b_z` stands for what cancels: that of scalar functions,
losses, normalisations, soft-max and lengths is the proved error of their derivatives over the smallest
:math:`\delta` (:mod:`surefoot.calculus.adjoint.samples`), and that of layout, linear and bilinear operations, of
quotients and of largest entries is zero; there are no other operations. With :math:`y_z = J_z + b_z`, expanding
the product,

.. math:: \Big\|\prod\tilde J_z - \prod J_z\Big\| \le \prod(J_z + \delta_zy_z) - \prod J_z
    = \sum_{S\ne\emptyset}\prod_{z\in S}\delta_zy_z\prod_{z\notin S}J_z
    \le \Big(\prod(1 + \delta_z) - 1\Big)\prod y_z ,

and :math:`\prod(1 + \delta_z)^2 - 1 \le e^s - 1 \le 2s` for :math:`s = 2\sum\delta_z \le 1`. So the round-off is a
part :math:`4\sum_z\delta_z` of the products of the :math:`y_z` along all paths (``sizes``), and sums over n
samples add :math:`\gamma_n`. The costate starts with the gradient of the loss in its outputs, whose size is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from surefoot.calculus.adjoint.backward import Backward
from surefoot.calculus.adjoint.centre import Centre
from surefoot.calculus.adjoint.costates import Share, at_centre, contributions, joined, row_forms, row_sizes
from surefoot.calculus.adjoint.tangents import (
    Entrywise,
    Rows,
    Tangents,
    Variable,
    in_variables,
    moved_at_most,
    placed,
    weight_spread,
)
from surefoot.calculus.assemble import weights
from surefoot.calculus.forward import Step
from surefoot.enclosure import Enclosure, row_norms
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.operations.call import Pair


@dataclass(frozen=True)
class Cotangents:
    """The backward pass, sample by sample."""

    costates: Mapping[str, Enclosure]  # of every tensor that varies and reaches the output
    change: Magnitude  # of the second derivatives in injections, samples × layers × layers
    norms: Magnitude  # the same derivatives by products of norms with slack, which round-off is relative to
    # bounds of how far the second derivative may be from that at the centre, between variables
    variation: Magnitude
    matrix: Magnitude  # bounds of the second derivative over the domain, between variables


def cotangents(forward: Tangents, centre: Centre, at: Backward) -> Cotangents:
    """Sharpen the costates at the centre on the way back, and collect how far second derivatives move."""
    result, count, layers = forward.result, forward.count, {s.name: k for k, s in enumerate(forward.sources)}
    readers = Counter(name for step in result.steps for name in step.names.values())
    alone = {s.reads: k for k, s in enumerate(forward.sources) if s.reads and readers[s.reads] == 1}
    weight, shares = weights(result), {result.outputs[0]: Share(at.seed)}
    change = norms = Magnitude.zero((count, len(layers), len(layers)))
    found: dict[str, Enclosure] = {}
    of_layer: dict[int, Enclosure] = {}
    slopes: dict[int, Magnitude] = {}
    bases = {result.outputs[0]: Magnitude.of(np.ones(count))}
    for step in reversed(result.steps):
        name = step.node.name
        if name not in shares:
            continue
        costate = shares.pop(name).enclosed(weight[name])
        if name in layers:
            k = layers[name]
            curvature = centre.curvature[:, k, :] + norms[:, k, :] * centre.error + change[:, k, :]
            slopes[k] = in_variables(curvature, forward.variables, result.region)
            slopes[k] = slopes[k] + _through_weights(forward, of_layer, k)
            costate = of_layer[k] = moved_at_most(costate, forward.ways.move(name, "costates", slopes[k]))
        elif name in alone:
            k = alone[name]
            entries = forward.ways.move(
                name, "entries of costates", _entry_slopes(forward, k, slopes[k], of_layer[k])
            )
            costate = Entrywise.of(costate, entries + costate.error)
        found[name] = costate
        moved, rough = _second_order(forward, step, costate, bases[name])
        _carry_back(bases, forward, step, at)
        change, norms = change + moved, norms + rough
        shares = joined(shares, contributions(result, step, costate, at))
    found |= {name: share.enclosed(weight[name]) for name, share in shares.items()}
    variation = _variation(forward, centre, of_layer, change, norms)
    return Cotangents(found, change, norms, variation, centre.matrix + variation)


def _through_weights(forward: Tangents, of_layer: Mapping[int, Enclosure], layer: int) -> Magnitude:
    """How the costate of a layer depends on later weights, through which it comes: samples × variables."""
    shape = forward.count, len(forward.result.region.variables)
    met = ((v, _input(forward, v)) for v in forward.variables if v.layer in of_layer)
    return placed(
        shape,
        (
            ((slice(None), v.position), rows.domain[:, layer] * _sizes(of_layer[v.layer], forward.count))
            for v, rows in met
            if rows is not None
        ),
    )


def _sizes(costate: Enclosure, count: int) -> Magnitude:
    """The norm of each row over the domain."""
    return row_sizes(costate, count) + costate.row_spread(count)


def _input(forward: Tangents, variable: Variable) -> Rows | None:
    """The derivatives of the input that a weight multiplies, if that varies."""
    name = forward.sources[variable.layer].reads
    return forward.rows[name] if variable.multiplies and name is not None else None


def _entry_slopes(forward: Tangents, layer: int, slopes: Magnitude, costate: Enclosure) -> Magnitude:
    r"""Slopes of any entry of the costate of what one linear layer alone reads.

    An entry is the product of a column of the weight and the costate of the layer, so it depends on the variables
    as the latter does, times the norm of the column, and on that weight itself.
    """
    source = forward.sources[layer]
    slopes = slopes * (row_norms(source.matrix.mT).max() + weight_spread(source, forward.result.enclosures))
    if source.weight is None:
        return slopes
    return slopes + placed(slopes.shape, [((slice(None), source.weight), _sizes(costate, forward.count))])


def _carry_back(bases: dict[str, Magnitude], forward: Tangents, step: Step, at: Backward) -> None:
    """Add what the round-off of costates is relative to, row by row: that of the outputs is their proved gradient,
    and further down the norms with slack count.
    """
    jacobian, slack = step.bounds.jacobian, forward.slack[step.node.name][0]
    for slot in step.row_slots & step.names.keys():
        name = step.names[slot]
        share = bases[step.node.name] * (jacobian[slot] + slack)
        error, pulled = at.errors[step.node.name].get(name), at.pulled[step.node.name][name]
        if isinstance(pulled, Tensor) and error is not None and step.node.name == forward.result.outputs[0]:
            share = row_norms(pulled) + row_norms(error)
        bases[name] = bases[name] + share if name in bases else share


def _second_order(
    forward: Tangents, step: Step, costate: Enclosure, base: Magnitude
) -> tuple[Magnitude, Magnitude]:
    """What an operation adds to how far second derivatives move, and to them by products of norms."""
    count, layers = forward.count, len(forward.sources)
    moved = rough = Magnitude.zero((count, layers, layers))
    pairs = [pair for pair in step.bounds.curvature if set(pair) <= step.row_slots & step.names.keys()]
    if not pairs:
        return moved, rough
    fixed = at_centre(costate)
    forms = row_forms(step, fixed, count)
    moves = _moves(step, costate, forms, count)
    for pair in pairs:
        form, size = forms[pair], base * (step.bounds.curvature[pair] + forward.slack[step.node.name][1])
        for first, second in {pair, pair[::-1]}:
            left, right = (forward.rows[step.names[slot]] for slot in (first, second))
            moved = moved + _outer(left.domain, moves[pair], right.domain)
            moved = moved + _outer(left.change, form, right.domain) + _outer(left.centre, form, right.change)
            rough = rough + _outer(left.sizes, size, right.sizes)
    return moved, rough


def _moves(step: Step, costate: Enclosure, forms: Mapping[Pair, Magnitude], count: int) -> dict[Pair, Magnitude]:
    """How far contracted second derivatives move; where the rule does not say, at most as both together."""
    sizes = _sizes(costate, count)
    either = {pair: sizes * amount + forms[pair] for pair, amount in step.bounds.curvature.items()}
    own = {} if step.bounds.change_along is None else step.bounds.change_along(costate)
    return {pair: minimum(amount, own.get(pair, amount)) for pair, amount in either.items()}


def _variation(
    forward: Tangents, centre: Centre, of_layer: Mapping[int, Enclosure], change: Magnitude, norms: Magnitude
) -> Magnitude:
    """How far the second derivative moves, round-off at the centre included."""
    variables, count = forward.variables, len(forward.result.region.variables)
    if not variables:
        return Magnitude.zero((count, count))
    layer = np.array([v.layer for v in variables], dtype=np.intp)
    spread, far = (Magnitude(stack([getattr(v, name) for v in variables]).log2.T) for name in ("spread", "reach"))

    def between(v: Variable) -> Magnitude:
        """The part in the second derivatives in injections, with all others: samples × variables."""
        rounded = norms[:, v.layer, layer] * centre.error
        at = centre.curvature[:, v.layer, layer] + rounded
        moved = v.spread[:, None] * far + v.size[:, None] * spread
        return (change[:, v.layer, layer] + rounded) * v.reach[:, None] * far + at * moved

    def mixed(weight: Variable) -> Magnitude:
        """The part where a weight meets its input, which others move: samples × variables."""
        rows = _input(forward, weight)
        if rows is None:
            return Magnitude.zero((forward.count, len(variables)))
        costate = of_layer[weight.layer]
        rounded = rows.sizes[:, layer] * centre.error
        moved = (rows.change[:, layer] + rounded) * far + rows.centre[:, layer] * spread
        along = costate.row_spread(forward.count)[:, None] * rows.domain[:, layer] * far
        return along + row_sizes(costate, forward.count)[:, None] * moved

    met = stack([mixed(v).sum(axis=0) for v in variables])
    amounts = stack([between(v).sum(axis=0) for v in variables]) + met + Magnitude(met.log2.T)
    rows = placed((count, len(variables)), ((v.position, amounts[k]) for k, v in enumerate(variables)))
    return placed((count, count), (((slice(None), v.position), rows[:, k]) for k, v in enumerate(variables)))


def _outer(left: Magnitude, form: Magnitude, right: Magnitude) -> Magnitude:
    """Products for every sample and pair of layers."""
    return left[:, :, None] * form[:, None, None] * right[:, None, :]
