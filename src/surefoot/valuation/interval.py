"""The value of an objective in exact arithmetic, as an interval: :func:`evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from surefoot.calculus.leaves import captured
from surefoot.errors import SurefootError
from surefoot.valuation.propagation import Errors, errors
from surefoot.valuation.slopes import Slopes, slopes_of
from surefoot.valuation.tape import Constants, Run, Tape, tape_of


class EvaluationError(SurefootError, RuntimeError):
    """An objective that has no value, or none that can be enclosed."""


@dataclass(frozen=True)
class Evaluation:
    """The value of a function in exact arithmetic, at the weights as they are stored.

    Attributes:
        value: as computed, in double precision.
        error: how far the exact value may be from it.

    >>> found = Evaluation(0.5, 1e-14)
    >>> found.lower < 0.5 < found.upper
    True
    >>> print(found)
    0.5 ± 1.0e-14
    """

    value: float
    error: float

    @property
    def lower(self) -> float:
        """A number that the exact value is not below."""
        return math.nextafter(self.value - self.error, -math.inf)

    @property
    def upper(self) -> float:
        """A number that the exact value is not above."""
        return math.nextafter(self.value + self.error, math.inf)

    def __str__(self) -> str:
        return f"{self.value:.17g} ± {self.error * (1 + 1e-2):.1e}"


class Valuer:
    """Evaluates one function at many weights.

    What is known of its operations is kept as long as it holds (:mod:`surefoot.valuation.slopes`).

    Args:
        tape: the operations.
        constants: inputs, targets and buffers, and what is computed from them (:meth:`Tape.constants`).
    """

    def __init__(self, tape: Tape, constants: Constants) -> None:
        self.tape, self.constants = tape, constants
        self._slopes: Slopes | None = None

    @classmethod
    def of(cls, model: nn.Module, x: Any, objective: nn.Module) -> Valuer:
        """Of the objective of a model on a batch.

        Raises:
            CaptureError: if the model cannot be read.
            ObjectiveError: if the objective does not fit the outputs.
        """
        graph, values = captured(model, x, objective)
        tape = tape_of(graph)
        return cls(tape, tape.constants(values))

    def run(self, weights: Mapping[str, Tensor], *, derivatives: bool = True) -> Run:
        """One pass at these weights, by path."""
        by_name = {leaf.name: weights[leaf.path] for leaf in self.tape.graph.parameters}
        kinks = {} if self._slopes is None else self._slopes.kinks
        return self.tape.run(by_name, self.constants, derivatives=derivatives, kinks=kinks)

    def gradient(self, run: Run) -> dict[str, Tensor]:
        """The gradient of a pass, by path."""
        return {leaf.path: run.gradient[leaf.name] for leaf in self.tape.graph.parameters}

    def enclosed(self, run: Run) -> Evaluation:
        """The interval of the exact value.

        Raises:
            EvaluationError: if the value is not finite.
            UnsupportedOperation: naming an operation that has no rule.
        """
        if not math.isfinite(run.value):
            raise EvaluationError(
                f"the objective is {run.value} at these weights: check data and weights for NaN and huge entries"
            )
        found = None if self._slopes is None else self._errors(run, self._slopes)
        if found is None:
            self._slopes = slopes_of(self.tape, run)
            found = self._errors(run, self._slopes)
        total = math.inf if found is None else found.total
        return Evaluation(run.value, total if total >= 0 else math.inf)

    def _errors(self, run: Run, slopes: Slopes) -> Errors | None:
        """``None`` where the slopes do not hold."""
        found = errors(self.tape, run, slopes)
        return found if slopes.hold(run, found.apart) else None


def evaluate(model: nn.Module, x: Any, objective: nn.Module) -> Evaluation:
    r"""The value of an objective in exact arithmetic, at the weights as they are stored: value ± error.

    All operations are run in double precision, whatever the type of the model, and the round-off of every one of
    them is bounded and carried to the result by reverse mode (:mod:`surefoot.valuation.propagation`), so that
    depth does not multiply it. The function is the real one that the model stands for: single-precision weights
    are exact numbers, activations are exact functions.

    Args:
        model: the network; it is not changed, and its buffers do not move.
        x: a batch: a tensor, a tuple of tensors or a dict of keyword arguments; or any re-iterable of batches
            ``(x, y)`` such as a ``DataLoader``, for the mean over all samples.
        objective: a loss bound to its targets, ``surefoot.CrossEntropy(y)``; without targets where the batches
            bring them.

    Raises:
        CaptureError: if the model cannot be read.
        ObjectiveError: if the objective does not fit.
        UnsupportedOperation: naming an operation whose error is not known.
        EvaluationError: if the value is not finite, or no error can be proved.

    >>> import torch, surefoot as sf
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> found = evaluate(model, torch.randn(16, 4), sf.CrossEntropy(torch.arange(16) % 3))
    >>> found.error < 1e-13
    True
    """
    valuer = Valuer.of(model, x, objective)
    found = valuer.enclosed(valuer.run(dict(model.named_parameters())))
    if not math.isfinite(found.error):
        raise EvaluationError(
            f"no error of the value {found.value:g} can be proved: an operation is too steep at these weights"
        )
    return found


__all__ = ["Evaluation", "EvaluationError", "Valuer", "evaluate"]
