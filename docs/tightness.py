"""Write ``tightness.md``: how far certificates of objectives are from the truth.

``python docs/tightness.py`` measures and rewrites the page; it takes some minutes. With ``networks`` behind it,
only the second table is measured.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.sharpness import NETWORKS, lines  # noqa: E402
from benchmarks.tightness import SAMPLES, WIDTH, Tightness, rows  # noqa: E402

PAGE = ROOT / "docs" / "tightness.md"
SEEDS = (0, 1, 2)
HEAD = f"""# How tight certificates are

The smoothness that `sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(r))` proves, divided by the
norm of the second derivative at the weights, which Lanczos iterations find. For r = 0 a ratio of 1 is exact; for
r > 0 the largest norm over the ball is unknown and at least that at the weights, so the certificate is tighter
than its ratio. Perceptrons of width {WIDTH} with PyTorch's default weights, {SAMPLES} of scikit-learn's digits,
cross-entropy, double precision, seeds {", ".join(map(str, SEEDS))}. Written by `python docs/tightness.py`.

| activation | radius | linear layers | ratio, median | worst | target | cost in gradients, median |
|---|---|---|---|---|---|---|
"""
TAIL = """
Where the ratio grows with radius and depth, it is the spreads: third derivatives are bounded by products of norms
of the layers in between. The certificates of this table are computed sample by sample
(`surefoot.calculus.adjoint`), which is what they cost; networks with layers wider than 128 are bounded by norms,
at some ten gradients, unless `effort="high"` is given.
"""
SECOND = """
## Networks of several kinds

The longest gradient step that a ball around the weights proves, `sf.certify(model, x,
objective=sf.CrossEntropy(y), effort="high").step_size`, times the norm of the second derivative at the weights: 1
would be the step of a quadratic function. Next to it the smoothness proved at the weights (radius 0) over that
norm. 64 digits, PyTorch's default weights, double precision, seed 0. Where at most 12,000 numbers vary, the second
derivative at the weights is computed along every direction, which is sharp for every network; how far it moves is
bounded by products of the norms of exact derivatives at the weights. Costs are in gradients, as measured in
processor time and as the certificate states them. The rows were measured one at a time, beside other work, and
their costs vary with it.

| network | numbers | step | target | at the weights | target | cost | stated |
|---|---|---|---|---|---|---|---|
"""


def first_table() -> str:
    """Perceptrons, as measured now."""
    found: dict[tuple[str, float, int], list[Tightness]] = defaultdict(list)
    for seed in SEEDS:
        for row in rows(seed):
            found[row.activation, row.radius, row.layers].append(row)
            print(f"seed {seed}: {row.activation}, {row.layers} layers, radius {row.radius:g}: {row.ratio:.2f}")
    written = []
    for (activation, radius, layers), measured in sorted(found.items()):
        ratios = [row.ratio for row in measured]
        cost = statistics.median(row.seconds / row.gradient for row in measured)
        worst, target = max(ratios), measured[0].target
        mark = "" if worst <= target else " (missed)"
        written.append(
            f"| {activation} | {radius:g} | {layers} | **{statistics.median(ratios):.2f}** | {worst:.2f} | "
            f"≤ {target:g}{mark} | {cost:.0f} |"
        )
    return HEAD + "\n".join(written) + "\n" + TAIL


def page(networks_only: bool) -> str:
    """The page as it is measured now, the first table perhaps as it was."""
    first = PAGE.read_text(encoding="utf-8").partition(SECOND[:30])[0] if networks_only else first_table()
    return first + SECOND + "\n".join(lines(list(NETWORKS))) + "\n"


if __name__ == "__main__":
    text = page(networks_only=sys.argv[1:] == ["networks"])
    partial = PAGE.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(PAGE)
