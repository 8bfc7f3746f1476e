r"""How much larger a difference of inputs may come out of a network: sharper than the product of norms.

Between two inputs of the domain every tensor differs by something linear in :math:`v = (\xi, w)`
(:mod:`surefoot.bounds.multipliers`): linear primitives, and products with fixed tensors, apply themselves, scalar
functions have slopes in the range of their derivative over the reachable interval of every entry (the mean-value
theorem), and of other primitives of one tensor the Lipschitz constant is used. A linear primitive is run on the
columns; with its norm J a column a that is off by e arrives off by at most

.. math:: Je + (k + 16)^2u\,(\|\hat z\| + J\|a\|)

where entries are sums of k products. Where one tensor alone is alive a network can be cut: what is behind reads
:math:`F\eta` with :math:`\|\eta\| \le \|\xi\|`. So networks of any size are read in pieces; a piece that is too
large or not of this kind counts with the Lipschitz constants of the forward pass, which are multiples of that
of the one tensor it reads. Where all samples go the same way by themselves they share one matrix, with the
slopes of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surefoot.bounds.multipliers import Bounded, Linear, System
from surefoot.bounds.scalars import enclose
from surefoot.bounds.size import Sizes, Step
from surefoot.norms import spectral_norm
from surefoot.norms.hermitian import up
from surefoot.program.labels import samples

_IMPROVED = 384  # entries of v up to which multipliers are improved
_LARGEST = 1536  # and up to which there is an inequality at all
_STEADY = 1e-11  # slopes that differ by less are one number with an error


def input_gain(result: Sizes) -> float:
    """An upper bound of the Lipschitz constant of the one output in the one input; infinite where none is known.

    The pass has to have values at its centre.
    """
    names = result.region.variables
    if len(names) != 1 or len(result.program.outputs) != 1 or not result.steps:
        return math.inf
    if any(result.sizes[index].value is None for step in result.steps for index in step.arguments):
        return math.inf
    try:
        gain = _Reading(result, result.program.inputs[names[0]]).gain()
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

    @property
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

    index: int
    gain: float
    shape: Tensor | None = None


@dataclass
class _Reading:
    result: Sizes
    source: int
    slopes: dict[int, _Slopes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, steps = self._shape(self.source), self.result.steps
        self.samples = shape[0] if shape else 1
        self.rowwise = False
        if self.samples > 1:
            labels = samples(self.result.program, {self.result.region.variables[0]: 0})
            alike = [self._is_alike(step, labels) for step in steps]
            self.rowwise = alike[0]
            steps = steps[: alike.index(False)] if self.rowwise and not all(alike) else steps
        self.covered = {step.node.index for step in steps}

    def _is_alike(self, step: Step, labels: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether an operation does the same to every sample by itself: the rows of its result depend on their own
        sample, and its constants are the same for all.
        """
        node, count = step.node, self.samples
        if tuple(node.shape)[:1] != (count,):
            return False
        own = torch.arange(count).reshape(-1, *[1] * (len(node.shape) - 1)).expand(node.shape)
        if not all(torch.equal(each.cpu().to(own.dtype), own) for each in labels[node.index]):
            return False
        for index in step.arguments:
            size = self.result.sizes[index]
            if self.result.depends[index] or size.value is None or size.value.shape[:1] != (count,):
                continue
            rows = size.value.reshape(count, -1)
            if node.primitive.name in ("gather", "scatter"):  # positions among all entries
                rows = rows - torch.arange(count, device=rows.device)[:, None] * self._per_row(step)
            if not torch.equal(rows, rows[:1].expand(rows.shape)):
                return False
        return True

    def _per_row(self, step: Step) -> int:
        return math.prod(self._shape(step.arguments[0])[1:])

    def gain(self) -> float:
        cut, pieces = _Cut(self.source, 1.0), list(self._pieces())
        while pieces:
            width = self._width(cut.index)
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
        """What follows for the last of these operations."""
        index = steps[-1].node.index
        if cut.shape is not None:
            cut = _Cut(cut.index, min(cut.gain, spectral_norm(cut.shape)), cut.shape)
        before, after = (self.result.sizes[k].lipschitz.norm() for k in (cut.index, index))
        ratio = float(after / before) if before.is_finite and not before.is_zero else math.inf
        gain = up(cut.gain * ratio) if cut.gain and ratio else 0.0  # 0·∞ = 0: a difference of zero stays zero
        if not linear:
            return _Cut(index, gain)
        system = self._system(cut, steps)
        return _Cut(index, min(gain, system.gain())) if last else _Cut(index, gain, system.shape())

    def _system(self, cut: _Cut, steps: Sequence[Step]) -> System:
        width, device = self._width(cut.index), self._device
        start = torch.eye(width, dtype=torch.float64, device=device) * cut.gain if cut.shape is None else cut.shape
        forms = {cut.index: Linear(start, torch.zeros(start.shape[1], dtype=torch.float64, device=device))}
        groups: list[Bounded] = []
        size = width
        for step in steps:
            index, varying = step.node.index, self._varying(step)
            if self._is_affine(step):
                forms[index] = self._applied(step, {k: forms[k] for k in varying.values()})
                continue
            argument = forms[next(iter(varying.values()))]
            if index in self.slopes:
                forms[index], group = _sloped(argument, self.slopes[index], size)
            else:
                slope = up(float(step.claim.slopes[next(iter(varying))]))
                group = Bounded(_times(argument, slope), self._width(index), together=True)
                unit = torch.eye(group.count, dtype=torch.float64, device=device)
                error = argument.error.new_zeros(size + len(unit))
                forms[index] = Linear(torch.nn.functional.pad(unit, (size, 0)), error)
            if group.count:
                groups.append(group)
            size += group.count
        return System(width, groups, forms[steps[-1].node.index], improve=size <= _IMPROVED)

    def _varying(self, step: Step) -> dict[int, int]:
        """The tensors that vary, by position."""
        return {k: index for k, index in enumerate(step.arguments) if self.result.depends[index]}

    def _is_affine(self, step: Step) -> bool:
        """Whether an operation is affine in all that varies together."""
        kind, count = step.node.primitive.kind, len(self._varying(step))
        return kind == "linear" or (kind == "product" and count == 1)

    def _applied(self, step: Step, arguments: Mapping[int, Linear]) -> Linear:
        """The linear part of an operation on columns; what is only added is left out."""
        node, product = step.node, step.node.primitive.kind == "product"
        count = max(len(form.error) for form in arguments.values())
        padded = {index: form.padded(count) for index, form in arguments.items()}
        columns = [self._laid(form.value, index) for index, form in padded.items()]
        added = node.primitive.name in ("add", "cat")

        def run(*values: Tensor) -> Tensor:
            given = dict(zip(padded, values, strict=True))
            tensors = []
            for index, original in zip(step.arguments, node.inputs, strict=True):
                value = given.get(index, self.result.sizes[index].value)
                assert value is not None
                value = torch.zeros_like(value) if added and index not in given else value
                if index != original:  # a factor as it was before it was repeated
                    value = value.expand(self._shape(original))
                tensors.append(value)
            return node.primitive.run(tensors, **node.options)

        value = self._columns(torch.func.vmap(run)(*columns), count)
        error = torch.zeros(count, dtype=torch.float64, device=value.device)
        sizes = value.norm(dim=0)
        for k, index in self._varying(step).items():
            slope = float(step.claim.slopes[k])
            length = padded[index].value.norm(dim=0)
            error, sizes = error + slope * padded[index].error, sizes + slope * length
            if product:  # the fixed factor may be off
                other = self.result.sizes[step.arguments[1 - k]]
                error = error + float(step.claim.bends[0, 1] * other.error) * length
        if product or not step.claim.rounding.is_zero:
            error = error + (step.claim.summands + 16.0) ** 2 * (2.0**-53 * sizes + 2.0**-900)
        return Linear(value, error * (1 + (len(value) + 32) * 2.0**-52))

    def _pieces(self) -> Iterator[_Piece]:
        taken: list[Step] = []
        counts: list[int | None] = []
        last = {index: k for k, step in enumerate(self.result.steps) for index in step.arguments}
        last |= dict.fromkeys(self.result.program.outputs, len(self.result.steps))
        alive = {self.source}
        for k, step in enumerate(self.result.steps):
            taken.append(step)
            counts.append(self._bounded(step))
            alive = {index for index in (*alive, step.node.index) if last.get(index, -1) > k}
            if alive == {step.node.index}:
                covered = [count for count in counts if count is not None]
                bounded = sum(covered) if len(covered) == len(counts) else None
                yield _Piece(tuple(taken), self._width(step.node.index), bounded)
                taken, counts = [], []

    def _bounded(self, step: Step) -> int | None:
        """How many entries an operation adds to w; ``None`` if it is not covered."""
        width, varying = self._width(step.node.index), self._varying(step)
        if width > _LARGEST or step.node.index not in self.covered:
            return None
        if self._is_affine(step):
            return 0
        if len(varying) != 1 or not step.claim.slopes[next(iter(varying))].is_finite:
            return None
        slopes = self._slopes_of(step)
        if slopes is None:
            return width
        self.slopes[step.node.index] = slopes
        return len(slopes.moving)

    def _slopes_of(self, step: Step) -> _Slopes | None:
        """The slopes of every entry over its reachable interval, if an operation works entry by entry."""
        if step.node.primitive.kind != "scalar":
            return None
        argument = self.result.sizes[step.arguments[0]]
        assert argument.value is not None
        move = up(float(argument.spread))
        low, high = ((argument.value + sign * move).clamp(argument.low, argument.high) for sign in (-1, 1))
        slack = 2.0**-50 * (argument.value.abs() + (move if math.isfinite(move) else 0.0))
        least, most = enclose(step.node.options["function"], 1, low - slack, high + slack)
        if not bool(torch.isfinite(least).all() & torch.isfinite(most).all()):
            return None
        if self.rowwise:
            least, most = least.amin(0), most.amax(0)
        middle = ((least + most) / 2).reshape(-1)
        distance = torch.maximum(most.reshape(-1) - middle, middle - least.reshape(-1)) * (1 + 2.0**-51)
        return _Slopes(middle, distance)

    def _shape(self, index: int) -> tuple[int, ...]:
        return tuple(self.result.program.nodes[index].shape)

    def _width(self, index: int) -> int:
        """Entries of a tensor, of one sample if samples are separate."""
        return math.prod(self._shape(index)[1:] if self.rowwise else self._shape(index))

    @property
    def _device(self) -> torch.device:
        value = self.result.sizes[self.source].value
        assert value is not None
        return value.device

    def _laid(self, columns: Tensor, index: int) -> Tensor:
        """Columns as tensors of the program's shape, several samples in one where samples are separate."""
        rows, shape = columns.mT, self._shape(index)
        if self.rowwise:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % self.samples))
        return rows.reshape(-1, *shape)

    def _columns(self, results: Tensor, count: int) -> Tensor:
        rows = results.flatten(0, 1) if self.rowwise else results
        return rows.reshape(len(rows), -1)[:count].mT.contiguous()


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
