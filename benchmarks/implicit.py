"""A layer that minimises: its backward pass against its forward solve.

The inner problem is :class:`surefoot.implicit.Energy`, which is not quadratic; Newton's method solves it to 1e-12.
The backward pass goes through the recorded corrections to the input and all parameters: two for exact second
derivatives, which is the default, or one for the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.timing import Measurement, compare
from surefoot.implicit import ArgMin, Energy
from surefoot.implicit.solvers import solved

TARGET = 2.0


def run() -> list[Measurement]:
    """Small and larger minimisers, by Cholesky factors and by conjugate gradients."""
    torch.manual_seed(0)
    return [
        _backward("64 samples, β of 10", 64, 10, "cholesky", 2, pairs=21, calls=3),
        _backward("64 samples, β of 10, first derivatives only", 64, 10, "cholesky", 1, pairs=21, calls=3),
        _backward("32 samples, β of 64", 32, 64, "cholesky", 2, pairs=11, calls=1),
        _backward("64 samples, β of 10, conjugate gradients", 64, 10, "cg", 2, pairs=11, calls=1),
    ]


def _backward(name: str, samples: int, size: int, linear: str, order: int, pairs: int, calls: int) -> Measurement:
    layer = ArgMin(Energy(32, size), size, linear=linear, order=order).double()  # type: ignore[arg-type]
    x = torch.randn(samples, 32, dtype=torch.float64, requires_grad=True)
    result = layer(x)
    slope = torch.randn_like(result)
    variables = [x, *layer.parameters()]
    tensors = tuple(value.detach() for value in variables)
    problem = layer.problem(len(tensors))

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, variables, slope, retain_graph=True)

    return compare(
        f"ArgMin, {name}: backward pass",
        backward,
        "forward solve",
        lambda: solved(problem, tensors),
        target=TARGET,
        pairs=pairs,
        calls=calls,
    )
