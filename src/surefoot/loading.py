"""Imports of many modules at once, while garbage collection waits."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any


def loaded(name: str) -> Any:
    """A module by its full name, imported without collecting garbage meanwhile.

    What an import creates stays. To collect would be to go through all of it again and again as it grows, and to
    find nothing: that is a third of the time in which ``torch.export`` loads its tracer. Objects that are frozen
    and thawed count as old ones, which are looked at last; what somebody else froze stays frozen.
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
