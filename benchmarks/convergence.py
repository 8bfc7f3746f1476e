"""When convergence is proved: real networks and data, and networks that have not made a step.

From PyTorch's initial weights (seed 0, double precision) plain Gauss-Newton steps are taken, halved until they
descend; before each the theorems are asked. Newton steps for objectives with a ridge.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.continued import largest_quotient
from surefoot.data import load
from surefoot.theorems import FastHeavyBall, Interpolation

_MOST_STEPS = 25
WIDTHS = tuple(2**k for k in range(6, 20))
SAMPLES = (5, 10, 20)


@dataclass(frozen=True)
class Problem:
    """A network, its data and its objective."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    ridge: float = 0.0

    @property
    def classifies(self) -> bool:
        """Whether it is a cross-entropy with a ridge."""
        return self.ridge > 0


@dataclass(frozen=True)
class Row:
    """When it was proved.

    Attributes:
        problem: the name.
        method: whose convergence.
        steps: taken before; ``None`` if it was not proved.
        residual: of the outputs there, or the gradient.
        before: the factor that was missing one step earlier.
        distance: how far the limit may be.
        iterations: steps to bring the objective within 1e-12 of its minimum.
        kept: the next steps in 200-bit arithmetic over what is promised of them, at most; not a number if they
            were not taken.
    """

    problem: str
    method: str
    steps: int | None
    residual: float
    before: float
    distance: float
    iterations: int
    kept: float


def perceptron(*sizes: int, activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers with a function between them."""
    layers: list[nn.Module] = []
    for k in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[k], sizes[k + 1]), activation()]
    return nn.Sequential(*layers[:-1])


def _layers(activation: type[nn.Module], *sizes: int) -> Callable[[], nn.Module]:
    return partial(perceptron, *sizes, activation=activation)


def small_convolution(outputs: int = 1) -> nn.Sequential:
    """Four filters and a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, outputs)
    )


def digits(count: int, classes: bool = False) -> tuple[Tensor, Tensor]:
    """Digits with their numbers over 9, or as unit vectors."""
    found = load("digits").flat()
    assert found.y is not None
    x, y = found.x[:count].double(), found.y[:count]
    return x, nn.functional.one_hot(y, 10).double() if classes else y[:, None].double() / 9


def from_sklearn(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Standardised inputs, every third sample; classes as unit vectors, numbers standardised."""
    x, y = getattr(import_module("sklearn.datasets"), f"load_{name}")(return_X_y=True)
    inputs, targets = torch.as_tensor(x).double(), torch.as_tensor(y)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    if targets.is_floating_point():
        targets = ((targets - targets.mean()) / targets.std())[:, None].double()
    else:
        targets = nn.functional.one_hot(targets.long()).double()
    step = max(1, len(inputs) // count)
    return inputs[::step][:count], targets[::step][:count]


class Poisson(nn.Module):
    """u″ at points between -a and a, for u = (a² - x²) N(x): zero at the ends, N one hidden layer of tanh.

    Value, first and second derivative of N in x go forward together.
    """

    def __init__(self, width: int, end: float = 6.0) -> None:
        super().__init__()
        self.first, self.last, self.end = nn.Linear(1, width), nn.Linear(width, 1), end

    def forward(self, x: Tensor) -> Tensor:
        """The second derivative of u."""
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


def two_digits() -> tuple[Tensor, Tensor]:
    """Zeros and ones."""
    found = load("digits").flat()
    assert found.y is not None
    kept = found.y < 2
    return found.x[kept][:60].double(), nn.functional.one_hot(found.y[kept][:60], 2).double()


PROBLEMS = (
    Problem("digits, tanh 64-64-1, 20", _layers(nn.Tanh, 64, 64, 1), partial(digits, 20)),
    Problem("digits, tanh 64-64-64-1, 30", _layers(nn.Tanh, 64, 64, 64, 1), partial(digits, 30)),
    Problem("digits, soft-plus 64-128-1, 50", _layers(nn.Softplus, 64, 128, 1), partial(digits, 50)),
    Problem("digits, ReLU 64-256-1, 20", _layers(nn.ReLU, 64, 256, 1), partial(digits, 20)),
    Problem("digits, ReLU 64-512-1, 50", _layers(nn.ReLU, 64, 512, 1), partial(digits, 50)),
    Problem("wine, GELU 13-128-3, 40 × 3", _layers(nn.GELU, 13, 128, 3), partial(from_sklearn, "wine", 40)),
    Problem("diabetes, tanh 10-256-1, 100", _layers(nn.Tanh, 10, 256, 1), partial(from_sklearn, "diabetes", 100)),
    Problem("Poisson equation u″ = f, tanh 1-128-1, 12", partial(Poisson, 128), partial(poisson, 12)),
    Problem("digits, small CNN, tanh, 12", small_convolution, partial(digits, 12)),
    Problem(
        "wine, tanh 13-6-3, cross-entropy, ridge 0.03",
        _layers(nn.Tanh, 13, 6, 3),
        partial(from_sklearn, "wine", 60),
        0.03,
    ),
    Problem(
        "digits 0 and 1, tanh 64-4-2, cross-entropy, ridge 0.03", _layers(nn.Tanh, 64, 4, 2), two_digits, 0.03
    ),
    Problem(
        "digits 0 and 1, small CNN, cross-entropy, ridge 0.01", partial(small_convolution, 2), two_digits, 0.01
    ),
    Problem(
        "digits 0 and 1, small CNN, cross-entropy, ridge 0.001", partial(small_convolution, 2), two_digits, 0.001
    ),
    Problem("digits, tanh 64-256-10, 100 × 10", _layers(nn.Tanh, 64, 256, 10), partial(digits, 100, classes=True)),
)


def run(problem: Problem, methods: tuple[str, ...]) -> Iterator[Row]:
    """The row of each method, once it is proved."""
    torch.manual_seed(0)
    model = problem.make().double()
    x, y = problem.data()
    ridge = sf.Ridge(problem.ridge) if problem.classifies else None
    objective = sf.CrossEntropy(y) if problem.classifies else sf.Square(y)
    missing = dict.fromkeys(methods, float("inf"))

    def whole() -> Tensor:
        squares = sum((p * p).sum() for p in model.parameters())
        return objective(model(x)) + problem.ridge / 2 * squares if problem.classifies else objective(model(x))

    for steps in range(_MOST_STEPS + 1):
        for method in list(missing):
            verdict = sf.convergence(model, x, objective, ridge, method, "low")  # type: ignore[arg-type]
            if not verdict.proved and verdict.missing < 100:
                verdict = sf.convergence(model, x, objective, ridge, method)  # type: ignore[arg-type]
            if not verdict.proved and steps < _MOST_STEPS:
                missing[method] = verdict.missing
                continue
            yield Row(
                problem.name,
                method,
                steps if verdict.proved else None,
                verdict.hypotheses[0].value if verdict.hypotheses else float("nan"),
                missing.pop(method),
                verdict.distance or float("inf"),
                verdict.iterations(1e-12) if verdict.proved else 0,
                largest_quotient(model, x, y, verdict, whole) if verdict.proved else float("nan"),
            )
        if not missing:
            return
        (newton if problem.classifies else gauss_newton)(model, x, y, problem.ridge)


def gauss_newton(model: nn.Module, x: Tensor, y: Tensor, ridge: float = 0.0) -> None:
    """A step by the Gram matrix of the Jacobian, halved until the residual is smaller."""
    jacobian = _jacobian(model, x)
    residual = (model(x) - y).detach().reshape(-1)
    gram = jacobian @ jacobian.mT
    gram.diagonal().add_(1e-13 * gram.diagonal().mean())
    _halved(model, -(jacobian.mT @ torch.linalg.solve(gram, residual)), lambda: (model(x) - y).norm())


def newton(model: nn.Module, x: Tensor, y: Tensor, ridge: float) -> None:
    """A Newton step with the absolute values of the eigenvalues, halved until the objective is smaller."""
    named = dict(model.named_parameters())
    loss, penalty = sf.CrossEntropy(y), sf.Ridge(ridge)

    def value(*parameters: Tensor) -> Tensor:
        given = dict(zip(named, parameters, strict=True))
        return loss(torch.func.functional_call(model, given, (x,))) + penalty(given)

    here = tuple(p.detach().clone().requires_grad_() for p in named.values())
    slope = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value(*here), here)])
    blocks = torch.autograd.functional.hessian(value, here)
    rows = [torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(here, blocks, strict=True)]
    values, vectors = torch.linalg.eigh(torch.cat(rows))
    step = -vectors @ ((vectors.mT @ slope) / values.abs().clamp(min=1e-4))
    _halved(model, step, lambda: value(*model.parameters()))


def _jacobian(model: nn.Module, x: Tensor) -> Tensor:
    named = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (sample[None],))[0]
        return result

    parts = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(named, x)
    return torch.cat([part.flatten(0, 1).flatten(1) for part in parts.values()], 1)


def _halved(model: nn.Module, step: Tensor, value: Callable[[], Tensor]) -> None:
    before, first = nn.utils.parameters_to_vector(model.parameters()).detach(), float(value().detach())
    for k in range(12):
        nn.utils.vector_to_parameters(before + step / 2**k, model.parameters())
        if float(value().detach()) < first:
            return


def gradient_steps(problem: Problem, most: int = 8) -> tuple[int, float, list[int | None]]:
    """After the first Gauss-Newton step from which momentum is proved to be fast: how many there were, the
    residual, and the steps to a millionth of the loss of gradient descent, with step sizes per block, with
    momentum, and on batches of five samples, with a probability of 95 %.
    """
    torch.manual_seed(0)
    model = problem.make().double()
    x, y = problem.data()
    objective = sf.Square(y)
    taken, fast = 0, sf.convergence(model, x, objective, method="momentum", effort="low")
    while taken < most and not (fast.proved and isinstance(fast.statement, FastHeavyBall)):
        gauss_newton(model, x, y)
        taken, fast = taken + 1, sf.convergence(model, x, objective, method="momentum", effort="low")
    verdicts = (
        sf.convergence(model, x, objective, method="gradient"),
        sf.convergence(model, x, objective, method="gradient", per_block=True),
        fast,
        sf.convergence(model, x, objective, method="stochastic", batch_size=5),
    )
    loss = fast.loss or 1.0
    counts = [verdict.iterations(1e-6 * loss) if verdict.proved else None for verdict in verdicts]
    return taken, fast.hypotheses[0].value, counts


def at_the_start(method: str, samples: int, most: int) -> tuple[int, float] | None:
    """The smallest power of two W for which zero loss of tanh 64-W-1 is proved before the first step."""
    x, y = digits(samples)
    for width in WIDTHS:
        if width > most:
            break
        torch.manual_seed(0)
        model = perceptron(64, width, 1, activation=nn.Tanh).double()
        verdict = sf.convergence(model, x, sf.Square(y), method=method)  # type: ignore[arg-type]
        if verdict.proved:
            statement = verdict.statement
            return width, statement.h if isinstance(statement, Interpolation) else (verdict.rate or 1.0)
    return None


def large(samples: int) -> tuple[float, float, float]:
    """A verified singular value of ten rows per sample and nearly a million parameters, with the processor time of
    a look at Gauss-Newton and the memory of the process in gigabytes.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = perceptron(64, 1000, 900, 10, activation=nn.Tanh).double()
    x, y = digits(samples, classes=True)
    began = time.process_time()
    verdict = sf.convergence(model, x, sf.Square(y), effort="low")
    seconds = time.process_time() - began
    (sigma,) = (hypothesis.value for hypothesis in verdict.hypotheses if hypothesis.symbol == "σ")
    return sigma, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
