"""Steps that are proved to descend by evaluating the objective where they lead, before they are taken."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import first_of
from surefoot.chain import Chain
from surefoot.graph import Graph
from surefoot.optim.base import Closure, GuaranteedOptimizer, OptimizerError
from surefoot.optim.directions import Chosen, Conjugate, Direction, Gradient, Linearised, Proposed, Proximal
from surefoot.optim.evaluation import check_slope, loss_of, number
from surefoot.optim.limited_memory import LimitedMemory
from surefoot.optim.point import Batch, Data, Function, Point, Stream, Turns
from surefoot.optim.record import StepRecord
from surefoot.optim.shards import Shards
from surefoot.optim.stored import resolution
from surefoot.optim.vectors import held_by
from surefoot.optim.watch import same_tensors
from surefoot.optim.wolfe import Found, search
from surefoot.oracles.problem import Problem
from surefoot.processes import Processes
from surefoot.program.checks import as_inputs, is_loader
from surefoot.torch_private import BatchNormalisation
from surefoot.valuation.normalising import Statistics
from surefoot.valuation.streamed import StreamedValuer
from surefoot.valuation.valuer import EvaluationError, Valuer

NAMED: Mapping[str, Callable[[], Direction]] = {
    "lbfgs": LimitedMemory,
    "conjugate": Conjugate,
    "gradient": Gradient,
}

_ANGLE = 1e-10  # the least cosine between a direction and minus the gradient
_FOREIGN_TRIALS, _PROXIMAL_TRIALS = 8, 40
_STALLS = 2
_INNER = ("surefoot", "torch", "contextlib", "functools")
_PARTS = (0.4, 0.1)  # of a decrease that errors may take away before they are made smaller


class StalledWarning(UserWarning):
    """Several steps in a row were not taken."""


def speak_of_stall(message: str) -> None:
    """Warn at the line that called: the first one on the way that is not of this package, nor of what it uses."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, StalledWarning, stacklevel=level)


class ByEvaluation:
    r"""The proof of a step is its value: the objective at the new point, as it is stored, with its round-off
    (:mod:`surefoot.valuation`), is below that at the old one.

    Any direction will do. Where it is not one of descent (the cosine with minus the gradient is below 1e-10), or
    no step along it can be proved, the gradient takes its place for one step. Where the regulariser has absolute
    values, steps are proximal (:mod:`surefoot.optim.constrained`).

    Args:
        owner: the optimizer.
        direction: a name, a ``torch.optim`` class or instance, or a function of weights and gradient.
        processes: those that have a part of the data each, or ``None``.
    """

    def __init__(self, owner: GuaranteedOptimizer, direction: Any, processes: Processes | None = None) -> None:
        self.owner, self.processes = owner, processes
        self.direction = Linearised(self._problem) if direction == "gauss_newton" else _direction(direction, owner)
        if owner.regularizer is not None and not owner.regularizer.smooth:
            self.direction = Proximal()
        self._fallback = Gradient()
        self._turns = Turns()
        self._stalls = 0
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the function and the point, which are made anew."""
        known = {"_function": None, "_point": None, "_stuck": None, "_loader": None, "_batch": (None, None)}
        return {**self.__dict__, **known}

    def forget(self) -> None:
        """Drop the function, the point and what directions are made of."""
        self.direction.forget()
        self._fallback.forget()
        self._function: tuple[tuple[str, Graph | None], Function] | None = None
        self._point: Point | None = None
        self._stuck: tuple[Point, str] | None = None  # where no step was found, and why
        self._loader: Any = None
        self._batch: tuple[Any, Any] = (None, None)

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One step that is proved to descend."""
        if self.processes is None:
            return self._advanced(x, y, closure)
        shards = self._shards(x, y, closure, self.processes)
        return shards.step(self.owner.trainable, lambda: self._advanced(x, y, closure))

    def _advanced(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        owner = self.owner
        self._batch = x, y
        try:
            function = self._function_at_hand(x, y, closure)
            point = self._here(function)
            slopes = function.layout.unpack(point.gradient)
        except EvaluationError as error:
            raise OptimizerError(str(error)) from error
        loss, data = number(point.value), function.data.name
        size = point.gradient_norm
        if not size < math.inf:
            self._refuse_slopes(slopes, loss)
        for name, parameter in owner.trainable.items():
            parameter.grad = slopes[name].to(parameter.dtype)
        record = partial(StepRecord, len(owner.history), gradient_norm=size, data=data)
        if isinstance(self.direction, Proximal):
            first = self.direction.first(point, point.gradient)
            size = function.proximal(point, first)[1] / first
            record = partial(record, stationarity=size)
        stayed = partial(record, loss, step_size=0.0, promised_decrease=0.0)
        if size == 0:
            what = "gradient mapping" if isinstance(self.direction, Proximal) else "gradient"
            return self._stayed(stayed, f"the {what} is zero", stalled=False)
        stuck = self._stuck is not None and self._stuck[0] is point
        found, why = (None, self._stuck[1]) if stuck and self._stuck else self._found(point)
        if found is None:
            self._stuck = (point, why) if type(self.direction) in NAMED.values() else None
            return self._stayed(stayed, why, stalled=True)
        self._stalls = 0
        if self.processes is None and not is_loader(x):  # whose objective takes running statistics as they are
            self._move_buffers(x, point.statistics)
        owner.write(found.point.weights)
        owner.watch.written(found.point.weights)
        found.point.forget_pass()
        self._point = found.point
        loss = point.value  # more precisely than before, if that was needed
        return record(
            loss=loss,
            step_size=found.step,
            promised_decrease=point.enclosed(math.inf).lower - found.point.enclosed(math.inf).upper,
            actual_decrease=loss - found.point.value,
            note=why,
            radius=found.length,
        )

    def _refuse_slopes(self, slopes: Mapping[str, Tensor], loss: float) -> None:
        for name, slope in slopes.items():
            check_slope(name, slope, loss)

    def value(self, x: Any, y: Any) -> float:
        """The objective at the present weights."""
        owner = self.owner
        if self.processes is not None:
            shards = self._shards(x, y, None, self.processes)
            assert self._function is not None
            value = shards.valuer.evaluate(owner.trainable).evaluation.value
            return value + self._function[1].penalty(owner.trainable)[0]
        if is_loader(x):
            return self._function_of_all(x).at(owner.trainable).value
        valuer = Valuer.of(owner.model, x, owner.objective.bound_to(y))
        return valuer.run(dict(owner.model.named_parameters()), derivatives=False).value + owner.penalty

    def _function_at_hand(self, x: Any, y: Any, closure: Closure | None) -> Function:
        """The objective of what was given; with several processes, they have agreed on it."""
        if self.processes is None:
            return self._function_of_all(x) if is_loader(x) else self._function_of(x, y, closure)
        assert self._function is not None
        return self._function[1]

    def _shards(self, x: Any, y: Any, closure: Closure | None, processes: Processes) -> Shards:
        """The objective of the data of all processes; made anew on all where one has others, or another model."""
        owner = self.owner

        def looked() -> tuple[tuple[str, Graph | None], bool, int]:
            if closure is not None:
                raise OptimizerError(
                    "a closure knows the loss of one process: leave it out where there is a group"
                )
            first = first_of(x) if is_loader(x) else (x, y) if len(y) else None
            if first is not None and (not isinstance(first, list | tuple) or len(first) != 2):
                raise OptimizerError("a loader gives pairs (x, y) of inputs and targets")
            key = "" if is_loader(x) else owner.fingerprint(x, y), None if first is None else owner.graph(first[0])
            other = self._function is None or self._function[0] != key or (is_loader(x) and self._loader is not x)
            return key, other, len(owner.history)

        key, other, steps = processes.together(looked)
        found = processes.gathered(lambda: (owner.changed, other, steps))
        if len({steps for *_, steps in found}) > 1:
            raise OptimizerError("the processes have taken different numbers of steps: load one state on all")
        if any(changed for changed, *_ in found):
            owner.changed = True
            owner.forget()
        if self._function is None or any(other for _, other, _ in found):
            loader = x if is_loader(x) else [(x, y)] if len(y) else []
            valuer = processes.together(lambda: StreamedValuer(owner.model, loader, owner.objective, processes))
            self._keep(key, Shards(valuer, self._turns, processes))
            self._loader = x
        assert self._function is not None
        shards = self._function[1].data
        assert isinstance(shards, Shards)
        return shards

    def _function_of(self, x: Any, y: Any, closure: Closure | None) -> Function:
        """The objective of a batch; kept while it and the graph are the same."""
        owner, known = self.owner, self._function
        key = owner.fingerprint(x, y), owner.graph(x)
        if known is None or known[0] != key:
            valuer = Valuer.of(owner.model, x, owner.objective.bound_to(y), single=True)
            self._keep(key, Batch(valuer, key[0], self._turns))
        assert self._function is not None
        if known is None or known[0][1] is not key[1] or closure is not None:
            self._compare(self._function[1], x, y, closure)
        return self._function[1]

    def _function_of_all(self, loader: Any) -> Function:
        """The objective of all batches; kept while loader and model are the same."""
        owner = self.owner
        first = first_of(loader)
        if not isinstance(first, list | tuple) or len(first) != 2:
            raise OptimizerError("a loader gives pairs (x, y) of inputs and targets")
        key = "", owner.graph(first[0])
        if self._function is None or self._function[0] != key or self._loader is not loader:
            self._keep(key, Stream(StreamedValuer(owner.model, loader, owner.objective), self._turns))
            self._loader = loader
        assert self._function is not None
        return self._function[1]

    def _keep(self, key: tuple[str, Graph | None], data: Data) -> None:
        """From now on the function is the loss of these data plus the regulariser."""
        self._function, self._point = (key, Function(data, self.owner.regularizer, self.owner.trainable)), None

    def _problem(self) -> Problem:
        """The linearised problem at the present weights."""
        (x, y), owner = self._batch, self.owner
        objective = owner.objective if is_loader(x) else owner.objective.bound_to(y)
        return Problem(Chain(owner.model, x), objective, None, owner.ridge)

    def _compare(self, function: Function, x: Any, y: Any, closure: Closure | None) -> None:
        """What is proved is about the function that the live model computes."""
        owner = self.owner
        buffers = {name: value.clone() for name, value in owner.model.named_buffers()}
        with torch.no_grad():
            live = number(loss_of(owner.model, owner.objective, x, y, closure))
            for name, value in owner.model.named_buffers():
                value.copy_(buffers[name])
        owner.check_value(self._here(function).value, live + owner.penalty)

    def _here(self, function: Function) -> Point:
        """The point of the present weights."""
        weights = self.owner.trainable
        kept = self._point
        if kept is not None and kept.function is function:
            same = self.owner.quiet or same_tensors(_detached(weights), kept.weights)
            here = same
        else:
            here = False
        if not here:
            if kept is not None and kept.function is function:  # somebody moved the weights
                self.direction.forget()
            self._point = function.at({name: value.clone() for name, value in _detached(weights).items()})
        assert self._point is not None
        return self._point

    def _found(self, point: Point) -> tuple[Found | None, str]:
        """A proved step along the direction, else along the gradient; and what is to be said about it."""
        if isinstance(self.direction, Proximal):
            proximal = self._proximal(point, self.direction)
            return proximal, "" if proximal is not None else self._reason(point)
        foreign = isinstance(self.direction, Proposed | Chosen)
        direction, first = self.direction.propose(point)
        slope, length = point.slope(direction), point.function.layout.norm(direction)
        related = -slope >= _ANGLE * length * point.gradient_norm and math.isfinite(length) and length > 0
        if related:
            found = self._along(point, direction, first, self.direction, _FOREIGN_TRIALS if foreign else 24)
            if found is not None:
                self.direction.learn(point, found.point, found.step)
                return Found(found.step, found.point, found.step * length), ""
        if isinstance(self.direction, Proposed):
            self.direction.decline()
        elif not foreign:
            self.direction.forget()
        if type(self.direction) is Gradient and related:
            return None, self._reason(point)
        note = "along the gradient" if foreign else "restarted along the gradient"
        direction, first = self._fallback.propose(point)
        found = self._along(point, direction, first, self._fallback, 40)
        if found is None:
            return None, self._reason(point)
        self._fallback.learn(point, found.point, found.step)
        if not foreign:
            self.direction.learn(point, found.point, found.step)
        return Found(found.step, found.point, found.step * point.function.layout.norm(direction)), note

    def _proximal(self, point: Point, direction: Proximal) -> Found | None:
        r"""A proximal step that is proved to descend: its size :math:`\gamma` is halved until :math:`F(u) - F(p)
        \ge \frac1{4\gamma}\|p - u\|^2`. Where the smooth part is L-smooth, p is the minimum of a
        :math:`\frac1\gamma`-strongly convex function, so the decrease is at least :math:`(\frac1\gamma - \frac
        L2)\|p - u\|^2`, and :math:`\gamma \le \frac3{2L}` is enough.
        """
        step = direction.first(point, point.gradient)
        for _ in range(_PROXIMAL_TRIALS):
            after, length = point.function.proximal(point, step)
            if point.value - after.value >= length * length / (4 * step) and self._is_proved(point, after):
                direction.learn(point, after, step)
                return Found(step, after, length)
            step /= 2
        return None

    def _along(self, point: Point, direction: Tensor, first: float, kind: Direction, trials: int) -> Found | None:
        """A step along a direction that is proved to descend; none where all of its decrease is round-off."""
        hoped = -first * point.slope(direction)
        least = point.enclosed(math.inf).error
        if least > hoped:
            least = point.enclosed(_PARTS[-1] * hoped).error
        found = search(
            point,
            direction,
            lambda step: point.function.near(point, direction, step),
            first,
            curvature=kind.needs_curvature,
            trials=trials,
            least=least,
        )
        return found if found is not None and self._is_proved(point, found.point) else None

    def _is_proved(self, before: Point, after: Point) -> bool:
        """Whether the value is lower in exact arithmetic; errors are made as small as that takes, no smaller."""
        for part in _PARTS:
            enough = part * (before.value - after.value)
            upper = after.enclosed(enough).upper
            if upper < before.enclosed(math.inf).lower or upper < before.enclosed(enough).lower:
                return True
        return False

    def _reason(self, point: Point) -> str:
        """Why no step was found."""
        if not math.isfinite(point.enclosed().error):
            return "no step: the round-off of the objective cannot be bounded here"
        return resolution(self.owner.trainable)

    def _stayed(self, stayed: Callable[..., StepRecord], why: str, *, stalled: bool) -> StepRecord:
        """The record of a step that was not taken; after two in a row a warning says why and what helps."""
        record = stayed(note=why)
        self._stalls = self._stalls + 1 if stalled else 0
        if self._stalls == _STALLS:
            speak_of_stall(
                f"the last {_STALLS} steps were not taken. {why[0].upper()}{why[1:]}: the objective is "
                f"{record.loss:.6g} with a gradient of norm {record.stationarity:.3g}, and is known up to "
                f"{self._point.enclosed().error if self._point else math.nan:.1e}. "
                "If that is not good enough, use model.double(), scale the data, or add a regulariser"
            )
        return record

    def _move_buffers(self, x: Any, statistics: Sequence[Statistics] | None) -> None:
        """Running statistics move once per step that is taken, by those of the batch at the weights before it; by
        a pass of the model where they are not known.
        """
        if statistics is not None and not statistics:
            return
        model = self.owner.model
        tracked = {
            path: m for path, m in model.named_modules()
            if isinstance(m, BatchNormalisation) and m.training and m.running_mean is not None
        }  # fmt: skip
        plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        if statistics is None or any(type(m) not in plain for m in tracked.values()):
            args, kwargs = as_inputs(x)
            with torch.no_grad():
                model(*args, **kwargs) if tracked else None
            return
        for found in statistics:
            if found.module in tracked:
                _move_statistics(tracked[found.module], found)

    def state(self) -> dict[str, Any]:
        """What directions are made of."""
        return {"directions": self.direction.state(), "fallback": self._fallback.state(), "stalls": self._stalls}

    def load(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.forget()
        self._stalls = state["stalls"]
        self.direction.load(state["directions"])
        self._fallback.load(state["fallback"])


def _move_statistics(module: Any, found: Statistics) -> None:
    """What a pass of batch-normalisation in training mode does to its buffers."""
    with torch.no_grad():
        part = module.momentum
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            part = 1.0 / float(module.num_batches_tracked) if part is None else part
        part = 0.0 if part is None else part
        for buffer, value in ((module.running_mean, found.mean), (module.running_var, found.variance)):
            buffer.copy_((1 - part) * buffer + part * value.to(buffer))


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in tensors.items()}


def _direction(chosen: Any, owner: GuaranteedOptimizer) -> Direction:
    """From what was asked for to a source of directions."""
    if isinstance(chosen, str) and chosen in NAMED:
        return NAMED[chosen]()
    if isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer):
        make: Any = chosen
        chosen = make(owner.trainable.values())
    if isinstance(chosen, torch.optim.Optimizer):
        held = set(map(id, held_by(chosen)))
        strangers = [name for name, value in owner.trainable.items() if id(value) not in held]
        if strangers:
            raise ValueError(f"{type(chosen).__name__} does not hold '{strangers[0]}': give it model.parameters()")
        return Proposed(chosen, owner)
    if callable(chosen) and not isinstance(chosen, str | type):
        return Chosen(chosen)
    raise ValueError(
        f"direction is {', '.join(map(repr, NAMED))}, 'gauss_newton', a torch.optim class or instance, or a "
        f"function of weights and gradient, got {chosen!r}"
    )
