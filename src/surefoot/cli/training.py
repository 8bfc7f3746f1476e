"""The work of ``surefoot train``: training whose steps are proved before they are taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.cli import output
from surefoot.cli.cases import Subject, trainable
from surefoot.cli.guard import Outcome, UsageError, append_line, writing
from surefoot.cli.options import Run, Start
from surefoot.cli.suiting import in_evaluation, refusal
from surefoot.data import Dataset
from surefoot.errors import SurefootError
from surefoot.graph.checks import selected
from surefoot.loading import optional
from surefoot.objectives import Objective
from surefoot.optim import CertifiedDescent, GaussNewton, GuaranteedOptimizer, Newton, StepRecord
from surefoot.report import write_run
from surefoot.report.page import written_whole
from surefoot.report.run import promises


def samples_of(data: Dataset, size: int | None, seed: int, step: int) -> tuple[Tensor, Tensor | None]:
    """The samples and targets of a step: all, or a part of a random order that is new in every pass.

    A part depends only on the seed and the number of the step, so that a resumed run sees the same parts.
    """
    if size is None or size >= len(data):
        return data.x, data.y
    epoch, part = divmod(step, math.ceil(len(data) / size))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + 1 + epoch))
    chosen = order[part * size : (part + 1) * size]
    return data.x[chosen], None if data.y is None else data.y[chosen]


def check_whole(name: str, model: nn.Module, *parts: Dataset) -> None:
    """Refuse a model that does not take all samples at once, as the losses before and after training need."""
    for part in parts:
        error = refusal(model, part.x) if len(part) else None
        if error is not None:
            raise UsageError(f"'{name}' does not take {len(part)} samples at once: {error}") from error


def make_optimizer(name: str, model: nn.Module, objective: Objective, damping: str) -> GuaranteedOptimizer:
    """The optimizer of this name."""
    if name == "certified":
        return CertifiedDescent(model, objective)
    kind: Any = GaussNewton if name == "gauss-newton" else Newton
    return kind(model, objective, damping=damping)


def save_weights(model: nn.Module, path: Path) -> None:
    """Parameters and buffers, as ``.safetensors`` or as a ``torch.save`` of tensors; whole or not at all."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    with writing(path, "--save"), written_whole(path) as temporary:
        if path.suffix != ".safetensors":
            torch.save(state, temporary)
            return
        writer = optional("safetensors.torch", "safetensors", f"--save {path}", UsageError)
        writer.save_file({name: value.clone() for name, value in state.items()}, str(temporary))


@dataclass(frozen=True)
class Keeper:
    """Keeps a checkpoint up to date: all that a resumed run needs, in a file that is whole at any time."""

    path: Path | None  # the file; ``None`` to keep nothing
    every: int  # number of steps between two checkpoints
    model: nn.Module  # the model
    optimizer: GuaranteedOptimizer  # its optimizer
    run: Mapping[str, Any]  # the options that make two runs the same

    def resumed(self) -> int:
        """Load the checkpoint, if there is one; returns its number of steps."""
        if self.path is None or not self.path.exists():
            return 0
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            saved = content["run"]
        except Exception as error:
            raise UsageError(f"--checkpoint {self.path}: this is not a checkpoint of surefoot train") from error
        different = [
            f"{key} was {saved.get(key)!r}, not {v!r}" for key, v in self.run.items() if saved.get(key) != v
        ]
        if different:
            raise UsageError(
                f"--checkpoint {self.path} is of another run: {'; '.join(different)}. Give the same options or "
                "another file"
            )
        try:
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"--checkpoint {self.path} does not fit the model: {error}") from error
        output.note(f"{self.path} has {len(self.optimizer.history)} steps; the run goes on from there")
        return len(self.optimizer.history)

    def after(self, step: int, last: bool) -> None:
        """Save a checkpoint, if it is time."""
        if step % self.every == 0 or last:
            self._save()

    def interrupted(self) -> None:
        """Save a checkpoint of an interrupted run; an unfinished step has changed nothing."""
        self._save()
        if self.path is not None:
            output.note(
                f"interrupted after {len(self.optimizer.history)} steps; the same command goes on from there"
            )

    def _save(self) -> None:
        if self.path is None:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with writing(self.path, "--checkpoint"), written_whole(self.path) as temporary:
            torch.save({"run": dict(self.run), **state}, temporary)


def accuracy(model: nn.Module, data: Dataset) -> float | None:
    """The fraction of samples whose largest output is that of their class; ``None`` if there are no classes."""
    if data.y is None or data.y.is_floating_point() or not len(data):
        return None
    with in_evaluation(model):
        outputs = selected(model(data.x))
    return float((outputs.argmax(dim=1) == data.y).double().mean())


_HARDLY = 0.999  # a run whose loss is above this part of the first one has hardly moved
_SHOWN = 8  # steps in the table


def train_model(start: Start, run: Run, json: bool, report: Path | None = None) -> Outcome:
    """Train a model and show the result."""
    parts = trainable(start, run.test)
    check_whole(start.model, parts.model, parts.train, parts.test)
    same: dict[str, Any] = {
        "model": start.model, "data": start.data, "objective": start.objective, "optimizer": run.optimizer,
        "batch": run.batch, "damping": run.damping, "test": run.test, "seed": start.seed,
        "single": start.single, "smooth": start.smooth, "eval": start.evaluation,
    }  # fmt: skip
    optimizer = make_optimizer(run.optimizer, parts.model, parts.objective, run.damping)
    keep = Keeper(run.checkpoint, run.every, parts.model, optimizer, same)
    done = keep.resumed()
    batches = partial(samples_of, parts.train, run.batch, start.seed)
    spent = [0.0]  # processor time before each step

    def page() -> None:
        if report is not None and optimizer.history:
            unit = _of_gradient(parts, *batches(0))
            work = None if done else [each / unit for each in spent[: len(optimizer.history)]]
            with writing(report, "--report"):
                write_run(report, optimizer, title=f"{start.model} on {start.data or 'digits'}", work=work)
            output.note(f"the report is in {report}")

    log = _log(run.log, done)
    try:
        with output.progress("training", run.steps, min(done, run.steps)) as advance:
            for number in range(done, run.steps):
                began = time.process_time()
                loss = optimizer.step(*batches(number))
                spent.append(spent[-1] + time.process_time() - began)
                log(optimizer.history[-1])
                advance(f"loss {loss:.4g}")
                keep.after(number + 1, last=number + 1 == run.steps)
    except (KeyboardInterrupt, SurefootError) as stopped:
        if isinstance(stopped, SurefootError) and len(optimizer.history) == done:
            raise  # nothing was reached that could be lost
        try:
            keep.interrupted()
        finally:
            _save(parts.model, run.save)
        page()
        if isinstance(stopped, SurefootError):
            raise
        return Outcome.INTERRUPTED
    summary = _summary(optimizer, parts)
    _save(parts.model, run.save)
    page()
    if json:
        output.document({"run": same, **summary})
    else:
        _show(f"{start.model} on {start.data or 'digits'}", optimizer, summary)
    if summary["promises"] > 1 and summary["last_loss"] > _HARDLY * summary["first_loss"]:
        output.note("the proved steps are very short. Kinks (ReLU, max-pooling) make them so: try --smooth")
    if not summary["promises"]:
        output.note("no step was proved (exit code 1): --damping certified proves steps before they are taken")
        return Outcome.NOT_CERTIFIED
    return Outcome.CERTIFIED if summary["promises_kept"] == summary["promises"] else Outcome.NOT_CERTIFIED


def _of_gradient(parts: Subject, x: Tensor, y: Tensor | None) -> float:
    """The processor time of one gradient: the shortest of three."""
    objective, taken = parts.objective if y is None else parts.objective.bound_to(y), []
    trainable = [value for value in parts.model.parameters() if value.requires_grad]
    for _ in range(3):
        began = time.process_time()
        with in_evaluation(parts.model), torch.enable_grad():
            torch.autograd.grad(objective(selected(parts.model(x))), trainable, allow_unused=True)
        taken.append(time.process_time() - began)
    return max(min(taken), 1e-9)


def _save(model: nn.Module, path: Path | None) -> None:
    if path is not None:
        save_weights(model, path)
        output.note(f"the weights are in {path}")


def _log(path: Path | None, done: int) -> Callable[[StepRecord], None]:
    """A function that writes the record of a step as a line of JSON; a resumed run goes on in the same file.

    The decrease of a step is known only at the next step, so it may be ``null`` in its line.
    """
    if path is None:
        return lambda record: None
    if not done:
        with writing(path, "--log"):
            path.write_text("", encoding="utf-8")
    return lambda record: append_line(path, "--log", output.encoded(asdict(record)))


def _summary(optimizer: GuaranteedOptimizer, parts: Subject) -> dict[str, Any]:
    history = optimizer.history
    promised, kept = promises(optimizer)
    stationarity = optimizer.stationarity()
    return {
        "steps": len(history),
        "samples": len(parts.train),
        "parameters": sum(value.numel() for value in optimizer.trainable.values()),
        "first_loss": history[0].loss if history else None,
        "last_loss": optimizer.value(parts.train.x, parts.train.y),
        "promises": promised,
        "promises_kept": kept,
        "promised_decrease": sum(r.promised_decrease or 0.0 for r in history),
        "smallest_gradient": stationarity.smallest if history else None,
        "proved_gradient": stationarity.bound,
        "train_accuracy": accuracy(parts.model, parts.train),
        "test_accuracy": accuracy(parts.model, parts.test),
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
                *("–" if size is None else f"{size:.2e}" for size in (r.promised_decrease, r.actual_decrease)),
            )
            for r in (history[k] for k in shown)
        ]
        output.table(("step", "loss", "gradient", "step size", "promised", "decrease"), rows, left=0)
        output.result("")
    first = "–" if summary["first_loss"] is None else f"{summary['first_loss']:.6f}"
    facts = [("loss", f"{first} → {summary['last_loss']:.6f} in {summary['steps']} steps")]
    if summary["promises"]:
        facts.append(("promises", f"{summary['promises_kept']} of {summary['promises']} kept"))
    if summary["smallest_gradient"] is not None:
        bound = summary["proved_gradient"]
        proved = "" if bound is None else f"; proved from the promises alone: at most {bound:.2e}"
        facts.append(("gradient", f"smallest norm {summary['smallest_gradient']:.2e}{proved}"))
    if summary["train_accuracy"] is not None:
        tested = "" if summary["test_accuracy"] is None else f", {summary['test_accuracy']:.1%} of unseen samples"
        facts.append(
            ("accuracy", f"{summary['train_accuracy']:.1%} of the samples{tested}; nothing is proved about this")
        )
    facts.append(("guarantee", summary["guarantee"]))
    for name, fact in facts:
        output.result(f"{name:<10} {fact}")
