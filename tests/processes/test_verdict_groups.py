"""Verdicts of two processes about strict minima and other networks: of uneven parts, and where one has none."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import surefoot as sf
from surefoot.batches import Batches
from surefoot.processes import Processes
from surefoot.theorems.pieces import Pieces
from theorems.test_strict_minima import small_convolution

SHARES = {"uneven": (3, 1), "empty": (4, 0)}
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "strict minimum": (sf.CrossEntropy, {"method": "newton", "regularizer": sf.Ridge(2.0)}),
    "exact solution": (sf.Square, {"method": "gradient"}),
}


def network() -> nn.Module:
    """Near a strict minimum."""
    torch.manual_seed(0)
    model = small_convolution().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    return model


def part(name: str, first: int, last: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 1, 3, 3).double()
    with torch.no_grad():
        y = torch.arange(4) % 2 if ASKED[name][0] is sf.CrossEntropy else network()(x) + 0.1
    return x[first:last], y[first:last]


def told(verdict: sf.theorems.Convergence) -> tuple[Any, ...]:
    return verdict.proved, verdict.theorem, [one.value for one in verdict.hypotheses]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    group, found = distributed.group.WORLD, {}
    for share, (first, second) in SHARES.items():
        own = (0, first) if rank == 0 else (first, first + second)
        for name, (loss, options) in ASKED.items():
            x, y = part(name, *own)
            loader = list(zip(x.split(2), y.split(2), strict=True)) if len(y) else []
            found[share, name] = told(
                sf.convergence(network(), loader, loss(), effort="low", group=group, **options)
            )
            if name == "strict minimum":
                processes = Processes(group)
                pieces = Pieces(network(), Batches(loader, ordered=True), loss(), processes)
                before = processes.sent
                pieces.led(lambda pieces=pieces: pieces.summed("hessian") is None)  # type: ignore[misc]
                found[share, "bytes"] = processes.sent - before
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("verdicts")
    torch.multiprocessing.start_processes(work, (str(folder),), 2, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("share", SHARES)
def test_verdicts_are_those_of_the_same_batches_on_one_process(outcomes: list[dict[Any, Any]], share: str) -> None:
    first, second = SHARES[share]
    for name, (loss, options) in ASKED.items():
        x, y = part(name, 0, 4)
        sizes = [2, 1, 1] if second else [2, 2]
        loader = list(zip(x.split(sizes), y.split(sizes), strict=True))
        *said, numbers = told(sf.convergence(network(), loader, loss(), effort="low", **options))
        for found in outcomes:
            assert list(found[share, name][:2]) == said
            assert found[share, name][2] == pytest.approx(numbers, rel=1e-10)
    assert first + second == 4


@pytest.mark.parametrize("share", SHARES)
def test_for_the_hessian_the_square_of_the_number_of_parameters_crosses(
    outcomes: list[dict[Any, Any]], share: str
) -> None:
    size = sum(parameter.numel() for parameter in network().parameters())
    for found in outcomes:
        assert 0 < found[share, "bytes"] - 8 * size**2 < 1000
