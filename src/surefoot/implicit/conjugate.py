r"""Conjugate gradients: :math:`(\nabla^2_{\beta\beta}\zeta)^{-1}v` from products with the Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.implicit.errors import not_convex, refuse_nan
from surefoot.implicit.problem import Problem, Tensors
from surefoot.linear_solve import Rows, conjugate_gradients


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
    space, tolerance = Rows(), 4 * torch.finfo(right.dtype).eps
    solution = conjugate_gradients(multiply, right, space=space, tolerance=tolerance, most=10 * problem.size + 10)
    if solution.direction is not None:
        refuse_nan(solution.curvature.reshape(-1, 1), solution.iterations - 1)
        size = space.dot(solution.direction, solution.direction)
        place = tuple(((solution.curvature <= 0) & (size > 0)).nonzero()[0])
        value, largest = float(solution.curvature[place] / size[place]), float(right.norm(dim=-1).max())
        raise not_convex(value, int(place[-1]), solution.iterations - 1, largest)
    return solution.x
