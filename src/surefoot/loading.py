"""Imports of large modules without garbage collection."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any


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
