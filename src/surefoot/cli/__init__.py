"""The command line ``surefoot``. Nothing here imports torch before a command that computes is run.

* ``commands``: the commands, what they take and what they are for; ``options``: their options; ``zoo_names``: the
  zoo's names. ``guard``: errors as sentences, exit codes, interrupts. ``output``: tables, JSON, notes, progress.
* ``certifying``, ``comparing``, ``training`` (with ``checkpoints``), ``stepping`` (with ``trials``), ``converge``,
  ``catalogue`` (rules and models), ``health``: what the commands do.
* ``models``: a model by name, by import or from a file, and its weights; ``exported``: files of ``torch.export``,
  read without running what may be hidden in them; ``files``: where files may be written.
* ``cases``: from options to a model, a batch, an objective and a domain; ``batches``: data as a model takes them.
"""

from __future__ import annotations

import sys

from surefoot.cli.commands import app


def main() -> None:
    """Run the command line and exit."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without ≤ shows a question mark, not a traceback
        app(prog_name="surefoot")
    except KeyboardInterrupt:
        sys.exit(130)


__all__ = ["main"]
