"""The table of a certificate as a pandas data frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from surefoot.certificate.numbers import log10
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from pandas import DataFrame

    from surefoot.certificate.record import Certificate

_SIZES = ("bound", "lipschitz", "smoothness", "slope", "curvature")


class MissingPackage(SurefootError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def data_frame(certificate: Certificate) -> DataFrame:
    """One row per operation, in order.

    ``bound``, ``lipschitz``, ``smoothness``, ``slope`` and ``curvature`` are doubles, rounded upwards and infinite
    beyond their range; columns that end in ``_log10`` have their decimal logarithms whatever their size. What an
    operation does not have is missing. The domain and the constants of the whole are in ``attrs``.

    Raises:
        MissingPackage: if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingPackage("to_pandas needs pandas: pip install surefoot[pandas]") from error
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
    table = pandas.DataFrame(columns)
    table.attrs = {name: str(getattr(certificate, name)) for name in ("domain", *_SIZES[:3])}
    return table


__all__ = ["MissingPackage", "data_frame"]
