r"""How far the second derivative moves on a ball around the weights, from exact derivatives at its centre.

Let :math:`X_z = Dz` and :math:`\Lambda_z = D\lambda_z` be the derivatives of a tensor and of its costate in all
variables together; their norms at the centre are known (:mod:`surefoot.calculus.adjoint.dense`). For :math:`z =
f(x_1, …)` the chain rule and its transpose say, with :math:`\Phi_{ij} = \lambda_z\cdot\partial_{ij}f`,

.. math:: X_z = \sum_iJ_iX_{x_i}, \qquad
    \Lambda_{x_i} = \sum_z\Big(J_i^\top\Lambda_z + \sum_j\Phi_{ij}X_{x_j}\Big), \qquad
    \nabla^2F = \sum_z\sum_{ij}X_{x_i}^\top\Phi_{ij}X_{x_j} .

*Changes.* Each of these moves by at most what its factors move by, each times the norms of the others: with
:math:`a = \sup\|X\|`, :math:`b = \sup\|\Lambda\|` over the ball and :math:`s` the spread of a tensor,

.. math:: \Delta X_z \le \sum_i J_i\,\Delta X_{x_i} + \Big(\sum_jC_{ij}s_{x_j}\Big)a_{x_i}, \qquad
    a_z \le \min\Big(\sum_iJ_ia_{x_i},\ \|\hat X_z\| + \Delta X_z\Big), \qquad s_z \le r\,a_z + e_z,

and in the same way backwards. These are sums over earlier (later) tensors only, so one pass is enough.

*Shells.* With a ball of radius :math:`r' < r` inside, for which all this was done before, the way from the centre
to a point of the larger ball goes straight through the smaller one and then through a shell of thickness
:math:`r - r'`. So :math:`s_z(r) \le s_z(r') + (r - r')\,a_z(r)`, and in the same way for costates, single
entries, and how far Jacobians turn, :math:`C_{ij}(r - r')\,a_{x_j}` more in each shell: integrals of what grows
with the radius, in place of the radius times its end value. On the way through the shell X moves along a path of
length at most :math:`(r - r')\sup\|D^2z\|`, for which the recursion is :math:`\delta_z \le \sum_iJ_i\delta_{x_i} +
\sum_jC_{ij}(r - r')a_{x_j}a_{x_i}` (``stride``), and their sum is that of the whole way (``path``).

*The second derivative* moves along a unit vector h with the speed

.. math:: D^3F[v, w, h] = \sum_z \lambda_z\cdot f'''[X_xv, X_xw, X_xh] + \Lambda_zh\cdot f''[X_xv, X_xw]
    + \Lambda_zv\cdot f''[X_xw, X_xh] + \Lambda_zw\cdot f''[X_xv, X_xh] .

*Proof.* Differentiate :math:`\sum_z\lambda_z\cdot f''[X_xv, X_xw]`. The derivatives of the first two factors are
the first two summands. Those of the others contain :math:`D^2x[v, h] = \sum_y (\partial x/\partial y)\,
f_y''[Xv, Xh]`, y running over all operations before, and :math:`\sum_z\lambda_z\cdot f''_z[\partial x/\partial
y\,\cdot, X_xw] = \Lambda_yw`, being the derivative of :math:`\lambda_y` along w. The first summand, integrated
from the centre by parts, is :math:`\lambda_z\cdot(f'' - \hat f'')[X, X]` at the end less the integrals of the
same form with a factor :math:`\dot\lambda` or :math:`\dot X` in place of :math:`\lambda` or X; with the second
summand the former make :math:`\Lambda_zh\cdot\hat f''`. So with :math:`\tau \ge \sup\|\lambda_z\cdot(f'' - \hat
f'')\|` and p the length of the path of X

.. math:: \|\nabla^2F(u) - \nabla^2F(u_0)\| \le \sum_z \tau\,a(a + 2p) + \sum_{\text{shells}}3(r - r')\,b\,C\,a^2 ,

where each sum is over the samples if they are separate; a sum of products of three or two factors over samples
is at most the largest of one factor times the norms of the others, if each sample has factors of its own: a weight
is the same for all, and its norm over the samples is not 1. Weights that are variables have X = 1 on their
part of the variables, so that sums over layers of what they do are norms, not sums.

Both this and the sum of changes of products bound the variation; the smaller counts. The first starts from the
exact second derivative at the weights, the second from what local derivatives at the *computed* centre make, and
the second with r = 0 says how far these are apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.backward import Backward
from surefoot.calculus.adjoint.costates import Share, at_centre, contracted, contributions, joined, row_forms
from surefoot.calculus.adjoint.dense import Dense
from surefoot.calculus.adjoint.gathered import Sizes
from surefoot.calculus.adjoint.parts import NOTHING, Bilinear, Moving, Part
from surefoot.calculus.adjoint.tangents import Entrywise
from surefoot.calculus.assemble import weights
from surefoot.calculus.forward import Pass, Step, enclose
from surefoot.enclosure import Enclosure, Spec, measure, row_norms
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.operations.call import Pair, Slot
from surefoot.operations.record import Form, record_of

_ZERO = Magnitude.zero()


class Around:
    """The passes over one ball of all variables, with what is known of a smaller one inside."""

    def __init__(self, result: Pass, dense: Dense, at: Backward, inside: Around | None = None) -> None:
        ((_, radius),) = result.region.groups
        self.radius, self.dense, self.at = radius, dense, at
        thickness = radius if inside is None else (radius - inside.radius) * (1 + 2.0**-50)
        self.inside, self.gap = inside, Magnitude.of(thickness)
        self.first, self.count = result, dense.count
        self.variables = set(result.region.variables)
        self.tensors: dict[str, Moving] = {}
        self.spreads: dict[str, Part] = {}
        self.reaches: dict[tuple[str, str], Part] = {}
        self.strides: dict[str, Part] = {}
        self.entries: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self.turns: dict[tuple[str, Slot], Part] = {}
        self.result = self._forward()
        self.costates: dict[str, Enclosure] = {}
        self.by_changes, self.by_speed, self.drift = self._backward()
        self.inside = None

    @property
    def moved(self) -> Magnitude:
        """How far the second derivative may be from that of local derivatives at the computed centre."""
        return minimum(self.by_changes, self.by_speed + self.dense.offset)

    # which entries belong together

    def _lined(self, name: str) -> bool:
        """Whether samples are the rows of a tensor."""
        spec = self.first.enclosures[name].spec
        if not isinstance(spec, Spec) or spec.shape[:1] != (self.count,):
            return False
        labels = self.dense.labels.get(name)
        if labels is None:
            return True
        line = torch.arange(self.count, device=labels.device)
        return bool((labels.reshape(self.count, -1) == line[:, None]).all())

    def _separate(self, step: Step) -> bool:
        """Whether each sample of a result depends on variables and on the same sample of other tensors only, and
        samples of all are known by the same marks.
        """
        others = {slot: name for slot, name in step.names.items() if name not in self.variables}
        name = step.node.name
        if name == self.first.outputs[0]:
            return others.keys() <= step.row_slots and all(self._lined(other) for other in others.values())
        if name in self.dense.labels and all(other in self.dense.labels for other in others.values()):
            return True
        return others.keys() <= step.row_slots and all(self._lined(n) for n in (name, *others.values()))

    def _by_sample(self, step: Step, rows: Magnitude) -> Magnitude:
        """What a rule says of rows, said of samples."""
        name = step.node.name
        if name == self.first.outputs[0]:
            name = next(iter(step.names.values()))
        if rows.shape == (self.count,) and self._lined(name):
            return rows
        return Magnitude(np.full(self.count, rows.max().log2 if rows.shape else rows.log2))

    # forwards

    def _forward(self) -> Pass:
        first, graph, region = self.first, self.first.graph, self.first.region
        assert graph is not None
        enclosures = {name: e for name, e in first.enclosures.items() if name in graph.leaves or e.is_constant}
        one = Part(Magnitude.of(1.0))
        for name in region.variables:
            self.tensors[name] = Moving(one, NOTHING, one)
            self.spreads[name] = Part(enclosures[name].spread)
            self.strides[name] = one.times(self.gap)
        steps: list[Step] = []
        for node in (step.node for step in first.steps):
            step, enclosed = enclose(graph, node, first.enclosures[node.name].value, enclosures, region)
            steps.append(step)
            self.tensors[node.name] = moving = self._carried(step, enclosures)
            self.strides[node.name] = moving.domain.times(self.gap)
            held = self.dense.first.get(node.name)
            enclosures[node.name] = self._moved((node.name, "tensor"), enclosed, moving, held)
            self.spreads[node.name] = self._spread((node.name, "tensor"), enclosures[node.name], moving)
        return replace(first, enclosures=enclosures, steps=tuple(steps))

    def _carried(self, step: Step, enclosures: Mapping[str, Enclosure]) -> Moving:
        separate = self._separate(step)
        centre = change = domain = stride = NOTHING
        inside = None if self.inside is None else self.inside.tensors[step.node.name]
        for slot, name in step.names.items():
            slope, x = step.bounds.jacobian[slot], self.tensors[name]
            turned, turning = self._turned(step, slot, enclosures, separate)
            carried = [self._through(slope, part, separate) for part in (x.centre, x.change, x.domain, x.stride)]
            centre, domain = centre + carried[0], domain + carried[2]
            change = change + carried[1] + self._times(turned, x.domain, separate)
            stride = stride + carried[3] + self._times(turning, x.domain, separate)
        path = stride if inside is None else inside.path + stride
        change = change if inside is None else change.least(inside.change + stride)
        held = self.dense.first.get(step.node.name)
        if held is not None:
            centre = centre.least(Part(held.whole, held.samples))
        return Moving(centre, change, domain.least(centre + change), stride, path)

    def _through(self, slope: Magnitude, part: Part, separate: bool) -> Part:
        return Part(part.whole * slope, part.samples * slope if separate and part.samples is not None else None)

    def _times(self, turned: Part, part: Part, separate: bool) -> Part:
        """A product of a matrix, block by block if samples are separate, and another."""
        whole = turned.whole * part.whole
        if not separate or turned.samples is None:
            return Part(whole)
        samples = turned.samples * part.each(self.count)
        return Part(minimum(whole, samples.norm()), samples)

    def _turned(
        self, step: Step, slot: Slot, enclosures: Mapping[str, Enclosure], separate: bool
    ) -> tuple[Part, Part]:
        """How far the Jacobian in a slot moves over the ball, and on a way through the outer shell."""
        total = turning = NOTHING
        for pair, other in step.partners(slot):
            argument, name = step.argument(other, enclosures), step.names.get(other)
            spread = self._spread_of(step, other, enclosures)
            total = total + self._bent(step, pair, spread, argument, argument.entry_radius(), separate)
            if name is not None:
                radii = self.entries.get((name, "tensor"), (None, None))[1]
                turning = turning + self._bent(step, pair, self.strides[name], argument, radii, separate)
        key = step.node.name, slot
        if self.inside is not None:
            total = total.least(self.inside.turns[key] + turning)
        self.turns[key] = total
        return total, turning

    def _bent(
        self, step: Step, pair: Pair, move: Part, argument: Enclosure, radii: Tensor | None, separate: bool
    ) -> Part:
        """The second derivative in a pair of slots along a move of one argument, its entries within radii."""
        part = Part(move.whole * step.bounds.curvature[pair])
        if not separate:
            return part
        samples = move.each(self.count) * step.bounds.curvature[pair]
        samples = minimum(samples, *self._in_box(step, pair, argument, radii))
        return Part(minimum(part.whole, samples.max() if pair[0] == pair[1] else samples.norm()), samples)

    def _spread_of(self, step: Step, slot: Slot, enclosures: Mapping[str, Enclosure]) -> Part:
        name = step.names.get(slot)
        return self.spreads[name] if name is not None else Part(step.argument(slot, enclosures).spread)

    def _spread(self, key: tuple[str, str], e: Enclosure, moving: Moving) -> Part:
        """How far a tensor or costate may be from its centre: what each shell adds, and the error there."""
        if key not in self.reaches:
            known = None if self.inside is None else self.inside.reaches.get(key)
            reach = moving.domain.times(self.radius if known is None else self.gap)
            self.reaches[key] = reach if known is None else known + reach
        reach = self.reaches[key]
        off = Part(e.error, None if reach.samples is None else Magnitude(np.full(self.count, e.error.log2)))
        return (reach + off).least(Part(e.spread))

    def _moved(self, key: tuple[str, str], e: Enclosure, moving: Moving, held: Sizes | None) -> Enclosure:
        """An enclosure made sharper by what is known of its derivatives."""
        if not isinstance(e.value, Tensor):
            return e
        name, reach = key[0], self._spread(key, e, moving)
        size, peak = measure(e.value)
        rows = e.rows
        if reach.samples is not None and self._lined(name):
            rows = minimum(reach.samples, e.row_spread(self.count))
        spread = minimum(e.spread, reach.whole)
        e = replace(
            e, rows=rows, spread=spread, bound=maximum(size, minimum(e.bound, size + spread)),
            peak=maximum(peak, minimum(e.peak, peak + spread)),
        )  # fmt: skip
        if held is None or held.entries is None or not e.value.dim():
            return e
        steep, gap = self._entries(name, held.entries, moving.change), float(self.gap) * (1 + 2.0**-40)
        # on a shell without thickness nothing moves, however steep it is
        stride = (steep * gap).nan_to_num(nan=torch.inf, posinf=torch.inf) if gap else torch.zeros_like(steep)
        whole = stride if self.inside is None else self.inside.entries[key][0] + stride
        self.entries[key] = whole, stride
        limit = e.entry_radius()
        assert limit is not None
        return Entrywise.of(e, torch.minimum((whole + float(e.error)) * (1 + 2.0**-40), limit.expand(whole.shape)))

    def _entries(self, name: str, entries: Tensor, change: Part) -> Tensor:
        """Norms of rows over the ball."""
        if change.samples is None:
            return entries + change.whole.tensor(entries)
        amounts = change.samples.tensor(entries)
        labels = self.dense.labels.get(name)
        if labels is not None:
            return entries + amounts[labels.long()]
        return (
            entries + amounts.reshape(-1, *[1] * (entries.dim() - 1))
            if self._lined(name)
            else entries + amounts.max()
        )

    # backwards

    def _backward(self) -> tuple[Magnitude, Magnitude, Magnitude]:
        result, output = self.result, self.result.outputs[0]
        weight = weights(result)
        shares = {output: Share(self.at.seed)}
        moved = {output: Moving(NOTHING, NOTHING, NOTHING)}
        changes, bends, strides = Bilinear(), Bilinear(), Bilinear()
        for step in reversed(result.steps):
            name = step.node.name
            if name not in shares:
                continue
            costate, slopes = shares.pop(name).enclosed(weight[name]), moved[name]
            held = self.dense.second.get(name)
            if held is not None:
                centre = slopes.centre.least(Part(held.whole, held.samples))
                slopes = Moving(centre, slopes.change, slopes.domain.least(centre + slopes.change))
            if name != output:
                costate = self._moved((name, "costate"), costate, slopes, held)
            self.costates[name] = costate
            self._pull(step, costate, slopes, moved, (changes, bends, strides))
            shares = joined(shares, contributions(result, step, costate, self.at))
        drift = strides.norm if self.inside is None else self.inside.drift + strides.norm
        return changes.norm, bends.norm + drift, drift

    def _pull(
        self,
        step: Step,
        costate: Enclosure,
        slopes: Moving,
        moved: dict[str, Moving],
        sums: tuple[Bilinear, Bilinear, Bilinear],
    ) -> None:
        separate, bounds = self._separate(step), step.bounds
        forms, shifts, bends = self._forms(step, costate, slopes, separate)
        for slot, name in step.names.items():
            if name in self.variables:
                continue
            slope = bounds.jacobian[slot]
            centre, change, domain = (
                self._through(slope, part, separate) for part in (slopes.centre, slopes.change, slopes.domain)
            )
            change = change + self._times(self.turns[step.node.name, slot], slopes.domain, separate)
            for pair, other in ((p, p[p[0] == slot]) for p in forms if slot in p):
                partner = self.tensors[step.names[other]]
                form, shift = forms[pair], shifts[pair]
                centre = centre + self._times(form, partner.centre, separate)
                change = change + self._times(shift, partner.domain, separate)
                change = change + self._times(form, partner.change, separate)
                domain = domain + self._times(form + shift, partner.domain, separate)
            before = moved.get(name, Moving(NOTHING, NOTHING, NOTHING))
            centre, change, domain = before.centre + centre, before.change + change, before.domain + domain
            moved[name] = Moving(centre, change, domain.least(centre + change))
        for pair in forms:
            self._add(step, pair, forms[pair], shifts[pair], bends[pair], slopes.domain, separate, sums)

    def _forms(
        self, step: Step, costate: Enclosure, slopes: Moving, separate: bool
    ) -> tuple[dict[Pair, Part], dict[Pair, Part], dict[Pair, Part]]:
        """Second derivatives contracted with the costate: at the centre, how far they move, and how far with the
        costate held anywhere.
        """
        bounds = step.bounds
        pairs = [pair for pair in bounds.curvature if set(pair) <= step.names.keys()]
        if not pairs:
            return {}, {}, {}
        fixed = at_centre(costate)
        whole = contracted(step, fixed)
        reads = step.node.specs[0].shape or self.result.enclosures[next(iter(step.names.values()))].shape or (1,)
        rows = row_forms(step, fixed, reads[0]) if isinstance(costate.value, Tensor) else {}
        moves = Part(costate.spread, None)
        if separate and costate.shape:
            moves = self._spread((step.node.name, "costate"), costate, slopes)
        elif separate:
            moves = Part(costate.spread, Magnitude(np.full(self.count, costate.spread.log2)))
        flat = _has_no_third(step)
        record = record_of(step.node)
        stated = (record.symmetric or record.loss is not None) and bounds.change_along is not None and not flat
        own = bounds.change_along(_enlarged(costate)) if stated and bounds.change_along is not None else {}
        forms, shifts, bends = {}, {}, {}
        for pair in pairs:
            amount, same = bounds.curvature[pair], pair[0] == pair[1]
            samples = self._by_sample(step, rows[pair]) if separate else None
            forms[pair] = Part(whole[pair], samples)
            bend = NOTHING
            if not flat:
                far = costate.bound * minimum(amount * 2.0, bounds.curvature_change.get(pair, amount * 2.0))
                bend = Part(far, Magnitude(np.full(self.count, far.log2)) if separate else None)
                if pair in own:
                    found = own[pair]
                    if separate:
                        each = self._by_sample(step, found)
                        bend = bend.least(Part(each.max() if same else each.norm(), None))
                        bend = Part(bend.whole, each)
                    else:
                        bend = Part(minimum(far, found.max() if found.shape else found))
            by_costate = moves.times(amount)
            if separate and same and by_costate.samples is not None:
                each = minimum(by_costate.samples, *self._in_box(step, pair, costate, costate.entry_radius()))
                by_costate = Part(minimum(by_costate.whole, each.max()), each)
            shifts[pair], bends[pair] = by_costate + bend, bend
        return forms, shifts, bends

    def _add(
        self,
        step: Step,
        pair: Pair,
        form: Part,
        shift: Part,
        bend: Part,
        slopes: Part,
        separate: bool,
        sums: tuple[Bilinear, Bilinear, Bilinear],
    ) -> None:
        """What one pair of slots adds to both bounds of the variation."""
        changes, bends, strides = sums
        names = [step.names[slot] for slot in pair]
        weight = next((name for name in names if name in self.variables), None)
        x, y = (self.tensors[name] for name in names)
        twice = 1.0 if pair[0] == pair[1] else 2.0
        terms = self._sum(shift, x.domain, y.domain, separate)
        terms = (
            terms + self._sum(form, x.change, y.domain, separate) + self._sum(form, x.centre, y.change, separate)
        )
        late = self._sum(bend, x.domain, y.domain, separate)
        late = late + self._sum(bend, x.path, y.domain, separate) + self._sum(bend, x.domain, y.path, separate)
        three = self._three(step, pair, slopes, x.domain, y.domain, separate)
        if weight is not None and pair[0] != pair[1]:
            changes.add(terms, weight)
            bends.add(late, weight)
            strides.add(three * 2.0, weight)
            strides.add_along(three * 2.0, weight)
        else:
            changes.add(terms * twice)
            bends.add(late * twice)
            strides.add(three * (3.0 * twice))

    def _sum(self, form: Part, x: Part, y: Part, separate: bool) -> Magnitude:
        whole = form.whole * x.whole * y.whole
        if not separate or form.samples is None:
            return whole
        return minimum(whole, (form.samples * x.each(self.count) * y.each(self.count)).sum())

    def _three(self, step: Step, pair: Pair, slopes: Part, x: Part, y: Part, separate: bool) -> Magnitude:
        """The second derivative between the derivatives of a costate and of two arguments, times the stride."""
        amount = step.bounds.curvature[pair] * self.gap
        whole = amount * slopes.whole * x.whole * y.whole
        if not separate:
            return whole
        parts = [slopes, x, y]
        each = [part.each(self.count) for part in parts]
        found = [whole, amount * (each[0] * each[1] * each[2]).sum()]
        for k, rows in enumerate(each if self.variables.isdisjoint(step.names[slot] for slot in pair) else ()):
            others = [part.whole for j, part in enumerate(parts) if j != k]
            found.append(amount * rows.max() * others[0] * others[1])
        e, costate = self.result.enclosures[step.names[pair[0]]], self.costates[step.node.name]
        boxes = ((e, (step.names[pair[0]], "tensor"), slopes), (costate, (step.node.name, "costate"), x))
        for enclosure, key, one in boxes:
            radii = self.entries.get(key, (None, None))[1]
            found += [
                self._sum(Part(box.max(), box), one, x, separate)
                for box in self._in_box(step, pair, enclosure, radii)
            ]
        return minimum(*found)

    def _in_box(self, step: Step, pair: Pair, e: Enclosure, radius: Tensor | None) -> list[Magnitude]:
        """The norm, sample by sample, of a second derivative in one slot contracted with any vector whose entries
        are at most as large as these radii, in place of the costate or of another argument.

        Of operations with a symmetric Jacobian, whose second derivatives are symmetric in all three, and whose
        rules look at absolute values and norms of costates only. Nothing if that is not known.
        """
        rows = step.bounds.rows_along
        if pair[0] != pair[1] or rows is None or radius is None or not record_of(step.node).symmetric:
            return []
        if radius.shape != e.value.shape or not radius.dim():
            return []
        return [self._by_sample(step, rows(_fixed(e, radius))[pair])]


def _has_no_third(step: Step) -> bool:
    """Whether the third derivative is zero: a product of two factors."""
    slots = {slot for pair, amount in step.bounds.curvature.items() if not amount.is_zero for slot in pair}
    same = any(a == b and not amount.is_zero for (a, b), amount in step.bounds.curvature.items())
    return record_of(step.node).form_of(step.node) is Form.PRODUCT and len(slots) <= 2 and not same


def _fixed(e: Enclosure, value: Tensor) -> Enclosure:
    """As a costate: this value, which does not move."""
    value = value.expand(e.value.shape)
    size, peak = measure(value)
    return Enclosure(e.spec, value, size, peak, _ZERO, None, _ZERO, e.lipschitz)


def _enlarged(costate: Enclosure) -> Enclosure:
    """A costate that does not move and is as large as any of an enclosure: entry by entry, or row by row."""
    if not costate.value.dim():
        return _fixed(costate, costate.value.abs() + float(costate.spread))
    radius = costate.entry_radius()
    assert radius is not None
    if radius.shape == costate.value.shape:
        return _fixed(costate, costate.value.abs() + radius)
    rows = len(costate.value)
    norms, spread = row_norms(costate.value), costate.row_spread(rows)
    log2 = np.where(np.isneginf(norms.log2), 0.0, (spread / norms).log2) if rows else np.zeros(0)
    scale = 1 + Magnitude(log2).tensor(costate.value)
    return _fixed(costate, costate.value * (scale * (1 + 2.0**-40)).reshape(-1, *[1] * (costate.value.dim() - 1)))
