"""The errors that surefoot raises: each says what went wrong, where, and what to do about it."""

from __future__ import annotations

__all__ = [
    "CaptureError", "ChainError", "EvaluationError", "ObjectiveError", "SurefootError", "UnsupportedOperation",
    "describe",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)


class SurefootError(Exception):
    """Base class of every error that surefoot raises on purpose."""


class CaptureError(SurefootError, ValueError):
    """The model or its input cannot be read as a graph of real-valued operations.

    Args:
        what: what went wrong.
        where: the module path, ``""`` for the model itself or ``None`` if it has no place.
        remedy: what to do next.

    >>> print(CaptureError("dropout is random", where="encoder.1", remedy="Call model.eval()."))
    In module 'encoder.1': dropout is random. Call model.eval().
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        place = f"{what[:1].upper()}{what[1:]}" if where is None else f"In {describe(where)}: {what}"
        super().__init__(f"{place}. {remedy}")


class ChainError(SurefootError, ValueError):
    """The graph cannot be read as a chain of computations, or the chain lacks what was asked for."""


class EvaluationError(SurefootError, RuntimeError):
    """An objective has no value, or none that can be enclosed."""


class ObjectiveError(SurefootError, ValueError):
    """The objective does not fit the outputs or the targets."""


class UnsupportedOperation(SurefootError, NotImplementedError):
    """An operation has no rule."""


def describe(path: str) -> str:
    """A module path as it reads in a sentence.

    >>> sf.errors.describe("features.0"), sf.errors.describe("")
    ("module 'features.0'", 'the model itself')
    """
    return f"module '{path}'" if path else "the model itself"
