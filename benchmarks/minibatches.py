"""Mini-batches: :class:`surefoot.ProvedEpochs` from any rate, next to the same optimizer at fixed rates.

Single precision, batches of 128 (32 where there are few samples), the work of 30 epochs. The budget is counted;
evaluations, trials of rates and epochs that were rolled back are in it. The work of the whole run is measured too:
processor time over that of plain epochs of the same network in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from benchmarks.networks import convolutional, from_sklearn, images, perceptron, residual, small_mnist
from benchmarks.runner import Case, aim, benchmark, number, stored
from benchmarks.timing import seconds
from benchmarks.training import NOTHING

EPOCHS, SEEDS, STARTS = 30, range(3), (1e-5, 1e-3, 1.0)
MOMENTUM = ", SGD with momentum"  # rows whose names end so; Adam's the others
Parts = tuple[Callable[[], tuple[Tensor, Tensor]], Callable[[], nn.Module]]
NETWORKS: dict[str, Parts] = {
    "MNIST, 2 layers, ReLU": (partial(images, "mnist-5k"), partial(perceptron, 784, 64, 10, activation="ReLU")),
    "MNIST, 3 layers, tanh": (partial(images, "mnist-5k"), partial(perceptron, 784, 64, 64, 10)),
    "digits, 3 layers, ReLU": (images, partial(perceptron, 64, 64, 64, 10, activation="ReLU")),
    "digits, CNN, max-pooling, ReLU": (images, partial(convolutional, "ReLU", pool="max")),
    "digits, residual CNN, batch-norm": (images, residual),
    "digits, 4 layers, GELU": (images, partial(perceptron, *[64] * 4, 10, activation="GELU")),
    "MNIST at 14 × 14, residual CNN, batch-norm": (small_mnist, partial(residual, 6, 3, 49)),
    "wine, 2 layers, tanh": (partial(from_sklearn, "wine"), partial(perceptron, 13, 64, 10)),
    "breast cancer, 3 layers, ReLU": (
        partial(from_sklearn, "breast_cancer"), partial(perceptron, 30, 64, 64, 10, activation="ReLU"),
    ),
}  # fmt: skip
NETWORKS |= {f"{name}{MOMENTUM}": parts for name, parts in NETWORKS.items()}


@benchmark("minibatches", "minibatches", "network | best fixed rate | proved, from 1e-05 | proved, from 0.001 | "
           "proved, from 1 | target | measured work")  # fmt: skip
def minibatches() -> Iterator[Case]:
    """Medians of three seeds; in brackets the loss over that of the best fixed rate."""
    yield from ((name, partial(_row, name)) for name in NETWORKS)


def _row(name: str) -> list[str]:
    grid = [10 ** (half / 2 - (1.5 if name.endswith(MOMENTUM) else 2.5)) for half in range(-2, 3)]
    fixed = {rate: _losses(_fixed, name, rate) for rate in grid}
    while (best := min(fixed, key=lambda rate: fixed[rate])) in (min(fixed), max(fixed)) and len(fixed) < 12:
        further = best / 10**0.5 if best == min(fixed) else best * 10**0.5
        fixed[further] = _losses(_fixed, name, further)
    proved = [_losses(_proved, name, start) for start in STARTS]
    ratios = [max(value, NOTHING) / max(fixed[best], NOTHING) for value in proved]
    work = median(_run(_proved, name, start, seed)["spent"] for start in STARTS for seed in SEEDS)
    cells = [f"{number(value)} ({ratio:.2f})" for value, ratio in zip(proved, ratios, strict=True)]
    chosen = f"{number(fixed[best])} at {best:.3g} of {len(fixed)}"
    return [name, chosen, *cells, aim(max(ratios), most=1.3), f"{work:.1f}"]


Run = Callable[[str, float, int], dict[str, Any]]


def _run(run: Run, name: str, rate: float, seed: int) -> dict[str, Any]:
    key = f"epochs {name} {run.__name__} {rate:.3g} seed {seed}"
    found: dict[str, Any] = stored(key, partial(run, name, rate, seed))
    return found


def _losses(run: Run, name: str, rate: float) -> float:
    return median(_run(run, name, rate, seed)["loss"] for seed in SEEDS)


def _start(name: str, rate: float, seed: int) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    load, build = NETWORKS[name]
    x, y = load()
    torch.manual_seed(seed)
    model = build().float()
    loader = DataLoader(TensorDataset(x.float(), y.long()), 128 if len(x) >= 1000 else 32, shuffle=True)
    if name.endswith(MOMENTUM):
        return model, loader, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return model, loader, torch.optim.Adam(model.parameters(), lr=rate)


def _epoch(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> None:
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def _fixed(name: str, rate: float, seed: int) -> dict[str, Any]:
    """30 epochs at one rate; the loss of all data in evaluation mode."""
    model, loader, optimizer = _start(name, rate, seed)
    for _ in range(EPOCHS):
        _epoch(model, loader, optimizer)
    x, y = loader.dataset.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        return {"loss": float(nn.functional.cross_entropy(model.eval().double()(x.double()), y))}


def _proved(name: str, start: float, seed: int) -> dict[str, Any]:
    """The same optimizer, whose epochs are checked."""
    model, loader, optimizer = _start(name, start, seed)
    training = sf.optim.ProvedEpochs(optimizer, sf.CrossEntropy(), loader, model=model)
    losses: list[float] = []
    spent = seconds(lambda: losses.append(training.run(EPOCHS)))
    plain = _start(name, start, seed)
    unit = median(seconds(lambda: _epoch(*plain)) for _ in range(5))
    return {"loss": losses[0], "spent": spent / unit}
