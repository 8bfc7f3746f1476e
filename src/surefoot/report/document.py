"""Documents: plain values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

RUN = "surefoot/run/1"


def plain(value: Any, doubles: bool = False) -> Any:
    """Values that JSON can hold; infinite numbers are ``"∞"`` and ``"-∞"``. With ``doubles``, 3 becomes 3.0."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry, doubles) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, doubles) for entry in value]
    if isinstance(value, float) and math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if isinstance(value, float) or (doubles and isinstance(value, int) and not isinstance(value, bool)):
        return float(value) + 0.0
    return value


def run_document(optimizer: Any) -> dict[str, Any]:
    """A run of an optimizer with a history: its steps, which of them were proved, and what follows from all."""
    steps = []
    for number, record in enumerate(optimizer.history):
        steps.append(
            {
                "step": number,
                "loss": record.loss,
                "gradient_norm": record.gradient_norm,
                "step_size": record.step_size,
                "proved_decrease": record.proved_decrease,
                "decrease": record.decrease,
                "note": record.note,
            }
        )
    proved_steps = sum(step["proved_decrease"] is not None for step in steps)
    stationarity = optimizer.stationarity() if steps else None
    return {
        "schema": RUN,
        "optimizer": type(optimizer).__name__,
        "guarantee": str(getattr(optimizer, "guarantee", "")),
        "proved_steps": proved_steps,
        "smallest_gradient": stationarity and stationarity.smallest,
        "proved_gradient": stationarity and stationarity.bound,
        "steps": steps,
    }
