"""The work of ``surefoot train`` and ``converge``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.cli import output
from surefoot.cli.commands import Source
from surefoot.cli.frame import Outcome, UsageError, writing
from surefoot.cli.subject import evaluated, objective_of, subject_of
from surefoot.data import Dataset
from surefoot.errors import SurefootError
from surefoot.loading import optional
from surefoot.program.checks import selected
from surefoot.report import run_document, write_report
from surefoot.report.page import written_whole
from surefoot.theorems.record import METHODS

_SHOWN = 8  # steps in the table


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and how."""

    model: str
    source: Source
    objective: str
    optimizer: str
    steps: int
    batch: int | None
    test: float

    def start(self) -> tuple[nn.Module, Any, Dataset, Dataset]:
        """The model, the objective without its targets, the data to train on and those to test on."""
        subject = subject_of(self.model, replace(self.source, data=self.source.data or "digits"))
        assert subject.data is not None
        objective, y = objective_of(self.objective, subject.data)
        if not any(value.requires_grad for value in subject.model.parameters()):
            raise UsageError(f"'{self.model}' has no parameter that asks for gradients: there is nothing to train")
        train, test = replace(subject.data, y=y).to(torch.float64).split(1 - self.test, self.source.seed)
        if not len(train):
            raise UsageError(
                f"--data {subject.data.name} leaves no sample to train on: it has {len(subject.data)}"
            )
        return subject.model.double(), objective, train, test

    def samples(self, data: Dataset, step: int) -> tuple[Tensor, Tensor | None]:
        """The samples of a step: all, or a part of a random order that is new in every pass."""
        if self.batch is None or self.batch >= len(data):
            return data.x, data.y
        epoch, part = divmod(step, math.ceil(len(data) / self.batch))
        generator = torch.Generator().manual_seed(self.source.seed + 1 + epoch)
        chosen = torch.randperm(len(data), generator=generator)[part * self.batch :][: self.batch]
        return data.x[chosen], None if data.y is None else data.y[chosen]


def train(run: Run, save: Path | None, json: bool, report: Path | None) -> Outcome:
    """Train a model and show the result; what was reached is written also if the run ends early."""
    model, objective, data, test = run.start()
    kinds: dict[str, Any] = {"gauss-newton": sf.GaussNewton, "newton": sf.Newton}
    optimizer = kinds.get(run.optimizer, sf.CertifiedDescent)(model, objective)
    stopped: BaseException | None = None
    try:
        with output.progress("training", run.steps) as advance:
            for step in range(run.steps):
                advance(f"loss {float(optimizer.step(*run.samples(data, step))):.4g}")
    except (KeyboardInterrupt, SurefootError) as error:
        if not optimizer.history:
            raise  # nothing was reached that could be lost
        stopped = error
    save_weights(model, save)
    document = run_document(optimizer)
    document |= {
        "samples": len(data),
        "last_loss": float(optimizer.value(data.x, data.y)),
        "train_accuracy": _accuracy(model, data),
        "test_accuracy": _accuracy(model, test),
    }
    if report is not None and optimizer.history:
        with writing(report, "--report"):
            write_report(report, document, title=f"{run.model} on {data.name}")
    if stopped is not None:
        raise stopped
    if json:
        output.document({"model": run.model, "data": data.name, **document})
    else:
        _show(run, document)
    proved = document["proved_steps"]
    if not proved and run.steps:
        output.say(
            "note", "nothing was proved about these steps; --optimizer certified proves each before it is taken"
        )
    return Outcome.PROVED if proved or not run.steps else Outcome.NOT_PROVED


def save_weights(model: nn.Module, path: Path | None) -> None:
    """Parameters and buffers, as ``.safetensors`` or as a ``torch.save`` of tensors; whole or not at all."""
    if path is None:
        return
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    with writing(path, "--save"), written_whole(path) as temporary:
        if path.suffix == ".safetensors":
            writer = optional("safetensors.torch", "safetensors", f"--save {path}", UsageError)
            writer.save_file(state, str(temporary))
        else:
            torch.save(state, temporary)


def _accuracy(model: nn.Module, data: Dataset) -> float | None:
    """The part of the samples whose largest output is that of their class; ``None`` if there are no classes."""
    if data.y is None or data.y.is_floating_point() or not len(data):
        return None
    with evaluated(model):
        return float((selected(model(data.x)).argmax(dim=1) == data.y).double().mean())


def _show(run: Run, document: dict[str, Any]) -> None:
    steps = document["steps"]
    output.result(f"{run.model} on {document['samples']} samples of {run.source.data or 'digits'}\n")
    if steps:
        rows = []
        for k in sorted({round(j * (len(steps) - 1) / (_SHOWN - 1)) for j in range(_SHOWN)}):
            numbers = [steps[k][name] for name in ("gradient_norm", "step_size", "proved_decrease", "decrease")]
            row = [str(steps[k]["step"]), f"{steps[k]['loss']:.6f}"]
            rows.append([*row, *("–" if number is None else f"{number:.2e}" for number in numbers)])
        output.table(("step", "loss", "gradient", "step size", "proved", "decrease"), rows, left=0)
        first, last = steps[0]["loss"], document["last_loss"]
        output.result(f"\nloss {first:.6f} → {last:.6f} in {len(steps)} steps, {document['proved_steps']} proved")
    if document["train_accuracy"] is not None:
        tested = document["test_accuracy"]
        unseen = "" if tested is None else f", {tested:.1%} of unseen samples"
        output.result(
            f"accuracy {document['train_accuracy']:.1%} of the samples{unseen}; nothing is proved about this"
        )
    output.result(document["guarantee"])


def converge(run: Run, method: str, ridge: float, json: bool, report: Path | None) -> Outcome:
    """Train until a theorem applies: by Gauss-Newton steps, or by Newton steps for other objectives."""
    name: Any = method.replace("-", "_")
    if name not in METHODS:
        raise UsageError(f"--method is one of {', '.join(METHODS).replace('_', '-')}, got {method!r}")
    model, objective, data, _ = run.start()
    x, y = data.x[: run.batch], data.y
    if y is None:
        raise UsageError(f"--objective {run.objective} has no targets: convergence is proved for those that have")
    loss, regularizer = objective.bound_to(y[: run.batch]), sf.Ridge(ridge) if ridge else None
    interpolates = isinstance(objective, sf.Square) and regularizer is None
    kind: Any = sf.GaussNewton if interpolates else sf.Newton
    optimizer = kind(model, objective, regularizer=regularizer)
    with output.progress("steps", run.steps) as advance:
        for taken in range(run.steps + 1):
            verdict = sf.convergence(model, x, loss, regularizer, name)
            if verdict.proved or taken == run.steps:
                break
            optimizer.step(x, y[: run.batch])
            advance(f"a factor of {verdict.missing:.2g} is missing")
    about = f"{run.model} on {len(x)} samples of {data.name}, after {taken} steps of {kind.__name__}"
    if report is not None:
        with writing(report, "--report"):
            write_report(report, verdict, title=about)
    if json:
        output.document({"model": run.model, "data": data.name, "samples": len(x), "steps": taken,
                         "convergence": verdict.to_dict()})  # fmt: skip
    else:
        output.result(f"{about}\n\n{verdict}")
    return Outcome.PROVED if verdict.proved else Outcome.NOT_PROVED
