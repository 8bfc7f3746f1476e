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
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

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
    """The whole result as one JSON document."""
    ascii_only = not str(getattr(_results(), "encoding", "") or "utf-8").lower().startswith("utf")
    result(encoded(content, indent=2, ascii_only=ascii_only))


def encoded(content: Any, indent: int | None = None, ascii_only: bool = False) -> str:
    """As JSON; numbers that JSON does not have are ``null``."""
    return json.dumps(_finite(content), indent=indent, ensure_ascii=ascii_only, allow_nan=False)


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
    _results().flush()
    label = typer.style(f"{kind}:", fg=colour, bold=True) if coloured(sys.stderr) else f"{kind}:"
    print(f"{label} {text[:1].lower() + text[1:] if _is_sentence(text) else text}", file=sys.stderr)


def _is_sentence(text: str) -> bool:
    """Whether it starts with an ordinary capitalised word, and not with a name such as MPS or RuntimeError."""
    word = text.split(" ", 1)[0]
    return word[:1].isupper() and word[1:].islower()


def coloured(stream: Any) -> bool:
    """Whether a stream shows colours: a terminal, unless NO_COLOR is set or the terminal is dumb."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("dumb", "unknown")
    return bool(stream.isatty() and not plain)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table on standard output, fitted to a terminal; all but the first ``left`` columns hold numbers."""
    if not _results().isatty():
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        align = [str.ljust] * left + [str.rjust] * (len(head) - left)
        for row in (head, *rows):
            result("  ".join(a(cell, width) for a, cell, width in zip(align, row, widths, strict=True)).rstrip())
        return
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, title in enumerate(head):
        shown.add_column(title, justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    _console(_results()).print(shown)


def _console(stream: Any) -> Console:
    """What writes to a terminal; brackets are no markup."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, no_color=not coloured(stream))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something takes its time; nothing off a terminal."""
    if _state["quiet"] or not sys.stderr.isatty():
        yield
        return
    with _console(sys.stderr).status(what):
        yield


Advance = Callable[[str], None]
_MOST_LINES = 10  # of progress, where there is no bar


def _lines(what: str, total: int, done: int) -> Advance:
    """A line now and then; none where there is little to wait for."""
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
    """A bar on standard error; calling what is yielded moves it by one and shows a text behind it.

    Where standard error is no terminal there are at most ten lines instead.
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
