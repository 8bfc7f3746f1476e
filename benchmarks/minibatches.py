"""Mini-batches: :class:`surefoot.optim.ProvedEpochs` from any rate, next to the same optimizer at fixed rates.

Single precision, batches of 128 (32 where there are few samples), the work of 30 epochs. The budget is counted;
evaluations, trials of rates and bursts that were not kept are in it. The work of the whole run, and per epoch once
the rate has settled, is measured too: processor time over that of a plain training epoch of the same network in
the same run. ``python -m benchmarks.minibatches`` runs all that is not yet in ``build/training``, and prints.

    --jobs 2            networks at the same time, one per core
    --again proved      forget the results whose names hold this word
    --only NETWORK      networks whose names hold this text
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
from benchmarks.cells import arguments, begun, cell, side_by_side
from benchmarks.networks import convolutional, digits, measured, mnist, perceptron, residual, small_mnist
from surefoot.optim.bursts import evaluating, fixed_data

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
        spent: measured work of a whole run, in epochs, the median of all runs.
        settled: the same per epoch once the rate has settled.
        kept: how many bursts were kept, and of how many, in all runs together.
    """

    name: str
    fixed: dict[float, float]
    proved: dict[float, float]
    spent: float
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
    optimizer, objective = _optimizer(name, model, start), sf.CrossEntropy()
    with evaluating(model):
        sf.evaluate(model, fixed_data(loader), objective)  # reads the model, which does not count
    ends = [time.process_time()]
    training = sf.optim.ProvedEpochs(
        optimizer,
        objective,
        loader,
        model=model,
        tail=0.6,
        progress=lambda _: ends.append(time.process_time()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        value = training.run(EPOCHS)
    epoch = _seconds_of_an_epoch(name, start, seed)
    work, begun, epochs = 0.0, 0.0, 0.0
    for record, end in zip(training.history, ends[1:], strict=True):
        epochs += record.epochs if begun else 0.0
        work += record.work
        begun = begun or (end if work >= _SETTLED else 0.0)
    settled = (ends[-1] - begun) / epoch / epochs if epochs else float("nan")
    kept = [record for record in training.history if record.kept]
    falls = all(r.after + r.after_error < r.before - r.before_error for r in kept)
    return {
        "loss": value,
        "work": training.work,
        "spent": (ends[-1] - ends[0]) / epoch,
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
    spent, settled = (median(run[key] for run in flat) for key in ("spent", "settled"))
    return Comparison(
        name, found, ours, spent, settled, (sum(r["kept"] for r in flat), sum(r["bursts"] for r in flat))
    )


def _alone(name: str) -> Comparison:
    torch.set_num_threads(1)
    return compare(name, range(SEEDS))


def measure(jobs: int = 1, only: str = "") -> list[Comparison]:
    """One comparison per network."""
    return side_by_side(_alone, [name for name in NETWORKS | OTHERS if only in name], jobs)


def verdicts(comparisons: Sequence[Comparison]) -> list[tuple[str, str, str, bool]]:
    """What is aimed at, what came out, and whether it is reached."""
    ratios = [one.ratio(start) for one in comparisons for start in STARTS]
    met, loss, work = sum(r <= LOSS_TARGET for r in ratios), max(ratios), max(one.settled for one in comparisons)
    told = f"{loss:.2f}; met in {met} of {len(ratios)} cells"
    return [
        ("loss over that of the best fixed rate, the worst", f"≤ {LOSS_TARGET:g}", told, loss <= LOSS_TARGET),
        ("work per epoch once settled, the most", f"≤ {WORK_TARGET:g}", f"{work:.2f}", work <= WORK_TARGET),
    ]


def main() -> None:
    """Run and print."""
    options = begun(arguments(__doc__.partition("\n")[0]))
    comparisons = measure(options.jobs, options.only)
    for one in comparisons:
        ratios = ", ".join(f"{one.ratio(start):.2f} from {start:g}" for start in STARTS)
        best, kept = f"{one.fixed[one.best]:.3g} at {one.best:.3g}", f"{one.kept[0]} of {one.kept[1]} bursts kept"
        work = f"{one.spent:.1f} epochs in all, {one.settled:.2f} per epoch"
        print(f"{one.name:<36}best fixed {best}; {ratios}; {work}; {kept}")
    for what, aim, result, reached in verdicts(comparisons) if comparisons else ():
        print(f"{'met   ' if reached else 'MISSED'}  {what}: {result}, target {aim}")


if __name__ == "__main__":
    main()
