"""What is noticed while a model is traced that may make its program untrue.

A program is one function of the parameters and of the input. It is not what runs if the forward pass writes into
these, reads buffers that it writes, draws random numbers, or cuts tensors off from their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from surefoot.errors import CaptureError
from surefoot.program.builder import Builder
from surefoot.program.checks import random_dropout
from surefoot.program.refusals import NOT_RANDOM, PURE
from surefoot.torch_private import in_transform, storage_of

_NO_WRITES = {"detach_", "requires_grad_", "retain_grad_"}


class Witness:
    """What each operation does besides computing its result.

    Args:
        builder: the program that is written.
        node_of: the node of a tensor, or None if it has none.

    Attributes:
        read: the names of buffers and frozen parameters that are read.
        transforms: whether derivatives are taken with ``torch.func``.
    """

    def __init__(self, builder: Builder, node_of: Callable[[Tensor], int | None]) -> None:
        self._builder, self._node_of = builder, node_of
        self._owners: dict[int, tuple[str, str]] = {}
        self._moving: list[bool] = []  # which nodes depend on parameters
        self._detached: set[int] = set()
        self._suspects: list[tuple[int, str, str]] = []
        self._written: set[str] = set()
        self.read: set[str] = set()
        self.transforms = False

    def own(self, value: Tensor, kind: str, name: str) -> None:
        """Know a tensor, and what shares its memory, as a parameter, an input or a buffer."""
        self._owners[storage_of(value)] = kind, name

    def check(
        self, name: str, schema: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], random: bool
    ) -> None:
        """Refuse an operation that draws random numbers or writes into a parameter or an input, before it runs."""
        values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        values |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        if random and not _without_effect(values):
            rate = next((float(values[key]) for key in ("p", "dropout_p", "dropout") if values.get(key)), 0.0)
            what, remedy = f"the operation '{name}' draws random numbers", NOT_RANDOM
            what, remedy = random_dropout(rate) if rate else (what, remedy)
            raise CaptureError(what, where=self._builder.path, remedy=remedy)
        writes = schema.is_mutable and name not in _NO_WRITES
        target = kwargs["out"] if "out" in kwargs else args[0] if args and name.endswith("_") else None
        statistics = "batch_norm" in name and any(item is True for item in args)  # which are updated, not read
        for value in tensors:
            kind, own = self._owners.get(storage_of(value), ("", ""))
            if kind in ("parameter", "input") and writes and value is target:
                raise self._written_to(kind, own)
            if kind == "buffer" and ((writes and value is target) or (statistics and value is not args[0])):
                self._written.add(own)
            elif kind == "buffer":
                self.read.add(own)

    def _written_to(self, kind: str, name: str) -> CaptureError:
        if kind == "input":
            remedy = f"Work on a copy, x.clone(). {PURE}"
            return CaptureError("the forward pass writes into its input", where=self._builder.path, remedy=remedy)
        path, _, own = name.rpartition(".")
        return CaptureError(f"the forward pass writes into the parameter '{own}'", where=path, remedy=PURE)

    def note(self, name: str, operands: Sequence[Tensor], result: Iterable[Any]) -> None:
        """Note where a tensor that depends on parameters is used without its gradient."""
        if name == "detach":
            self._detached.update(id(value) for value in result if isinstance(value, Tensor))
        elif in_transform():
            self.transforms = True
        elif torch.is_grad_enabled():
            for value in operands:
                node = None if value.requires_grad or not value.is_floating_point() else self._node_of(value)
                if node is not None and self._moves(node):
                    path, how = self._builder.path, "is detached"
                    if id(value) not in self._detached:
                        path, how = self._builder.nodes[node].path, "is computed under torch.no_grad()"
                    self._suspects.append((node, path, how))

    def _moves(self, k: int) -> bool:
        """Whether a node depends on parameters."""
        parameters = {self._builder.inputs[name] for name in self._builder.parameters}
        for node in self._builder.nodes[len(self._moving) :]:
            self._moving.append(node.index in parameters or any(self._moving[i] for i in node.inputs))
        return self._moving[k]

    def severed(self, outputs: Mapping[int, Tensor]) -> tuple[tuple[str, str], ...]:
        """Where tensors that the outputs depend on are cut off from their gradient: a module path, and how."""
        needed = set(outputs)
        for node in reversed(self._builder.nodes):
            if node.index in needed:
                needed.update(node.inputs)
        cut = [(path, how) for k, path, how in self._suspects if k in needed]
        lost = any(self._moves(k) and not value.requires_grad for k, value in outputs.items())
        return tuple(dict.fromkeys([*cut, *[("", "is detached")] * lost]))

    def refuse_states(self) -> None:
        """Refuse a buffer that is read and written: the next call reads another value."""
        for name in sorted(self.read & self._written):
            path, _, own = name.rpartition(".")
            what = f"the forward pass reads the buffer '{own}' and writes to it"
            raise CaptureError(what, where=path, remedy=f"{PURE} Call model.eval() if that stops it.")


def _without_effect(values: Mapping[str, Any]) -> bool:
    """Whether an operation that may drop entries at random drops none."""
    rates = [values[name] for name in ("p", "dropout_p", "dropout") if name in values]
    trains = [values[name] for name in ("train", "training") if name in values]
    same = "lower" in values and "upper" in values and values["lower"] == values["upper"]
    return bool(rates and not rates[0]) or (bool(trains) and not trains[0]) or same


def refuse_assigned(model: nn.Module, owned: Mapping[str, Tensor]) -> None:
    """Refuse parameters and buffers that are created, replaced or removed."""
    after = dict((*model.named_parameters(), *model.named_buffers()))
    for name in {**owned, **after}:
        if owned.get(name) is not after.get(name):
            path, _, own = name.rpartition(".")
            create = "Run model(x) once if that completes the model, or create it in __init__."
            verb, remedy = ("assigns another value to", PURE) if name in owned else ("creates", create)
            raise CaptureError(
                f"the forward pass {verb} the parameter or buffer '{own}'", where=path, remedy=remedy
            )


def custom_functions(outputs: Iterable[Tensor]) -> tuple[str, ...]:
    """Names of the functions with a hand-written backward (``torch.autograd.Function``) behind some tensors."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    met: set[Any] = {None}
    names: dict[str, None] = {}
    while waiting:
        step = waiting.pop()
        if step not in met:
            met.add(step)
            waiting += [before for before, _ in step.next_functions]
            name = type(step).__name__.removesuffix("Backward")
            if isinstance(step, BackwardCFunction) and not name.startswith("GeneratedBackwardFor_"):
                names[name] = None
    return tuple(names)
