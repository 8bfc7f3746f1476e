"""``surefoot step``: one step of each kind on a model and a batch, what it gains and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.frame import Outcome, UsageError, guarded

if TYPE_CHECKING:
    from surefoot.cli.trials import Trial


@guarded
def step(
    model: o.OptionalModel = "mlp@activation=tanh",
    data: o.Data = "digits",
    batch: Annotated[int, typer.Option(metavar="N", help="Number of samples, a random part of the data.")] = 64,
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="The loss: cross-entropy, square, …")
    ] = "cross-entropy",
    kappa: Annotated[
        float,
        typer.Option(metavar="κ", help="Weight of ½‖v‖² in the quadratic models; halving it lengthens steps."),
    ] = 1.0,
    single: Annotated[
        bool, typer.Option("--single", metavar="", help="Single precision; double by default.")
    ] = False,
    weights: o.Weights = None,
    smooth: o.Smooth = False,
    evaluation: o.Eval = False,
    seed: o.Seed = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> Outcome:
    """Take one gradient, Gauss-Newton and Newton step, and say what each gains, what it costs and which to use.

    The cost is in gradients: as counted for this step, at worst (surefoot cost), and in measured time.

    The gradient has the step size that is proved to descend the most; without a proof it is 1/κ.

    Examples:

      surefoot step

      surefoot step mlp --data mnist-5k --batch 128 --kappa 0.1
    """
    if batch < 1 or not kappa > 0:
        raise UsageError("--batch is at least 1 and --kappa is positive")
    with output.working("importing torch"):
        from surefoot.cli.subject import trainable
        from surefoot.cli.trials import KINDS, Start

    parts = trainable(
        model, data or "digits", objective, weights, smooth, evaluation, seed, test=0.0, single=single
    )
    x, y = parts.train.x[:batch], parts.train.y
    start = Start.of(parts.model, x, parts.objective, None if y is None else y[:batch])
    trials: list[Trial] = []
    with output.progress("taking steps", len(KINDS)) as advance:
        for kind in KINDS:
            trials.append(start.trial(kind, kappa))
            advance(kind)
    best = max(trials, key=lambda trial: trial.gain_per_gradient)
    if json:
        output.document(
            {
                "model": model, "data": data, "samples": len(x), "loss": start.loss,
                "steps": [trial.to_dict() for trial in trials], "recommended": best.name,
            }
        )  # fmt: skip
        return Outcome.CERTIFIED
    output.result(f"{model} on {len(x)} samples of {data}, loss {start.loss:.6f}\n")
    output.table(_HEAD, [_row(trial) for trial in trials])
    output.result(
        "\ncost in gradients: counted from the calls, at worst (see surefoot cost), and in measured time\n"
    )
    for line in _advice(f"{model} --data {data}", trials, best):
        output.result(line)
    return Outcome.CERTIFIED


_HEAD = ("step", "κ", "part", "decrease", "predicted", "calls", "counted", "at worst", "time")


def _row(trial: Any) -> tuple[str, ...]:
    return (
        trial.name,
        f"{trial.kappa:.3g}",
        f"{trial.part:.3g}",
        f"{trial.decrease:.3e}",
        f"{trial.predicted:.3e}",
        str(trial.calls),
        _cost(trial.counted),
        _cost(trial.at_worst),
        _cost(trial.time),
    )


def _cost(gradients: float | None) -> str:
    return "–" if gradients is None else f"{gradients:.3g}"


def _advice(subject: str, trials: list[Trial], best: Trial) -> list[str]:
    lines = [f"{trial.name}: {trial.status}" for trial in trials if not trial.solved]
    if best.decrease <= 0:
        return [*lines, "No step decreases the loss: the point is stationary, or a larger --kappa is needed."]
    others = [trial for trial in trials if trial is not best and trial.gain_per_gradient > 0]
    second = max(others, key=lambda trial: trial.gain_per_gradient, default=None)
    more = (
        ""
        if second is None
        else f", {best.gain_per_gradient / second.gain_per_gradient:.2g} times as much as {second.name}"
    )
    lines.append(f"Most for its time here: {best.name}, {best.gain_per_gradient:.2e} of loss per gradient{more}.")
    option = best.optimizer
    lines.append(f"To go on: surefoot train {subject} --optimizer {option}")
    lines.append("One step says little about later ones: near a minimum quadratic models gain.")
    return lines
