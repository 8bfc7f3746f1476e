"""The method that is chosen for an exact Gauss-Newton step, beside all others, on 40 cases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.second_order import Case, Recurrent, convolutional, perceptron
from benchmarks.timing import one_thread
from surefoot.objectives import Objective
from surefoot.oracles.choice import choose_gauss_newton
from surefoot.oracles.problem import OracleError, Problem
from surefoot.oracles.steps import METHODS, Method, gauss_newton_solver, sizes_of

MOST = 20.0  # seconds that a method may be predicted to take
CLOSE = 1.5  # times the best that a choice may take


@dataclass(frozen=True)
class Chosen:
    """A case, the method that was chosen, how much longer it took than the best one, and that in gradients."""

    subject: str
    method: str
    ratio: float
    best: str
    gradients: float


def small_cases() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[], Tensor], int]]:
    """40 cases for the choice: the network, its batch, and the number of classes."""
    for depth, width in ((1, 8), (1, 64), (2, 16), (2, 64), (3, 32)):
        for batch in (4, 32, 256, 1024):
            yield (
                f"MLP 20-{'-'.join([str(width)] * depth)}-10, batch {batch}",
                lambda d=depth, w=width: perceptron(20, [w] * d, 10),
                lambda b=batch: torch.randn(b, 20),
                10,
            )
    for batch in (4, 32, 128, 512):
        name = "CNN 4-8 on 8 × 8"
        yield f"{name}, batch {batch}", _small_convolutional, lambda b=batch: torch.randn(b, 1, 8, 8), 5
        yield (
            f"CNN with batch-norm, batch {batch}",
            lambda: convolutional(True),
            (lambda b=batch: torch.randn(b, 1, 8, 8)),
            10,
        )
        yield f"GRU cell, batch {batch}", Recurrent, lambda b=batch: torch.randn(b, 8, 16), 10
    for classes in (2, 50):
        for batch in (16, 128, 512, 2048):
            yield (
                f"linear, {classes} classes, batch {batch}",
                lambda c=classes: nn.Linear(30, c),
                lambda b=batch: torch.randn(b, 30),
                classes,
            )


def _small_convolutional() -> nn.Module:
    first = (nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2))
    second = (nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 5))


def run(kappa: float = 1e-2) -> Iterator[Callable[[], Chosen]]:
    """For each case the method that is chosen, and how much longer it takes than the best one: to be called."""
    with one_thread():
        for name, make, batch, classes in small_cases():
            torch.manual_seed(0)
            model, x = make(), batch()
            case = Case(name, model, x, torch.randint(0, classes, (len(x),)), sf.CrossEntropy())
            yield partial(_chosen, case, kappa)


def _chosen(case: Case, kappa: float) -> Chosen:
    chosen, seconds = _timed(case, kappa)
    best = min(seconds, key=seconds.__getitem__)
    return Chosen(case.name, chosen, seconds[chosen] / seconds[best], best, seconds[best] / _unit(case))


def table(found: list[object]) -> str:
    """The rows as a table, empty if there are none."""
    rows = [row for row in found if isinstance(row, Chosen)]
    if not rows:
        return ""
    lines = ["| case | chosen | times the best | the best | gradients |", "|---|---|---|---|---|"]
    lines += [f"| {r.subject} | {r.method} | {r.ratio:.2f} | {r.best} | {r.gradients:.0f} |" for r in rows]
    within = sum(row.ratio <= CLOSE for row in rows)
    return "\n".join([*lines, "", f"Within {CLOSE} times of the best: {within} of {len(rows)}.", ""])


def _timed(case: Case, kappa: float) -> tuple[str, dict[str, float]]:
    """The method that is chosen, and the seconds of those that are not predicted to take very long."""
    chain, objective = sf.Chain(case.model, case.x), case.objective.bound_to(case.y)
    choice = choose_gauss_newton(sizes_of(Problem(chain, objective)), 1e-6)
    unit, seconds = _unit(case), {}
    for method in METHODS[1:]:
        if choice.costs[method] * unit > MOST or choice.costs[method] > 20 * choice.costs[choice.method]:
            continue
        try:
            seconds[method] = min(_once(chain, objective, kappa, method) for _ in range(2))
        except OracleError:
            seconds[method] = math.inf
    return choice.method, seconds


def _unit(case: Case) -> float:
    """Seconds of a gradient: the median of nine, after a first one."""
    return median([case.gradient() for _ in range(10)][1:])


def _once(chain: sf.Chain, objective: Objective, kappa: float, method: Method) -> float:
    start = time.process_time()
    gauss_newton_solver(Problem(chain, objective), method, 1e-6).solve(kappa, 1e-6, None)
    return time.process_time() - start


if __name__ == "__main__":
    for measure in run():
        print(table([measure()]).splitlines()[2], flush=True)
