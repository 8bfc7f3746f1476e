"""A certificate as a data frame, and as a figure.

The figure shows how m, ℓ and L grow from operation to operation, and which blocks curve together. Axes are decimal
logarithms of magnitudes, so that numbers beyond the range of doubles can be drawn. It is made without pyplot:
there is no global state and no window; ``figure.savefig("growth.png")`` writes it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.certificate.rows import MODEL
from surefoot.certificate.text import clipped
from surefoot.domains import VARIABLES
from surefoot.errors import SurefootError
from surefoot.loading import optional
from surefoot.numbers import log10

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from surefoot.certificate.record import Certificate

_SIZES = ("bound", "lipschitz", "smoothness", "slope", "curvature")
_CURVES = (("bound", "bound m"), ("lipschitz", "Lipschitz ℓ"), ("smoothness", "smoothness L"))
_MOST_LABELS, _LONGEST_LABEL = 40, 30
_FAINTEST = -200.0  # decimal logarithms below this are allowances for round-off, and drawn as zero


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
    for name in _SIZES:
        sizes = [getattr(row, name) for row in rows]
        columns[name] = [math.nan if size is None else float(size) for size in sizes]
        columns[f"{name}_log10"] = [math.nan if size is None else log10(size) for size in sizes]
    columns["share"] = [row.share for row in rows]
    table: DataFrame = pandas.DataFrame(columns)
    table.attrs = {name: str(getattr(certificate, name)) for name in ("domain", *_SIZES[:3])}
    return table


def figure_of(certificate: Certificate) -> tuple[Figure, tuple[Axes, Axes]]:
    """The figure, and its two axes.

    The first has one curve for each of m, ℓ and L, with gaps where they are zero or infinite. The second is the
    matrix of bounds for pairs of blocks: zero is grey, infinity is red.

    Raises:
        MissingPackage: if matplotlib is not installed.
    """
    library = optional("matplotlib.figure", "matplotlib", "plot", MissingPackage)
    figure: Figure = library.Figure(figsize=(12.0, 5.5), layout="constrained")
    growth, blocks = figure.subplots(1, 2)
    title = figure.suptitle(f"with respect to {VARIABLES[certificate.wrt]}: {certificate.domain}", fontsize=11)
    title.set_parse_math(False)
    _growth(growth, certificate)
    _blocks(figure, blocks, certificate)
    return figure, (growth, blocks)


def _growth(axes: Axes, certificate: Certificate) -> None:
    rows = certificate.rows
    axes.set_title(
        f"m ≤ {certificate.bound}    ℓ ≤ {certificate.lipschitz}    L ≤ {certificate.smoothness}", fontsize=10
    )
    for name, label in _CURVES if rows else ():
        logs = np.array([log10(getattr(row, name)) for row in rows])
        axes.plot(np.where(np.isfinite(logs), logs, np.nan), label=label, linewidth=1.6)
    for k, row in enumerate(rows):
        if not row.smoothness.is_finite:
            axes.axvspan(k - 0.5, k + 0.5, facecolor="tab:red", alpha=0.12, linewidth=0)
    axes.set_ylabel("decimal logarithm (red: L = ∞)")
    axes.grid(axis="y", alpha=0.3)
    if rows:
        axes.legend(fontsize=9)
    _label(axes.xaxis, [f"{row.module or MODEL} {row.operation}" for row in rows])


def _blocks(figure: Figure, axes: Axes, certificate: Certificate) -> None:
    axes.set_title("smoothness by pair of blocks", fontsize=10)
    names = [path or MODEL for path in certificate.block_lipschitz]
    if not names:
        axes.set_axis_off()
        return
    from matplotlib import colormaps

    logs = np.asarray(certificate.block_smoothness.log2) * math.log10(2.0)
    finite = logs[np.isfinite(logs) & (logs > _FAINTEST)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    top = high if high > low else low + 1.0
    beyond = np.where(np.isposinf(logs), top + abs(top) + 1.0, logs)
    colours = colormaps["viridis"].with_extremes(bad="0.88", over="tab:red")
    shown = np.ma.masked_less_equal(beyond, _FAINTEST)
    image = axes.imshow(shown, cmap=colours, vmin=low, vmax=top, interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.85).set_label("decimal logarithm (red: ∞)")
    _label(axes.xaxis, names)
    _label(axes.yaxis, names, rotation=0)


def _label(axis: Any, names: list[str], rotation: int = 90) -> None:
    """Names at the ticks, as many as there is room for, and as they are even if they have signs of a formula."""
    every = math.ceil(len(names) / _MOST_LABELS) or 1
    places = range(0, len(names), every)
    axis.set_ticks(places, [clipped(names[k], _LONGEST_LABEL) for k in places], rotation=rotation, fontsize=7)
    for tick in axis.get_ticklabels():
        tick.set_parse_math(False)
