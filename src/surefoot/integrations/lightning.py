"""A callback of Lightning: epochs are kept if the objective of all data is proved to be lower after them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from surefoot.integrations.keeping import Check, IntegrationError, Keeper


class KeepingHooks:
    """The hooks of the callback, without its base class; see :func:`keep_if_lower`."""

    def __init__(self, data: Any, objective: nn.Module, every: int = 1, slower: float = 0.5) -> None:
        self.data, self.objective, self.every, self.slower = data, objective, every, slower
        self.keeper: Keeper | None = None

    @property
    def history(self) -> list[Check]:
        """All checks; the first is that of the weights at the start."""
        return [] if self.keeper is None else self.keeper.history

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate at the weights that training starts from."""
        if getattr(trainer, "world_size", 1) > 1:
            raise IntegrationError(
                "this callback is for training in one process: with several, use surefoot.evaluate(…, group=…)"
            )
        self.keeper = Keeper(pl_module, trainer.optimizers, self.data, self.objective, slower=self.slower)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the weights or go back, and log the value, its error and whether they were kept."""
        if self.keeper is None or (trainer.current_epoch + 1) % self.every:
            return
        check = self.keeper.check()
        pl_module.log("surefoot_value", self.keeper.value.value, prog_bar=True)
        pl_module.log("surefoot_error", self.keeper.value.error)
        pl_module.log("surefoot_kept", float(check.kept))


def keep_if_lower(data: Any, objective: nn.Module, *, every: int = 1, slower: float = 0.5) -> Any:
    """A callback for ``lightning.Trainer(callbacks=[…])``.

    Every few epochs it evaluates the objective of all data with a bound on the round-off. If that is proved to be
    lower, the weights are kept. Otherwise weights, buffers and optimizers go back, and learning rates are lowered.
    It logs ``surefoot_value``, ``surefoot_error`` and ``surefoot_kept``; its ``history`` has all values.

    Args:
        data: re-iterable batches ``(x, y)``, as a loader without augmentation gives them.
        objective: the loss of the outputs of ``forward``, without targets.
        every: number of epochs between two checks.
        slower: factor of the learning rates after weights were not kept.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base = import_module(package).Callback
            break
        except ImportError:
            continue
    else:
        raise IntegrationError("Lightning is not installed: pip install lightning")
    return type("KeepIfLower", (KeepingHooks, base), {})(data, objective, every, slower)
