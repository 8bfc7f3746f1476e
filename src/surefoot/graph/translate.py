"""What goes wrong while a model is traced, in the user's terms: what, in which module, at which line."""

from __future__ import annotations

import linecache
import re
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import surefoot
from surefoot.errors import CaptureError
from surefoot.graph.naming import PREFIX

_MACHINERY = tuple(str(Path(package.__file__ or "").parent) for package in (torch, surefoot))
LOST = "a tensor leaves the computation that can be followed"
LOST_REMEDY = "Do without .data, .numpy(), torch.autograd.grad and torch.func inside forward."
PURE = "Make forward a pure function: return new tensors and keep no results on self."
_TRACE = str(Path(__file__).with_name("trace.py"))
_Frame = tuple[types.FrameType, int]
_KNOWN = (
    (
        r"data.dependent|GuardOnDataDependent|Could not guard|_local_scalar_dense|unbacked",
        "control flow depends on the data: the values of a tensor decide a branch, a loop or a Python number",
        "A certificate covers one function: replace a branch by torch.where, a number taken out of a tensor "
        "(.item(), float(), int()) by the tensor itself, and fix the number of iterations of a loop.",
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
    entered = [k for k, file in enumerate(files) if file == _TRACE]
    own = [k for k in range(entered[-1], len(files)) if not files[k].startswith(_MACHINERY)] if entered else []
    if not own:
        return None
    file, number = files[own[-1]], frames[own[-1]][1]
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}{': ' if source else ''}{source}"
