"""When convergence is proved: real networks and data, and networks that have not made a step.

From PyTorch's initial weights (seed 0, double precision) plain Gauss-Newton steps are taken, halved until they
descend; before each the theorems are asked. Newton steps for objectives with a ridge.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import surefoot as sf
from benchmarks.networks import from_sklearn, images, perceptron
from benchmarks.runner import Case, benchmark
from benchmarks.timing import seconds

MOST_STEPS, WIDTHS = 25, tuple(2**k for k in range(6, 18))
NAMES = {"gauss_newton": "Gauss-Newton", "gradient": "gradient descent", "newton": "Newton"}


@dataclass(frozen=True)
class Problem:
    """A network and its data: squares, or with a ridge cross-entropy."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    ridge: float = 0.0

    @property
    def methods(self) -> tuple[str, ...]:
        return ("newton", "gradient") if self.ridge else ("gauss_newton", "gradient")


def small_convolution(outputs: int = 1) -> nn.Sequential:
    """Four filters and a linear layer."""
    last = nn.Linear(144, outputs)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), last)


def digits(count: int, classes: bool = False) -> tuple[Tensor, Tensor]:
    """Digits with their numbers over 9, or as unit vectors."""
    x, y = images("digits", count)
    return x.flatten(1), one_hot(y, 10).double() if classes else y[:, None].double() / 9


def table(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Standardised inputs, evenly chosen; classes as unit vectors, numbers standardised."""
    x, y = from_sklearn(name)
    y = ((y - y.mean()) / y.std())[:, None].double() if y.is_floating_point() else one_hot(y.long()).double()
    step = max(1, len(x) // count)
    return x[::step][:count], y[::step][:count]


def two_digits() -> tuple[Tensor, Tensor]:
    """Zeros and ones."""
    x, y = images()
    return x[y < 2][:60].flatten(1), one_hot(y[y < 2][:60], 2).double()


class Poisson(nn.Module):
    """u″ at points between -a and a, for u = (a² - x²) N(x): zero at the ends, N one hidden layer of tanh.

    Value, first and second derivative of N in x go forward together.
    """

    def __init__(self, width: int, end: float = 6.0) -> None:
        super().__init__()
        self.first, self.last, self.end = nn.Linear(1, width), nn.Linear(width, 1), end

    def forward(self, x: Tensor) -> Tensor:
        inner, speed = self.first(x), torch.ones_like(x) @ self.first.weight.mT
        value = torch.tanh(inner)
        steep = 1 - value * value
        slope, bend = steep * speed, -2 * value * steep * speed * speed
        outer = self.last.weight.mT
        result: Tensor = (self.end**2 - x * x) * (bend @ outer) - 4 * x * (slope @ outer) - 2 * self.last(value)
        return result


def poisson(count: int, end: float = 6.0) -> tuple[Tensor, Tensor]:
    """Points between the ends, and the second derivative of sin(πx/a) there."""
    x = torch.linspace(-end, end, count + 2, dtype=torch.float64)[1:-1, None]
    return x, -((torch.pi / end) ** 2) * torch.sin(torch.pi * x / end)


def _mlp(*sizes: int, activation: str = "tanh") -> Callable[[], nn.Module]:
    return lambda: perceptron(*sizes, activation=activation)[1:]


PROBLEMS = (
    Problem("digits, tanh 64-64-1, 20", _mlp(64, 64, 1), partial(digits, 20)),
    Problem("digits, tanh 64-64-64-1, 30", _mlp(64, 64, 64, 1), partial(digits, 30)),
    Problem("digits, soft-plus 64-128-1, 50", _mlp(64, 128, 1, activation="soft-plus"), partial(digits, 50)),
    Problem("digits, ReLU 64-256-1, 20", _mlp(64, 256, 1, activation="ReLU"), partial(digits, 20)),
    Problem("digits, ReLU 64-512-1, 50", _mlp(64, 512, 1, activation="ReLU"), partial(digits, 50)),
    Problem("wine, GELU 13-128-3, 40 × 3", _mlp(13, 128, 3, activation="GELU"), partial(table, "wine", 40)),
    Problem("diabetes, tanh 10-256-1, 100", _mlp(10, 256, 1), partial(table, "diabetes", 100)),
    Problem("Poisson equation u″ = f, tanh 1-128-1, 12", partial(Poisson, 128), partial(poisson, 12)),
    Problem("digits, small CNN, tanh, 12", small_convolution, partial(digits, 12)),
    Problem("wine, tanh 13-6-3, cross-entropy, ridge 0.03", _mlp(13, 6, 3), partial(table, "wine", 60), 0.03),
    Problem("digits 0 and 1, tanh 64-4-2, cross-entropy, ridge 0.03", _mlp(64, 4, 2), two_digits, 0.03),
    Problem(
        "digits 0 and 1, small CNN, cross-entropy, ridge 0.01", partial(small_convolution, 2), two_digits, 0.01
    ),
    Problem(
        "digits 0 and 1, small CNN, cross-entropy, ridge 0.001", partial(small_convolution, 2), two_digits, 1e-3
    ),
    Problem("digits, tanh 64-256-10, 100 × 10", _mlp(64, 256, 10), partial(digits, 100, classes=True)),
)


@benchmark("convergence", "convergence", "problem, samples | method | proved after | residual | missing before | "
           "distance | steps to 1e-12")  # fmt: skip
def convergence() -> Iterator[Case]:
    """After how many steps each method is proved to converge."""
    for problem in PROBLEMS:
        for method in problem.methods:
            yield f"{problem.name}, {NAMES[method]}", partial(_when, problem, method)


def _when(problem: Problem, method: Any) -> list[str]:
    torch.manual_seed(0)
    model = problem.make().double()
    x, y = problem.data()
    ridge = sf.Ridge(problem.ridge) if problem.ridge else None
    objective = sf.CrossEntropy(y) if problem.ridge else sf.Square(y)
    missing = ""
    for steps in range(MOST_STEPS + 1):
        verdict = sf.convergence(model, x, objective, ridge, method)
        if verdict.proved:
            residual, count = f"{verdict.hypotheses[0].value:.1e}", f"{verdict.iterations(1e-12):,}"
            return [problem.name, NAMES[method], str(steps), residual, missing, f"{verdict.distance:.1e}", count]
        missing = f"{verdict.missing:.2g}"
        (_newton if problem.ridge else _gauss_newton)(model, x, y, problem.ridge)
    return [problem.name, NAMES[method], "not proved", "", missing, "", ""]


def _gauss_newton(model: nn.Module, x: Tensor, y: Tensor, ridge: float) -> None:
    """A step by the Gram matrix of the Jacobian."""
    named = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (sample[None],))[0]
        return result

    parts = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(named, x)
    jacobian = torch.cat([part.flatten(0, 1).flatten(1) for part in parts.values()], 1)
    residual, gram = (model(x) - y).detach().reshape(-1), jacobian @ jacobian.mT
    gram.diagonal().add_(1e-13 * gram.diagonal().mean())
    _halved(model, -(jacobian.mT @ torch.linalg.solve(gram, residual)), lambda: (model(x) - y).norm())


def _newton(model: nn.Module, x: Tensor, y: Tensor, ridge: float) -> None:
    """A Newton step with the absolute values of the eigenvalues."""
    named = dict(model.named_parameters())
    loss, penalty = sf.CrossEntropy(y), sf.Ridge(ridge)

    def value(*parameters: Tensor) -> Tensor:
        given = dict(zip(named, parameters, strict=True))
        return loss(torch.func.functional_call(model, given, (x,))) + penalty(given)

    start = tuple(p.detach().clone().requires_grad_() for p in named.values())
    slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value(*start), start)])
    blocks = torch.autograd.functional.hessian(value, start)
    rows = [torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(start, blocks, strict=True)]
    values, vectors = torch.linalg.eigh(torch.cat(rows))
    step = -vectors @ ((vectors.mT @ slope) / values.abs().clamp(min=1e-4))
    _halved(model, step, lambda: value(*model.parameters()))


def _halved(model: nn.Module, step: Tensor, value: Callable[[], Tensor]) -> None:
    """The step, halved until the value is smaller."""
    before, first = nn.utils.parameters_to_vector(model.parameters()).detach(), float(value().detach())
    for k in range(12):
        nn.utils.vector_to_parameters(before + step / 2**k, model.parameters())
        if float(value().detach()) < first:
            return


@benchmark("first-step", "convergence", "samples | Gauss-Newton | h | gradient descent | 1 - rate")
def first_step() -> Iterator[Case]:
    """The smallest power of two W for which zero loss of tanh 64-W-1 is proved before the first step."""
    yield from ((str(samples), partial(_first, samples)) for samples in (5, 10, 20))


def _first(samples: int) -> list[str]:
    row, (x, y) = [str(samples)], digits(samples)
    for method in ("gauss_newton", "gradient"):
        cells = [f"> {WIDTHS[-1]:,}", ""]
        for width in WIDTHS:
            torch.manual_seed(0)
            verdict = sf.convergence(_mlp(64, width, 1)().double(), x, sf.Square(y), method=method)  # type: ignore[arg-type]
            if verdict.proved:
                size = f"{getattr(verdict.statement, 'h', 0.0):.2f}" if method == "gauss_newton" else (
                    f"{1 - (verdict.rate or 1.0):.1e}"
                )  # fmt: skip
                cells = [f"**{width:,}**", size]
                break
        row += cells
    return row


@benchmark("sizes", "convergence", "rows | parameters | σ | processor seconds | memory, GB")
def sizes() -> Iterator[Case]:
    """A verified singular value of ten rows per sample and nearly a million parameters."""
    yield from ((str(samples), partial(_large, samples)) for samples in (200,))


def _large(samples: int) -> list[str]:
    """With the memory of this process, which is larger if it has measured something else before."""
    torch.manual_seed(0)
    model = _mlp(64, 1000, 900, 10)().double()
    (x, y), found = digits(samples, classes=True), []
    taken = seconds(lambda: found.append(sf.convergence(model, x, sf.Square(y))))
    (sigma,) = (
        hypothesis.bound.removeprefix("≥ ") for hypothesis in found[0].hypotheses if hypothesis.symbol == "σ"
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    count = sum(p.numel() for p in model.parameters())
    return [f"{10 * samples:,}", f"{count:,}", sigma, f"{taken:.0f}", f"{memory:.1f}"]
