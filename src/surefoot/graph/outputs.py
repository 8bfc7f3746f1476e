"""Which tensors of what a model returns are its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surefoot.errors import CaptureError

_OBVIOUS = ("logits", "last_hidden_state", "output", "out", "prediction", "predictions", "sample")


def select_outputs(result: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors a model returns.

    A tensor is itself. A tuple or list of tensors is several outputs. A mapping or an output object with one
    tensor, or with one that goes by an obvious name (``logits``, ``last_hidden_state``, …), stands for that.

    Raises:
        CaptureError: if there is no tensor, or no obvious one.
    """
    if isinstance(result, Tensor):
        return _real({"output": result})
    if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        if result and all(isinstance(item, Tensor) for item in result):
            return _real({str(k): item for k, item in enumerate(result)})
        entries: Mapping[str, Any] = {str(k): item for k, item in enumerate(result)}
    elif isinstance(result, Mapping):
        entries = result
    elif hasattr(result, "_asdict"):
        entries = result._asdict()
    else:
        entries = getattr(result, "__dict__", {})
    tensors = {str(k): v for k, v in entries.items() if isinstance(v, Tensor) and v.is_floating_point()}
    for name in _OBVIOUS:
        if name in tensors:
            return (tensors[name],)
    if len(tensors) == 1:
        return tuple(tensors.values())
    found = f"tensors {', '.join(map(repr, tensors))}" if tensors else "no floating-point tensor"
    raise CaptureError(
        f"the model returns a {type(result).__name__} with {found}",
        where="",
        remedy="Wrap it in a module whose forward returns the one tensor you mean.",
    )


def _real(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise CaptureError(
                f"output {name!r} has type {value.dtype}, not a real number",
                where="",
                remedy="Return scores rather than decisions: there is no derivative through integers.",
            )
    return tuple(tensors.values())
