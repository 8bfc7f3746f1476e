"""Write the tables of ``processes.md``: memory of data in pieces, predictions beside runs on several processes.

``python docs/processes.py`` measures everything in some minutes and rewrites what is between marks of the page;
``memory``, ``runs`` or ``scale`` behind it does one table. Memory is the peak of a process of its own
beyond what it held before. Times are processor time, so that others on the machine do not matter; rate and
bandwidth are measured in the same run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import surefoot as sf
from surefoot.complexity.traffic import Traffic
from surefoot.optim.point import Turns
from surefoot.optim.shards import Shards
from surefoot.processes import Processes
from surefoot.valuation.streamed import StreamedValuer

PAGE = Path(__file__).with_name("processes.md")
WIDTH, LAYERS, BATCH = 256, 9, 4096  # of the table of memory
WIDE, DEEP, SAMPLES, REPEATS = 512, 5, 2048, 4  # of the runs
RATE, BANDWIDTH, LATENCY, IMAGES = 1e13, 25e9, 5e-6, 128  # of the predictions
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


def processor_time(action: Callable[[], object]) -> float:
    """The least of some runs, after one that is not counted."""
    found = []
    for _ in range(REPEATS + 1):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found[1:])


def one_process() -> tuple[Traffic, float]:
    """What is predicted for two processes, and multiplications per second of a pass without a group."""
    model, (x, y) = network(WIDE, DEEP), data(WIDE, SAMPLES)
    traffic = sf.cost(model, x, processes=2).traffic
    assert traffic is not None
    valuer = StreamedValuer(model, [(x, y)], sf.CrossEntropy())
    return traffic, traffic.multiplications / processor_time(lambda: valuer.evaluate(derivatives=True))


def work(rank: int, size: int, folder: str) -> None:
    """One of several processes: processor time of a pass, of an addition large and small, bytes of a pass."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    processes, model, (x, y) = Processes(distributed.group.WORLD), network(WIDE, DEEP), data(WIDE, SAMPLES)
    parts = [tensor.chunk(size)[rank] for tensor in (x, y)]
    weights = dict(model.named_parameters())
    like = torch.zeros(sum(value.numel() for value in weights.values()), dtype=torch.float64)
    large, small = (processor_time(lambda n=n: distributed.all_reduce(like[:n])) for n in (len(like), 1))  # type: ignore[misc]
    valuer = StreamedValuer(model, [tuple(parts)], sf.CrossEntropy(), processes)
    shards = Shards(valuer, Turns(), processes)
    found = [0.0, processes.sent]

    def passes() -> None:
        found[0] = processor_time(lambda: shards.at(weights))
        found[1] = processes.sent - found[1]

    shards.step(weights, passes)  # type: ignore[arg-type]
    if rank:
        found[1] = processes.sent - found[1]
    sent = found[1] / (REPEATS + 1)
    everyone = processes.gathered(lambda: (found[0], sent, large, small))
    if rank == 0:
        torch.save(everyone, f"{folder}/found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def runs() -> str:
    """The table of predictions beside runs."""
    traffic, rate = one_process()
    lines = [
        "| processes | bytes of a pass, process 0 / another: predicted | counted "
        "| processor time of a pass: predicted | measured | ratio |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(work, (size, folder), size, start_method="spawn")
            everyone = torch.load(f"{folder}/found.pt")
        seconds, sent, large, small = everyone[0]
        mine = Traffic(size, traffic.parameters, traffic.outputs, traffic.width, traffic.multiplications)
        latency = small / max(2 * (size - 1), 1)
        bandwidth = 2 * (size - 1) / size * 8 * traffic.parameters / max(large - small, 1e-9) if size > 1 else 1e12
        predicted = mine.seconds(rate, bandwidth, latency)
        bytes_ = " / ".join(f"{n / 1e6:.2f} MB" for n in (mine.descent if size > 1 else mine.descent[:1]))
        counted = " / ".join(f"{n / 1e6:.2f} MB" for n in (sent, *((everyone[1][1],) if size > 1 else ())))
        times = f"{predicted:.3f} s | {seconds:.3f} s | {seconds / predicted:.2f}"
        lines.append(f"| {size} | {bytes_} | {counted} | {times} |")
        print(lines[-1], f"rate {rate:.3g}, bandwidth {bandwidth:.3g}, latency {latency:.3g}")
    return "\n".join(lines)


def scale() -> str:
    """The table of predictions."""
    with torch.device("meta"):
        model = sf.zoo.vgg16()
        traffic = sf.cost(model, torch.empty(IMAGES, 3, 224, 224), processes=2).traffic
    assert traffic is not None
    lines = [
        "| processes | images | bytes per gradient, process 0 / others | gradient | efficiency "
        "| iteration of Gauss-Newton |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size in (1, 8, 64, 512, 4096):
        sizes = traffic.parameters, traffic.outputs * size, traffic.width, traffic.multiplications * size
        mine = Traffic(size, *sizes)
        alone = traffic.multiplications / RATE
        seconds, step = (f(RATE, BANDWIDTH, LATENCY) for f in (mine.seconds, mine.iteration_seconds))
        crossing = " / ".join(f"{n / 1e9:.2f} GB" for n in mine.descent) if size > 1 else "–"
        images = f"{size:,} | {IMAGES * size:,} | {crossing}"
        lines.append(f"| {images} | {seconds:.2f} s | {alone / seconds:.0%} | {step:.2f} s |")
    return "\n".join(lines)


TABLES = {"memory": memory, "runs": runs, "scale": scale}


def main(names: list[str]) -> None:
    """Rewrite tables of the page."""
    for name in names or TABLES:
        table, page = TABLES[name](), PAGE.read_text(encoding="utf-8")
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        assert after, f"the page has no marks for {name}"
        PAGE.write_text(before + begin + table + end + after, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ASKED:
        peak(sys.argv[1], int(sys.argv[2]))
    else:
        main(sys.argv[1:])
