"""Rows of benchmarks, kept as they are measured, with the code they are of."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Kept:
    """What is known of a module.

    Attributes:
        code: of which its rows are; empty if there are none.
        rows: as far as they were measured.
        seconds: how long that took.
        whole: whether there are no more.
    """

    code: str = ""
    rows: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    whole: bool = False

    @classmethod
    def read(cls, path: Path) -> Kept:
        """As it was written; nothing is known where there is no such file."""
        known = pickle.loads(path.read_bytes()) if path.exists() else None
        return known if isinstance(known, cls) else cls()

    def go_on(self, rows: Iterable[Any], path: Path, line: Callable[[Any], str]) -> None:
        """Measure the rows that are missing, and write each as soon as it is there.

        Args:
            rows: all rows of the module; one that is yet to be measured is a function.
            path: where to.
            line: a row as it is printed.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        for number, row in enumerate(rows):
            if number < len(self.rows):
                continue
            start = time.perf_counter()
            self.rows.append(row() if callable(row) else row)
            self.seconds += time.perf_counter() - start
            path.write_bytes(pickle.dumps(self))
            print(line(self.rows[-1]), flush=True)
        self.whole = True
        path.write_bytes(pickle.dumps(self))


def code_digest(root: Path) -> str:
    """A name for the code that is measured and that which measures."""
    digest = hashlib.sha256()
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "benchmarks").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def origin(found: Mapping[str, Kept], code: str) -> str:
    """Of which code the rows are, in words."""
    older = [name for name, kept in found.items() if kept.rows and kept.code != code]
    missing = [name for name, kept in found.items() if not kept.whole]
    said = f"Rows of older code: {', '.join(older)}." if older else "All rows are of one code."
    return said + (f" Not measured, or not to the end: {', '.join(missing)}." if missing else "")
