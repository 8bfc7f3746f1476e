"""Files are written as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` when the body ends well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.absolute().parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # a temporary file is private, the result is an ordinary file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
