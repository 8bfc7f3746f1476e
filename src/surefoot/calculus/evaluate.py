"""One operation evaluated at the centre, in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surefoot.graph.evaluate import run_in_double as run_in_double
from surefoot.graph.structure import Node


def value_of(node: Node, inputs: Mapping[str, Any]) -> Any:
    """The operation at the given values, in double precision; ``None`` if one of them is not known."""
    if any(value is None for value in inputs.values()):
        return None
    with torch.no_grad():
        return run_in_double(node, inputs)
