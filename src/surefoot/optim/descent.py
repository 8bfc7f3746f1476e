"""Descent without a learning rate: every step is proved to descend before it is taken."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.errors import EvaluationError, SurefootError
from surefoot.graph.checks import as_inputs, is_loader, plainly, unwrapped
from surefoot.objectives import Objective, Regularizer, Ridge, as_objective
from surefoot.optim.directions import Gradient, Proximal, from_outside
from surefoot.optim.history import History, Stationarity, StepRecord, best_stationarity
from surefoot.optim.lbfgs import LimitedMemory
from surefoot.optim.levenberg import LevenbergMarquardt, check_ridge
from surefoot.optim.problem import Point, Problem
from surefoot.optim.search import search
from surefoot.optim.segment import OnSegments
from surefoot.processes import Processes
from surefoot.torch_private import BatchNormalisation, hooked

_ANGLE = 1e-10  # the least cosine between a direction and minus the gradient
_PART = 0.1  # of a decrease that is hoped for: round-off up to that does not hide it
_PROXIMAL_TRIALS = 40


class OptimizerError(SurefootError, RuntimeError):
    """A step was not taken; the weights are what they were before."""


class StalledWarning(UserWarning):
    """Two steps in a row were not taken."""


class CertifiedDescent(torch.optim.Optimizer):
    r"""Descent with steps that are proved to descend; there is no learning rate to choose.

    A step is proposed by a direction, found by a search along it, proved, and only then are the weights written.
    What is proved is about the objective of the data of the step, in exact arithmetic, between the weights as they
    were and the new ones as they are stored, rounded to their type. A step without a proof is not taken:
    :attr:`done` says why, and after two of them a warning does.

    * ``proof="evaluation"``: the objective is evaluated where the step leads, with a bound on its round-off, and
      the step is taken only if the value in exact arithmetic is lower. It costs a gradient and some per step, and
      works for everything that can be evaluated, along any direction.
    * ``proof="segment"``: the decrease is promised ahead, from bounds on derivatives along the step
      (:mod:`surefoot.optim.segment`), for 3 to 8 gradients. It needs smooth operations, and takes one batch.
    * ``proof=None``: steps are judged by values as computed. Nothing is proved, and their records say so.

    With mini-batches every step descends on its own batch; for the objective of all data nothing is proved.
    ``step(loader)`` takes one step on the objective of all data, in the memory of one batch: the loader is any
    re-iterable of batches ``(x, y)``.

    In training mode batch-normalisation uses the statistics of the batch, in what is proved too; running
    statistics move once per step that is taken. Random layers are refused: put them into evaluation mode.

    What is remembered from step to step is dropped if data, weights or model are not what the last step left.

    Args:
        model: the network.
        loss: without targets; they come with the data.
        direction: ``"lbfgs"``, ``"gradient"``, ``"gauss_newton"``, ``"newton"``; a ``torch.optim`` class or
            instance, which proposes steps and whose state goes on only with what was taken; or a function of
            weights and gradient, by name, that returns a direction.
        proof: see above.
        regularizer: added to the loss. Absolute values in it (:class:`surefoot.ElasticNet`) are met by proximal
            gradient steps; the stationarity in the history is then the norm of the gradient mapping.
        weight_decay: the same as ``regularizer=surefoot.Ridge(weight_decay)``.
        params: the parameters that are optimised, or parameter groups; all that are trainable by default. The
            others are constants. Layers that are unfrozen later take part after ``add_param_group``.
        lower: a number that the objective never falls below; 0 by default for losses that are not negative.
        progress: called with the record of each step.
        group: a process group of ``torch.distributed`` whose processes have the same model and a part of the data
            each, none at all allowed: ``step`` is then called by all of them, on the objective of all samples
            together. Process 0 decides; weights and history are the same on all, and the state to be saved is
            that of process 0. ``processes.sent`` counts the bytes that cross.

    Attributes:
        history: one record per step.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(30)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 1e-3
    (True, True)
    >>> optimizer.last.proved, optimizer.last.proved_decrease > 0, optimizer.done
    (True, True, '')
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Objective | nn.Module | None = None,
        *,
        direction: Any = "lbfgs",
        proof: Literal["evaluation", "segment"] | None = "evaluation",
        regularizer: Regularizer | None = None,
        weight_decay: float = 0.0,
        params: Iterable[Any] | None = None,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
        group: Any = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{name} takes the model itself, since it has to know the function: write {name}(model, "
                "surefoot.CrossEntropy()), and params=... for a part of its parameters. Got "
                f"{type(model).__name__}"
            )
        self.model, self.loss = unwrapped(model), check_loss(loss, "the data, step(x, y)")
        if weight_decay and regularizer is not None:
            raise ValueError("weight_decay is a ridge: give it or a regularizer, not both")
        self.regularizer = Ridge(weight_decay) if weight_decay else regularizer
        if proof not in ("evaluation", "segment", None):
            raise ValueError(f"proof is 'evaluation', 'segment' or None, got {proof!r}")
        if proof == "segment" and (self.regularizer is not None or group is not None):
            raise ValueError("proof='segment' is about the loss of one batch: use proof='evaluation'")
        if lower is not None and not math.isfinite(lower):
            raise ValueError(f"a lower bound of the objective is a finite number, got {lower!r}")
        self.lower = (0.0 if self.loss.nonnegative else -math.inf) if lower is None else float(lower)
        self.proof, self.progress = proof, progress
        self.history: History[StepRecord] = History()
        trainable = [value for value in self.model.parameters() if value.requires_grad]
        if not trainable:
            raise ValueError("no parameter of the model asks for gradients: call model.requires_grad_(True)")
        super().__init__(trainable if params is None else params, {})
        self.processes = None if group is None else Processes(group)
        if group is not None and not self.loss.takes_targets:
            raise ValueError("with a group, the objective is a mean over samples with targets")
        self.direction = self._chosen(direction)
        self._fallback, self._segments = Gradient(), OnSegments()
        self._fallback.trials = 40
        self._problem: Problem | None = None
        self._point: Point | None = None
        self._stuck: tuple[Point, str] | None = None  # where no step was found, and why
        self._chosen_ones: list[int] = []  # the parameters of the groups at the last step

    def _chosen(self, direction: Any) -> Gradient:
        """The direction that was asked for."""
        named: dict[str, Callable[[], Gradient]] = {
            "lbfgs": LimitedMemory,
            "gradient": Gradient,
            "gauss_newton": LevenbergMarquardt,
            "newton": lambda: LevenbergMarquardt("newton"),
        }
        if self.regularizer is not None and not self.regularizer.smooth:
            if direction not in ("lbfgs", "gradient") or self.proof is None:
                raise ValueError(
                    f"{self.regularizer!r} has kinks, where steps along a line may stall: its steps are proximal "
                    f"ones along the gradient, and proved, so leave direction={direction!r} and proof out"
                )
            return Proximal()
        if isinstance(direction, str) and direction in named:
            direction = named[direction]()
        chosen = direction if isinstance(direction, Gradient) else from_outside(direction, self.trainable)
        if chosen is None:
            raise ValueError(
                f"direction is {', '.join(map(repr, named))}, a torch.optim class or instance, or a function of "
                f"weights and gradient, got {direction!r}"
            )
        if isinstance(chosen, LevenbergMarquardt):
            check_ridge(self.regularizer)
        return chosen

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are optimised, by name."""
        members = {id(value) for group in self.param_groups for value in group["params"]}
        named = self.model.named_parameters()
        return {name: value for name, value in named if value.requires_grad and id(value) in members}

    @property
    def last(self) -> StepRecord | None:
        """The record of the last step."""
        return self.history[-1] if self.history else None

    @property
    def done(self) -> str:
        """Why the last step was not taken, so that nothing more can be proved on its data; empty if it was."""
        return self.history[-1].note if self.history and not self.history[-1].step_size else ""

    @hooked
    @plainly
    def step(self, x: Any = None, y: Any = None) -> float:  # type: ignore[override]
        """One step on a batch, or on all data of a loader; returns the objective before it.

        Args:
            x: the input: a tensor, a tuple of tensors, or a dict of keyword arguments; or a loader.
            y: the targets; none for a loader, which brings them, and for a loss that takes none.

        Raises:
            OptimizerError: if the step cannot be taken. The weights are as before.
        """
        note = self._prepare(x, y)
        run = self.history[-1].run + bool(note) if self.history else 0
        if self.processes is None:
            record = self._advance()
        else:
            record = self.processes.led(self._advance, self._serve, OptimizerError)
            assert self._problem is not None
            self.processes.spread(self._problem.weights.values())
            if not self.processes.leads:
                self._point = self._problem.start
        note = "; ".join(filter(None, (note, record.note)))
        self.history.append(replace(record, run=run, note=note) if note or run else record)
        if self.progress is not None:
            self.progress(self.history[-1])
        if not record.step_size and record.gradient_norm and len(self.history) > 1 and not self.history[-2].step_size:
            self._warn(record)
        return record.loss

    def _prepare(self, x: Any, y: Any) -> str:
        """The problem and the point of this step; says what is not as the last step left it."""
        problem, chosen = self._problem, [id(value) for group in self.param_groups for value in group["params"]]

        def look() -> tuple[bool, bool, int]:
            self._check_data(x, y)
            same = problem is not None and chosen == self._chosen_ones and problem.is_about(x, y)
            still = same and problem is not None and self._point is not None and all(
                torch.equal(value, self._point.weights[name]) for name, value in problem.weights.items()
            )  # fmt: skip
            return same, still, len(self.history)

        same, still, _ = look() if self.processes is None else self._agreed(look)
        if still:
            return ""
        if not same:
            try:
                problem = self._together(lambda: self._problem_of(x, y))
            except EvaluationError as error:
                raise OptimizerError(str(error)) from error
        if self._problem is not None:
            self.direction.forget()
            self._fallback.forget()
            self._segments.reach = None
        assert problem is not None
        self._problem, self._point, self._chosen_ones, self._stuck = problem, problem.start, chosen, None
        if not self.history:
            return ""
        what = "the weights changed" if same else "data or function changed"
        return f"{what} since the last step: what is proved of the run begins anew"

    def _agreed(self, look: Callable[[], tuple[bool, bool, int]]) -> tuple[bool, bool, int]:
        """What all processes find together."""
        assert self.processes is not None
        same, still, steps = zip(*self.processes.gathered(look), strict=True)
        if len(set(steps)) > 1:
            raise OptimizerError("the processes have taken different numbers of steps: load one state on all")
        return all(same), all(still), steps[0]

    def _together(self, compute: Callable[[], Any]) -> Any:
        return compute() if self.processes is None else self.processes.together(compute)

    def _problem_of(self, x: Any, y: Any) -> Problem:
        return Problem(
            self.model, self.loss, x, y, weights=self.trainable, regularizer=self.regularizer,
            processes=self.processes,
        )  # fmt: skip

    def _check_data(self, x: Any, y: Any) -> None:
        """Targets are given exactly where the loss takes them; a loader brings them."""
        if x is None:
            raise OptimizerError(
                "a step takes the batch: write step(x, y). It computes the loss and its gradient, so there is no "
                "backward() before it"
            )
        takes, name = self.loss.takes_targets, type(self.loss).__name__
        if is_loader(x):
            if y is not None:
                raise OptimizerError("a loader brings its targets: step(loader)")
            if self.proof == "segment":
                raise OptimizerError("proof='segment' is about one batch: proof='evaluation' takes a loader")
        elif (y is None) == takes:
            how = "takes targets: step(x, y)" if takes else "has no targets: step(x)"
            raise OptimizerError(f"{name} {how}")

    def _serve(self, word: Any) -> None:
        """Help process 0 with a pass, or with a step of an oracle."""
        assert self._problem is not None
        if word == "pass":
            self._problem.assist()
        else:
            assert isinstance(self.direction, LevenbergMarquardt)
            self.direction.solve(self._problem, *word)

    def _advance(self) -> StepRecord:
        """One step from the present point: propose, search, prove, write."""
        point = self._point
        assert point is not None
        try:
            loss, slopes, size = point.value, point.gradient, point.gradient_norm
        except EvaluationError as error:
            raise OptimizerError(str(error)) from error
        self._check_finite(loss, slopes, size, point.problem)
        for (name, parameter), part in zip(point.problem.weights.items(), slopes.split(point.problem.sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        measure = size
        if isinstance(self.direction, Proximal):
            first = self.direction.first(point)
            measure = _proximal(point, first)[1] / first
        promise = None if self.proof is None else 0.0
        stayed = StepRecord(loss, size, 0.0, 0.0, promise, measure)
        if measure == 0:
            what = "gradient mapping" if isinstance(self.direction, Proximal) else "gradient"
            return replace(stayed, note=f"the {what} is zero")
        if self._stuck is not None and self._stuck[0] is point:
            return replace(stayed, note=self._stuck[1])
        outcome = self._search_proximal(point) if isinstance(self.direction, Proximal) else self._search(point)
        if outcome is None:
            self._stuck = point, self._reason(point)
            return replace(stayed, note=self._stuck[1])
        step, after, note = outcome
        if point.problem.stream is None:  # a loader takes running statistics as they are
            _move_statistics(self.model, point.problem.x, point.statistics)
        point.problem.write(after)
        self._point = after
        smoothness = None
        if self.proof == "segment":
            promise, smoothness = self._ahead
            return StepRecord(loss, size, step, None, promise, measure, smoothness, note)
        if self.proof == "evaluation":
            promise = math.nextafter(point.enclosed(math.inf).lower - after.enclosed(math.inf).upper, 0.0)
        after.release()
        return StepRecord(point.value, size, step, point.value - after.value, promise, measure, None, note)

    def _search(self, point: Point) -> tuple[float, Point, str] | None:
        """A step along the direction, else along the gradient; and what is to be said about it."""
        for direction in (self.direction, self._fallback):
            vector, first = direction.propose(point)
            slope, length = float(point.gradient @ vector), float(torch.linalg.vector_norm(vector))
            related = -slope >= _ANGLE * length * point.gradient_norm and 0 < length < math.inf
            outcome = self._along(point, vector, first, slope, direction) if related else None
            if outcome is not None:
                direction.learn(point, outcome[1], outcome[0])
                if direction is self.direction:
                    return *outcome, ""
                if self.direction.needs_curvature:
                    self.direction.learn(point, outcome[1], outcome[0])
                return *outcome, "along the gradient"
            direction.reject()
            if type(direction) is Gradient and related:
                break
        return None

    def _along(
        self, point: Point, vector: Tensor, first: float, slope: float, direction: Gradient
    ) -> tuple[float, Point] | None:
        """A step along a vector that is proved to descend; none where all of its decrease is round-off."""
        if self.proof == "segment":
            promised = self._segments.step(point, vector)
            if promised is None:
                return None
            step, after, *self._ahead = promised
            return step, after
        least = 0.0
        if self.proof is not None:
            least = point.enclosed(math.inf).error
            if least > -first * slope:
                least = point.enclosed(-_PART * first * slope).error
        curvature, trials = direction.needs_curvature, direction.trials
        outcome = search(point, vector, first, slope=slope, curvature=curvature, trials=trials, least=least)
        if outcome is None or (self.proof is not None and not outcome[1].is_below(point)):
            return None
        return outcome

    def _search_proximal(self, point: Point) -> tuple[float, Point, str] | None:
        r"""A proximal step that is proved to descend: its size :math:`\gamma` is halved until :math:`F(u) - F(p)
        \ge \frac1{4\gamma}\|p - u\|^2`. Where the smooth part is L-smooth, p is the minimum of a
        :math:`\frac1\gamma`-strongly convex function, so the decrease is at least :math:`(\frac1\gamma - \frac
        L2)\|p - u\|^2`, and :math:`\gamma \le \frac3{2L}` is enough.
        """
        assert isinstance(self.direction, Proximal)
        step = self.direction.first(point)
        for _ in range(_PROXIMAL_TRIALS):
            after, length = _proximal(point, step)
            if point.value - after.value >= length * length / (4 * step) and after.is_below(point):
                self.direction.learn(point, after, step)
                return step, after, ""
            step /= 2
        return None

    def _reason(self, point: Point) -> str:
        """Why no step was found."""
        if self.proof is not None and not math.isfinite(point.enclosed().error):
            return "no step: the round-off of the objective cannot be bounded here"
        kind = str(next(iter(point.weights.values())).dtype).removeprefix("torch.")
        if kind == "float64":
            return "no step: descent cannot be told from round-off here"
        return f"no step: it is below the resolution of {kind}, use double precision"

    def _check_finite(self, loss: float, slopes: Tensor, size: float, problem: Problem) -> None:
        if not math.isfinite(loss):
            raise OptimizerError(
                "the loss is not finite: check the data for NaN and infinite entries, and the parameters of the "
                "model"
            )
        if not math.isfinite(size):
            wrong = [name for name, part in problem.unpack(slopes).items() if not bool(part.isfinite().all())]
            raise OptimizerError(
                f"the gradient with respect to '{wrong[0] if wrong else 'all'}' is not finite at loss {loss:g}: "
                "look for divisions by zero and overflow there, or compute in double precision"
            )

    def _warn(self, record: StepRecord) -> None:
        """Warn at the line that called: the first one on the way that is not of this package, nor of torch."""
        frame, level = inspect.currentframe(), 1
        inner = ("surefoot", "torch", "contextlib", "functools")
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
            frame, level = frame.f_back, level + 1
        warnings.warn(
            f"the last two steps were not taken. {record.note[0].upper()}{record.note[1:]}: the objective is "
            f"{record.loss:.6g} with a gradient of norm {record.stationarity:.3g}. If that is not good enough, use "
            "model.double(), scale the data, or add a regulariser",
            StalledWarning,
            stacklevel=level - 1,
        )

    @plainly
    def value(self, x: Any, y: Any = None) -> float:
        """The objective at the present weights, in double precision, without derivatives."""
        self._check_data(x, y)
        if self.processes is not None:
            raise OptimizerError("with a group, ask surefoot.evaluate(…, group=group) for values")
        return self._problem_of(x, y).start.value

    def stationarity(self) -> Stationarity:
        """The smallest gradient norm of the last run and the proved bound on it."""
        return best_stationarity(self.history, self.lower)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        if not self.history:
            return "nothing yet: the first step brings its own proof"
        taken = [record for record in self.history if record.step_size]
        proved = sum(record.proved for record in taken)
        if self.proof is None or proved < len(taken):
            return f"{proved} of {len(taken)} steps are proved; the others are judged by computed values alone"
        runs = self.history[-1].run + 1
        changed = f" Data, weights or function were changed between them ({runs} runs)." if runs > 1 else ""
        return (
            f"Every one of the {len(taken)} steps that were taken lowers the objective of its data in exact "
            f"arithmetic, by what its record says.{changed}"
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the weights; safe for ``weights_only`` loading."""
        own = {"kind": type(self).__name__, "history": self.history.to_columns(), "reach": self._segments.reach}
        own |= {"direction": self.direction.state(), "fallback": self._fallback.state()}
        return {**super().state_dict(), "surefoot": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; load the model's own state before. A new run begins.

        Raises:
            ValueError: if the state is that of another kind of optimizer.
        """
        own = state_dict.get("surefoot", {"kind": "another optimizer"})
        if own["kind"] != type(self).__name__:
            raise ValueError(f"this is the state of {own['kind']}, not of {type(self).__name__}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "surefoot"})
        columns = own["history"]
        rows = zip(*columns.values(), strict=True)
        self.history = History(StepRecord(**dict(zip(columns, row, strict=True))) for row in rows)
        self._problem = self._point = self._stuck = None
        self.direction.load(own["direction"])
        self._fallback.load(own["fallback"])
        self._segments.reach = own["reach"]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the model comes along, so that a copy optimises its own, which it reads anew."""
        rest = {"_problem": None, "_point": None, "_stuck": None, "_segments": OnSegments()}
        return {**{k: v for k, v in self.__dict__.items() if not k.endswith("_hooks")}, **rest}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimise further parameters of the model.

        Raises:
            ValueError: if one of them is not a parameter of the model.
        """
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        members = {id(value) for value in self.model.parameters()}
        strangers = sum(id(p[1] if isinstance(p, tuple) else p) not in members for p in given)
        if strangers:
            raise ValueError(
                f"{strangers} of the given parameters are not parameters of the model: put them into a module "
                "together with the model"
            )
        super().add_param_group({**param_group, "params": given})


class GaussNewton(CertifiedDescent):
    r"""Gauss-Newton steps: the loss is replaced by its quadratic, the network by its linear model.

    The damping follows the ratio of the decrease to that of the model, by the rule of Levenberg and Marquardt
    (:class:`surefoot.optim.levenberg.LevenbergMarquardt`). By default steps are judged by values as computed;
    ``proof="evaluation"`` proves each of them before it is taken.

    Args:
        model: the network.
        loss: convex, without targets.
        damping: the first κ.
        adapt: whether κ follows the steps; otherwise it stays.
        solver: see :func:`surefoot.oracles.gauss_newton`.
        proof: see :class:`CertifiedDescent`.
        options: ``regularizer`` (a ridge), ``weight_decay``, ``params``, ``lower``, ``progress``, ``group``.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = sf.GaussNewton(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(8)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 0.01
    (True, True)
    """

    _model: Literal["gauss_newton", "newton"] = "gauss_newton"

    def __init__(
        self,
        model: nn.Module,
        loss: Objective | nn.Module | None = None,
        *,
        damping: float = 1.0,
        adapt: bool = True,
        solver: str = "auto",
        proof: Literal["evaluation", "segment"] | None = None,
        **options: Any,
    ) -> None:
        direction = LevenbergMarquardt(self._model, damping, adapt, solver)
        super().__init__(model, loss, direction=direction, proof=proof, **options)


class Newton(GaussNewton):
    r"""Newton steps: the objective is replaced by its quadratic model, and the damping doubled until that is
    bounded below. Everything else is as for :class:`GaussNewton`; the loss need not be convex.

    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), torch.eye(2)
    >>> optimizer = sf.Newton(model, sf.CrossEntropy(), regularizer=sf.Ridge(0.01))
    >>> losses = [optimizer.step(x, torch.tensor([0, 1])) for _ in range(5)]
    >>> losses[-1] < losses[0]
    True
    """

    _model = "newton"


def check_loss(given: Any, bringing: str) -> Objective:
    """The loss of an optimizer, without targets; ``bringing`` says what brings them.

    Raises:
        TypeError, ValueError: if it is none.
    """
    loss = as_objective(given) if isinstance(given, nn.Module) else given
    if not isinstance(loss, Objective):
        raise TypeError(
            "the objective is a loss such as surefoot.CrossEntropy(), or surefoot.objectives.ModelLoss() if the "
            f"model returns its loss; got {type(loss).__name__}"
        )
    if loss.targets is not None:
        raise ValueError(f"pass {type(loss).__name__}() without targets: they come with {bringing}")
    return loss


def _proximal(point: Point, step: float) -> tuple[Point, float]:
    r"""The point :math:`\arg\min_p\frac1{2\gamma}\|p - u + \gamma\nabla F(u)\|^2 + \sum_t\lambda_t\|p_t\|_1`,
    rounded to the types of the weights, and how far it is before that.
    """
    problem = point.problem
    assert problem.regularizer is not None
    moved = problem.unpack(point.vector - step * point.gradient)
    for name, value in moved.items():
        threshold = step * problem.regularizer.threshold_of(name)
        moved[name] = value.sign() * (value.abs() - threshold).clamp_min(0.0)
    vector = problem.pack(moved)
    return problem.at(vector), float(torch.linalg.vector_norm(vector - point.vector))


def _move_statistics(model: nn.Module, x: Any, statistics: Sequence[Any] | None) -> None:
    """Running statistics move once per step that is taken, by those of the batch at the weights before it; by a
    pass of the model where they are not known.
    """
    if statistics is not None and not statistics:
        return
    tracked = {
        path: m for path, m in model.named_modules()
        if isinstance(m, BatchNormalisation) and m.training and m.running_mean is not None
    }  # fmt: skip
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    with torch.no_grad():
        if statistics is None or any(type(module) not in plain for module in tracked.values()):
            args, kwargs = as_inputs(x)
            model(*args, **kwargs) if tracked else None
            return
        for batch in statistics:
            module: Any = tracked.get(batch.module)
            if module is None:
                continue
            part = module.momentum
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
                part = 1.0 / float(module.num_batches_tracked) if part is None else part
            for buffer, value in ((module.running_mean, batch.mean), (module.running_var, batch.variance)):
                buffer.lerp_(value.to(buffer), part or 0.0)
