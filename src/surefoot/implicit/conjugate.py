r"""Conjugate gradients: :math:`(\nabla^2_{\beta\beta}\zeta)^{-1}v` from products with the Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.implicit.errors import not_convex, refuse_nan
from surefoot.implicit.problem import Problem, Tensors


def inverse_product(problem: Problem, beta: Tensor, tensors: Tensors, right: Tensor) -> Tensor:
    """The inverse Hessians at some rows times vectors, to nearly the precision of the element type.

    Args:
        problem: the inner problem.
        beta: where, rows × size.
        tensors: all others.
        right: rows × size, or any number of such matrices stacked in front.

    Raises:
        ImplicitError: if a Hessian has a direction of negative or no curvature.
    """

    def product(direction: Tensor) -> Tensor:
        return problem.product(beta, tensors, direction)

    multiply = torch.vmap(product) if right.dim() > beta.dim() else product
    precision = 4 * torch.finfo(right.dtype).eps
    found = torch.zeros_like(right)
    rest = right.clone()
    direction, energy = rest.clone(), _dot(rest, rest)
    goal = precision**2 * energy
    for iteration in range(10 * problem.size + 10):
        active = energy > goal
        if not bool(active.any()):
            break
        curved = multiply(direction)
        refuse_nan(curved.reshape(-1, problem.size), iteration)
        bend = _dot(direction, curved)
        if bool((active & (bend <= 0)).any()):
            place = (active & (bend <= 0)).nonzero()[0]
            size = _dot(direction, direction)[tuple(place)]
            value = float(bend[tuple(place)] / size)
            raise not_convex(value, int(place[-1]), iteration, float(_dot(right, right).max().sqrt()))
        step = torch.where(active, energy / torch.where(active, bend, 1.0), 0.0)
        found = found + step[..., None] * direction
        rest = rest - step[..., None] * curved
        after = _dot(rest, rest)
        ratio = torch.where(active, after / torch.where(active, energy, 1.0), 0.0)
        direction = rest + ratio[..., None] * direction
        energy = torch.where(active, after, energy)
    return found


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(dim=-1)
