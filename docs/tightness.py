"""Write ``tightness.md``: how far certificates of objectives are from the truth.

``python docs/tightness.py`` measures everything, on as many processes as there are processors or as are given
behind it, and rewrites the page, which says how much processor time that took. If it is interrupted, it goes on
from ``build/tightness.partial`` the next time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import a_priori  # noqa: E402
from benchmarks.sharpness import (  # noqa: E402
    NETWORKS,
    Sharpness,
    Width,
    line,
    measured,
    of_resnet,
    of_width,
    wide_line,
)
from benchmarks.tightness import ACTIVATIONS, LAYERS, SAMPLES, WIDTH, Tightness, rows_of  # noqa: E402

PAGE = ROOT / "docs" / "tightness.md"
PARTIAL = ROOT / "build" / "tightness.partial"
SEEDS = (0, 1, 2)
WIDTHS = (64, 128, 136, 168, 256, 512)
HEAD = f"""# How tight certificates are

The smoothness that `sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(r))` proves, divided by the
norm of the second derivative at the weights, which Lanczos iterations find. For r = 0 a ratio of 1 is exact; for
r > 0 the largest norm over the ball is unknown and at least that at the weights, so the certificate is tighter
than its ratio. Perceptrons of width {WIDTH} with PyTorch's default weights, {SAMPLES} of scikit-learn's digits,
cross-entropy, double precision, seeds {", ".join(map(str, SEEDS))}. The whole page is written by
`python docs/tightness.py`, in {{minutes:.0f}} minutes of processor time; costs on it are in processor time.

| activation | radius | linear layers | ratio, median | worst | target | cost in gradients, median |
|---|---|---|---|---|---|---|
"""
TAIL = """
Where the ratio grows with radius and depth, it is the spreads: third derivatives are bounded by products of norms
of the layers in between. The certificates of this table are computed sample by sample
(`surefoot.calculus.adjoint`), which is what they cost, and balls through three smaller ones inside them.
"""
SECOND = """
## Networks of several kinds

The longest gradient step that is proved, `sf.certify(model, x, objective=sf.CrossEntropy(y),
effort="high").step_size`, times the norm of the second derivative at the weights: 1 would be the step of a
quadratic function that curves the most along its gradient. "By balls" is what balls around the weights prove: one
over the mean curvature on the way from the weights to the edge, which balls inside the last one bound
(`Certificate.one_step`). "Step" is what the segment against the gradient proves, if that is more: Taylor
coefficients along this one direction are exact, and F curves less along it than in the worst direction
(`Certificate.gradient_step`). Next to it the smoothness proved at the weights (radius 0) over that norm. 64
digits, PyTorch's default weights, double precision, seed 0. Where at most 12,000 numbers vary, the second
derivative at the weights is computed along every direction, which is sharp for every network; how far it moves is
bounded by products of the norms of exact derivatives at the weights. That bound is what limits the balls.
Iterations that look for the largest third derivative at the weights of the three perceptrons with tanh find one
that makes ∇²F move by 0.5, 0.5 and 0.3 of its norm on the ball of the targeted step, and about 2.2 and 1.6 for the
first two if samples could not cancel. What is proved of the first is 48, of which 11 are of first order in the
radius, about 5 for each layer of activations, 0.8 for the loss and 0.4 for the weights: each sample counts with
its own worst direction, and so does each layer. Were the first order exact, balls would prove about 0.2 in place
of 0.16, as the second is then what limits them. Costs are in gradients, of all balls and segments that are tried,
as measured and as the certificate states them.

| network | numbers | by balls | step | target | at the weights | target | cost | stated |
|---|---|---|---|---|---|---|---|---|
"""
THIRD = """
Balls alone reach the targets of steps in {reached} of {rows} rows.

## Width

The smoothness proved at the weights with normal effort, over the norm of the second derivative: five linear layers
with tanh between them, 64 digits. Layers are followed sample by sample as long as that takes at most
2·10¹⁰ multiplications, up to a width of 265 here. Beyond, Jacobians between the layers are computed and their
norms proved (`surefoot.calculus.adjoint.composed`), unless `effort="high"` is given. Where that takes more than
3·10¹¹, there are products of norms, with which the width 256 has 14 and 512 has 13.

| width | at the weights | cost | stated |
|---|---|---|---|
"""
FOURTH = """
## A network that is too wide to follow every direction

ResNet-18 made smooth (`sf.zoo.build("resnet18-smooth", num_classes=10)`), in evaluation mode, on 16 random images
of 32×32, cross-entropy: the norm of the second derivative at the weights, which Lanczos iterations find, and over
it what is said there: by products of norms (`effort="quick"`), and by proof with
`effort="high"`. With high effort, Jacobians between the additions of residual blocks
are computed sample by sample, and their norms are proved (`surefoot.calculus.adjoint.composed`);
products of norms are left inside the blocks and in the first stage, whose tensors have 4,096 entries for each
image.

| network | numbers | norm | norms only | proved | target | cost | stated |
|---|---|---|---|---|---|---|---|
{row}

On its segment against the gradient the step 0.0047 is proved, in 58 gradients; what limits it is the error that is
proved for the gradient, 0.05 % of its norm."""
FIFTH = """
## Before any weights are known

`sf.certify(model, x, domain=sf.ProductBall(1.0))` for recurrent networks of 16 states and encoders of width 16,
on four sequences: every block of weights anywhere within 1 of the origin. What is bounded for all weights
counts: gates are below 1, states of a GRU between those before and new ones, cells at most one larger after each
step, and what a large cell adds to the output is saturated. One step of a gated network is then one factor. A
layer norm of a row that may be constant has the slope 1/√ε = 316, which weights in the ball attain: two of them
make 1e5 of the factor of a layer.

| network | depth | ℓ | L | growth of ℓ |
|---|---|---|---|---|
"""
Task = tuple[Callable[..., Any], tuple[Any, ...]]


def done(task: Task) -> tuple[Any, float]:
    """What a task finds, and its processor time in seconds."""
    torch.set_num_threads(1)
    start = time.process_time()
    function, arguments = task
    found = function(*arguments)
    spent = time.process_time() - start
    print(function.__name__, *arguments, f"{spent:.0f} s", flush=True)
    return found, spent


def first_table(found: list[Tightness]) -> list[str]:
    """Perceptrons."""
    grouped: dict[tuple[str, float, int], list[Tightness]] = defaultdict(list)
    for row in found:
        grouped[row.activation, row.radius, row.layers].append(row)
    written = []
    for (activation, radius, layers), rows in sorted(grouped.items()):
        ratios = [row.ratio for row in rows]
        cost = statistics.median(row.seconds / row.gradient for row in rows)
        worst, target = max(ratios), rows[0].target
        mark = "" if worst <= target else " (missed)"
        written.append(
            f"| {activation} | {radius:g} | {layers} | **{statistics.median(ratios):.2f}** | {worst:.2f} | "
            f"≤ {target:g}{mark} | {cost:.0f} |"
        )
    return written


def results_of(tasks: list[Task], processes: int | None) -> list[tuple[Any, float]]:
    """What all tasks find; what was interrupted is not done again."""
    kept: dict[Task, tuple[Any, float]] = pickle.loads(PARTIAL.read_bytes()) if PARTIAL.exists() else {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(done, task): task for task in tasks if task not in kept}
        for future in as_completed(futures):
            kept[futures[future]] = future.result()
            PARTIAL.parent.mkdir(exist_ok=True)
            PARTIAL.write_bytes(pickle.dumps(kept))
    return [kept[task] for task in tasks]


def page(processes: int | None) -> str:
    """The page as it is measured now."""
    tasks: list[Task] = [(of_resnet, ()), *((measured, (name,)) for name in NETWORKS)]
    tasks += [(of_width, (width,)) for width in WIDTHS]
    tasks += [(rows_of, (name, layers, seed)) for seed in SEEDS for name in ACTIVATIONS for layers in LAYERS]
    results = results_of(tasks, processes)
    minutes = sum(spent for _, spent in results) / 60
    wide, *found = [result for result, _ in results]
    networks: list[Sharpness] = found[: len(NETWORKS)]
    widths: list[Width] = found[len(NETWORKS) : len(NETWORKS) + len(WIDTHS)]
    perceptrons = [row for rows in found[len(NETWORKS) + len(WIDTHS) :] for row in rows]
    reached = sum(row.by_balls >= row.target for row in networks)
    by_width = [f"| {w.width} | **{w.centre:.3g}** | {w.cost:,.0f} | {w.stated:,} |" for w in widths]
    return "\n".join(
        [
            HEAD.format(minutes=minutes) + "\n".join(first_table(perceptrons)),
            TAIL + SECOND + "\n".join(map(line, networks)),
            THIRD.format(reached=reached, rows=len(networks)) + "\n".join(by_width),
            FOURTH.format(row=wide_line(wide)),
            FIFTH + "\n".join(map(a_priori.line, a_priori.SUBJECTS)) + "\n",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(int(sys.argv[1]) if sys.argv[1:] else os.cpu_count()), encoding="utf-8")
    PARTIAL.unlink()
