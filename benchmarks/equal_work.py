"""The loss after the same work: second-order steps beside LBFGS, Adam and certified descent.

Work is processor time over that of a gradient of the same model on the same data, on one thread, all samples in
one batch. Adam has the best of three learning rates, LBFGS its strong Wolfe search; the others need no setting.
Every method starts from the same weights, and capturing the graph counts.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from examples import poisson
from torch import Tensor, nn

import surefoot as sf
from benchmarks.timing import one_thread
from surefoot import data
from surefoot.objectives import Objective

BUDGETS = (100.0, 400.0, 1500.0)


@dataclass(frozen=True)
class Reached:
    """The losses of methods after as many gradients of work as in ``BUDGETS``."""

    subject: str
    losses: dict[str, list[float]]


def problems() -> Iterator[tuple[str, nn.Module, Tensor, Tensor, Objective]]:
    """A title, the model, the data, and the loss."""
    torch.manual_seed(0)
    for name, found, count, widths in (
        ("digits, tanh 64-64-64-10, 1,347 samples", data.digits(), 1347, (64, 64, 64)),
        ("MNIST, tanh 784-64-10, 1,000 samples", data.mnist_5k(), 1000, (784, 64)),
    ):
        assert found.y is not None
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], 10))
        yield name, model, found.x[:count].float(), found.y[:count], sf.CrossEntropy()
    model, x, y = poisson.problem()
    yield "Poisson's equation, 1,020 residuals, 1,185 parameters, double", model, x, y, sf.Square()


def run() -> Iterator[Callable[[], Reached]]:
    """The losses of all methods: to be called."""
    with one_thread():
        for given in problems():
            yield partial(_reached, *given)


def _reached(name: str, model: nn.Module, x: Tensor, y: Tensor, objective: Objective) -> Reached:
    unit = _unit(model, x, y, objective)
    return Reached(name, {who: _losses(make, model, x, y, objective, unit) for who, make in METHODS.items()})


def table(found: list[object]) -> str:
    """The rows as a table, empty if there are none."""
    rows = [row for row in found if isinstance(row, Reached)]
    if not rows:
        return ""
    work = " | ".join(f"{budget:g} gradients" for budget in BUDGETS)
    lines = [f"| problem | method | {work} |", "|---" * (2 + len(BUDGETS)) + "|"]
    for row in rows:
        for who, losses in row.losses.items():
            lines.append(f"| {row.subject} | {who} | {' | '.join(f'{loss:.1e}' for loss in losses)} |")
    return "\n".join(lines) + "\n"


def _unit(model: nn.Module, x: Tensor, y: Tensor, objective: Objective) -> float:
    parameters = list(model.parameters())

    def once() -> float:
        start = time.process_time()
        torch.autograd.grad(objective(model(x), y), parameters)
        return time.process_time() - start

    return sorted(once() for _ in range(15))[7]


Step = Callable[[], object]
Make = Callable[[nn.Module, Tensor, Tensor, Objective], Step]


def _losses(
    makes: tuple[Make, ...], model: nn.Module, x: Tensor, y: Tensor, objective: Objective, unit: float
) -> list[float]:
    """After each budget, the lowest among the settings of a method."""
    return [
        min(column) for column in zip(*(_run(make, model, x, y, objective, unit) for make in makes), strict=True)
    ]


def _run(make: Make, model: nn.Module, x: Tensor, y: Tensor, objective: Objective, unit: float) -> list[float]:
    model = copy.deepcopy(model)
    step, spent, found = make(model, x, y, objective), 0.0, []
    for budget in BUDGETS:
        while spent < budget:
            start = time.process_time()
            step()
            spent += (time.process_time() - start) / unit
        with torch.no_grad():
            found.append(float(objective(model(x), y)))
    return found


def _certified(kind: Callable[..., sf.optim.GuaranteedOptimizer]) -> Make:
    def make(model: nn.Module, x: Tensor, y: Tensor, objective: Objective) -> Step:
        optimizer = kind(model, objective)
        return lambda: optimizer.step(x, y)

    return make


def _plain(kind: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    def make(model: nn.Module, x: Tensor, y: Tensor, objective: Objective) -> Step:
        optimizer = kind(model.parameters(), **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = objective(model(x), y)
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    return make


METHODS: dict[str, tuple[Make, ...]] = {
    "surefoot.optim.GaussNewton": (_certified(sf.optim.GaussNewton),),
    "surefoot.CertifiedDescent": (_certified(sf.CertifiedDescent),),
    "torch.optim.LBFGS": (_plain(torch.optim.LBFGS, line_search_fn="strong_wolfe", max_iter=5),),
    "torch.optim.Adam": tuple(_plain(torch.optim.Adam, lr=rate) for rate in (1e-3, 3e-3, 1e-2)),
}


if __name__ == "__main__":
    for measure in run():
        print(table([measure()]), flush=True)
