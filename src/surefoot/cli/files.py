"""Where files may be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli.guard import UsageError


def check_destination(path: Path | None, option: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse a path that cannot be written, before anything is computed.

    Raises:
        UsageError: if its folder does not exist or is not writable, it is a folder or read-only, or its
            suffix is another one.
    """
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
