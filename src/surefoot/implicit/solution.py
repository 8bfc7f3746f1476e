"""A solved inner problem, and how far it may be from the exact solution."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Solution:
    r"""Minimisers as they were found, with what is proved about them (:mod:`surefoot.implicit.constants`).

    The bounds are one number per minimiser. They hold in real arithmetic for the residual as it was computed.

    Attributes:
        beta: the minimisers :math:`\hat\beta`, before any correction.
        residual: :math:`\|\nabla_\beta\zeta\|` at each.
        iterations: how many the solver made.
        error_bound: on :math:`\|\hat\beta - \beta^*\|`; ``None`` if no strong convexity was declared.
        gradient_error_bound: on the spectral norm of what is wrong with the derivative that the layer records, in
            the input of a sample and the parameters together; ``None`` if the constants are not known.
        status: what happened, in words.
    """

    beta: Tensor
    residual: Tensor
    iterations: int
    error_bound: Tensor | None
    gradient_error_bound: Tensor | None
    status: str
