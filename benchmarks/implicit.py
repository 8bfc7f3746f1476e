"""A layer that minimises: its backward pass against its forward solve.

The inner problem is Σ softplus(Aβ + x) + ‖β‖²/2, which is not quadratic; Newton's method solves it to 1e-12.
The backward pass goes through the recorded corrections to the input and all parameters: two for exact second
derivatives, which is the default, or one for the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Measurement, compare
from surefoot.implicit import ArgMin
from surefoot.implicit.solver import solved

TARGET = 2.0


def run() -> list[Measurement]:
    """Small and larger minimisers."""
    torch.manual_seed(0)
    return [
        _backward("64 samples, β of 10", 64, 10, 2, pairs=21, calls=3),
        _backward("64 samples, β of 10, first derivatives only", 64, 10, 1, pairs=21, calls=3),
        _backward("32 samples, β of 64", 32, 64, 2, pairs=11, calls=1),
    ]


class Energy(nn.Module):
    """The inner problem."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        """The energy of one sample."""
        return F.softplus(self.a @ beta + x).sum() + 0.5 * beta.square().sum()


def _backward(name: str, samples: int, size: int, order: int, pairs: int, calls: int) -> Measurement:
    layer = ArgMin(Energy(size), size, order=order).double()
    x = torch.randn(samples, size, dtype=torch.float64, requires_grad=True)
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
