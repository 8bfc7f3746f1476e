r"""The automatic-differentiation oracle of data in pieces: outputs of all samples, activations of one batch.

The value is the outputs of all batches, one below the other, as the model would give them on the joined batch. A
pull-back is the sum over batches, :math:`\sum_b J_b^\top\mu_b`, a push-forward puts the rows :math:`J_bv` below
each other. Each batch is run anew for each call, so that the memory is that of one of them; only where there is a
single one, what its derivatives need is kept.

The batches may lie with several processes. Process 0 asks for a pass (:meth:`surefoot.processes.Processes.led`)
and sends what it is about: slopes and directions. Gradients come back added up, outputs and push-forwards row by
row; activations stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.batches import digest_of, refuse_other_models
from surefoot.chain.autodiff import Autodiff
from surefoot.chain.recorded import run_graph
from surefoot.errors import ChainError
from surefoot.graph import Graph
from surefoot.processes import Processes
from surefoot.program.checks import with_gradients

Piece = tuple[Graph, Sequence[Tensor]]
Part = Callable[[Autodiff, slice], Mapping[str, Tensor]]  # gradients of a batch


class Batched:
    """The value of a chain on all batches, and its derivative as a linear operator; compare :class:`Autodiff`.

    Args:
        pieces: reads all batches that are here, in the same order each time.
        parameters: where, by path, in the same order on all processes.
        processes: those that hold the data, or ``None``.

    Attributes:
        value: the outputs of all samples, detached.
        calls: how many pull-backs and push-forwards of all data were made so far.
        first: the number of the first row of this process.

    Raises:
        ChainError: if the model returns several tensors, or outputs that do not fit below each other.
        EvaluationError: if the processes differ in their parameters.
        ProcessError: if one of them failed.
    """

    def __init__(
        self, pieces: Callable[[], Iterator[Piece]], parameters: Mapping[str, Tensor], processes: Processes | None
    ) -> None:
        self._pieces, self.parameters, self.processes = pieces, dict(parameters), processes
        self._varying = {path: value for path, value in self.parameters.items() if value.is_floating_point()}
        self._only: Autodiff | None = None
        self.calls, self._rows = 0, []
        here = self._together(lambda: self._outputs(self.parameters))
        self._rows = [len(output) for output in here]
        count = sum(self._rows)
        like = (tuple(here[0].shape[1:]), here[0].dtype) if here else None
        kinds = [(count, like, 0)]
        if processes is not None:
            kinds = processes.gathered(lambda: (count, like, digest_of(self.parameters.values())))
            refuse_other_models([weights for *_, weights in kinds])
        shapes = {kind for _, kind, _ in kinds if kind is not None}
        if len(shapes) != 1:
            what = "outputs of the batches have different shapes or types" if shapes else "there are no batches"
            raise ChainError(f"{what}: data in pieces are batches with outputs that fit below each other")
        ((self._tail, self._dtype),) = shapes
        self._total = sum(rows for rows, *_ in kinds)
        self.first = sum(rows for rows, *_ in kinds[: processes.rank]) if processes is not None else 0
        self.value = self._whole(here)

    def pullback(self, slope: Tensor) -> dict[str, Tensor]:
        r""":math:`\sum_bJ_b^\top\mu_b`, by parameter path, for a slope of the shape of the value."""
        if slope.shape != self.value.shape or slope.dtype != self.value.dtype:
            expected, given = (tuple(self.value.shape), self.value.dtype), (tuple(slope.shape), slope.dtype)
            raise ChainError(f"the slope has shape and type {given}, the value {expected}")
        self.calls += 1
        return self._asked("pull", slope)

    def pushforward(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Jv for all samples, of the shape of the value; a missing path means zero."""
        self.calls += 1
        zeros = {path: torch.zeros_like(value) for path, value in self._varying.items()}
        return self._asked("push", {**zeros, **direction})

    def bent(self, direction: Mapping[str, Tensor], slope: Tensor, curved: Tensor) -> dict[str, Tensor]:
        r""":math:`\nabla^2\langle\mu, \psi\rangle v + J^\top c`: with :math:`c = \nabla^2h\,Jv` a product with the
        second derivative of the loss; it counts as one call, besides the one for Jv."""
        self.calls += 1
        return self._asked("bend", {path: direction[path] for path in self._varying}, slope, curved)

    def at(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The outputs of all samples at other parameters."""
        return self._asked("outputs_at", {path: parameters[path] for path in self.parameters})

    def serve(self, word: str) -> None:
        """On a process that does not lead: take part in a pass."""
        getattr(self, f"_{word}")(*self._places(word))

    def _places(self, word: str) -> tuple[Any, ...]:
        """Room for what process 0 sends."""
        rows = self.value.new_empty(self.value.shape)
        weights = {path: torch.empty_like(value) for path, value in self._varying.items()}
        if word == "outputs_at":
            return ({path: torch.empty_like(value) for path, value in self.parameters.items()},)
        return {"pull": (rows,), "push": (weights,), "bend": (weights, rows, rows.clone())}[word]

    def _asked(self, word: str, *given: Any) -> Any:
        if self.processes is not None:
            self.processes.ask(word)
        return getattr(self, f"_{word}")(*given)

    def _shared(self, *given: Any) -> None:
        """What process 0 has, on all."""
        if self.processes is not None:
            for one in given:
                self.processes.spread(one.values() if isinstance(one, Mapping) else [one])

    def _together(self, compute: Callable[[], Any]) -> Any:
        return compute() if self.processes is None else self.processes.together(compute)

    def _pull(self, slope: Tensor) -> dict[str, Tensor]:
        self._shared(slope)
        return self._summed(lambda oracle, rows: oracle.pullback(slope[rows]))

    def _push(self, direction: Mapping[str, Tensor]) -> Tensor:
        self._shared(direction)
        found: list[Tensor] = []
        self._visit(lambda oracle, _: found.append(oracle.pushforward(direction).detach()))
        return self._whole(found)

    def _bend(self, direction: Mapping[str, Tensor], slope: Tensor, curved: Tensor) -> dict[str, Tensor]:
        self._shared(direction, slope, curved)
        return self._summed(lambda oracle, rows: oracle.bent(direction, slope[rows], curved[rows]))

    def _outputs_at(self, parameters: Mapping[str, Tensor]) -> Tensor:
        self._shared(parameters)
        return self._whole(self._together(lambda: self._outputs(parameters)))

    @with_gradients()
    def _outputs(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            found = [run_graph(graph, parameters, inputs) for graph, inputs in self._pieces()]
        if any(len(outputs) != 1 or not outputs[0].dim() for outputs in found):
            raise ChainError("data in pieces need a model that returns one tensor, with a row for each sample")
        return [outputs[0] for outputs in found]

    def _visit(self, visit: Callable[[Autodiff, slice], object]) -> None:
        """Call it with the oracle of each batch and its rows; one is dropped before the next is made."""

        def all_of_them() -> None:
            place = self.first
            if len(self._rows) == 1:
                if self._only is None:
                    ((graph, inputs),) = self._pieces()
                    self._only = Autodiff(graph, inputs, self.parameters)
                visit(self._only, slice(place, place + self._rows[0]))
                return
            for rows, (graph, inputs) in zip(self._rows, self._pieces(), strict=True):
                visit(Autodiff(graph, inputs, self.parameters), slice(place, place + rows))
                place += rows

        self._together(all_of_them)

    def _summed(self, part: Part) -> dict[str, Tensor]:
        """The sum over the batches of all processes; in double precision, then as the parameters are."""
        sums = {path: torch.zeros_like(value, dtype=torch.float64) for path, value in self._varying.items()}

        def add_up(oracle: Autodiff, rows: slice) -> None:
            for path, slope in part(oracle, rows).items():
                sums[path] += slope

        self._visit(add_up)
        if self.processes is not None:
            self.processes.add(sums.values())
        return {path: value.to(self._varying[path].dtype) for path, value in sums.items()}

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all processes."""
        if self.processes is None:
            return torch.cat(list(parts))
        like = next(iter(self.parameters.values()))
        whole = torch.zeros(self._total, *self._tail, dtype=self._dtype, device=like.device)
        if parts:
            whole[self.first : self.first + sum(self._rows)] = torch.cat(list(parts))
        self.processes.add([whole])
        return whole
