"""A reliability run: random models, losses, sets, oracles, optimizers and processes, with faults put in.

``make soak`` runs for twenty minutes, ``python -m benchmarks.soak --seconds 60 --seed 7`` for less. Each round has
a seed of its own, which is printed if the round fails; ``--round steps --seed 7000021`` runs it again alone. What
is asked of a round: an error is a sentence of surefoot (never another exception), weights are what they were after
a refusal, a certificate is not below what is found, sampled or computed with 200 bits, a file is whole or as
before, and nothing hangs. The counts are written to ``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import warnings
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak_faults import FAULTS, ONCE, RARE
from benchmarks.soak_rounds import COMMON, MET, Round
from surefoot.errors import SurefootError

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
HEAD = """# Reliability

Written by `make soak`: {rounds} rounds in {minutes:.0f} minutes, seed {seed}. A round draws a model, data, an
objective, a set, an oracle, an optimizer, or two processes, and puts a fault in: batches that are not finite, a
process that is killed, files that are cut off, Ctrl-C at a random moment, a disk that is full after some bytes,
clocks that jump, dimensions of size zero, chains of 10,000 layers.

What must not happen: an exception that is no sentence of surefoot, a file that is neither whole nor as before,
weights that are lost or moved by a step that was refused, more than five minutes of computing or fifteen of
waiting, a certificate below what is found. Certificates are judged by values and slopes at random points of their
set, those of small models also by derivatives in exact arithmetic (200 bits).

| round | times |
| --- | ---: |
"""
_HANGS, _WAITS = 300, 900  # seconds of computing and of waiting that no round takes, on a busy machine


class Hang(BaseException):
    """A round did not end; not an ``Exception``, so that nothing catches it on the way."""


def _late(number: int, frame: Any) -> None:
    raise Hang


def attempt(task: Round, seed: int) -> tuple[str, bool]:
    """How a round ended, and whether it was as it must be."""
    dice = random.Random(seed + 10**12)  # not the one that drew the task
    torch.manual_seed(seed)
    for number in (signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(number, _late)
    signal.alarm(_WAITS)
    signal.setitimer(signal.ITIMER_VIRTUAL, _HANGS)
    try:
        return task(dice), True
    except SurefootError as error:
        return f"{task.__name__}: refused by a sentence, {type(error).__name__}", True
    except (Hang, Exception) as error:
        return f"{task.__name__}, seed {seed}: {type(error).__name__}: {str(error)[:500]}", False
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def run(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Rounds until the time is over: how often each ended how, and what went wrong."""
    end, counts, wrong, number = time.monotonic() + seconds, Counter[str](), list[str](), 0
    while time.monotonic() < end:
        own = seed * 1_000_003 + number
        dice = random.Random(own)
        kind = ONCE if number == 5 else RARE if number % 10 == 9 else FAULTS if number % 5 == 2 else COMMON
        said, right = attempt(dice.choice(kind), own)
        if right:
            counts[said] += 1
        else:
            wrong.append(said)
            print(said, flush=True)
        number += 1
    return counts, wrong


def page(counts: Counter[str], wrong: list[str], seconds: float, seed: int) -> str:
    """The counts as a page."""
    head = HEAD.format(rounds=sum(counts.values()) + len(wrong), minutes=seconds / 60, seed=seed)
    lines = [f"| {what} | {count} |" for what, count in sorted(counts.items())]
    lines += ["", "**What was drawn**", ""]
    for kind, names in groupby(sorted(MET), key=lambda name: name.partition(": ")[0]):
        shown = ", ".join(f"{name.partition(': ')[2]} {MET[name]}" for name in names)
        lines.append(f"* {kind}: {shown}")
    lines += ["", "**What went wrong**", "", *([f"* {text}" for text in wrong] or ["Nothing."]), ""]
    return head + "\n".join(lines)


def main() -> None:
    """Run, write the page, and fail if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=PAGE, help="where the counts are written")
    parser.add_argument("--round", help="one round alone, with this seed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.round is not None:
        task = next(task for task in (*COMMON, *FAULTS, *RARE, *ONCE) if task.__name__ == given.round)
        print(*attempt(task, given.seed))
        return
    print(f"seed {given.seed}, {given.seconds:.0f} seconds", flush=True)
    counts, wrong = run(given.seconds, given.seed)
    given.page.write_text(page(counts, wrong, given.seconds, given.seed), encoding="utf-8")
    for what, count in sorted(counts.items()):
        print(f"{count:6d}  {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
