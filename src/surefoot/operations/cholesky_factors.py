r"""Cholesky factors of symmetric matrices that stay positive definite.

torch reads the part of A on and below the diagonal: with :math:`S(A)` the symmetric matrix made of it,
:math:`\|S(H)\|_F \le \sqrt2\,\|H\|_F`, the factor is the lower triangular L with :math:`LL^\top = S`. Let
:math:`\Phi` take the lower triangle and halve the diagonal; for symmetric M, :math:`\|\Phi(M)\|_F \le
\|M\|_F/\sqrt2`. With :math:`M_H = L^{-1}S(H)L^{-\top}` (Murray, Differentiation of the Cholesky decomposition,
2016)

.. math:: DL[H] = LP_H,\quad P_H = \Phi(M_H), \qquad D^2L[H, K] = -L\,\Phi\big(P_KP_H^\top + P_HP_K^\top\big):

as :math:`M = P + P^\top`, and :math:`L^{-1}` changes by :math:`-P_KL^{-1}`, the second derivative is
:math:`L(P_KP_H - \Phi(P_KM_H + M_HP_K^\top))`, and :math:`\Phi(X + X^\top) = X` for :math:`X = P_KP_H`, which is
lower triangular.

With :math:`\|S\|_2 \le a` and :math:`\|S^{-1}\|_2 \le s` on the domain, :math:`\|P_H\|_F \le s\|S(H)\|_F/\sqrt2
\le s\|H\|_F`. So the slope is at most :math:`\sqrt a\,s`, reached at the identity. The form :math:`\Phi(XY^\top +
YX^\top)` is symmetric, so its norm is that for X = Y (for each linear functional of it, a symmetric matrix), and
:math:`\|\Phi(2XX^\top)\|_F^2 = 2\|XX^\top\|_F^2 - \sum_i(XX^\top)_{ii}^2 \le 2 - 1/n` for :math:`\|X\|_F = 1`, the
trace of :math:`XX^\top` being 1. So the curvature is at most :math:`\sqrt{2 - 1/n}\,\sqrt a\,s^2`, approached at
the identity by equal entries in the first column as n grows.

*Proof of definiteness.* Let :math:`\hat L` be a computed factor with a positive diagonal, :math:`E = S(\hat A) -
\hat L\hat L^\top`, and X any matrix with :math:`\|I - \hat LX\| < 1`. Then :math:`\|\hat L^{-1}\| \le \|X\|/(1 -
\|I - \hat LX\|)`, the smallest eigenvalue of :math:`\hat L\hat L^\top` is :math:`\|\hat L^{-1}\|^{-2}`, and that
of S(A) at least that less :math:`\|E\| + \sqrt2\,\|A - \hat A\|`.

*Evaluation.* :math:`\hat L` is the exact factor of :math:`\hat L\hat L^\top`, at the distance :math:`\|E\|_F`, so
it is off by :math:`\sqrt a\,s\,\|E\|_F/\sqrt2`, with a and s for all matrices between. The gradient along costates
:math:`\Lambda` is :math:`N = L^{-\top}\Phi(L^\top\Lambda)L^{-1}`, folded onto the lower triangle: :math:`\langle
\Lambda, L\Phi(M_H)\rangle = \langle N, S(H)\rangle`. It is computed with X for :math:`L^{-1}`; as :math:`\|I -
LX\| \le q := \|I - \hat LX\| + \|L - \hat L\|\|X\|`, X is off by :math:`\|X\|q/(1 - q)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.norms import spectral_norm
from surefoot.operations.call import Bounds, Call, Slot
from surefoot.operations.common import batch, root
from surefoot.operations.inverses import RoundedMatrices, residual
from surefoot.operations.record import declare, operation
from surefoot.operations.written_out import written_out
from surefoot.scalar import Rounded

_REASON = (
    "a matrix that is factored may not be positive definite on the domain: shrink the domain, or add a multiple "
    "of the identity"
)
_UP = 1 + 2.0**-40


def lower_factor(self: Tensor) -> Tensor:
    """The Cholesky factor of each matrix of a stack; not numbers where there is none."""
    factor, info = torch.linalg.cholesky_ex(_symmetric(self))
    return torch.where((info != 0)[..., None, None], torch.nan, factor)


def _symmetric(a: Tensor) -> Tensor:
    return a.tril() + a.tril(-1).mT


@dataclass(frozen=True)
class _Proved:
    """Factors at the centre as computed, approximate inverses of them, and for each matrix how large S is, its
    smallest eigenvalue and how far the factor may be from the exact one.
    """

    factor: RoundedMatrices
    inverse: RoundedMatrices
    largest: float
    least: float


def _proved(a: Tensor) -> _Proved | None:
    """What can be proved at the centre; ``None`` if one of the matrices is not seen to be positive definite."""
    matrix = _symmetric(a.double())
    value = lower_factor(matrix)
    if not bool(torch.isfinite(value).all()) or not a.numel():
        return None
    eye = torch.eye(a.shape[-1], dtype=matrix.dtype, device=a.device).expand(matrix.shape)
    inverse = torch.linalg.solve_triangular(value, eye, upper=False)
    factor, x = RoundedMatrices.exact(value), RoundedMatrices.exact(inverse)
    away = (RoundedMatrices.exact(-matrix) + factor @ factor.transposed).size
    rest = residual(value, inverse)
    if not bool((rest < 1).all()):
        return None
    norms = [float(spectral_norm(part)) for part in inverse.reshape(-1, *inverse.shape[-2:])]
    reach = torch.tensor(norms, dtype=torch.float64, device=a.device).reshape(rest.shape) / (1 - rest) * _UP
    least = (reach.square() * _UP).reciprocal() - away * _UP
    if not bool((least > 0).all()):
        return None
    sizes = [float(spectral_norm(part)) for part in matrix.reshape(-1, *matrix.shape[-2:])]
    largest = max(sizes) * _UP + float(away.max())
    off = (math.sqrt(largest) * away / least) * _UP
    wrong = (rest + off * x.size) * _UP
    if not bool((wrong < 1).all()):
        return None
    return _Proved(
        factor.enlarged(off), x.enlarged(x.size * wrong / (1 - wrong)), largest, float(least.min()) / _UP
    )


def _on_domain(a: Enclosure) -> tuple[Magnitude, Magnitude] | None:
    """The bounds of the norms of S and of its inverse."""
    at = _proved(a.value) if isinstance(a.value, Tensor) else None
    if at is None:
        return None
    moved = math.sqrt(2) * float(a.spread) * _UP
    least = (at.least - moved) / _UP
    return (Magnitude.of(at.largest + moved) * _UP, Magnitude.of(1 / least) * _UP) if least > 0 else None


def _error(call: Call, value: Any) -> Magnitude | None:
    a = call["self"]
    at = _proved(a.value) if isinstance(a.value, Tensor) else None
    return Magnitude.infinity() if at is None else Magnitude.of(at.factor.error).norm()


def _pull(call: Call, costate: Tensor) -> Mapping[Slot, Rounded]:
    at = _proved(call["self"].value)
    if at is None:
        return {}
    middle = (at.factor.transposed @ RoundedMatrices.exact(costate).below()).below(halved=True)
    slope = at.inverse.transposed @ middle @ at.inverse
    folded = slope.below() + RoundedMatrices(slope.value.mT.tril(-1), slope.error)
    return {"self": _entries(folded)}


def _push(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded | None:
    at = _proved(call["self"].value)
    if at is None:
        return None
    moved = RoundedMatrices.exact(_symmetric(tangents["self"].double()))
    return _entries(at.factor @ (at.inverse @ moved @ at.inverse.transposed).below(halved=True))


def _entries(found: RoundedMatrices) -> Rounded:
    """The error of an entry is at most that of the whole."""
    return Rounded(found.value, found.error[..., None, None].expand(found.value.shape))


@operation("surefoot.cholesky", rows=batch("self", 3), error=_error, pullback=_pull, push=_push)
def cholesky_factor(call: Call) -> Bounds:
    r"""The lower factor of each matrix of a stack: slope :math:`\sqrt a\,s`, curvature
    :math:`\sqrt{2 - 1/n}\,\sqrt a\,s^2`.

    The norm of L is the root of the trace of S, at most :math:`\sqrt{na}`.
    """
    a = call["self"]
    sizes = _on_domain(a)
    if sizes is None:
        infinite = Magnitude.infinity()
        return Bounds({"self": infinite}, {("self", "self"): infinite}, reason=_REASON)
    (largest, inverse), n = sizes, a.shape[-1]
    length = largest.sqrt()
    return Bounds(
        {"self": length * inverse},
        {("self", "self"): length * inverse**2 * (math.sqrt(2 - 1 / n) * _UP)},
        bound=length * root(a.numel // n),
        peak=length,
        reduction=n,
    )


def _as_lower(node: Node) -> Iterator[Node]:
    """The first result, the factor; an upper one is that of the transposed matrix, transposed."""
    lower = replace(node, op="surefoot.cholesky", target=lower_factor, args=node.args[:1], kwargs={})
    if not node.arguments.get("upper", False):
        yield lower
        return
    turn = replace(node, op="aten.mT", target=torch.ops.aten.mT.default, kwargs={})
    before, factor = f"{node.name}_turned", f"{node.name}_lower"
    yield replace(turn, name=before, args=node.args[:1])
    yield replace(lower, name=factor, args=(Ref(before),))
    yield replace(turn, args=(Ref(factor),))


declare("aten.linalg_cholesky", "aten.linalg_cholesky_ex", "aten.cholesky", canonical=_as_lower)


@written_out("aten.linalg_solve_triangular")
def _solved(self: Tensor, B: Tensor, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    if unitriangular:
        return NotImplemented
    inverse = torch.linalg.inv(self.triu() if upper else self.tril())
    return inverse @ B if left else B @ inverse


@written_out("aten.cholesky_solve")
def _solved_twice(self: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
    inverse = torch.linalg.inv(input2.triu().mT if upper else input2.tril())
    return inverse.mT @ (inverse @ self)
