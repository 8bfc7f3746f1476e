"""Benchmarks by name: functions whose rows are measured one after the other, stored, and written into a page.

A benchmark yields cases: a label, and a function that returns one row of cells or several. The rows make the table
below ``<!-- benchmark: name -->`` on its page; all other words of a page are written by hand. What was measured is
stored in ``build/bench`` with a digest of the code, so a run that was cut off goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES, FOLDER = ROOT / "docs", ROOT / "build" / "bench"
MODULES = ("application", "convergence", "families", "lipschitz", "minibatches", "peers", "speed", "tightness",
           "training")  # fmt: skip
Row = Sequence[str]
Case = tuple[str, Callable[[], Row | list[Row]]]


@dataclass(frozen=True)
class Benchmark:
    """A table: its name, the page it stands on, its columns, and its cases."""

    name: str
    page: str
    columns: tuple[str, ...]
    cases: Callable[[], Iterable[Case]]


REGISTRY: dict[str, Benchmark] = {}


def benchmark(name: str, page: str, columns: str) -> Callable[[Callable[[], Iterable[Case]]], Any]:
    """Register a function that yields cases; columns are divided by ``|``."""

    def register(cases: Callable[[], Iterable[Case]]) -> Callable[[], Iterable[Case]]:
        REGISTRY[name] = Benchmark(name, page, tuple(c.strip() for c in columns.split("|")), cases)
        return cases

    return register


def registry() -> dict[str, Benchmark]:
    """All benchmarks."""
    for module in MODULES:
        import_module(f"benchmarks.{module}")
    return REGISTRY


@cache
def code_digest(root: Path = ROOT) -> str:
    """A name for the code that is measured and that which measures."""
    digest = hashlib.sha256()
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "benchmarks").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def stored(name: str, compute: Callable[[], Any]) -> Any:
    """The result of this name for the present code: from its file, or computed and written there."""
    path = FOLDER / f"{re.sub(r'[^a-zA-Z0-9.+-]+', '-', name)}.json"
    if path.exists():
        code, result = json.loads(path.read_text(encoding="utf-8"))
        if code == code_digest():
            return result
    result = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps([code_digest(), result]), encoding="utf-8")
    temporary.replace(path)
    return result


def measured(name: str, label: str) -> list[Row]:
    """The rows of one case, in this process."""
    torch.set_num_threads(1)
    compute = dict(registry()[name].cases())[label]
    found: Any = stored(f"{name} {label}", compute)
    rows: list[Row] = found if isinstance(found[0], list) else [found]
    for row in rows:
        print(f"{name}: {' | '.join(row)}", flush=True)
    return rows


def run(names: Sequence[str], only: str = "", jobs: int = 1) -> None:
    """Measure tables and write them; of those of which ``only`` some cases are measured, nothing is written."""
    known = registry()
    wanted = [each for each in known.values() if not names or {each.name, each.page} & set(names)]
    unknown = set(names) - {word for each in wanted for word in (each.name, each.page)}
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(unknown)}: there are {', '.join(known)}")
    for each in wanted:
        labels = [label for label, _ in each.cases() if only in label]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            run_one = pool.map if jobs > 1 else map
            rows = [row for rows in run_one(measured, [each.name] * len(labels), labels) for row in rows]
        if not only:
            page = PAGES / f"{each.page}.md"
            page.write_text(replaced(page.read_text(encoding="utf-8"), each, rows), encoding="utf-8")


def table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """A table in Markdown.

    >>> print(table(("a", "b"), [("1", "2")]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def replaced(text: str, benchmark: Benchmark, rows: Iterable[Row]) -> str:
    """A page with another table below the mark of a benchmark."""
    mark = f"<!-- benchmark: {benchmark.name} -->\n\n"
    before, found, rest = text.partition(mark)
    if not found:
        raise ValueError(f"docs/{benchmark.page}.md has no mark {mark.strip()}")
    after = rest[len("".join(_table_lines(rest))) :]
    return f"{before}{mark}{table(benchmark.columns, rows)}\n{after}"


def tables(text: str) -> dict[str, list[list[str]]]:
    """The tables of a page that benchmarks write, by name: cells by line, the columns first."""
    found = {}
    for name, rest in re.findall(r"<!-- benchmark: (\S+) -->\n\n(.*?)(?=<!-- benchmark|\Z)", text, re.DOTALL):
        cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in _table_lines(rest)]
        found[name] = [cells[0], *cells[2:]]
    return found


def _table_lines(text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        if not line.startswith("|"):
            return
        yield line


def number(value: float) -> str:
    """Three digits."""
    return "∞" if value == float("inf") else f"{value:.3g}"


def aim(value: float, *, most: float | None = None, least: float | None = None) -> str:
    """What is aimed at, and whether it was missed.

    >>> aim(2.0, most=3), aim(2.0, least=3)
    ('≤ 3', '≥ 3 (missed)')
    """
    met = value <= most if most is not None else least is not None and value >= least
    sign, limit = ("≤", most) if most is not None else ("≥", least)
    return f"{sign} {limit:g}{'' if met else ' (missed)'}"
