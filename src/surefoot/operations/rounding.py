"""How far the computed value of a scalar function may be from the exact one."""

from __future__ import annotations

from torch import Tensor

from surefoot.scalar import Rounded, ScalarFunction, rounded_derivatives


def evaluation_error(function: ScalarFunction, x: Tensor) -> Tensor:
    """A bound on the error of ``function(x)`` in double precision, entry by entry, the entries of x being exact.

    The exact value is within the error of one that is computed with bounds (:mod:`surefoot.scalar.rounded`), and
    how far the two computed ones are apart is known. It is infinite where nothing is known.

    >>> import torch
    >>> x = torch.tensor([1e-4], dtype=torch.float64)
    >>> cancelling = ScalarFunction.named("tanhshrink")
    >>> bool(evaluation_error(cancelling, x) > 1e-20), float(cancelling(x)) < 1e-12
    (True, True)
    """
    near = rounded_derivatives(function, Rounded.exact(x), 0)[0]
    return ((function(x) - near.value).abs() + near.error) * (1 + 2.0**-50)
