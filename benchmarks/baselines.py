"""Training methods, each until the same processor time is spent, counted in gradients of the same run.

The time of one gradient is measured before a run and again and again during it, outside of the clock of the
method; the median counts. Losses are those that a method computes anyway at its iterates, so that looking costs
nothing; schedule-free averages are evaluated outside of the clock.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import surefoot as sf
from benchmarks.networks import Problem

LOST = 100.0  # a run is given up where its loss is that many times the first
PEERS = Path(__file__).resolve().parent.parent / "build" / "peers"  # where other packages may be installed
CERTIFIED, ADAM, CONSTANT = "certified", "Adam", "constant step"
PACKAGES = {"Prodigy": "prodigyopt", "schedule-free AdamW": "schedulefree", "D-Adaptation": "dadaptation"}
METHODS = (CERTIFIED, "torch LBFGS", ADAM, *PACKAGES, CONSTANT, "Armijo")
TUNED = {ADAM: (1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1), CONSTANT: tuple(2.0**k for k in range(-4, 5))}
_RATIO = 1.04  # between the amounts of work at which losses are kept
_PROBES = 9


@dataclass(frozen=True)
class Trace:
    """One training.

    Attributes:
        work: gradients spent when an iterate was reached; a selection, the first at 0.
        losses: at these.
        steps: how many the method took.
        ascents: how many of them went up, for methods that see every loss; for the certified one, in exact
            arithmetic beyond doubt.
        gradient: seconds of one gradient.
        lost: whether it was given up.
    """

    work: list[float]
    losses: list[float]
    steps: int
    ascents: int
    gradient: float
    lost: bool = False

    def loss_at(self, budget: float) -> float:
        """The loss of the last iterate that was reached within a budget of gradients."""
        if self.lost:
            return math.inf
        return [loss for work, loss in zip(self.work, self.losses, strict=True) if work <= budget][-1]

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists."""
        return asdict(self)


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
        self.seconds, self.steps, self.ascents = 0.0, 0, 0
        self.seen: list[tuple[float, float]] = []  # seconds, loss
        self.last = self.first = math.nan
        self.gradient(), self.times.clear()
        for _ in range(_PROBES):
            self.gradient()
        self._next_probe, self._start = 10.0, time.process_time()

    def gradient(self) -> None:
        """Measure one gradient."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        start = time.process_time()
        torch.autograd.grad(self.problem.loss(self.model), list(self.model.parameters()))
        self.times.append(time.process_time() - start)
        for buffer, value in buffers:
            buffer.copy_(value)

    @property
    def work(self) -> float:
        """Gradients spent until the last look."""
        return self.seconds / median(self.times)

    def start(self) -> None:
        """The method begins or goes on."""
        self._start = time.process_time()

    def stop(self) -> None:
        """The method pauses."""
        self.seconds += time.process_time() - self._start

    def note(self, seconds: float, loss: float, *, ascent: bool | None = None) -> None:
        """A loss at an iterate that was reached after some seconds."""
        if math.isnan(self.first):
            self.first, seconds = loss, 0.0  # what is before the first step is no work towards its loss
        elif ascent if ascent is not None else not loss <= self.last:
            self.ascents += 1
        self.last = loss
        self.seen.append((seconds, loss))

    @property
    def over(self) -> bool:
        """Whether the budget is spent or the loss was lost; gradients are measured again in between."""
        if self.work >= self._next_probe:
            self.gradient()
            self._next_probe = max(self.work * 1.15, self.work + 5)
        return self.work > self.budget or self.lost

    @property
    def lost(self) -> bool:
        """Whether the last loss is far above the first, or no number."""
        return not math.isnan(self.first) and not self.last <= LOST * max(self.first, 1e-300)

    def trace(self) -> Trace:
        """What is kept: losses at amounts of work a few per cent apart."""
        unit = median(self.times)
        work, losses = [], []
        for seconds, loss in self.seen:
            spent = seconds / unit
            if len(work) > 1 and spent < work[-2] * _RATIO and spent < work[-2] + 10:
                work[-1], losses[-1] = spent, loss
            else:
                work.append(spent), losses.append(loss)
        return Trace(work, losses, self.steps, self.ascents, unit, lost=self.lost)


def train(problem: Problem, method: str, setting: float | None, seed: int, budget: float) -> Trace:
    """One run of a method.

    Raises:
        ImportError: if the package of the method is not installed.
    """
    model = problem.model(seed)
    makers: dict[str, Callable[[nn.Module], Any]] = {
        ADAM: lambda m: torch.optim.Adam(m.parameters(), lr=setting),
        CONSTANT: lambda m: torch.optim.SGD(m.parameters(), lr=setting),
        "Prodigy": lambda m: _package("Prodigy").Prodigy(m.parameters()),
        "D-Adaptation": lambda m: _package("D-Adaptation").DAdaptAdam(m.parameters()),
        "schedule-free AdamW": lambda m: _package("schedule-free AdamW").AdamWScheduleFree(m.parameters()),
    }
    torch.manual_seed(seed)
    if method in makers:
        optimizer = makers[method](model)
        return _first_order(problem, model, optimizer, Clock(problem, model, budget))
    runs = {CERTIFIED: _certified, "torch LBFGS": _lbfgs, "Armijo": _armijo}
    return runs[method](problem, model, budget)


def _package(method: str) -> Any:
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    return importlib.import_module(PACKAGES[method])


def missing() -> list[str]:
    """The methods whose package is not installed."""
    found = []
    for method in PACKAGES:
        try:
            _package(method)
        except ImportError:
            found.append(method)
    return found


def _first_order(problem: Problem, model: nn.Module, optimizer: Any, clock: Clock) -> Trace:
    """A step per gradient; the loss is that of the iterate before, or of the average where there is one."""
    averaged = hasattr(optimizer, "eval")
    if averaged:
        optimizer.train()
    last_look = -math.inf
    while True:
        if averaged and (clock.work > last_look * _RATIO or clock.steps < 2):
            last_look = clock.work
            optimizer.eval()
            with torch.no_grad():
                clock.note(clock.seconds, float(_value(problem, model)))
            optimizer.train()
        reached = clock.seconds
        if clock.over:
            return clock.trace()
        clock.start()
        optimizer.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        optimizer.step()
        clock.stop()
        clock.steps += 1
        if not averaged:
            clock.note(reached, float(loss.detach()))


def _value(problem: Problem, model: nn.Module) -> torch.Tensor:
    """The objective; buffers stay."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    loss = problem.loss(model)
    for buffer, value in buffers:
        buffer.copy_(value)
    return loss


def _certified(problem: Problem, model: nn.Module, budget: float) -> Trace:
    """The default settings. Reading the model, once per network and shape, is done before and not counted."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sf.CertifiedDescent(model, problem.objective).step(problem.x, problem.y)
    model.load_state_dict(weights)
    clock = Clock(problem, model, budget)
    optimizer = sf.CertifiedDescent(model, problem.objective)
    idle = 0
    while not clock.over and idle < 3:
        reached = clock.seconds
        clock.start()
        loss = optimizer.step(problem.x, problem.y)
        clock.stop()
        taken = optimizer.history[-1].step_size > 0
        clock.steps += taken
        idle = 0 if taken else idle + 1  # nothing can be proved any more
        clock.note(reached, loss)
    return clock.trace()


def _lbfgs(problem: Problem, model: nn.Module, budget: float) -> Trace:
    """``torch.optim.LBFGS`` with strong Wolfe conditions; the lowest loss that its line searches saw counts."""
    never = {"tolerance_grad": 0.0, "tolerance_change": 0.0}  # by default it stops at losses of about 1e-8
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **never)
    clock = Clock(problem, model, budget)
    lowest = math.inf

    def closure() -> torch.Tensor:
        nonlocal lowest
        clock.stop()
        reached = clock.seconds
        clock.start()
        optimizer.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        value = float(loss.detach())
        lowest = min(lowest, value) if math.isfinite(value) else lowest
        clock.note(reached, lowest)
        return loss

    before, idle = clock.steps, 0
    while not clock.over and idle < 3:
        clock.start()
        optimizer.step(closure)
        clock.stop()
        clock.steps = max(state.get("n_iter", 0) for state in optimizer.state.values())
        idle = idle + 1 if clock.steps == before else 0  # no direction left
        before = clock.steps
    return clock.trace()


def _armijo(problem: Problem, model: nn.Module, budget: float) -> Trace:
    """Back-tracking by halves from twice the step before, until the decrease is a part of what the slope says."""
    clock, step, parameters = Clock(problem, model, budget), 0.5, list(model.parameters())
    while not clock.over:
        reached = clock.seconds
        clock.start()
        loss = problem.loss(model)
        slopes = torch.autograd.grad(loss, parameters)
        value, square = float(loss.detach()), sum(float((slope * slope).sum()) for slope in slopes)
        step *= 2
        with torch.no_grad():
            _move(parameters, slopes, step)
            for _ in range(60):
                if float(problem.loss(model)) <= value - 1e-4 * step * square:
                    break
                step /= 2
                _move(parameters, slopes, -step)
        clock.stop()
        clock.steps += 1
        clock.note(reached, value)
    return clock.trace()


def _move(parameters: Sequence[nn.Parameter], slopes: Sequence[torch.Tensor], step: float) -> None:
    for parameter, slope in zip(parameters, slopes, strict=True):
        parameter.sub_(slope, alpha=step)
