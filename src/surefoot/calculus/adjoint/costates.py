r"""Enclosures of the costates :math:`\lambda_z = \partial F/\partial z` of a scalar output F over the domain.

The centre :math:`\hat\lambda` is that of :mod:`surefoot.calculus.adjoint.backward`. For an argument
:math:`x_i` of :math:`z = f(x_1, …)` the chain rule is :math:`\lambda_{x_i} = J_i(x)^\top\lambda_z`, summed over
the operations that read it, and

.. math:: J_i(x)^\top\lambda_z - J_i(\hat x)^\top\hat\lambda_z
    = J_i(x)^\top(\lambda_z - \hat\lambda_z) + \big(J_i(x) - J_i(\hat x)\big)^\top\hat\lambda_z .

Hence, with the mean-value inequality on the segment from :math:`\hat x` to x, which stays in the enclosures,

.. math:: s(\lambda_{x_i}) \le \sum_z \Big( J_i\,s(\lambda_z) + \sum_j C_{ij}(\hat\lambda_z)\,s(x_j)
    + \epsilon \Big), \qquad C_{ij}(\lambda) \ge \sup\Big\|\sum_k\lambda_k\,\partial_{ij}f_k\Big\|,

and the same row by row where rows do not interact. At a kink there is no derivative but several one-sided ones,
even where nothing moves: the pull-back of a scalar function covers those of the pieces on both sides, entry by
entry (:func:`surefoot.scalar.rounded_slope`), and where largest entries may be tied :math:`2J_i\|\hat\lambda_z\|`
covers all choices of one.

*Round-off* :math:`\epsilon` of computing :math:`\hat J_i^\top\hat\lambda_z`, with :math:`u = 2^{-53}` and
:math:`\gamma_n = nu/(1 - nu)`, the bound on the product of n factors :math:`1 + \delta`, :math:`|\delta| \le u`,
less one (Higham, Accuracy and Stability of Numerical Algorithms, Lemma 3.1). Operations whose derivatives are more
than numbers of their arguments state it themselves, from formulas that are evaluated in place of torch's backward
kernels (``pullback`` of the record: scalar functions, quotients, soft-max, normalisations, lengths and variances,
PReLU, max-pooling, losses). The others add up products of the costate with entries of :math:`\hat J_i`: numbers of
the other argument (bilinear operations), ones (layout, largest entries), fixed factors (pooling). With at most c
summands per entry (:func:`summands`) and 16 roundings in a product, the computed entry is off by at
most :math:`\gamma_{c+16}` times that of :math:`|\hat J_i|^\top|\hat\lambda_z|` in whatever order they are added,
and :math:`\gamma_n \le 2nu` for :math:`nu \le 1/2`. Now :math:`\||J|^\top\lambda\| \le \sqrt
r\,\|J\|_2\|\lambda\|` if a row of J has at most r entries: by Cauchy-Schwarz :math:`(|J|x)_k^2 \le
r\sum_lJ_{kl}^2x_l^2`, and :math:`\sum_kJ_{kl}^2 \le \|J\|_2^2`. Of an operation that
somebody else registered nothing can be proved here: it is *assumed*, and said
(:mod:`surefoot.operations.evaluation`), to add up such products, with entries of J off by what relative
perturbations of the :math:`\hat x_j` make, which count with the curvature; both factors get 16 more for it. A
product that underflows loses at most :math:`2^{-1022}`, and an entry c times that.

Also :math:`\|\lambda_z\| \le w_z`, the weight of the forward pass, whatever the spreads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from surefoot.calculus.adjoint.backward import Backward, Value, added, parts, zeros
from surefoot.calculus.assemble import weights
from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import Enclosure, measure, norm, row_norms
from surefoot.graph.structure import Spec
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.call import Pair, Slot
from surefoot.operations.record import Form, record_of

_UNIT = 2.0**-53
_UNDERFLOW = 2.0**-1022
_NONE = Magnitude.zero((0,))
_ZERO = Magnitude.zero()


@dataclass(frozen=True)
class Share:
    """What readers contribute to a costate: its centre, and how far the contribution may be from that."""

    value: Value
    spread: Magnitude = _ZERO
    rows: Magnitude | None = None
    error: Magnitude = _ZERO

    def __add__(self, other: Share) -> Share:
        """The sum; an addition rounds by a relative u, and a row moves no more than the whole."""
        value = added(self.value, other.value)
        roundoff = measure(value)[0] * (2 * _UNIT)
        spread = self.spread + other.spread + roundoff
        known = self.rows if self.rows is not None else other.rows
        rows = None
        if known is not None:
            rows = self.row_spread(len(known)) + other.row_spread(len(known)) + roundoff
        return Share(value, spread, rows, self.error + other.error + roundoff)

    def row_spread(self, count: int) -> Magnitude:
        """The spread of each row: its own, or that of the whole."""
        return self.rows if self.rows is not None else Magnitude(np.full(count, self.spread.log2))

    def enclosed(self, weight: Magnitude) -> Enclosure:
        """The costate that these are all contributions to, of norm at most the weight."""
        size, peak = measure(self.value)
        bound = maximum(minimum(size + self.spread, weight), size)
        spread = minimum(self.spread, weight + size)
        specs = tuple(Spec(tuple(part.shape), part.dtype) for part in parts(self.value))
        spec = specs[0] if isinstance(self.value, Tensor) else specs
        move = spread if self.rows is None else minimum(self.rows.max(), spread)
        return Enclosure(
            spec, self.value, bound, minimum(peak + move, bound), spread, self.rows, self.error, _NONE
        )


def costates(result: Pass, centre: Backward) -> dict[str, Enclosure]:
    """An enclosure of the costate of every tensor that varies and reaches the output."""
    weight = weights(result)
    shares = {result.outputs[0]: Share(centre.seed)}
    found: dict[str, Enclosure] = {}
    for step in reversed(result.steps):
        if step.node.name in shares:
            costate = shares.pop(step.node.name).enclosed(weight[step.node.name])
            found[step.node.name] = costate
            shares = joined(shares, contributions(result, step, costate, centre))
    return found | {name: share.enclosed(weight[name]) for name, share in shares.items()}


def joined(shares: Mapping[str, Share], more: Mapping[str, Share]) -> dict[str, Share]:
    """The sums of contributions, by name."""
    return {**shares, **{name: shares[name] + piece if name in shares else piece for name, piece in more.items()}}


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


def contributions(result: Pass, step: Step, costate: Enclosure, centre: Backward) -> dict[str, Share]:
    """What one operation adds to the costates of its arguments."""
    fixed = at_centre(costate)
    along = contracted(step, fixed)
    proved = centre.errors[step.node.name]
    found: dict[str, Share] = {}
    for name, value in centre.pulled[step.node.name].items():
        slots = [slot for slot, held in step.names.items() if held == name]
        if value is None:
            slope = sum((step.bounds.jacobian[slot] for slot in slots), _ZERO) * costate.bound
            found[name] = Share(zeros(result.enclosures[name].value), slope, None, slope)
            continue
        spread, error, rows, relative = _ZERO, _ZERO, None, _ZERO
        for slot in slots:
            jacobian, (moved, wrong, rounded) = step.bounds.jacobian[slot], _of_slot(result, step, slot, along)
            relative = relative + jacobian * costate.centre_norm + rounded
            aside = _aside(step, slot) * costate.centre_norm
            spread = spread + jacobian * costate.spread + moved + aside
            error = error + jacobian * costate.error + wrong + aside
        lost = costate.numel * max(1, result.enclosures[name].numel) ** 0.5 * _UNDERFLOW
        met = sum(summands(step, slot, result.enclosures[name].numel) for slot in slots)
        factor = (met + 16.0) * (float(step.bounds.reduction) ** 0.5 + 16.0) * (2 * _UNIT)
        roundoff = norm(proved[name]) if name in proved else relative * factor + lost
        spread, error = spread + roundoff, error + roundoff
        if len(slots) == 1 and slots[0] in step.row_slots and isinstance(value, Tensor):
            own = row_norms(proved[name]) if name in proved else roundoff
            rows = _rows(result, step, slots[0], costate, fixed, value.shape[0]) + own + aside
            spread = minimum(spread, rows.norm())
        found[name] = Share(value, spread, rows, error)
    return found


def summands(step: Step, slot: Slot, numel: int) -> float:
    r"""How many entries of the result one of the ``numel`` entries of an argument enters, at most.

    Where numbers are moved, the Jacobian consists of zeros and ones, so that a column with c ones has the norm
    :math:`\sqrt c \le J`. Where all entries enter equally many entries of the result, each of which adds up k
    terms, the c entries per argument are at most the k terms of all entries of the result, shared evenly.
    """
    record, most = record_of(step.node), float(step.node.numel)
    if record.form_of(step.node) is Form.LAYOUT:
        return min(most, float(step.bounds.jacobian[slot]) ** 2)
    if record.evenly:
        return min(most, most * step.bounds.reduction / max(1, numel))
    return most


def _aside(step: Step, slot: Slot) -> Magnitude:
    """How far other derivatives than the one that was pulled back may be, for costates of norm 1, where a largest
    entry may be one of several.
    """
    selects = not record_of(step.node).rounds_at(step.node)
    kink = selects and any(slot in pair and not c.is_finite for pair, c in step.bounds.curvature.items())
    return step.bounds.jacobian[slot] * 2.0 if kink else _ZERO


def _of_slot(
    result: Pass, step: Step, slot: Slot, along: Mapping[Pair, Magnitude]
) -> tuple[Magnitude, Magnitude, Magnitude]:
    """How far the Jacobian in a slot, transposed, times the centre costate moves over the domain, how far it is
    off at the centre, and what its round-off is relative to.
    """
    moved, wrong, size = _ZERO, _ZERO, _ZERO
    for pair, other in step.partners(slot):
        e = step.argument(other, result.enclosures)
        moved, wrong = moved + along[pair] * e.spread, wrong + along[pair] * e.error
        size = size + along[pair] * (e.centre_norm if other in step.names else _ZERO)
    return moved, wrong, size


def _rows(result: Pass, step: Step, slot: Slot, costate: Enclosure, fixed: Enclosure, count: int) -> Magnitude:
    """The spreads of the rows of what goes to one slot; each row of the result reads one row of it."""
    forms = row_forms(step, fixed, count)
    total = costate.row_spread(count) * step.bounds.jacobian[slot]
    for pair, other in step.partners(slot):
        total = total + forms[pair] * step.row_moves(other, result.enclosures, count)
    return total


def row_sizes(costate: Enclosure, count: int) -> Magnitude:
    """The norm of each row of a costate at the centre; that of the whole where it has no such rows."""
    rowed = isinstance(costate.value, Tensor) and costate.value.shape[:1] == (count,)
    return row_norms(costate.value) if rowed else Magnitude(np.full(count, costate.centre_norm.log2))


def row_forms(step: Step, fixed: Enclosure, count: int) -> dict[Pair, Magnitude]:
    """The curvatures of an operation contracted with a costate that does not move, row by row."""
    own: Mapping[Pair, Magnitude] = {} if step.bounds.rows_along is None else step.bounds.rows_along(fixed)
    sizes = row_sizes(fixed, count)
    norms = {pair: sizes * amount for pair, amount in step.bounds.curvature.items()}
    return {pair: minimum(amount, own.get(pair, amount)) for pair, amount in norms.items()}
