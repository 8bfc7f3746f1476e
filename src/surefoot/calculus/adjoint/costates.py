r"""Enclosures of the costates :math:`\lambda_z = \partial F/\partial z` of a scalar output F over the domain.

The centre :math:`\hat\lambda` comes from one backward pass in double precision, starting from
:math:`\hat\lambda_F = 1`. For an argument :math:`x_i` of :math:`z = f(x_1, …)` the chain rule is
:math:`\lambda_{x_i} = J_i(x)^\top\lambda_z`, summed over the operations that read it, and

.. math:: J_i(x)^\top\lambda_z - J_i(\hat x)^\top\hat\lambda_z
    = J_i(x)^\top(\lambda_z - \hat\lambda_z) + \big(J_i(x) - J_i(\hat x)\big)^\top\hat\lambda_z .

Hence, with the mean-value inequality on the segment from :math:`\hat x` to x, which stays in the enclosures,

.. math:: s(\lambda_{x_i}) \le \sum_z \Big( J_i\,s(\lambda_z) + \sum_j C_{ij}(\hat\lambda_z)\,s(x_j)
    + \epsilon \Big), \qquad C_{ij}(\lambda) \ge \sup\Big\|\sum_k\lambda_k\,\partial_{ij}f_k\Big\|,

and the same row by row where rows do not interact. The round-off :math:`\epsilon` of computing :math:`\hat
J_i^\top \hat\lambda_z`: with at most c summands per entry, c the number of entries of z, it is at most a relative
:math:`(c + 16)u` of :math:`|\hat J_i|^\top|\hat\lambda_z|`, and :math:`\||J|\|_2 \le \sqrt r\,\|J\|_2` if a row
of J has at most r entries (Cauchy-Schwarz in every column and row); relative perturbations of the :math:`\hat
x_j` inside the kernel count with the curvature. Both factors get 16 more for elementary functions, as in
:mod:`surefoot.calculus.forward`.

Also :math:`\|\lambda_z\| \le w_z`, the weight of the forward pass, whatever the spreads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.vjp import Value, added, parts, pull_back, zeros
from surefoot.calculus.assemble import weights
from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import Enclosure, measure, row_norms
from surefoot.graph.structure import Spec
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.call import Pair, Slot

_UNIT = 2.0**-53
_NONE = Magnitude.zero((0,))
_ZERO = Magnitude.zero()


class Follower(Protocol):
    """Follows the backward pass, knowing more about the costates than norms say."""

    def sharpened(self, name: str, costate: Enclosure) -> Enclosure:
        """An enclosure of the same costate."""
        ...

    def pass_on(self, step: Step, costate: Enclosure, fixed: Enclosure) -> None:
        """Called with the costate of every result, over the domain and at the centre."""
        ...


@dataclass(frozen=True)
class Share:
    """What one reader contributes to a costate: its centre, and how far the contribution may be from that."""

    value: Value
    spread: Magnitude
    rows: Magnitude | None
    error: Magnitude

    def __add__(self, other: Share) -> Share:
        """The sum; an addition rounds by a relative u, and a row moves no more than the whole."""
        value = added(self.value, other.value)
        roundoff = measure(value)[0] * (2 * _UNIT)
        spread = self.spread + other.spread + roundoff
        rows = None
        if self.rows is not None or other.rows is not None:
            known = self.rows if self.rows is not None else other.rows
            assert known is not None
            count = len(known)
            rows = self.row_spread(count) + other.row_spread(count) + roundoff
        return Share(value, spread, rows, self.error + other.error + roundoff)

    def row_spread(self, count: int) -> Magnitude:
        """The spread of each row: its own, or that of the whole."""
        return self.rows if self.rows is not None else Magnitude(np.full(count, self.spread.log2))


def costates(result: Pass, follower: Follower | None = None) -> dict[str, Enclosure] | None:
    """An enclosure of the costate of every tensor that varies and reaches the output.

    ``None`` if the output is not one number, or a centre is not known or not finite.

    Args:
        result: the forward pass, with centre values.
        follower: sharpens costates on the way.
    """
    if result.graph is None or len(result.outputs) != 1 or result.enclosures[result.outputs[0]].numel != 1:
        return None
    values = {name: e.value for name, e in result.enclosures.items()}
    needed = {name for step in result.steps for name in step.node.inputs} | set(result.outputs)
    if any(values[name] is None for name in needed):
        return None
    weight = weights(result)
    output = result.outputs[0]
    shares: dict[str, Share] = {output: Share(torch.ones_like(values[output]), _ZERO, None, _ZERO)}
    found: dict[str, Enclosure] = {}
    for step in reversed(result.steps):
        share = shares.pop(step.node.name, None)
        if share is None:
            continue
        costate = _enclosed(share, weight[step.node.name])
        if follower is not None:
            costate = follower.sharpened(step.node.name, costate)
            follower.pass_on(step, costate, at_centre(costate))
        found[step.node.name] = costate
        for name, piece in _contributions(result, step, costate, values).items():
            shares[name] = shares[name] + piece if name in shares else piece
    for name, share in shares.items():
        found[name] = _enclosed(share, weight[name])
    return found if all(e.centre_norm.is_finite for e in found.values()) else None


def contracted(step: Step, costate: Enclosure) -> dict[Pair, Magnitude]:
    """The curvatures of an operation along a costate: the rule's own, or the norm of the costate times them."""
    norms = {pair: costate.bound * amount for pair, amount in step.bounds.curvature.items()}
    if step.bounds.curvature_along is None or not isinstance(costate.value, Tensor):
        return norms
    sharp = step.bounds.curvature_along(costate)
    return {pair: minimum(amount, sharp.get(pair, amount)) for pair, amount in norms.items()}


def at_centre(costate: Enclosure) -> Enclosure:
    """The costate at the centre as computed, as if it did not move."""
    size = costate.centre_norm
    return replace(costate, bound=size, peak=minimum(size, measure(costate.value)[1]), spread=_ZERO, rows=None)


def _enclosed(share: Share, weight: Magnitude) -> Enclosure:
    size, peak = measure(share.value)
    bound = maximum(minimum(size + share.spread, weight), size)
    spread = minimum(share.spread, weight + size)
    specs = tuple(Spec(tuple(part.shape), part.dtype) for part in parts(share.value))
    spec = specs[0] if isinstance(share.value, Tensor) else specs
    rows = share.rows
    move = spread if rows is None else minimum(rows.max(), spread)
    return Enclosure(spec, share.value, bound, minimum(peak + move, bound), spread, rows, share.error, _NONE)


def _contributions(result: Pass, step: Step, costate: Enclosure, values: Mapping[str, Any]) -> dict[str, Share]:
    """What one operation adds to the costates of its arguments."""
    pulled = pull_back(step, values, costate.value)
    fixed = at_centre(costate)
    along = contracted(step, fixed)
    factor = (costate.numel + 16.0) * (float(step.bounds.reduction) ** 0.5 + 16.0) * _UNIT
    found: dict[str, Share] = {}
    for name in pulled:
        slots = [slot for slot, held in step.names.items() if held == name]
        value = pulled[name]
        if value is None:
            slope = sum((step.bounds.jacobian[slot] for slot in slots), _ZERO)
            found[name] = Share(zeros(values[name]), slope * costate.bound, None, slope * costate.bound)
            continue
        spread, error, rows = _ZERO, _ZERO, None
        for slot in slots:
            jacobian, (moved, wrong, rounded) = step.bounds.jacobian[slot], _of_slot(result, step, slot, along)
            roundoff = (jacobian * costate.centre_norm + rounded) * factor
            spread = spread + jacobian * costate.spread + moved + roundoff
            error = error + jacobian * costate.error + wrong + roundoff
        if len(slots) == 1 and slots[0] in step.row_slots and isinstance(value, Tensor):
            rows = _rows(result, step, slots[0], costate, fixed, value.shape[0]) + roundoff
            spread = minimum(spread, rows.norm())
        found[name] = Share(value, spread, rows, error)
    return found


def _of_slot(
    result: Pass, step: Step, slot: Slot, along: Mapping[Pair, Magnitude]
) -> tuple[Magnitude, Magnitude, Magnitude]:
    """How far the Jacobian in a slot, transposed, times the centre costate moves over the domain, how far it is
    off at the centre, and what its round-off is relative to.
    """
    moved, wrong, size = _ZERO, _ZERO, _ZERO
    for other, amount in _partners(along, slot):
        if other in step.names:
            e = result.enclosures[step.names[other]]
            moved, wrong = moved + amount * e.spread, wrong + amount * e.error
            size = size + amount * e.centre_norm
    return moved, wrong, size


def _partners(along: Mapping[Pair, Magnitude], slot: Slot) -> list[tuple[Slot, Magnitude]]:
    """The slots that a slot has curvature with."""
    found = [(pair[1], amount) for pair, amount in along.items() if pair[0] == slot]
    return found + [(pair[0], amount) for pair, amount in along.items() if pair[1] == slot != pair[0]]


def _rows(result: Pass, step: Step, slot: Slot, costate: Enclosure, fixed: Enclosure, count: int) -> Magnitude:
    """The spreads of the rows of what goes to one slot; each row of the result reads one row of it."""
    own: Mapping[Pair, Magnitude] = {} if step.bounds.rows_along is None else step.bounds.rows_along(fixed)
    sized = isinstance(costate.value, Tensor) and costate.value.shape[:1] == (count,)
    sizes = row_norms(costate.value) if sized else Magnitude(np.full(count, fixed.bound.log2))
    total = costate.row_spread(count) * step.bounds.jacobian[slot]
    for pair, amount in step.bounds.curvature.items():
        for first, second in {pair, pair[::-1]}:
            if first != slot or second not in step.names:
                continue
            e = result.enclosures[step.names[second]]
            move = e.row_spread(count) if second in step.row_slots else e.spread
            total = total + minimum(own.get(pair, sizes * amount), sizes * amount) * move
    return total
