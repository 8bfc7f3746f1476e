"""Write ``convergence.md``: when convergence is proved, on real data, and before the first step.

``python docs/convergence.py`` runs the theorems and rewrites the page; it takes about a quarter of an hour.
With words behind it only rows that contain one of them are made anew, and all others are kept.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bending import CASES, Case, measured  # noqa: E402
from benchmarks.convergence import (  # noqa: E402
    PROBLEMS,
    SAMPLES,
    WIDTHS,
    Problem,
    Row,
    at_the_start,
    gradient_steps,
    run,
)

from surefoot.theorems.record import least, most  # noqa: E402

PAGE = ROOT / "docs" / "convergence.md"
STEPPED = (0, 5, 8)  # the problems of the third table
LARGE, PARAMETERS = (200, 1000), 974_910  # samples of the last one
NAMES = {"gauss_newton": "Gauss-Newton", "gradient": "gradient descent", "newton": "Newton"}
HEAD = """# Convergence, proved

`sf.convergence(model, x, objective)` proves that a method converges from the present weights: to what, how near,
how fast. Every hypothesis is verified with its round-off; the theorems and their proofs are in
`surefoot.theorems.statements`, `momentum` and `stochastic`. Written by `python docs/convergence.py`.

## On real data

From PyTorch's initial weights (seed 0, double precision), Gauss-Newton steps are taken, halved until they descend;
Newton steps where there is a ridge. The table says after how many of them convergence of each method *from there*
is proved, the residual at that point (the norm of all outputs minus targets; of the gradient for a ridge), the
factor that was missing one step earlier, how far the limit is at most, and how many steps of the method are sure
to bring the objective within 1e-12 of its minimum. Factors above 100 are those of a quick look, which uses coarser
constants.

| problem, samples | method | proved after | residual | missing before | distance | steps to 1e-12 |
|---|---|---|---|---|---|---|
"""
MIDDLE = """
## Before the first step

Digits, tanh 64-W-1 with PyTorch's initial weights (seed 0), square loss, targets digit/9: the smallest power of
two W for which the method is *proved to reach zero loss before its first step*, with h of the theorem, which has
to be at most ½, or the rate of gradient descent.

| samples | Gauss-Newton | h | gradient descent | 1 - rate |
|---|---|---|---|---|
"""
STEPS = """
## Other gradient steps

The same networks after so many Gauss-Newton steps that momentum is proved to be fast, and from there the number of
steps that is sure to leave a millionth of the loss: of gradient descent, with a step size for each layer, with
momentum, and on random batches of five samples (with a probability of 95 %).

| problem | after | residual | gradient descent | per block | momentum | random batches |
|---|---|---|---|---|---|---|
"""
CONSTANTS = """
## The constant behind it

K, the Lipschitz constant of the Jacobian of all outputs, on the ball of radius 1e-3 around PyTorch's initial
weights (seed 0) or those after some Gauss-Newton steps, and the largest second derivative that alternating ascent
finds at its centre. The first is proved, the second is attained, and the truth is between them.

| network, samples | K | attained | at most times the truth |
|---|---|---|---|
"""
SIZES = """
## Sizes

Gauss-Newton on digits, tanh 64-1000-900-10 with 10 outputs per sample, at PyTorch's initial weights: the Gram
matrix of the Jacobian is computed and factored by panels, and its smallest eigenvalue verified, on one core. The
Jacobian itself is never formed.

| rows | parameters | σ | processor seconds | memory, GB |
|---|---|---|---|---|
"""
TAIL = """
Gradient descent needs more width because its theorem bounds the path by the residual over the smallest singular
value; Gauss-Newton's measures the change of the Jacobian by the Jacobian itself.
"""


def page(words: list[str]) -> str:
    """The page as it is measured now, or with the rows of the present one that contain none of the words."""
    kept = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]

    def rows(start: str, make: Callable[[], list[str]]) -> list[str]:
        """The rows that begin so, made if they are missing or asked for."""
        old = [line for line in kept if line.startswith(start)]
        found = old if words and old and not any(word in start for word in words) else make()
        print(*found, sep="\n", flush=True)
        return found

    lines, table, steps = [], [], []
    for problem in PROBLEMS:
        methods = ("newton", "gradient") if problem.classifies else ("gauss_newton", "gradient")
        for method in methods:
            start = f"| {problem.name} | {NAMES[method]} | "
            lines += rows(start, lambda p=problem, m=method: [_line(row) for row in run(p, (m,))])
    for samples in SAMPLES:
        table += rows(f"| {samples} | ", lambda n=samples: [_first(n)])
    for problem in (PROBLEMS[k] for k in STEPPED):
        steps += rows(f"| {problem.name} | after ", lambda p=problem: [_steps(p)])
    bounds = [row for case in CASES for row in rows(f"| {case.name} | K ", lambda c=case: [_constant(c)])]
    sizes = [row for n in LARGE for row in rows(f"| {10 * n:,} | {PARAMETERS:,} | ", lambda n=n: [_size(n)])]
    tables = {HEAD: lines, MIDDLE: table, TAIL + STEPS: steps, CONSTANTS: bounds, SIZES: sizes}
    return "".join(head + "\n".join(found) + "\n" for head, found in tables.items())


def _constant(case: Case) -> str:
    reached, constant = measured(case)
    return f"| {case.name} | K ≤ {most(constant)} | {reached:.3g} | {math.ceil(100 * constant / reached) / 100} |"


def _size(samples: int) -> str:
    """In a process of its own, whose memory is measured."""
    code = f"from benchmarks.convergence import large; print(*large({samples}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    sigma, seconds, memory = map(float, out.split())
    return f"| {10 * samples:,} | {PARAMETERS:,} | {least(sigma)} | {seconds:.0f} | {memory:.1f} |"


def _first(samples: int) -> str:
    first, second = (at_the_start(method, samples, WIDTHS[-1]) for method in ("gauss_newton", "gradient"))
    return f"| {samples} | {_found(first, '.2f')} | {_found(second, '.1e', rate=True)} |"


def _steps(problem: Problem) -> str:
    taken, residual, counts = gradient_steps(problem)
    numbers = " | ".join("not proved" if count is None else f"{count:,}" for count in counts)
    return f"| {problem.name} | after {taken} | {residual:.1e} | {numbers} |"


def _line(row: Row) -> str:
    if row.steps is None:
        return f"| {row.problem} | {NAMES[row.method]} | not proved | {row.residual:.1e} | {row.before:.2g} | | |"
    before = "" if not math.isfinite(row.before) else f"{row.before:.2g}"
    return (
        f"| {row.problem} | {NAMES[row.method]} | {row.steps} | {row.residual:.1e} | {before} | "
        f"{row.distance:.1e} | {row.iterations:,} |"
    )


def _found(result: tuple[int, float] | None, style: str, rate: bool = False) -> str:
    if result is None:
        return f"> {WIDTHS[-1]:,} | "
    width, number = result
    return f"**{width:,}** | {(1 - number if rate else number):{style}}"


if __name__ == "__main__":
    PAGE.write_text(page(sys.argv[1:]), encoding="utf-8")
