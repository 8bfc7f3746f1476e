"""Full-batch training by certified descent and by what is used without a proof, counted in the same units.

One unit of work is a gradient; a value of the objective counts 1/3, and an expansion along a segment what was
measured (:mod:`benchmarks.training`). Seconds are processor time. Losses are taken from where a method evaluates
them anyway, so nothing is counted for looking.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.segment.along import Along

VALUE = 1 / 3  # gradients that a value of the objective costs
LOST = 100.0  # a run is given up where its loss is that many times the first
Advance = Callable[[float, Sequence[Tensor]], float]


@dataclass(frozen=True)
class Task:
    """A network and data to train it on, with all data at every step."""

    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    steps: int

    def loss(self, model: nn.Module) -> Tensor:
        """The objective."""
        return nn.functional.cross_entropy(model(self.x), self.y)

    def gradient(self, model: nn.Module) -> tuple[float, tuple[Tensor, ...]]:
        """The objective and its gradient."""
        loss = self.loss(model)
        return float(loss.detach()), torch.autograd.grad(loss, list(model.parameters()))


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        method: its name.
        setting: what was tuned, in words; empty where nothing was.
        losses: at every iterate, the first included.
        work: gradients spent until each of them was reached.
        seconds: processor time until then.
        steps: how many steps were wanted; fewer were taken if the loss was lost.
        promised: the decrease that was proved before each step; ``None`` for methods without a proof.
    """

    method: str
    setting: str
    losses: tuple[float, ...]
    work: tuple[float, ...]
    seconds: tuple[float, ...]
    steps: int
    promised: tuple[float, ...] | None = None

    @property
    def final(self) -> float:
        """The last loss; infinite if the run was given up."""
        return self.losses[-1] if len(self.losses) == self.steps + 1 and _kept(self.losses) else math.inf

    @property
    def ascents(self) -> int:
        """How many steps increased the objective."""
        return sum(not after <= before for before, after in pairwise(self.losses))

    @property
    def broken(self) -> int | None:
        """How many steps decreased it by less than they promised, beyond the round-off of the evaluation."""
        if self.promised is None:
            return None
        steps = zip(self.losses, self.losses[1:], self.promised, strict=False)
        return sum(not before - after >= promise - 1e-12 * before for before, after, promise in steps)

    def loss_at(self, budget: float, spent: Sequence[float]) -> float:
        """The loss of the last iterate that was reached within a budget of work or of seconds."""
        if math.isinf(self.final):
            return math.inf
        return [loss for loss, cost in zip(self.losses, spent, strict=True) if cost <= budget * (1 + 1e-9)][-1]


def _kept(losses: Sequence[float]) -> bool:
    return losses[-1] <= LOST * losses[0]  # false for NaN


def follow(task: Task, method: str, setting: str, prepare: Callable[[nn.Module], Advance]) -> Run:
    """Train with a method that is given value and gradient, moves, and says what it spent on top."""
    model = task.build()
    advance = prepare(model)
    losses: list[float] = []
    work, seconds = [0.0], [0.0]
    for _ in range(task.steps):
        start = time.process_time()
        value, gradient = task.gradient(model)
        losses.append(value)
        if not _kept(losses):
            return Run(method, setting, tuple(losses), tuple(work), tuple(seconds), task.steps)
        with torch.no_grad():
            extra = advance(value, gradient)
        seconds.append(seconds[-1] + time.process_time() - start)
        work.append(work[-1] + 1 + extra)
    with torch.no_grad():
        losses.append(float(task.loss(model)))
    return Run(method, setting, tuple(losses), tuple(work), tuple(seconds), task.steps)


def _move(model: nn.Module, gradient: Sequence[Tensor], step: float) -> None:
    for parameter, slope in zip(model.parameters(), gradient, strict=True):
        parameter.sub_(slope, alpha=step)


def _square(gradient: Sequence[Tensor]) -> float:
    return sum(float((slope * slope).sum()) for slope in gradient)


def constant(task: Task, step: float) -> Run:
    """Gradient descent with one step size for the whole run."""

    def prepare(model: nn.Module) -> Advance:
        def advance(_: float, gradient: Sequence[Tensor]) -> float:
            _move(model, gradient, step)
            return 0.0

        return advance

    return follow(task, "best constant step", f"{step:g}", prepare)


def best_constant(task: Task, middle: float, around: int = 4) -> Run:
    """The constant step that ends lowest, of ``2·around + 1`` a factor 2 apart, more while it is at an end."""
    runs = {k: constant(task, middle * 2.0**k) for k in range(-around, around + 1)}
    while (best := min(runs, key=lambda k: runs[k].final)) in (min(runs), max(runs)) and len(runs) < 40:
        further = best - 1 if best == min(runs) else best + 1
        runs[further] = constant(task, middle * 2.0**further)
    return replace(runs[best], setting=f"{middle * 2.0**best:g} of {len(runs)}")


def armijo(task: Task, slope: float = 1e-4) -> Run:
    """Back-tracking by halves from twice the step before, until the decrease is a part of what the slope says."""

    def prepare(model: nn.Module) -> Advance:
        step = 0.5

        def advance(value: float, gradient: Sequence[Tensor]) -> float:
            nonlocal step
            step, square, trials = 2 * step, _square(gradient), 1
            _move(model, gradient, step)
            while not float(task.loss(model)) <= value - slope * step * square and trials < 60:
                step, trials = step / 2, trials + 1
                _move(model, gradient, -step)
            return trials * VALUE

        return advance

    return follow(task, "Armijo", "", prepare)


def polyak(task: Task) -> Run:
    """Polyak's step with F* = 0."""

    def prepare(model: nn.Module) -> Advance:
        def advance(value: float, gradient: Sequence[Tensor]) -> float:
            _move(model, gradient, value / _square(gradient))
            return 0.0

        return advance

    return follow(task, "Polyak", "", prepare)


def adam(task: Task, rates: Sequence[float] = (1e-3, 1e-2)) -> Run:
    """Adam with the learning rate that ends lowest."""

    def prepare(model: nn.Module, rate: float) -> Advance:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)

        def advance(_: float, gradient: Sequence[Tensor]) -> float:
            for parameter, slope in zip(model.parameters(), gradient, strict=True):
                parameter.grad = slope
            optimizer.step()
            return 0.0

        return advance

    runs = [follow(task, "Adam", f"{rate:g} of {len(rates)}", lambda m, r=rate: prepare(m, r)) for rate in rates]
    return min(runs, key=lambda run: run.final)


def certified(task: Task, method: str, expansion: float, **options: object) -> Run:
    """Certified descent along segments.

    Args:
        task: what is trained.
        method: a name.
        expansion: gradients that an expansion costs.
        options: of :class:`surefoot.optim.CertifiedDescent`.
    """
    model = task.build()
    optimizer = sf.optim.CertifiedDescent(model, sf.CrossEntropy(), mode="segment", **options)
    work, seconds = [0.0], [0.0]
    with expansions_counted() as count:
        for _ in range(task.steps):
            start, before = time.process_time(), count()
            optimizer.step(task.x, task.y)
            seconds.append(seconds[-1] + time.process_time() - start)
            work.append(work[-1] + 1 + expansion * (count() - before))
    losses = [record.loss for record in optimizer.history] + [optimizer.value(task.x, task.y)]
    promised = tuple(record.promised_decrease or 0.0 for record in optimizer.history)
    return Run(method, "", tuple(losses), tuple(work), tuple(seconds), task.steps, promised)


@contextmanager
def expansions_counted() -> Iterator[Callable[[], int]]:
    """Count the expansions along segments while the body runs."""
    original, total = Along.expand, 0

    def expand(self: Along, *args: object, **kwargs: object) -> object:
        nonlocal total
        total += 1
        return original(self, *args, **kwargs)

    Along.expand = expand
    try:
        yield lambda: total
    finally:
        Along.expand = original
