"""``surefoot train``: training whose steps are proved before they are taken."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.files import check_destination
from surefoot.cli.frame import Outcome, UsageError, guarded

if TYPE_CHECKING:
    from surefoot.optim import GuaranteedOptimizer

_PANEL = "Training"
_HARDLY = 0.999  # of the first loss: a run that ends above this has hardly moved


class OptimizerName(StrEnum):
    """Whose steps."""

    certified = "certified"
    gauss_newton = "gauss-newton"
    newton = "newton"


class Damping(StrEnum):
    """How the damping of Gauss-Newton and Newton steps is found."""

    adapted = "adapted"
    certified = "certified"


@guarded
def train(
    model: o.OptionalModel = "mlp@activation=tanh",
    data: o.Data = "digits",
    optimizer: Annotated[
        OptimizerName,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_PANEL,
            help="certified (descent without a learning rate, proved), gauss-newton or newton.",
        ),
    ] = OptimizerName.certified,
    damping: Annotated[
        Damping,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_PANEL,
            help="Of gauss-newton and newton: adapted (by the loss after a step) or certified (proved before it).",
        ),
    ] = Damping.adapted,
    steps: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_PANEL, help="In all, those of a checkpoint included.")
    ] = 100,
    objective: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_PANEL, help="The loss: cross-entropy, square, …")
    ] = "cross-entropy",
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_PANEL,
            help="Samples per step. Default: all; with fewer, each step is proved for its own batch.",
        ),
    ] = None,
    test: Annotated[
        float,
        typer.Option(metavar="PART", rich_help_panel=_PANEL, help="Part of the data that is kept for testing."),
    ] = 0.25,
    single: Annotated[
        bool,
        typer.Option("--single", metavar="", rich_help_panel=_PANEL, help="Single precision; double by default."),
    ] = False,
    weights: o.Weights = None,
    smooth: o.Smooth = False,
    evaluation: o.Eval = False,
    seed: o.Seed = 0,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_PANEL, help="Write the weights: .safetensors or .pt."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.pt",
            rich_help_panel=_PANEL,
            help="Resume from this file if it exists; keep it up to date.",
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_PANEL, help="Steps between two checkpoints.")
    ] = 25,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> Outcome:
    """Train a model without a learning rate: every step is proved to descend before it is taken.

    Exit code 1 if nothing can be proved because the smoothness is infinite, or if a promise was not kept.

    Examples:

      surefoot train

      surefoot train mlp@activation=tanh --data mnist-5k --batch 500 --steps 200

      surefoot train mymodels:net --data mine.npz --save net.safetensors

      surefoot train --optimizer gauss-newton --steps 10 --checkpoint run.pt
    """
    if steps < 0 or every < 1 or not 0 <= test < 1 or (batch is not None and batch < 1):
        raise UsageError("--steps is at least 0, --every and --batch at least 1, and --test between 0 and 1")
    check_destination(save, "--save", (".safetensors", ".pt", ".pth"))
    check_destination(checkpoint, "--checkpoint", (".pt", ".pth"))
    with output.working("importing torch"):
        from surefoot.cli import training
        from surefoot.cli.subject import trainable

    parts = trainable(model, data or "digits", objective, weights, smooth, evaluation, seed, test, single)
    training.check_whole(model, parts.model, parts.train, parts.test)
    run: dict[str, Any] = {
        "model": model, "data": data, "objective": objective, "optimizer": optimizer.value, "batch": batch,
        "damping": damping.value, "test": test, "seed": seed, "single": single, "smooth": smooth,
        "eval": evaluation,
    }  # fmt: skip
    chosen = training.make_optimizer(optimizer.value, parts.model, parts.objective, damping.value)
    keep = training.Keeper(checkpoint, every, parts.model, chosen, run)
    done = keep.resumed()
    batches = training.Batches(parts.train, batch, seed)
    with output.progress("training", steps, min(done, steps)) as advance:
        try:
            for number in range(done, steps):
                loss = chosen.step(*batches(number))
                advance(f"loss {loss:.4g}")
                keep.after(number + 1, last=number + 1 == steps)
        except KeyboardInterrupt:
            keep.interrupted()
            return Outcome.INTERRUPTED
    summary = _summary(chosen, parts)
    if save is not None:
        training.save_weights(parts.model, save)
        output.note(f"the weights are in {save}")
    if json:
        output.document({"run": run, **summary})
    else:
        _show(model, data or "digits", chosen, summary)
    if summary["promises"] > 1 and summary["last_loss"] > _HARDLY * summary["first_loss"]:
        output.note("the proved steps are very short. Kinks (ReLU, max-pooling) make them so: try --smooth")
    return Outcome.CERTIFIED if summary["promises_kept"] == summary["promises"] else Outcome.NOT_CERTIFIED


def _summary(optimizer: GuaranteedOptimizer, parts: Any) -> dict[str, Any]:
    from surefoot.cli import training

    history = optimizer.history
    made, kept = training.promises(optimizer)
    found = optimizer.stationarity()
    return {
        "steps": len(history),
        "samples": len(parts.train),
        "parameters": sum(value.numel() for value in optimizer.trainable.values()),
        "first_loss": history[0].loss if history else None,
        "last_loss": optimizer.value(parts.train.x, parts.train.y),
        "promises": made,
        "promises_kept": kept,
        "promised_decrease": sum(r.promised_decrease or 0.0 for r in history),
        "smallest_gradient": found.smallest if history else None,
        "proved_gradient": found.bound,
        "train_accuracy": training.accuracy(parts.model, parts.train),
        "test_accuracy": training.accuracy(parts.model, parts.test),
        "guarantee": optimizer.guarantee.replace("damping='certified'", "--damping certified"),  # type: ignore[attr-defined]
        "losses": [record.loss for record in history],
        "step_sizes": [record.step_size for record in history],
    }


_SHOWN = 8


def _show(model: str, data: str, optimizer: GuaranteedOptimizer, summary: dict[str, Any]) -> None:
    output.result(f"{model} on {data}: {summary['samples']} samples, {summary['parameters']:,} parameters\n")
    history = optimizer.history
    if history:
        shown = sorted({round(k * (len(history) - 1) / (_SHOWN - 1)) for k in range(_SHOWN)})
        rows = [
            (
                str(r.step),
                f"{r.loss:.6f}",
                f"{r.gradient_norm:.2e}",
                f"{r.step_size:.3e}",
                "–" if r.promised_decrease is None else f"{r.promised_decrease:.2e}",
                "–" if r.actual_decrease is None else f"{r.actual_decrease:.2e}",
            )
            for r in (history[k] for k in shown)
        ]
        output.table(("step", "loss", "gradient", "step size", "promised", "decrease"), rows, left=0)
        output.result("")
    facts = [
        ("loss", f"{_number(summary['first_loss'])} → {summary['last_loss']:.6f} in {summary['steps']} steps")
    ]
    if summary["promises"]:
        facts.append(("promises", f"{summary['promises_kept']} of {summary['promises']} kept"))
    if summary["smallest_gradient"] is not None:
        bound = summary["proved_gradient"]
        proved = "" if bound is None else f"; proved from the promises alone: at most {bound:.2e}"
        facts.append(("gradient", f"smallest norm {summary['smallest_gradient']:.2e}{proved}"))
    if summary["train_accuracy"] is not None:
        tested = "" if summary["test_accuracy"] is None else f", {summary['test_accuracy']:.1%} of unseen samples"
        facts.append(
            ("accuracy", f"{summary['train_accuracy']:.1%} of the samples{tested}; of this nothing is proved")
        )
    facts.append(("guarantee", summary["guarantee"]))
    for name, fact in facts:
        output.result(f"{name:<10} {fact}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"
