"""How the work grows with depth, width, batch, data and processes: exponents fitted to processor times.

Each time is the shortest of a few, on one thread. The exponent is the slope of log(time) over log(size) by least
squares, next to that of a gradient of the same network by PyTorch.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import surefoot as sf

DEPTHS, WIDTHS, BATCHES = (4, 8, 16, 32), (64, 128, 256), (64, 256, 1024)
PIECES, PROCESSES = (2, 8, 32), (1, 2, 4)
SAMPLES = 8192  # of all processes together


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of a line through the logarithms.

    >>> exponent((1, 2, 4), (3.0, 12.0, 48.0))
    2.0
    """
    a, b = [math.log(size) for size in sizes], [math.log(time) for time in seconds]
    mean, other = sum(a) / len(a), sum(b) / len(b)
    products = sum((p - mean) * (q - other) for p, q in zip(a, b, strict=True))
    return products / sum((p - mean) ** 2 for p in a)


def seconds(function: Callable[[], object], times: int = 4) -> float:
    """The shortest of some runs, after one that is not counted."""
    function()
    found = []
    for _ in range(times):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return max(min(found), 1e-7)


def _network(depth: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [part for _ in range(depth - 1) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 10)).double()


def measured(depth: int, width: int, batch: int) -> dict[str, float]:
    """Seconds of each question about one network."""
    model = _network(depth, width)
    x, y = torch.randn(batch, width).double(), torch.randint(10, (batch,))
    loss, parameters = sf.CrossEntropy(), list(model.parameters())
    chain, optimizer = sf.Chain(model, x), sf.CertifiedDescent(_network(depth, width), loss)
    asked: dict[str, Callable[[], object]] = {
        "gradient by PyTorch": lambda: torch.autograd.grad(loss(model(x), y), parameters),
        "proved value": lambda: sf.evaluate(model, x, loss, y),
        "proved step": lambda: optimizer.step(x, y),
        "Gauss-Newton step": lambda: sf.oracles.gauss_newton(chain, loss.bound_to(y), 0.1, tolerance=1e-3),
        "certificate on a ball, quick": lambda: sf.certify(
            model, x, objective=loss.bound_to(y), domain=sf.Ball(1e-3), effort="quick"
        ),
    }
    return {name: seconds(question, 2 if "certificate" in name else 4) for name, question in asked.items()}


def in_pieces(pieces: int) -> dict[str, float]:
    """Seconds of questions about so many batches of 128."""
    model, loss = _network(3, 64), sf.CrossEntropy()
    x, y = torch.randn(128 * pieces, 64).double(), torch.randint(10, (128 * pieces,))
    batches: list[tuple[Tensor, Tensor]] = list(zip(x.split(128), y.split(128), strict=True))
    optimizer, parameters = sf.CertifiedDescent(_network(3, 64), loss), list(model.parameters())
    asked: dict[str, Callable[[], object]] = {
        "gradient by PyTorch": lambda: [torch.autograd.grad(loss(model(a), b), parameters) for a, b in batches],
        "proved value": lambda: sf.evaluate(model, batches, loss),
        "proved step": lambda: optimizer.step(batches),
        "Gauss-Newton step": lambda: sf.oracles.gauss_newton(sf.Chain(model, batches), loss, 0.1, tolerance=1e-3),
    }
    return {name: seconds(question, 2) for name, question in asked.items()}


def _member(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, patience = distributed.FileStore(f"{folder}/store", size), timedelta(minutes=10)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    model, loss, group = _network(4, 128), sf.CrossEntropy(), distributed.group.WORLD
    torch.manual_seed(1)
    x, y = torch.randn(SAMPLES, 128).double()[rank::size], torch.randint(10, (SAMPLES,))[rank::size]
    optimizer, parameters = sf.CertifiedDescent(_network(4, 128), loss, group=group), list(model.parameters())
    asked: dict[str, Callable[[], object]] = {
        "gradient by PyTorch": lambda: torch.autograd.grad(loss(model(x), y), parameters),
        "proved value": lambda: sf.evaluate(model, x, loss, y, group=group),
        "proved step": lambda: optimizer.step(x, y),
    }
    torch.save({name: seconds(question) for name, question in asked.items()}, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def together(size: int) -> dict[str, float]:
    """Processor seconds of the busiest of some processes that share all samples."""
    folder, context = tempfile.mkdtemp(), get_context("spawn")
    members = [context.Process(target=_member, args=(rank, size, folder)) for rank in range(size)]
    for each in members:
        each.start()
    for each in members:
        each.join()
    found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]
    return {name: max(one[name] for one in found) for name in found[0]}


GROWTH: dict[str, tuple[Sequence[int], Callable[[int], dict[str, Any]]]] = {
    "depth": (DEPTHS, lambda depth: measured(depth, 32, 64)),
    "width": (WIDTHS, lambda width: measured(3, width, 128)),
    "batch": (BATCHES, lambda batch: measured(3, 64, batch)),
    "data, in batches of 128": (PIECES, in_pieces),
    "processes that share the data": (PROCESSES, together),
}
