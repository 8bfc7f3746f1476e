"""The matrix of bounds for pairs of blocks as a heat map, the blocks as a table, and the model as boxes.

The boxes can be walked through: modules stand above their parts, and are as wide as their share of L.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from surefoot.certificate import Certificate
from surefoot.certificate.numbers import per_cent, shape_text, upper
from surefoot.certificate.rows import MODEL, Line, Row, excerpt
from surefoot.magnitude import Magnitude

LEVELS = 12
_MOST_CELLS = 160  # along each side; with more blocks than that, several share a cell
_MOST_LABELS = 24
_MOST_LINES = 48
_LONGEST_LABEL = 20
_FAINTEST = 0.02  # part of the bounds that may be below the scale, so that a tiny one does not stretch it


@dataclass(frozen=True)
class Heat:
    """The heat map, in cells of one unit."""

    size: int  # number of cells along each side
    names: list[str]  # the names of the blocks of each cell
    together: int  # number of blocks that share a cell; a cell shows the largest of their bounds
    paths: list[tuple[float, str]]  # for each level its opacity, and the outline of its cells
    infinite: str  # the outline of cells without a finite bound
    low: str  # the lower end of the scale as text; all but the smallest few finite bounds are above it
    high: str  # the largest finite bound
    has_zero: bool  # whether there are cells that are zero
    labels: list[tuple[float, str]]  # heights in per cent, and short names
    label_width: int  # the width of the labels, in pixels
    lines: str  # lines between the cells, if these are few
    values: list[list[str]]  # the bounds as text, row by row up to the diagonal, as the matrix is symmetric


def heat(certificate: Certificate) -> Heat | None:
    """The heat map of a certificate with two blocks or more."""
    names, matrix = list(certificate.block_lipschitz), certificate.block_smoothness
    if len(names) < 2 or matrix.shape != (len(names), len(names)):
        return None
    together = math.ceil(len(names) / _MOST_CELLS)
    log2 = np.maximum(matrix.log2, matrix.log2.T)  # the two halves agree up to rounding
    starts = np.arange(0, len(names), together)
    log2 = np.maximum.reduceat(np.maximum.reduceat(log2, starts, axis=0), starts, axis=1)
    calls = operations_of(certificate)
    cells = [_joined(names[k : k + together], calls) for k in starts]
    finite = log2[np.isfinite(log2)]
    low, high = np.quantile(finite, (_FAINTEST, 1.0), method="lower").tolist() if finite.size else (0.0, 0.0)
    level = np.full(log2.shape, -1)
    scaled = (finite - low) / (high - low) if high > low else np.ones_like(finite)
    level[np.isfinite(log2)] = np.clip(scaled * LEVELS, 0, LEVELS - 1).astype(int)
    level[log2 == np.inf] = LEVELS
    written = {value: upper(Magnitude(value)) for value in set(log2.ravel().tolist())}
    return Heat(
        size=len(cells),
        names=cells,
        together=together,
        paths=[(round(0.07 + 0.93 * (k / (LEVELS - 1)) ** 1.15, 3), _outline(level == k)) for k in range(LEVELS)],
        infinite=_outline(level == LEVELS),
        low=("≤ " if low > finite.min() else "") + upper(Magnitude(low)) if finite.size else "",
        high=upper(Magnitude(high)) if finite.size else "",
        has_zero=bool((log2 == -np.inf).any()),
        labels=_labels(cells),
        label_width=12 + 7 * min(max(map(len, cells)), _LONGEST_LABEL),
        lines="".join(f"M0 {k}H{len(cells)}M{k} 0V{len(cells)}" for k in range(1, len(cells)))
        if len(cells) <= _MOST_LINES
        else "",
        values=[[written[value] for value in row[: k + 1]] for k, row in enumerate(log2.tolist())],
    )


def _outline(mask: np.ndarray) -> str:
    """The outline of the cells of a mask; adjacent cells of a row are one rectangle."""
    parts = []
    for y, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        parts += [f"M{a} {y}h{b - a}v1h-{b - a}z" for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return "".join(parts)


def operations_of(certificate: Certificate) -> dict[str, str]:
    """The first operation of each module, by path: the one it calls with its parameters."""
    return {row.module: row.operation for row in reversed(certificate.rows)}


def _joined(names: Sequence[str], calls: Mapping[str, str]) -> str:
    """The name of a block with its operation, or of the first and the last of several blocks."""
    first, last = names[0] or MODEL, names[-1] or MODEL
    if first != last:
        return f"{first} … {last}"
    return f"{first} · {calls[names[0]]}" if names[0] in calls else first


def _labels(cells: Sequence[str]) -> list[tuple[float, str]]:
    """As many labels as there is room for."""
    step = math.ceil(len(cells) / _MOST_LABELS)
    short = [name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}…" for name in cells]
    return [(100 * (k + 0.5) / len(cells), short[k]) for k in range(0, len(cells), step)]


class Block(NamedTuple):
    """One block: its constants and, for an objective, its gradient at the centre and its step size."""

    name: str
    operation: str
    lipschitz: Magnitude
    smoothness: Magnitude
    gradient: float | None
    step: float | None


def blocks(certificate: Certificate) -> list[Block]:
    """The table of blocks."""
    has_steps = certificate.scalar and not certificate.flags and certificate.segment_step is None
    steps = certificate.block_step_sizes if has_steps else {}
    gradients, calls = certificate.block_gradients or {}, operations_of(certificate)
    table = []
    for k, (name, lipschitz) in enumerate(certificate.block_lipschitz.items()):
        alone = certificate.block_smoothness[k, k] if certificate.block_smoothness.shape else Magnitude.zero()
        numbers = lipschitz, alone, gradients.get(name), steps.get(name)
        table.append(Block(name or MODEL, calls.get(name, ""), *numbers))
    return table


_MOST_BOXES = 240
_EVEN = 0.3  # part of the width that is divided evenly, so that a box without a share can be seen
# pixels: a row, a letter, the drawing on a phone and on a desktop
_ROW, _LETTER, _NARROW, _WIDE = 50, 7.6, 330.0, 1000.0
_STRONGEST = 0.34  # opacity of the box with the largest share; text stays readable on it


@dataclass(frozen=True)
class Box:
    """One module or operation; positions and widths are in per cent, heights in pixels."""

    level: int
    x: float
    width: float
    y: int
    height: int
    name: str
    below: str  # the text below the name: its operation, or the number of operations in it
    paint: float
    infinite: bool
    fits: tuple[str, str]  # where name and text fit: ``""`` everywhere, ``"wide"`` on a desktop, ``"never"``
    label: str  # the text for screen readers
    facts: tuple[str, ...]  # path, operation, output, m, ℓ, L, share: shown for the selected box


@dataclass(frozen=True)
class Drawing:
    """All boxes, each before those inside it."""

    boxes: list[Box]
    height: int
    even: bool  # whether all widths are equal because no shares of L are known


def architecture(certificate: Certificate) -> Drawing | None:
    """The boxes of a certificate with two operations or more."""
    rows = certificate.rows
    if len(rows) < 2:
        return None
    shown = excerpt(rows, None, _MOST_BOXES).shown
    finite = certificate.smoothness.is_finite and sum(row.share for row in rows) > 0
    starts = _starts(rows, finite)
    depth = max(line.depth for line in shown) + 1
    boxes = [_box(line, certificate, starts, depth) for line in shown]
    return Drawing(boxes, depth * _ROW, not finite)


def _starts(rows: Sequence[Row], finite: bool) -> list[float]:
    """The left edge of each operation in per cent, and the right edge of the last one."""
    total = sum(row.share for row in rows)
    starts = [0.0]
    for row in rows:
        part = _EVEN / len(rows) + (1 - _EVEN) * row.share / total if finite else 1 / len(rows)
        starts.append(starts[-1] + 100 * part)
    return starts


def _box(line: Line, certificate: Certificate, starts: Sequence[float], depth: int) -> Box:
    first, row = line.position - 1, line.row
    x, end = starts[first], starts[first + line.operations]
    path = line.path or MODEL
    name = line.name if line.name.strip("·") else path.rpartition(".")[2]
    what = f"{line.operations} operations" if line.is_group else line.operation
    infinite = not certificate.smoothness.is_finite and line.share > 0
    share = "∞" if infinite else per_cent(line.share) or ("under 0.1 %" if line.share else "none")
    largest = max(each.share for each in certificate.rows) or 1.0
    return Box(
        level=line.depth + 1,
        x=round(x, 3),
        width=round(end - x, 3),
        y=line.depth * _ROW,
        height=_ROW if line.is_group else (depth - line.depth) * _ROW,
        name=name,
        below=what,
        paint=0.5 if infinite else round(0.05 + (_STRONGEST - 0.05) * min(line.share / largest, 1.0), 3),
        infinite=infinite,
        fits=(_fits(name, end - x), _fits(what, end - x)),
        label=f"{path}, {what}, share of L: {share}",
        facts=(path, what, shape_text(row.shape), *map(upper, (row.bound, row.lipschitz, row.smoothness)), share),
    )


def _fits(text: str, per_cent: float) -> str:
    needed = 100 * (_LETTER * len(text) + 12)
    return "" if per_cent * _NARROW > needed else "wide" if per_cent * _WIDE > needed else "never"
