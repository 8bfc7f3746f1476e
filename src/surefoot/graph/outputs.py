"""Which tensors of what a model returns are its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surefoot.errors import CaptureError

_OBVIOUS = ("logits", "last_hidden_state", "output", "out", "prediction", "predictions", "sample")


def select_outputs(result: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors a model returns.

    A tensor is itself. A tuple or list of tensors is several outputs. Anything else (a mapping, a named tuple, an
    output object, a tuple of this and that) stands for the one tensor in it that goes by an obvious name
    (``logits``, ``last_hidden_state``, …), or for the only one there is, at any depth. Without such a name, an
    output object of the ``transformers`` package stands for its tensors, in order.

    Raises:
        CaptureError: if there is no tensor, or no obvious one.
    """
    if isinstance(result, Tensor):
        return _real({"the output": result})
    plain = isinstance(result, tuple | list) and not hasattr(result, "_fields")
    if plain and result and all(isinstance(item, Tensor) for item in result):
        return _real({f"output {k}": item for k, item in enumerate(result)})
    tensors = {f"output '{key}'": value for key, value in _entries(result).items() if isinstance(value, Tensor)}
    for name in _OBVIOUS:
        if f"output '{name}'" in tensors:
            return _real({f"output '{name}'": tensors[f"output '{name}'"]})
    if tensors and hasattr(result, "to_tuple"):  # of the transformers package, with names of its own
        return _real(tensors)
    candidates = _real_tensors(result, "")
    if len(candidates) == 1:
        return tuple(candidates.values())
    names = ", ".join(f"'{name}'" for name in candidates)
    what = f"several tensors: {names}" if candidates else "no floating-point tensor"
    remedy = "Wrap it in a module whose forward returns the tensor you mean, or a tuple of tensors for several."
    raise CaptureError(f"the model returns a {type(result).__name__} with {what}", where="", remedy=remedy)


def _entries(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {str(key): value for key, value in result.items()}
    if hasattr(result, "_asdict"):
        return dict(result._asdict())
    if isinstance(result, tuple | list):
        return {str(k): item for k, item in enumerate(result)}
    return dict(getattr(result, "__dict__", {}))


def _real_tensors(result: Any, label: str, depth: int = 4) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {label: result} if result.is_floating_point() else {}
    found: dict[str, Tensor] = {}
    if depth and not isinstance(result, type):
        for key, value in _entries(result).items():
            found |= _real_tensors(value, f"{label}.{key}" if label else key, depth - 1)
    return found


def _real(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    for name, value in tensors.items():
        if value.is_complex():
            remedy = "Return its real and imaginary parts, or its absolute value."
            raise CaptureError(f"{name} is complex", where="", remedy=remedy)
        if not value.is_floating_point():
            remedy = "Return scores rather than decisions: there is no derivative through integers."
            raise CaptureError(f"{name} is made of {value.dtype}, not of real numbers", where="", remedy=remedy)
    return tuple(tensors.values())
