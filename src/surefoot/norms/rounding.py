r"""What floating-point arithmetic may have lost, and exact scaling by powers of two.

The only facts about the machine that the norms of this folder rely on, with :math:`u` the unit round-off
(:math:`2^{-53}` for doubles, :math:`2^{-24}` for singles):

* an inner product of :math:`n` real terms, summed in any order, with or without fused operations, has an
  error of at most :math:`\gamma_n |x|^\top|y|`, :math:`\gamma_n = nu/(1-nu)` (N. J. Higham, *Accuracy and
  Stability of Numerical Algorithms*, 2nd ed., eq. 3.5); matrix products are made of such inner products
  (no Strassen-like algorithm, which the BLAS of PyTorch and NumPy are not);
* a square root is correctly rounded; sine and cosine are accurate to two units in the last place;
* what underflows is below :math:`2^{-1022}` (:math:`2^{-126}` for singles); matrices are scaled so that
  their squared norm is far above, and the loss disappears in the :math:`\gamma` of one extra term.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """The unit round-off of a real or complex floating-point type."""
    return torch.finfo(dtype).eps / 2


def gamma(count: int, dtype: torch.dtype = torch.float64) -> float:
    r""":math:`\gamma_n = nu/(1-nu)`, rounded upwards; infinite where the formula means nothing.

    >>> gamma(1) > 2.0**-53
    True
    """
    product = count * unit_roundoff(dtype)
    return product / (1 - product) * (1 + 2.0**-50) if product < 0.5 else math.inf


def product_error(inner: int, dtype: torch.dtype = torch.float64) -> float:
    r"""A number :math:`c` with :math:`|\mathrm{fl}(AB) - AB| \le c\,|A||B|`, entry by entry.

    Real matrices: :math:`\gamma_n` for the inner dimension :math:`n`. Complex matrices: the real and the
    imaginary part are real inner products of :math:`2n` terms, whose absolute values add up to at most
    :math:`|x|^\top|y|` since :math:`|a||c| + |b||d| \le |a+ib||c+id|`; so
    :math:`c = \sqrt2\,\gamma_{2n}`. A few more terms cover underflow and matrices that were rounded once
    when they were converted to ``dtype``.
    """
    if dtype.is_complex:
        return 1.4143 * gamma(2 * inner + 4, dtype)
    return gamma(inner + 4, dtype)


def up(value: float, operations: int = 4) -> float:
    """A non-negative number raised by more than the error of a few roundings (zero stays zero)."""
    raised = value * (1 + (operations + 1) * 2.0**-52)
    return math.nextafter(raised, math.inf) if 0 < raised < math.inf else raised


def exponent(value: float) -> int:
    """The integer e with ``2**(e-1) <= value < 2**e``, for a positive finite number."""
    return math.frexp(value)[1]


def scale(a: Tensor, power: int | np.ndarray) -> Tensor:
    r"""``a * 2**power``, exact up to underflow, for a tensor in double precision.

    In two steps, because the factor itself may be out of range. ``power`` may be an array that
    broadcasts against ``a``.
    """
    first = np.asarray(power) // 2
    for part in (first, np.asarray(power) - first):
        a = a * torch.from_numpy(np.asarray(np.ldexp(1.0, part))).to(a.device)
    return a


def unscale(value: float, power: int) -> float:
    """``value * 2**power`` rounded upwards: infinite on overflow, positive on underflow."""
    if value == 0 or math.isinf(value):
        return value
    try:
        result = math.ldexp(value, power)
    except OverflowError:
        return math.inf
    return math.nextafter(result, math.inf) if result < 2.0**-1000 else result
