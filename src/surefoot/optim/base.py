"""What every optimizer with a guarantee shares: one step after another, and their records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from surefoot.objectives import Objective, Regularizer, Ridge
from surefoot.optim.evaluation import Closure, OptimizerError, check_objective
from surefoot.optim.known_function import KnownFunction
from surefoot.optim.record import Stationarity, StepRecord, best_stationarity
from surefoot.optim.stored import Proposal
from surefoot.optim.vectors import held_by
from surefoot.optim.watch import Fingerprint, Watch
from surefoot.program.checks import check_model, plainly, unwrapped
from surefoot.theorems.deciding import Method, convergence
from surefoot.theorems.record import Convergence
from surefoot.torch_private import hooked

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class GuaranteedOptimizer(KnownFunction):
    """A ``torch.optim.Optimizer`` that knows the function it minimises.

    A subclass implements :meth:`advance`, and :meth:`forget` if it keeps anything from one step to the next. A
    step is taken as a whole or not at all: if anything is raised on the way, parameters and buffers are exactly
    what they were, and so is the history. There is no ``lr`` to set: the step size follows from a proof, and the
    one that was used stands in the history.

    Args:
        model: the network.
        objective: a loss without targets, such as ``surefoot.CrossEntropy()``; the targets come with each step.
        regularizer: a function of the parameters that is added to the loss, or ``None``.
        params: the parameters that are optimised, or parameter groups; all that are trainable by default. What is
            not among them is a constant in every step, like a frozen parameter.
        lower: a number that the objective never falls below; 0 by default for those that are not negative.
        until: ``"proved"`` to look after each step whether convergence from there is proved
            (:func:`surefoot.convergence`); then the verdict is :attr:`convergence`, and there are no more steps.
        progress: called with the record of each step.
        defaults: of the parameter groups.

    Attributes:
        history: one record per step.
        changed: whether the function was changed before the last step.
        quiet: during a step, whether a quick look before it found weights and function as the last step left them.
        convergence: the last verdict, with ``until="proved"``; ``None`` before the first.

    >>> issubclass(sf.CertifiedDescent, sf.optim.GuaranteedOptimizer)
    True
    """

    theorem: Method = "gradient"  # the method whose convergence ``until="proved"`` looks for
    takes: tuple[type[Regularizer], ...] = (Regularizer,)

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None,
        *,
        regularizer: Regularizer | None = None,
        params: Parameters | None = None,
        lower: float | None = None,
        until: Literal["proved"] | None = None,
        progress: Callable[[StepRecord], object] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes the model itself, since it has to know the function: write "
                f"{type(self).__name__}(model, surefoot.CrossEntropy()), and params=... for a part of its "
                f"parameters. Got {type(model).__name__}"
            )
        model = unwrapped(model)
        objective = check_objective(objective, "the data, step(x, y)")
        if lower is None:
            lower = 0.0 if objective.nonnegative else -math.inf
        elif not math.isfinite(lower):
            raise ValueError(f"a lower bound of the objective is a finite number, got {lower!r}")
        if regularizer is not None and not isinstance(regularizer, self.takes):
            names = " or ".join(f"surefoot.objectives.{kind.__name__}" for kind in self.takes)
            raise TypeError(f"{type(self).__name__} takes a {names} as its regulariser, got {regularizer!r}")
        if until not in (None, "proved"):
            raise ValueError(f"until is 'proved' or None, got {until!r}")
        if until is not None and not isinstance(regularizer, Ridge | None):
            raise ValueError(f"until='proved' knows theorems for a ridge or no regulariser, got {regularizer!r}")
        self.model, self.objective, self.lower, self.progress = model, objective, float(lower), progress
        self.until = until
        self.convergence: Convergence | None = None
        self.regularizer = regularizer
        self.history: list[StepRecord] = []
        self.changed = False  # the function, since the last step
        self.quiet = False
        self._held: list[int] = []  # the parameters of the groups at the last step
        self.fingerprint, self.watch = Fingerprint(), Watch()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("no parameter of the model asks for gradients: call model.requires_grad_(True)")
        chosen: Any = params
        if params is None:
            chosen = [value for value in model.parameters() if value.requires_grad]
        super().__init__(chosen, dict(defaults or {}))

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """Take one step: write the new parameters and return the record. Raising undoes the step."""
        raise NotImplementedError

    @hooked
    @plainly
    def step(self, x: Any = None, y: Any = None, closure: Closure | None = None) -> float:  # type: ignore[override]
        """One step on the batch; returns the loss before it.

        Args:
            x: the input: a tensor, a tuple of tensors, or a dict of keyword arguments.
            y: the targets; none for an objective that takes none.
            closure: computes ``(outputs, loss)`` at the present parameters and replaces the optimizer's own
                forward pass, to share it with other code. The loss must be the objective of the outputs and ``y``,
                without the regulariser.

        Raises:
            OptimizerError: if the step cannot be taken. The parameters are as before.
        """
        self.check_data(x, y)
        if not self.history:
            check_model(self.model)
        with self._looking() as reset, self.unchanged_on_error(), self._others_constant():
            if self._is_done(x, y, reset):
                return self.history[-1].loss
            record = self.advance(x, y, closure)
            self._append(record, "the function" if self.changed else "the weights" if reset else "")
        if self.until is not None:
            with self._others_constant():
                self.convergence = convergence(self.model, x, self.objective.bound_to(y), self.ridge, self.theorem)
        if self.progress is not None:
            self.progress(self.history[-1])
        return record.loss

    @contextmanager
    def _looking(self) -> Iterator[bool]:
        """Look at what was changed before the body, and remember what it leaves; gives whether weights were."""
        held = list(map(id, held_by(self)))
        options = self._options
        self.quiet = held == self._held and self.watch.undisturbed(options)
        self._held, quiet = held, self.quiet
        try:
            reset = not quiet and self.watch.weights_changed(self.model)
            self.changed = not quiet and self.look_around()
            if not quiet:
                self.watch.guard(self.model)
            yield reset
        except BaseException:
            self.watch.unguard()  # which may be about another function than the last step was
            raise
        finally:
            self.quiet = False
        self.watch.leave(self.model, self.changed, options, quiet=quiet and not self.changed)

    def _is_done(self, x: Any, y: Any, reset: bool) -> bool:
        """Whether convergence from the present weights, on these data, is proved."""
        if self.convergence is None or not self.convergence.proved or reset or self.changed:
            return False
        return self.history[-1].data == self.fingerprint(x, y)

    def take(self, proposal: Proposal, loss: float, size: float, data: str, **more: Any) -> StepRecord:
        """Go to the weights that are proposed, unless a promise is made that is not positive; the record of it.

        Args:
            proposal: the step.
            loss: the objective before it.
            size: the norm of the gradient.
            data: the fingerprint of the batch.
            more: further fields of the record.
        """
        promise, note = proposal.promised, proposal.note
        taken = promise is None or promise > 0
        if taken:
            self.write(proposal.after)
        elif size:
            note = note or "no step: descent cannot be told from round-off here"
        fields = {
            "step_size": proposal.step if taken else 0.0,
            "smoothness": proposal.smoothness,
            "promised_decrease": None if promise is None else max(promise, 0.0),
            "radius": proposal.radius,
        }
        return StepRecord(len(self.history), loss, size, **{**fields, "data": data, "note": note, **more})

    def promises_kept(self) -> str:
        """What the promises of the steps say together."""
        several, runs = len({record.data for record in self.history}) > 1, self.history[-1].run
        what = "the objective of its own mini-batch" if several else "the objective of these data"
        changed = (
            f" Weights or function were changed between steps ({runs + 1} runs): each step speaks of the function "
            "as it was then, stationarity() of the last run."
        )
        taken = sum(record.step_size > 0 for record in self.history)
        which = f"{taken} steps" + (" that were taken" if taken < len(self.history) else "")
        kept = f"Every one of the {which} decreases {what} by what it promised."
        return kept + (changed if runs else "")

    def stationarity(self) -> Stationarity:
        """The smallest gradient norm so far and the proved bound on it; see :func:`best_stationarity`."""
        return best_stationarity(self.history, self.lower)

    def _append(self, record: StepRecord, changed: str) -> None:
        """Add a record. The loss of this step says what the one before it achieved, if both belong to one run."""
        if self.history:
            last = self.history[-1]
            if changed:
                note = f"{changed} changed since the last step: what is proved of the run begins anew"
                record = replace(record, note="; ".join(filter(None, (note, record.note))))
            elif last.data == record.data and last.actual_decrease is None:
                self.history[-1] = replace(last, actual_decrease=last.loss - record.loss)
            if last.run or changed:
                record = replace(record, run=last.run + bool(changed))
        self.history.append(record)


__all__ = ["Closure", "GuaranteedOptimizer", "OptimizerError", "Parameters"]
