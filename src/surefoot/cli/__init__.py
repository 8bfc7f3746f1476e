"""The command line ``surefoot``. It is the only part that prints: results on standard output, the rest on standard
error; and nothing but a command that computes imports torch.

* ``commands``: the commands with their arguments; ``frame``: exit codes, errors as sentences, files to write.
* ``subject``: a model by name or from a file, its weights, its batch and its objective.
* ``certifying``, ``running`` (train, converge) and ``catalogue`` (rules, doctor) do the work of the commands.
* ``output``: tables, JSON, notes and progress.
"""

from __future__ import annotations

import sys

from surefoot.cli.commands import app

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ≤ shows a question mark, not a traceback
    try:
        app(prog_name="surefoot")
    except KeyboardInterrupt:
        sys.exit(130)
