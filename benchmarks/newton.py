"""Newton steps by dynamic programming against the dense Hessian of all parameters and a dense solve.

Tanh networks of width 8 in double precision. The cost of dynamic programming is linear in the depth (Prop.
newton_step), that of the dense solve cubic; the exponent of the depth is a least-squares fit of logarithms.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import linear_regression, median, quantiles

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.timing import Measurement, compare, one_thread
from surefoot.oracles import newton

WIDTH, BATCH = 8, 16
DEPTHS = (4, 8, 16, 32, 64)
DEEPEST_DENSE = 32


def run() -> list[Callable[[], Measurement]]:
    """Against dense, the growth with the depth, the growth with the batch: to be called."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, when forward mode is first used
    return [*(partial(_against_dense, depth) for depth in DEPTHS if depth <= DEEPEST_DENSE), _growth, _batches]


def _against_dense(depth: int) -> Measurement:
    model, x, y, kappa = _problem(depth, BATCH)
    return compare(
        f"Newton step, {depth} layers of width {WIDTH}, batch {BATCH}: dynamic programming",
        _dynamic(model, x, y, kappa),
        "dense Hessian and solve",
        _dense(model, x, y, kappa),
        target=1.0,
        pairs=5 if depth == DEEPEST_DENSE else 11,
        warm_up=1,
    )


def _growth() -> Measurement:
    steps = [_dynamic(*_problem(depth, BATCH)) for depth in DEPTHS]
    with one_thread():
        rounds = [[_seconds(step) for step in steps] for _ in range(12)][2:]
    depths = [math.log(depth) for depth in DEPTHS]
    exponents = [linear_regression(depths, [math.log(s) for s in seconds]).slope for seconds in rounds]
    low, _, high = quantiles(exponents, n=4)
    return Measurement(
        f"Newton step, {DEPTHS[0]} to {DEPTHS[-1]} layers: exponent of the depth in the time",
        "1, a cost linear in the depth",
        median(exponents),
        low,
        high,
        median(seconds[0] for seconds in rounds),
        target=1.15,
    )


def _batches() -> Measurement:
    return compare(
        f"Newton step, 16 layers of width {WIDTH}: batch {4 * BATCH}",
        _dynamic(*_problem(16, 4 * BATCH)),
        f"batch {BATCH}",
        _dynamic(*_problem(16, BATCH)),
        target=6.0,
        pairs=15,
        calls=2,
    )


def _problem(depth: int, batch: int) -> tuple[nn.Sequential, Tensor, Tensor, float]:
    """A network, a batch, its targets, and a kappa that is feasible."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH)).double()
    x, y = torch.randn(2, batch, WIDTH, dtype=torch.float64)
    return model, x, y, newton(sf.Chain(model, x), sf.Square(y), kappa=1.0).kappa


def _dynamic(model: nn.Sequential, x: Tensor, y: Tensor, kappa: float) -> Callable[[], object]:
    chain, objective = sf.Chain(model, x), sf.Square(y)
    return lambda: newton(chain, objective, kappa=kappa, double=False)


def _dense(model: nn.Sequential, x: Tensor, y: Tensor, kappa: float) -> Callable[[], object]:
    parameters = {path: value.detach() for path, value in model.named_parameters()}
    sizes = [value.numel() for value in parameters.values()]
    objective = sf.Square(y)

    def value(u: Tensor) -> Tensor:
        parts = zip(parameters.items(), u.split(sizes), strict=True)
        return objective(torch.func.functional_call(model, {p: part.view_as(v) for (p, v), part in parts}, (x,)))

    def step() -> Tensor:
        u = torch.cat([value.flatten() for value in parameters.values()])
        hessian = torch.func.hessian(value)(u)
        hessian.diagonal().add_(kappa)
        return torch.cholesky_solve(-torch.func.grad(value)(u)[:, None], torch.linalg.cholesky(hessian))

    return step


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start
