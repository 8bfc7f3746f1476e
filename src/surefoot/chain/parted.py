"""The automatic-differentiation oracle where weights lie with several processes, and none has them whole.

All processes call it together. They pass and get their parts of directions and gradients; outputs, slopes and
push-forwards are those of all samples, the same on all. A weight is gathered when an operation reads it, and so is
a direction (:mod:`surefoot.graph.fetched`); the gradient in a weight is summed up as soon as it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.chain.batched import Batched, Part, Piece
from surefoot.graph.nodes import in_double
from surefoot.graph.outline import Outline
from surefoot.processes import ProcessLost


class Parted(Batched):
    """The value of a chain on all data, and its derivative; compare :class:`surefoot.chain.batched.Batched`.

    Args:
        pieces: reads all batches that are here, in the same order each time.
        outline: of the model.
        parts: those of the weights that are here, by path.
        double: whether everything is in double precision, whatever the model's.
    """

    def __init__(
        self,
        pieces: Callable[[], Iterator[Piece]],
        outline: Outline,
        parts: Mapping[str, Tensor],
        *,
        double: bool = False,
    ) -> None:
        self._outline, self._parts, self._double = outline, parts, double
        self._weights = outline.weights(parts, measured=False)
        super().__init__(pieces, self._typed(self._weights), outline.processes)

    def _typed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {path: in_double(value) for path, value in weights.items()} if self._double else weights

    def _digest(self) -> int:
        return 0

    def _asked(self, word: str, *given: Any) -> Any:
        return getattr(self, f"_{word}")(*given)

    def _shared(self, *given: Any) -> None:
        """All have it."""

    def _together(self, compute: Callable[[], Any]) -> Any:
        """What it gives here. If it raises on one process, all raise."""
        weights, processes, failure = self._weights, self._outline.processes, None
        try:
            with weights.open():
                found = compute()
        except ProcessLost:
            raise
        except Exception as error:
            failure = error
        return processes.together(lambda: _raised(failure)) if weights.failed else found

    def pushforward(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Jv for all samples, for the parts of v that are here; a missing path means zero."""
        self.calls += 1
        return self._push(self._along(direction))

    def bent(self, direction: Mapping[str, Tensor], slope: Tensor, curved: Tensor) -> dict[str, Tensor]:
        """The parts of a product with the second derivative of the loss, for those of a direction."""
        self.calls += 1
        return self._bend(self._along(direction), slope, curved)

    def _along(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        missing = {path: torch.zeros_like(part) for path, part in self._parts.items() if path not in direction}
        return self._weights.along({**missing, **direction})

    def at(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The outputs of all samples at other weights, of which these parts are here."""
        here, self._weights = self._weights, self._outline.weights(parameters, measured=False)
        try:
            return self._whole(self._together(lambda: self._outputs(self._typed(self._weights))))
        finally:
            self._weights = here

    def _summed(self, part: Part) -> dict[str, Tensor]:
        """The parts of the sum over the batches of all processes; summed up in double precision."""
        self._weights.slopes = {}
        self._visit(lambda oracle, rows: part(oracle, rows, self._weights.add))
        found, self._weights.slopes = self._weights.slopes, {}
        return {
            path: found[path].to(self.parameters[path].dtype) if path in found else torch.zeros_like(value)
            for path, value in self._parts.items()
        }


def _raised(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
