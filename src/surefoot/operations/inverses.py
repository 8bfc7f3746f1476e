r"""Inverses and determinants of square matrices that stay away from singular ones.

With :math:`\|A^{-1}\|_2 \le s` on the domain:

* *Inverse*: :math:`D A^{-1}[H] = -A^{-1}HA^{-1}` and :math:`D^2 = A^{-1}HA^{-1}KA^{-1} + A^{-1}KA^{-1}HA^{-1}`, in
  the Frobenius norm at most :math:`s^2` and :math:`2s^3`.
* *Logarithm of the determinant*: the gradient :math:`A^{-\top}` has norm at most :math:`\sqrt n\,s`, the
  second derivative :math:`-\mathrm{tr}(A^{-1}HA^{-1}K)` at most :math:`s^2`, by Cauchy-Schwarz.

A matrix at the centre has :math:`\|\hat A^{-1}\| \le \|X\|/(1 - \|I - \hat AX\|)` for any X with
:math:`\|I - \hat AX\| < 1` (Neumann's series), so a computed inverse proves it; one within the distance d has
:math:`s = \hat s/(1 - d\hat s)`, as :math:`A^{-1} = \hat A^{-1}(I + (A - \hat A)\hat A^{-1})^{-1}`.

*Evaluation.* The computed inverse X is off by at most :math:`\hat s\|I - \hat AX\|_F`. Elimination computes the
exact determinant of :math:`\hat A + E` with :math:`\|E\| \le g` (Higham, Accuracy and Stability of Numerical
Algorithms, theorem 9.3: :math:`|E| \le \gamma_n|L||U|`), and n logarithms are added up; so the logarithm is off by
:math:`n\,\hat sg/(1 - \hat sg)` and the round-off of the sum.

*Derivatives.* Any X is off by at most :math:`d = \hat s\|I - \hat AX\|_F`, and with that error in the product
:math:`X\dot AX`, or with X transposed to pull costates back (:class:`RoundedMatrices`). The
gradient of the logarithm, :math:`X^\top`, is off by d.

Matrices as computed, each with a proved bound on the Frobenius norm of its error.

A product of matrices with inner dimension k, :math:`A' = A + E_A` and :math:`B' = B + E_B`, is computed as
:math:`\mathrm{fl}(AB)` with :math:`|\mathrm{fl}(AB) - AB| \le \gamma_k|A||B|` in whatever order products are added
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.5), so it is off by

.. math:: \|A\|_F\|E_B\|_F + \|E_A\|_F(\|B\|_F + \|E_B\|_F) + \gamma_{k+4}\|A\|_F\|B\|_F + \eta

with :math:`\eta` what underflow takes. A sum rounds each entry once. Bounds are raised by :math:`2^{-40}`, more
than their own round-off: they are sums of fewer than :math:`2^{10}` terms, and norms of matrices with fewer than
:math:`2^{12}` rows and columns have a relative error below :math:`2^{-42}` where entries are summed pairwise or in
blocks, :math:`2^{-28}` in any order; :func:`size_of` adds the latter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Graph, Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.norms import spectral_norm
from surefoot.norms.hermitian import gamma
from surefoot.operations.call import Bounds, Call, Slot
from surefoot.operations.common import batch, root
from surefoot.operations.record import Expansion, expansion, operation
from surefoot.operations.softmax import summed
from surefoot.operations.written_out import written_out
from surefoot.scalar import Rounded

_UP = 1 + 2.0**-40
_SMALL = 2.0**-1000  # more than what underflows in a product of matrices


def size_of(matrices: Tensor) -> Tensor:
    """Frobenius norms, rounded up, one for each matrix of a stack."""
    matrices = matrices.detach()
    count = matrices.shape[-1] * matrices.shape[-2]
    largest = matrices.abs().amax(dim=(-2, -1)).clamp_min(2.0**-500)  # no square leaves the range of doubles
    norm = torch.linalg.matrix_norm(matrices / largest[..., None, None]) * largest
    return norm * (1 + (count + 8) * 2.0**-52) + _SMALL


@dataclass(frozen=True, eq=False)
class RoundedMatrices:
    """Computed matrices in double precision, and for each a bound on the norm of its error."""

    value: Tensor
    error: Tensor

    @staticmethod
    def exact(value: Tensor) -> RoundedMatrices:
        """Matrices that are what they are."""
        wide = value.double()
        return RoundedMatrices(wide, wide.new_zeros(wide.shape[:-2]))

    @property
    def size(self) -> Tensor:
        """On the norms of the exact matrices."""
        return (size_of(self.value) + self.error) * _UP

    @property
    def transposed(self) -> RoundedMatrices:
        """The transposed matrices."""
        return RoundedMatrices(self.value.mT, self.error)

    def __matmul__(self, other: RoundedMatrices) -> RoundedMatrices:
        a, b = size_of(self.value), size_of(other.value)
        rounding = gamma(self.value.shape[-1] + 4) * a * b + _SMALL
        error = a * other.error + self.error * (b + other.error) + rounding
        return RoundedMatrices(self.value @ other.value, error * _UP)

    def __add__(self, other: RoundedMatrices) -> RoundedMatrices:
        value = self.value + other.value
        return RoundedMatrices(value, (self.error + other.error + 2.0**-53 * size_of(value)) * _UP)

    def enlarged(self, error: Tensor | float) -> RoundedMatrices:
        """The same, off by so much more."""
        return RoundedMatrices(self.value, (self.error + error) * _UP)


def residual(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Bounds of the Frobenius norms of AX - I, one for each matrix of a stack."""
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64, device=matrix.device).expand(matrix.shape)
    product = RoundedMatrices.exact(matrix) @ RoundedMatrices.exact(inverse)
    return (product + RoundedMatrices.exact(-eye)).size


_REASON = "a matrix that is inverted may be singular on the domain: shrink the domain, or keep it away from that"
_LARGEST = 2048  # rows of a matrix that is looked at
_MOST = 64  # matrices whose largest singular value is proved; of more, Frobenius norms do


def _inverse_norm(a: Enclosure) -> float:
    """s over the domain, the largest of several matrices; infinite if that is not proved to be finite."""
    at = _centre_inverse_norm(a)
    moved = at * float(a.spread) * (1 + 2.0**-50)
    return at / (1 - moved) * (1 + 2.0**-50) if moved < 1 else math.inf


def _centre_inverse_norm(a: Enclosure) -> float:
    value = a.value
    if not isinstance(value, Tensor) or not value.numel() or value.shape[-1] > _LARGEST:
        return math.inf
    inverse, info = torch.linalg.inv_ex(value.double())
    if bool((info != 0).any()):
        return math.inf
    rest = residual(value, inverse).reshape(-1)
    if not bool((rest < 1).all()):
        return math.inf
    stack = inverse.reshape(-1, *inverse.shape[-2:])
    few = len(stack) <= _MOST
    sizes = [float(spectral_norm(x)) if few else float(torch.linalg.vector_norm(x)) for x in stack]
    return max(size / (1 - r) for size, r in zip(sizes, rest.tolist(), strict=True)) * (1 + 2.0**-40)


def _singular(slot: str) -> Bounds:
    infinite = Magnitude.infinity()
    return Bounds({slot: infinite}, {(slot, slot): infinite}, reason=_REASON)


def inverted(A: Tensor) -> Tensor:
    """The inverse of each matrix of a stack; of a singular one something that is not finite, and no error."""
    return torch.linalg.inv_ex(A)[0]


@expansion("aten.linalg_inv_ex")
def _without_flags(graph: Graph, node: Node) -> Expansion | None:
    """Only the inverse, where nobody reads the flags that say whether there is one."""
    flags = {n.name for n in graph.nodes if n.target is operator.getitem and n.args == (Ref(node.name), 1)}
    if any(flags.intersection(n.inputs) for n in graph.nodes) or flags.intersection(graph.outputs):
        return None
    name, args, target = f"{node.name}_inverse", (node.arguments["A"],), torch.ops.aten.linalg_inv.default
    single = replace(
        node, name=name, op="aten.linalg_inv", target=target, args=args, kwargs={}, spec=node.specs[0]
    )
    return Expansion((single,), (Ref(name), Ref(name)))


def _centre_inverse(a: Enclosure) -> RoundedMatrices:
    """The computed inverses X at the centre, with their distances d from the exact ones."""
    computed = RoundedMatrices.exact(inverted(a.value.double()))
    return computed.enlarged(residual(a.value, computed.value) * _centre_inverse_norm(a))


def _between(outer: RoundedMatrices, middle: Tensor) -> Rounded:
    """Minus a product with the inverse, or its transpose, on both sides."""
    found = outer @ RoundedMatrices.exact(-middle) @ outer
    return Rounded(found.value, found.error[..., None, None])


def _inverse_error(call: Call, value: Any) -> Magnitude | None:
    norm = _centre_inverse_norm(call["A"])
    rest = residual(call["A"].value, value).reshape(-1)
    return Magnitude.of(rest).norm() * norm * (1 + 2.0**-40) if math.isfinite(norm) else Magnitude.infinity()


@operation("aten.linalg_inv", evaluate=inverted, rows=batch("A", 3), error=_inverse_error,
           pullback=lambda call, costate: {"A": _between(_centre_inverse(call["A"]).transposed, costate)},
           push=lambda call, tangents: _between(_centre_inverse(call["A"]), tangents["A"]))  # fmt: skip
def inverse(call: Call) -> Bounds:
    """The inverse of each matrix of a stack: slope s², curvature 2s³."""
    a = call["A"]
    norm = _inverse_norm(a)
    if math.isinf(norm):
        return _singular("A")
    s, n = Magnitude.of(norm), a.shape[-1]
    whole = s * root(a.numel // max(1, n))
    return Bounds({"A": s**2}, {("A", "A"): s**3 * 2.0}, bound=whole, peak=whole, reduction=n)


def _determinant_error(call: Call, value: Any) -> Magnitude | None:
    a = call["self"]
    norm = _centre_inverse_norm(a)
    if math.isinf(norm):
        return Magnitude.infinity()
    n = a.shape[-1]
    matrices = a.value.double().reshape(-1, n, n)
    _, lower, upper = torch.linalg.lu(matrices)
    backward = torch.linalg.matrix_norm(lower.abs() @ upper.abs()).amax() * (n * 2.0**-52)
    off = float(backward) * norm * 1.01
    if not off < 0.5:
        return Magnitude.infinity()
    logs = float(upper.diagonal(dim1=-2, dim2=-1).abs().log().abs().sum(-1).amax())
    each = n * off / (1 - off) + (n + 8) * 2.0**-50 * (logs + 1)
    return Magnitude.of(each) * root(len(matrices))


def _gradient_of_logarithm(call: Call) -> Rounded:
    inverse = _centre_inverse(call["self"])
    return Rounded(inverse.value.mT, inverse.error[..., None, None])


def _push_determinant(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    total = summed(_gradient_of_logarithm(call) * tangents["self"], (-2, -1))
    return Rounded(total.value[..., 0, 0], total.error[..., 0, 0])


@operation("aten.logdet", rows=batch("self", 3), error=_determinant_error,
           pullback=lambda call, costate: {"self": _gradient_of_logarithm(call) * costate[..., None, None]},
           push=_push_determinant)  # fmt: skip
def log_determinant(call: Call) -> Bounds:
    """The logarithm of the determinant of each matrix of a stack: slope √n s, curvature s²."""
    a = call["self"]
    norm = _inverse_norm(a)
    if math.isinf(norm):
        return _singular("self")
    s = Magnitude.of(norm)
    return Bounds({"self": root(a.shape[-1]) * s}, {("self", "self"): s**2}, reduction=a.shape[-1])


written_out("aten.linalg_solve", "aten._linalg_solve_ex")(lambda A, B, left=True, **_: _solved(A, B, left))


def _solved(a: Tensor, b: Tensor, left: bool) -> Tensor:
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    inverse = torch.linalg.inv(a)
    if vector:
        return (inverse @ b.unsqueeze(-1)).squeeze(-1)
    return inverse @ b if left else b @ inverse
