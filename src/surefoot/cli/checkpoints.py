"""A training run that can be interrupted and resumed: batches, optimizer, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.cli import output
from surefoot.cli.batches import in_evaluation, real_dtype, refusal
from surefoot.cli.guard import UsageError
from surefoot.data import DataError, Dataset
from surefoot.objectives import Objective
from surefoot.optim import CertifiedDescent, GaussNewton, GuaranteedOptimizer, Newton
from surefoot.report.page import written_whole


@dataclass(frozen=True)
class Batches:
    """Which samples a step sees: all of them, or parts of a random order that is new in every pass.

    The parts depend on the seed and the number of the step alone, so that a resumed run sees the same ones.
    """

    data: Dataset
    size: int | None
    seed: int

    def __call__(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Samples and targets of a step; no targets where the objective takes none."""
        x, y = self.data.x, self.data.y
        if self.size is None or self.size >= len(self.data):
            return x, y
        per_pass = math.ceil(len(self.data) / self.size)
        epoch, part = divmod(step, per_pass)
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed + 1 + epoch))
        chosen = order[part * self.size : (part + 1) * self.size]
        return x[chosen], None if y is None else y[chosen]


def check_whole(name: str, model: nn.Module, *parts: Dataset) -> None:
    """Refuse a model that does not take all samples at once, as the losses before and after training need.

    Raises:
        UsageError: if it does not, as one that was exported for one number of samples.
    """
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
    with written_whole(path) as temporary:
        if path.suffix != ".safetensors":
            torch.save(state, temporary)
            return
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise DataError("safetensors is not installed: pip install 'surefoot[safetensors]'") from error
        save_file({name: value.clone() for name, value in state.items()}, str(temporary))


@dataclass(frozen=True)
class Keeper:
    """Keeps a checkpoint up to date: all that a resumed run needs, in a file that is whole at any time.

    Attributes:
        path: of the file; ``None`` keeps nothing.
        every: how many steps lie between two checkpoints.
        model: what is trained.
        optimizer: what trains it.
        run: the options that make two runs the same.
    """

    path: Path | None
    every: int
    model: nn.Module
    optimizer: GuaranteedOptimizer
    run: Mapping[str, Any]

    def resumed(self) -> int:
        """Continue where the checkpoint was taken, if there is one; returns how many steps it has behind it.

        Raises:
            UsageError: if the file is no checkpoint, or that of another run.
        """
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
        """Save, if it is time."""
        if step % self.every == 0 or last:
            self._save()

    def interrupted(self) -> None:
        """Save what was reached; a step that was under way has left nothing behind."""
        self._save()
        if self.path is not None:
            output.note(
                f"interrupted after {len(self.optimizer.history)} steps; the same command goes on from there"
            )

    def _save(self) -> None:
        if self.path is None:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with written_whole(self.path) as temporary:
            torch.save({"run": dict(self.run), **state}, temporary)


def accuracy(model: nn.Module, data: Dataset) -> float | None:
    """The part of the samples whose largest output is that of their class; ``None`` if there are no classes."""
    if data.y is None or data.y.is_floating_point() or not len(data):
        return None
    with in_evaluation(model):
        outputs = model(data.x)
    return float((outputs.argmax(dim=1) == data.y).double().mean())


def promises(optimizer: GuaranteedOptimizer) -> tuple[int, int]:
    """How many steps promised a decrease whose outcome is known, and how many of them kept it.

    A promise holds in exact arithmetic; a loss is known up to round-off, which is allowed for.
    """
    slack = 64 * torch.finfo(real_dtype(optimizer.model)).eps  # what round-off may do, relative to the loss
    excess = [
        r.actual_decrease - r.promised_decrease + slack * max(abs(r.loss), 1.0)
        for r in optimizer.history
        if r.promised_decrease is not None and r.actual_decrease is not None
    ]
    return len(excess), sum(each >= 0 for each in excess)
