"""Imports at run time: of large modules, and of optional packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from surefoot.errors import SurefootError


def optional(module: str, packages: str, purpose: str, error: type[SurefootError]) -> Any:
    """A module of an optional package; if it is missing, the error says what needs it and how to install it.

    >>> optional("missing.module", "missing", "this example", SurefootError)
    Traceback (most recent call last):
    surefoot.errors.SurefootError: this example needs missing, which is not installed: pip install missing
    """
    try:
        return import_module(module)
    except ImportError as cause:
        name = packages.partition(" ")[0]
        raise error(f"{purpose} needs {name}, which is not installed: pip install {packages}") from cause


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collection, which would go through all that stays again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
