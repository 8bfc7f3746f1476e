"""What ``surefoot train`` does: training whose steps are proved before they are taken."""

from __future__ import annotations

from typing import Any

from surefoot.cli import checkpoints, output
from surefoot.cli.cases import Subject, trainable
from surefoot.cli.guard import Outcome
from surefoot.cli.options import Run, Start
from surefoot.optim import GuaranteedOptimizer

_HARDLY = 0.999  # of the first loss: a run that ends above this has hardly moved
_SHOWN = 8  # steps in the table


def train_model(start: Start, run: Run, json: bool) -> Outcome:
    """Train a model and show how it went."""
    parts = trainable(start, run.test)
    checkpoints.check_whole(start.model, parts.model, parts.train, parts.test)
    same: dict[str, Any] = {
        "model": start.model, "data": start.data, "objective": start.objective, "optimizer": run.optimizer,
        "batch": run.batch, "damping": run.damping, "test": run.test, "seed": start.seed,
        "single": start.single, "smooth": start.smooth, "eval": start.evaluation,
    }  # fmt: skip
    optimizer = checkpoints.make_optimizer(run.optimizer, parts.model, parts.objective, run.damping)
    keep = checkpoints.Keeper(run.checkpoint, run.every, parts.model, optimizer, same)
    done = keep.resumed()
    batches = checkpoints.Batches(parts.train, run.batch, start.seed)
    with output.progress("training", run.steps, min(done, run.steps)) as advance:
        try:
            for number in range(done, run.steps):
                loss = optimizer.step(*batches(number))
                advance(f"loss {loss:.4g}")
                keep.after(number + 1, last=number + 1 == run.steps)
        except KeyboardInterrupt:
            keep.interrupted()
            return Outcome.INTERRUPTED
    summary = _summary(optimizer, parts)
    if run.save is not None:
        checkpoints.save_weights(parts.model, run.save)
        output.note(f"the weights are in {run.save}")
    if json:
        output.document({"run": same, **summary})
    else:
        _show(f"{start.model} on {start.data or 'digits'}", optimizer, summary)
    if summary["promises"] > 1 and summary["last_loss"] > _HARDLY * summary["first_loss"]:
        output.note("the proved steps are very short. Kinks (ReLU, max-pooling) make them so: try --smooth")
    return Outcome.CERTIFIED if summary["promises_kept"] == summary["promises"] else Outcome.NOT_CERTIFIED


def _summary(optimizer: GuaranteedOptimizer, parts: Subject) -> dict[str, Any]:
    history = optimizer.history
    made, kept = checkpoints.promises(optimizer)
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
        "train_accuracy": checkpoints.accuracy(parts.model, parts.train),
        "test_accuracy": checkpoints.accuracy(parts.model, parts.test),
        "guarantee": optimizer.guarantee.replace("damping='certified'", "--damping certified"),  # type: ignore[attr-defined]
        "losses": [record.loss for record in history],
        "step_sizes": [record.step_size for record in history],
    }


def _show(what: str, optimizer: GuaranteedOptimizer, summary: dict[str, Any]) -> None:
    output.result(f"{what}: {summary['samples']} samples, {summary['parameters']:,} parameters\n")
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
