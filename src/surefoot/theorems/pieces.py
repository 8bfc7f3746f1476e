r"""Data in pieces under a network of linear layers and element-wise functions, on one process or several.

What the theorems about exact solutions are computed from are sums over samples, maxima over them, and the Gram
matrix of the Jacobian, whose blocks belong to pairs of batches. So a batch is read when it is its turn, and read
again when it comes again; what is kept of all samples are outputs, targets, and a few numbers for each.

With several processes, process 0 decides and keeps the Gram matrix; each computes what its own batches say. For
the Gram matrix the inputs of one batch after the other are passed on to all, once, and each process sends the
blocks of its own rows to process 0, values and errors: for n rows in all about :math:`8n^2` bytes. For K the Gram
matrices of what layers read are added up, the square of the width for each norm. Activations stay where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import Batches, digest_of, kind_of, numbered, refuse_other_models, tensors_of
from surefoot.calculus.analysis import Analysis
from surefoot.certificate.pieces import InPieces
from surefoot.errors import EvaluationError
from surefoot.guarantees import GuaranteeError
from surefoot.norms.blocked import Symmetric
from surefoot.objectives import Objective
from surefoot.processes import Processes
from surefoot.scalar import Rounded
from surefoot.theorems.bending import AT_ONCE, Bent, Here, Key, stacked_norms
from surefoot.theorems.layered import Layer, Layered, read_layers
from surefoot.theorems.linear import WEIGHED, in_proportion

_ROWS = 512  # of a block of the Gram matrix


@dataclass(frozen=True)
class _Told:
    """What a batch says once: its outputs, of one shape behind the samples, and the targets."""

    outputs: Rounded
    shape: tuple[int, ...]
    targets: Tensor


class Pieces:
    """All batches of all processes.

    Methods whose names have no underscore are called on process 0, inside of :meth:`led`; the others serve.

    Args:
        model: the network; it is not changed.
        batches: those that are here.
        objective: a loss without targets.
        processes: those that have a part of the data each, or ``None``.
    """

    def __init__(
        self, model: nn.Module, batches: Batches, objective: Objective, processes: Processes | None
    ) -> None:
        self.model, self.batches, self.objective, self.processes = model, batches, objective, processes
        self.certified = InPieces(model, batches, objective, processes=processes)
        self._here = Here(self._layered)
        self._known: dict[Any, Analysis] = {}
        everyone = [self._kind()] if processes is None else processes.gathered(self._kind)
        if processes is not None:
            held = [*model.parameters(), *model.buffers()]
            refuse_other_models(processes.gathered(lambda: digest_of(held)))
        self._counts = [count for count, _ in everyone]
        if not sum(self._counts):
            raise EvaluationError("the loader has no batches: there is nothing to evaluate")
        self.is_layered = all(layers is not None for count, layers in everyone if count)
        self._layers: tuple[Layer, ...] = next((layers for _, layers in everyone if layers), ())

    def _kind(self) -> tuple[int, tuple[Layer, ...] | None]:
        """How many batches are here, and the layers by the first of them, without weights; ``None`` if the network
        is anything else.
        """
        count, layers = 0, None
        for number, x, _ in self.batches:
            with numbered(number):
                read = None if count else read_layers(self._analysis(x))
            layers = layers if read is None else tuple(layer.outlined() for layer in read.layers)
            count += 1
        return count, layers

    def _analysis(self, x: Any) -> Analysis:
        """Batches of one shape share their reading."""
        kind = kind_of(*tensors_of(x))
        found = Analysis.of(self.model, x, None, self._known.get(kind))
        self._known[kind] = Analysis(self.model, x, None, found.reading, found.values)
        return found

    def _read(self, x: Any) -> Layered:
        found = read_layers(self._analysis(x))
        if found is None:
            raise GuaranteeError(
                "the network is one linear layer after the other on some batches, and not on others: give them "
                "samples of one shape"
            )
        return found

    def _layered(self) -> Iterator[Layered]:
        for number, x, _ in self.batches:
            with numbered(number):
                found = self._read(x)
            yield found

    # What process 0 asks for

    def led(self, lead: Callable[[], Any]) -> Any:
        """What process 0 finds, on all processes."""
        return lead() if self.processes is None else self.processes.led(lead, self._serve, GuaranteeError)

    def _serve(self, word: Any) -> object:
        if isinstance(word, tuple) and isinstance(word[0], str) and word[0] in _SERVED:
            return getattr(self, word[0])(*word[1:])
        return self.certified.serve(word)

    def _ask(self, name: str, *given: Any) -> Any:
        if self.processes is not None:
            self.processes.ask((name, *given))
        return getattr(self, name)(*given)

    def _each(self, compute: Callable[[], list[Any]]) -> list[Any]:
        """On process 0 what it gives on all of them, one after the other."""
        parts = [compute()] if self.processes is None else self.processes.collected(compute)
        return [one for part in parts for one in part]

    def _told(self) -> list[_Told]:
        def compute() -> list[_Told]:
            found = []
            for number, x, y in self.batches:
                with numbered(number):
                    Analysis.of(self.model, x, self.objective.bound_to(y))  # refuses targets that do not fit
                    read = self._read(x)
                    graph = read.analysis.reading.graph
                    found.append(_Told(read.outputs, graph.specs(graph.outputs[0])[0].shape[1:], y))
            return found

        return self._each(compute)

    @cached_property
    def _all(self) -> list[_Told]:
        found: list[_Told] = self._ask("_told")
        return found

    @cached_property
    def outputs(self) -> Rounded:
        """Of all samples, samples × outputs."""
        told = [one.outputs.expand(one.outputs.value.shape) for one in self._all]
        return Rounded(torch.cat([one.value for one in told]), torch.cat([one.error for one in told]))

    @cached_property
    def bound(self) -> Objective:
        """The objective with the targets of all samples."""
        return self.objective.bound_to(torch.cat([one.targets for one in self._all]))

    @property
    def like_outputs(self) -> Tensor:
        """A tensor of the shape of all outputs."""
        shape = self._all[0].shape
        return self.outputs.value.reshape(len(self.outputs.value), *shape)

    @cached_property
    def _firsts(self) -> list[int]:
        """The first row of each batch, and behind the last one."""
        sizes = (one.outputs.value.numel() for one in self._all)
        return list(itertools.accumulate(sizes, initial=0))

    def _blocks(self, parts: Sequence[float], stop: int) -> Iterator[tuple[int, int, Rounded]]:
        """Of the Gram matrix, columns before one number: first row, first column, block."""
        place = 0
        for rank, count in enumerate(self._counts):
            for number in range(count):
                if self._firsts[place] < stop:
                    yield from self._ask("_columns", rank, number, place, self._firsts, list(parts), stop)
                place += 1

    def _columns(
        self, rank: int, number: int, place: int, firsts: list[int], parts: list[float], stop: int
    ) -> list[tuple[int, int, Rounded]]:
        """The blocks of one batch with itself and all that follow, up to a row."""

        def inputs() -> Any:
            return next(x for k, x, _ in self.batches if k == number)

        x = inputs() if self.processes is None else self.processes.passed_on(rank, inputs)
        other = self._read(x)
        before = 0 if self.processes is None else sum(self._counts[: self.processes.rank])

        def compute() -> list[tuple[int, int, Rounded]]:
            found = []
            for own, layered in enumerate(self._layered(), before):
                if own >= place and firsts[own] < stop:
                    rows = firsts[own + 1] - firsts[own]
                    for start in range(0, rows, _ROWS):
                        end = min(start + _ROWS, rows)
                        width = firsts[place + 1] - firsts[place]
                        block = layered.times(start, end, other, width, parts)
                        found.append((firsts[own] + start, firsts[place], block))
            return found

        return self._each(compute)

    def gram(self, weights: Sequence[float] = ()) -> Symmetric:
        """:math:`JJ^\\top`, each layer times its weight, if there are weights."""
        size = self._firsts[-1]
        return Symmetric.of_blocks(size, self._blocks(weights, size))

    def block_weights(self) -> dict[str, float]:
        """As :func:`~surefoot.theorems.linear.block_weights`, of the first rows."""
        stop, sizes = min(self._firsts[-1], WEIGHED), dict[str, float]()
        for k, layer in enumerate(self._layers):
            if not layer.trains:
                continue
            total = 0.0
            for row, column, block in self._blocks([float(k == j) for j in range(len(self._layers))], stop):
                part = block.value[: max(stop - row, 0), : stop - column].square()
                total += float(part.sum()) * (1 if self._same(row, column) else 2)
            sizes |= dict.fromkeys(layer.paths, total**0.5)
        return in_proportion(sizes)

    def _same(self, row: int, column: int) -> bool:
        """Whether a block belongs to one batch."""
        place = self._firsts.index(column)
        return row < self._firsts[place + 1]

    # How fast the Jacobian changes (bending.Source)

    def shape(self) -> tuple[Layer, ...]:
        """The layers, without weights."""
        return self._layers

    def bent(self, radius: float, roots: tuple[float, ...]) -> list[Bent]:
        """What each batch says about a ball."""
        found: list[Bent] = self._ask("_bent", radius, roots)
        return found

    def _bent(self, radius: float, roots: tuple[float, ...]) -> list[Bent]:
        return self._each(lambda: self._here.bent(radius, roots))

    def norms(self, k: int, asked: Sequence[tuple[Key | None, str]]) -> list[float]:
        """As in :class:`~surefoot.theorems.bending.Source`."""
        if self.processes is None:
            return self._here.norms(k, asked)
        some = (list(asked[at : at + AT_ONCE]) for at in range(0, len(asked), AT_ONCE))
        return [norm for each in some for norm in self._ask("_norms", k, each)]

    def _norms(self, k: int, asked: list[tuple[Key | None, str]]) -> list[float]:
        layer = self._layers[k]
        width = layer.weight.shape[1] * layer.trains_weight + layer.trains_bias
        return stacked_norms(self._here, k, asked, self.processes, width)

    # Where there is no way in pieces

    def joined(self) -> tuple[Any, Tensor]:
        """All batches as one, on process 0."""
        found: tuple[Any, Tensor] = self._ask("_joined")
        return found

    def _joined(self) -> tuple[Any, Tensor] | None:
        parts = self._each(lambda: [self.batches.joined()] if any(True for _ in self.batches) else [])
        return Batches(parts).joined() if parts else None


_SERVED = ("_told", "_columns", "_bent", "_norms", "_joined")
__all__ = ["Pieces"]
