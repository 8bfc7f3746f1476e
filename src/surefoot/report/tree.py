"""The operations of a certificate as a tree of modules, in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from surefoot.certificate import Row


@dataclass(frozen=True)
class Line:
    """One line of the tree: an operation, or a module that calls several of them.

    Attributes:
        name: of the module, without what the lines above say; empty for the module above itself.
        path: of the module, in full.
        depth: how many lines it stands below.
        row: the operation; for a module the last one it calls, whose constants are those of its output.
        share: of the smoothness of the output; for a module that of all its operations.
        position: of the operation in the order of computation, from 1; of the first one for a module.
        size: how many operations a module calls; 0 for an operation.
    """

    name: str
    path: str
    depth: int
    row: Row
    share: float
    position: int
    size: int = 0


def tree(rows: Sequence[Row]) -> list[Line]:
    """The lines: a module that calls one operation is one line with it, otherwise a line above theirs."""
    entries = [(k, tuple(row.module.split(".")) if row.module else (), row) for k, row in enumerate(rows, 1)]
    return list(_lines(entries, 0, 0))


_Entry = tuple[int, tuple[str, ...], Row]


def _lines(entries: Sequence[_Entry], known: int, depth: int) -> Iterator[Line]:
    """The lines of operations whose module paths agree in the first ``known`` parts."""
    for _, members in groupby(entries, key=lambda entry: entry[1][known : known + 1]):
        run = list(members)
        position, path, row = run[0]
        if len(path) <= known or len(run) == 1:
            for position, path, row in run:
                yield Line(".".join(path[known:]), row.module, depth, row, row.share, position)
            continue
        common = _common(run)
        total = sum(entry[2].share for entry in run)
        name, full = ".".join(path[known:common]), ".".join(path[:common])
        yield Line(name, full, depth, run[-1][2], total, position, len(run))
        yield from _lines(run, common, depth + 1)


def _common(run: Sequence[_Entry]) -> int:
    """How many parts all paths share."""
    first, last = min(entry[1] for entry in run), max(entry[1] for entry in run)
    shared = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return min(len(first), len(last)) if shared is None else shared


__all__ = ["Line", "tree"]
