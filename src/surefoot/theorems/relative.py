r"""How fast the Jacobian changes, measured by itself: :math:`\omega_0 \ge \sup_{\|v\|=1}\|J^+D^2\psi(u_0)[v,
v]\|`.

Always :math:`\omega_0 \le K/\sigma`, and they are equal only if the second derivative points where J is smallest;
on real data :math:`\omega_0` is ten times smaller and more. As :math:`\|J^+z\|^2 = z^\top G^{-1}z` with :math:`G =
JJ^\top`, a term that is linear in :math:`y = v_j\otimes v_k`, :math:`z = Ay`, is at most
:math:`\sqrt\mu\|v_j\|\|v_k\|` if

.. math:: AA^\top \preceq \mu G .

With the notation of :mod:`surefoot.theorems.bending`, the index (n, o) of a sample and an output, and :math:`X_k`
the Gram matrix of the rows :math:`(x_{k-1,n}, 1)`, spread over the outputs, :math:`AA^\top` is

* for :math:`\sum_iQ_{z,oi}a_{z,i}''(e_{z,i})^2`, in which each unit meets its own row of weights, the largest over
  the units of :math:`\mathrm{diag}(q_i)(X_z\circ X_z)\mathrm{diag}(q_i)`, :math:`q_{i,no} =
  Q_{z,n,oi}a_{z,n,i}''`;
* for other pairs :math:`(RR^\top)\circ X_j\circ X_k`, R with the rows :math:`\mathrm{vec}\sum_zP_{zj}^\top
  \mathrm{diag}(q_{z,no})P_{zk}`;
* for :math:`c^\top B_t\dot W_t\mathrm{diag}(a_{t-1}')e_{t-1}`, again unit by unit,
  :math:`\mathrm{diag}(a_i')(B_tB_t^\top\circ X_{t-1})\mathrm{diag}(a_i')`;
* for those with k < t - 1, :math:`B_tB_t^\top\circ(SS^\top)\circ X_k`, S with the rows
  :math:`\mathrm{vec}(\mathrm{diag}(a_{t-1}')P_{t-1,k})`.

A sum over units is bounded by the largest of its terms because :math:`\sum_i\|v_{j,i}\|\|v_{k,i}\| \le
\|v_j\|\|v_k\|`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.magnitude import Magnitude
from surefoot.norms import frobenius_norm, nonnegative_norm
from surefoot.norms.hermitian import gamma, up
from surefoot.norms.verified import norm_of, product
from surefoot.scalar import Rounded
from surefoot.theorems.hessian import contract, features_of, flows_of, second_slopes
from surefoot.theorems.layered import Layer, Layered, spread_over

_MOST_PRODUCTS = 3e11  # multiplications of all factorisations together
_MOST_ENTRIES = 3e7  # entries of a matrix R, and of a batch of matrices
_SWEEPS = 40
_ATTEMPTS = 12


def relative_bending(layered: Layered) -> float:
    """:math:`\\omega_0`; infinite if it would cost too much or is not proved."""
    size, depth = layered.outputs.value.numel(), len(layered.layers)
    if not is_affordable(layered.layers, size):
        return math.inf
    features = [_gram(features_of(layered, k)) if layered.layers[k].trains else None for k in range(depth)]
    slopes = [state[2] for state in layered.states]
    outer = [_gram(b.rearranged(lambda t: t.flatten(0, 1))) for _, b in layered.sensitivities]
    bent = [_bent(layered, z) for z in range(depth)]  # samples × outputs × width
    flows = flows_of(layered, slopes) if _is_deep(layered.layers) else {}
    matrix = torch.zeros(depth, depth, dtype=torch.float64)

    def add(j: int, k: int, form: Rounded, units: Rounded | None = None) -> None:
        amount = up(math.sqrt(dominated(layered.gram, form, units)))
        for row, column in {(j, k), (k, j)}:
            matrix[row, column] += amount

    for j in range(depth):
        for k in range(j + 1):
            first, other = features[j], features[k]
            if first is None or other is None:
                continue
            both = _over(first, size) * _over(other, size)
            if j == k:
                add(j, k, both, bent[j].rearranged(lambda t: t.flatten(0, 1).mT))
            later = [
                contract("nzi,noz,nzl->noil", flows[z, j], bent[z], flows[z, k])
                for z in range(j + (j == k), depth)
                if bool(bent[z].bound.any())
            ]
            if later:
                rows = sum(later[1:], later[0]).rearranged(lambda t: t.flatten(2).flatten(0, 1))
                add(j, k, _gram(rows) * both)
            if k < j and layered.layers[j].trains_weight:
                form = outer[j] * _over(other, size)
                if k == j - 1:
                    times = size // layered.count
                    add(j, k, form, slopes[k].rearranged(lambda t, n=times: t.repeat_interleave(n, 0).mT))  # type: ignore[misc]
                else:
                    moved = slopes[j - 1].rearranged(lambda t: t[:, :, None]) * flows[j - 1, k]
                    add(j, k, form * _over(_gram(moved.rearranged(lambda t: t.flatten(1))), size))
    return float(nonnegative_norm(Magnitude.of(matrix.numpy()))) * (1 + 1e-9)


def _is_deep(layers: Sequence[Layer]) -> bool:
    """Whether a layer bends the output of an earlier one: a third layer does, or a function of the outputs."""
    return len(layers) > 2 or layers[-1].function is not None


def is_affordable(layers: Sequence[Layer], size: int) -> bool:
    """Whether the factorisations and the matrices R are small enough, for ``size`` outputs of all samples."""
    widths = [layer.weight.shape[0] for layer in layers]
    rows = size * max(widths) ** (2 if _is_deep(layers) else 1)
    return 2 * sum(widths) * size**3 / 3 <= _MOST_PRODUCTS and rows <= _MOST_ENTRIES


def dominated(gram: Rounded, form: Rounded, units: Rounded | None = None) -> float:
    r"""A number :math:`\mu` with :math:`\mathrm{diag}(q_i)C\,\mathrm{diag}(q_i) \preceq \mu G` for all i.

    The guess is by power iteration. The proof is that :math:`A = \mathrm{fl}(\mu\hat G - \hat M_i) - sI` has a
    Cholesky factor in floating point: then :math:`R^\top R = A + \Delta`, :math:`\|\Delta\| \le
    \gamma_{n+1}\|R\|_F^2` (N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., theorem
    10.3), so :math:`\mu G - M_i \succeq 0` if s is at least this, the errors of G and :math:`M_i`, and the
    rounding of A.

    Args:
        gram: G.
        form: C.
        units: the :math:`q_i` as rows; ``None`` for a single row of ones.
    """
    size = len(gram.value)
    if units is None:
        units = Rounded.exact(torch.ones(1, size, dtype=torch.float64)).expand((1, size))
    q = units.expand(units.value.shape)
    if not bool(q.value.any() or q.error.any()):
        return 0.0
    factor, failed = torch.linalg.cholesky_ex(gram.value)
    if int(failed) or not bool(torch.isfinite(form.error).all()):
        return math.inf
    guess, error = _guess(factor, gram.value, form.value, q.value), norm_of(gram.error)
    best, chunk = guess * 1.01 + 1e-280, max(1, int(_MOST_ENTRIES / 16 / size**2))
    for start in range(0, len(q.value), chunk):
        part = q.value[start : start + chunk]
        matrices = part[:, :, None] * form.value * part[:, None, :]
        wrong = _error(form, part, q.error[start : start + chunk])
        for _ in range(_ATTEMPTS):
            if _is_below(matrices, wrong, gram.value, error, best):
                break
            best *= 1.3
        else:
            return math.inf
    return best


def _is_below(matrices: Tensor, wrong: Tensor, gram: Tensor, error: float, level: float) -> bool:
    difference = level * gram - matrices
    size = len(gram)
    trace = difference.diagonal(dim1=1, dim2=2).abs().sum(1)
    rounding = (
        4 * 2.0**-53 * (level * torch.linalg.vector_norm(gram) + torch.linalg.vector_norm(matrices, dim=(1, 2)))
    )
    shift = (level * error + wrong + rounding + gamma(size + 2) * trace * 1.01) * 1.01
    difference.diagonal(dim1=1, dim2=2).sub_(shift[:, None])
    factor, failed = torch.linalg.cholesky_ex(difference)
    if bool(failed.any()) or not bool(torch.isfinite(factor).all()):
        return False
    needed = level * error + wrong + rounding + gamma(size + 2) * factor.square().sum((1, 2)) * (1 + 1e-9)
    return bool((shift >= needed).all())


def _guess(factor: Tensor, gram: Tensor, form: Tensor, units: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(gram), len(units), dtype=torch.float64, generator=generator)
    columns = units.mT
    for _ in range(_SWEEPS):
        vectors = torch.cholesky_solve(columns * (form @ (columns * vectors)), factor)
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=0).clamp(min=1e-280)
    above = ((columns * vectors) * (form @ (columns * vectors))).sum(0)
    return float((above / (vectors * (gram @ vectors)).sum(0).clamp(min=1e-280)).amax())


def _error(form: Rounded, units: Tensor, errors: Tensor) -> Tensor:
    r"""Bounds on the norms of the errors of the :math:`\mathrm{diag}(q_i)C\,\mathrm{diag}(q_i)`: with :math:`\bar
    q` and :math:`\bar e` the largest entry and the largest error, :math:`\bar q^2\|E_C\|_F + (2\bar q\bar e +
    \bar e^2 + 4u\bar q^2)(\|C\|_F + \|E_C\|_F)`.
    """
    size, wrong = frobenius_norm(form.value), frobenius_norm(form.error.expand(form.value.shape))
    largest, error = units.abs().amax(1), errors.amax(1)
    relative = 2 * largest * error + error**2 + 4 * 2.0**-53 * largest**2
    return (largest**2 * wrong + relative * (size + wrong)) * (1 + 1e-9) + 1e-290


def _gram(rows: Rounded) -> Rounded:
    return product(rows.expand(rows.value.shape), rows.rearranged(lambda t: t.mT))


def _over(matrix: Rounded, size: int) -> Rounded:
    """A matrix over samples, as a matrix over all outputs."""
    return matrix.rearranged(lambda t: spread_over(t, size // len(t)))


def _bent(layered: Layered, z: int) -> Rounded:
    """:math:`Q_za_z''`, samples × outputs × width."""
    bend, through = second_slopes(layered, z).rearranged(lambda t: t[:, None, :]), layered.sensitivities[z][0]
    if through is None:
        unit = torch.eye(bend.value.shape[2], dtype=torch.float64)
        return bend.rearranged(lambda t: t * unit)
    return through * bend
