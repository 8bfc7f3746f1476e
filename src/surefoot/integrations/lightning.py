"""A callback of Lightning: epochs are accepted if the objective of all data is proved to be lower after them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from surefoot.errors import SurefootError
from surefoot.optim import EpochRecord, History, KeepIfLower


class IntegrationError(SurefootError, RuntimeError):
    """The framework lacks something that is needed; the message says what."""


class KeepingHooks:
    """The hooks of the callback, without its base class; see :func:`keep_if_lower`."""

    def __init__(self, loss: nn.Module, data: Any, every: int = 1, slower: float = 0.5) -> None:
        self.loss, self.data, self.every, self.slower = loss, data, every, slower
        self.keep: KeepIfLower | None = None

    @property
    def history(self) -> History[EpochRecord]:
        """All checks; the first is that of the weights at the start."""
        return History() if self.keep is None else self.keep.history

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate at the weights that training starts from."""
        if getattr(trainer, "world_size", 1) > 1:
            raise IntegrationError(
                "this callback is for training in one process: with several, use surefoot.KeepIfLower(…, group=…)"
            )
        self.keep = KeepIfLower(pl_module, trainer.optimizers, self.loss, self.data, slower=self.slower)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Accept the weights or roll back, and log the value, its error and whether they were accepted."""
        if self.keep is None or (trainer.current_epoch + 1) % self.every:
            return
        accepted = self.keep(self.every)
        pl_module.log("surefoot_value", self.keep.value.value, prog_bar=True)
        pl_module.log("surefoot_error", self.keep.value.error)
        pl_module.log("surefoot_accepted", float(accepted))


def keep_if_lower(loss: nn.Module, data: Any, *, every: int = 1, slower: float = 0.5) -> Any:
    """A callback for ``lightning.Trainer(callbacks=[…])``.

    Every few epochs it evaluates the objective of all data with a bound on the round-off. If that is proved to be
    lower, the weights are accepted. Otherwise weights, buffers and optimizers are rolled back, and learning rates
    lowered. It logs ``surefoot_value``, ``surefoot_error`` and ``surefoot_accepted``; its ``history`` has all
    values.

    Args:
        loss: of the outputs of ``forward``, without targets.
        data: re-iterable batches ``(x, y)``, as a loader without augmentation gives them.
        every: number of epochs between two checks.
        slower: factor of the learning rates after weights were rolled back.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = import_module(package).Callback
            break
        except ImportError:
            continue
    else:
        raise IntegrationError("Lightning is not installed: pip install lightning")
    return type("KeepIfLower", (KeepingHooks, base), {})(loss, data, every, slower)
