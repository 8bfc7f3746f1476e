"""What is printed: results on standard output, everything else on standard error.

Tables are plain text; on a terminal they are fitted to its width. Colour is for terminals, and not with NO_COLOR.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

_state: dict[str, Any] = {"quiet": False, "results": None}


def quiet(wanted: bool) -> None:
    """Whether notes and progress are left out."""
    _state["quiet"] = wanted


@contextmanager
def results_alone() -> Iterator[None]:
    """In the body standard output is for results: what a model prints goes to standard error."""
    _state["results"] = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _state["results"] = None


def _results() -> Any:
    """The stream of results."""
    return sys.stdout if _state["results"] is None else _state["results"]


def result(text: str) -> None:
    """A part of the result, on standard output."""
    print(text, file=_results())


def document(content: Any) -> None:
    """The whole result as one JSON document; numbers that JSON does not have are ``null``."""
    ascii_only = not str(getattr(_results(), "encoding", "") or "utf-8").lower().startswith("utf")
    result(json.dumps(_finite(content), indent=2, ensure_ascii=ascii_only, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def note(text: str) -> None:
    """Something that is good to know, on standard error."""
    if not _state["quiet"]:
        _to_stderr("note", text, "cyan")


def warn(text: str) -> None:
    """Something to beware of, on standard error."""
    _to_stderr("warning", text, "yellow")


def error(text: str) -> None:
    """Why there is no result, on standard error."""
    _to_stderr("error", text, "red")


def _to_stderr(kind: str, text: str, colour: str) -> None:
    import typer

    _results().flush()
    label = typer.style(f"{kind}:", fg=colour, bold=True) if coloured(sys.stderr) else f"{kind}:"
    print(f"{label} {text[:1].lower() + text[1:] if _is_sentence(text) else text}", file=sys.stderr)


def _is_sentence(text: str) -> bool:
    """Whether it starts with an ordinary capitalised word, and not with a name such as MPS or RuntimeError."""
    word = text.split(" ", 1)[0]
    return word[:1].isupper() and word[1:].islower()


def coloured(stream: Any) -> bool:
    """Whether a stream shows colours: a terminal, unless NO_COLOR is set or the terminal is dumb."""
    return bool(
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") not in ("dumb", "unknown")
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table on standard output: aligned text; on a terminal, fitted to its width.

    Args:
        head: the titles of the columns.
        rows: the cells.
        left: how many columns are aligned to the left; the others hold numbers.
    """
    if not _results().isatty():
        widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
        for row in (head, *rows):
            cells = [
                cell.ljust(width) if k < left else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            result("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, title in enumerate(head):
        shown.add_column(title, justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(_literal(cell) for cell in row))
    Console(file=_results(), highlight=False, no_color=not coloured(_results())).print(shown)


def _literal(cell: str) -> Any:
    """Text whose brackets are no markup."""
    from rich.text import Text

    return Text(cell)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something takes its time; nothing off a terminal."""
    if _state["quiet"] or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, no_color=not coloured(sys.stderr)).status(what):
        yield


Advance = Callable[[str], None]


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Advance]:
    """A bar on standard error; calling what is yielded moves it by one and shows a text behind it."""
    if _state["quiet"] or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, no_color=not coloured(sys.stderr))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done, text="")
        yield lambda text: bar.update(task, advance=1, text=text)
