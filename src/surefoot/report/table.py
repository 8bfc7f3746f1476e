"""The layer table: lines of text with keys to sort them by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.certificate import Row
from surefoot.certificate.numbers import shape_text
from surefoot.certificate.tree import MODEL
from surefoot.magnitude import Magnitude
from surefoot.report.numbers import share, sort_key, upper
from surefoot.report.tree import Line, tree


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
    slope: str
    curvature: str
    bound: str
    lipschitz: str
    smoothness: str
    share: str
    keys: dict[str, str]


def table(rows: Sequence[Row]) -> list[TableLine]:
    """The lines of the tree of modules."""
    return [_line(line) for line in tree(rows)]


def _line(line: Line) -> TableLine:
    row, path = line.row, line.path or MODEL
    slope, curvature = (None, None) if line.size else (row.slope, row.curvature)
    magnitudes = {
        "slope": slope,
        "curvature": curvature,
        "bound": row.bound,
        "lipschitz": row.lipschitz,
        "smoothness": row.smoothness,
    }
    name = line.name or ("" if line.path else path)
    return TableLine(
        position=line.position,
        depth=min(line.depth, 9),
        size=line.size,
        prefix=path[: len(path) - len(name)] if name else path,
        name=name,
        path=path,
        operation="" if line.size else row.operation,
        shape=shape_text(row.shape),
        slope=_written(slope),
        curvature=_written(curvature),
        bound=upper(row.bound),
        lipschitz=upper(row.lipschitz),
        smoothness=upper(row.smoothness),
        share=share(line.share),
        keys={name: "-Infinity" if value is None else sort_key(value) for name, value in magnitudes.items()}
        | {"share": repr(line.share), "shape": str(math.prod(row.shape)), "position": str(line.position)},
    )


def _written(value: Magnitude | None) -> str:
    return "" if value is None else upper(value)


__all__ = ["TableLine", "table"]
