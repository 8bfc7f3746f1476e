r"""The norm of a symmetric matrix, bounded from above with a proof."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.norms.hermitian import gamma, up
from surefoot.norms.matrix import spectral_norm

_STRIP = 1024


def symmetric_norm(matrix: Tensor) -> float:
    r"""A bound of the norm of the symmetric part S of a square matrix; the matrix is overwritten.

    Let V be a few columns, T a symmetric matrix, :math:`E = SV - VT`, :math:`R = S - VTV^\top` and :math:`\|V^\top
    V - I\| \le \delta < 1`. A unit vector is :math:`x = Vy + w` with :math:`V^\top w = 0`, so that :math:`\|y\|^2
    \le \|Vy\|^2/(1 - \delta)`, and

    .. math:: |x^\top Sx| \le |y^\top V^\top(VT + E)y| + 2|w^\top Ey| + |w^\top Rw| \le
        \max\Big(\frac{(1 + \delta)(\|T\| + \|E\|)}{1 - \delta},\ \|R\|_F\Big) + \frac{\|E\|}{\sqrt{1 - \delta}} .

    V are approximate eigenvectors, found by subspace iteration that nobody needs to trust; the Frobenius norm of
    what is left of a second derivative is soon below its largest eigenvalue. Sums of n products of the entries of
    two matrices are off by at most :math:`\gamma_n` times their Frobenius norms.
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
    for count in (min(size, 32), min(size, 160)):
        bound, least = _deflated(matrix, count)
        best = min(best, bound)
        if count == size or best < 1.01 * least:
            return up(best * scale, 16)
    best = min(best, spectral_norm(matrix))
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
