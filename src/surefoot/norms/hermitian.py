r"""The largest eigenvalue of a Hermitian matrix, bounded from above with a proof.

A guess comes from an eigenvalue routine that nobody needs to trust; the proof is a Cholesky factor that
nobody needs to trust either. For *any* matrix :math:`R` and shift :math:`\lambda`,

.. math:: \lambda I - G = R R^* - E \succeq -\|E\| I \quad\Longrightarrow\quad
          \lambda_{\max}(G) \le \lambda + \|E\|,

so only the residual :math:`E = RR^* - (\lambda I - G)` has to be bounded, and that is one matrix product.
With a shift just above the largest eigenvalue the factor exists and the residual is of the order of the
round-off. (S. M. Rump, *Verification of positive definiteness*, BIT 46, 2006, bounds the residual a
priori from the success of the factorisation; the a-posteriori form costs a product and does not depend on
how the factorisation is organised.)

The only facts about the machine that the norms of this folder rely on, with :math:`u` the unit round-off
(:math:`2^{-53}` for doubles, :math:`2^{-24}` for singles):

* an inner product of :math:`n` real terms, summed in any order, with or without fused operations, has an
  error of at most :math:`\gamma_n |x|^\top|y|`, :math:`\gamma_n = nu/(1-nu)` (N. J. Higham, *Accuracy and
  Stability of Numerical Algorithms*, 2nd ed., eq. 3.5); matrix products are made of such inner products
  (no Strassen-like algorithm, which the BLAS of PyTorch and NumPy are not);
* products of single precision are rounded to single precision, where :func:`singles_are_exact` says so;
* a square root is correctly rounded; sine and cosine are accurate to two units in the last place;
* what underflows is below :math:`2^{-1022}` (:math:`2^{-126}` for singles); matrices are scaled so that
  their squared norm is far above, and the loss disappears in the :math:`\gamma` of one extra term.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """The unit round-off of a real or complex floating-point type."""
    return torch.finfo(dtype).eps / 2


def singles_are_exact(device: torch.device) -> bool:
    """Whether PyTorch multiplies numbers of single precision on a device as they are.

    Autocast, TF32 and products in bfloat16 round them to 8 or 11 bits before.
    """
    if device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    backends: Any = torch.backends
    settings = (backends, backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv)  # the old one sets these
    return all(setting.fp32_precision in ("none", "ieee") for setting in settings)


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


def times_power(x: Tensor, exponents: int | Tensor) -> Tensor:
    """x times powers of two, in double precision, exact up to underflow.

    In several steps, because a power alone may be out of range. A tensor of exponents broadcasts against x; they
    are between -2044 and 2046.
    """
    if isinstance(exponents, Tensor):
        first = torch.div(exponents, 2, rounding_mode="floor")
        return x * _power(first) * _power(exponents - first)
    while exponents:
        part = max(-1000, min(1000, exponents))
        x, exponents = x * 2.0**part, exponents - part
    return x


def _power(exponents: Tensor) -> Tensor:
    """Two to the power of whole numbers from -1022 to 1023, exactly: the bits of the exponent are set."""
    return torch.bitwise_left_shift(exponents.to(torch.int64).clamp(-1022, 1023) + 1023, 52).view(torch.float64)


def unscale(value: float, power: int) -> float:
    """``value * 2**power`` rounded upwards: infinite on overflow, positive on underflow."""
    if value == 0 or math.isinf(value):
        return value
    try:
        result = math.ldexp(value, power)
    except OverflowError:
        return math.inf
    return math.nextafter(result, math.inf) if result < 2.0**-1000 else result


_PANEL = 128
_DENSE_ESTIMATE = 160  # above this size a Krylov method is faster than all the eigenvalues
_KRYLOV_STEPS = 240


def excess(gram: Tensor, shift: Tensor) -> Tensor:
    r"""How far the largest eigenvalue may lie above a shift: :math:`G \preceq (\lambda + \text{excess})I`.

    Infinite where the factorisation fails. ``gram`` stands for the Hermitian matrix with its lower triangle
    and the real part of its diagonal; the upper triangle may differ by round-off.

    Proof. Let :math:`M` be the stored :math:`\mathrm{fl}(\lambda I - G)`; its diagonal carries an error of
    at most :math:`u M_{ii}/(1-u) \le 2u\lambda`. :math:`P = \mathrm{fl}(RR^*)` differs from :math:`RR^*` by
    at most :math:`c\,|R||R|^*`, of norm at most :math:`c\|R\|_F^2` (:func:`product_error`). The residual is
    Hermitian, so its Frobenius norm is at most :math:`\sqrt2` times that of its lower triangle. Together:
    :math:`\sqrt2\|\mathrm{tril}(P - M)\|_F + c\|R\|_F^2 + 2u\lambda`; the norms themselves are sums of
    :math:`n^2` squares in double precision, of differences rounded once.

    ``gram`` has a non-negative diagonal and shape (..., n, n), in single or double precision, real or complex;
    ``shift`` is positive, of shape (...), in double precision but representable in the precision of ``gram``.
    """
    size, dtype = gram.shape[-1], gram.dtype
    matrix = -gram
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift.to(dtype)[..., None])
    factor, failed = torch.linalg.cholesky_ex(matrix)
    total = torch.zeros_like(shift)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        panel = factor[..., start:stop, :stop] @ factor[..., :stop, :stop].mH
        panel -= matrix[..., start:stop, :stop]
        total = total + _sum_of_squares(panel)  # a little more than the lower triangle
    residual = (2 * total).sqrt_() + product_error(size, dtype) * _sum_of_squares(factor)
    roundoff = unit_roundoff(dtype)
    residual = residual * (1 + gamma(size * size + 16) + 2 * roundoff) + 2 * roundoff * shift
    usable = (failed == 0) & residual.isfinite()
    return torch.where(usable, residual, math.inf)


def estimate(gram: Tensor) -> Tensor:
    """The largest eigenvalue of each matrix, approximately and without proof; shape (...)."""
    size = gram.shape[-1]
    if size == 1:
        return gram[..., 0, 0].real.double()
    if size <= _DENSE_ESTIMATE:
        return _top_eigenvalue(gram)
    matrices = gram.reshape(-1, size, size).cpu().numpy()
    values = torch.tensor([_krylov(matrix) for matrix in matrices], dtype=torch.float64)
    return values.reshape(gram.shape[:-2]).to(gram.device)


def initial_margin(gram: Tensor) -> float:
    """The relative distance to put between an estimate and the first shift to be tried."""
    size, roundoff = gram.shape[-1], unit_roundoff(gram.dtype)
    return 16 * (size + 4) * roundoff if size <= _DENSE_ESTIMATE else max(2e-10, 64 * size * roundoff)


def eigenvalue_bounds(gram: Tensor) -> Tensor:
    r"""Proved upper bounds of the largest eigenvalue of matrices with a non-negative diagonal; shape (...).

    Shifts above the estimate, further and further away until :func:`excess` is finite; infinite where the
    fifth one still fails, so the caller should also look at the trace.
    """
    guess, margin = estimate(gram), initial_margin(gram)
    bounds = _shifted(gram, guess, margin)
    for attempt in range(4):
        missing = bounds.isinf()
        if not missing.any():
            break
        if attempt == 0 and gram.shape[-1] > _DENSE_ESTIMATE:  # the Krylov space may have missed the top
            guess[missing] = _top_eigenvalue(gram[missing])
        else:
            margin *= 64
        bounds[missing] = _shifted(gram[missing], guess[missing], margin)
    return bounds


def raise_level(gram: Tensor, extra: Tensor, level: float) -> tuple[float, float]:
    r"""An upper bound of :math:`\max_f \lambda_{\max}(G_f) + e_f` over a batch, with one shift for all.

    Most matrices of a batch of symbols lie below the largest, and one factorisation says so; an estimate
    is only made for those that do not. ``gram`` has shape (batch, n, n) and a non-negative diagonal, ``extra``
    shape (batch,); ``level`` is the shift to try first, best if not far below the answer.

    Returns:
        the shift to begin with next time, and the bound.
    """
    if gram.shape[-1] == 1:
        return level, float((gram[:, 0, 0].real.double() + extra).max()) * (1 + 2.0**-50)
    bound, margin = 0.0, initial_margin(gram)
    while True:
        level = float(torch.tensor(level, dtype=torch.float64).to(gram.real.dtype))
        surplus = excess(gram, torch.full_like(extra, level))
        certified = surplus.isfinite()
        if certified.any():
            bound = max(bound, float((level + surplus + extra)[certified].max()) * (1 + 2.0**-50))
        if certified.all():
            return level, bound
        gram, extra = gram[~certified], extra[~certified]
        count = min(len(gram), 8 if gram.shape[-1] <= _DENSE_ESTIMATE else 1)
        likely = gram[_sum_of_squares(gram).topk(count).indices]
        level = max(float(estimate(likely).max()), level) * (1 + margin)
        margin *= 4  # grows until the factorisation succeeds


def _shifted(gram: Tensor, guess: Tensor, margin: float) -> Tensor:
    """The bound that one shift gives, rounded upwards."""
    shift = (guess.clamp_min(0) * (1 + margin)).to(gram.real.dtype).double()
    return (shift + excess(gram, shift)) * (1 + 2.0**-50)


def _sum_of_squares(a: Tensor) -> Tensor:
    """Squared Frobenius norms over the last two dimensions, accumulated in double precision."""
    if a.is_complex():  # the norm of complex tensors takes a square root per entry
        a = torch.view_as_real(a).flatten(-2)
    return torch.linalg.vector_norm(a, dim=(-2, -1), dtype=torch.float64).square()


def _top_eigenvalue(gram: Tensor) -> Tensor:
    """The largest eigenvalue by LAPACK, or the Frobenius norm where LAPACK does not converge."""
    try:
        return torch.linalg.eigvalsh(gram)[..., -1].double()
    except torch.linalg.LinAlgError:
        return _sum_of_squares(gram).sqrt()


def _krylov(matrix: np.ndarray) -> float:
    """The largest eigenvalue by the Lanczos process with full orthogonalisation, approximately.

    The start is random but always the same, and the global random state is left alone.
    """
    size = len(matrix)
    steps = min(_KRYLOV_STEPS, size)
    vector = np.random.default_rng(0).standard_normal(size).astype(matrix.dtype)
    vector /= np.linalg.norm(vector)
    basis = np.empty((steps, size), dtype=matrix.dtype)
    tridiagonal = np.zeros((steps + 1, steps + 1))
    value, tolerance = 0.0, max(1e-12, float(4 * np.finfo(matrix.dtype).eps))
    for step in range(steps):
        basis[step] = vector
        vector = matrix @ vector
        for sweep in range(2):
            overlap = basis[: step + 1].conj() @ vector
            vector -= overlap @ basis[: step + 1]
            if sweep == 0:
                tridiagonal[step, step] = overlap[-1].real
        length = float(np.linalg.norm(vector))
        previous, exhausted = value, length <= 1e-14 * abs(tridiagonal[0, 0])
        if exhausted or step % 12 == 11 or step == steps - 1:
            value = float(np.linalg.eigvalsh(tridiagonal[: step + 1, : step + 1])[-1])
            if exhausted or value - previous <= tolerance * value:
                break
        tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = length
        vector /= length
    return value
