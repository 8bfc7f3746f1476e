"""Write the table of ``processes.md``: memory of data in pieces.

``python docs/processes.py`` measures it in a minute and rewrites what is between marks of the page. Memory is the
peak of a process of its own beyond what it held before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf

PAGE = Path(__file__).with_name("processes.md")
WIDTH, LAYERS, BATCH = 256, 9, 4096  # of the table of memory
ASKED: dict[str, Callable[[nn.Module, Any, Any], object]] = {
    "`oracles.gradient`": lambda model, x, loss: sf.oracles.gradient(sf.Chain(model, x), loss),
    '`oracles.gauss_newton`, `"primal"`': lambda model, x, loss: sf.oracles.gauss_newton(
        sf.Chain(model, x), loss, method="primal", tolerance=0.1
    ),
    "`sf.evaluate`": lambda model, x, loss: sf.evaluate(model, x, loss),
    '`sf.certify` within 0.001, `"quick"`': lambda model, x, loss: sf.certify(
        model, x, objective=loss, domain=sf.Ball(1e-3), effort="quick"
    ),
}


def network(width: int, layers: int) -> nn.Sequential:
    """Linear layers with hyperbolic tangents between them."""
    torch.manual_seed(0)
    parts = [module for _ in range(layers - 1) for module in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(width, 10)).double()


def data(width: int, samples: int) -> tuple[Tensor, Tensor]:
    """Random samples of ten classes."""
    torch.manual_seed(1)
    return torch.randn(samples, width).double(), torch.arange(samples) % 10


def resident(what: str) -> float:
    """Memory of this process in MiB: at present, or at its peak."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) / 1024


def peak(name: str, batches: int) -> None:
    """Print the memory that a call takes beyond model and data."""
    torch.set_num_threads(1)
    call, (small, labels) = ASKED[name], data(8, 4)
    call(network(8, 3), small, sf.CrossEntropy(labels))  # imports and tables
    model, (x, y) = network(WIDTH, LAYERS), data(WIDTH, BATCH * batches)
    pieces = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    given = (x, sf.CrossEntropy(y)) if batches == 1 else (pieces, sf.CrossEntropy())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    call(model, *given)
    print(resident("VmHWM") - before)


def memory() -> str:
    """The table of memory."""
    lines = ["| | one batch | eight batches | ratio | over the gradient |", "| --- | ---: | ---: | ---: | ---: |"]
    fixed = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    least = 0.0
    for name in ASKED:
        one, eight = (
            float(subprocess.check_output([sys.executable, __file__, name, count], env={**os.environ, **fixed}))
            for count in ("1", "8")
        )
        least = least or one
        lines.append(f"| {name} | {one:.0f} MiB | {eight:.0f} MiB | {eight / one:.2f} | {one / least:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:]:
        peak(sys.argv[1], int(sys.argv[2]))
    else:
        page, (begin, end) = PAGE.read_text(encoding="utf-8"), ("<!-- memory -->\n", "\n<!-- end of memory -->")
        head, _, rest = page.partition(begin)
        tail = rest.partition(end)[2]
        assert tail, "the page has no marks for the table"
        PAGE.write_text(head + begin + memory() + end + tail, encoding="utf-8")
