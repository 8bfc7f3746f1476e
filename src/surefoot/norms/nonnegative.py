r"""The spectral norm of a non-negative matrix whose entries may be beyond the range of doubles.

Every step that is part of the proof is done on :class:`~surefoot.magnitude.Magnitude`, rounded upwards.
The vector that makes the bound sharp comes from ordinary arithmetic and needs no proof.
"""

from __future__ import annotations

import numpy as np
import torch

from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import estimate


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
