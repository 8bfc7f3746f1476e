"""Steps of :class:`surefoot.optim.GaussNewton` with its defaults, in gradients of the same model.

The mean of several steps from the start, on one thread, in processor time, after a first step that captures the
graph, with the garbage collector off as for all other times; and their memory. Each step stands between two
gradients and is divided by the shorter one, so that what disturbs the machine does not flatter the step.

The fixed cost of a step is what is left of it without its conjugate-gradient iterations: the time of these (a
push-forward, the factor of the loss, a pull-back, the preconditioner if there is one, the vectors) is taken in the
same steps by a clock around each of them, and subtracted. So it is the gradient, the loss at the new weights, and
all that is checked, chosen and written. One gradient and one forward pass of it no step can do without.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from examples import poisson
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import surefoot as sf
from benchmarks.timing import Measurement, one_thread
from surefoot import data, zoo
from surefoot.linear_solve import Conjugate
from surefoot.objectives import Objective

STEPS = 8


@dataclass(frozen=True)
class Case:
    """A network with its data, and how many gradients a step is aimed at, perhaps also without its iterations."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    objective: Objective
    target: float = 20.0
    fixed: float | None = None

    def gradient(self) -> float:
        """Seconds of a gradient."""
        start = time.process_time()
        torch.autograd.grad(self.objective(self.model(self.x), self.y), list(self.model.parameters()))
        return time.process_time() - start


class Recurrent(nn.Module):
    """A GRU cell, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """From all times to classes."""
        state = x.new_zeros(len(x), 32)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state)


class _Tokens(nn.Module):
    """A language model whose tokens are the rows."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.gpt = zoo.gpt(vocabulary, length, 64, 2, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """One row of logits per token."""
        return self.gpt(ids).flatten(0, 1)


def cases() -> Iterator[Case]:
    """The networks whose steps are measured."""
    torch.manual_seed(0)
    entropy, found = sf.CrossEntropy(), data.digits()
    assert found.y is not None
    x, y = found.x[:1347].float(), found.y[:1347]
    mlp = nn.Sequential(nn.Flatten(), perceptron(64, [64, 64], 10))
    yield Case("digits, MLP, 1,347 samples", mlp, x, y, entropy, 10.0, 2.0)
    yield Case("digits, CNN, 1,347 samples", convolutional(False), x, y, entropy, 15.0)
    yield Case("digits, CNN with batch-norm, 256 samples", convolutional(True), x[:256], y[:256], entropy, 15.0)
    rows, classes = torch.randn(128, 64), torch.randint(0, 1000, (128,))
    yield Case("MLP, 1,000 classes, batch 128", perceptron(64, [128], 1000), rows, classes, entropy)
    yield Case("GRU cell, batch 256", Recurrent(), torch.randn(256, 8, 16), torch.randint(0, 10, (256,)), entropy)
    ids = torch.randint(0, 256, (8, 128))
    yield Case("GPT, 8 × 128 tokens of 256", _Tokens(256, 128), ids, torch.randint(0, 256, (1024,)), entropy)
    ids = torch.randint(0, 1000, (8, 64))
    yield Case("GPT, 8 × 64 tokens of 1,000", _Tokens(1000, 64), ids, torch.randint(0, 1000, (512,)), entropy)
    pinn, points, right = poisson.problem()
    yield Case("PINN, 1,020 residuals, double", pinn, points, right, sf.Square(), 25.0)
    images = torch.randn(64, 3, 32, 32)
    yield Case("ResNet-18, batch 64", zoo.resnet18(), images, torch.randint(0, 10, (64,)), entropy)


def convolutional(normalised: bool) -> nn.Module:
    """Two convolutions on images of one channel, and ten classes."""
    layers: list[nn.Module] = []
    for channels in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(*channels, 3, padding=1), *([nn.BatchNorm2d(channels[1])] if normalised else [])]
        layers += [nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def run() -> Iterator[Callable[[], Measurement]]:
    """The mean cost of a step of the optimizer with its defaults, and its memory: to be called."""
    for case in cases():
        yield partial(_steps, case)
        if case.fixed is not None:
            yield partial(_fixed, case, case.fixed)
        yield partial(_memory, case)


def _memory(case: Case) -> Measurement:
    """Bytes at the peak of that of a dozen steps which takes most, beside those of a gradient, above what is held
    between steps.

    Passes that a step keeps for the next one count: they are dropped before. The profiler of PyTorch reports every
    allocation of its allocator, and every release of what it saw allocated: so the first step that it watches does
    not count.
    """
    parameters = list(case.model.parameters())
    optimizer = sf.optim.GaussNewton(case.model, case.objective)
    optimizer.step(case.x, case.y)
    gradient = peak(lambda: torch.autograd.grad(case.objective(case.model(case.x), case.y), parameters))
    ratios = []
    for _ in range(13):
        optimizer._ahead = None
        ratios.append(peak(lambda: optimizer.step(case.x, case.y)) / gradient)
    ratios = sorted(ratios[1:])
    name = f"{case.name}: memory of a step of GaussNewton, at most"
    return Measurement(name, "memory of a gradient", ratios[-1], ratios[3], ratios[-4], 0.0, 3.0)


def peak(function: Callable[[], object]) -> int:
    """Bytes of tensors at the peak of a call, above what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        function()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def _steps(case: Case) -> Measurement:
    costs, units, _ = _timed(case)
    return _measured(f"{case.name}: step of GaussNewton", costs, units, case.target)


def _fixed(case: Case, target: float) -> Measurement:
    """The cost of steps without their iterations."""
    costs, units, inside = _timed(case, 4 * STEPS)
    fixed = [cost - part for cost, part in zip(costs, inside, strict=True)]
    return _measured(f"{case.name}: fixed cost of a step of GaussNewton", fixed, units, target)


def _timed(case: Case, steps: int = STEPS) -> tuple[list[float], list[float], list[float]]:
    """Of each step its cost in gradients, the seconds of that gradient, and the part of iterations in the cost."""
    with one_thread(), _clock() as spent:
        optimizer = sf.optim.GaussNewton(case.model, case.objective)
        optimizer.step(case.x, case.y)
        case.gradient()
        costs, units, inside = [], [], []
        gc.collect()
        gc.disable()
        try:
            before = case.gradient()
            for _ in range(steps):
                spent.clear()
                start = time.process_time()
                optimizer.step(case.x, case.y)
                step, after = time.process_time() - start, case.gradient()
                units.append(min(before, after))
                costs.append(step / units[-1])
                inside.append(sum(spent) / units[-1])
                before = after
        finally:
            gc.enable()
    return costs, units, inside


@contextmanager
def _clock() -> Iterator[list[float]]:
    """The seconds of every iteration of conjugate gradients, as long as it lasts."""
    spent: list[float] = []
    plain = Conjugate.step

    def timed(run: Any, active: Any = True) -> None:
        start = time.process_time()
        plain(run, active)
        spent.append(time.process_time() - start)

    with patch.object(Conjugate, "step", timed):
        yield spent


def _measured(subject: str, costs: list[float], units: list[float], target: float) -> Measurement:
    """The mean of the costs, with quartiles."""
    costs, quarter = sorted(costs), len(costs) // 4
    typical = median(units)
    return Measurement(
        subject, "gradient", sum(costs) / len(costs), costs[quarter], costs[-1 - quarter], typical, target
    )


def perceptron(inputs: int, widths: list[int], outputs: int) -> nn.Module:
    """A tanh network."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for case in cases():
        if wanted in case.name:
            m = _steps(case)
            cost = f"{m.ratio:.1f} gradients [{m.low:.1f}, {m.high:.1f}] of {m.seconds * 1e3:.1f} ms"
            memory = f"{_memory(case).ratio:.1f} times its memory"
            print(f"{m.subject}: {cost}, target {m.target:g}; {memory}", flush=True)
            if case.fixed is not None:
                m = _fixed(case, case.fixed)
                print(f"{m.subject}: {m.ratio:.2f} [{m.low:.2f}, {m.high:.2f}], target {m.target:g}", flush=True)
