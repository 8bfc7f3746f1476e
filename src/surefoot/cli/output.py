"""Printing: results go to standard output, everything else to standard error.

All of it is plain text, fitted to the width of a terminal. Colour is for terminals, unless NO_COLOR is set.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_state: dict[str, Any] = {"quiet": False, "results": None}
_NARROWEST, _SHORTEST_TEXT = 40, 16  # columns of a screen, and of a last column that is wrapped


def quiet(wanted: bool) -> None:
    """Choose whether notes and progress are left out."""
    _state["quiet"] = wanted


@contextmanager
def results_alone() -> Iterator[None]:
    """Reserve standard output for results in the body: what a model prints goes to standard error."""
    _state["results"] = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _state["results"] = None


def _results() -> Any:
    """The stream of results."""
    return sys.stdout if _state["results"] is None else _state["results"]


def _print(text: str) -> None:
    print(text, file=_results(), flush=True)  # a row of many is read as it finishes


def result(text: str) -> None:
    """Print a part of the result; lines that are too long for a terminal are wrapped."""
    room = width()
    for line in text.split("\n"):
        if room is None or len(line) <= room:
            _print(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        _print("\n".join(wrapped))


def document(content: Any, indent: int | None = 2) -> None:
    """Print a JSON document, on one line without ``indent``."""
    ascii_only = not str(getattr(_results(), "encoding", "") or "utf-8").lower().startswith("utf")
    _print(encoded(content, indent=indent, ascii_only=ascii_only))


def encoded(content: Any, indent: int | None = None, ascii_only: bool = False) -> str:
    """The content as JSON text; numbers that JSON does not have are ``null``."""
    return json.dumps(_finite(content), indent=indent, ensure_ascii=ascii_only, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def note(text: str) -> None:
    """Print something that is good to know, unless ``--quiet`` is set."""
    if not _state["quiet"]:
        _to_stderr("note", text, "cyan")


def warn(text: str) -> None:
    """Print a warning."""
    _to_stderr("warning", text, "yellow")


def error(text: str) -> None:
    """Print why there is no result."""
    _to_stderr("error", text, "red")


def _to_stderr(kind: str, text: str, colour: str) -> None:
    _results().flush()
    label = typer.style(f"{kind}:", fg=colour, bold=True) if coloured(sys.stderr) else f"{kind}:"
    print(f"{label} {text[:1].lower() + text[1:] if _is_sentence(text) else text}", file=sys.stderr)


def _is_sentence(text: str) -> bool:
    """Whether a text starts with an ordinary capitalised word, not with a name such as MPS or RuntimeError."""
    word = text.split(" ", 1)[0]
    return word[:1].isupper() and word[1:].islower()


def coloured(stream: Any) -> bool:
    """Whether a stream shows colours: a terminal, unless NO_COLOR is set or the terminal is dumb."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("dumb", "unknown")
    return bool(stream.isatty() and not plain)


def width() -> int | None:
    """The number of columns: COLUMNS if it is set, else those of the terminal; ``None`` for a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() or _results().isatty():
        return max(int(columns) if columns.isdigit() else shutil.get_terminal_size().columns, _NARROWEST)
    return None


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table; all but the first ``left`` columns hold numbers.

    If there is no room for it, texts of the last column are wrapped, or each row becomes a few lines.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    room = width() or math.inf
    rest = room - sum(widths[:-1]) - 2 * (len(head) - 1)
    if rest < min(widths[-1], len(head[-1]) + _SHORTEST_TEXT if left == len(head) else widths[-1]):
        for row in rows:
            _lines_of(head, row)
        return
    align = [str.ljust] * left + [str.rjust] * (len(head) - left)
    for row in (head, *rows):
        *cells, last = row
        texts = textwrap.wrap(last, int(rest)) if len(last) > rest else [last]
        before = "  ".join(a(cell, size) for a, cell, size in zip(align, cells, widths, strict=False))
        for k, text in enumerate(texts):
            end = text if left == len(head) else align[-1](text, widths[-1])
            _print(f"{before if k == 0 else ' ' * len(before)}  {end}".rstrip() if cells else end)


def _lines_of(head: Sequence[str], row: Sequence[str]) -> None:
    """Print a row as lines: its first cell, then each other cell that is not empty, with its title."""
    result(row[0])
    longest = max(map(len, head[1:]))
    for title, cell in zip(head[1:], row[1:], strict=True):
        if cell:
            result(f"  {title:<{longest}}  {cell}")


def _console(stream: Any) -> Console:
    """A console that writes to a terminal and does not read brackets as markup."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, no_color=not coloured(stream))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on standard error during the body, if that is a terminal."""
    if _state["quiet"] or not sys.stderr.isatty():
        yield
        return
    with _console(sys.stderr).status(what):
        yield


Advance = Callable[[str], None]
_MOST_LINES = 10  # lines of progress, where there is no bar


def _lines(what: str, total: int, done: int) -> Advance:
    """Print a line of progress now and then; none if there are few steps."""
    every = math.ceil(total / _MOST_LINES)
    at = done

    def advance(text: str) -> None:
        nonlocal at
        at += 1
        if total > _MOST_LINES and (at % every == 0 or at == total):
            print(f"{what}: {at} of {total}, {text}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Advance]:
    """A progress bar on standard error; calling the yielded function moves it by one and shows a text beside it.

    If standard error is not a terminal, at most ten lines are printed instead.
    """
    if _state["quiet"]:
        yield lambda text: None
        return
    if not sys.stderr.isatty():
        yield _lines(what, total, done)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    first, last = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
    columns = (first, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), last)
    with Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done, text="")
        yield lambda text: bar.update(task, advance=1, text=text)
