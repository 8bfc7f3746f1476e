"""What goes wrong while a model is traced, in the user's terms: what, in which module, at which line."""

from __future__ import annotations

import linecache
import re
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot
from surefoot.errors import CaptureError

_MACHINERY = tuple(str(Path(package.__file__ or "").parent) for package in (torch, surefoot))
PURE = "Make forward a pure function: return new tensors and keep no results on self."
NOT_RANDOM = (
    "Call model.eval() if that stops it, or pass the random numbers as an input: a certificate covers one "
    "function."
)
DATA = "control flow depends on the data: the values of a tensor decide a branch, a loop or a Python number"
NO_VALUES = (
    "A certificate covers one function: replace a branch by torch.where, a number taken out of a tensor "
    "(.item(), float(), int()) by the tensor itself, and fix the number of iterations of a loop."
)
_NO_STEP = "Its gradient would not be the derivative of the function, so no step along it could be guaranteed: "
SEVERED = (
    f"{_NO_STEP}let the gradient pass (in torch.utils.checkpoint, with use_reentrant=False), or freeze these "
    "parameters with requires_grad_(False)."
)
OTHER = f"{_NO_STEP}write forward with differentiable operations, and pass a model with values in memory."
BACKWARDS = (
    "Forward derivatives (torch.func.jvp, jacfwd, hessian) of layer and batch normalisations are wrong once "
    "differentiated again, as PyTorch holds mean and deviation fixed: take them backwards (vjp, jacrev, grad)."
)
DRAWN = "state of "  # how a generator is described
SHAPES = "the shape of what an operation returns depends on the data"
KEEP_ALL = (
    "Keep all entries and mask them, for example with torch.where(mask, x, 0), or pick from the input before the "
    "model is called; a mask in a buffer is fine."
)
SIZES = (
    "the size of a tensor depends on the values of another, as in a packed sequence or a selection",
    "Fix the sizes: run a recurrent layer on the padded batch and pick the last states with gather, or pack "
    "before the model is called; for linalg.lstsq write torch.linalg.solve(A.mT @ A, A.mT @ b).",
)
AUTOCAST = (
    "the forward pass switches to a lower precision (torch.autocast)",
    "A certificate speaks of real numbers: leave the choice of precision to the training loop.",
)
_KNOWN = (
    (r"data.dependent|unbacked|_local_scalar_dense|HigherOrderOperator", DATA, NO_VALUES),
    (r"argument 'size' failed to unpack|DynamicOutputShape", *SIZES),
    (
        r"same device|Device Propagation|DeviceMismatch|device type mismatch",
        "tensors on different devices meet",
        "Move the model and the input to one device, for example x = x.to(device).",
    ),
    (
        r"\.numpy\(\) is not supported|functorch tensor|__array__|can't be converted|Can't call numpy",
        "a tensor leaves the computation that can be followed",
        "Do without .data and .numpy() inside forward.",
    ),
    (
        r"same dtype|expected scalar type|dtype mismatch|should be the same",
        "tensors of different element types meet",
        "Convert the model or the input, for example x = x.to(torch.float64).",
    ),
)


def translated(error: Exception, model: nn.Module, inputs: Sequence[Tensor], path: str) -> CaptureError:
    """The error of a traced forward pass as one of ours.

    Args:
        error: what was raised.
        model: what was traced.
        inputs: what it was called with.
        path: the path of the module that ran.
    """
    line = _line_of(error)
    at = f" ({line})" if line else ""
    if isinstance(error, CaptureError):
        where = error.where if error.where is not None else path
        return CaptureError(f"{error.what}{at if at not in error.what else ''}", where=where, remedy=error.remedy)
    text = f"{type(error).__name__}: {error}"
    for pattern, what, remedy in _KNOWN:
        if re.search(pattern, text, re.IGNORECASE):
            more = _devices(model, inputs) if "devices" in what else ""
            return CaptureError(f"{what}{more}{at}", where=path, remedy=remedy)
    module = dict(model.named_modules()).get(path, model)
    of = f" of {module}" if "\n" not in repr(module) else ""
    shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
    remedy = f"Check that model(x) runs on this input (of shape {shapes}), and that it uses plain PyTorch."
    return CaptureError(f"the forward pass{of} fails: {_summary(error)}{at}", where=path, remedy=remedy)


def refuse_devices(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Refuse a model on another device than its input."""
    if len({value.device.type for value in (*model.parameters(), *inputs)}) > 1:
        _, what, remedy = _KNOWN[2]
        raise CaptureError(f"{what}{_devices(model, inputs)}", where="", remedy=remedy)


def _devices(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    own, given = (sorted({str(v.device) for v in values}) for values in (model.parameters(), inputs))
    return f": the model is on {' and '.join(own) or 'none'}, the input on {' and '.join(given)}"


def _summary(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "").strip().rstrip(".")
    name = "" if type(error) in (RuntimeError, ValueError, TypeError) else f"{type(error).__name__}: "
    return f"{name}{first[:200]}" or type(error).__name__


def _line_of(error: BaseException) -> str | None:
    """The innermost line of code that is not PyTorch's: ``net.py, line 12: if y.sum() > 0:``."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames: list[tuple[types.FrameType, int]] = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename for frame, _ in frames]
    entered = [k for k, file in enumerate(files) if file.endswith("/program/tracing.py")]
    own = [k for k in range(entered[0] if entered else 0, len(files)) if not files[k].startswith(_MACHINERY)]
    if not own or not entered:
        return None
    file, number = files[own[-1]], frames[own[-1]][1]
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}{': ' if source else ''}{source}"


def refuse_changes(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> None:
    """Refuse a forward pass that computes something else the next time, as it changed something."""
    changed = (key for key in after if key not in before or before[key] != after[key])
    path, name = next(changed, ("", "a closure"))
    if str(before.get((path, name), ("",))[0]).startswith(DRAWN):
        what = f"the forward pass draws random numbers (from '{f'{path}.{name}'.lstrip('.')}')"
        raise CaptureError(what, where="", remedy=NOT_RANDOM)
    what = f"the forward pass changes '{name}', and the next one computes something else"
    raise CaptureError(what, where=path, remedy="Make forward a pure function: pass what changes as an input.")
