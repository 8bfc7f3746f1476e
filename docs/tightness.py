"""Write ``tightness.md``: how far certificates of objectives are from the truth.

``python docs/tightness.py`` measures and rewrites the page; it takes some minutes.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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
at some ten gradients.
"""


def page() -> str:
    """The page as it is measured now."""
    found: dict[tuple[str, float, int], list[Tightness]] = defaultdict(list)
    for seed in SEEDS:
        for row in rows(seed):
            found[row.activation, row.radius, row.layers].append(row)
            print(f"seed {seed}: {row.activation}, {row.layers} layers, radius {row.radius:g}: {row.ratio:.2f}")
    lines = []
    for (activation, radius, layers), measured in sorted(found.items()):
        ratios = [row.ratio for row in measured]
        cost = statistics.median(row.seconds / row.gradient for row in measured)
        worst, target = max(ratios), measured[0].target
        mark = "" if worst <= target else " (missed)"
        lines.append(
            f"| {activation} | {radius:g} | {layers} | **{statistics.median(ratios):.2f}** | {worst:.2f} | "
            f"≤ {target:g}{mark} | {cost:.0f} |"
        )
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    text = page()
    partial = PAGE.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(PAGE)
