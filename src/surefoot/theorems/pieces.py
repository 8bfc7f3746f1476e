r"""All the data in batches, on one process or several.

The theorems need sums over samples, maxima over samples, and two kinds of matrices: the Gram matrix of the
Jacobian, whose blocks belong to pairs of batches, and matrices with a row for each parameter, which are sums over
batches (:mod:`surefoot.theorems.piece`). So batches are read one at a time, and again for each question. Only
outputs, targets and a few numbers are kept of all samples.

With several processes, process 0 decides and keeps the matrices; each process answers for its own batches. For the
Gram matrix, the inputs of each batch are sent to all processes once, and each process sends the blocks of its rows
to process 0, values and errors: about :math:`8n^2` bytes for n rows in all. For K of layered networks the Gram
matrices of the inputs of layers are added up, for each norm the square of the width; for strict minima, matrices
of p parameters, :math:`8p^2` bytes. Activations stay where they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from surefoot.batches import (
    Batches,
    digest_of,
    kind_of,
    numbered,
    refuse_other_models,
    refuse_statistics,
    tensors_of,
)
from surefoot.calculus.adjoint.gradient import ProvedGradient, proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.certificate.pieces import InPieces
from surefoot.certificate.proving import certify_proved
from surefoot.certificate.record import Certificate
from surefoot.certificate.summed import ProvedSum
from surefoot.errors import EvaluationError
from surefoot.guarantees import GuaranteeError
from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import up
from surefoot.objectives import Objective
from surefoot.processes import Processes
from surefoot.scalar import Rounded
from surefoot.theorems.affine import Affine
from surefoot.theorems.bending import AT_ONCE, Bent, Here, Key, stacked_norms
from surefoot.theorems.layered import Layer, Layered, read_layers
from surefoot.theorems.linear import Along, in_proportion, rows_at_once
from surefoot.theorems.piece import Piece, Told
from surefoot.value.loader import is_weightless

_ROWS = 512  # rows of a block of the Gram matrix
_WEIGHED = 1500  # rows that block weights are computed from
_Answer = TypeVar("_Answer")


class Pieces:
    """All batches of all processes.

    Public methods are called on process 0, inside of :meth:`led`; the others run on every process.

    Args:
        model: the network; it is not changed.
        batches: batches of this process: their numbers, inputs and targets. A batch without a number is the only
            one.
        objective: a loss without targets.
        processes: processes that have a part of the data each, or ``None``.
        thorough: whether outputs of single samples are looked at one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches | list[tuple[None, Any, Tensor]],
        objective: Objective,
        processes: Processes | None = None,
        thorough: bool = False,
    ) -> None:
        self.model, self.batches, self.objective, self.processes = model, batches, objective, processes
        self._thorough, self._along = thorough, Along()
        self.certified: InPieces | None = None
        if isinstance(batches, Batches):
            self.certified = InPieces(model, batches, objective, processes=processes)
        self._here = Here(self._layered)
        self._known: dict[Any, Analysis] = {}
        self._only: Piece | None = None
        self._shares: list[float] | None = None
        everyone = [self._kind()] if processes is None else processes.gathered(self._kind)
        if processes is not None:
            held = [*model.parameters(), *model.buffers()]
            refuse_other_models(processes.gathered(lambda: digest_of(held)))
        self._counts = [count for count, _, _ in everyone]
        if not sum(self._counts):
            raise EvaluationError("the loader has no batches: there is nothing to evaluate")
        self.is_layered = all(layers is not None for count, layers, _ in everyone if count)
        self._layers: tuple[Layer, ...] = next((layers for _, layers, _ in everyone if layers), ())
        self.order: dict[str, int] = next(order for count, _, order in everyone if count)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one batch, so that batches are read anew for each question."""
        return sum(self._counts) > 1

    def _kind(self) -> tuple[int, tuple[Layer, ...] | None, dict[str, int]]:
        """The number of batches of this process, the layers of the network without their weights (``None`` if it
        is not layered), and the parameters with their sizes.
        """
        first, count = None, 0
        for number, x, y in self.batches:
            with numbered(number):
                first = self._piece(x, y) if first is None else first
            count += 1
        if first is None:
            return 0, None, {}
        self._only = first if count == 1 else None
        first.is_all = count == 1 and self.processes is None
        layers = None if first.layered is None else tuple(layer.outlined() for layer in first.layered.layers)
        return count, layers, first.order

    def _piece(self, x: Any, y: Tensor | None = None) -> Piece:
        """The network on a batch; batches of one shape share their reading."""
        kind = kind_of(*tensors_of(x))
        network = Analysis.of(self.model, x, None, self._known.get(kind))
        network.require_values()
        self._known[kind] = Analysis(self.model, x, None, network.reading, network.values)
        objective = self.objective
        if self.certified is not None:
            refuse_statistics(network.reading.graph)
        if y is not None and (self.certified is None or not is_weightless(objective.options, y)):
            objective = objective.bound_to(y)
        return Piece(network, objective, y, self._along, self._thorough)

    def _pieces(self, first: int = 0) -> Iterator[tuple[int, Piece]]:
        """The batches of this process from place ``first`` on, with their places among all batches."""
        before = 0 if self.processes is None else sum(self._counts[: self.processes.rank])
        for place, (number, x, y) in enumerate(self.batches if self._only is None else [(None,) * 3], before):
            if place < first:
                continue
            with numbered(number):
                piece = self._only or self._piece(x, y)
                if self.is_layered and piece.layered is None:
                    raise EvaluationError(
                        "the network is not one linear layer after the other, which it is on other batches: give "
                        "them samples of one shape"
                    )
            piece.share = 1.0 if self._shares is None else self._shares[place]
            yield place, piece

    def _layered(self) -> Iterator[Layered]:
        return (piece.layered for _, piece in self._pieces() if piece.layered is not None)

    # What process 0 asks for

    def led(self, lead: Callable[[], Any]) -> Any:
        """The result of process 0, on all processes."""
        return lead() if self.processes is None else self.processes.led(lead, self._serve, GuaranteeError)

    def _serve(self, word: Any) -> object:
        if isinstance(word, tuple) and isinstance(word[0], str) and word[0] in _SERVED:
            return getattr(self, word[0])(*word[1:])
        assert self.certified is not None
        return self.certified.serve(word)

    def _ask(self, method: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Call a method on all processes; returns its result on process 0."""
        if self.processes is not None:
            self.processes.ask((method.__name__, *arguments))
        return method(*arguments)

    def _gathered(self, compute: Callable[[], list[Any]]) -> list[Any]:
        """On process 0, the lists of all processes, one after the other."""
        parts = [compute()] if self.processes is None else self.processes.collected(compute)
        return [one for part in parts for one in part]

    def each(self, name: str, *arguments: Any) -> list[Any]:
        """The results of a method of every batch, in order."""
        return self._ask(self._each, name, arguments)

    def _each(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        return self._gathered(lambda: list(self._answers(name, arguments)))

    def _answers(self, name: str, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """The results of batches of this process that have a share."""
        return (getattr(piece, name)(*arguments) for _, piece in self._pieces() if piece.share)

    def summed(self, name: str, *arguments: Any) -> tuple[Tensor, float] | None:
        """The sum over batches of a matrix with a bound on its error; ``None`` if a batch has none.

        Sums of k matrices are off by at most ku times the sum of their Frobenius norms.
        """
        return self._ask(self._summed, name, arguments)

    def _summed(self, name: str, arguments: tuple[Any, ...]) -> tuple[Tensor, float] | None:
        total: Tensor | None = None
        shares, wrong, sizes = 0, 0.0, 0.0

        def add() -> None:
            nonlocal total, shares, wrong, sizes
            for answer in self._answers(name, arguments):
                if answer is None:
                    wrong = math.inf
                    return
                value, error = answer
                alone = self._only is not None and self.processes is None
                total = (value if alone else value.clone()) if total is None else total.add_(value)
                shares, wrong, sizes = shares + 1, wrong + error, sizes + frobenius_norm(value)

        if self.processes is None:
            add()
        else:
            self.processes.together(add)
            parts = self.processes.gathered(lambda: (None if total is None else total.shape, shares, wrong, sizes))
            shapes, *numbers = zip(*parts, strict=True)
            shares, wrong, sizes = (sum(each) for each in numbers)
            if wrong < math.inf:
                shape = next(shape for shape in shapes if shape is not None)
                total = torch.zeros(shape, dtype=torch.float64) if total is None else total
                self.processes.add([total])
        if total is None or not wrong < math.inf:
            return None
        return total, up(wrong + (2.0**-51 * shares * sizes if shares > 1 else 0.0), 2 * shares + 8)

    @cached_property
    def _told(self) -> list[Told]:
        is_mean = self.certified is not None and self.certified.is_mean
        return self.each("told", is_mean)

    @cached_property
    def outputs(self) -> Tensor:
        """The outputs of all samples, samples × outputs, as computed."""
        return torch.cat([one.outputs for one in self._told])

    @property
    def error(self) -> float:
        """A bound on the norm of the error of the outputs."""
        return up(math.hypot(*(one.error for one in self._told)), len(self._told))

    @cached_property
    def bound(self) -> Objective:
        """The objective with the targets of all samples."""
        return self.objective.bound_to(torch.cat([one.targets for one in self._told]))

    @property
    def like_outputs(self) -> Tensor:
        """A tensor of the shape of all outputs."""
        return self.outputs.reshape(len(self.outputs), *self._told[0].shape)

    @property
    def count(self) -> int | None:
        """The number of samples; ``None`` if no batch can be drawn of them."""
        counts = self.each("count")
        return None if None in counts else sum(counts)

    def share(self) -> None:
        """Tell every batch its share of the objective."""
        total = sum((one.weight for one in self._told), Fraction(0))
        if not total:
            raise EvaluationError("no batch has a sample with a weight: there is no objective")
        is_mean = self.certified is not None and self.certified.is_mean
        self._ask(self._share, [float(one.weight / total) if is_mean else 1.0 for one in self._told])

    def _share(self, shares: list[float]) -> None:
        self._shares = shares

    @cached_property
    def _firsts(self) -> list[int]:
        """The first row of each batch, and the number of rows."""
        return list(itertools.accumulate((one.outputs.numel() for one in self._told), initial=0))

    def _blocks(self, factors: Mapping[str, float] | None, stop: int) -> Iterator[tuple[int, int, Rounded]]:
        """The lower triangle of the Gram matrix up to a row, parameters times factors: first row, first column,
        block.
        """
        place = 0
        for rank, count in enumerate(self._counts):
            for number in range(count):
                if self._firsts[place] < stop:
                    yield from self._ask(self._columns, rank, number, place, self._firsts, factors, stop)
                place += 1

    def _columns(
        self, rank: int, number: int, place: int, firsts: list[int], factors: Mapping[str, float] | None, stop: int
    ) -> list[tuple[int, int, Rounded]]:
        """The blocks of one batch with itself and all that follow, up to a row."""

        def inputs() -> Any:
            return next(itertools.islice(self.batches, number, None))[1]

        only = self._only if self.processes is None or self.processes.rank == rank else None
        if self.processes is not None:
            x = self.processes.passed_on(rank, inputs)
        else:
            x = inputs() if only is None else None
        batch = self._piece(x) if only is None else only

        def compute() -> list[tuple[int, int, Rounded]]:
            blocks, column = [], firsts[place]
            for later, piece in self._pieces(place):
                if firsts[later] >= stop:
                    break
                jacobian: Any = batch.jacobian if later == place else piece.jacobian
                rows, panel = min(firsts[later + 1], stop) - firsts[later], getattr(jacobian, "panel", _ROWS)
                for start in range(0, rows, panel):
                    end = min(start + panel, rows)
                    width = end if later == place else firsts[place + 1] - column
                    block = jacobian.times(start, end, batch.jacobian, width, factors)
                    blocks.append((firsts[later] + start, column, block))
            return blocks

        return self._gathered(compute)

    def gram(self, factors: Mapping[str, float] | None = None) -> Symmetric:
        """:math:`JJ^\\top`, each parameter times its factor, if there are factors."""
        size = self._firsts[-1]
        return Symmetric.of_blocks(size, self._blocks(factors, size))

    def block_weights(self) -> dict[str, float]:
        """:math:`L_b` by path, powers of four and at least one: about in proportion to :math:`\\|J_bJ_b^\\top\\|`
        of the first rows, so that no block turns the outputs much faster than another. Any weights are right.
        """
        blocks = [layer.paths for layer in self._layers if layer.trains] or [(path,) for path in self.order]
        stop, sizes = min(self._firsts[-1], _WEIGHED), dict[str, float]()
        if not self.is_layered:
            stop = min(stop, rows_at_once(sum(self.order.values())))
        for paths in blocks:
            total = 0.0
            for row, column, block in self._blocks({path: float(path in paths) for path in self.order}, stop):
                squares = block.value.square()
                before = row - column if row < self._end(column) else squares.shape[1]
                total += 2 * float(squares[:, :before].sum()) + float(squares[:, before:].sum())
            sizes |= dict.fromkeys(paths, total**0.5)
        return in_proportion(sizes)

    def _end(self, first: int) -> int:
        """The end of the batch with this first row."""
        return self._firsts[self._firsts.index(first) + 1]

    # How fast the Jacobian changes (bending.Source)

    def shape(self) -> tuple[Layer, ...]:
        """The layers, without weights."""
        return self._layers

    def bent(self, radius: float, roots: tuple[float, ...]) -> list[Bent]:
        """The numbers of each batch on a ball."""
        return self._ask(self._bent, radius, roots)

    def _bent(self, radius: float, roots: tuple[float, ...]) -> list[Bent]:
        return self._gathered(lambda: self._here.bent(radius, roots))

    def norms(self, k: int, asked: Sequence[tuple[Key | None, str]]) -> list[float]:
        """As in :class:`~surefoot.theorems.bending.Source`."""
        if self.processes is None:
            return self._here.norms(k, asked)
        some = (list(asked[at : at + AT_ONCE]) for at in range(0, len(asked), AT_ONCE))
        return [norm for each in some for norm in self._ask(self._norms, k, each)]

    def _norms(self, k: int, asked: list[tuple[Key | None, str]]) -> list[float]:
        layer = self._layers[k]
        width = layer.weight.shape[1] * layer.trains_weight + layer.trains_bias
        return stacked_norms(self._here, k, asked, self.processes, width)

    # Questions that are not answered batch by batch

    @property
    def affine(self) -> Affine | None:
        """The network on the only batch, if it is affine in the trained parameters."""
        return None if self._only is None else self._only.affine

    def gradient(self) -> ProvedGradient | ProvedSum:
        """The gradient of the loss at the weights."""
        if self.certified is not None:
            return self.certified.gradient()
        assert self._only is not None
        return proved_gradient(self._only.whole)

    def certificate(self) -> Certificate:
        """The certificate of the loss, on the ball of the longest step that is proved."""
        if self.certified is not None:
            return self.certified.longest()
        assert self._only is not None
        return certify_proved(self.model, self._only.network.x, objective=self._only.objective)

    def joined(self) -> Layered | None:
        """The network layer by layer on all samples, whose batches are joined on process 0; ``None`` if its layers
        read other numbers then.
        """
        if self._only is not None and self.processes is None:
            return self._only.layered
        x, inputs = Batches(self._ask(self._inputs)).joined()
        layered = read_layers(Analysis.of(self.model, x))
        return layered if layered is not None and torch.equal(layered.inputs, inputs) else None

    def _inputs(self) -> list[Any]:
        """For each batch the input of the network and that of its first layer."""
        pairs = ((piece.network.x, piece.layered) for _, piece in self._pieces())
        return self._gathered(lambda: [(x, layered.inputs) for x, layered in pairs if layered is not None])


_SERVED = ("_each", "_summed", "_share", "_columns", "_bent", "_norms", "_inputs")
