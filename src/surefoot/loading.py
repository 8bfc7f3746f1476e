"""Imports at run time: of large modules, and of optional packages."""

from __future__ import annotations

import gc
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


def loaded(name: str) -> Any:
    """A module by its full name, imported without garbage collection.

    The objects that an import creates stay. Collecting would go through all of them again and again and find
    nothing; that is a third of the time in which ``torch.export`` loads its tracer. Objects that are frozen and
    thawed move to the oldest generation, which is collected last; objects that somebody else froze stay frozen.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
