"""What ``surefoot step`` and ``surefoot cost`` do: what steps of each kind gain, and what they cost."""

from __future__ import annotations

from dataclasses import asdict

import surefoot as sf
from surefoot.cli import output
from surefoot.cli.cases import case, refusals_are_usage, trainable
from surefoot.cli.guard import Outcome
from surefoot.cli.options import Request, Start
from surefoot.cli.trials import KINDS, Point, Trial

_HEAD = ("step", "κ", "part", "decrease", "predicted", "calls", "counted", "at worst", "time")


def count_cost(model: str, request: Request, json: bool) -> Outcome:
    """Count what the steps cost, from shapes alone."""
    with output.working(f"counting {model}"):
        subject = case(model, request)
        with refusals_are_usage(subject):
            found = sf.cost(subject.model, subject.x)
    if json:
        output.document({"model": model, "input": subject.shapes, "cost": found.to_dict()})
    else:
        output.result(f"{model}, input {subject.shapes}\n\n{found}")
    return Outcome.CERTIFIED


def take_steps(start: Start, batch: int, kappa: float, json: bool) -> Outcome:
    """One step of each kind from the same point."""
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
