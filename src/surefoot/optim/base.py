"""What every optimizer with a guarantee shares: gradients, records, resuming, and steps that happen or do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.calculus.adjoint.gradient import ProvedGradient, proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.graph import Graph
from surefoot.graph.checks import is_loader, unwrapped
from surefoot.graph.sharded import Sharded
from surefoot.objectives import Objective, Regularizer, Ridge
from surefoot.operations.captured import capture
from surefoot.optim.evaluation import Closure, OptimizerError, check_objective, gradient_of, loss_of, number
from surefoot.optim.record import Stationarity, StepRecord, best_stationarity, from_columns, to_columns
from surefoot.optim.stored import InDouble, Proposal
from surefoot.optim.watch import Fingerprint, Watch
from surefoot.processes import Processes
from surefoot.theorems.deciding import Method
from surefoot.theorems.record import Convergence
from surefoot.theorems.waiting import proved_from_here
from surefoot.torch_private import copied_together, is_sharded

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class _Group(dict[str, Any]):
    """A parameter group that says why it has no learning rate, to schedulers above all."""

    def __missing__(self, key: str) -> Any:
        if key in ("lr", "initial_lr"):
            raise OptimizerError(
                "there is no learning rate to schedule: every step is as long as its proof allows. Take the "
                "scheduler out"
            )
        raise KeyError(key)


class GuaranteedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that knows the function it minimises.

    A subclass implements :meth:`advance`, and :meth:`forget` if it keeps anything from one step to the next. A
    step is taken as a whole or not at all: if anything is raised on the way, parameters and buffers are exactly
    what they were, and so is the history. There is no ``lr`` to set: the step size follows from a proof, and the
    one that was used stands in the history.

    Args:
        model: the network. If its weights lie with several processes (``fully_shard``, DTensor), and only then,
            a plain copy of it is optimised and written back into the shards after each step.
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
    takes_loaders = False  # whether step(loader) is one on the objective of all its batches
    processes: Processes | None = None  # those that have a part of the data each

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
        self._sharded = Sharded(model) if is_sharded(model) else None
        model = unwrapped(model) if self._sharded is None else self._sharded.plain
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
        elif self._sharded is not None:
            chosen = self._sharded.stand_ins(params)
        super().__init__(chosen, dict(defaults or {}))

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """Take one step: write the new parameters and return the record. Raising undoes the step."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what was kept between steps and rests on the function: it is not the same any more."""

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
        self.gather()
        with self._looking() as reset, self.unchanged_on_error(), self._others_constant():
            if self._is_done(x, y, reset):
                return self.history[-1].loss
            record = self.advance(x, y, closure)
            self._append(record, "the function" if self.changed else "the weights" if reset else "")
            if self._sharded is not None:
                self._sharded.write()
        if self.until is not None:
            with self._others_constant():
                self.convergence = proved_from_here(
                    self.model, x, self.objective.bound_to(y), self.ridge, self.theorem
                )
        if self.progress is not None:
            self.progress(self.history[-1])
        return record.loss

    def gather(self) -> None:
        """The weights as they are now, where they lie with several processes, which all call this.

        Raises:
            OptimizerError: if these do not say whose data the objective is about.
        """
        if self._sharded is not None:
            if self.processes is None:
                raise OptimizerError(
                    "the weights of this model lie with several processes, which take each step together: pass "
                    f"{type(self).__name__}(…, group=…), the process group of their mesh"
                )
            self._sharded.gather()

    @contextmanager
    def _looking(self) -> Iterator[bool]:
        """Look at what was changed before the body, and remember what it leaves; gives whether weights were."""
        held = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        self.quiet = held == self._held and self.watch.undisturbed(self._options)
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
        self.watch.leave(self.model, self.changed, self._options, quiet=quiet and not self.changed)

    def _is_done(self, x: Any, y: Any, reset: bool) -> bool:
        """Whether convergence from the present weights, on these data, is proved."""
        if self.convergence is None or not self.convergence.proved or reset or self.changed:
            return False
        return self.history[-1].data == self.fingerprint(x, y)

    def check_data(self, x: Any, y: Any) -> None:
        """Targets are given exactly where the objective takes them; a loader, where it is taken, brings them.

        Raises:
            OptimizerError: if they are not; on all processes, if there are several.
        """
        if self.processes is not None:
            self.processes.together(lambda: self.check_part(x, y))
        else:
            self.check_part(x, y)

    def check_part(self, x: Any, y: Any) -> None:
        """The same for what this process has."""
        if x is None:
            raise OptimizerError(
                "a step takes the batch: write step(x, y). It computes the loss and its gradient, so there is no "
                "backward() before it"
            )
        if self.takes_loaders and is_loader(x):
            if y is not None:
                raise OptimizerError("a loader brings its targets: step(loader)")
            if self.until is not None:
                raise OptimizerError("until='proved' is about one batch: join the data, or leave it out")
            return
        if (y is None) == self.objective.takes_targets:
            name = type(self.objective).__name__
            how = "step(x, y)" if self.objective.takes_targets else "step(x)"
            raise OptimizerError(f"{name} {'takes' if self.objective.takes_targets else 'has no'} targets: {how}")

    @property
    def _options(self) -> str:
        return f"{self.objective.operation}{self.objective.options}{self.regularizer}"

    def look_around(self) -> bool:
        """Whether the function was changed since the last step; then what rests on it is forgotten."""
        changed = self.watch.function_changed(self.model, self._options)
        if changed:
            self.forget()
        return changed

    def graph(self, x: Any, captured: Graph | None = None) -> Graph:
        """The graph of the model on such a batch; if the function changed, what rests on it is forgotten."""
        graph = self.watch.same_graph(x) if captured is None and self.quiet else captured
        if graph is None:
            graph = capture(self.model, x)
        if self.watch.other_graph(x, graph):
            self.changed = True
            self.forget()
        return graph

    def in_double(self, x: Any, y: Any, loss: float, graph: Graph) -> InDouble:
        """The objective of the batch in double precision, as its graph computes it.

        Raises:
            OptimizerError: if its value is not the loss that the model computed.
        """
        exact = InDouble(self.model, x, self.objective.bound_to(y), graph)
        self.check_value(exact.value + self.penalty, loss)
        return exact

    def proved_gradient(self, x: Any, y: Any, loss: float) -> ProvedGradient:
        """The gradient of the loss of the batch, without the regulariser, with a bound on its error.

        Raises:
            OptimizerError: if its value is not the loss that the model computed.
        """
        found = proved_gradient(Analysis.of(self.model, x, self.objective.bound_to(y)))
        self.check_value(found.value + self.penalty, loss)
        return found

    def check_value(self, proved: float, loss: float) -> None:
        """The function of which something is proved has the value of the live model, up to round-off.

        Raises:
            OptimizerError: if it has not.
        """
        unit = max(torch.finfo(value.dtype).eps for value in self.trainable.values())
        if abs(proved - loss) > 16 * math.sqrt(unit) * (1 + abs(loss)):
            raise OptimizerError(
                f"the model computes the loss {loss:g}, what can be proved is about a function of value "
                f"{proved:g}: a part of the model reads what is not among its parameters, buffers and attributes"
            )

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are optimised, by name."""
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        named = (self.watch.parameters if self.quiet else dict(self.model.named_parameters())).items()
        return {name: value for name, value in named if value.requires_grad and id(value) in held}

    @property
    def penalty(self) -> float:
        """The regulariser at the present parameters, in double precision."""
        return 0.0 if self.regularizer is None else self.regularizer.enclosed(self.trainable)[0]

    @property
    def ridge(self) -> Ridge | None:
        """The regulariser, for what knows about a ridge only.

        Raises:
            OptimizerError: if it is another one.
        """
        if not isinstance(self.regularizer, Ridge | None):
            raise OptimizerError(f"second-order models take a ridge as regulariser, got {self.regularizer!r}")
        return self.regularizer

    def value(self, x: Any, y: Any = None, closure: Closure | None = None) -> float:
        """The objective at the present parameters, without derivatives.

        Raises:
            OptimizerError: if it is not finite, or the closure does not return what it should.
        """
        self.gather()
        with torch.no_grad():
            return number(self._regularized(loss_of(self.model, self.objective, x, y, closure)))

    def value_and_gradient(
        self, x: Any, y: Any = None, closure: Closure | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """The objective and its gradient at the present parameters; ``.grad`` of each parameter holds it too.

        If the regulariser has kinks, the gradient is that of its smooth part.

        Raises:
            OptimizerError: if either is not finite, or the closure does not return what it should.
        """
        trainable = self.trainable
        with torch.enable_grad():
            loss, gradient = gradient_of(loss_of(self.model, self.objective, x, y, closure), trainable)
        if self.regularizer is None:
            return loss, gradient
        with torch.no_grad():
            loss = number(loss + float(self.regularizer(trainable)))
            for name, slope in self.regularizer.gradient(trainable).items():
                gradient[name] += slope.to(gradient[name].dtype)
        return loss, gradient

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters, by name."""
        trainable = self.trainable
        with torch.no_grad():
            copied_together([trainable[name] for name in values], list(values.values()))

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

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """If the body raises, parameters, buffers and the optimizer are what they were, bit by bit."""
        watch = self.watch
        buffers = watch.buffers if self.quiet else list(self.model.buffers())
        parameters = watch.parameters if self.quiet else dict(self.model.named_parameters())
        weights = None if self.quiet else {name: value.detach().clone() for name, value in parameters.items()}
        copies, own = [buffer.detach().clone() for buffer in buffers], self.extra_state()
        try:
            yield
        except BaseException:
            self.load_extra_state(own)
            kept = watch.weights if weights is None else weights
            pairs = ((value, kept[name]) for name, value in parameters.items())
            with torch.no_grad():
                for tensor, before in (*pairs, *zip(buffers, copies, strict=True)):
                    tensor.copy_(before)
            raise

    @contextmanager
    def _others_constant(self) -> Iterator[None]:
        """Trainable parameters that no group holds do not ask for gradients in the body."""
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        present = self.watch.parameters.values() if self.quiet else self.model.parameters()
        others = [value for value in present if value.requires_grad and id(value) not in held]
        try:
            for parameter in others:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def stationarity(self) -> Stationarity:
        """The smallest gradient norm so far and the proved bound on it; see :func:`best_stationarity`."""
        return best_stationarity(self.history, self.lower)

    def extra_state(self) -> dict[str, Any]:
        """What a subclass has to keep besides the history: tensors, numbers and texts."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the parameters of the model; safe for ``weights_only`` loading."""
        own = {"kind": type(self).__name__, "history": to_columns(self.history), "watch": self.watch.state()}
        return {**super().state_dict(), "surefoot": {**own, **self.extra_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; load the model's own state before.

        Raises:
            ValueError: if the state is that of another kind of optimizer.
        """
        own = dict(state_dict.get("surefoot", {}))
        kind = own.pop("kind", None)
        if kind != type(self).__name__:
            raise ValueError(f"this is the state of {kind or 'another optimizer'}, not of {type(self).__name__}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "surefoot"})
        self.param_groups = [_Group(group) for group in self.param_groups]
        self.history = from_columns(own.pop("history"))
        self.watch.load(own.pop("watch", {"left": "", "functions": {}}))
        self.load_extra_state(own)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the model comes along, so that a copy optimises its own."""
        return {key: value for key, value in self.__dict__.items() if not key.endswith("_hooks")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimise further parameters of the model.

        Raises:
            ValueError: if one of them is not a parameter of the model.
        """
        given = param_group["params"]
        param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        known = {id(parameter) for parameter in self.model.parameters()}
        strangers = [p for p in param_group["params"] if id(p[1] if isinstance(p, tuple) else p) not in known]
        if strangers:
            raise ValueError(
                f"{len(strangers)} of the given parameters are not parameters of the model: the certificate would "
                "not speak of them. Put them into a module together with the model"
            )
        super().add_param_group(param_group)
        self.param_groups[-1] = _Group(self.param_groups[-1])

    def _append(self, record: StepRecord, changed: str) -> None:
        """Add a record. The loss of this step says what the one before it achieved, if both belong to one run."""
        if self.history:
            last = self.history[-1]
            if changed:
                note = f"{changed} changed since the last step: what is proved of the run begins anew"
                record = replace(record, note="; ".join(filter(None, (note, record.note))))
            elif last.data == record.data and last.actual_decrease is None:
                self.history[-1] = replace(last, actual_decrease=last.loss - record.loss)
            record = replace(record, run=last.run + bool(changed))
        self.history.append(record)

    def _regularized(self, loss: Tensor) -> Tensor:
        return loss if self.regularizer is None else loss + self.regularizer(self.trainable)


__all__ = ["Closure", "GuaranteedOptimizer", "OptimizerError", "Parameters"]
