"""Run every benchmark that has no page of its own, print the table and write it to ``docs/benchmarks.md``.

What was measured is kept in ``build/bench``, row by row, with a digest of the code: a run that was cut off goes on
there, and rows of another code are measured again. To measure only some modules, name them: ``python -m benchmarks
second_order peers``. The page then keeps all other rows as they are, and says which are of another code.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import choice, equal_work, peers
from benchmarks.keeping import Kept, code_digest, origin
from benchmarks.timing import Duration, Measurement

ROOT = Path(__file__).resolve().parent.parent
PAGE, FOLDER = ROOT / "docs" / "benchmarks.md", ROOT / "build" / "bench"
MODULES = (
    "autodiff",
    "certificates",
    "implicit",
    "newton",
    "oracles",
    "second_order",
    "training",
    "clustering",
    "peers",
    "equal_work",
    "choice",
)
HEADER = """# Benchmarks

How long surefoot takes compared with plain PyTorch: medians of ratios of processor times, of runs made in turn on
one thread, with quartiles. Written by `make bench`.
"""

PEERS = """## Beside other packages

Gauss-Newton steps of the same model on the same batch, each by what a package offers: how long, which relative
residual it reaches in single precision (judged in double), and how far the same method is from the dense solution
on a small network in double precision. torch-levenberg-marquardt takes the root of each sample's loss for a
residual, which is another model where the loss is not a square.
"""


WORK = """## Loss at equal work

The loss of all samples after as many gradients of work, from the same weights. Adam has the best of three learning
rates.
"""


CHOICE = """## The choice of a method

Exact Gauss-Newton steps, κ = 0.01, to a residual of 1e-6: the method that `method="auto"` chooses from counts
alone, how much longer it takes than the best of all methods, and the cost of that one.
"""


def main(named: list[str]) -> None:
    """Run the function ``run`` of every module, and report.

    Args:
        named: the modules that are to be measured, though they were before; if there are none, all that are not
            known of this code.
    """
    unknown = sorted(set(named) - set(MODULES))
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(unknown)}: there are {', '.join(MODULES)}")
    code, found = code_digest(ROOT), {name: Kept.read(FOLDER / f"{name}.pickle") for name in MODULES}
    for name in named or MODULES:
        if found[name].code != code or (named and found[name].whole):
            found[name] = Kept(code)
        if not found[name].whole:
            found[name].go_on(import_module(f"benchmarks.{name}").run(), FOLDER / f"{name}.pickle", _line)
    rows = [row for kept in found.values() for row in kept.rows]
    PAGE.write_text(f"{HEADER}\n{origin(found, code)}\n\n{_table(rows)}\n{_machine()}", encoding="utf-8")


def _line(m: Any) -> str:
    if isinstance(m, equal_work.Reached):
        return equal_work.table([m])
    if isinstance(m, choice.Chosen):
        return choice.table([m]).splitlines()[2]
    if isinstance(m, Duration):
        return f"{m.subject}: {m.seconds:.3g} s, target {m.target:g} s; {m.note}"
    spread = f"[{m.low:.2f}, {m.high:.2f}]"
    return f"{m.subject} / {m.baseline}: {m.ratio:.3f} {spread}, target {m.target}, baseline {m.seconds:.3g} s"


def _table(found: list[Any]) -> str:
    rows = ["| what | compared with | ratio | quartiles | target |", "|---|---|---|---|---|"]
    for m in found:
        if type(m) is Measurement:
            spread = f"{m.low:.2f} to {m.high:.2f}"
            rows.append(f"| {m.subject} | {m.baseline} | **{m.ratio:.2f}** | {spread} | ≤ {m.target} |")
    rows += ["", "| what | seconds | target | |", "|---|---|---|---|"]
    rows += [
        f"| {m.subject} | **{m.seconds:.3g}** | ≤ {m.target:g} | {m.note} |"
        for m in found
        if isinstance(m, Duration)
    ]
    compared, reached = peers.table(found), equal_work.table(found)
    page = "\n".join(rows) + "\n" + (f"\n{PEERS}\n{compared}" if compared else "")
    page += f"\n{WORK}\n{reached}" if reached else ""
    chosen = choice.table(found)
    return page + (f"\n{CHOICE}\n{chosen}" if chosen else "")


def _machine() -> str:
    cores = os.cpu_count()
    return (
        f"Machine: {platform.machine()}, {cores} cores, {platform.system()}; "
        f"Python {platform.python_version()}, PyTorch {torch.__version__}.\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
