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
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import PAGES, table
from benchmarks.soak_rounds import ROUNDS, Round
from surefoot.errors import SurefootError

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
        tasks, weights = zip(*ROUNDS.items(), strict=True)
        (task,) = random.Random(own).choices(tasks, weights)
        said, right = attempt(task, own)
        if right:
            counts[said] += 1
        else:
            wrong.append(said)
            print(said, flush=True)
        number += 1
    return counts, wrong


def written(page: str, counts: Counter[str], wrong: list[str], seconds: float, seed: int) -> str:
    """The page with other counts; what is asked of a round stays."""
    words = page.partition("What must not happen")[2].partition("\n| ")[0]
    rounds = sum(counts.values()) + len(wrong)
    head = f"# Reliability\n\nWritten by `make soak`: {rounds} rounds in {seconds / 60:.0f} minutes, seed {seed}."
    rows = [[what, str(count)] for what, count in sorted(counts.items())]
    bad = "\n".join(f"* {text}" for text in wrong) or "Nothing."
    lists = f"{table(('round', 'times'), rows)}\n\n**What went wrong**\n\n{bad}\n"
    return f"{head}\n\nWhat must not happen{words}\n{lists}"


def main() -> None:
    """Run, write the page, and fail if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=PAGES / "reliability.md", help="where the counts are written")
    parser.add_argument("--round", help="one round alone, with this seed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.round is not None:
        task = next(task for task in ROUNDS if task.__name__ == given.round)
        print(*attempt(task, given.seed))
        return
    counts, wrong = run(given.seconds, given.seed)
    text = written(given.page.read_text(encoding="utf-8"), counts, wrong, given.seconds, given.seed)
    given.page.write_text(text, encoding="utf-8")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
