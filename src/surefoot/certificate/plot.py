"""A certificate as a data frame, and as a figure.

The figure shows how m, ℓ and L grow from operation to operation, and which blocks curve together. Axes are decimal
logarithms of magnitudes, so that numbers beyond the range of doubles can be drawn. It is made without pyplot:
there is no global state and no window; ``figure.savefig("growth.png")`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.certificate.numbers import log10, short
from surefoot.certificate.rows import MODEL, Row
from surefoot.certificate.text import clipped
from surefoot.domains import VARIABLES
from surefoot.errors import SurefootError
from surefoot.loading import optional
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from surefoot.certificate.record import Certificate

_SIZES = ("bound", "lipschitz", "smoothness", "slope", "curvature")


class MissingPackage(SurefootError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def data_frame(certificate: Certificate) -> DataFrame:
    """One row per operation, in order.

    ``bound``, ``lipschitz``, ``smoothness``, ``slope`` and ``curvature`` are doubles, rounded up and infinite
    beyond their range; columns that end in ``_log10`` have their decimal logarithms whatever their size. Numbers
    that an operation does not have are missing. The domain and the constants of the whole are in ``attrs``.

    Raises:
        MissingPackage: if pandas is not installed.
    """
    pandas = optional("pandas", "pandas", "to_pandas", MissingPackage)
    rows = certificate.rows
    columns: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in rows] for name in ("module", "operation", "shape")
    }
    sizes = {name: [getattr(row, name) for row in rows] for name in _SIZES}
    for name, column in sizes.items():
        columns[name] = [math.nan if size is None else float(size) for size in column]
    columns["share"] = [row.share for row in rows]
    columns["epsilon"] = [math.nan if row.epsilon is None else row.epsilon for row in rows]
    for name, column in sizes.items():
        columns[f"{name}_log10"] = [math.nan if size is None else log10(size) for size in column]
    table: DataFrame = pandas.DataFrame(columns)
    table.attrs = {name: str(getattr(certificate, name)) for name in ("domain", *_SIZES[:3])}
    return table


_CURVES = (
    ("bound", "bound m", "tab:green"),
    ("lipschitz", "Lipschitz ℓ", "tab:blue"),
    ("smoothness", "smoothness L", "tab:orange"),
)
_FEW = 8  # operations with room for horizontal labels, blocks with room for numbers
_MOST_LABELS = 60
_MOST_BLOCKS = 24
_FAINTEST = -200.0  # decimal logarithms below this are allowances for round-off, and drawn as zero
_LONGEST_LABEL = 34
_INFINITE = "tab:red"


def figure_of(certificate: Certificate) -> tuple[Figure, tuple[Axes, Axes]]:
    """The figure, and its two axes.

    The first has one curve for each of m, ℓ and L, with gaps where they are zero. Where L is infinite the
    background is hatched, and the first operation with an infinite L is named. The second is the matrix of bounds
    for pairs of
    blocks: zero is grey, infinity is red.

    Raises:
        MissingPackage: if matplotlib is not installed.
    """
    library = optional("matplotlib.figure", "matplotlib", "plot", MissingPackage)
    wide = min(13.0, 6.0 + 0.17 * len(certificate.rows))
    figure: Figure = library.Figure(figsize=(wide + 5.5, 5.5), layout="constrained")
    growth, blocks = figure.subplots(1, 2, width_ratios=[wide, 5.5])
    _plain(figure.suptitle(f"with respect to {VARIABLES[certificate.wrt]}: {certificate.domain}", fontsize=11))
    _growth(growth, certificate)
    _blocks(figure, blocks, certificate)
    return figure, (growth, blocks)


def _growth(axes: Axes, certificate: Certificate) -> None:
    rows = certificate.rows
    axes.set_title(
        f"m ≤ {certificate.bound}    ℓ ≤ {certificate.lipschitz}    L ≤ {certificate.smoothness}", fontsize=10
    )
    if not rows:
        _note(axes, "no table: the certificate speaks of the whole alone")
        return
    places = np.arange(len(rows))
    for name, label, colour in _CURVES:
        logs = np.array([log10(getattr(row, name)) for row in rows])
        heights = np.where(np.isfinite(logs), logs, np.nan)  # zero and infinity are drawn nowhere
        marker = "o" if len(rows) <= _MOST_LABELS else None
        axes.plot(places, heights, label=label, color=colour, marker=marker, markersize=3.5, linewidth=1.6)
    _mark_infinite(axes, rows)
    _powers_of_ten(axes.yaxis)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="best" if len(rows) <= _MOST_LABELS else "upper left", fontsize=9)
    positions, names = _labels(rows)
    size, rotation = 8 if len(positions) <= 24 else 6.5, 0 if len(rows) <= _FEW else 90
    axes.set_xticks(positions, names, rotation=rotation, fontsize=size)
    for tick in axes.get_xticklabels():
        _plain(tick)


def _mark_infinite(axes: Axes, rows: Sequence[Row]) -> None:
    """Hatch where L is infinite, and name the first place."""
    runs = [list(run) for _, run in groupby(range(len(rows)), lambda k: rows[k].smoothness.is_finite)]
    infinite = [run for run in runs if not rows[run[0]].smoothness.is_finite]
    for run in infinite:
        label = f"L = ∞, first in {_name(rows[run[0]])}" if run is infinite[0] else None
        axes.axvspan(
            run[0] - 0.5, run[-1] + 0.5, facecolor="none", edgecolor=_INFINITE, alpha=0.25, hatch="///",
            linewidth=0, label=label,
        )  # fmt: skip


def _labels(rows: Sequence[Row]) -> tuple[list[int], list[str]]:
    """Labels of all operations if there is room, else of modules at the first depth that has enough of them."""
    if len(rows) <= _FEW:
        names = [f"{clipped(row.module or MODEL, 14)}\n{clipped(row.operation, 14)}" for row in rows]
        return list(range(len(rows))), names
    if len(rows) <= _MOST_LABELS:
        return list(range(len(rows))), [_name(row) for row in rows]
    kept: list[tuple[int, str]] = []
    for depth in range(1, max(row.module.count(".") for row in rows) + 2):
        names = [".".join(row.module.split(".")[:depth]) or MODEL for row in rows]
        kept = []
        for k, name in enumerate(names):  # where a module begins, unless that is too close to the one before
            if k == 0 or (names[k - 1] != name and k - kept[-1][0] >= len(rows) / _MOST_LABELS):
                kept.append((k, clipped(name, _LONGEST_LABEL)))
        if len(kept) >= _MOST_LABELS / 5:
            break
    return [k for k, _ in kept], [name for _, name in kept]


def _name(row: Row) -> str:
    return clipped(f"{row.module or MODEL} {row.operation}", _LONGEST_LABEL)


def _blocks(figure: Figure, axes: Axes, certificate: Certificate) -> None:
    names = [clipped(path or MODEL, _LONGEST_LABEL) for path in certificate.block_lipschitz]
    axes.set_title("smoothness by pair of blocks", fontsize=10)
    if not names:
        _note(axes, "no numbers for single blocks")
        return
    from matplotlib import colormaps

    heights = np.asarray(certificate.block_smoothness.log2) * math.log10(2.0)
    finite = heights[np.isfinite(heights) & (heights > _FAINTEST)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    colours = colormaps["viridis"].with_extremes(bad="0.88", over=_INFINITE)
    top = high if high > low else low + 1.0
    beyond = top + abs(top) + 1.0
    shown = np.ma.masked_less_equal(np.where(np.isposinf(heights), beyond, heights), _FAINTEST)
    image = axes.imshow(shown, cmap=colours, vmin=low, vmax=top, interpolation="nearest")
    infinite = bool(np.isposinf(heights).any())
    bar = figure.colorbar(image, ax=axes, shrink=0.85, extend="max" if infinite else "neither")
    bar.set_label("bound (red: ∞)" if infinite else "bound")
    _powers_of_ten(bar.ax.yaxis)
    if len(names) <= _FEW:
        _write_numbers(axes, certificate.block_smoothness, heights, low + 0.6 * (top - low))
    every = math.ceil(len(names) / _MOST_BLOCKS)
    places = list(range(0, len(names), every))
    size = 8 if len(places) <= 16 else 6.5
    axes.set_xticks(places, [names[k] for k in places], rotation=0 if len(names) <= _FEW else 90, fontsize=size)
    axes.set_yticks(places, [names[k] for k in places], fontsize=size)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        _plain(tick)


def _write_numbers(axes: Axes, matrix: Magnitude, heights: np.ndarray, bright: float) -> None:
    """The bounds themselves, where there is room, white on dark colours."""
    for (i, j), height in np.ndenumerate(heights):
        dark = _FAINTEST < height < bright or height == np.inf
        text = short(matrix[i, j]) if height > _FAINTEST else "0"
        axes.text(j, i, text, ha="center", va="center", color="white" if dark else "black", fontsize=9)


def _powers_of_ten(axis: Any) -> None:
    """Ticks at powers of ten, or at round numbers where there are too few of those."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(MaxNLocator(nbins=8, integer=high - low > 3, steps=[1, 2, 5, 10]))
    if high - low <= 3:
        for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            powers = range(math.floor(low), math.ceil(high) + 1)
            ticks = [math.log10(d) + k for k in powers for d in digits if low <= math.log10(d) + k <= high]
            if len(ticks) >= 2:
                axis.set_major_locator(FixedLocator(ticks))
                break
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))


def power_of_ten(exponent: float) -> str:
    """The label of a tick: a power where the exponent is whole, the number where it is small or broken.

    >>> power_of_ten(18.0), power_of_ten(0.5)
    ('$10^{18}$', '3.16')
    """
    if abs(exponent - round(exponent)) < 1e-9 and not 0 <= round(exponent) <= 2:
        return rf"$10^{{{round(exponent)}}}$"
    return f"{10.0**exponent:.3g}"


def _note(axes: Axes, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, wrap=True)


def _plain(text: Any) -> None:
    """Show a name as it is, even if it contains signs of a formula."""
    text.set_parse_math(False)
