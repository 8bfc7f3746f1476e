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

import signal
import sys
from typing import Any

from surefoot.cli.commands import app

_MOMENT = 0.05  # seconds


def main() -> None:
    """Run the command line and exit."""
    sys.unraisablehook = _interrupted_again
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without ≤ shows a question mark, not a traceback
        app(prog_name="surefoot")
    except KeyboardInterrupt:
        sys.exit(130)


def _interrupted_again(lost: Any) -> None:
    """Raise a Ctrl-C again, a moment later, that Python dropped as it met a destructor or a weak reference."""
    if issubclass(lost.exc_type, KeyboardInterrupt) and hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)
    else:
        sys.__unraisablehook__(lost)


__all__ = ["main"]
