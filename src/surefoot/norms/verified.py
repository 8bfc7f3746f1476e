r"""Linear algebra with a proof: products, the smallest eigenvalue of a symmetric matrix, the least solution.

A matrix A is known as computed, with a bound on its error (:class:`~surefoot.scalar.Rounded`, entry by entry).
Nothing here trusts an eigenvalue routine, a factorisation or a solver: they make guesses, and what is proved of
the guesses are residuals, each of them a matrix product whose round-off is bounded by :math:`\gamma_n|A||B|`
(:mod:`surefoot.norms.hermitian`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.norms import frobenius_norm
from surefoot.norms.hermitian import eigenvalue_bounds, gamma, product_error, up
from surefoot.scalar import Rounded

_DENSE = 1500  # rows up to which all eigenvalues are computed for a guess
_PANEL = 512
_SWEEPS = 60


def down(value: float, operations: int = 4) -> float:
    """A non-negative number lowered by more than the error of a few roundings."""
    lowered = value * (1 - (operations + 1) * 2.0**-52)
    return math.nextafter(lowered, 0.0) if lowered > 0 else max(lowered, 0.0)


def product(a: Rounded, b: Rounded) -> Rounded:
    r"""The matrix product, batched as in torch.

    .. math:: |\mathrm{fl}(AB) - A'B'| \le \gamma_{k+4}|A||B| + (|A| + E_A)E_B + E_A|B|

    for all :math:`|A' - A| \le E_A`, :math:`|B' - B| \le E_B`, k the inner dimension. The bounds are themselves
    computed by products of non-negative matrices, which :math:`1 + 2\gamma_{k+8}` makes up for, and underflow by
    what is added to every entry.
    """
    inner = a.value.shape[-1]
    value = a.value @ b.value
    left, right = a.value.abs(), b.value.abs()
    error = product_error(inner) * (left @ right)
    if bool(b.error.any()):
        error = error + (left + a.error) @ b.error.expand(b.value.shape)
    if bool(a.error.any()):
        error = error + a.error.expand(a.value.shape) @ right
    return Rounded(value, error * (1 + 2 * gamma(inner + 8)) + inner * 2.0**-1021)


def norm_of(error: Tensor) -> float:
    r"""A bound on :math:`\|E\|_2` for a matrix with entries of at most these absolute values: the smaller of the
    Frobenius norm and, for square ones, the largest sum of a row and of a column.
    """
    if not bool(torch.isfinite(error).all()):
        return math.inf
    whole = frobenius_norm(error)
    if error.ndim != 2:
        return whole
    lines = math.sqrt(float(error.sum(0).max())) * math.sqrt(float(error.sum(1).max()))
    return min(whole, up(lines * (1 + gamma(max(error.shape) + 4)), 8))


def smallest_eigenvalue(matrix: Rounded) -> float:
    r"""A lower bound of :math:`\lambda_{\min}(A)` for a symmetric matrix; minus infinity if there is no proof.

    For any shift s and *any* matrix R

    .. math:: \hat A - sI = RR^\top - E \succeq -\|E\|I \quad\Longrightarrow\quad
        \lambda_{\min}(A) \ge s - \|E\| - \|A - \hat A\| ,

    where :math:`\hat A` is symmetric and made of the lower triangle of the stored matrix. R is a Cholesky factor
    in floating point (S. M. Rump, *Verification of positive definiteness*, BIT 46, 2006, whose bound of the
    residual is a priori; here it is computed, which does not depend on how the factorisation is organised).

    :math:`M = \mathrm{fl}(\hat A - sI)` is off by at most :math:`2u\max_i|M_{ii}|`, and
    :math:`\mathrm{fl}(RR^\top)` by :math:`c|R||R|^\top`, of norm at most :math:`c\|R\|_F^2`. The residual is
    symmetric, so its Frobenius norm is at most :math:`\sqrt2` times that of its lower triangle.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> round(smallest_eigenvalue(Rounded.exact(a)), 9)
    1.0
    """
    stored = matrix.value.tril() + matrix.value.tril(-1).mT
    size = len(stored)
    apart = matrix.error.expand(stored.shape)
    error = norm_of(torch.maximum(apart.tril(), apart.tril().mT))
    if not size or not bool(torch.isfinite(stored).all()) or not error < math.inf:
        return math.inf if not size else -math.inf
    guess, trace = _lowest(stored), float(stored.diagonal().abs().sum())
    best = -math.inf
    margin = 4 * (size + 8) * 2.0**-53 * trace + (0.0 if size <= _DENSE else 0.02 * abs(guess))
    for _ in range(5):
        shift = guess - margin
        residual = _residual(stored, shift)
        if residual < math.inf:
            best = shift - up(residual + error)
            return best - abs(best) * 2.0**-50
        margin = 16 * margin + 0.01 * abs(guess)
    return best


def largest_eigenvalue(matrix: Rounded) -> float:
    """An upper bound of that of a symmetric, positive semidefinite matrix; see :mod:`surefoot.norms.hermitian`."""
    stored = matrix.value.tril() + matrix.value.tril(-1).mT
    error = norm_of(matrix.error.expand(stored.shape))
    return min(
        up(float(eigenvalue_bounds(stored)) + error), up(float(stored.diagonal().sum()) * (1 + 1e-9) + error)
    )


def _residual(stored: Tensor, shift: float) -> float:
    """A bound on the norm of E; infinite where the factorisation fails."""
    shifted = stored.clone()
    shifted.diagonal().sub_(shift)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if int(failed) or not bool(torch.isfinite(factor).all()):
        return math.inf
    size, total = len(stored), 0.0
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        panel = factor[start:stop, :stop] @ factor[:stop, :stop].mT - shifted[start:stop, :stop]
        total += float(panel.square().sum())  # a little more than the lower triangle
    rounded = 4 * 2.0**-53 * float(shifted.diagonal().abs().max()) + math.sqrt(total) * 2.0**-50
    of_product = product_error(size) * float(factor.square().sum())
    return up((math.sqrt(2 * total) + of_product + rounded) * (1 + gamma(size * size + 16)), 8)


def _lowest(stored: Tensor) -> float:
    """The smallest eigenvalue, approximately and without proof."""
    if len(stored) <= _DENSE:
        return float(torch.linalg.eigvalsh(stored)[0])
    factor, failed = torch.linalg.cholesky_ex(stored)
    if int(failed):
        return -float(stored.diagonal().abs().max())
    vector = torch.ones(len(stored), 1, dtype=stored.dtype)
    for _ in range(_SWEEPS):
        vector = torch.cholesky_solve(vector / vector.norm(), factor)
    return 1 / float(vector.norm())


def vector_norm(value: Tensor, error: float = 0.0) -> float:
    """An upper bound of the norm of a vector that is known up to an error of this norm."""
    return up(frobenius_norm(value) + error)


def least_solution(gram: Rounded, right: Tensor, error: float, sigma: float) -> float:
    r"""A bound on :math:`\|J^+r\|` from :math:`G = JJ^\top` and :math:`\sigma \le \sigma_{\min}(J)`.

    For any w, :math:`J^\top w + J^+(r - Gw)` solves :math:`Jv = r`, and :math:`J^+r` is the shortest solution, so

    .. math:: \|J^+r\| \le \sqrt{w^\top Gw} + \|r - Gw\|/\sigma .

    w is the solution by a Cholesky factor, refined once.

    Args:
        gram: G.
        right: r as computed.
        error: a bound on the norm of its error.
        sigma: positive.
    """
    factor, failed = torch.linalg.cholesky_ex(gram.value)
    if int(failed):
        return up(vector_norm(right, error) / sigma)
    column = right[:, None]
    w = torch.cholesky_solve(column, factor)
    w = w + torch.cholesky_solve(column - gram.value @ w, factor)
    exact = Rounded.exact(w)
    image = product(gram, exact)
    squared = product(Rounded.exact(w.mT), image)
    left = image - column
    remaining = vector_norm(left.value, up(frobenius_norm(left.error.expand(left.value.shape)) + error))
    length = math.sqrt(max(float(squared.value) + float(squared.error), 0.0))
    return min(up(up(length) + up(remaining / sigma)), up(vector_norm(right, error) / sigma))
