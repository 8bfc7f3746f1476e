"""One record per operation: everything that any reading of it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.operations.registry import Rule, register_rule


@dataclass(frozen=True)
class Operation:
    """What is known about one operation."""

    name: str
    bounds: Rule
    taylor: Callable[..., Any] | None = None
    loss: Any = None
    factor: Callable[..., Any] | None = None


_RECORDS: dict[str, Operation] = {}


def operation(*names: str, **readings: Any) -> Callable[[Rule], Rule]:
    """Register an operation under its names: its bounds, and other readings by keyword."""

    def register(bounds: Rule) -> Rule:
        _RECORDS.update({name: Operation(name, bounds, **readings) for name in names})
        return register_rule(*names)(bounds)

    return register


def record_of(name: str) -> Operation | None:
    """The record of an operation; ``None`` if there is none."""
    return _RECORDS.get(name)
