"""The table of a certificate: one row per operation, folded by modules where it is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from surefoot.magnitude import Magnitude

MODEL = "(model)"


@dataclass(frozen=True)
class Row:
    """One row of the table: an operation and its constants.

    Attributes:
        module: path of the module that calls it.
        operation: its name.
        shape: shape of the result.
        bound: bound on the norm of the result.
        lipschitz: Lipschitz constant of the result in the variables.
        smoothness: smoothness of the result in the variables.
        share: share of the operation's curvature in the smoothness of the output, between 0 and 1.
        slope: the rule's constant for the first derivative: the largest norm over the arguments that are not
            parameters of the operation; ``None`` if there is no such argument.
        curvature: the rule's constant for the second derivative, the largest over pairs of arguments.

    >>> certificate = sf.certify(nn.Linear(2, 1), torch.eye(2), domain=sf.Ball(0.1))
    >>> certificate.rows[0].operation
    'linear'
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    bound: Magnitude
    lipschitz: Magnitude
    smoothness: Magnitude
    share: float
    slope: Magnitude | None = None
    curvature: Magnitude | None = None


@dataclass(frozen=True)
class Line:
    """One line: a module, its last operation, and how many operations with which share it stands for."""

    name: str
    row: Row
    operations: int
    share: float


def lines(rows: Sequence[Row], depth: int | None = None) -> list[Line]:
    """One line per operation; or one for what a module of this depth computes in a row."""
    if depth is None:
        return [Line(row.module or MODEL, row, 1, row.share) for row in rows]
    runs = [list(run) for _, run in groupby(rows, lambda row: row.module.split(".")[:depth])]
    names = [".".join(run[0].module.split(".")[:depth]) if len(run) > 1 else run[0].module for run in runs]
    return [
        Line(name or MODEL, run[-1], len(run), sum(row.share for row in run))
        for name, run in zip(names, runs, strict=True)
    ]


def excerpt(rows: Sequence[Row], depth: int | None, most: int | None) -> tuple[list[Line], list[Line]]:
    """The lines at the greatest depth at which there are at most ``most``; else the first and the last of them."""
    shown = lines(rows, depth if depth is None else max(depth, 1))
    deepest = max((row.module.count(".") for row in rows), default=0) + 1
    for level in range(deepest if depth is None else max(depth, 1), 0, -1):
        if most is None or len(shown) <= most:
            return shown, []
        shown = lines(rows, level)
    if most is None or len(shown) <= most:
        return shown, []
    half = max(most, 2) // 2
    return shown[:half], shown[half - max(most, 2) :]
