"""The command line ``surefoot``. Nothing here imports torch before a command that computes is run.

* ``app``: the commands together; ``options``: the options they share; ``names``: the zoo's names.
* ``frame``: errors as sentences, exit codes, interrupts. ``output``: tables, JSON, notes and progress.
* ``models``: a model by name, by import or from a file; ``weights``: what is loaded into it; ``exported``: files
  of ``torch.export``, read without running what may be hidden in them; ``files``: whole files or none.
* ``request``: from options to a model, a batch, an objective and a domain; ``subject``: the same to train on;
  ``batches``: data as a model takes them.
* ``certify``, ``compare``, ``train`` (with ``training``), ``step`` (with ``trials``), ``cost``, ``catalogue``
  (rules and models), ``doctor``: the commands.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without ≤ shows a question mark, not a traceback
        from surefoot.cli.app import app

        app(prog_name="surefoot")
    except KeyboardInterrupt:
        sys.exit(130)


__all__ = ["main"]
