"""Mini-batches: :class:`surefoot.optim.ProvedEpochs` from any rate, next to the same optimizer at fixed rates.

Single precision, batches of 128 (32 where there are few samples), the work of 30 epochs. The budget is counted;
evaluations, trials of rates and bursts that were not kept are in it. The work per epoch once the rate has settled
is measured: processor time over that of a plain training epoch of the same network in the same run.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from benchmarks.cells import cell
from benchmarks.networks import convolutional, digits, measured, mnist, perceptron, residual, small_mnist

EPOCHS, BATCH, SMALL, FEW = 30, 128, 32, 1000  # batches of 32 for fewer than 1,000 samples
STARTS = (1e-5, 1e-3, 1.0)
MOMENTUM = "SGD with momentum"  # the optimizer of rows whose names end so; Adam's the others
LOSS_TARGET, WORK_TARGET = 1.3, 1.4
NOTHING = 1e-9  # losses below are all the same
SEEDS = 3  # medians of so many
_TIMED = 5  # epochs of plain training, whose median time is the unit
_SETTLED = 10.0  # epochs of work after which the rate counts as settled
Parts = tuple[Callable[[], tuple[Tensor, Tensor]], Callable[[], nn.Module]]
NETWORKS: dict[str, Parts] = {
    "MNIST, 2 layers, ReLU": (mnist, partial(perceptron, 784, 2, "ReLU")),
    "MNIST, 3 layers, tanh": (mnist, partial(perceptron, 784, 3, "tanh")),
    "digits, 3 layers, ReLU": (digits, partial(perceptron, 64, 3, "ReLU")),
    "digits, CNN, max-pooling, ReLU": (digits, convolutional),
    "digits, residual CNN, batch-norm": (digits, residual),
}
OTHERS: dict[str, Parts] = {
    "digits, 4 layers, GELU": (digits, partial(perceptron, 64, 4, "GELU")),
    "MNIST at 14 × 14, residual CNN, batch-norm": (small_mnist, partial(residual, 6, 3, 49)),
    "wine, 2 layers, tanh": (partial(measured, "wine"), partial(perceptron, 13, 2, "tanh")),
    "breast cancer, 3 layers, ReLU": (partial(measured, "breast_cancer"), partial(perceptron, 30, 3, "ReLU")),
}
NETWORKS |= {f"{name}, {MOMENTUM}": parts for name, parts in NETWORKS.items()}
OTHERS |= {f"{name}, {MOMENTUM}": parts for name, parts in OTHERS.items()}


@dataclass(frozen=True)
class Comparison:
    """One network.

    Attributes:
        name: of the network.
        fixed: the median loss after 30 epochs at a fixed rate, by rate.
        proved: the median loss after the work of 30 epochs, by the rate it started from.
        settled: measured work per epoch once the rate has settled, the median of all runs.
        kept: how many bursts were kept, and of how many, in all runs together.
    """

    name: str
    fixed: dict[float, float]
    proved: dict[float, float]
    settled: float
    kept: tuple[int, int]

    @property
    def best(self) -> float:
        """The fixed rate that ends lowest."""
        return min(self.fixed, key=lambda rate: self.fixed[rate])

    def ratio(self, start: float) -> float:
        """The loss of the proved run from a rate over that of the best fixed one; those below 1e-9 are equal."""
        return max(self.proved[start], NOTHING) / max(self.fixed[self.best], NOTHING)


def _start(name: str, seed: int) -> tuple[nn.Module, DataLoader[Any], Tensor, Tensor]:
    (load, build), single = (NETWORKS | OTHERS)[name], torch.float32
    x, y = load()
    torch.manual_seed(seed)
    model = build().to(single)
    batch = BATCH if len(x) >= FEW else SMALL
    return model, DataLoader(TensorDataset(x.to(single), y), batch, shuffle=True), x.to(single), y


def _optimizer(name: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if name.endswith(MOMENTUM):
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=rate)


def _rates(name: str) -> list[float]:
    middle = 1.5 if name.endswith(MOMENTUM) else 2.5
    return [10 ** (half / 2 - middle) for half in range(-2, 3)]


def fixed(name: str, rate: float, seed: int) -> dict[str, Any]:
    """30 epochs at one rate."""
    model, loader, x, y = _start(name, seed)
    optimizer = _optimizer(name, model, rate)
    for _ in range(EPOCHS):
        _train_an_epoch(model, loader, optimizer)
    with torch.no_grad():
        model.eval()
        return {"loss": float(sf.CrossEntropy()(model.double()(x.double()), y))}


def _seconds_of_an_epoch(name: str, rate: float, seed: int) -> float:
    """Processor time of plain training."""
    model, loader, _, _ = _start(name, seed)
    optimizer, times = _optimizer(name, model, rate), []
    for _ in range(_TIMED):
        begun = time.process_time()
        _train_an_epoch(model, loader, optimizer)
        times.append(time.process_time() - begun)
    return median(times)


def _train_an_epoch(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> None:
    loss = sf.CrossEntropy()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def proved(name: str, start: float, seed: int) -> dict[str, Any]:
    """The same optimizer in bursts, at rates that find themselves."""
    model, loader, _, _ = _start(name, seed)
    optimizer = _optimizer(name, model, start)
    ends: list[float] = []
    training = sf.optim.ProvedEpochs(
        optimizer, sf.CrossEntropy(), loader, model=model, progress=lambda _: ends.append(time.process_time())
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        value = training.run(EPOCHS)
    epoch = _seconds_of_an_epoch(name, start, seed)
    spent, begun, epochs = 0.0, 0.0, 0.0
    for record, end in zip(training.history, ends, strict=True):
        epochs += record.epochs if begun else 0.0
        spent += record.work
        begun = begun or (end if spent >= _SETTLED else 0.0)
    settled = (ends[-1] - begun) / epoch / epochs if epochs else float("nan")
    kept = [record for record in training.history if record.kept]
    falls = all(r.after + r.after_error < r.before - r.before_error for r in kept)
    return {
        "loss": value,
        "work": training.work,
        "settled": settled,
        "rate": training.rate,
        "kept": len(kept),
        "bursts": len(training.history),
        "falls": falls,
    }


def compare(name: str, seeds: Sequence[int]) -> Comparison:
    """All runs of one network; more rates while the best is at an end."""

    def losses(rate: float) -> float:
        return median(
            cell(f"epochs {name} fixed {rate:.3g} seed {seed}", partial(fixed, name, rate, seed))["loss"]
            for seed in seeds
        )

    found = {rate: losses(rate) for rate in _rates(name)}
    while (best := min(found, key=lambda rate: found[rate])) in (min(found), max(found)) and len(found) < 12:
        further = best / 10**0.5 if best == min(found) else best * 10**0.5
        found[further] = losses(further)
    runs = {
        start: [
            cell(f"epochs {name} proved {start:g} seed {seed}", partial(proved, name, start, seed))
            for seed in seeds
        ]
        for start in STARTS
    }
    flat = [run for several in runs.values() for run in several]
    ours = {start: median(run["loss"] for run in several) for start, several in runs.items()}
    settled = median(run["settled"] for run in flat)
    return Comparison(name, found, ours, settled, (sum(r["kept"] for r in flat), sum(r["bursts"] for r in flat)))
