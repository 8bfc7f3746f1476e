r"""How much larger a difference of inputs may come out of a network: sharper than the product of norms.

Between two inputs of the domain every tensor differs by something linear in :math:`v = (\xi, w)`
(:mod:`surefoot.bounds.multipliers`): operations that are affine in what varies apply their linear part, scalar
functions have slopes in the range of their derivative over the reachable interval of every entry (the mean-value
theorem), and of other operations of one tensor the Lipschitz constant is used. The linear parts are found by
running the operations on the columns; with the Jacobian J of the forward pass a column a that is off by e arrives
off by at most

.. math:: Je + (k + 16)^2u\,(\|\hat z\| + J\|a\|)

(:mod:`surefoot.operations.evaluation`). Where one tensor alone is alive a network can be cut: what is behind reads
:math:`F\eta` with :math:`\|\eta\| \le \|\xi\|`. So networks of any size are read in pieces; a piece that is too
large or not of this kind counts with the Lipschitz constants of the forward pass, which are multiples of that of
the one tensor it reads. Where samples are separate they share one matrix, with the slopes of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.bounds.multipliers import Bounded, Linear, System
from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import Spec
from surefoot.graph.structure import Graph, Ref
from surefoot.norms import spectral_norm
from surefoot.norms.hermitian import up
from surefoot.operations.call import Call
from surefoot.operations.common import rows_of
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.record import Form, record_of

_IMPROVED = 384  # entries of v up to which multipliers are improved
_LARGEST = 1536  # and up to which there is an inequality at all
_STEADY = 1e-11  # slopes that differ by less are one number with an error


def input_gain(result: Pass) -> float:
    """An upper bound of the Lipschitz constant of the one output in the one input; infinite where none is known.

    The pass has to keep its centre values.
    """
    graph, names = result.graph, result.region.variables
    if graph is None or len(names) != 1 or len(result.outputs) != 1 or not result.steps:
        return math.inf
    if any(result.enclosures[name].value is None for step in result.steps for name in step.node.inputs):
        return math.inf
    try:
        gain = _Reading(result, graph, names[0]).gain()
        return math.inf if math.isnan(gain) else gain
    except (RuntimeError, OverflowError, IndexError):  # no batching rule, no factor, out of range
        return math.inf


@dataclass(frozen=True)
class _Slopes:
    """The slopes of the entries of one operation: within a distance of their middle.

    Where the distance is like round-off, so is what it does: an error of the columns.
    """

    middle: Tensor
    distance: Tensor

    @cached_property
    def moving(self) -> Tensor:
        """The entries of which the slope is not one number."""
        return (self.distance > _STEADY).nonzero()[:, 0]


@dataclass(frozen=True)
class _Piece:
    """Operations between two places where one tensor alone is alive."""

    steps: tuple[Step, ...]
    width: int  # entries of what comes out
    bounded: int | None  # entries of w; None if not of this kind


@dataclass
class _Cut:
    """A tensor that alone is alive: its difference is Fη with ‖η‖ ≤ ‖ξ‖, or has a norm of at most gain·‖ξ‖."""

    name: str
    gain: float
    shape: Tensor | None = None


@dataclass
class _Reading:
    result: Pass
    graph: Graph
    source: str
    slopes: dict[str, _Slopes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, steps = self._shape(self.source), self.result.steps
        self.samples = shape[0] if shape else 1
        self.rowwise = self.samples > 1 and self._is_separate(steps[0])
        if self.rowwise:
            mixing = (k for k, step in enumerate(steps) if not self._is_separate(step))
            steps = steps[: next(mixing, len(steps))]
        self.covered = {step.node.name for step in steps}

    def _is_separate(self, step: Step) -> bool:
        """Whether an operation does the same to every sample by itself."""
        call = Call(step.node, self.result.enclosures)
        if not step.names.keys() <= rows_of(call) or call.shape[:1] != (self.samples,):
            return False
        for slot, name in call.names.items():
            value = self._fixed(step, name)
            if slot in (*step.names, "weight", "running_var") or not isinstance(value, Tensor):
                continue
            if value.shape[:1] == (self.samples,) and not torch.equal(value, value[:1].expand(value.shape)):
                return False
        return True

    def gain(self) -> float:
        cut, pieces = _Cut(self.source, 1.0), list(self._pieces())
        while pieces:
            width = self._width(cut.name)
            flat = next((k for k, piece in enumerate(pieces) if piece.bounded != 0), len(pieces))
            narrow = [k for k in range(flat) if pieces[k].width < width]
            if narrow and flat < len(pieces):  # the fewer entries the better
                count = narrow[-1] + 1
            else:
                count, total = 0, width
                for piece in pieces:
                    total += _LARGEST + 1 if piece.bounded is None else piece.bounded
                    if total > (_IMPROVED if count else _LARGEST):
                        break
                    count += 1
            taken, pieces = pieces[: max(count, 1)], pieces[max(count, 1) :]
            steps = [step for piece in taken for step in piece.steps]
            cut = self._through(cut, steps, bool(count), last=not pieces)
        return cut.gain

    def _through(self, cut: _Cut, steps: Sequence[Step], linear: bool, last: bool) -> _Cut:
        """What is known behind these operations."""
        name = steps[-1].node.name
        if cut.shape is not None:
            cut = _Cut(cut.name, min(cut.gain, spectral_norm(cut.shape)), cut.shape)
        before, after = (self.result.enclosures[n].lipschitz.norm() for n in (cut.name, name))
        ratio = float(after / before) if before.is_finite and not before.is_zero else math.inf
        gain = up(cut.gain * ratio) if cut.gain and ratio else 0.0  # 0·∞ = 0: a difference of zero stays zero
        if not linear:
            return _Cut(name, gain)
        system = self._system(cut, steps)
        return _Cut(name, min(gain, system.gain())) if last else _Cut(name, gain, system.shape())

    def _system(self, cut: _Cut, steps: Sequence[Step]) -> System:
        width, device = self._width(cut.name), self._device
        start = torch.eye(width, dtype=torch.float64, device=device) * cut.gain if cut.shape is None else cut.shape
        forms = {cut.name: Linear(start, torch.zeros(width, dtype=torch.float64, device=device))}
        groups: list[Bounded] = []
        size = width
        for step in steps:
            name, arguments = step.node.name, {n: forms[n] for n in step.names.values()}
            if _is_affine(step):
                forms[name] = self._applied(step, arguments)
                continue
            (argument,) = arguments.values()
            if name in self.slopes:
                forms[name], group = _sloped(argument, self.slopes[name], size)
            else:
                (slot,) = step.names
                slope = up(float(step.bounds.jacobian[slot]))
                group = Bounded(_times(argument, slope), self._width(name), together=True)
                unit = torch.eye(group.count, dtype=torch.float64, device=device)
                forms[name] = Linear(
                    torch.nn.functional.pad(unit, (size, 0)), argument.error.new_zeros(size + len(unit))
                )
            if group.count:
                groups.append(group)
            size += group.count
        return System(width, groups, forms[steps[-1].node.name], improve=size <= _IMPROVED)

    def _applied(self, step: Step, arguments: Mapping[str, Linear]) -> Linear:
        """The linear part of an operation on columns."""
        node, record = step.node, record_of(step.node)
        count = max(len(form.error) for form in arguments.values())
        padded = {name: form.padded(count) for name, form in arguments.items()}
        fixed = {name: self._fixed(step, name) for name in node.inputs if name not in arguments}
        columns = [self._laid(form.value, name) for name, form in padded.items()]

        def run(*values: Tensor) -> Tensor:
            result = run_in_double(node, {**fixed, **dict(zip(padded, values, strict=True))})
            assert isinstance(result, Tensor)
            return result

        offset = run(*(column[0] * 0.0 for column in columns))
        value = self._columns(torch.func.vmap(run)(*columns) - offset, count)
        error = torch.zeros(count, dtype=torch.float64, device=value.device)
        sizes = value.norm(dim=0) + 2 * offset.norm()
        for slot, name in step.names.items():
            slope = float(step.bounds.jacobian[slot])
            length = padded[name].value.norm(dim=0)
            error, sizes = error + slope * padded[name].error, sizes + slope * length
            for pair, other in step.partners(slot):
                if other in step.inexact:
                    off = float(step.bounds.curvature[pair] * self.result.enclosures[step.inexact[other]].error)
                    error = error + off * length
        if record.rounds_at(node):
            error = error + (step.bounds.reduction + 16.0) ** 2 * (2.0**-53 * sizes + 2.0**-900)
        return Linear(value, error * (1 + (len(value) + 32) * 2.0**-52))

    def _fixed(self, step: Step, name: str) -> Tensor:
        """A constant argument; zero where it is only added."""
        value, record, arguments = self.result.enclosures[name].value, record_of(step.node), step.node.arguments
        multiplied = _refs(arguments, (*record.factors, *record.selects, *record.lends, "running_var"))
        divides = record.form_of(step.node) is Form.QUOTIENT
        added = isinstance(value, Tensor) and value.is_floating_point() and name not in multiplied and not divides
        return torch.zeros_like(value) if added else value

    def _pieces(self) -> Iterator[_Piece]:
        taken: list[Step]
        counts: list[int | None]
        last = {name: k for k, step in enumerate(self.result.steps) for name in step.names.values()}
        last |= dict.fromkeys(self.result.outputs, len(self.result.steps))
        alive, taken, counts = {self.source}, [], []
        for k, step in enumerate(self.result.steps):
            taken.append(step)
            counts.append(self._bounded(step))
            alive = {name for name in (*alive, step.node.name) if last.get(name, -1) > k}
            if alive == {step.node.name}:
                covered = [count for count in counts if count is not None]
                bounded = sum(covered) if len(covered) == len(counts) else None
                yield _Piece(tuple(taken), self._width(step.node.name), bounded)
                taken, counts = [], []

    def _bounded(self, step: Step) -> int | None:
        """How many entries an operation adds to w; ``None`` if it is not covered."""
        width = self._width(step.node.name)
        spec = step.node.spec
        if width > _LARGEST or step.node.name not in self.covered or not isinstance(spec, Spec):
            return None
        if not spec.dtype.is_floating_point:  # complex numbers
            return None
        if _is_affine(step):
            return 0
        if len(step.names) != 1 or not step.bounds.jacobian[next(iter(step.names))].is_finite:
            return None
        slopes = self._slopes(step)
        if slopes is None:
            return width
        self.slopes[step.node.name] = slopes
        return len(slopes.moving)

    def _slopes(self, step: Step) -> _Slopes | None:
        """The slopes of every entry over its reachable interval, if an operation works entry by entry."""
        ((slot, name),) = step.names.items()
        slopes = record_of(step.node).slopes
        found = None if slopes is None else slopes(Call(step.node, self.result.enclosures), slot)
        if found is None:
            return None
        least, most = found
        least, most = least.expand(self._shape(name)), most.expand(self._shape(name))
        if not bool(torch.isfinite(least).all() & torch.isfinite(most).all()):
            return None
        if self.rowwise:
            least, most = least.amin(0), most.amax(0)
        middle = ((least + most) / 2).reshape(-1)
        distance = torch.maximum(most.reshape(-1) - middle, middle - least.reshape(-1)) * (1 + 2.0**-51)
        return _Slopes(middle, distance)

    def _shape(self, name: str) -> tuple[int, ...]:
        spec = self.result.enclosures[name].spec
        return spec.shape if isinstance(spec, Spec) else ()

    def _width(self, name: str) -> int:
        """Entries of a tensor, of one sample if samples are separate."""
        return math.prod(self._shape(name)[1:] if self.rowwise else self._shape(name))

    @property
    def _device(self) -> torch.device:
        value: Tensor = self.result.enclosures[self.source].value
        return value.device

    def _laid(self, columns: Tensor, name: str) -> Tensor:
        """Columns as tensors of the graph's shape, several samples in one where samples are separate."""
        rows, shape = columns.mT, self._shape(name)
        if self.rowwise:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % self.samples))
        return rows.reshape(-1, *shape)

    def _columns(self, results: Tensor, count: int) -> Tensor:
        rows = results.flatten(0, 1) if self.rowwise else results
        return rows.reshape(len(rows), -1)[:count].mT.contiguous()


def _is_affine(step: Step) -> bool:
    """Whether an operation is affine in all that varies together."""
    record, node = record_of(step.node), step.node
    form = record.form_of(node)
    if record.error is not None and record.epsilon is None:
        return False
    varying = set(step.names.values())
    if form in (Form.LINEAR, Form.LAYOUT):
        return varying.isdisjoint(_refs(node.arguments, (*record.selects, *record.fixed)))
    if form is Form.PRODUCT:
        return sum(name in varying for name in _refs(node.arguments, record.factors)) <= 1
    return form is Form.QUOTIENT and varying.isdisjoint(_refs(node.arguments, ("other",)))


def _refs(arguments: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Names of the tensors in these slots."""
    slots = [arguments.get(key) for key in keys]
    items = [item for slot in slots for item in (slot if isinstance(slot, list | tuple) else [slot])]
    return [item.name for item in items if isinstance(item, Ref)]


def _times(form: Linear, factor: float) -> Linear:
    return Linear(
        form.value * factor, form.error * factor * (1 + 2.0**-50) + form.value.norm(dim=0) * abs(factor) * 2.0**-51
    )


def _sloped(form: Linear, slopes: _Slopes, size: int) -> tuple[Linear, Bounded]:
    """middle·y + distance·w, and the bound |w| ≤ |y|, for the entries of which the slope is not one number."""
    moving, straight = slopes.moving, form.padded(size)
    value = torch.cat([slopes.middle[:, None] * straight.value, torch.diag(slopes.distance)[:, moving]], 1)
    steepest = float(slopes.middle.abs().max()) if len(slopes.middle) else 0.0
    steady = torch.where(slopes.distance > _STEADY, 0.0, slopes.distance)
    off = float(steady.max()) if len(steady) else 0.0
    length = straight.value.norm(dim=0)
    error = (steepest * straight.error + (steepest * 2.0**-52 + off) * (length + straight.error)) * (1 + 2.0**-40)
    rows = Linear(form.value[moving], form.error)
    return Linear(value, torch.cat([error, error.new_zeros(len(moving))])), Bounded(rows, len(moving))
