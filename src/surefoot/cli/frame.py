"""The frame of every command: options, errors as sentences, exit codes, files that can be written."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from surefoot.cli import output
from surefoot.errors import CaptureError, ChainError, SurefootError, UnsupportedOperation


class Outcome(IntEnum):
    """Exit codes."""

    PROVED = 0
    NOT_PROVED = 1
    USAGE = 2
    UNSUPPORTED = 3
    FAULT = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class UsageError(SurefootError, ValueError):
    """The command got arguments or files that it cannot work with."""


_Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", metavar="", rich_help_panel="Output", help="No notes and no progress.")
]
_Debug = Annotated[
    bool, typer.Option("--debug", metavar="", rich_help_panel="Output", help="Show the traceback of an error.")
]


def guarded(command: Callable[..., Outcome]) -> Callable[..., None]:
    """A command that ends with an exit code, with ``--quiet`` and ``--debug``.

    A parameter whose type is a dataclass stands for the options that are its fields, so that commands share them.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    records: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in parameters.items():
        if name in records:
            hints = get_type_hints(records[name], include_extras=True)
            options |= {f.name: (hints[f.name], f.default) for f in fields(records[name])}
        else:
            options[name] = (parameter.annotation, parameter.default)
    options |= {"quiet": (_Quiet, False), "debug": (_Debug, False)}

    def run(quiet: bool, debug: bool, **arguments: Any) -> None:
        try:
            with output.streams(quiet), _plain_warnings(debug):
                for name, record in records.items():
                    arguments[name] = record(**{f.name: arguments.pop(f.name) for f in fields(record)})
                outcome = command(**arguments)
            sys.stdout.flush()
        except (typer.Exit, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
        except BrokenPipeError:  # nobody reads what is left in the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            outcome = Outcome.BROKEN_PIPE
        except Exception as error:
            if debug:
                traceback.print_exc()
            outcome = _explained(error)
        raise typer.Exit(int(outcome))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = [inspect.Parameter(name, kind, annotation=a, default=d) for name, (a, d) in options.items()]
    run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return run


# Remedies in Python that errors of the library name, and the options that do the same.
_OPTIONS = {"model.eval()": "--eval", "surefoot.smooth(model)": "--smooth", "objective=": "--objective"}
_TOO_LARGE = re.compile(r"overflow|allocate memory|out of memory|not enough memory", re.IGNORECASE)
# By name: importing the classes would import torch.
_NO_GUARANTEE = frozenset({"Contradiction", "GuaranteeError", "NotSmooth", "OptimizerError"})


def _explained(error: Exception) -> Outcome:
    """Say what went wrong on standard error; returns the exit code."""
    if isinstance(error, MemoryError | OverflowError | RecursionError) or _TOO_LARGE.search(str(error)):
        output.say("error", f"the sizes that were asked for do not fit into memory: give smaller ones ({error})")
        return Outcome.USAGE
    if not isinstance(error, SurefootError):
        output.say("error", f"{type(error).__name__}: {str(error) or 'no message'}")
        output.say("error", "this was not expected: it may be in the model, or in surefoot. --debug shows where")
        return Outcome.FAULT
    output.say("error", str(error))
    for remedy, option in _OPTIONS.items():
        if remedy in str(error):
            output.say("note", f"on the command line, {remedy} is the option {option}")
    if isinstance(error, UnsupportedOperation | CaptureError | ChainError):
        return Outcome.UNSUPPORTED
    return Outcome.NOT_PROVED if type(error).__name__ in _NO_GUARANTEE else Outcome.USAGE


@contextmanager
def _plain_warnings(debug: bool) -> Iterator[None]:
    """Warnings are lines on standard error; those about the inside of libraries are for ``--debug``."""
    with warnings.catch_warnings():
        if not debug:
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.showwarning = lambda message, *_, **__: output.say("warning", str(message))
        yield


def check_destination(path: Path | None, option: str, *suffixes: str) -> None:
    """Refuse a path that cannot be written, before anything is computed."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.suffix not in suffixes:
        raise UsageError(f"{option} {path}: the name ends in {' or '.join(suffixes)}")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder '{folder}'; make it first")
    if path.exists() and (path.is_dir() or not os.access(path, os.W_OK)):
        raise UsageError(f"{option} {path}: this is a folder, or a file that cannot be written to")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".surefoot-"):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: the folder '{folder}' cannot be written to") from error


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
    output.say("note", f"{option.removeprefix('--')}: {path}")
