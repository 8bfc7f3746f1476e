"""Descent without a learning rate: every step is proved to descend before it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from surefoot.errors import EvaluationError, SurefootError
from surefoot.objectives import Objective, Regularizer, Ridge, as_objective
from surefoot.optim.directions import Gradient, from_outside
from surefoot.optim.history import History, Stationarity, StepRecord, best_stationarity
from surefoot.optim.lbfgs import LimitedMemory
from surefoot.optim.levenberg import LevenbergMarquardt
from surefoot.optim.problem import Point, Problem
from surefoot.optim.search import search
from surefoot.optim.segment import OnSegments
from surefoot.processes import Processes
from surefoot.program.checks import as_inputs, is_loader, plainly, unwrapped
from surefoot.torch_private import BatchNormalisation, hooked

_ANGLE = 1e-10  # the least cosine between a direction and minus the gradient
_PART = 0.1  # of a decrease that is hoped for: round-off up to that does not hide it
_NAMED: dict[str, Callable[[], Gradient]] = {
    "lbfgs": LimitedMemory,
    "gradient": Gradient,
    "gauss_newton": LevenbergMarquardt,
    "newton": lambda: LevenbergMarquardt("newton"),
}
Proof = Literal["evaluation", "segment"] | None


class OptimizerError(SurefootError, RuntimeError):
    """A step was not taken; the weights are what they were before."""


class CertifiedDescent(torch.optim.Optimizer):
    r"""Descent with steps that are proved to descend; there is no learning rate to choose.

    A step is proposed by a direction, found by a search along it, proved, and only then are the weights written.
    What is proved is about the objective of the data of the step, in exact arithmetic, between the weights as they
    were and the new ones as they are stored, rounded to their type. A step without a proof is not taken, and
    :attr:`done` says why.

    * ``proof="evaluation"``: the objective is evaluated where the step leads, with a bound on its round-off, and
      the step is taken only if the value in exact arithmetic is lower. It costs a gradient and some per step, and
      works for everything that can be evaluated, along any direction.
    * ``proof="segment"``: the decrease is promised ahead, from bounds on derivatives along the step
      (:mod:`surefoot.optim.segment`), for 3 to 8 gradients. It needs smooth operations, and takes one batch.
    * ``proof=None``: steps are judged by values as computed. Nothing is proved, and their records say so.

    ``step(loader)`` is about the objective of all data, in the memory of one batch. With mini-batches every step
    descends on its own batch; for the objective of all data nothing is proved. In training mode
    batch-normalisation uses the statistics of the batch, in what is proved too; running statistics move once per
    step that is taken. What is remembered from step to step is dropped if data, weights or model are not what the
    last step left.

    Args:
        model: the network.
        loss: without targets; they come with the data.
        direction: ``"lbfgs"``, ``"gradient"``, ``"gauss_newton"``, ``"newton"``; a ``torch.optim`` class or
            instance, which proposes steps and whose state goes on only with what was taken; or a function of
            weights and gradient, by name, that returns a direction.
        proof: see above.
        regularizer: a smooth function of the weights that is added to the loss.
        weight_decay: the same as ``regularizer=surefoot.Ridge(weight_decay)``.
        params: the parameters that are optimised, or parameter groups; all that are trainable by default. The
            others are constants. Layers that are unfrozen later take part after ``add_param_group``.
        lower: a number that the objective never falls below; 0 by default for losses that are not negative.
        progress: called with the record of each step.
        group: a process group of ``torch.distributed`` whose processes have the same model and a part of the data
            each, none at all allowed: all of them call ``step``, on the objective of all samples together. Process
            0 decides; weights and history are the same on all, and the state to be saved is that of process 0.

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
        proof: Proof = "evaluation",
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
                f"surefoot.CrossEntropy()). Got {type(model).__name__}"
            )
        self.model, self.loss = unwrapped(model), check_loss(loss, "the data, step(x, y)")
        if weight_decay and regularizer is not None:
            raise ValueError("weight_decay is a ridge: give it or a regularizer, not both")
        self.regularizer = Ridge(weight_decay) if weight_decay else regularizer
        if self.regularizer is not None and not self.regularizer.smooth:
            raise ValueError(f"{self.regularizer!r} has kinks, where steps stall: use a surefoot.Ridge")
        if proof not in ("evaluation", "segment", None):
            raise ValueError(f"proof is 'evaluation', 'segment' or None, got {proof!r}")
        if proof == "segment" and (self.regularizer is not None or group is not None):
            raise ValueError("proof='segment' is about the loss of one batch: use proof='evaluation'")
        if group is not None and not self.loss.takes_targets:
            raise ValueError("with a group, the objective is a mean over samples with targets")
        self.lower = lower if lower is not None else 0.0 if self.loss.nonnegative else -math.inf
        self.proof, self.progress = proof, progress
        self.history: History[StepRecord] = History()
        trainable = [value for value in self.model.parameters() if value.requires_grad]
        if not trainable:
            raise ValueError("no parameter of the model asks for gradients: call model.requires_grad_(True)")
        super().__init__(trainable if params is None else params, {})
        self.processes = None if group is None else Processes(group)
        if isinstance(direction, str) and direction in _NAMED:
            direction = _NAMED[direction]()
        weights, ours = self.trainable, isinstance(direction, Gradient)
        self.direction: Gradient = direction if ours else from_outside(direction, weights)
        if isinstance(self.direction, LevenbergMarquardt) and not isinstance(self.regularizer, Ridge | None):
            raise ValueError(f"second-order models take a surefoot.Ridge, got {self.regularizer!r}")
        self._fallback, self._segments = Gradient(trials=40), OnSegments()
        self._problem: Problem | None = None
        self._point: Point | None = None
        self._stuck: tuple[Point, str] | None = None  # where no step was found, and why
        self._members: list[int] = []  # the parameters of the groups at the last step

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are optimised, by name."""
        members = {id(value) for group in self.param_groups for value in group["params"]}
        named = dict(self.model.named_parameters())
        if strangers := len(members - {id(value) for value in named.values()}):
            raise ValueError(f"{strangers} of the given parameters are not parameters of the model")
        return {name: value for name, value in named.items() if value.requires_grad and id(value) in members}

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
        news = self._prepare(x, y)
        assert self._problem is not None
        try:
            if self.processes is None:
                record = self._advance()
            else:
                record = self.processes.led(self._advance, self._serve, OptimizerError)
                self.processes.spread(self._problem.weights.values())
        except EvaluationError as error:
            raise OptimizerError(str(error)) from error
        if self.processes is not None and not self.processes.leads:
            self._point = self._problem.start
        run = self.history[-1].run + bool(news) if self.history else 0
        if run:
            record = replace(record, run=run, note="; ".join(filter(None, (news, record.note))))
        self.history.append(record)
        if self.progress is not None:
            self.progress(record)
        return record.loss

    def _prepare(self, x: Any, y: Any) -> str:
        """Set problem and point of this step; says what is not as the last step left it."""
        problem, members = self._problem, [id(value) for group in self.param_groups for value in group["params"]]

        def look() -> tuple[bool, bool, int]:
            self._check_data(x, y)
            if problem is None or members != self._members or not problem.is_about(x, y):
                return False, False, len(self.history)
            return True, self._point is not None and problem.is_at(self._point), len(self.history)

        if self.processes is None:
            same, still, _ = look()
        else:  # all processes start anew where one has to
            several = self.processes.gathered(look)
            same, still = all(one[0] for one in several), all(one[1] for one in several)
            if len({one[2] for one in several}) > 1:
                raise OptimizerError("the processes have taken different numbers of steps: load one state on all")
        if still:
            return ""
        problem = problem if same else self._read(x, y)
        assert problem is not None
        if self._problem is not None:
            for each in (self.direction, self._fallback, self._segments):
                each.forget()
        self._problem, self._point, self._members, self._stuck = problem, problem.start, members, None
        what = "the weights changed" if same else "data or function changed"
        return f"{what} since the last step: what is proved of the run begins anew" if self.history else ""

    def _read(self, x: Any, y: Any) -> Problem:
        options: dict[str, Any] = {"regularizer": self.regularizer, "processes": self.processes}

        def read() -> Problem:
            return Problem(self.model, self.loss, x, y, weights=self.trainable, **options)

        try:
            return read() if self.processes is None else self.processes.together(read)
        except EvaluationError as error:
            raise OptimizerError(str(error)) from error

    def _check_data(self, x: Any, y: Any) -> None:
        """Targets are given exactly where the loss takes them; a loader brings them."""
        takes, many = self.loss.takes_targets, is_loader(x)
        if x is None:
            raise OptimizerError(
                "a step takes the batch: write step(x, y). It computes the loss and its gradient, so there is no "
                "backward() before it"
            )
        if many and y is not None:
            raise OptimizerError("a loader brings its targets: step(loader)")
        if many and self.proof == "segment":
            raise OptimizerError("proof='segment' is about one batch: proof='evaluation' takes a loader")
        if not many and (y is None) == takes:
            how = "takes targets: step(x, y)" if takes else "has no targets: step(x)"
            raise OptimizerError(f"{type(self.loss).__name__} {how}")

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
        problem = point.problem
        loss, size = point.value, point.gradient_norm
        if not math.isfinite(loss):
            raise OptimizerError(
                "the loss is not finite: check the data for NaN and infinite entries, and the parameters of the "
                "model"
            )
        slopes = problem.unpack(point.gradient)
        if not math.isfinite(size):
            wrong = next((name for name, part in slopes.items() if not bool(part.isfinite().all())), "all")
            raise OptimizerError(
                f"the gradient with respect to '{wrong}' is not finite at loss {loss:g}: look for divisions by "
                "zero and overflow there, or compute in double precision"
            )
        for name, parameter in problem.weights.items():
            parameter.grad = slopes[name].to(parameter.dtype)
        promise: float | None = None if self.proof is None else 0.0
        stayed = StepRecord(loss, size, 0.0, 0.0, promise)
        if size == 0:
            return replace(stayed, note="the gradient is zero")
        if self._stuck is not None and self._stuck[0] is point:
            return replace(stayed, note=self._stuck[1])
        outcome = self._search(point)
        if outcome is None:
            self._stuck = point, self._reason(point)
            return replace(stayed, note=self._stuck[1])
        step, after, smoothness, note = outcome
        if problem.stream is None:  # a loader takes running statistics as they are
            _move_statistics(self.model, problem.x, point.statistics)
        problem.write(after)
        self._point = after
        if self.proof == "segment":
            promise = self._segments.decrease
        elif self.proof == "evaluation":
            promise = math.nextafter(point.enclosed(math.inf).lower - after.enclosed(math.inf).upper, 0.0)
        after.release()
        return StepRecord(point.value, size, step, point.value - after.value, promise, smoothness, note)

    def _search(self, point: Point) -> tuple[float, Point, float | None, str] | None:
        """A step along the direction, else along the gradient, that is proved to descend."""
        for direction in (self.direction, self._fallback):
            vector, first = direction.propose(point)
            slope, length = float(point.gradient @ vector), float(torch.linalg.vector_norm(vector))
            outcome, smoothness = None, None
            related = -slope >= _ANGLE * length * point.gradient_norm and 0 < length < math.inf
            if related and self.proof == "segment":
                outcome, smoothness = self._segments.step(point, vector), self._segments.curvature
            elif related:
                least = 0.0  # a decrease below which a step is of no use
                if self.proof is not None:
                    least = point.enclosed(math.inf).error
                    if least > -first * slope:
                        least = point.enclosed(-_PART * first * slope).error
                outcome = search(point, vector, first, slope, direction.needs_curvature, direction.trials, least)
            if outcome is not None and (self.proof != "evaluation" or outcome[1].is_below(point)):
                step, after = outcome
                direction.learn(point, after, step)
                if direction is self.direction:
                    return step, after, smoothness, ""
                if self.direction.needs_curvature:
                    self.direction.learn(point, after, step)
                return step, after, smoothness, "along the gradient"
            direction.reject()
            if type(direction) is Gradient and related:
                break
        return None

    def _reason(self, point: Point) -> str:
        """Why no step was found."""
        if self.proof is not None and not math.isfinite(point.enclosed().error):
            return "no step: the round-off of the objective cannot be bounded here"
        kind = str(next(iter(point.weights.values())).dtype).removeprefix("torch.")
        if kind == "float64":
            return "no step: descent cannot be told from round-off here"
        return f"no step: it is below the resolution of {kind}, use double precision"

    @plainly
    def value(self, x: Any, y: Any = None) -> float:
        """The objective at the present weights, in double precision; all processes of a group ask together."""
        self._check_data(x, y)
        problem = self._read(x, y)
        if self.processes is None:
            return problem.start.value
        return float(self.processes.led(lambda: problem.start.value, lambda _: problem.assist(), OptimizerError))

    def stationarity(self) -> Stationarity:
        """The smallest gradient norm of the last run and the proved bound on it."""
        return best_stationarity(self.history, self.lower)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        taken = [record for record in self.history if record.step_size]
        proved = sum(record.proved for record in taken)
        if proved < len(taken):
            return f"{proved} of {len(taken)} steps are proved; the others are judged by computed values alone."
        return (
            f"Every one of the {len(taken)} steps that were taken lowers the objective of its data in exact "
            "arithmetic, by what its record says."
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
        self.history = History.of(StepRecord, own["history"])
        self._problem = self._point = self._stuck = None
        self.direction.load(own["direction"])
        self._fallback.load(own["fallback"])
        self._segments.reach = own["reach"]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the model comes along, so that a copy optimises its own, which it reads anew."""
        rest = {"_problem": None, "_point": None, "_stuck": None, "_segments": OnSegments()}
        return {**{k: v for k, v in self.__dict__.items() if not k.endswith("_hooks")}, **rest}


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
        proof: Proof = None,
        **options: Any,
    ) -> None:
        direction = LevenbergMarquardt(self._model, damping, adapt, solver)
        super().__init__(model, loss, direction=direction, proof=proof, **options)


class Newton(GaussNewton):
    """Newton steps: the objective is replaced by its quadratic model, and the damping doubled until that has a
    minimum. Everything else is as for :class:`GaussNewton`; the loss need not be convex.

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


def _move_statistics(model: nn.Module, x: Any, statistics: Sequence[Any] | None) -> None:
    """Running statistics move once per step that is taken, by those of the batch at the weights before it; by a
    pass of the model where they are not known.
    """
    if statistics is not None and not statistics:
        return
    tracked: dict[str, Any] = {
        path: module for path, module in model.named_modules()
        if isinstance(module, BatchNormalisation) and module.training and module.running_mean is not None
    }  # fmt: skip
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    with torch.no_grad():
        if statistics is None or any(type(module) not in plain for module in tracked.values()):
            args, kwargs = as_inputs(x)
            model(*args, **kwargs) if tracked else None
            return
        for batch in (each for each in statistics if each.module in tracked):
            module, part = tracked[batch.module], tracked[batch.module].momentum
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
                part = 1.0 / float(module.num_batches_tracked) if part is None else part
            module.running_mean.lerp_(batch.mean.to(module.running_mean), part or 0.0)
            module.running_var.lerp_(batch.variance.to(module.running_var), part or 0.0)
