"""Training without a learning rate: certified descent next to tuned and untuned methods, at equal work.

All data at every step, double precision. Work is processor time over that of one gradient, which is measured
before a run and again and again during it, outside of the clock of the method; the median counts. Losses are those
that a method computes anyway at its iterates, so that looking costs nothing; schedule-free averages are evaluated
outside of the clock.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.networks import Problem, problems
from benchmarks.peers import package
from benchmarks.runner import PAGES, Case, benchmark, number, stored
from benchmarks.timing import gradient_seconds

BUDGETS, SEEDS = (150, 500), range(3)
NOTHING = 1e-9  # losses below are all the same
LOST = 100.0  # a run is given up where its loss is that many times the first
PACKAGES = {
    "Prodigy": ("prodigyopt", "Prodigy"),
    "schedule-free AdamW": ("schedulefree", "AdamWScheduleFree"),
    "D-Adaptation": ("dadaptation", "DAdaptAdam"),
}
TUNED = {
    "Adam": (torch.optim.Adam, (1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1)),
    "constant step": (torch.optim.SGD, tuple(2.0**k for k in range(-4, 5))),
}
METHODS = ("certified", "torch LBFGS", "Adam", *PACKAGES, "constant step", "Armijo")
COLUMNS = " | ".join(("network", *METHODS))


class Clock:
    """Processor time of a method in gradients, and the losses that it saw.

    Args:
        problem: what is trained.
        model: the network; gradients to compare with are taken at its weights, buffers are set back.
        budget: gradients after which the run is over.
    """

    def __init__(self, problem: Problem, model: nn.Module, budget: float) -> None:
        self.problem, self.model, self.budget = problem, model, budget
        self.times: list[float] = []
        self.spent, self.steps, self.ascents, self.next_probe = 0.0, 0, 0, 10.0
        self.trace: list[tuple[float, float]] = []  # seconds, loss
        gradient_seconds(model, lambda: problem.loss(model), 1)
        for _ in range(9):
            self.probe()

    def probe(self) -> None:
        """Measure one gradient."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.times.append(gradient_seconds(self.model, lambda: self.problem.loss(self.model), 1))
        for buffer, value in buffers:
            buffer.copy_(value)

    def timed(self, action: Callable[[], Any]) -> Any:
        """What an action of the method returns; its time counts."""
        start = time.process_time()
        found = action()
        self.spent += time.process_time() - start
        return found

    def note(self, spent: float, loss: float) -> None:
        """A loss at an iterate that was reached after some seconds; the first one costs nothing."""
        self.ascents += bool(self.trace) and not loss <= self.trace[-1][1]
        self.trace.append((spent if self.trace else 0.0, loss))

    @property
    def lost(self) -> bool:
        """Whether the last loss is far above the first, or no number."""
        return bool(self.trace) and not self.trace[-1][1] <= LOST * max(self.trace[0][1], 1e-300)

    @property
    def over(self) -> bool:
        """Whether the budget is spent or the loss was lost; gradients are measured again in between."""
        work = self.spent / median(self.times)
        if work >= self.next_probe:
            self.probe()
            self.next_probe = max(1.15 * work, work + 5)
        return work > self.budget or self.lost

    def result(self) -> dict[str, Any]:
        """Losses by budget, a thinned curve, steps, ascents, gradients per step."""
        unit = median(self.times)
        curve = [(spent / unit, loss) for spent, loss in self.trace]
        ends = {str(b): math.inf if self.lost else [y for x, y in curve if x <= b][-1] for b in BUDGETS}
        thin = [curve[0]]
        for work, loss in curve:
            if work > thin[-1][0] * 1.04 + 1:
                thin.append((work, loss))
        cost = curve[-1][0] / max(self.steps - 1, 1)
        return {"losses": ends, "curve": thin, "steps": self.steps, "ascents": self.ascents, "cost": cost}


def train(name: str, method: str, rate: float | None, seed: int) -> dict[str, Any]:
    """One run of a method."""
    problem = next(problem for problem in problems() if problem.name == name)
    model = problem.model(seed)
    torch.manual_seed(seed)
    clock = Clock(problem, model, BUDGETS[-1])
    if method in TUNED:
        _first_order(clock, TUNED[method][0](model.parameters(), lr=rate))
    elif method in PACKAGES:
        module, kind = PACKAGES[method]
        _first_order(clock, getattr(package(module), kind)(model.parameters()))
    else:
        {"certified": _certified, "torch LBFGS": _lbfgs, "Armijo": _armijo}[method](clock)
    return clock.result()


def _first_order(clock: Clock, optimizer: Any) -> None:
    """A step per gradient; the loss is that of the iterate before, or of the average where there is one."""
    problem, model, averaged, looked = clock.problem, clock.model, hasattr(optimizer, "eval"), -1.0
    if averaged:
        optimizer.train()

    def step() -> float:
        optimizer.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    while not clock.over:
        reached = clock.spent
        if averaged and reached > 1.04 * looked:
            looked = reached
            optimizer.eval()
            with torch.no_grad():
                clock.note(reached, float(problem.loss(model)))
            optimizer.train()
        loss = clock.timed(step)
        clock.steps += 1
        if not averaged:
            clock.note(reached, loss)


def _certified(clock: Clock) -> None:
    """The default settings. Reading the model, once per network and shape, is done before and not counted."""
    problem, model = clock.problem, clock.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sf.CertifiedDescent(model, problem.objective).step(problem.x, problem.y)
    model.load_state_dict(weights)
    optimizer, idle = sf.CertifiedDescent(model, problem.objective), 0
    while not clock.over and idle < 3:  # until nothing can be proved any more
        reached = clock.spent
        loss = clock.timed(lambda: optimizer.step(problem.x, problem.y))
        taken = optimizer.history[-1].step_size > 0
        clock.steps += taken
        idle = 0 if taken else idle + 1
        clock.note(reached, loss)


def _lbfgs(clock: Clock) -> None:
    """``torch.optim.LBFGS`` with strong Wolfe conditions; the lowest loss that its line searches saw counts."""
    never = {"tolerance_grad": 0.0, "tolerance_change": 0.0}  # by default it stops at losses of about 1e-8
    optimizer = torch.optim.LBFGS(clock.model.parameters(), line_search_fn="strong_wolfe", **never)
    lowest, start, idle = math.inf, time.process_time(), 0

    def closure() -> Tensor:
        nonlocal lowest
        reached = clock.spent + time.process_time() - start
        optimizer.zero_grad()
        loss = clock.problem.loss(clock.model)
        loss.backward()
        lowest = min(lowest, float(loss.detach())) if bool(loss.isfinite()) else lowest
        clock.note(reached, lowest)
        return loss

    while not clock.over and idle < 3:
        start, before = time.process_time(), clock.steps
        clock.timed(lambda: optimizer.step(closure))
        clock.steps = max(state.get("n_iter", 0) for state in optimizer.state.values())
        idle = idle + 1 if clock.steps == before else 0  # no direction left


def _armijo(clock: Clock) -> None:
    """Back-tracking by halves from twice the step before, until the decrease is a part of what the slope says."""
    problem, model, parameters, length = clock.problem, clock.model, list(clock.model.parameters()), 0.5

    def step() -> float:
        nonlocal length
        loss = problem.loss(model)
        slopes = torch.autograd.grad(loss, parameters)
        value, square = float(loss.detach()), sum(float((slope * slope).sum()) for slope in slopes)
        start, length = [p.detach().clone() for p in parameters], 2 * length
        with torch.no_grad():
            for _ in range(60):
                for p, u, slope in zip(parameters, start, slopes, strict=True):
                    p.copy_(u - length * slope)
                if float(problem.loss(model)) <= value - 1e-4 * length * square:
                    break
                length /= 2
        return value

    while not clock.over:
        reached = clock.spent
        clock.note(reached, clock.timed(step))
        clock.steps += 1


def _run(name: str, method: str, rate: float | None, seed: int) -> dict[str, Any]:
    shown = "" if rate is None else f" {rate:.4g}"
    try:
        found = stored(f"training {name} {method}{shown} seed {seed}", partial(train, name, method, rate, seed))
    except Exception as error:  # shown as a loss of ∞ and not stored, so that the next run tries again
        print(f"{name}, {method}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        found = {"losses": {str(b): math.inf for b in BUDGETS}, "curve": [], "steps": 0, "ascents": 0, "cost": 0}
    result: dict[str, Any] = found
    return result


@cache
def study(name: str, method: str) -> dict[float | None, list[dict[str, Any]]]:
    """The runs of all seeds by rate; of tuned methods, more rates while the best is at an end of the grid."""
    if method not in TUNED:
        return {None: [_run(name, method, None, seed) for seed in SEEDS]}
    grid = TUNED[method][1]
    runs: dict[Any, Any] = {rate: [_run(name, method, rate, seed) for seed in SEEDS] for rate in grid}
    for budget in BUDGETS:
        while (best := _best(runs, budget)) in (min(runs), max(runs)) and len(runs) < 24:
            factor = grid[1] / grid[0]
            further = best / factor if best == min(runs) else best * factor
            runs[further] = [_run(name, method, further, seed) for seed in SEEDS]
    return runs


def _best(runs: dict[Any, Any], budget: int) -> Any:
    return min(runs, key=lambda rate: (_median(runs[rate], budget), rate))


def _median(runs: list[dict[str, Any]], budget: int) -> float:
    return median(run["losses"][str(budget)] for run in runs)


def loss(name: str, method: str, budget: int) -> float:
    """At the best rate for a budget."""
    runs = study(name, method)
    return _median(runs[_best(runs, budget)], budget)


def _losses(name: str, budget: int) -> list[str]:
    """The lowest is bold, and all that are below what counts."""
    found = {method: loss(name, method, budget) for method in METHODS}
    lowest = max(min(found.values()), NOTHING)
    return [name, *(f"**{number(x)}**" if x <= lowest else number(x) for x in found.values())]


@benchmark("training-150", "training", COLUMNS)
def training_150() -> Iterator[Case]:
    yield from ((problem.name, partial(_losses, problem.name, 150)) for problem in problems())


@benchmark("training-500", "training", COLUMNS)
def training_500() -> Iterator[Case]:
    yield from ((problem.name, partial(_losses, problem.name, 500)) for problem in problems())


@benchmark("training-steps", "training", "network | loss / LBFGS, 150 | loss / LBFGS, 500 | gradients per step | "
           "steps | ascents | Adam's rate | constant step")  # fmt: skip
def training_steps() -> Iterator[Case]:
    yield from ((problem.name, partial(_steps, problem.name)) for problem in problems())


def _steps(name: str) -> list[str]:
    """Certified descent next to torch's LBFGS, what a step costs, and what tuning chose for the larger budget."""
    over = [max(loss(name, "certified", b), NOTHING) / max(loss(name, "torch LBFGS", b), NOTHING) for b in BUDGETS]
    runs = study(name, "certified")[None]
    cost, sums = median(run["cost"] for run in runs), [sum(run[k] for run in runs) for k in ("steps", "ascents")]
    chosen = [f"{_best(study(name, m), BUDGETS[-1]):.3g} of {len(study(name, m))}" for m in TUNED]
    return [name, *map(number, over), f"{cost:.2f}", *map(str, sums), *chosen]


SHOWN = ("digits, 3 layers, tanh", "digits, CNN, max-pooling, ReLU", "text, GPT")


def draw(shown: tuple[str, ...] = SHOWN) -> None:
    """``docs/training.png`` from the stored runs: loss against work, the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.8 * len(shown), 3.9))
    for axis, name in zip(figure.subplots(1, len(shown)), shown, strict=True):
        for method in METHODS:
            runs = study(name, method)
            curve = runs[_best(runs, BUDGETS[-1])][0]["curve"]
            line = "-" if method == "certified" else "--"
            axis.plot([x for x, _ in curve], [max(y, NOTHING) for _, y in curve], line, label=method)
        axis.set(title=name, xlabel="work, in gradients", ylabel="training loss", yscale="log", ylim=(None, 10))
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(PAGES / "training.png", dpi=110)


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    draw()
