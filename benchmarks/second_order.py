"""Second-order steps in gradients of the same model: steps of the optimizer, and the choice among methods.

``run`` measures steps of :class:`surefoot.optim.GaussNewton` with its defaults: the mean of several steps from the
start, on one thread, in processor time, after a first step that captures the graph; and their memory. ``table``
compares the method that is chosen with all others on many small and middle-sized cases, for exact steps.

``python -m benchmarks.second_order`` prints the steps, ``python -m benchmarks.second_order choice`` the table.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import surefoot as sf
from benchmarks.timing import Measurement
from surefoot import data, zoo
from surefoot.objectives import Objective
from surefoot.oracles.choice import choose_gauss_newton
from surefoot.oracles.problem import OracleError, Problem
from surefoot.oracles.steps import METHODS, Method, sizes_of

STEPS = 8
MOST = 20.0  # seconds that a method may be predicted to take in the table


@dataclass(frozen=True)
class Case:
    """A network with its data, and how many gradients a step is aimed at."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    objective: Objective
    target: float = 20.0

    def gradient(self) -> float:
        """Seconds of a gradient: the median of some."""
        parameters = list(self.model.parameters())

        def once() -> float:
            start = time.process_time()
            torch.autograd.grad(self.objective(self.model(self.x), self.y), parameters)
            return time.process_time() - start

        once()
        return sorted(once() for _ in range(9))[4]


class _Recurrent(nn.Module):
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
    mlp = nn.Sequential(nn.Flatten(), _mlp(64, [64, 64], 10))
    yield Case("digits, MLP, 1,347 samples", mlp, x, y, entropy, 10.0)
    yield Case("digits, CNN, 1,347 samples", _convolutional(False), x, y, entropy, 15.0)
    yield Case("digits, CNN with batch-norm, 256 samples", _convolutional(True), x[:256], y[:256], entropy, 15.0)
    rows, classes = torch.randn(128, 64), torch.randint(0, 1000, (128,))
    yield Case("MLP, 1,000 classes, batch 128", _mlp(64, [128], 1000), rows, classes, entropy)
    yield Case("GRU cell, batch 256", _Recurrent(), torch.randn(256, 8, 16), torch.randint(0, 10, (256,)), entropy)
    ids = torch.randint(0, 256, (8, 128))
    yield Case("GPT, 8 × 128 tokens of 256", _Tokens(256, 128), ids, torch.randint(0, 256, (1024,)), entropy)
    ids = torch.randint(0, 1000, (8, 64))
    yield Case("GPT, 8 × 64 tokens of 1,000", _Tokens(1000, 64), ids, torch.randint(0, 1000, (512,)), entropy)
    images = torch.randn(64, 3, 32, 32)
    yield Case("ResNet-18, batch 64", zoo.resnet18(), images, torch.randint(0, 10, (64,)), entropy)


def _convolutional(normalised: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(*channels, 3, padding=1), *([nn.BatchNorm2d(channels[1])] if normalised else [])]
        layers += [nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def run() -> Iterator[Measurement]:
    """The mean cost of a step of the optimizer with its defaults, and its memory."""
    for case in cases():
        yield _steps(case)
        yield _memory(case)


def _memory(case: Case) -> Measurement:
    """Bytes at the peak of a step beside those of a gradient, above what is held between steps.

    The profiler of PyTorch reports every allocation of its allocator, and every release.
    """
    parameters = list(case.model.parameters())
    optimizer = sf.optim.GaussNewton(case.model, case.objective)
    optimizer.step(case.x, case.y)
    gradient = _peak(lambda: torch.autograd.grad(case.objective(case.model(case.x), case.y), parameters))
    ratios = sorted(_peak(lambda: optimizer.step(case.x, case.y)) / gradient for _ in range(3))
    name = f"{case.name}: memory of a step of GaussNewton"
    return Measurement(name, "memory of a gradient", ratios[1], ratios[0], ratios[2], 0.0, 3.0)


def _peak(function: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        function()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def _steps(case: Case) -> Measurement:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        unit = case.gradient()
        optimizer = sf.optim.GaussNewton(case.model, case.objective)
        optimizer.step(case.x, case.y)
        costs = []
        for _ in range(STEPS):
            start = time.process_time()
            optimizer.step(case.x, case.y)
            costs.append((time.process_time() - start) / unit)
    finally:
        torch.set_num_threads(threads)
    costs.sort()
    return Measurement(
        f"{case.name}: step of GaussNewton",
        "gradient",
        sum(costs) / STEPS,
        costs[STEPS // 4],
        costs[-1 - STEPS // 4],
        unit,
        case.target,
    )


def small_cases() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[], Tensor], int]]:
    """40 cases for the choice: the network, its batch, and the number of classes."""
    for depth, width in ((1, 8), (1, 64), (2, 16), (2, 64), (3, 32)):
        for batch in (4, 32, 256, 1024):
            yield (
                f"MLP 20-{'-'.join([str(width)] * depth)}-10, batch {batch}",
                lambda d=depth, w=width: _mlp(20, [w] * d, 10),
                lambda b=batch: torch.randn(b, 20),
                10,
            )
    for batch in (4, 32, 128, 512):
        name = "CNN 4-8 on 8 × 8"
        yield f"{name}, batch {batch}", _small_convolutional, lambda b=batch: torch.randn(b, 1, 8, 8), 5
        yield (
            f"CNN with batch-norm, batch {batch}",
            lambda: _convolutional(True),
            (lambda b=batch: torch.randn(b, 1, 8, 8)),
            10,
        )
        yield f"GRU cell, batch {batch}", _Recurrent, lambda b=batch: torch.randn(b, 8, 16), 10
    for classes in (2, 50):
        for batch in (16, 128, 512, 2048):
            yield (
                f"linear, {classes} classes, batch {batch}",
                lambda c=classes: nn.Linear(30, c),
                lambda b=batch: torch.randn(b, 30),
                classes,
            )


def _mlp(inputs: int, widths: list[int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def _small_convolutional() -> nn.Module:
    first = (nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2))
    second = (nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 5))


def table(kappa: float = 1e-2) -> str:
    """For each case the method that is chosen, and how much longer it takes than the best one."""
    lines = ["| case | chosen | times the best | the best | gradients |", "|---|---|---|---|---|"]
    ratios = []
    torch.set_num_threads(1)
    for name, make, batch, classes in small_cases():
        torch.manual_seed(0)
        model, x = make(), batch()
        case = Case(name, model, x, torch.randint(0, classes, (len(x),)), sf.CrossEntropy())
        chosen, seconds = _timed(case, kappa)
        best = min(seconds, key=seconds.__getitem__)
        ratios.append(seconds[chosen] / seconds[best])
        unit = case.gradient()
        cells = (name, chosen, f"{ratios[-1]:.2f}", best, f"{seconds[best] / unit:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    within = sum(ratio <= 1.5 for ratio in ratios)
    return "\n".join([*lines, "", f"Within 1.5 times of the best: {within} of {len(ratios)}."])


def _timed(case: Case, kappa: float) -> tuple[str, dict[str, float]]:
    """The method that is chosen, and the seconds of those that are not predicted to take very long."""
    chain, objective = sf.Chain(case.model, case.x), case.objective.bound_to(case.y)
    choice = choose_gauss_newton(sizes_of(Problem(chain, objective)), 1e-6)
    unit, seconds = case.gradient(), {}
    for method in METHODS[1:]:
        if choice.costs[method] * unit > MOST or choice.costs[method] > 20 * choice.costs[choice.method]:
            continue
        try:
            seconds[method] = min(_once(chain, objective, kappa, method) for _ in range(2))
        except OracleError:
            seconds[method] = math.inf
    return choice.method, seconds


def _once(chain: sf.Chain, objective: Objective, kappa: float, method: Method) -> float:
    start = time.process_time()
    sf.oracles.gauss_newton(chain, objective, kappa, method, tolerance=1e-6)
    return time.process_time() - start


if __name__ == "__main__":
    if sys.argv[1:] == ["choice"]:
        print(table().rpartition("\n")[2])
    else:
        wanted = sys.argv[1] if len(sys.argv) > 1 else ""
        for case in cases():
            if wanted in case.name:
                m = _steps(case)
                cost = f"{m.ratio:.1f} gradients [{m.low:.1f}, {m.high:.1f}] of {m.seconds * 1e3:.1f} ms"
                memory = f"{_memory(case).ratio:.1f} times its memory"
                print(f"{m.subject}: {cost}, target {m.target:g}; {memory}", flush=True)
