"""The model as boxes that one can walk: modules above what they are made of, as wide as their share of L."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.certificate import Certificate
from surefoot.certificate.numbers import per_cent, shape_text, upper
from surefoot.certificate.rows import MODEL, Line, Row, excerpt

_MOST_BOXES = 240
_EVEN = 0.3  # part of the width that all operations share evenly: a box is there even if its share is nothing
_ROW, _LETTER, _NARROW, _WIDE = (
    50,
    7.6,
    330.0,
    1000.0,
)  # pixels: a row, a letter, the drawing on a phone and a desk
_STRONGEST = 0.34  # how strongly a box is painted whose share is the largest: text stays readable on it


@dataclass(frozen=True)
class Box:
    """One module or operation; places and widths in per cent, heights in pixels."""

    level: int
    x: float
    width: float
    y: int
    height: int
    name: str
    below: str  # what stands below the name: its operation, or how many there are in it
    paint: float
    infinite: bool
    fits: tuple[str, str]  # name and what is below it: ``""`` everywhere, ``"wide"`` on a desk, ``"never"``
    label: str  # what a screen reader says
    facts: tuple[str, ...]  # path, operation, output, m, ℓ, L, share: what is shown of the box that is walked to


@dataclass(frozen=True)
class Drawing:
    """All boxes, each before those inside of it."""

    boxes: list[Box]
    height: int
    even: bool  # whether widths say nothing, as no share of L is known


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
    """Where each operation begins, in per cent, and where the last one ends."""
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
