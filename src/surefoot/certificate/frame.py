"""The table of a certificate as a pandas data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.certificate.numbers import log10
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from pandas import DataFrame

    from surefoot.certificate import Certificate, Row
    from surefoot.magnitude import Magnitude

_SIZES = ("bound", "lipschitz", "smoothness", "slope", "curvature")


class MissingPackage(SurefootError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def frame(certificate: Certificate) -> DataFrame:
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
    columns: dict[str, list[Any]] = {
        "module": [row.module for row in certificate.rows],
        "operation": [row.operation for row in certificate.rows],
        "shape": [row.shape for row in certificate.rows],
    }
    for name in _SIZES:
        columns[name] = [_double(_size(row, name)) for row in certificate.rows]
    columns["share"] = [row.share for row in certificate.rows]
    columns["epsilon"] = [float("nan") if row.epsilon is None else row.epsilon for row in certificate.rows]
    for name in _SIZES:
        columns[f"{name}_log10"] = [_log10(_size(row, name)) for row in certificate.rows]
    table = pandas.DataFrame(columns)
    table.attrs = {
        name: str(getattr(certificate, name)) for name in ("domain", "bound", "lipschitz", "smoothness")
    }
    return table


def _size(row: Row, name: str) -> Magnitude | None:
    size: Magnitude | None = getattr(row, name)
    return size


def _double(size: Magnitude | None) -> float:
    return float("nan") if size is None else float(size)


def _log10(size: Magnitude | None) -> float:
    return float("nan") if size is None else log10(size)


__all__ = ["MissingPackage", "frame"]
