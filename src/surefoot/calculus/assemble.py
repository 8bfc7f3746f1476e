r"""From the forward pass to the smoothness: a matrix over pairs of variables.

The recursion :math:`L_z = \sum_i J_i L_{x_i} + \sum_{ij} C_{ij}\,\ell_{x_i}\ell_{x_j}^\top` is linear in the
:math:`L`, so the one of the output is a sum over operations,

.. math:: H = \sum_z w_z \sum_{ij} C_{ij}\,\ell_{x_i}\ell_{x_j}^\top, \qquad
    w_{\mathrm{out}} = 1, \quad w_{x_i} = \sum_{\text{readers } z} w_z J_i,

with weights from one backward pass over *numbers*. No matrix per tensor is ever formed, and each operation's
share of the smoothness is known. For a scalar output :math:`w_zC_{ij}` may be replaced by any bound of the second
derivative contracted with the costate (:mod:`surefoot.calculus.adjoint`). Then :math:`\|D^2 z[v, v]\| \le
\sum_{ss'} H_{ss'}\|v_s\|\|v_{s'}\|`, hence :math:`\|D^2 z\| \le \|H\|_2`, the spectral norm of a non-negative
matrix.

An objective :math:`F = h\circ\psi` is a loss of a network's outputs: what Gauss-Newton steps need of both is read
off the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from surefoot.calculus.forward import Pass, Step
from surefoot.domains import Region
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import nonnegative_norm
from surefoot.operations.call import Pair
from surefoot.operations.record import LossFacts, record_of

_ZERO = Magnitude.zero()
Curvatures = Mapping[str, Mapping[Pair, Magnitude]]  # of each operation, by the name of its result


@dataclass(frozen=True)
class Term:
    """One summand of H: weight · (ℓ_left ℓ_rightᵀ, made symmetric)."""

    step: Step
    weight: Magnitude
    left: Magnitude
    right: Magnitude

    @property
    def size(self) -> Magnitude:
        """Its norm."""
        return self.weight * self.left.norm() * self.right.norm()


def weights(result: Pass, instead: bool = False) -> dict[str, Magnitude]:
    """How much a second derivative of each tensor counts at the output.

    With ``instead``, operations are functions of the slots they prefer, and what these pass by does not count.
    """
    total: dict[str, Magnitude] = {}
    for name in result.outputs:
        total[name] = total.get(name, Magnitude.zero()) + 1.0
    for step in reversed(result.steps):
        weight = total.get(step.node.name)
        if weight is None:
            continue
        slopes = ((instead and step.bounds.instead) or step.bounds).jacobian
        for slot, name in step.names.items():
            if slot in slopes:
                total[name] = total.get(name, Magnitude.zero()) + weight * slopes[slot]
    return total


def weighted_curvature(result: Pass) -> Curvatures:
    """The curvatures of every operation as they count at the output: times its weight."""
    weight = weights(result, instead=True)
    return {
        step.node.name: {pair: weight[step.node.name] * amount for pair, amount in bends.items()}
        for step in result.steps
        for bends in [(step.bounds.instead or step.bounds).curvature]
        if step.node.name in weight
    }


def terms(result: Pass, contracted: Curvatures, lipschitz: Mapping[str, Magnitude] | None = None) -> list[Term]:
    """The summands of H that are not zero, from the contracted curvatures of each operation.

    Operations without one do not count. ``lipschitz`` is that of the forward pass, unless given.
    """
    summands: list[Term] = []
    slopes = {name: e.lipschitz for name, e in result.enclosures.items()} if lipschitz is None else lipschitz
    for step in result.steps:
        for (first, second), curvature in contracted.get(step.node.name, {}).items():
            if first not in step.names or second not in step.names:
                continue  # a constant argument has no derivative
            left, right = slopes[step.names[first]], slopes[step.names[second]]
            amount = curvature * (1.0 if first == second else 2.0)
            if not (amount.is_zero or left.is_zero or right.is_zero):
                summands.append(Term(step, amount, left, right))
    return summands


@dataclass(frozen=True)
class Curvature:
    r"""Bounds of a second derivative over a domain, of one function or of a sum.

    With :math:`\hat H` the second derivative at the centre as computed, where it is known,
    :math:`\|D^2F\| \le \min(\|M\|,\ \|\hat H\| + \min(v, \|V\|) + \rho)`.
    """

    matrix: Magnitude  # M, between variables or, of very many, between blocks
    moved: Magnitude  # v, a bound on how far the second derivative may be from the one at the centre
    variation: Magnitude  # V, bounds of the same between variables
    rest: Magnitude = _ZERO  # :math:`\rho`, of the summands that :math:`\hat H` leaves out

    def bounded(self, hessian: Magnitude) -> tuple[Magnitude, Magnitude]:
        """The smoothness and the matrix between variables, given the norm at the centre with its error."""
        smooth, norm = smoothness(self.matrix), hessian + self.rest
        if norm < smooth:
            norm = norm + minimum(self.moved, smoothness(self.variation))
        return (norm, minimum(self.matrix, norm)) if norm < smooth else (smooth, self.matrix)


def in_blocks(summands: list[Term], region: Region) -> list[Term]:
    r"""The summands over blocks instead of variables: :math:`\sum_{s\in b}\ell_s\|v_s\| \le \ell_b\|v_b\|` with
    :math:`\ell_b^2 = \sum_{s\in b}\ell_s^2`.
    """
    members = region.filled_up(region.blocks.values())

    def joined(slopes: Magnitude) -> Magnitude:
        return Magnitude(np.append(slopes.log2, -np.inf))[members].norm(axis=1)

    return [replace(term, left=joined(term.left), right=joined(term.right)) for term in summands]


def assemble(summands: list[Term], variables: int) -> Magnitude:
    r"""The matrix H, entry by entry an upper bound.

    Row :math:`s` is scaled by :math:`2^{r_s}`, the largest finite factor met there, so the sum is one product of
    matrices of ordinary doubles in [0, 1]. What underflows in it is below :math:`2^{-1020}` per summand relative
    to :math:`2^{r_s + r_{s'}}` and is added back; round-off of the product is at most a relative
    :math:`(K + 8) 2^{-52}`. Infinite summands only mark the entries they reach.
    """
    if not summands:
        return Magnitude.zero((variables, variables))
    half = np.array([0.5 * term.weight.log2 for term in summands])[:, None]
    left = _weighted(np.stack([np.asarray(term.left.log2) for term in summands]), half)
    right = _weighted(np.stack([np.asarray(term.right.log2) for term in summands]), half)
    infinite = np.zeros((1, 1), dtype=bool)
    if np.isposinf(left).any() or np.isposinf(right).any():
        infinite = _reached(np.isposinf(left), right > -np.inf) | _reached(left > -np.inf, np.isposinf(right))
        left, right = (np.where(np.isposinf(side), -np.inf, side) for side in (left, right))
    scale = np.maximum(left.max(axis=0), right.max(axis=0))
    safe = np.where(np.isfinite(scale), scale, 0.0)
    product = np.exp2(left - safe).T @ np.exp2(right - safe)
    count = len(summands)
    product = 0.5 * (product + product.T) * (1 + (count + 16) * 2.0**-51) + count * 2.0**-1000
    log2 = np.log2(product) + safe[:, None] + safe[None, :]
    present = np.isfinite(scale)[:, None] & np.isfinite(scale)[None, :]
    log2 = np.where(present, log2 + (np.abs(log2) + 2.0) * 2.0**-49, -np.inf)
    return Magnitude(np.where(infinite | infinite.T, np.inf, log2))


def _weighted(log2: np.ndarray, half: np.ndarray) -> np.ndarray:
    """log2 + half, with zero times infinity equal to zero."""
    with np.errstate(invalid="ignore"):
        return np.where(log2 == -np.inf, -np.inf, log2 + half)


def _reached(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which pairs occur together in some summand."""
    return (left.astype(np.float32).T @ right.astype(np.float32)) > 0


def smoothness(matrix: Magnitude) -> Magnitude:
    """The spectral norm of H, as an upper bound."""
    return nonnegative_norm(matrix)


def by_block(matrix: Magnitude, blocks: Sequence[Sequence[int]]) -> Magnitude:
    """The matrix over pairs of blocks: the Frobenius norm of each part, a bound on its spectral norm."""
    if not blocks:
        return Magnitude.zero((0, 0))
    starts = np.array([members[0] for members in blocks])  # variables are ordered by blocks
    sizes = np.array([len(members) for members in blocks])
    log2 = matrix.log2
    top = np.maximum.reduceat(np.maximum.reduceat(log2, starts, axis=0), starts, axis=1)
    scale = np.where(np.isfinite(top), top, 0.0)
    spread_out = scale.repeat(sizes, axis=0).repeat(sizes, axis=1)
    squares = np.exp2(2 * np.minimum(log2 - spread_out, 0.0))  # positive only where the part is infinite anyway
    total = np.add.reduceat(np.add.reduceat(squares, starts, axis=0), starts, axis=1)
    norm = 0.5 * np.log2(np.maximum(total, 2.0**-1000)) + scale
    return Magnitude(np.where(np.isfinite(top), norm + (np.abs(norm) + 8.0) * 2.0**-48, top))


def loss_facts(result: Pass) -> LossFacts | None:
    """What is known of the operation that computes the output; ``None`` if it is no loss."""
    if not result.steps or result.outputs != (result.steps[-1].node.name,):
        return None
    return record_of(result.steps[-1].node).loss


def is_nonnegative(result: Pass) -> bool:
    """Whether the output is a loss that is never below zero."""
    facts = loss_facts(result)
    return facts is not None and facts.nonnegative


def damping_of(result: Pass) -> Callable[[], tuple[Magnitude, bool]] | None:
    r"""Computes :math:`\ell_hL_\psi` and says whether the loss is quadratic; ``None`` if there is no convex loss.

    :math:`\ell_h` bounds the gradient of the loss at the outputs that occur over the domain, :math:`L_\psi` is the
    smoothness of the outputs, from the same forward pass.
    """
    facts = loss_facts(result)
    if facts is None or not facts.convex:
        return None
    step, quadratic = result.steps[-1], facts.quadratic

    def compute() -> tuple[Magnitude, bool]:
        network = replace(result, outputs=(step.names["outputs"],))
        matrix = assemble(terms(network, weighted_curvature(network)), len(result.region.variables))
        return step.bounds.jacobian["outputs"] * smoothness(matrix), quadratic

    return compute
