"""The command line ``surefoot``. Nothing here imports torch before a command that computes is run.

* ``commands``: the commands, their arguments and their help; ``options``: their options; ``zoo_names``: the names
  of the zoo. ``guard``: errors as sentences, exit codes, interrupts, where files may be written. ``output``:
  tables, JSON, notes, progress.
* ``certifying`` (one model or several), ``training``, ``stepping`` (steps, their cost, convergence) and
  ``catalogue`` (rules, models, what is installed) do the work of the commands.
* ``sweep``: many models or checkpoints, in several processes and in several runs.
* ``models``: a model by name, by import or from a file; ``suiting``: weights and data that suit it; ``exported``:
  files of ``torch.export``, read without running what may be hidden in them.
* ``cases``: from options to a model, a batch, an objective and a domain.
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
