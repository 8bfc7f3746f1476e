r"""Exponentials of square matrices.

With :math:`\mu` the largest eigenvalue of :math:`\frac12(A + A^\top)`, :math:`\|e^{tA}\|_2 \le e^{t\mu}` for
:math:`t \ge 0` (Dahlquist; Söderlind, The logarithmic norm, BIT 46, 2006), and

.. math:: D\exp(A)[H] = \int_0^1e^{(1-t)A}He^{tA}\,dt, \qquad
    D^2\exp(A)[H, K] = \int_{0\le r\le s\le1}\!\!\big(e^{(1-s)A}He^{(s-r)A}Ke^{rA}
    + e^{(1-s)A}Ke^{(s-r)A}He^{rA}\big)\,dr\,ds

have Frobenius norms of at most :math:`e^\mu\|H\|` and :math:`e^\mu\|H\|\|K\|`. Over a domain :math:`\mu` grows by
at most the distance from the centre. A skew matrix, the usual way to orthogonal ones, has :math:`\mu = 0`.

*Evaluation* by a formula of our own: :math:`e^A = (e^B)^{2^s}` with :math:`B = 2^{-s}A`, :math:`\|B\| \le 1/2`,
and :math:`e^B` by its Taylor polynomial of degree 18, whose rest is at most
:math:`2\cdot2^{-19}/19! < 2^{-74}`. Round-off is carried along (:mod:`surefoot.operations.inverses`).
Derivatives are blocks of an exponential again (Van Loan, Computing integrals involving the matrix exponential,
1978; Mathias, A chain rule for matrix functions, 1996):

.. math:: \exp\begin{pmatrix}A & H\\ 0 & A\end{pmatrix}
    = \begin{pmatrix}e^A & D\exp(A)[H]\\ 0 & e^A\end{pmatrix}, \qquad D\exp(A)^\top = D\exp(A^\top).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import spectral_norm
from surefoot.norms.hermitian import times_power
from surefoot.operations.call import Bounds, Call, Slot
from surefoot.operations.common import batch, root
from surefoot.operations.inverses import RoundedMatrices, size_of
from surefoot.operations.record import operation
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

_DEGREE, _REST = 18, 2.0**-74
_MOST_SQUARINGS = 60
_LARGEST = 1024  # rows of a matrix that is looked at


def _exponential(a: Tensor) -> RoundedMatrices:
    """The exponential of each matrix of a stack, with its error."""
    a = a.double()
    size = float(size_of(a).max()) if a.numel() else 0.0
    squarings = max(0, math.frexp(size)[1] + 1) if math.isfinite(size) else _MOST_SQUARINGS + 1
    if squarings > _MOST_SQUARINGS:
        nothing = torch.full_like(a, torch.nan)
        return RoundedMatrices(nothing, nothing.new_full(a.shape[:-2], torch.inf))
    b = RoundedMatrices.exact(a * 2.0**-squarings)
    eye = RoundedMatrices.exact(torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape))
    result = eye
    for k in range(_DEGREE, 0, -1):
        result = eye + (b @ result).scaled(1.0 / k)
    result = result.enlarged(_REST)
    for _ in range(squarings):
        result = result @ result
    return result


def _derivative(a: Tensor, move: Tensor) -> Rounded:
    """The derivative along a move, with an error for every entry; it is linear in the move, which is scaled by a
    power of two.
    """
    n = a.shape[-1]
    power = torch.frexp(size_of(move))[1].to(torch.int64)[..., None, None]
    upper = torch.cat([a, times_power(move, -power)], dim=-1)
    lower = torch.cat([torch.zeros_like(a), a], dim=-1)
    found = _exponential(torch.cat([upper, lower], dim=-2)).block(slice(0, n), slice(n, 2 * n))
    error = times_power(found.error[..., None, None], power) + SMALL
    return Rounded(times_power(found.value, power), error.expand(found.value.shape))


def _growth(a: Enclosure) -> Magnitude:
    r"""A bound on :math:`e^\mu` over the domain."""
    if not isinstance(a.value, Tensor) or not a.numel or a.shape[-1] > _LARGEST:
        return Magnitude.infinity()
    stack = a.value.double().reshape(-1, *a.shape[-2:])
    halves = [float(spectral_norm(0.5 * (matrix + matrix.mT))) for matrix in stack]
    size = Magnitude.of(max(halves) * (1 + 2.0**-40)) + a.spread + Magnitude.of(size_of(stack).max()) * 2.0**-52
    exponent = float(minimum(size, a.bound))
    return Magnitude.of(1.0) if exponent == 0 else Magnitude(exponent * math.log2(math.e) * (1 + 2.0**-50))


def _error(call: Call, value: Any) -> Magnitude | None:
    a = call["self"]
    return None if not isinstance(a.value, Tensor) else Magnitude.of(_exponential(a.value).error).norm()


def _pull(call: Call, costate: Tensor) -> Mapping[Slot, Rounded]:
    return {"self": _derivative(call["self"].value.double().mT, costate)}


def _push(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded | None:
    return _derivative(call["self"].value.double(), tangents["self"])


@operation("aten.linalg_matrix_exp", rows=batch("self", 3), evaluate=lambda self: _exponential(self).value,
           error=_error, pullback=_pull, push=_push)  # fmt: skip
def matrix_exponential(call: Call) -> Bounds:
    r"""The exponential of a stack of matrices: slope and curvature :math:`e^\mu`, norm :math:`\sqrt n\,e^\mu`."""
    a = call["self"]
    growth = _growth(a)
    whole = growth * root(a.numel // max(1, a.shape[-1]))
    return Bounds({"self": growth}, {("self", "self"): growth}, bound=whole, peak=growth, reduction=a.shape[-1])
