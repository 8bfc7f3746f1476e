"""Verdicts of two processes are those of one: of uneven parts, and where one has no data."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import surefoot as sf
from theorems.problems import convolution, data

SHARES = {"uneven": (3, 1), "empty": (4, 0)}
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "strict minimum": (sf.CrossEntropy, {"method": "newton", "regularizer": sf.Ridge(2.0)}),
    "exact solution": (sf.Square, {"method": "gradient"}),
}


def part(name: str, first: int, last: int) -> tuple[Tensor, Tensor]:
    x = data(4, 9, 1)[0].reshape(4, 1, 3, 3)
    y = torch.arange(4) % 2 if ASKED[name][0] is sf.CrossEntropy else convolution()(x).detach() + 1e-4
    return x[first:last], y[first:last]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    verdicts = {}
    for share, (first, second) in SHARES.items():
        own = (0, first) if rank == 0 else (first, first + second)
        for name, (loss, options) in ASKED.items():
            x, y = part(name, *own)
            loader = list(zip(x.split(2), y.split(2), strict=True)) if len(y) else []
            verdict = sf.convergence(convolution(), loader, loss(), group=distributed.group.WORLD, **options)
            verdicts[share, name] = verdict.to_dict()
    torch.save(verdicts, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_verdicts_are_those_of_one_process(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(work, (str(tmp_path),), 2, start_method="spawn")
    outcomes = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, (loss, options) in ASKED.items():
        x, y = part(name, 0, 4)
        expected = sf.convergence(convolution(), x, loss(y), **options).to_dict()
        for share in SHARES:
            assert outcomes[0][share, name] == outcomes[1][share, name] == expected
        assert expected["proved"] is (name == "exact solution") or name == "strict minimum"


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(sf.errors.EvaluationError, match="no batches"):
        sf.convergence(convolution(), [], sf.Square())
