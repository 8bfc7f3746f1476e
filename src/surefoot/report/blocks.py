"""The matrix of bounds for pairs of blocks as a heat map, and the blocks as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.certificate import Certificate
from surefoot.certificate.tree import MODEL
from surefoot.magnitude import Magnitude
from surefoot.report.numbers import lower, sort_key, upper

LEVELS = 12
_MOST_CELLS = 160  # along each side; more blocks than that are shown several to a cell
_MOST_LABELS = 24
_MOST_LINES = 48
_LONGEST_LABEL = 20
_FAINTEST = (
    0.02  # so many of the bounds may be fainter than the scale shows: a tiny one takes no shades from others
)


@dataclass(frozen=True)
class Heat:
    """The drawing: cells of one unit.

    Attributes:
        size: how many cells along each side.
        names: of the blocks of each cell.
        together: how many blocks share a cell; a cell shows the largest of their bounds.
        paths: for each level the outline of its cells; then those that are infinite.
        infinite: the outline of cells without a finite bound.
        low: below the faintest level, as text: all but the smallest few finite bounds are above it.
        high: the largest finite bound.
        has_zero: whether there are cells that are zero.
        labels: heights in per cent, short names.
        label_width: room for them, in pixels.
        lines: between the cells, where these are few.
        values: the bounds as text, row by row up to the diagonal: the matrix is symmetric.
    """

    size: int
    names: list[str]
    together: int
    paths: list[tuple[float, str]]
    infinite: str
    low: str
    high: str
    has_zero: bool
    labels: list[tuple[float, str]]
    label_width: int
    lines: str
    values: list[list[str]]


def heat(certificate: Certificate) -> Heat | None:
    """The heat map of a certificate with two blocks or more."""
    names, matrix = list(certificate.block_lipschitz), certificate.block_smoothness
    if len(names) < 2 or matrix.shape != (len(names), len(names)):
        return None
    together = math.ceil(len(names) / _MOST_CELLS)
    log2 = np.maximum(matrix.log2, matrix.log2.T)  # the two halves agree up to rounding
    starts = np.arange(0, len(names), together)
    log2 = np.maximum.reduceat(np.maximum.reduceat(log2, starts, axis=0), starts, axis=1)
    cells = [_joined(names[k : k + together]) for k in starts]
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
        paths=[(opacity(k), _outline(level == k)) for k in range(LEVELS)],
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


def opacity(level: int) -> float:
    """How strongly a level is painted."""
    return round(0.07 + 0.93 * (level / (LEVELS - 1)) ** 1.15, 3)


def _outline(mask: np.ndarray) -> str:
    """The cells of a mask, those beside each other as one rectangle."""
    parts = []
    for y, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        parts += [f"M{a} {y}h{b - a}v1h-{b - a}z" for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return "".join(parts)


def _joined(names: Sequence[str]) -> str:
    first, last = names[0] or MODEL, names[-1] or MODEL
    return first if first == last else f"{first} … {last}"


def _labels(cells: Sequence[str]) -> list[tuple[float, str]]:
    """As many as there is room for."""
    step = math.ceil(len(cells) / _MOST_LABELS)
    return [(100 * (k + 0.5) / len(cells), _short(cells[k])) for k in range(0, len(cells), step)]


def _short(name: str) -> str:
    if len(name) <= _LONGEST_LABEL:
        return name
    return f"{name[: _LONGEST_LABEL - 1]}…"


@dataclass(frozen=True)
class BlockLine:
    """One block: its own constants and, for an objective, its gradient at the centre and its step size."""

    name: str
    lipschitz: str
    lipschitz_key: str
    smoothness: str
    smoothness_key: str
    gradient: str
    gradient_key: float
    step: str
    step_key: float


def block_lines(certificate: Certificate) -> list[BlockLine]:
    """The table of blocks."""
    steps = certificate.block_step_sizes if _has_steps(certificate) else {}
    gradients = certificate.block_gradients or {}
    lines = []
    for k, (name, lipschitz) in enumerate(certificate.block_lipschitz.items()):
        own = certificate.block_smoothness[k, k] if certificate.block_smoothness.shape else Magnitude.zero()
        step, gradient = steps.get(name), gradients.get(name)
        lines.append(
            BlockLine(
                name=name or MODEL,
                lipschitz=upper(lipschitz),
                lipschitz_key=sort_key(lipschitz),
                smoothness=upper(own),
                smoothness_key=sort_key(own),
                gradient="" if gradient is None else upper(Magnitude.of(gradient)),
                gradient_key=0.0 if gradient is None else gradient,
                step="" if step is None else lower(step),
                step_key=0.0 if step is None else step,
            )
        )
    return lines


def _has_steps(certificate: Certificate) -> bool:
    return certificate.scalar and not certificate.flags and certificate.segment_step is None


__all__ = ["BlockLine", "Heat", "block_lines", "heat", "opacity"]
