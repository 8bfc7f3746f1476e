"""The frame of every command: errors as sentences, exit codes, interrupts, warnings on standard error."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from surefoot.cli import output
from surefoot.errors import CaptureError, ChainError, SurefootError, UnsupportedOperation


class Outcome(IntEnum):
    """Exit codes."""

    CERTIFIED = 0
    NOT_CERTIFIED = 1
    USAGE = 2
    UNSUPPORTED = 3
    FAULT = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class UsageError(SurefootError, ValueError):
    """The command got arguments or files that it cannot work with."""


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", metavar="", rich_help_panel="Output", help="No notes and no progress.")
]
Debug = Annotated[
    bool, typer.Option("--debug", metavar="", rich_help_panel="Output", help="Show the traceback of an error.")
]


def guarded(command: Callable[..., Outcome]) -> Callable[..., None]:
    """A command that ends with an exit code, and with a traceback only if ``--debug`` asks for it.

    It has the options ``--quiet`` and ``--debug``. A parameter whose type is a dataclass stands for the options
    that are its fields, so that commands can share them.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    records: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}

    def run(**arguments: Any) -> None:
        debug = arguments.pop("debug")
        output.quiet(arguments.pop("quiet"))
        try:
            with output.results_alone(), _plain_warnings(debug):
                for name, record in records.items():
                    arguments[name] = record(**{option: arguments.pop(option) for option in _options(record)})
                outcome = command(**arguments)
            sys.stdout.flush()
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        except BrokenPipeError:
            _silence()
            outcome = Outcome.BROKEN_PIPE
        except Exception as error:
            if debug:
                traceback.print_exc()
            outcome = explain(error)
        raise typer.Exit(int(outcome))

    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in parameters.items():
        options |= (
            _options(records[name]) if name in records else {name: (parameter.annotation, parameter.default)}
        )
    options |= {"quiet": (Quiet, False), "debug": (Debug, False)}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
    )
    return run


def _options(record: Any) -> dict[str, tuple[Any, Any]]:
    """The fields of a record that are options, with their annotations and defaults."""
    hints = get_type_hints(record, include_extras=True)
    return {f.name: (hints[f.name], f.default) for f in fields(record) if get_origin(hints[f.name]) is Annotated}


def explain(error: Exception) -> Outcome:
    """Say what went wrong on standard error; returns the exit code."""
    if isinstance(error, OSError) and error.errno in (errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EROFS):
        output.error(f"a file could not be written: {error}. Make room, and run the same command again")
        return Outcome.USAGE
    if isinstance(error, RecursionError):
        output.error("what was given is nested too deeply to be read: give a flatter value or file")
        return Outcome.USAGE
    if isinstance(error, MemoryError | OverflowError) or (
        isinstance(error, RuntimeError | TypeError) and _TOO_LARGE.search(str(error))
    ):
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        output.error(f"the sizes that were asked for do not fit into memory: give smaller ones ({what})")
        return Outcome.USAGE
    if not isinstance(error, SurefootError):
        output.error(
            f"{type(error).__name__}: {str(error) or 'no message'}\nThis was not expected: it may be an error in "
            "the model, or in surefoot. The same command with --debug shows where it comes from."
        )
        return Outcome.FAULT
    output.error(str(error))
    for remedy, option in _OPTIONS.items():
        if remedy in str(error):
            output.note(f"on the command line, {remedy} is the option {option}")
    if isinstance(error, UnsupportedOperation | CaptureError | ChainError):
        return Outcome.UNSUPPORTED
    return Outcome.NOT_CERTIFIED if type(error).__name__ in _NO_GUARANTEE else Outcome.USAGE


_TOO_LARGE = re.compile(r"overflow|allocate memory|out of memory|not enough memory", re.IGNORECASE)
# Remedies in Python that errors of the library name, and the options that do the same.
_OPTIONS = {
    "model.eval()": "--eval",
    "surefoot.smooth(model)": "--smooth",
    "objective=": "--objective",
    'constants="certified"': "--constants certified",
}
# By name: importing the classes would import torch.
_NO_GUARANTEE = frozenset({"Contradiction", "GuaranteeError", "NotSmooth", "OptimizerError"})


@contextmanager
def _plain_warnings(debug: bool) -> Iterator[None]:
    """Warnings are lines on standard error; those about the inside of libraries are for ``--debug``."""
    with warnings.catch_warnings():
        if not debug:
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.showwarning = lambda message, *_, **__: output.warn(str(message))
        yield


def _silence() -> None:
    """Discard what is left in the buffer of standard output, as nobody reads it any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Name the file if the body fails to write it, as on a full disk."""
    try:
        yield
    except Exception as error:  # torch and safetensors have their own for a full disk
        raise UsageError(
            f"{option} {path} could not be written: {str(error) or type(error).__name__}. Make room or name "
            "another place, and run the same command again; what stood in the file before is still there"
        ) from error


def append_line(path: Path, option: str, line: str) -> None:
    """Append a line to a file, whole or not at all."""
    with writing(path, option):
        size = path.stat().st_size if path.is_file() else None
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except BaseException:
            if size is not None:
                os.truncate(path, size)
            raise


def check_destination(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse a path that cannot be written, before anything is computed."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{option} {path}: the name ends in {' or '.join(suffixes)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder '{folder}'; make it first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{option} {path}: this file is there and cannot be written to")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".surefoot-"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: the folder '{folder}' cannot be written to") from error
