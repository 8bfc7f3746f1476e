"""The work of ``surefoot step``, ``cost`` and ``converge``: gain and cost of steps, and where they lead."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.cli import output
from surefoot.cli.cases import case, refusals_are_usage, trainable
from surefoot.cli.guard import Outcome, UsageError, writing
from surefoot.cli.options import Request, Start
from surefoot.complexity import Cost, chain_cost
from surefoot.errors import SurefootError
from surefoot.objectives import Objective
from surefoot.oracles import Step
from surefoot.oracles.search_along import armijo
from surefoot.report import write_convergence
from surefoot.theorems import record as theorems
from surefoot.theorems import until_proved

KINDS = ("gradient", "Gauss-Newton, dual", "Gauss-Newton, Gram", "Newton, CG")
_OPTIMIZERS = {"gradient": "certified", "Newton, CG": "newton"}
_AT_WORST = {"gradient": "gradient", "Gauss-Newton, dual": "Gauss-Newton, dual, one forward pass"}
_QUICK = 5.0  # seconds; what takes less is measured again, without first-time costs


@dataclass(frozen=True)
class Trial:
    """One step."""

    name: str  # the oracle and its method
    kappa: float  # the weight of the proximal term that was used
    part: float  # the part of the step that was taken: less than 1 if the whole one did not descend enough
    decrease: float  # the decrease of the objective
    predicted: float  # the decrease of its model
    calls: int  # calls of the automatic-differentiation oracle
    counted: float | None  # the cost of these calls, in gradients; ``None`` where the work is not in calls
    at_worst: float | None  # the paper's bound on that; ``None`` where it has none
    time: float  # measured, in gradients
    solved: bool  # whether the model was minimised
    status: str  # the status of the solver, in words

    @property
    def gain_per_gradient(self) -> float:
        """Decrease per time of a gradient."""
        return self.decrease / self.time if self.decrease > 0 else 0.0

    @property
    def optimizer(self) -> str:
        """Its name for ``surefoot train --optimizer``."""
        return _OPTIMIZERS.get(self.name, "gauss-newton")


@dataclass(frozen=True)
class Point:
    """A point to take steps from."""

    chain: sf.Chain
    objective: Objective
    loss: float
    step_size: float
    cost: Cost
    gradient_time: float

    @classmethod
    def of(cls, model: nn.Module, x: Tensor, objective: Objective, y: Tensor | None) -> Point:
        """The present parameters."""
        chain = sf.Chain(model, x)
        bound = objective if y is None else objective.bound_to(y)
        taken = [_timed(lambda: sf.oracles.gradient(chain, bound))[1] for _ in range(4)]
        with torch.no_grad():
            loss = float(bound(chain.value()))
        return cls(chain, bound, loss, _proved_step(model, x, objective, y), chain_cost(chain), min(taken))

    def trial(self, name: str, kappa: float) -> Trial:
        """Take one step."""
        kappa = 1 / self.step_size if name == "gradient" and self.step_size > 0 else kappa
        ask = self._oracle(name, kappa)
        step, seconds = _timed(ask)
        if seconds < _QUICK:
            seconds = min(seconds, *(_timed(ask)[1] for _ in range(2)))
        part, decrease = self._taken(step)
        costs = {oracle.name: oracle.relative for oracle in self.cost.oracles}
        return Trial(
            name=name,
            kappa=step.kappa,
            part=part,
            decrease=decrease,
            predicted=step.model_decrease,
            calls=step.calls,
            counted=None if "Gram" in name else self._counted(step.calls),
            at_worst=costs.get(_AT_WORST.get(name, "")),
            time=seconds / self.gradient_time,
            solved=step.solved,
            status=step.status,
        )

    def _oracle(self, name: str, kappa: float) -> Callable[[], Step]:
        chain, objective = self.chain, self.objective
        return {
            "gradient": lambda: sf.oracles.gradient(chain, objective, kappa),
            "Gauss-Newton, dual": lambda: sf.oracles.gauss_newton(chain, objective, kappa, "dual"),
            "Gauss-Newton, Gram": lambda: sf.oracles.gauss_newton(chain, objective, kappa, "dual_gram"),
            "Newton, CG": lambda: sf.oracles.newton(chain, objective, kappa, "cg"),
        }[name]

    def _counted(self, calls: int) -> float:
        """The cost of one forward pass and ``calls`` backward passes, in gradients."""
        passes = self.cost.structured
        forward = passes.forward_backward - passes.backward
        return (forward + calls * passes.backward) / max(passes.forward_backward, 1)

    def _taken(self, step: Step) -> tuple[float, float]:
        """The part of the step that descends enough, and its decrease."""
        parameters = {path: value.detach() for path, value in self.chain.parameters.items()}

        def value_at(part: float) -> float:
            with torch.no_grad():
                moved = {path: value + part * step.direction[path] for path, value in parameters.items()}
                return float(self.objective(self.chain.value(moved)))

        slope = -2 * step.model_decrease  # ⟨g, v⟩ = -⟨g, H⁻¹g⟩ at the minimiser of ⟨g, v⟩ + ½⟨v, Hv⟩
        accepted = armijo(value_at, self.loss, slope) if slope < 0 else None
        return (0.0, 0.0) if accepted is None else (accepted[0], self.loss - accepted[1])


def _proved_step(model: nn.Module, x: Tensor, objective: Objective, y: Tensor | None) -> float:
    """The step against the gradient that is proved to descend the most; 0 if there is none."""
    optimizer = sf.optim.CertifiedDescent(copy.deepcopy(model), objective, direction="gradient")
    try:
        optimizer.step(x, y)
    except SurefootError:
        return 0.0
    size = optimizer.history[-1].step_size
    return size if math.isfinite(size) else 0.0


def _timed(ask: Callable[[], Step]) -> tuple[Step, float]:
    began = time.perf_counter()
    step = ask()
    return step, time.perf_counter() - began


_HEAD = ("step", "κ", "part", "decrease", "predicted", "calls", "counted", "at worst", "time")


def count_cost(model: str, request: Request, json: bool) -> Outcome:
    """Count what the steps cost, from shapes alone."""
    with output.working(f"counting {model}"):
        subject = case(model, request)
        with refusals_are_usage(subject):
            cost = sf.cost(subject.model, subject.x)
    if json:
        output.document({"model": model, "input": subject.shapes, "cost": cost.to_dict()})
    else:
        output.result(f"{model}, input {subject.shapes}\n\n{cost.title}")
        for number, (left, (head, *rows)) in enumerate(cost.tables):
            if number:
                output.result("")
            output.table(head, rows, left)
    return Outcome.CERTIFIED


def take_steps(start: Start, batch: int, kappa: float, json: bool) -> Outcome:
    """Take one step of each kind from the same point, and compare them."""
    parts = trainable(start, test=0.0)
    x, y = parts.train.x[:batch], parts.train.y
    point = Point.of(parts.model, x, parts.objective, None if y is None else y[:batch])
    trials: list[Trial] = []
    with output.progress("taking steps", len(KINDS)) as advance:
        for kind in KINDS:
            trials.append(point.trial(kind, kappa))
            advance(kind)
    best = max(trials, key=lambda trial: trial.gain_per_gradient)
    about = {"model": start.model, "data": start.data, "samples": len(x), "loss": point.loss}
    if json:
        output.document({**about, "steps": [asdict(trial) for trial in trials], "recommended": best.name})
        return Outcome.CERTIFIED
    output.result(f"{start.model} on {len(x)} samples of {start.data}, loss {point.loss:.6f}\n")
    output.table(_HEAD, [_row(trial) for trial in trials])
    output.result(
        "\ncost in gradients: counted from the calls, at worst (see surefoot cost), and in measured time\n"
    )
    output.result("\n".join(_advice(f"{start.model} --data {start.data}", trials, best)))
    return Outcome.CERTIFIED


def _row(trial: Trial) -> tuple[str, ...]:
    costs = (trial.counted, trial.at_worst, trial.time)
    return (
        trial.name,
        f"{trial.kappa:.3g}",
        f"{trial.part:.3g}",
        f"{trial.decrease:.3e}",
        f"{trial.predicted:.3e}",
        str(trial.calls),
        *("–" if gradients is None else f"{gradients:.3g}" for gradients in costs),
    )


def _advice(subject: str, trials: list[Trial], best: Trial) -> list[str]:
    lines = [f"{trial.name}: {trial.status}" for trial in trials if not trial.solved]
    if best.decrease <= 0:
        return [*lines, "No step decreases the loss: the point is stationary, or a larger --kappa is needed."]
    others = [trial for trial in trials if trial is not best and trial.gain_per_gradient > 0]
    second = max(others, key=lambda trial: trial.gain_per_gradient, default=best)
    times = best.gain_per_gradient / second.gain_per_gradient
    more = "" if second is best else f", {times:.2g} times as much as {second.name}"
    return [
        *lines,
        f"Most for its time here: {best.name}, {best.gain_per_gradient:.2e} of loss per gradient{more}.",
        f"To go on: surefoot train {subject} --optimizer {best.optimizer}",
        "One step says little about later ones: near a minimum quadratic models gain.",
    ]


METHODS: dict[str, Any] = {name.replace("_", "-"): name for name in theorems.METHODS}


def prove(
    start: Start, batch: int, steps: int, method: str, ridge: float, json: bool, report: Path | None
) -> Outcome:
    """Train until a theorem applies: by Gauss-Newton steps, or by Newton steps for other objectives."""
    if method not in METHODS:
        raise UsageError(f"--method is one of {', '.join(METHODS)}, got {method!r}")
    parts = trainable(start, test=0.0)
    x, y = parts.train.x[:batch], parts.train.y
    if y is None:
        raise UsageError(
            f"--objective {start.objective} has no targets: convergence is proved for those that have"
        )
    regularizer = sf.Ridge(ridge) if ridge else None
    interpolates = isinstance(parts.objective, sf.Square) and regularizer is None
    kind, called = (sf.optim.GaussNewton, "Gauss-Newton") if interpolates else (sf.optim.Newton, "Newton")
    optimizer = kind(parts.model, parts.objective, regularizer=regularizer)
    objective = parts.objective.bound_to(y[:batch])
    with output.working("taking steps until convergence is proved"):
        taken, verdict = until_proved(
            lambda: optimizer.step(x, y[:batch]), parts.model, x, objective, regularizer, METHODS[method], steps
        )
    if report is not None:  # before anything is printed: a closed pipe does not lose it
        name = f"Convergence of {start.model} on {len(x)} samples of {start.data}, after {taken} steps"
        with writing(report, "--report"):
            write_convergence(report, verdict, title=name)
        output.note(f"the report is in {report}")
    if json:
        output.document({"model": start.model, "data": start.data, "samples": len(x), "steps": taken,
                         "convergence": verdict.to_dict()})  # fmt: skip
    else:
        output.result(f"{start.model} on {len(x)} samples of {start.data}, after {taken} {called} steps\n")
        output.result(str(verdict))
    return Outcome.CERTIFIED if verdict.proved else Outcome.NOT_CERTIFIED
