"""Write ``minibatches.md``: mini-batch training in proved bursts, from any learning rate, next to fixed rates.

``python -m docs.minibatches [--jobs 2]`` runs what is not yet in ``build/training``, then rewrites the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.minibatches import (
    EPOCHS,
    FEW,
    LOSS_TARGET,
    NETWORKS,
    NOTHING,
    SEEDS,
    SMALL,
    STARTS,
    WORK_TARGET,
    Comparison,
    measure,
    verdicts,
)
from docs.training import machine, number, replaced, table, targets, verdict

PAGE = Path(__file__).resolve().parent / "minibatches.md"

TEXT = """\
# Mini-batches that end in a proof

`sf.optim.ProvedEpochs` lets Adam, or SGD with momentum 0.9, run bursts of mini-batches of 128 in single precision
and keeps a burst only if the objective of all data is proved to be lower. Its rate finds itself. This page
measures how low it gets, next to the same optimizer at fixed rates. It is written by

```sh
OMP_NUM_THREADS=1 python -m docs.minibatches
```

which runs `benchmarks/minibatches.py`; targets that were missed are shown as missed.

{targets}

## What is compared

*proved, from …*: the loss after the work of {epochs} epochs, from a model and an optimizer with that rate. Trials
of rates, evaluations and bursts that were not kept count; reading the model, once, does not. In brackets: that
loss over the one of the same optimizer after {epochs} epochs at the best of its fixed rates, which proves nothing
and had its rate chosen afterwards, of at least five and until the best is not at an end. Losses are those of
networks in evaluation mode, on both sides; those below {nothing:g} count as equal. {seeds}.

*Work.* The budget is counted and not timed, so that the same seed gives the same run: an evaluation as half an
epoch, one more where running statistics have moved and the model is read anew, a gradient of all data, in larger
batches and without steps between them, as half an epoch. What it is in processor time was measured too, over that
of a plain epoch of the same network in the same run: *measured work* is that of the whole run, in epochs, and
*work per epoch* that of a pass over the data with gradients, by mini-batches or of all data, once the rate has
settled: mostly the latter. Whole runs took {spent} measured epochs.

*What the last part is.* With `tail=0.6`, which was asked for, the last three fifths of the work are spent on
L-BFGS steps of the objective of all data, and what they lead to is kept if it is proved to be lower; fixed rates
are not given that. Where all samples are told apart these steps lower the cross-entropy by orders of magnitude,
more than rates do; by default there are none. They lower the loss of the data that are trained on, and not that of
others: see [the page on training loops](loops.md).

*Rates.* Trials begin where one step moves the weights by a few hundredths of their length, so the rate that the
optimizer is given does not matter: columns are equal where that is found to the same two digits. From there rates
are led by success, epoch by epoch, and fall to zero in the last half of the bursts. The constants of these rules
were chosen with other seeds, and mostly other networks, on the same data sets. Trials and evaluations leave some
7 to 10 epochs of training, of which some may be undone, and 33 to 35 gradients of all data. Single runs differ by
seed, those at fixed rates too, and the best of five or more is in part luck.

## Networks

{networks}

## More networks

The same for other networks. Batches are of {small} samples where there are fewer than {few:,}. (At a fixed rate of
10 the loss of wine is rounded to zero.)

{others}

## What is certified, and what is not

A burst that is kept is proved to lower the objective of all data, in exact arithmetic, between the weights as they
are stored before and after it. Nothing is proved about data that were not trained on, nor about reaching a global
minimum. Fixed rates prove nothing.

{machine}
"""


def rows(found: Sequence[Comparison]) -> str:
    """Losses and ratios by the rate that a run began with."""
    cells = [
        [
            one.name,
            f"{number(one.fixed[one.best])} at {one.best:.3g} of {len(one.fixed)}",
            *(f"{number(one.proved[start])} ({one.ratio(start):.2f})" for start in STARTS),
            verdict(all(one.ratio(start) <= LOSS_TARGET for start in STARTS)),
            f"{one.spent:.1f}",
            f"{one.settled:.2f}",
            verdict(one.settled <= WORK_TARGET),
            f"{one.kept[0]} of {one.kept[1]}",
        ]
        for one in found
    ]
    starts, loss = [f"proved, from {start:g}" for start in STARTS], f"≤ {LOSS_TARGET:g}"
    work = ["measured work", "work per epoch", f"≤ {WORK_TARGET:g}"]
    return table(["network", "best fixed rate", *starts, loss, *work, "bursts kept"], cells)


def render(comparisons: Sequence[Comparison]) -> str:
    """The page."""
    return TEXT.format(
        targets=targets(verdicts(comparisons)),
        epochs=EPOCHS,
        spent=f"{min(one.spent for one in comparisons):.0f} to {max(one.spent for one in comparisons):.0f}",
        nothing=NOTHING,
        seeds=f"Medians of {SEEDS} seeds, of both sides" if SEEDS > 1 else "One seed, 0",
        networks=rows([one for one in comparisons if one.name in NETWORKS]),
        small=SMALL,
        few=FEW,
        others=rows([one for one in comparisons if one.name not in NETWORKS]),
        machine=machine(),
    )


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="networks at the same time")
    text = render(measure(parser.parse_args().jobs))
    replaced(PAGE, lambda temporary: temporary.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
