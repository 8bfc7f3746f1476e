"""Jacobian and second derivative written out, for functions of a few dozen variables."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def jacobian(function: Function, point: Tensor) -> Tensor:
    """The matrix of first derivatives, one row per output."""
    return torch.autograd.functional.jacobian(function, point)


def jacobian_norm(function: Function, point: Tensor) -> float:
    """The spectral norm of that matrix, by singular values."""
    return float(torch.linalg.matrix_norm(jacobian(function, point), ord=2))


def second_derivative(function: Function, point: Tensor) -> Tensor:
    """The tensor of second derivatives: one symmetric matrix per output."""
    outputs = function(point).numel()
    matrices = [
        torch.autograd.functional.hessian(lambda u, k=k: function(u).reshape(-1)[k], point) for k in range(outputs)
    ]
    return torch.stack(matrices)


def tensor_norm(tensor: Tensor, starts: int = 20, iterations: int = 100) -> float:
    r"""sup |T[w, v, v]| over unit w, v for a stack of symmetric matrices.

    Exact for one output (the largest eigenvalue); otherwise the best of several alternating maximisations, each
    of which stops at a value that is attained.
    """
    if tensor.shape[0] == 1:
        return float(torch.linalg.eigvalsh(tensor[0]).abs().max())
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(starts, tensor.shape[0], dtype=tensor.dtype, generator=generator)
    best = 0.0
    for _ in range(iterations):
        w = w / w.norm(dim=1, keepdim=True).clamp_min(1e-300)
        values, vectors = torch.linalg.eigh(torch.einsum("sk,kij->sij", w, tensor))
        index = values.abs().argmax(dim=1)
        v = vectors.gather(2, index[:, None, None].expand(-1, tensor.shape[1], 1))[..., 0]
        found = float(values.abs().max())
        if found <= best * (1 + 1e-13):
            break
        best = found
        w = torch.einsum("kij,si,sj->sk", tensor, v, v)
    return best
