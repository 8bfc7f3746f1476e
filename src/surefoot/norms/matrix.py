r"""Spectral and Frobenius norms of matrices, never below the exact ones.

Entries are taken as exact real (or complex) numbers; everything is computed in double precision. Of
matrices of magnitudes the entries may be beyond the range of doubles: every step that is part of the proof is then
rounded upwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import (
    eigenvalue_bounds,
    estimate,
    exponent,
    gamma,
    product_error,
    raise_level,
    times_power,
    unscale,
    up,
)

_LARGEST_EXACT = 4096  # the smaller side of a matrix whose norm is computed at once
_STRIP = 2048
_ROWS = 8192
_SAFE = 2.0**400  # squared norms between 1 / _SAFE and _SAFE need no scaling
_CHUNK = 2**22


def wide(a: Tensor) -> Tensor:
    """The tensor in double precision, on a device that has it."""
    if a.device.type == "mps":
        a = a.cpu()
    return a.to(torch.complex128 if a.is_complex() else torch.float64)


def spectral_norm(a: Tensor) -> float:
    r"""An upper bound of :math:`\|A\|_2` for a matrix on any device, real or complex, of any type.

    With :math:`G = \mathrm{fl}(A^*A)` for the smaller side of :math:`A`, and :math:`c` from
    :func:`~surefoot.norms.hermitian.product_error`,

    .. math:: \|A\|_2^2 \le \lambda_{\max}(G) + c\,\|A\|_F^2,

    because :math:`|G - A^*A| \le c|A|^*|A|`, whose norm is at most :math:`c\|A\|_F^2`. The largest
    eigenvalue is bounded by :mod:`~surefoot.norms.hermitian`, and :math:`(1-c)\|A\|_F^2 \le \mathrm{tr}\,G`.
    The relative excess is about :math:`(m + n)\,n\,2^{-54}`, less than 1e-9 up to size 2000.

    When the smaller side exceeds 4096 this would take minutes, and :func:`strip_norm` is used instead, with
    strips of 2048.

    >>> float(spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]])))
    5.0000000000000...

    Raises:
        ValueError: if the tensor is not a matrix or has an entry that is not a number.
    """
    if a.ndim != 2:
        raise ValueError(f"spectral_norm needs a matrix, got a tensor of shape {tuple(a.shape)}")
    a = a.detach()
    if min(a.shape) > _LARGEST_EXACT:
        return strip_norm(a, _STRIP)
    if a.numel() == 0:
        return 0.0
    power = 0
    gram, trace = _gram(a)
    if not 1 / _SAFE < trace < _SAFE:
        top = _largest_entry(a)
        if top in (0.0, math.inf):
            return top
        power = exponent(top)
        gram, trace = _gram(times_power(wide(a), -power))
    return unscale(_norm_of_gram(gram, trace, max(a.shape)), power)


def _norm_of_gram(gram: Tensor, trace: float, inner: int) -> float:
    error = product_error(inner, gram.dtype)
    squared = up(trace / (1 - error - gamma(len(gram))))  # an upper bound of the squared Frobenius norm
    largest = min(squared, up(float(eigenvalue_bounds(gram)) + up(error * squared)))
    return up(math.sqrt(largest))


def largest_norm(matrices: Iterable[Tensor]) -> float:
    """An upper bound of the norms of all matrices: one factorisation says that most are below the largest."""
    level = best = 0.0
    for a in matrices:
        gram, trace = _gram(a)
        if not 1 / _SAFE < trace < _SAFE or min(a.shape) > _LARGEST_EXACT:
            best = max(best, spectral_norm(a))
            continue
        error = product_error(max(a.shape), gram.dtype)
        extra = error * up(trace / (1 - error - gamma(len(gram)))) * (1 + 2.0**-50)
        level, bound = raise_level(
            gram[None], torch.tensor([extra], dtype=torch.float64, device=gram.device), level
        )
        best = max(best, up(math.sqrt(bound)))
    return best


def strip_norm(a: Tensor, width: int) -> float:
    r"""An upper bound of :math:`\|A\|_2` from strips of a given width.

    The smaller side is cut into :math:`s` strips :math:`A_i`, and
    :math:`\|Ax\|^2 = \sum_i\|A_ix\|^2 \le \sum_i\|A_i\|_2^2\|x\|^2`; the smaller of this and
    :math:`\sqrt{\|A\|_1\|A\|_\infty}`. For a square matrix of random signs the first is loose by a factor
    of about :math:`(1 + \sqrt s)/2`; for a matrix of one sign with equal row sums the second is sharp.
    """
    strips = a.split(width, 0 if a.shape[0] <= a.shape[1] else 1)
    norms = torch.tensor([spectral_norm(strip) for strip in strips], dtype=torch.float64)
    return min(frobenius_norm(norms), schur_norm(a))


def schur_norm(a: Tensor) -> float:
    r"""An upper bound of :math:`\sqrt{\|A\|_1\|A\|_\infty} \ge \|A\|_2`, from the sums of absolute values."""
    columns, row = torch.zeros(a.shape[1], dtype=torch.float64), 0.0
    for rows in a.split(_ROWS):
        absolute = wide(rows).abs()
        columns, row = columns + absolute.sum(0).cpu(), max(row, float(absolute.sum(1).max()))
    product = math.sqrt(float(columns.max())) * math.sqrt(row)
    return up(product * (1 + gamma(max(a.shape) + 4)), 8)


def affordable_norm(a: Tensor, budget: float) -> float:
    """The sharpest of the bounds above that needs at most so many multiplications, whatever the size."""
    if min(a.shape) ** 2 * (max(a.shape) + 2 * min(a.shape)) <= budget:
        return spectral_norm(a)
    width = int(budget / (2 * a.numel()))
    return strip_norm(a, width) if width >= 16 else min(schur_norm(a), frobenius_norm(a))


def batched_spectral_norm(a: Tensor) -> Tensor:
    r"""Upper bounds of the spectral norms of a batch of matrices, real or complex.

    The same proof as :func:`spectral_norm`, each matrix scaled by its own power of two. From shape (..., m, n) to
    double precision, shape (...), on the same device.

    Raises:
        ValueError: if the tensor has no two dimensions or has an entry that is not a number.
    """
    if a.ndim < 2:
        raise ValueError(f"batched_spectral_norm needs shape (..., m, n), got {tuple(a.shape)}")
    batch, device = a.shape[:-2], a.device
    if a.numel() == 0:
        return torch.zeros(batch, dtype=torch.float64, device=device)
    a = wide(a.detach()).reshape(-1, *a.shape[-2:])
    tops = a.abs().amax((-2, -1)).cpu().numpy()
    if np.isnan(tops).any():
        raise ValueError(_NOT_A_NUMBER)
    infinite, zero = np.isinf(tops), tops == 0
    powers = np.frexp(np.where(infinite | zero, 1.0, tops))[1]
    ordinary = torch.from_numpy(~infinite).to(device)
    down = torch.from_numpy(-powers).to(device)[:, None, None]
    a = times_power(torch.where(ordinary[:, None, None], a, torch.zeros_like(a)), down)
    if a.shape[-2] < a.shape[-1]:
        a = a.mT
    gram = a.mH @ a
    error = product_error(a.shape[-2], a.dtype)
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)
    squared = trace / (1 - error - gamma(a.shape[-1])) * (1 + 2.0**-50)
    largest = torch.minimum(squared, (eigenvalue_bounds(gram) + error * squared) * (1 + 2.0**-50))
    norms = largest.sqrt().cpu().numpy() * (1 + 2.0**-51)
    with np.errstate(over="ignore"):
        norms = np.nextafter(np.ldexp(norms, powers), np.inf)
    norms = np.where(infinite, np.inf, np.where(zero, 0.0, norms))
    return torch.from_numpy(norms).reshape(batch).to(device)


def frobenius_norm(a: Tensor) -> float:
    r"""An upper bound of the Euclidean norm of all the entries of a tensor, of any shape and type.

    The squares are non-negative, so a sum of :math:`n` of them has a relative error of at most
    :math:`\gamma_n`; sums over rows of 4096 and an exact sum of the rows keep :math:`n` small. Where the
    sum leaves the safe range of doubles, the entries are scaled by a power of two and summed again.

    >>> frobenius_norm(torch.tensor([3e200, 4e200], dtype=torch.float64)) < 5.0000000000001e200
    True
    """
    a = a.detach()
    if a.numel() == 0:
        return 0.0
    power, total = 0, _sum_of_squares(a, 0)
    if not 1 / _SAFE < total < _SAFE:
        top = _largest_entry(a)
        if top in (0.0, math.inf):
            return top
        power = exponent(top)
        total = _sum_of_squares(a, power)
    return unscale(up(math.sqrt(up(total * (1 + gamma(min(2 * a.numel(), 4096) + 8))))), power)


_NOT_A_NUMBER = "the norm of a tensor with NaN entries is undefined; look for the operation that made them"


def _gram(a: Tensor) -> tuple[Tensor, float]:
    """The Gram matrix of the smaller side, in double precision, and its trace."""
    if a.shape[0] < a.shape[1]:
        a = a.mT
    gram: Tensor | None = None
    for rows in a.split(_ROWS):  # in pieces, because an embedding in double precision may not fit
        piece = wide(rows)
        if piece.device.type == "cpu":
            array = piece.resolve_conj().resolve_neg().numpy()
            with np.errstate(over="ignore", invalid="ignore"):
                # NumPy sees that both factors are the same matrix and does half the work
                part = torch.from_numpy(array.conj().T @ array if a.is_complex() else array.T @ array)
        else:
            part = piece.mH @ piece
        gram = part if gram is None else gram + part
    assert gram is not None
    return gram, float(gram.diagonal().real.sum())


def _largest_entry(a: Tensor) -> float:
    """The largest absolute value; infinite for infinite entries, an error for those that are no numbers."""
    tops = [float(wide(piece).abs().max()) for piece in a.reshape(-1).split(_CHUNK)]
    if any(map(math.isnan, tops)):
        raise ValueError(_NOT_A_NUMBER)
    return max(tops)


def _sum_of_squares(a: Tensor, power: int) -> float:
    """The sum of the squares of the entries times ``2**-power``, with relative error below gamma(4100).

    Infinite if the entries should be scaled first, or are not all numbers.
    """
    partial: list[float] = []
    for piece in a.reshape(-1).split(_CHUNK):
        flat = wide(piece)
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
        flat = times_power(flat, -power)
        rows = len(flat) // 4096 * 4096
        partial += flat[:rows].reshape(-1, 4096).square().sum(1).tolist()
        partial.append(float(flat[rows:].square().sum()))
    return math.fsum(partial) if all(part < _SAFE for part in partial) else math.inf


def nonnegative_norm(h: Magnitude) -> Magnitude:
    r"""An upper bound of :math:`\|H\|_2` for a matrix of magnitudes, square or not, symmetric or not.

    For a matrix :math:`K \ge 0` and every positive vector :math:`x` (L. Collatz, Math. Z. 48, 1942;
    H. Wielandt, Math. Z. 52, 1950)

    .. math:: \rho(K) \le \max_j \frac{(K x)_j}{x_j}.

    Proof: with :math:`X = \mathrm{diag}(x)`, the right-hand side is the largest row sum, so a norm, of
    :math:`X^{-1} K X`, which has the spectral radius of :math:`K`. A symmetric :math:`H` has
    :math:`\|H\|_2 = \rho(H)`, any other :math:`\|H\|_2^2 = \rho(H^\top H)`.

    An infinite entry makes the norm infinite. The relative excess is about 1e-9, whatever the range of the
    entries and whether or not the matrix is reducible (see :func:`_positive_vector`).

    >>> print(nonnegative_norm(Magnitude(np.array([[3000.0, 2000.0], [2000.0, -np.inf]]))))
    1.231e+903

    Raises:
        ValueError: if the argument is not a matrix.
    """
    if len(h.shape) != 2:
        raise ValueError(f"nonnegative_norm needs a matrix of magnitudes, got shape {h.shape}")
    if not h.is_finite:
        return Magnitude.infinity()
    if h.is_zero:
        return Magnitude.zero()
    if min(h.shape) == 1:
        return h.norm()
    symmetric = np.array_equal(h.log2, h.log2.T)
    logarithm = np.log2(_positive_vector(h.log2, symmetric))
    image = (h * Magnitude(logarithm[None, :])).sum(axis=1)
    if not symmetric:
        image = (h * Magnitude(image.log2[:, None])).sum(axis=0)
    quotient = (image * Magnitude(-logarithm)).max()
    return min(quotient if symmetric else quotient.sqrt(), h.norm())


def _positive_vector(log2: np.ndarray, symmetric: bool) -> np.ndarray:
    r"""A positive vector whose quotients are hardly above the spectral radius; nothing here is proved.

    For any :math:`\mu > \rho(K)` the vector :math:`x = (\mu I - K)^{-1}\mathbf 1` is positive and has
    :math:`(Kx)_j/x_j = \mu - 1/x_j < \mu`. So an estimate of :math:`\rho(K)`, raised by 1e-9, and one
    linear system are enough. Since :math:`x_j \ge 1/\mu` for all :math:`j` while the largest entry is about
    :math:`1/(\mu - \rho)`, the entries of :math:`K` that underflow next to the largest one do not matter.
    """
    with np.errstate(under="ignore"):
        matrix = np.exp2(log2 - np.max(log2))
        matrix = matrix if symmetric else matrix.T @ matrix
    size = len(matrix)
    radius = float(estimate(torch.from_numpy(matrix)))
    for margin in (1e-9, 1e-7, 1e-5, 1e-3):
        shifted = -matrix
        shifted[np.diag_indices(size)] += radius * (1 + margin)
        try:
            vector = np.linalg.solve(shifted, np.ones(size))
        except np.linalg.LinAlgError:
            continue
        if (vector > 0).all() and np.isfinite(vector).all():
            return vector
    return np.ones(size)
