r"""Slopes at the weights through composed Jacobians, where tensors are too wide to follow every direction.

A *cut* is a tensor c that all later operations read the earlier ones through. For a cut z behind it and a variable
v that no operation between the two reads, :math:`D_vz = K_{zc}\,D_vc`, so :math:`\|D_vz\| \le \max_n\|K_{zc,n}\|
\,\|D_vc\|`, the Jacobian being that of each sample n if they do not interact. K is computed, one pull-back for
each entry of a sample of z, all samples and all cuts c at once, and its norm is proved: products of norms remain
from a variable to the next cut, not all the way to the loss. What an element-wise function of z adds to the second
derivative of F is :math:`Dz^\top\mathrm{diag}(d)\,Dz`, :math:`d = \lambda\varphi''(z)` with the costate λ, hence
at most :math:`\|\mathrm{diag}(\sqrt{|d|})\,Dz\|^2`, for which K is weighted in the same way: d is large at a few
entries only. Cuts that are bent by what reads them are taken, those with few entries first, as long as the
multiplications are within the effort.

*Round-off.* With J and C the bounds of the rule of an operation, e how far values are off and :math:`\delta` as in
:func:`roundings`, a matrix of costates of Frobenius norm at most s, off by w, is pulled
back to one that is off by at most :math:`Jw + (\delta J + b + \sum_jC_je_j)(s + w)`, b the stated error of the
derivative. It starts with s the root of the number of all entries of z, one for each row and sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.costates import summands
from surefoot.calculus.adjoint.samples import PLAIN, SLACK_UNIT, require_moderate
from surefoot.calculus.forward import Pass, Step, joined
from surefoot.enclosure import Enclosure, Spec
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.matrix import largest_norm
from surefoot.operations.call import Call, Slot
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.products import is_linear
from surefoot.operations.record import Form, record_of
from surefoot.scalar import Rounded, rounded_derivatives

_BACK = 3  # in how many cuts before it the Jacobian of one is computed
_NARROW = 64  # in all of them if it has not more entries
_HELD = 2**27  # numbers of all these Jacobians
_ONCE = 2.0**23  # numbers of a tensor that are pulled back at a time
Local = Callable[[Mapping[str, Any]], Any]
_Norms = dict[str, tuple[Magnitude, dict[str, Magnitude]]]


class Composed:
    """What is known of the cuts of a forward pass over the weights alone.

    Args:
        result: the forward pass.
        budget: what may be spent, in gradients.
        most: the same in multiplications.

    Attributes:
        rows: cuts whose Jacobians are computed, each with those in which they are.
        cost: of that, in gradients.
    """

    def __init__(self, result: Pass, budget: float, most: float = math.inf) -> None:
        self._result, self._at = result, {step.node.name: k for k, step in enumerate(result.steps)}
        cuts = _cuts(result)
        work = np.array([step.work for step in result.steps]).cumsum()
        self.rows, self.cost = dict[str, list[str]](), 0.0
        budget = min(budget, most / max(3 * work[-1], 1.0))
        for name, (count, size) in sorted(cuts.items(), key=lambda item: item[1]):
            sources = [c for c in cuts if self._at[c] < self._at[name]][0 if size <= _NARROW else -_BACK :]
            while count * size * sum(cuts[c][1] for c in sources) > _HELD:
                sources.remove(max(sources, key=lambda c: cuts[c][1]))
            if not sources:
                continue
            spent = size * (work[self._at[name]] - work[self._at[sources[0]]])
            for small, large in (sorted((size, cuts[c][1])) for c in sources):
                spent += 2 * count * small**2 * (large + small)
            if self.cost + spent / (3 * work[-1]) > budget:
                break
            self.cost, self.rows[name] = self.cost + spent / (3 * work[-1]), sources

    def slopes(self, costates: Mapping[str, Enclosure]) -> tuple[dict[str, Magnitude], dict[str, Magnitude]]:
        """The slopes of every tensor that varies in each variable; and, for the results of element-wise functions
        of cuts, those of the cut weighted with the root of the contracted curvature.

        Raises:
            NotImplementedError: if an operation between cuts has no proved derivative.
        """
        result = self._result
        found, weighted = {name: result.enclosures[name].lipschitz for name in result.region.variables}, {}
        for k, step in enumerate(result.steps):
            name = step.node.name
            slopes = joined(step.bounds, {slot: found[read] for slot, read in step.names.items()})
            found[name] = minimum(slopes, result.enclosures[name].lipschitz)
            if name not in self.rows:
                continue
            roots = {
                s.node.name: (s.bounds.entries_along(costates[s.node.name]) * (1 + 2.0**-50)).sqrt()
                for s in result.steps[k + 1 :]
                if s.bounds.entries_along and name in s.names.values() and s.node.name in costates
            }
            norms = self._norms(name, roots)
            for cut, (size, _) in norms.items():
                found[name] = minimum(found[name], self._carried(found[cut] * size, cut, k))
            for reader, root in roots.items():
                weighted[reader] = found[name] * (Magnitude.of(float(root.max())) * (1 + 2.0**-50))
                for cut, (_, sizes) in norms.items():
                    through = self._carried(found[cut] * sizes[reader], cut, k)
                    weighted[reader] = minimum(weighted[reader], through)
        return found, weighted

    def _carried(self, slopes: Magnitude, cut: str, end: int) -> Magnitude:
        """Slopes that hold for variables which no operation after a cut reads, up to some step."""
        between = {read for s in self._result.steps[self._at[cut] + 1 : end + 1] for read in s.names.values()}
        return Magnitude(np.where([v in between for v in self._result.region.variables], np.inf, slopes.log2))

    def _norms(self, name: str, roots: Mapping[str, Tensor]) -> _Norms:
        """Bounds of the Jacobian of one cut in those before it, the largest over the samples: as it is, and with
        weights for what reads the cut.
        """
        sources, values = self.rows[name], self._result.enclosures
        steps = self._result.steps[self._at[sources[0]] + 1 : self._at[name] + 1]
        models = [found for step in steps if (found := local(self._result, step)) is not None]
        if len(models) < len(steps):
            raise NotImplementedError("an operation has no proved derivative")
        off = _errors(self._result, steps, [errors[0] for _, errors in models])
        count, size, start = len(values[name].value), values[name].numel // len(values[name].value), 0
        held = {c: values[c].value.new_empty(size, count, values[c].numel // count) for c in sources}
        for pulled in _pulled(self._result, steps, [model for model, _ in models], sources):
            for c, part in pulled.items():
                require_moderate(part)
                held[c][start : start + len(part)] = part.flatten(2)
            start += len(pulled[sources[0]])
        norms: _Norms = {}
        for c in sources:
            matrices = held.pop(c).transpose(0, 1)
            norms[c] = Magnitude.of(largest_norm(matrices)) + off[c], {}
            for reader, root in roots.items():
                rows = zip(matrices, root.reshape(count, -1, 1), strict=True)
                # products are rounded, by less than the Frobenius norm of at most 2^20 rows makes up for
                most = Magnitude.of(largest_norm(k * w for k, w in rows)) * (1 + 2.0**-30) + 2.0**-500
                norms[c][1][reader] = most + off[c] * float(root.max())
        return norms


def _cuts(result: Pass) -> dict[str, tuple[int, int]]:
    """Cuts in order whose rows are samples that do not interact and that are bent by what reads them: the number
    of samples and of entries of each.
    """
    read = result.enclosures[next(iter(result.steps[-1].names.values()))].spec
    if not isinstance(read, Spec):  # one of several results is the output
        return {}
    count = (read.shape or (1,))[0]
    labels, live, found = sample_labels(result, count), set[str](), dict[str, tuple[int, int]]()
    last = {name: k for k, step in enumerate(result.steps) for name in step.names.values()}
    bent = {
        step.names.get(first)
        for step in result.steps
        for (first, second), amount in step.bounds.curvature.items()
        if first == second and not amount.is_zero
    }
    for k, step in enumerate(result.steps):
        name, value = step.node.name, result.enclosures[step.node.name].value
        live = {other for other in {*live, name} if last.get(other, -1) > k}
        if live == {name} and name in labels and name in bent and isinstance(value, Tensor):
            line = torch.arange(count, device=value.device).reshape(-1, *[1] * (value.dim() - 1))
            if value.shape[:1] == (count,) and value.numel() and bool((labels[name] == line).all()):
                found[name] = count, value.numel() // count
    return found


def _errors(result: Pass, steps: Sequence[Step], stated: list[float]) -> dict[str, Magnitude]:
    """How far what is pulled back from the last result may be off, in the Frobenius norm; see the module."""
    zero, name = Magnitude.zero(), steps[-1].node.name
    sizes, wrong = {name: Magnitude.of(steps[-1].node.numel).sqrt()}, {name: zero}
    for step, more in zip(reversed(steps), reversed(stated), strict=True):
        size, before = sizes.get(step.node.name, zero), wrong.get(step.node.name, zero)
        for slot, other in step.names.items():
            slope = step.bounds.jacobian[slot]
            rounded = slope * roundings(result, step, slot) + more
            for pair, partner in step.partners(slot):
                rounded = rounded + step.bounds.curvature[pair] * step.argument(partner, result.enclosures).error
            wrong[other] = wrong.get(other, zero) + slope * before + rounded * (size + before)
            sizes[other] = sizes.get(other, zero) + (slope + rounded) * size
    return wrong


def _pulled(
    result: Pass, steps: Sequence[Step], models: list[Local], sources: list[str]
) -> Iterator[dict[str, Tensor]]:
    """The Jacobians of the last result in the sources, some rows at a time: rows × samples × entries."""
    values = {name: e.value for name, e in result.enclosures.items()}

    def value(moves: Mapping[str, Tensor]) -> Any:
        live = {sources[0]: values[sources[0]] + moves[sources[0]]}
        for step, model in zip(steps, models, strict=True):
            name = step.node.name
            live[name] = model({read: live.get(read, values[read]) for read in step.node.inputs})
            live[name] = live[name] + moves[name] if name in moves else live[name]
        return live[steps[-1].node.name]

    differentiated: Any = torch.func.vjp(value, {name: torch.zeros_like(values[name]) for name in sources})
    end, pull = differentiated
    largest = max(values[name].numel() for name in (steps[-1].node.name, *sources))
    units = torch.eye(end.numel() // len(end), dtype=end.dtype, device=end.device)
    for some in units.split(max(1, int(_ONCE / largest))):
        seeds = some[:, None].expand(-1, len(end), -1).reshape(-1, *end.shape)
        yield torch.func.vmap(lambda seed: pull(seed)[0])(seeds)


def local(result: Pass, step: Step) -> tuple[Local, tuple[float, float]] | None:
    """An operation as a function of what it reads, with two derivatives at the centre, and their errors."""
    record, node = record_of(step.node), step.node
    centre = result.enclosures[node.name].value
    name = next(iter(step.names.values()))
    if node.op == "surefoot.scalar":
        x = result.enclosures[name].value
        _, slope, bend = rounded_derivatives(node.arguments["function"], Rounded.exact(x), 2)
        errors = (float(slope.error.max()), 2 * float(bend.error.max())) if x.numel() else (0.0, 0.0)
        require_moderate(slope.value, bend.value)

        def scalar(reads: Mapping[str, Any]) -> Any:
            move = reads[name] - x
            return centre + slope.value * move + bend.value * move.square()

        return scalar, errors
    if record.near is not None and len(step.names) == 1:
        x, call = result.enclosures[name].value, Call(node, result.enclosures)
        near = record.near(call, torch.zeros_like(x))
        if near is None or not math.isfinite(near.first + near.second):
            return None

        def quadratic(reads: Mapping[str, Any]) -> Any:
            model = record.near(call, reads[name] - x)  # type: ignore[misc]
            return centre + model.change  # type: ignore[union-attr]

        return quadratic, (near.first, near.second)
    if record.form_of(node) not in PLAIN and record.rounds_at(node):
        return None
    return (lambda reads: run_in_double(node, reads)), (0.0, 0.0)


def roundings(result: Pass, step: Step, slot: Slot) -> float:
    """The relative error of applying a Jacobian or its transpose; see the module. Where the error of derivatives
    is stated, it contains that of the sums, and what is left are products of a few numbers.
    """
    if step.node.op == "surefoot.scalar" or record_of(step.node).near is not None:
        return SLACK_UNIT
    terms = step.bounds.reduction + 16.0
    entries = summands(step, slot, result.enclosures[step.names[slot]].numel) + 16.0
    return 2 * (terms**2 + entries * math.sqrt(terms)) * 2.0**-53


def sample_labels(result: Pass, count: int) -> dict[str, Tensor]:
    """The sample that each entry of a tensor belongs to, for tensors of which the entries of a sample depend on
    the variables and on the entries of the same sample only.

    Layout operations move the labels as they move numbers. Element by element nothing changes. A linear layer
    mixes the last dimension, other operations whatever is in a row: these must have one label each. What reads
    variables only may be labelled at will, and so may entries that do not vary.
    """
    labels: dict[str, Tensor] = {}
    variables = set(result.region.variables)
    for step in result.steps:
        node, shape = step.node, step.node.specs[0].shape
        read = {slot: name for slot, name in step.names.items() if name not in variables}
        value = result.enclosures[node.name].value
        if any(name not in labels for name in read.values()):
            continue
        form = record_of(node).form_of(node)
        if not isinstance(value, Tensor):
            if form is Form.LAYOUT and len(read) == len(step.names):
                labels[node.name] = run_in_double(node, _labelled(result, node, labels))
            continue
        line = torch.arange(count, dtype=torch.float64, device=value.device)
        if not read:
            if shape[:1] == (count,):
                labels[node.name] = line.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        elif form is Form.LAYOUT and len(read) == len(step.names):
            found = run_in_double(node, _labelled(result, node, labels))
            free, own = found.isnan(), line.reshape(-1, *[1] * (len(shape) - 1))
            if shape[:1] == (count,) or not bool(free.any()):
                labels[node.name] = torch.where(free, own, found) if bool(free.any()) else found
        elif form is Form.ELEMENTWISE and len(read) == 1:
            labels[node.name] = labels[next(iter(read.values()))]
        else:
            kept = len(shape) - 1 if is_linear(node) else 1
            if not is_linear(node) and not read.keys() <= step.row_slots:
                continue
            lines = [labels[name].unsqueeze(-1) for name in read.values()]
            if any(part.dim() <= kept for part in lines):
                continue
            lines = [part.flatten(kept) for part in lines]
            if any(part.shape[:kept] != shape[:kept] or not part.shape[kept] for part in lines) or not shape:
                continue
            first = lines[0][..., 0]
            if all(bool((part == first[..., None]).all()) for part in lines):
                labels[node.name] = first.reshape(*first.shape, *[1] * (len(shape) - kept)).expand(shape)
    return labels


def _labelled(result: Pass, node: Node, labels: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a layout operation reads: labels, none of numbers that do not vary, and what chooses entries."""
    values = {name: result.enclosures[name].value for name in node.inputs}
    none = {
        n: torch.full_like(v, math.nan)
        for n, v in values.items()
        if isinstance(v, Tensor) and v.is_floating_point()
    }
    return values | none | {name: labels[name] for name in node.inputs if name in labels}
