"""Lipschitz constants in the input: surefoot, the product of norms, and eclipse-nn, in one run.

Fully connected networks with rectifiers: ten with random weights, five trained on scikit-learn's digits, and the
two of the LipSDP repository if their MATLAB files are in ``build/lipsdp``. All slopes between 0 and 1 are
reachable: the domain is a ball of radius 10⁶. eclipse-nn states what floating-point arithmetic and a solver
return; surefoot's number is proved. Times are processor time on one thread, with the capture of the model and
without the imports.

eclipse-nn 0.1.7 asks for the solver SCS with a tolerance of 1e-6 and then refuses what is off by more than 1e-8;
as shipped its ECLipsE falls back to ECLipsE-Fast on every network of the table. Its own advice is an
interior-point solver, and with Clarabel it mostly works: that is what stands in the table, or that it refuses this
solution too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.networks import images
from benchmarks.peers import package
from benchmarks.runner import ROOT, Case, benchmark
from benchmarks.timing import seconds

RANDOM = (
    (2, 10, 30, 20, 2), (10, 40, 40, 10), (20, 60, 20), (30, *[30] * 5, 5), (50, 50, 50, 50, 10),
    (5, *[20] * 10, 5), (64, 100, 10), (100, 64, 32, 16, 8), (16, *[48] * 6, 4), (8, *[16] * 20, 2),
)  # fmt: skip
TRAINED = ((64, 32, 10), (64, 64, 10), (64, 32, 32, 10), (64, 48, 48, 48, 10), (64, *[24] * 6, 10))
WIDEST = 40  # hidden layers for which ECLipsE is run: it takes a minute and more for wider ones
PUBLISHED = ROOT / "build" / "lipsdp"


def perceptron(sizes: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with rectifiers between them, in double precision."""
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).double()


def random_network(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """With normal weights of variance 2 / fan-in."""
    torch.manual_seed(seed)
    model = perceptron(sizes)
    for weight in weights_of(model):
        nn.init.kaiming_normal_(weight, nonlinearity="relu")
    return model


def trained_network(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """200 steps of Adam on all digits."""
    x, y = images()
    torch.manual_seed(seed)
    model = perceptron(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.flatten(1)), y).backward()
        optimizer.step()
    return model


def published_network(name: str) -> nn.Sequential:
    """One of the LipSDP repository."""
    stored = import_module("scipy.io").loadmat(str(PUBLISHED / f"{name}_weights.mat"))["weights"][0]
    weights = [torch.as_tensor(weight, dtype=torch.float64) for weight in stored]
    model = perceptron((weights[0].shape[1], *map(len, weights)))
    for mine, weight in zip(weights_of(model), weights, strict=True):
        mine.copy_(weight)
    return model


def weights_of(model: nn.Sequential) -> list[Tensor]:
    """The matrices."""
    return [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]


@benchmark("lipschitz", "lipschitz", "network | layers | product of norms | ECLipsE-Fast | ECLipsE | surefoot | "
           "seconds: Fast | ECLipsE | surefoot")  # fmt: skip
def lipschitz() -> Iterator[Case]:
    """Constants and seconds of each method."""
    for name in ("random", "mnist") if PUBLISHED.is_dir() else ():
        yield f"LipSDP's {name}", partial(_row, f"LipSDP's {name}", partial(published_network, name))
    for seed, sizes in enumerate(RANDOM):
        yield f"random {seed}", partial(_row, f"random {seed}", partial(random_network, sizes, seed))
    for seed, sizes in enumerate(TRAINED):
        yield f"digits {seed}", partial(_row, f"digits {seed}", partial(trained_network, sizes, seed))


def _row(title: str, build: Callable[[], nn.Sequential]) -> list[str]:
    model = build()
    weights = weights_of(model)
    slopes, narrow = (
        ([0.0] * (len(weights) - 1), [1.0] * (len(weights) - 1)),
        max(map(len, weights[:-1])) <= WIDEST,
    )
    fast = package("eclipse_nn.eclipsE_fast")
    certified(random_network((2, 2, 2), 0))  # what is done once in a process
    methods: list[Callable[[], float] | None] = [
        (lambda: fast.ECLipsE_Fast(weights, *slopes)) if fast else None,
        (lambda: eclipse(weights)) if fast and narrow else None,
        lambda: certified(model),
    ]
    constants, times = [], []
    for method in methods:
        found: list[float] = []
        times.append(f"{seconds(lambda m=method, f=found: f.append(float(m()))):.2f}" if method else "–")  # type: ignore[misc]
        constants.append("not run" if not found else "refused" if math.isinf(found[0]) else f"{found[0]:.5g}")
    product = math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)
    layers = "-".join(map(str, (weights[0].shape[1], *map(len, weights))))
    return [title, layers, f"{product:.5g}", *constants[:-1], f"**{constants[-1]}**", *times]


def certified(model: nn.Sequential) -> float:
    """By surefoot, at all inputs."""
    x = torch.zeros(1, weights_of(model)[0].shape[1], dtype=torch.float64)
    return float(sf.certify(model, x, wrt="input", domain=sf.ProductBall(1e6)).lipschitz)


def eclipse(weights: list[Tensor]) -> float:
    """ECLipsE with an interior-point solver; infinite if it refuses what that returns."""
    cvxpy, module = package("cvxpy"), package("eclipse_nn.eclipsE")
    shipped, slopes = cvxpy.Problem.solve, len(weights) - 1
    cvxpy.Problem.solve = lambda problem, **_: shipped(problem, solver=cvxpy.CLARABEL)
    try:
        value, refused = module.ECLipsE(weights, [0.0] * slopes, [1.0] * slopes)
    finally:
        cvxpy.Problem.solve = shipped
    return math.inf if refused else float(value)


def lipsdp(weights: list[Tensor]) -> float:
    """LipSDP-Neuron (Fazlyab et al. 2019, Theorem 2), as a semidefinite program for cvxpy and Clarabel.

    With slopes in [0, 1], A = [blkdiag(W_0, …, W_{l-1}) 0], B = [0 I] and T diagonal, T ≥ 0: the smallest ρ with
    AᵀTB + BᵀTA − 2BᵀTB + diag(−ρI, 0, …, W_lᵀW_l) ⪯ 0 is the square of the constant.
    """
    cvxpy: Any = import_module("cvxpy")
    *hidden, last = (weight.numpy() for weight in weights)
    first, neurons = hidden[0].shape[1], sum(len(weight) for weight in hidden)
    size = first + neurons
    a, b = torch.zeros(neurons, size).double().numpy(), torch.zeros(neurons, size).double().numpy()
    a[:, : size - last.shape[1]] = torch.block_diag(*map(torch.from_numpy, hidden)).numpy()
    b[:, first:] = torch.eye(neurons).numpy()
    square, multipliers = cvxpy.Variable(nonneg=True), cvxpy.Variable(neurons, nonneg=True)
    ends, inputs = torch.zeros(size, size).double().numpy(), torch.zeros(size, size).double().numpy()
    ends[-last.shape[1] :, -last.shape[1] :], inputs[:first, :first] = last.T @ last, torch.eye(first).numpy()
    cross = a.T @ cvxpy.diag(multipliers) @ b
    matrix = cross + cross.T - 2 * b.T @ cvxpy.diag(multipliers) @ b + ends - square * inputs
    problem = cvxpy.Problem(cvxpy.Minimize(square), [(matrix + matrix.T) / 2 << 0])
    problem.solve(solver=cvxpy.CLARABEL)
    return math.sqrt(float(square.value))
