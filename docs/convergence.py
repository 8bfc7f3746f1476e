"""Write ``convergence.md``: when convergence is proved, on real data, and before the first step.

``python docs/convergence.py`` runs the theorems and rewrites the page; it takes about a quarter of an hour.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.convergence import PROBLEMS, SAMPLES, WIDTHS, Row, at_the_start, run  # noqa: E402

PAGE = ROOT / "docs" / "convergence.md"
NAMES = {"gauss_newton": "Gauss-Newton", "gradient": "gradient descent", "newton": "Newton"}
HEAD = """# Convergence, proved

`sf.convergence(model, x, objective)` proves that a method converges from the present weights: to what, how near,
how fast. Every hypothesis is verified with its round-off; the theorems and their proofs are in
`surefoot.theorems.statements`. Written by `python docs/convergence.py`.

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
TAIL = """
Gradient descent needs more width because its theorem bounds the path by the residual over the smallest singular
value; Gauss-Newton's measures the change of the Jacobian by the Jacobian itself.
"""


def page() -> str:
    """The page as it is measured now."""
    lines = []
    for problem in PROBLEMS:
        methods = ("newton", "gradient") if problem.classifies else ("gauss_newton", "gradient")
        for row in run(problem, methods):
            lines.append(_line(row))
            print(lines[-1], flush=True)
    table = []
    for samples in SAMPLES:
        first, second = (at_the_start(method, samples, WIDTHS[-1]) for method in ("gauss_newton", "gradient"))
        table.append(f"| {samples} | {_found(first, '.2f')} | {_found(second, '.1e', rate=True)} |")
        print(table[-1], flush=True)
    return HEAD + "\n".join(lines) + "\n" + MIDDLE + "\n".join(table) + "\n" + TAIL


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
    PAGE.write_text(page(), encoding="utf-8")
