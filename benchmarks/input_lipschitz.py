"""Lipschitz constants in the input: surefoot, the product of norms, and eclipse-nn, in one run.

Fully connected networks with rectifiers: ten with random weights, five trained on scikit-learn's digits, and the
two of the LipSDP repository if a folder with its MATLAB files is given. All slopes between 0 and 1 are reachable:
the domain is a ball of radius 10⁶. eclipse-nn states what floating-point arithmetic and a solver return;
surefoot's number is proved. Times are processor time, one thread, with the capture of the model and without the
imports.

eclipse-nn 0.1.7 asks for the solver SCS with a tolerance of 1e-6 and then refuses what is off by more than 1e-8;
as shipped its ECLipsE falls back to ECLipsE-Fast on every network here. Its own advice is an interior-point
solver, and with Clarabel it mostly works: that is what stands in the table, or that it refuses this solution too.
It takes a minute and more for layers wider than 40, where it is not run. With one hidden layer it solves the same
problem as surefoot, and the numbers agree.

``python -m benchmarks.input_lipschitz [--data FOLDER] [--write docs/lipschitz.md]`` prints the table, or writes
the page; eclipse-nn, cvxpy and Clarabel have to be importable.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import surefoot as sf

RANDOM = (
    (2, 10, 30, 20, 2), (10, 40, 40, 10), (20, 60, 20), (30, *[30] * 5, 5), (50, 50, 50, 50, 10),
    (5, *[20] * 10, 5), (64, 100, 10), (100, 64, 32, 16, 8), (16, *[48] * 6, 4), (8, *[16] * 20, 2),
)  # fmt: skip
TRAINED = ((64, 32, 10), (64, 64, 10), (64, 32, 32, 10), (64, 48, 48, 48, 10), (64, *[24] * 6, 10))
WIDEST = 40  # hidden layers for which ECLipsE is run
HEAD = """# Lipschitz constants in the input

How much larger a difference of inputs may come out of a network, by
`sf.certify(model, x, wrt="input", domain=sf.ProductBall(1e6))`. surefoot's numbers are proved, round-off included;
those of [eclipse-nn](https://pypi.org/project/eclipse-nn/) are what floating-point arithmetic and a solver return.
Fully connected networks with rectifiers; seconds of processor time on one thread, with the capture of the model.
Written by `python -m benchmarks.input_lipschitz --data FOLDER --write docs/lipschitz.md`.

ECLipsE is run with Clarabel in place of the solver that eclipse-nn 0.1.7 asks for: with that one it refuses its
own solutions on all of these networks and returns the number of ECLipsE-Fast. Where it refuses that of Clarabel
too, the table says so. With Clarabel it takes a minute and more for layers wider than 40, where it is not run.

| network | layers | product of norms | ECLipsE-Fast | ECLipsE | surefoot | seconds: Fast | ECLipsE | surefoot |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
With one hidden layer ECLipsE solves the same problem as surefoot, and the two agree; with more it chooses
multipliers layer by layer, and surefoot all at once.

Up to 384 entries the multipliers of all neurons are sought at once (LipSDP-Neuron), until the square of the
constant is within a thousandth of the smallest of its kind, or 40 steps are made; longer networks are cut where
one tensor alone is alive (`surefoot.norms.multipliers`, `surefoot.calculus.increments`).
Convolutional and residual networks, normalisation with fixed statistics and averages are read in the same way; on
smaller balls the slopes that are reachable there count.
"""


@dataclass(frozen=True)
class Row:
    """What each method says of one network: constants and seconds, in the order of the table."""

    title: str
    sizes: tuple[int, ...]
    constants: tuple[float, ...]
    seconds: tuple[float, ...]

    def __str__(self) -> str:
        words = {"nan": "not run", "inf": "refused"}
        product, *others = (words.get(text, text) for text in (f"{value:.5g}" for value in self.constants))
        cells = [self.title, "-".join(map(str, self.sizes)), product, *others[:-1], f"**{others[-1]}**"]
        return (
            "| " + " | ".join([*cells, *("–" if value == 0 else f"{value:.2f}" for value in self.seconds)]) + " |"
        )


def perceptron(sizes: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with rectifiers between them, in double precision."""
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).double()


def random_network(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """With normal weights of variance 2 / fan-in."""
    torch.manual_seed(seed)
    model = perceptron(sizes)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def trained_network(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """200 steps of Adam on all digits."""
    digits = import_module("sklearn.datasets").load_digits()
    x, y = torch.from_numpy(digits.data / 16.0), torch.from_numpy(digits.target)
    torch.manual_seed(seed)
    model = perceptron(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def published(folder: Path) -> Iterator[tuple[str, nn.Sequential]]:
    """The networks of the LipSDP repository."""
    for name in ("random", "mnist"):
        stored = import_module("scipy.io").loadmat(str(folder / f"{name}_weights.mat"))["weights"][0]
        weights = [torch.as_tensor(weight, dtype=torch.float64) for weight in stored]
        model = perceptron((weights[0].shape[1], *map(len, weights)))
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.copy_(weight)
        yield f"LipSDP's {name}", model


def networks(folder: Path | None) -> Iterator[tuple[str, nn.Sequential]]:
    """All of them, with their titles."""
    if folder is not None:
        yield from published(folder)
    for seed, sizes in enumerate(RANDOM):
        yield f"random {seed}", random_network(sizes, seed)
    for seed, sizes in enumerate(TRAINED):
        yield f"digits {seed}", trained_network(sizes, seed)


def certified(model: nn.Sequential) -> float:
    """By surefoot, at all inputs."""
    x = torch.zeros(1, model[0].in_features, dtype=torch.float64)
    return float(sf.certify(model, x, wrt="input", domain=sf.ProductBall(1e6)).lipschitz)


def timed(method: Callable[[], float]) -> tuple[float, float]:
    """What a method returns and the processor time it takes."""
    start = time.process_time()
    value = float(method())
    return value, time.process_time() - start


def eclipse(weights: list[torch.Tensor]) -> float:
    """ECLipsE with an interior-point solver; infinite if it refuses what that returns."""
    cvxpy, module = import_module("cvxpy"), import_module("eclipse_nn.eclipsE")
    shipped, slopes = cvxpy.Problem.solve, len(weights) - 1
    cvxpy.Problem.solve = lambda problem, **_: shipped(problem, solver=cvxpy.CLARABEL)
    try:
        value, refused = module.ECLipsE(weights, [0.0] * slopes, [1.0] * slopes)
    finally:
        cvxpy.Problem.solve = shipped
    return math.inf if refused else float(value)


def lipsdp(weights: list[torch.Tensor]) -> float:
    """LipSDP-Neuron (Fazlyab et al. 2019, Theorem 2), as a semidefinite program for cvxpy and Clarabel.

    With slopes in [0, 1], A = [blkdiag(W_0, …, W_{l-1}) 0], B = [0 I] and T diagonal, T ≥ 0: the smallest ρ with
    AᵀTB + BᵀTA − 2BᵀTB + diag(−ρI, 0, …, W_lᵀW_l) ⪯ 0 is the square of the constant.
    """
    cvxpy, numpy = import_module("cvxpy"), import_module("numpy")
    *hidden, last = (weight.numpy() for weight in weights)
    first, neurons = hidden[0].shape[1], sum(len(weight) for weight in hidden)
    a, b = numpy.zeros((neurons, first + neurons)), numpy.zeros((neurons, first + neurons))
    row = column = 0
    for weight in hidden:
        a[row : row + len(weight), column : column + weight.shape[1]] = weight
        row, column = row + len(weight), column + weight.shape[1]
    b[:, first:] = numpy.eye(neurons)
    square, multipliers = cvxpy.Variable(nonneg=True), cvxpy.Variable(neurons, nonneg=True)
    ends, inputs = numpy.zeros((first + neurons,) * 2), numpy.zeros((first + neurons,) * 2)
    ends[-last.shape[1] :, -last.shape[1] :], inputs[:first, :first] = last.T @ last, numpy.eye(first)
    cross = a.T @ cvxpy.diag(multipliers) @ b
    matrix = cross + cross.T - 2 * b.T @ cvxpy.diag(multipliers) @ b + ends - square * inputs
    problem = cvxpy.Problem(cvxpy.Minimize(square), [(matrix + matrix.T) / 2 << 0])
    problem.solve(solver=cvxpy.CLARABEL)
    return math.sqrt(float(square.value))


def rows(folder: Path | None = None) -> Iterator[Row]:
    """One row for each network."""
    fast = import_module("eclipse_nn.eclipsE_fast").ECLipsE_Fast
    for once in (certified, lambda model: eclipse([layer.weight.detach() for layer in (model[0], model[2])])):
        once(random_network((2, 2, 2), 0))  # what is done once in a process
    for title, model in networks(folder):
        weights = [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]
        slopes = len(weights) - 1
        product = math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)
        found = [
            timed(lambda w=weights, n=slopes: fast(w, [0.0] * n, [1.0] * n)),
            timed(lambda w=weights: eclipse(w)) if max(map(len, weights[:-1])) <= WIDEST else (math.nan, 0.0),
            timed(lambda m=model: certified(m)),
        ]
        constants, seconds = zip(*found, strict=True)
        yield Row(title, (weights[0].shape[1], *map(len, weights)), (product, *constants), seconds)


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with the MATLAB files of the LipSDP repository")
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for row in rows(options.data):
        print(row, flush=True)
        lines.append(str(row))
    if options.write is not None:
        options.write.write_text(HEAD + "\n".join(lines) + "\n" + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()
