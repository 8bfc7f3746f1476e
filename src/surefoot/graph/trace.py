"""Tracing a model with ``torch.export``: quietly, without writing to it, in functional form.

What goes wrong is said in the user's terms: what, in which module, at which line.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.export import ExportedProgram

import surefoot
from surefoot.errors import CaptureError, SurefootError
from surefoot.graph.flatten import Flat, MasksAsIndices, has_transforms, places_of
from surefoot.graph.nodes import PREFIX, module_path
from surefoot.graph.preserve import Change, Watch
from surefoot.graph.survey import Survey
from surefoot.loading import uncollected
from surefoot.program.checks import select_outputs, with_gradients
from surefoot.torch_private import (
    BatchNormalisation,
    FakeTensor,
    constants_allowed,
    distributions_unchecked,
    global_forward_hooks,
    is_view,
    schema_of,
)

_MACHINERY = tuple(str(Path(package.__file__ or "").parent) for package in (torch, surefoot))
LOST = "a tensor leaves the computation that can be followed"
LOST_REMEDY = "Do without .data and .numpy() inside forward."
_NOWHERE = r"devices, (meta and|\S+ and meta)"  # forward derivatives of normalisations meet a tensor of tracing
_DERIVATIVES = rf"{LOST}|functorch|no attribute 'constant'|not require grad|differentiated Tensors|vmap|{_NOWHERE}"
BACKWARDS = (
    "Forward derivatives (torch.func.jvp, jacfwd, hessian) of layer and batch normalisations are wrong once "
    "differentiated again, as PyTorch holds mean and deviation fixed: take them backwards (vjp, jacrev, grad)."
)
PURE = "Make forward a pure function: return new tensors and keep no results on self."
_Frame = tuple[types.FrameType, int]
_KNOWN = (
    (
        r"data.dependent|GuardOnDataDependent|Could not guard|_local_scalar_dense|unbacked",
        "control flow depends on the data: the values of a tensor decide a branch, a loop or a Python number",
        "A certificate covers one function: replace a branch by torch.where, a number taken out of a tensor "
        "(.item(), float(), int()) by the tensor itself, and fix the number of iterations of a loop.",
    ),
    (
        r"argument 'size' failed to unpack|DynamicOutputShape",
        "the size of a tensor depends on the values of another, as in a packed sequence or a selection",
        "Fix the sizes: run a recurrent layer on the padded batch and pick the last states with gather, or pack "
        "before the model is called; for linalg.lstsq write torch.linalg.solve(A.mT @ A, A.mT @ b).",
    ),
    (
        r"same device|Device Propagation|DeviceMismatch|device type mismatch",
        "tensors on different devices meet",
        "Move the model and the input to one device, for example x = x.to(device).",
    ),
    (r"\.numpy\(\) is not supported|functorch tensor|__array__", LOST, LOST_REMEDY),
    (
        r"is mutated in the forward|assigned during export|in-?place operation|mutat",
        "the forward pass writes into a tensor that outlives it",
        PURE,
    ),
    (
        r"same dtype|expected scalar type|dtype mismatch|should be the same",
        "tensors of different element types meet",
        "Convert the model or the input, for example x = x.to(torch.float64).",
    ),
)


@dataclass(frozen=True)
class Traced:
    """A traced forward pass."""

    program: ExportedProgram  # its operations, none of which writes into its arguments
    original: ExportedProgram  # the same as it was traced, where one sees which operations ran without gradients
    changes: tuple[Change, ...]  # what the forward pass changed among the attributes of the model
    custom: tuple[str, ...]  # names of the functions with a hand-written backward that it calls
    differentiates: bool  # whether it takes derivatives
    lost: Exception | None  # why it could not be exported before these were written out


def trace(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], survey: Survey, calls: int = 1
) -> Traced:
    """Trace a forward pass, the last one of so many calls in a row, or say why it cannot be traced."""
    changes: list[Change] = []
    custom: list[str] = []
    selected = _Selected(model, survey, calls, changes, custom)
    try:
        with quiet(), uncollected(), _as_if_alone(model):
            named = {key: _usable(value) for key, value in kwargs.items()}
            usable = tuple(map(_usable, args))
            try:
                original = torch.export.export(selected, usable, named, strict=False)
                differentiates = has_transforms(original)
                _refuse_lost(original)
                lost = None
            except Exception as error:  # as many types as below
                if not re.search(_DERIVATIVES, str(error)):
                    raise
                differentiates, lost = True, error
            if differentiates:
                changes.clear()
                try:
                    original = torch.export.export(Flat(selected, usable, named), usable, named, strict=False)
                    _refuse_lost(original)
                except Exception as error:
                    raise lost or error from None
            buffers = set(original.graph_signature.inputs_to_buffers)
            writes = _writes(original.graph_module, buffers)
            program = original.run_decompositions({}) if writes else original
        return Traced(program, original, tuple(changes), tuple(custom), differentiates, lost)
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
        self._places = places_of(model)
        self._survey, self._calls, self._changes, self._custom = survey, calls, changes, custom

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        tables, watch = _tables(self.model), Watch(self._survey)
        with MasksAsIndices(self.model, self._places):
            for _ in range(self._calls):
                result = self.model(*args, **kwargs)
        _refuse_assigned(tables, _tables(self.model))
        self._changes.extend(watch.changes(own=tables.values()))
        outputs = select_outputs(result)
        self._custom.extend(custom_functions(outputs))
        return outputs


def _usable(value: Tensor) -> Tensor:
    """An input that can be traced: forward-mode derivatives of a view, such as x[::2], cannot."""
    return value.detach().clone().requires_grad_(value.requires_grad) if is_view(value) else value


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
        with constants_allowed(), distributions_unchecked(), _global_hooks_within(model), with_gradients():
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


def custom_functions(outputs: Iterable[Tensor]) -> tuple[str, ...]:
    """Names of the functions with a hand-written backward (``torch.autograd.Function``) behind some tensors.

    Operators of ``torch.library`` are left out: they are operations of the graph as they are, and their backward
    is the derivative that every reading of the graph takes.
    """
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


def translated(error: Exception, model: nn.Module, inputs: Sequence[Tensor]) -> CaptureError:
    """The error of a traced forward pass as one of ours."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = list(traceback.walk_tb(cause.__traceback__))
    owner, line = _module_of(frames, model), _line_of(frames)
    path, module = owner or (None, None)
    at = f" ({line})" if line else ""
    text = f"{type(error).__name__}: {error}"
    written = re.search(rf"Constant {PREFIX}\.(\S+) is mutated", text)
    if written:
        path, _, name = written[1].rpartition(".")
        text, at = "mutated", f", '{name}'"
    if re.search(_NOWHERE, text) and not any(value.is_meta for value in (*model.parameters(), *inputs)):
        return CaptureError(f"a normalisation is differentiated forwards{at}", where=path, remedy=BACKWARDS)
    for pattern, what, remedy in _KNOWN:
        if re.search(pattern, text, re.IGNORECASE):
            more = _devices(model, inputs) if "devices" in what else ""
            return CaptureError(f"{what}{more}{at}", where=path, remedy=remedy)
    of = f" of {module}" if module is not None and "\n" not in repr(module) else ""
    shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
    remedy = f"Check that model(x) runs on this input (of shape {shapes}), and that it uses plain PyTorch."
    return CaptureError(f"the forward pass{of} fails: {_summary(error)}{at}", where=path, remedy=remedy)


def _devices(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    own = sorted({str(value.device) for value in model.parameters()})
    given = sorted({str(value.device) for value in inputs})
    return f": the model is on {' and '.join(own) or 'none'}, the input on {' and '.join(given)}"


def _summary(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "").strip().rstrip(".")
    name = "" if type(error) in (RuntimeError, ValueError, TypeError) else f"{type(error).__name__}: "
    return f"{name}{first[:200]}" or type(error).__name__


def _module_of(frames: Sequence[_Frame], model: nn.Module) -> tuple[str, nn.Module] | None:
    """The innermost module of the model that was running, and its path."""
    paths = {id(module): path for path, module in model.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    inside = [owner for owner in owners if isinstance(owner, nn.Module) and id(owner) in paths]
    return (paths[id(inside[-1])], inside[-1]) if inside else None


def _line_of(frames: Sequence[_Frame]) -> str | None:
    """The innermost line of code that is not PyTorch's: ``net.py, line 12: if y.sum() > 0:``."""
    files = [frame.f_code.co_filename for frame, _ in frames]
    entered = [k for k, file in enumerate(files) if file == __file__]
    own = [k for k in range(entered[-1], len(files)) if not files[k].startswith(_MACHINERY)] if entered else []
    if not own:
        return None
    file, number = files[own[-1]], frames[own[-1]][1]
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}{': ' if source else ''}{source}"
