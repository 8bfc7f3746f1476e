"""Tracing a model with ``torch.export``: quietly, without writing to it, in functional form."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from surefoot.errors import CaptureError, SurefootError
from surefoot.graph.checks import select_outputs
from surefoot.graph.derivative import custom_functions
from surefoot.graph.naming import module_path
from surefoot.graph.preserve import Change, Watch
from surefoot.graph.survey import Survey
from surefoot.graph.translate import LOST, LOST_REMEDY, PURE, translated
from surefoot.torch_private import (
    BatchNormalisation,
    FakeTensor,
    constants_allowed,
    global_forward_hooks,
    schema_of,
)


@dataclass(frozen=True)
class Traced:
    """A traced forward pass.

    Attributes:
        program: its operations, none of which writes into its arguments.
        original: the same as it was traced, where one sees which operations ran without gradients.
        changes: what the forward pass changed among the attributes of the model.
        custom: names of the functions with a hand-written backward that it calls.
    """

    program: ExportedProgram
    original: ExportedProgram
    changes: tuple[Change, ...]
    custom: tuple[str, ...]


def trace(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], survey: Survey, calls: int = 1
) -> Traced:
    """Trace a forward pass: the last one of so many calls in a row.

    Raises:
        CaptureError: if the forward pass fails or cannot be traced.
    """
    changes: list[Change] = []
    custom: list[str] = []
    selected = _Selected(model, survey, calls, changes, custom)
    try:
        with quiet(), _as_if_alone(model):
            named = {key: _usable(value) for key, value in kwargs.items()}
            original = torch.export.export(selected, tuple(map(_usable, args)), named, strict=False)
            _refuse_lost(original)
            buffers = set(original.graph_signature.inputs_to_buffers)
            writes = _writes(original.graph_module, buffers)
            program = original.run_decompositions({}) if writes else original
        return Traced(program, original, tuple(changes), tuple(custom))
    except SurefootError:
        raise
    except Exception as error:  # torch.export raises many types; all mean the same to the user
        # The traceback of the tracing machinery says nothing to the user: the message says it all.
        raise translated(error, model, (*args, *kwargs.values())) from None


class _Selected(nn.Module):
    """The model with its output reduced to tensors, while it is being traced.

    What a call changes is looked at here: ``torch.export`` exchanges tensors before, and puts some back after.
    """

    def __init__(
        self, model: nn.Module, survey: Survey, calls: int, changes: list[Change], custom: list[str]
    ) -> None:
        super().__init__()
        self.model = model
        self._survey, self._calls, self._changes, self._custom = survey, calls, changes, custom

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        tables, watch = _tables(self.model), Watch(self._survey)
        for _ in range(self._calls):
            result = self.model(*args, **kwargs)
        _refuse_assigned(tables, _tables(self.model))
        self._changes.extend(watch.changes(own=tables.values()))
        outputs = select_outputs(result)
        self._custom.extend(custom_functions(outputs))
        return outputs


def _usable(value: Tensor) -> Tensor:
    return value.clone() if value.is_inference() else value


def _tables(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


def _refuse_assigned(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse parameters and buffers that are created, replaced or removed."""
    for label in {**before, **after}:
        if before.get(label) is not after.get(label):
            path, _, name = label.rpartition(".")
            create = "Run model(x) once if that completes the model, or create it in __init__."
            verb, remedy = ("assigns another value to", PURE) if label in before else ("creates", create)
            what = f"the forward pass {verb} the parameter or buffer '{name}'"
            raise CaptureError(what, where=path, remedy=remedy)


def _refuse_lost(program: ExportedProgram) -> None:
    """Refuse constants that are none: they were computed in forward, by something that is not recorded."""
    for spec in program.graph_signature.input_specs:
        if isinstance(program.constants.get(spec.target or ""), FakeTensor):
            (placeholder,) = (n for n in program.graph.find_nodes(op="placeholder") if n.name == spec.arg.name)
            reader = next(iter(placeholder.users), placeholder)
            raise CaptureError(LOST, where=module_path(reader), remedy=LOST_REMEDY)


@contextlib.contextmanager
def _as_if_alone(model: nn.Module) -> Iterator[None]:
    """Trace the function and not its surroundings: with gradients, in the model's own precision.

    The fused kernel of ``nn.MultiheadAttention`` has no derivative: it computes the same function. And the
    momentum of a batch normalisation enters its running statistics only, which a graph does not update.
    """
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    averaging = [m for m in model.modules() if isinstance(m, BatchNormalisation) and m.momentum is None]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module in averaging:
            module.momentum = 0.0
        with contextlib.ExitStack() as stack:
            plain = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
            gradients = torch.inference_mode(False), torch.enable_grad()
            for context in (*plain, constants_allowed(), _global_hooks_within(model), *gradients):
                stack.enter_context(context)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module in averaging:
            module.momentum = None


@contextlib.contextmanager
def _global_hooks_within(model: nn.Module) -> Iterator[None]:
    """Keep hooks on all modules from being called on the modules that tracing wraps around the user's."""
    own = {id(module) for module in model.modules()}
    tables = global_forward_hooks()
    saved = [dict(table) for table in tables]
    for table in tables:
        for key, hook in table.items():
            table[key] = _only_within(own, hook)
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


def _only_within(own: set[int], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *args: hook(module, *args) if id(module) in own else None


def _writes(module: fx.GraphModule, buffers: set[str]) -> bool:
    """Whether an operation writes into a tensor, other than into a buffer that nothing reads.

    That is the counter of batches in a batch normalisation: rewriting the program for its sake is not worth it.
    """
    for node in module.graph.nodes:
        body = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule) and _writes(body, set()):
            return True
        schema = schema_of(node.target)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            written = node.args[0] if node.args else None
            if node.target is torch.ops.aten.detach_.default and _is_constant(written):
                continue  # how a tensor made in forward from numbers is taken down: nothing changes
            unread = isinstance(written, fx.Node) and written.name in buffers and len(written.users) == 1
            if node.users or not unread:
                return True
    return False


def _is_constant(written: Any) -> bool:
    """Whether a value is a tensor that was made from numbers while tracing."""
    while isinstance(written, fx.Node) and written.op == "call_function" and written.args:
        written = written.args[0]
    return isinstance(written, fx.Node) and written.op == "placeholder" and written.name.startswith("c_")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what ``torch.export`` says to its own developers; errors still come through."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
