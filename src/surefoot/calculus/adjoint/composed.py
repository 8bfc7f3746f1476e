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
:mod:`surefoot.calculus.adjoint.running`, a matrix Λ of costates of Frobenius norm at most s, off by w, is pulled
back to one that is off by at most :math:`Jw + (\delta J + b + \sum_jC_je_j)(s + w)`, b the stated error of the
derivative. It starts with s the root of the number of all entries of z, one for each row and sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.adjoint.dense import Local, local
from surefoot.calculus.adjoint.labels import sample_labels
from surefoot.calculus.adjoint.running import roundings
from surefoot.calculus.adjoint.samples import require_moderate
from surefoot.calculus.forward import Pass, Step, joined
from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.matrix import largest_norm

_HELD = 2**27  # numbers of all Jacobians of a cut
_ONCE = 2.0**23  # numbers of a tensor that are pulled back at a time
_QUICKER = 8.0  # how many times as fast a product of matrices is as a convolution


class Composed:
    """What is known of the cuts of a forward pass over the weights alone.

    Args:
        result: the forward pass.
        budget: what may be spent, in gradients.

    Raises:
        NotImplementedError: if an operation between cuts has no proved derivative.
    """

    def __init__(self, result: Pass, budget: float) -> None:
        self._result, self._at = result, {step.node.name: k for k, step in enumerate(result.steps)}
        self._sizes = _cuts(result, self._at)
        work = np.array([step.node.numel * (step.bounds.reduction + 1.0) for step in result.steps]).cumsum()
        order = sorted(self._sizes, key=lambda name: self._sizes[name][1])
        self.rows, self.cost = dict[str, list[str]](), 0.0
        for name in order:
            sources = self._sources(name)
            if not sources:
                continue
            count, size = self._sizes[name]
            spent = size * (work[self._at[name]] - work[self._at[sources[0]]])
            for small, large in (sorted((size, self._sizes[c][1])) for c in sources):
                spent += 2 * count * small**2 * (large + small) / _QUICKER
            if self.cost + spent / (3 * work[-1]) > budget:
                break
            self.cost += spent / (3 * work[-1])
            self.rows[name] = sources

    def _sources(self, name: str) -> list[str]:
        """The cuts before one whose Jacobians find room, in order."""
        count, size = self._sizes[name]
        found = sorted((c for c in self._sizes if self._at[c] < self._at[name]), key=self._at.__getitem__)
        while found and count * size * sum(self._sizes[c][1] for c in found) > _HELD:
            found.remove(max(found, key=lambda c: self._sizes[c][1]))
        return found

    def slopes(self, costates: Mapping[str, Enclosure]) -> tuple[dict[str, Magnitude], dict[str, Magnitude]]:
        """The slopes of every tensor that varies in each variable; and, for the results of element-wise functions
        of cuts, those of the cut weighted with the root of the contracted curvature.
        """
        result, variables = self._result, self._result.region.variables
        found, weighted = {name: result.enclosures[name].lipschitz for name in variables}, {}
        for k, step in enumerate(result.steps):
            name = step.node.name
            slopes = joined(step.bounds, {slot: found[read] for slot, read in step.names.items()})
            found[name] = minimum(slopes, result.enclosures[name].lipschitz)
            if name not in self.rows:
                continue
            bends = {
                s.node.name: s.bounds.entries_along(costates[s.node.name])
                for s in result.steps[k + 1 :]
                if s.bounds.entries_along and name in s.names.values() and s.node.name in costates
            }
            roots = {reader: (bend * (1 + 2.0**-50)).sqrt() for reader, bend in bends.items()}
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

    def _norms(self, name: str, roots: Mapping[str, Tensor]) -> dict[str, tuple[Magnitude, dict[str, Magnitude]]]:
        """Bounds of the Jacobian of one cut in those before it, the largest over the samples: plain, and with
        weights.
        """
        sources, (count, size) = self.rows[name], self._sizes[name]
        steps = self._result.steps[self._at[sources[0]] + 1 : self._at[name] + 1]
        found = [local(self._result, step) for step in steps]
        if any(each is None for each in found):
            raise NotImplementedError("an operation has no proved derivative")
        models = [each[0] for each in found if each is not None]
        off = self._errors(steps, [each[1][0] for each in found if each is not None], name)
        value = self._result.enclosures[name].value
        held = {c: value.new_empty(count, size, self._sizes[c][1]) for c in sources}
        start = 0
        for pulled in _pulled(self._result, steps, models, sources, max(map(self._numel, (name, *sources)))):
            stop = start + len(pulled[sources[0]])
            for c, part in pulled.items():
                require_moderate(part)
                held[c][:, start:stop] = part.flatten(2).transpose(0, 1)
            start = stop
        norms = {}
        for c, matrices in held.items():
            plain, weighted = Magnitude.of(largest_norm(matrices)) + off[c], {}
            for reader, root in roots.items():
                rows = root.reshape(count, size, 1)
                size_of = Magnitude.of(largest_norm(k * w for k, w in zip(matrices, rows, strict=True)))
                # the products are rounded, which the Frobenius norm of at most 2^20 rows makes up for
                weighted[reader] = size_of * (1 + 2.0**-30) + off[c] * float(root.max()) + 2.0**-500
            norms[c] = plain, weighted
        return norms

    def _numel(self, name: str) -> int:
        count, size = self._sizes[name]
        return count * size

    def _errors(self, steps: tuple[Step, ...], stated: list[float], name: str) -> dict[str, Magnitude]:
        """How far what is pulled back from a cut may be off, in the Frobenius norm; see the module."""
        zero = Magnitude.zero()
        sizes, wrong = {name: Magnitude.of(self._numel(name)).sqrt()}, {name: zero}
        for step, more in zip(reversed(steps), reversed(stated), strict=True):
            if (size := sizes.get(step.node.name)) is None:
                continue
            for slot, other in step.names.items():
                slope, before = step.bounds.jacobian[slot], wrong[step.node.name]
                rounded = slope * roundings(step) + more
                for pair, partner in step.partners(slot):
                    error = step.argument(partner, self._result.enclosures).error
                    rounded = rounded + step.bounds.curvature[pair] * error
                wrong[other] = wrong.get(other, zero) + slope * before + rounded * (size + before)
                sizes[other] = sizes.get(other, zero) + (slope + rounded) * size
        return wrong


def _cuts(result: Pass, at: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Cuts whose rows are samples that do not interact and that are bent by what reads them: the number of samples
    and of entries of each.
    """
    count = (result.enclosures[next(iter(result.steps[-1].names.values()))].shape or (1,))[0]
    labels, live, found = sample_labels(result, count), set[str](), dict[str, tuple[int, int]]()
    last = {name: k for k, step in enumerate(result.steps) for name in step.names.values()}
    bent = {
        step.names[first]
        for step in result.steps
        for (first, second), amount in step.bounds.curvature.items()
        if first == second and first in step.names and not amount.is_zero
    }
    for k, step in enumerate(result.steps):
        name = step.node.name
        live = {other for other in {*live, name} if last.get(other, -1) > k}
        value = result.enclosures[name].value
        if live == {name} and name in labels and name in bent and isinstance(value, Tensor):
            line = torch.arange(count, device=value.device).reshape(-1, *[1] * (value.dim() - 1))
            if value.shape[:1] == (count,) and value.numel() and bool((labels[name] == line).all()):
                found[name] = count, value.numel() // count
    return found


def _pulled(
    result: Pass, steps: tuple[Step, ...], models: list[Local], sources: list[str], largest: int
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

    end, pull = torch.func.vjp(value, {name: torch.zeros_like(values[name]) for name in sources})
    size, once = end.numel() // len(end), max(1, int(_ONCE / largest))
    for start in range(0, size, once):
        stop = min(start + once, size)
        units = end.new_zeros(stop - start, len(end), size)
        units[torch.arange(stop - start), :, torch.arange(start, stop)] = 1.0
        yield torch.func.vmap(lambda unit: pull(unit)[0])(units.reshape(-1, *end.shape))
