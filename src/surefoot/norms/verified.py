r"""Linear algebra with a proof: products, the smallest eigenvalue of a symmetric matrix, the least solution.

A matrix A is known as computed, with a bound on its error (:class:`~surefoot.scalar.Rounded`, entry by entry).
Nothing here trusts an eigenvalue routine, a factorisation or a solver: they make guesses, and what is proved of
the guesses are residuals, each of them a matrix product whose round-off is bounded by :math:`\gamma_n|A||B|`
(:mod:`surefoot.norms.hermitian`).

The norm of a large symmetric matrix is bounded from above in the same way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import eigenvalue_bounds, gamma, product_error, up
from surefoot.norms.matrix import spectral_norm
from surefoot.scalar import Rounded

_STRIP = 1024


def symmetric_norm(matrix: Tensor) -> float:
    r"""A bound of the norm of the symmetric part S of a square matrix; the matrix is overwritten.

    Let V be a few columns, T a symmetric matrix, :math:`E = SV - VT`, :math:`R = S - VTV^\top` and :math:`\|V^\top
    V - I\| \le \delta < 1`. A unit vector is :math:`x = Vy + w` with :math:`V^\top w = 0`, so that :math:`\|y\|^2
    \le \|Vy\|^2/(1 - \delta)`, and

    .. math:: |x^\top Sx| \le |y^\top V^\top(VT + E)y| + 2|w^\top Ey| + |w^\top Rw| \le
        \max\Big(\frac{(1 + \delta)(\|T\| + \|E\|)}{1 - \delta},\ \|R\|_F\Big) + \frac{\|E\|}{\sqrt{1 - \delta}} .

    V are approximate eigenvectors, found by subspace iteration that nobody needs to trust; the Frobenius norm of
    what is left of a second derivative is soon below its largest eigenvalue. Below :data:`_STRIP` rows that is not
    worth the while. Sums of n products of the entries of two matrices are off by at most :math:`\gamma_n` times
    their Frobenius norms. The entries of S are rounded twice, which moves its norm by at most
    :math:`4u\|S\|_F`; the terms for round-off in E and R are larger.
    """
    size = len(matrix)
    for start in range(0, size, _STRIP):  # half a sum with the transpose, in place
        strip = 0.5 * (matrix[start : start + _STRIP, start:] + matrix[start:, start : start + _STRIP].mT)
        matrix[start : start + _STRIP, start:] = strip
        matrix[start:, start : start + _STRIP] = strip.mT
    scale = float(matrix.abs().max()) if size else 0.0
    if scale == 0.0:
        return 0.0
    matrix /= scale
    best = math.inf
    for count in (32, 160) if size > _STRIP else ():
        bound, least = _deflated(matrix, count)
        best = min(best, bound)
        if best < 1.01 * least:
            return up(best * scale, 16)
    best = min(best, spectral_norm(matrix) + 2.0**-51 * frobenius_norm(matrix))
    return up(best * scale, 16)


def _deflated(matrix: Tensor, count: int) -> tuple[float, float]:
    """The bound with so many columns, and the largest eigenvalue on their span."""
    size = len(matrix)
    generator = torch.Generator(device=matrix.device).manual_seed(0)
    columns = torch.randn(size, count, dtype=matrix.dtype, device=matrix.device, generator=generator)
    for _ in range(8):
        columns = torch.linalg.qr(matrix @ columns)[0]
    inner = columns.mT @ (matrix @ columns)
    values, turns = torch.linalg.eigh(0.5 * (inner + inner.mT))
    columns = columns @ turns
    whole, length = float(matrix.norm()), float(columns.norm()) * (1 + 2.0**-30)
    largest = float(values.abs().max())
    rounding = gamma(size + count + 16) * 2
    apart = float((columns.mT @ columns - torch.eye(count, dtype=matrix.dtype, device=matrix.device)).norm())
    delta = apart * (1 + 2.0**-30) + rounding * length**2
    error = float((matrix @ columns - columns * values).norm()) * (1 + 2.0**-30)
    error += rounding * length * (whole + largest * math.sqrt(count))
    total = 0.0
    for start in range(0, size, _STRIP):
        rest = matrix[start : start + _STRIP] - (columns[start : start + _STRIP] * values) @ columns.mT
        total += float(rest.square().sum())
    rest = math.sqrt(total * (1 + rounding * size)) + rounding * (whole + length**2 * largest * math.sqrt(count))
    if not delta < 0.5:
        return math.inf, 0.0
    within = (1 + delta) * (largest + error) / (1 - delta)
    return max(within, rest) + error / math.sqrt(1 - delta), largest


_DENSE = 1500  # rows up to which all eigenvalues are computed for a guess


def down(value: float, operations: int = 4) -> float:
    """A non-negative number lowered by more than the error of a few roundings."""
    lowered = value * (1 - (operations + 1) * 2.0**-52)
    return math.nextafter(lowered, 0.0) if lowered > 0 else max(lowered, 0.0)


def product(a: Rounded, b: Rounded) -> Rounded:
    r"""The matrix product, batched as in torch.

    .. math:: |\mathrm{fl}(AB) - A'B'| \le |A|(\gamma_{k+4}|B| + E_B) + E_A(|B| + E_B)

    for all :math:`|A' - A| \le E_A`, :math:`|B' - B| \le E_B`, k the inner dimension. The bounds are themselves
    computed by products of non-negative matrices, which :math:`1 + 2\gamma_{k+8}` makes up for, and underflow by
    what is added to every entry.
    """
    inner = a.value.shape[-1]
    value = a.value @ b.value
    left, right = a.value.abs(), b.value.abs()
    rounding = product_error(inner)
    error = rounding * (left @ (right + b.error / rounding))  # a small |B| times γ might underflow
    if bool(a.error.any()):
        error = error + a.error.expand(a.value.shape) @ (right + b.error)
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


def smallest_eigenvalue(matrix: Rounded | Symmetric) -> float:
    r"""A lower bound of :math:`\lambda_{\min}(A)` for a symmetric matrix; minus infinity if there is no proof.

    For any shift s and *any* matrix R

    .. math:: \hat A - sI = RR^\top - E \succeq -\|E\|I \quad\Longrightarrow\quad
        \lambda_{\min}(A) \ge s - \|E\| - \|A - \hat A\| ,

    where :math:`\hat A` is symmetric and made of the lower triangle of the stored matrix. R is a Cholesky factor
    in floating point, and :meth:`~surefoot.norms.blocked.Symmetric.apart` bounds E, as in
    :mod:`surefoot.norms.hermitian`.

    >>> a = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> round(smallest_eigenvalue(Rounded.exact(a)), 9)
    1.0
    """
    whole = matrix if isinstance(matrix, Symmetric) else Symmetric.dense(matrix)
    if not whole.size:
        return math.inf
    if whole.size > _DENSE:
        return -math.inf if whole.plain is None else _lowest(whole, whole.plain.ends[0], 0.02)
    stored = _written_out(whole)
    if not bool(torch.isfinite(stored).all()):
        return -math.inf
    return _lowest(whole, float(torch.linalg.eigvalsh(stored)[0]), 0.0)


def largest_eigenvalue(matrix: Rounded | Symmetric) -> float:
    """An upper bound of that of a symmetric, positive semidefinite matrix; see :mod:`surefoot.norms.hermitian`."""
    whole = matrix if isinstance(matrix, Symmetric) else Symmetric.dense(matrix)
    trace, error = whole.size_and_error
    most = up(trace * (1 + 1e-9) + error)
    if whole.size <= _DENSE:
        return min(up(float(eigenvalue_bounds(_written_out(whole))) + error), most)
    if whole.plain is None:
        return most
    return min(-_lowest(-whole, -whole.plain.ends[1], 0.01), most)


def _written_out(matrix: Symmetric) -> Tensor:
    value = torch.zeros(matrix.size, matrix.size, dtype=torch.float64)
    for start, stop, rows in matrix.panels():
        value[start:stop, :start] = rows.value[:, :start]
        value[:start, start:stop] = rows.value[:, :start].mT
        corner = rows.value[:, start:]
        value[start:stop, start:stop] = corner.tril() + corner.tril(-1).mT
    return value


def _lowest(matrix: Symmetric, guess: float, doubt: float) -> float:
    """The bound by shifts below a guess that may be off by this part of it, further and further away."""
    trace, error = matrix.size_and_error
    margin = 4 * (matrix.size + 8) * 2.0**-53 * trace + doubt * abs(guess)
    for _ in range(5 if error < math.inf else 0):
        shift = guess - margin
        factor = matrix.factor(shift)
        residual = math.inf if factor is None else matrix.apart(factor, shift)
        if residual < math.inf:
            best = shift - up(residual + error)
            return best - abs(best) * 2.0**-50
        margin = 16 * margin + 0.01 * abs(guess)
    return -math.inf


def vector_norm(value: Tensor, error: float = 0.0) -> float:
    """An upper bound of the norm of a vector that is known up to an error of this norm."""
    return up(frobenius_norm(value) + error)


def solution(matrix: Tensor, apart: float, right: Tensor, error: float, lowest: float) -> tuple[float, float]:
    r"""Bounds on :math:`\|A^{-1}b\|` and :math:`b^\top A^{-1}b`; A is symmetric, its eigenvalues at least
    :math:`\lambda`, which has to be positive.

    For any w, with :math:`s = b - Aw`, :math:`A^{-1}b = w + A^{-1}s` and

    .. math:: \|A^{-1}b\| \le \|w\| + \|s\|/\lambda, \qquad
        b^\top A^{-1}b = w^\top Aw + 2w^\top s + s^\top A^{-1}s \le w^\top Aw + 2\|w\|\|s\| + \|s\|^2/\lambda .

    w is a solution in floating point. ``apart`` bounds how far the matrix is from A, ``error`` the norm of the
    error of b. Infinite where there is no w.

    >>> a, b = torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double(), torch.tensor([3.0, 3.0]).double()
    >>> length, form = solution(a, 0.0, b, 0.0, 0.99)
    >>> round(length, 9), round(form, 9)
    (1.414213562, 6.0)
    """
    if not lowest > 0:
        return math.inf, math.inf
    w, info = torch.linalg.solve_ex(matrix, right)
    if int(info) or not bool(torch.isfinite(w).all()):
        return math.inf, math.inf
    w = w + torch.linalg.solve_ex(matrix, right - matrix @ w)[0]
    size, column = vector_norm(w), Rounded.exact(w[:, None])
    image = product(Rounded.exact(matrix), column)
    form = product(column.rearranged(lambda t: t.mT), image)
    left = image - right[:, None]
    remaining = up(vector_norm(left.value, frobenius_norm(left.error)) + error + apart * size, 8)
    squared = max(float(form.value) + float(form.error), 0.0) + apart * size**2
    return up(size + remaining / lowest, 8), up(squared + 2 * size * remaining + remaining**2 / lowest, 16)


def least_solution(gram: Symmetric, right: Tensor, error: float, sigma: float) -> float:
    r"""A bound on :math:`\|J^+r\|` from :math:`G = JJ^\top` and :math:`\sigma \le \sigma_{\min}(J)`.

    For any w, :math:`J^\top w + J^+(r - Gw)` solves :math:`Jv = r`, and :math:`J^+r` is the shortest solution, so

    .. math:: \|J^+r\| \le \sqrt{w^\top Gw} + \|r - Gw\|/\sigma .

    w is the solution by a Cholesky factor, refined once. ``error`` bounds the norm of the error of r.
    """
    factor = gram.plain
    if factor is None:
        return up(vector_norm(right, error) / sigma)
    w = factor.solve(right)
    w = w + factor.solve(right - gram.times(w).value)
    image = gram.times(w)
    squared = product(Rounded.exact(w[None, :]), image.rearranged(lambda t: t[:, None]))
    left = image - right
    remaining = vector_norm(left.value, up(frobenius_norm(left.error.expand(left.value.shape)) + error))
    length = math.sqrt(max(float(squared.value) + float(squared.error), 0.0))
    return min(up(up(length) + up(remaining / sigma)), up(vector_norm(right, error) / sigma))
