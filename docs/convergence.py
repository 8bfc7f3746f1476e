"""Write ``convergence.md``: when convergence is proved, on real data, and before the first step.

``python docs/convergence.py`` runs the theorems and rewrites the page; it takes about half an hour of one core.
With words behind it only rows that contain one of them are made anew, and all others are kept. Rows are kept in
``build/convergence.rows`` as they come, so that a run that was stopped goes on where it was.
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

PAGE, MADE = ROOT / "docs" / "convergence.md", ROOT / "build" / "convergence.rows"
STEPPED = (0, 5, 8)  # the problems of the third table
LARGE, PARAMETERS = (200, 1000), 974_910  # samples of the last one
NAMES = {"gauss_newton": "Gauss-Newton", "gradient": "gradient descent", "newton": "Newton"}
HEAD = """# Convergence, proved

`sf.convergence(model, x, objective)` proves that a method converges from the present weights: to what, how near,
how fast. Every hypothesis is verified with its round-off; the theorems and their proofs are in
`surefoot.theorems` (`statements`, `gradient_steps`, `momentum`, `stochastic`). Written by `docs/convergence.py`.

## On real data

From PyTorch's initial weights (seed 0, double precision), Gauss-Newton steps are taken, halved until they descend;
Newton steps where there is a ridge. The table says after how many of them convergence of each method *from there*
is proved, the residual at that point (the norm of all outputs minus targets; of the gradient for a ridge), the
factor that was missing one step earlier, how far the limit is at most, and how many steps of the method are sure
to bring the objective within 1e-12 of its minimum. Factors above 100 are those of a quick look, which uses coarser
constants. Then the run is continued for three steps in 200-bit arithmetic: the last column is the largest quotient
of a distance, a residual or a value that came out and the bound that was promised. Above one it would break a
promise. Runs with an empty cell were not continued.

| problem, samples | method | proved after | residual | missing before | distance | steps to 1e-12 | in 200 bits |
|---|---|---|---|---|---|---|---|
"""
MIDDLE = """
## Strict minima

With a ridge, or where the network is affine in what is trained, the limit is a strict minimum. Let F have at the
weights u₀ the gradient g and the Hessian H with smallest eigenvalue m₀ > 0, let the Hessian move by at most V < m₀
within ρ, and q = V/m₀. If d = ‖H⁻¹g‖/(1 - q) is at most ρ/2, there is exactly one stationary point within ρ, a
strict minimum u*, with ‖u₀ - u*‖ ≤ d and F(u₀) - F(u*) ≤ ⟨g, H⁻¹g⟩/2(1 - q).

*Proof.* T(u) = u - H⁻¹∇F(u) has a derivative H⁻¹(H - ∇²F(u)) of norm at most q and moves u₀ by ‖H⁻¹g‖, so it maps
the ball of radius d into itself and has exactly one fixed point within ρ, which is in it. There ∇²F ≥ H - V ≥
(1 - q)H, so F(u*) ≥ F(u₀) + ⟨g, v⟩ + ½(1 - q)⟨v, Hv⟩ with v = u* - u₀, which is at least what is claimed.

‖H⁻¹g‖ is at most ‖w‖ + ‖g - Hw‖/m₀ for any w, a solution in floating point; what H, g and the product are off by
is part of ‖g - Hw‖. It takes the place of ‖g‖/m₀ wherever that is larger: a gradient along directions of large
curvature does not lead far. In the [example on Poisson's equation](gallery/poisson.rst), with the output layer
trained, ‖g‖/m₀ = 3,700 and ‖H⁻¹g‖ = 0.0085; the bound on F(u₀) - F(u*) is 5.8e-10 in place of 0.18, at a loss of
5.0e-9.

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
TARGETS = """
## Targets

| aim | | measured |
|---|---|---|
"""
TAIL = """
Gradient descent needs more width because its theorem bounds the path by the residual over the smallest singular
value; Gauss-Newton's measures the change of the Jacobian by the Jacobian itself.
"""


def page(words: list[str]) -> str:
    """The page as it is measured now, or with the rows of the present one that contain none of the words."""
    MADE.parent.mkdir(exist_ok=True)
    MADE.touch()
    kept = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]

    def rows(start: str, make: Callable[[], list[str]]) -> list[str]:
        """The rows that begin so, made if they are missing or asked for and no run that was stopped made them."""
        old = [line for line in kept if line.startswith(start)]
        made = [line for line in MADE.read_text(encoding="utf-8").splitlines() if line.startswith(start)]
        if made or (words and old and not any(word in start for word in words)):
            return made or old
        found = make()
        with MADE.open("a", encoding="utf-8") as file:
            print(*found, sep="\n", file=file)
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
    targets = _targets(lines, table, bounds, sizes)
    tables = {HEAD: lines, MIDDLE: table, TAIL + STEPS: steps, CONSTANTS: bounds, SIZES: sizes, TARGETS: targets}
    return "".join(head + "\n".join(found) + "\n" for head, found in tables.items())


def _targets(lines: list[str], table: list[str], bounds: list[str], sizes: list[str]) -> list[str]:
    """What was aimed at, and what the rows say."""
    ran, first, constants, last = (
        [[cell.strip(" *").replace(",", "") for cell in line.strip("|").split("|")] for line in part]
        for part in (lines, table, bounds, sizes)
    )
    proved = [cells for cells in ran if cells[2] != "not proved"]
    wide = next(float(cells[3]) for cells in ran if "100 × 10" in cells[0] and cells[1] == "Gauss-Newton")
    kept = [float(cells[7]) for cells in proved if cells[7]]
    worst = [max(float(c[3]) for c, case in zip(constants, CASES, strict=True) if case.most == k) for k in (5, 10)]
    rows, parameters, seconds = int(last[-1][0]), int(last[-1][1]), last[-1][3]
    aims = [
        ("proved for every problem, by both methods", len(proved) == len(ran), f"{len(proved)} of {len(ran)}"),
        ("digits, 100 × 10, by Gauss-Newton at a residual of at least 1e-3", wide >= 1e-3, f"{wide:.1e}"),
        ("no promise broken in 200 bits", max(kept) <= 1, f"{len(kept)} runs, at most {max(kept):.3g} of a bound"),
        *(
            (f"Gauss-Newton before the first step, {n} samples, at a width of at most {w:,}", int(cells[1]) <= w,
             f"{int(cells[1]):,}")
            for n, w, cells in zip(SAMPLES, (1024, 4096, 16384), first, strict=True)
        ),
        ("K of layers at most 5 times the truth", worst[0] <= 5, f"{worst[0]}"),
        ("K of small CNNs at most 10 times the truth", worst[1] <= 10, f"{worst[1]}"),
        ("a Gram matrix of 10,000 rows, a million parameters", rows >= 10_000 and parameters > 0.97e6,
         f"{rows:,} and {parameters:,}, {seconds} seconds"),
    ]  # fmt: skip
    return [f"| {aim} | {'met' if holds else 'missed'} | {number} |" for aim, holds, number in aims]


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
        return (
            f"| {row.problem} | {NAMES[row.method]} | not proved | {row.residual:.1e} | {row.before:.2g} | | | |"
        )
    before = "" if not math.isfinite(row.before) else f"{row.before:.2g}"
    return (
        f"| {row.problem} | {NAMES[row.method]} | {row.steps} | {row.residual:.1e} | {before} | "
        f"{row.distance:.1e} | {row.iterations:,} | {'' if math.isnan(row.kept) else _up(row.kept)} |"
    )


def _up(number: float) -> str:
    """Three digits, rounded up, so that what is above one looks so."""
    return f"{math.ceil(number * 1000) / 1000:.3f}"


def _found(result: tuple[int, float] | None, style: str, rate: bool = False) -> str:
    if result is None:
        return f"> {WIDTHS[-1]:,} | "
    width, number = result
    return f"**{width:,}** | {(1 - number if rate else number):{style}}"


if __name__ == "__main__":
    PAGE.write_text(page(sys.argv[1:]), encoding="utf-8")
    MADE.unlink()
