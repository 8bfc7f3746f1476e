"""Names: of modules in an exported program, of operations, and new ones that are not taken."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

PREFIX = "model"  # the name under which the traced module holds the user's


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that called the operation; ``""`` is the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path).removeprefix(PREFIX).removeprefix(".")


def operation(target: Any) -> str:
    """``aten.conv2d`` for ``aten.conv2d.default``; the plain name of a Python function."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


def fresh(name: str, taken: set[str]) -> str:
    """The name, with a number behind it if it is taken; it is taken from now on.

    >>> fresh("linear", {"linear"})
    'linear_1'
    """
    candidate, k = name, 1
    while candidate in taken:
        candidate, k = f"{name}_{k}", k + 1
    taken.add(candidate)
    return candidate
