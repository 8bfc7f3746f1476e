"""The table of layers: lines of text with keys to sort them by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.certificate.numbers import per_cent, shape_text, sort_key, upper
from surefoot.certificate.rows import MODEL, OF_ITSELF, Line, Row, lines

_SIZES = ("slope", "curvature", "bound", "lipschitz", "smoothness")


@dataclass(frozen=True)
class TableLine:
    """One line as text; ``keys`` order it by any column, whatever the size of the numbers."""

    position: int
    depth: int
    size: int
    prefix: str
    name: str
    path: str
    operation: str
    shape: str
    share: str
    sizes: dict[str, str]
    keys: dict[str, str]


def layer_table(rows: Sequence[Row]) -> list[TableLine]:
    """The lines of the tree of modules."""
    return [_line(line) for line in lines(rows)]


def _line(line: Line) -> TableLine:
    row, path = line.row, line.path or MODEL
    shown = _SIZES[2:] if line.is_group else _SIZES  # slope and curvature are those of one operation
    sizes = {name: getattr(row, name) for name in shown}
    name = "" if line.name == OF_ITSELF else line.name
    return TableLine(
        position=line.position,
        depth=min(line.depth, 9),
        size=line.operations if line.is_group else 0,
        prefix=path[: len(path) - len(name)] if name else path,
        name=name,
        path=path,
        operation=line.operation,
        shape=shape_text(row.shape),
        share=per_cent(line.share),
        sizes={name: "" if sizes.get(name) is None else upper(sizes[name]) for name in _SIZES},
        keys={name: "-Infinity" if sizes.get(name) is None else sort_key(sizes[name]) for name in _SIZES}
        | {"share": repr(line.share), "shape": str(math.prod(row.shape)), "position": str(line.position)},
    )


__all__ = ["TableLine", "layer_table"]
