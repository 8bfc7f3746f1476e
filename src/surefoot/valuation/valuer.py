"""A value with its error, and one function evaluated at many weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from surefoot.calculus.leaves import captured
from surefoot.errors import SurefootError, UnsupportedOperation
from surefoot.valuation.passes import Constants, Run
from surefoot.valuation.propagation import Errors, errors, forward_errors
from surefoot.valuation.slopes import Slopes, slopes_of
from surefoot.valuation.tape import Tape, tape_of

# How far parameters may move, relative to their norms, before slopes are asked for anew.
_WIDEST, _LEAST = 0.4, 0.01
_ATTEMPTS = 4


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
        several: whether passes may be made with other inputs and targets of the same shapes. Then what is known
            of the operations holds for all inputs up to a size, and not only for these.
    """

    def __init__(self, tape: Tape, constants: Constants, *, several: bool = False) -> None:
        self.tape, self.constants, self.several = tape, constants, several
        self._slopes: Slopes | None = None
        self._drift = _WIDEST

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

    def run(
        self, weights: Mapping[str, Tensor], *, derivatives: bool = True, constants: Constants | None = None
    ) -> Run:
        """One pass at these weights, by path; with other inputs and targets if these are several."""
        by_name = {leaf.name: weights[leaf.path] for leaf in self.tape.graph.parameters}
        plan = None if self._slopes is None else self._slopes.plan
        chosen = self.constants if constants is None else constants
        return self.tape.run(by_name, chosen, derivatives=derivatives, plan=plan)

    def gradient(self, run: Run) -> dict[str, Tensor]:
        """The gradient of a pass, by path."""
        return {leaf.path: run.gradient[leaf.name] for leaf in self.tape.graph.parameters}

    def enclosed(self, run: Run) -> Evaluation:
        """The interval of the exact value: by reverse mode, or by forward mode if no derivatives were asked for.

        Raises:
            EvaluationError: if the value is not finite.
            UnsupportedOperation: naming an operation that has no rule.
        """
        if not math.isfinite(run.value):
            raise EvaluationError(
                f"the objective is {run.value} at these weights: check data and weights for NaN and huge entries"
            )
        known = self._slopes
        usable = known is not None and run.values.keys() >= known.plan.keep  # a pass may be older than the slopes
        found = self._errors(run, known) if usable and known is not None else None
        if found is not None and (found.total < math.inf or run.whole):
            return Evaluation(run.value, found.total if found.total >= 0 else math.inf)
        again = run if run.whole else self.tape.run(run.parameters, run.constants, derivatives=run.derivatives)
        return Evaluation(run.value, (self._anew(again) + abs(run.value - again.value)) * (1 + 2.0**-50))

    def _anew(self, run: Run) -> float:
        """The error, from slopes that are asked for again: with room for errors larger than sizes, and for
        as wide a neighbourhood of the weights as does not matter for the error.
        """
        wide: Mapping[str, float] = {}
        attempts = 0
        while attempts < _ATTEMPTS:
            self._slopes, fresh = self._asked(run, wide)
            found = self._forward_or_reverse(run, fresh)
            holds = fresh.hold(run, found.apart)
            settled = not run.derivatives or found.total <= 2 * found.leading
            if holds and (settled or self._drift <= _LEAST):
                return found.total if found.total >= 0 else math.inf
            if holds or (self._drift > _LEAST and not all(map(math.isfinite, found.apart.values()))):
                self._drift /= 4
                continue
            wide = found.apart
            attempts += 1
        return math.inf

    def _asked(self, run: Run, wide: Mapping[str, float]) -> tuple[Slopes | None, Slopes]:
        """The slopes that may be kept, and those of this pass."""
        if self.several:
            try:
                common = slopes_of(self.tape, run, self._drift, several=True, errors=wide)
            except UnsupportedOperation:  # a rule that asks for the values of inputs
                return None, slopes_of(self.tape, run, self._drift, errors=wide)
            return common, common
        fresh = slopes_of(self.tape, run, self._drift, errors=wide)
        return fresh, fresh

    def _forward_or_reverse(self, run: Run, slopes: Slopes) -> Errors:
        return (errors if run.derivatives else forward_errors)(self.tape, run, slopes)

    def _errors(self, run: Run, slopes: Slopes) -> Errors | None:
        """``None`` where the slopes do not hold."""
        found = self._forward_or_reverse(run, slopes)
        return found if slopes.hold(run, found.apart) else None


__all__ = ["Evaluation", "EvaluationError", "Valuer"]
