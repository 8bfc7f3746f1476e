"""Printing: results go to standard output, everything else to standard error, in colour on terminals only."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

_MOST_LINES = 10  # of progress, where there is no bar
_state: dict[str, Any] = {"quiet": False, "results": None, "notes": set()}


@contextmanager
def streams(quiet: bool) -> Iterator[None]:
    """Reserve standard output for results in the body: what a model prints goes to standard error."""
    _state.update(quiet=quiet, results=sys.stdout, notes=set())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _state.update(quiet=False, results=None)


def _console(stream: Any) -> Any:
    """A console that does not read brackets as markup; a pipe has lines of any length."""
    from rich.console import Console

    limited = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=None if limited else 10_000)


def width() -> int | None:
    """The number of columns for results; ``None`` for a pipe."""
    columns = int(_console(_state["results"]).width)
    return None if columns == 10_000 else columns


def result(text: str) -> None:
    """Print a part of the result."""
    print(text, file=_state["results"], flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table; all but the first ``left`` columns hold numbers. Texts that are too long are wrapped."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 1), header_style="")
    for k, title in enumerate(head):
        grid.add_column(title, justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console = _console(_state["results"])
    with console.capture() as captured:
        console.print(grid)
    result("\n".join(line.rstrip() for line in captured.get().splitlines()))


def document(content: Any) -> None:
    """Print a JSON document; numbers that JSON does not have are ``null``."""
    encoding = str(getattr(_state["results"], "encoding", None) or "utf-8").lower()
    result(json.dumps(_finite(content), indent=2, ensure_ascii=not encoding.startswith("utf"), allow_nan=False))


def _finite(content: Any) -> Any:
    """A document in which ``null`` stands for numbers that JSON does not have."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def say(kind: str, text: str) -> None:
    """Print a ``note``, a ``warning`` or an ``error`` on standard error; a note once, and not with ``--quiet``."""
    if kind == "note" and (_state["quiet"] or text in _state["notes"]):
        return
    _state["notes"].add(text)
    colour = {"note": "cyan", "warning": "yellow", "error": "red"}[kind]
    console = _console(sys.stderr)
    console.print(f"{kind}: ", style=f"bold {colour}", end="")
    console.print(text, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on standard error during the body, if that is a terminal."""
    if _state["quiet"] or not sys.stderr.isatty():
        yield
        return
    with _console(sys.stderr).status(what):
        yield


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, moved by calling the function that is yielded; off a terminal, ten lines."""
    if _state["quiet"] or not sys.stderr.isatty():
        every, done = math.ceil(total / _MOST_LINES), 0

        def advance(text: str) -> None:
            nonlocal done
            done += 1
            if not _state["quiet"] and total > _MOST_LINES and (done % every == 0 or done == total):
                print(f"{what}: {done} of {total}, {text}", file=sys.stderr, flush=True)

        yield advance
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total, text="")
        yield lambda text: bar.update(task, advance=1, text=text)
