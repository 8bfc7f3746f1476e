"""The parameters that an optimizer holds: their groups, steps that happen or do not, and resuming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.optim.evaluation import OptimizerError
from surefoot.optim.record import StepRecord, from_columns, to_columns
from surefoot.optim.vectors import held_by
from surefoot.optim.watch import Watch
from surefoot.torch_private import copied_together


class _Group(dict[str, Any]):
    """A parameter group that says why it has no learning rate, to schedulers above all."""

    def __missing__(self, key: str) -> Any:
        if key in ("lr", "initial_lr"):
            raise OptimizerError(
                "there is no learning rate to schedule: every step is as long as its proof allows. Take the "
                "scheduler out"
            )
        raise KeyError(key)


class HeldParameters(Optimizer):
    """An optimizer of some or all parameters of one model, which can be saved and taken back."""

    model: nn.Module
    history: list[StepRecord]
    quiet: bool
    watch: Watch
    _trainable: dict[str, nn.Parameter] | None = None  # as long as nobody touches the model

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are optimised, by name."""
        if self.quiet and self._trainable is not None:
            return self._trainable
        held = set(map(id, held_by(self)))
        named = (self.watch.parameters if self.quiet else dict(self.model.named_parameters())).items()
        self._trainable = {name: value for name, value in named if value.requires_grad and id(value) in held}
        return self._trainable

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters, by name."""
        trainable = self.trainable
        with torch.no_grad():
            copied_together([trainable[name] for name in values], list(values.values()))

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """If the body raises, parameters, buffers and the optimizer are what they were, bit by bit."""
        watch = self.watch
        buffers = watch.buffers if self.quiet else list(self.model.buffers())
        parameters = watch.parameters if self.quiet else dict(self.model.named_parameters())
        weights = None if self.quiet else {name: value.detach().clone() for name, value in parameters.items()}
        copies, own = [buffer.detach().clone() for buffer in buffers], self.extra_state()
        try:
            yield
        except BaseException:
            self.load_extra_state(own)
            kept = watch.weights if weights is None else weights
            pairs = ((value, kept[name]) for name, value in parameters.items())
            with torch.no_grad():
                for tensor, before in (*pairs, *zip(buffers, copies, strict=True)):
                    tensor.copy_(before)
            raise

    @contextmanager
    def _others_constant(self) -> Iterator[None]:
        """Trainable parameters that no group holds do not ask for gradients in the body."""
        held = self.trainable
        present = self.watch.parameters if self.quiet else dict(self.model.named_parameters())
        others = [] if len(held) == len(present) else [
            value for name, value in present.items() if value.requires_grad and name not in held
        ]  # fmt: skip
        try:
            for parameter in others:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def extra_state(self) -> dict[str, Any]:
        """What a subclass has to keep besides the history: tensors, numbers and texts."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides the parameters of the model; safe for ``weights_only`` loading."""
        own = {"kind": type(self).__name__, "history": to_columns(self.history), "watch": self.watch.state()}
        own |= self.extra_state()
        return {**super().state_dict(), "surefoot": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; load the model's own state before.

        Raises:
            ValueError: if the state is that of another kind of optimizer.
        """
        own = dict(state_dict.get("surefoot", {}))
        kind = own.pop("kind", None)
        if kind != type(self).__name__:
            raise ValueError(f"this is the state of {kind or 'another optimizer'}, not of {type(self).__name__}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "surefoot"})
        self.param_groups = [_Group(group) for group in self.param_groups]
        self.history = from_columns(own.pop("history"))
        self.watch.load(own.pop("watch", {"left": "", "functions": {}}))
        self.load_extra_state(own)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the model comes along, so that a copy optimises its own."""
        return {key: value for key, value in self.__dict__.items() if not key.endswith("_hooks")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimise further parameters of the model.

        Raises:
            ValueError: if one of them is not a parameter of the model.
        """
        given = param_group["params"]
        param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        known = {id(parameter) for parameter in self.model.parameters()}
        strangers = [p for p in param_group["params"] if id(p[1] if isinstance(p, tuple) else p) not in known]
        if strangers:
            raise ValueError(
                f"{len(strangers)} of the given parameters are not parameters of the model: the certificate would "
                "not speak of them. Put them into a module together with the model"
            )
        super().add_param_group(param_group)
        self.param_groups[-1] = _Group(self.param_groups[-1])
