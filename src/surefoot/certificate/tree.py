"""The operations of a certificate as a tree of modules, one line each.

A module that calls one operation is one line. A module with others inside is a line with the constants of its
output and its share, and its parts below it. Lines keep the order in which operations are computed, so a module
that is called twice is there twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.certificate import Row

MODEL = "(model)"
_OWN = "·"  # an operation that a module with parts calls itself


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        prefix: the branches of the tree in front of the name.
        name: the last part of the module's path; empty where the line above names it.
        row: the operation; for a module with parts or a folded one the last operation in it.
        share: of the smoothness, of all operations of the line and below it.
        operations: how many operations the line stands for.
        is_group: whether its parts are on the lines below it.
    """

    prefix: str
    name: str
    row: Row
    share: float
    operations: int
    is_group: bool = False

    @property
    def is_operation(self) -> bool:
        """Whether the line is one operation and nothing else."""
        return self.operations == 1 and not self.is_group

    @property
    def operation(self) -> str:
        """What to write into the column of operations."""
        if self.is_group:
            return ""
        return self.row.operation if self.is_operation else f"{self.operations} operations"


def lines(rows: Sequence[Row], depth: int | None = None) -> list[Line]:
    """The lines of the tree.

    Args:
        rows: the operations in order.
        depth: modules at this depth are one line each; by default all operations are shown.
    """
    paths = [tuple(row.module.split(".")) if row.module else () for row in rows]
    return list(_lines(list(zip(paths, rows, strict=True)), 0, depth, ""))


Entry = tuple[tuple[str, ...], "Row"]


def _lines(entries: list[Entry], level: int, depth: int | None, indent: str) -> Iterator[Line]:
    """The lines of a run of operations that share the first ``level`` parts of their paths."""
    runs = [
        (name, list(run)) for name, run in groupby(entries, lambda e: e[0][level] if len(e[0]) > level else None)
    ]
    for k, (name, run) in enumerate(runs):
        last = k == len(runs) - 1
        prefix = "" if level == 0 else indent + ("└─ " if last else "├─ ")
        below = "" if level == 0 else indent + ("   " if last else "│  ")
        if name is None:
            for number, (_, row) in enumerate(run, 1):
                branch = prefix if number == len(run) or not level else indent + "├─ "
                yield Line(branch, _OWN if level else MODEL, row, row.share, 1)
        elif (depth is not None and level + 1 >= depth) or len(run) == 1:
            yield _folded(prefix, _path(run, level), run)
        elif all(len(path) == level + 1 for path, _ in run):
            for number, (_, row) in enumerate(run):
                yield Line(below if number else prefix, "" if number else name, row, row.share, 1)
        else:
            whole = _folded(prefix, name, run)
            yield Line(prefix, name, whole.row, whole.share, whole.operations, is_group=True)
            yield from _lines(run, level + 1, depth, below)


def _path(run: list[Entry], level: int) -> str:
    """The name of a folded line: for one operation the rest of its path."""
    return ".".join(run[0][0][level:]) if len(run) == 1 else run[0][0][level]


def _folded(prefix: str, name: str, run: list[Entry]) -> Line:
    return Line(prefix, name, run[-1][1], sum(row.share for _, row in run), len(run))


@dataclass(frozen=True)
class Excerpt:
    """The lines to show: the first ones, how many operations are left out after them, the last ones."""

    first: list[Line]
    hidden: int
    last: list[Line]

    @property
    def shown(self) -> list[Line]:
        """All lines that are there."""
        return self.first + self.last

    @property
    def folded(self) -> int:
        """How many operations share a line with others."""
        return sum(line.operations for line in self.shown if not line.is_group and not line.is_operation)


def excerpt(rows: Sequence[Row], depth: int | None, most: int | None) -> Excerpt:
    """The lines at the greatest depth at which they fit, without those in the middle if they fit at none."""
    found = _fitting(rows, depth, most)
    if most is None or len(found) <= most:
        return Excerpt(found, 0, [])
    head = max(most, 2) // 2
    tail = len(found) - (max(most, 2) - head)
    hidden = sum(line.operations for line in found[head:tail] if not line.is_group)
    return Excerpt(found[:head], hidden, found[tail:])


def _fitting(rows: Sequence[Row], depth: int | None, most: int | None) -> list[Line]:
    """The lines at the greatest depth, up to ``depth``, at which there are at most ``most``; else at depth one."""
    whole = 2 + max((row.module.count(".") for row in rows), default=0)  # nothing is folded
    found: list[Line] = []
    for level in range(whole if depth is None else min(max(depth, 1), whole), 0, -1):
        found = lines(rows, level)
        if most is None or len(found) <= most:
            break
    return found


__all__ = ["MODEL", "Excerpt", "Line", "excerpt", "lines"]
