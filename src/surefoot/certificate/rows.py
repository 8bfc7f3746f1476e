"""The table of a certificate: one row per operation, and the rows as a tree of modules.

A module that calls one operation is one line. A module with others inside is a line with the constants of its
output and its share, with its parts below it; a chain of modules without a branch is one line. Lines keep the
order in which operations are computed, so a module that is called twice appears twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from surefoot.magnitude import Magnitude

MODEL = "(model)"
OF_ITSELF = "·"  # stands for an operation that a module with parts calls itself


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
        epsilon: the ε of a normalisation.
        bits_by_radius: by at least how many powers of two the operation's part of the smoothness falls when the
            radius of the domain is halved (:mod:`surefoot.calculus.breakdown`).
        bits_by_epsilon: the same when the ε of every normalisation is multiplied by ten.

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
    epsilon: float | None = None
    bits_by_radius: float = 0.0
    bits_by_epsilon: float = 0.0


@dataclass(frozen=True)
class Line:
    """One line of the tree."""

    prefix: str  # the branches of the tree in front of the name
    name: str  # the name of the module below those of the lines above; empty if the line above has the same
    path: str  # the whole path of the module
    depth: int  # the depth in the tree
    row: Row  # the operation; for a module with parts or a folded one, the last operation in it
    share: float  # share of the smoothness of all operations of the line and below it
    position: int  # the place of its first operation in the order of computation, from 1
    operations: int = 1  # number of operations the line stands for
    is_group: bool = False  # whether its parts are on the lines below it

    @property
    def is_operation(self) -> bool:
        """Whether the line is one operation and nothing else."""
        return self.operations == 1 and not self.is_group

    @property
    def operation(self) -> str:
        """The text in the column of operations."""
        if self.is_group:
            return ""
        return self.row.operation if self.is_operation else f"{self.operations} operations"


_Path = tuple[str, ...]
_Entry = tuple[int, _Path, Row]


def lines(rows: Sequence[Row], depth: int | None = None) -> list[Line]:
    """The lines of the tree; modules at a ``depth`` are one line each, by default all operations are shown."""
    entries = [(k, tuple(row.module.split(".")) if row.module else (), row) for k, row in enumerate(rows, 1)]
    return list(_lines(entries, 0, depth, 0, ""))


def _lines(entries: list[_Entry], level: int, most: int | None, depth: int, indent: str) -> Iterator[Line]:
    """The lines of a run of operations that share the first ``level`` parts of their paths."""
    runs = [list(run) for _, run in groupby(entries, lambda entry: entry[1][level : level + 1])]
    for k, run in enumerate(runs):
        last = k == len(runs) - 1
        signs = ("├─ ", "└─ ", "   ") if last else ("├─ ", "├─ ", "│  ")
        branch, prefix, below = (indent + sign if depth else "" for sign in signs)
        path = run[0][1]
        shared = _shared(path, [other for _, other, _ in run])
        if len(path) == level:  # operations of the module whose parts are around them
            for entry in run:
                first = prefix if entry is run[-1] else branch
                yield _line([entry], OF_ITSELF if level else MODEL, path, depth, first)
        elif len(run) == 1:
            yield _line(run, ".".join(path[level:]), path, depth, prefix)
        elif most is not None and shared >= most:
            shared = max(most, level + 1)
            yield _line(run, ".".join(path[level:shared]), path[:shared], depth, prefix)
        elif all(other == path for _, other, _ in run):
            yield _line(run[:1], ".".join(path[level:]), path, depth, prefix)
            yield from (_line([entry], "", path, depth, below) for entry in run[1:])
        else:
            yield _line(run, ".".join(path[level:shared]), path[:shared], depth, prefix, is_group=True)
            yield from _lines(run, shared, most, depth + 1, below)


def _line(run: list[_Entry], name: str, path: _Path, depth: int, prefix: str, is_group: bool = False) -> Line:
    share = sum(row.share for _, _, row in run)
    return Line(prefix, name, ".".join(path), depth, run[-1][2], share, run[0][0], len(run), is_group)


def _shared(path: _Path, others: list[_Path]) -> int:
    """How many parts all paths share."""
    return next((k for k in range(len(path)) if any(o[k : k + 1] != path[k : k + 1] for o in others)), len(path))


@dataclass(frozen=True)
class Excerpt:
    """The lines to show."""

    first: list[Line]
    hidden: int  # how many operations are left out between the first and the last lines
    last: list[Line]

    @property
    def shown(self) -> list[Line]:
        """All lines, without the gap."""
        return self.first + self.last

    @property
    def folded(self) -> int:
        """How many operations share a line with others."""
        return sum(line.operations for line in self.shown if not line.is_group and not line.is_operation)


def excerpt(rows: Sequence[Row], depth: int | None, most: int | None) -> Excerpt:
    """The lines at the greatest depth, up to ``depth``, at which there are at most ``most`` lines.

    If there are more at every depth, the lines of depth one are taken without those in the middle.
    """
    whole = 2 + max((row.module.count(".") for row in rows), default=0)  # nothing is folded
    shown: list[Line] = []
    for level in range(whole if depth is None else min(max(depth, 1), whole), 0, -1):
        shown = lines(rows, level)
        if most is None or len(shown) <= most:
            return Excerpt(shown, 0, [])
    head = max(most or 0, 2) // 2
    tail = len(shown) - (max(most or 0, 2) - head)
    hidden = sum(line.operations for line in shown[head:tail] if not line.is_group)
    return Excerpt(shown[:head], hidden, shown[tail:])
