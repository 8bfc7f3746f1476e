"""Operations that are another one under another name, written as that one.

What only takes the shape of another tensor does not depend on it, and is written as the constant it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from surefoot.graph.nodes import Node, Ref, Spec

_aten: Any = torch.ops.aten


def plain(node: Node, device: torch.device) -> Node:
    """The same computation by the plainest operation there is; other nodes unchanged.

    Memory that is not initialised is filled with zeros: what a model returns may not depend on it. A view is a
    reshape that promises a memory layout, and layouts may differ between two runs. As a function, to detach is to
    do nothing; where that would matter the model is refused.
    """
    if node.op in _FILLS and isinstance(node.spec, Spec):
        value = node.arguments["fill_value"] if _FILLS[node.op] is None else _FILLS[node.op]
        settings = {"dtype": node.spec.dtype, "device": device}
        if not isinstance(value, Ref):
            return _by(_aten.full.default, node, args=(list(node.spec.shape), value), kwargs=settings)
    if node.op in _VIEWS and len(node.args) == 2 and isinstance(node.args[1], list):
        return _by(_aten.reshape.default, node)
    return _by(_aten.alias.default, node) if node.op in _DETACHES else node


def _by(target: Any, node: Node, **changes: Any) -> Node:
    return replace(node, op=str(target.overloadpacket), target=target, **changes)


_VIEWS = ("aten.view", "aten._unsafe_view")
_DETACHES = ("aten.detach", "aten.detach_")
_FILLS: dict[str, float | None] = {
    "aten.zeros_like": 0,
    "aten.new_zeros": 0,
    "aten.empty": 0,
    "aten.empty_like": 0,
    "aten.empty_strided": 0,
    "aten.new_empty": 0,
    "aten.ones_like": 1,
    "aten.new_ones": 1,
    "aten.full_like": None,
    "aten.new_full": None,
}
