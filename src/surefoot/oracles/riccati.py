r"""One computation eliminated from the linear-quadratic problem (Prop. newton_step).

The cost-to-go :math:`\frac12y_t^\top C_ty_t + c_t^\top y_t` gives, with :math:`S = K + G^\top C_tG` and
:math:`s = G^\top c_t`, the problem in the parameters of computation t

.. math:: \min_v\ \tfrac12v^\top Mv + v^\top(Hy_{t-1} + h), \quad
          M = D + E^\top SE,\ H = E^\top SN + \Gamma^\top,\ h = q + E^\top s,\ D = \kappa I + \nabla^2r_t,

which is bounded below if and only if M is positive definite (or semi-definite, which is refused as well). Then
:math:`C_{t-1} = N^\top SN - H^\top M^{-1}H` and :math:`c_{t-1} = N^\top s - H^\top M^{-1}h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.oracles.inner import Inner
from surefoot.oracles.vectors import Spectrum


@dataclass(frozen=True)
class CostToGo:
    """½yᵀCy + cᵀy of the state before a computation, and by how much its parameters lower the cost at y = 0."""

    C: Tensor
    c: Tensor
    decrease: Tensor


class Policy(Protocol):
    """The best parameters as a function of the state before: the gains K_t and k_t of the paper."""

    def __call__(self, y: Tensor) -> Tensor:
        """−M⁻¹(Hy + h)."""


class Direct:
    """Elimination with the matrix M of the size of the parameters."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def eliminate(self, S: Tensor, s: Tensor, D: Tensor, q: Tensor) -> tuple[CostToGo, Policy] | None:
        """The cost-to-go before the computation, and the policy; ``None`` if M is not positive definite.

        Args:
            S: K + GᵀCG.
            s: Gᵀc.
            D: κ plus the curvature of the regulariser, one number per parameter.
            q: the gradient of the regulariser.
        """
        inside, H, M = self._inner.reduced(S)  # H transposed
        M.diagonal().add_(D)
        factor, failed = torch.linalg.cholesky_ex(M)
        if int(failed):
            return None
        right = torch.cat([H, (q + self._inner.pull_parameters(s))[None]])
        solved = torch.linalg.solve_triangular(factor, right.T, upper=False)
        gain, offset = solved[:, :-1], solved[:, -1]
        cost = CostToGo(
            inside.addmm_(gain.T, gain, alpha=-1), self._inner.pull(s) - offset @ gain, 0.5 * offset.dot(offset)
        )

        def policy(y: Tensor) -> Tensor:
            moved = torch.addmv(offset, gain, y) if len(y) else offset
            return -torch.linalg.solve_triangular(factor.T, moved[:, None], upper=True)[:, 0]

        return cost, policy


class Woodbury:
    r"""Elimination in the space of the interface; no matrix has the size of the parameters.

    Let :math:`ED^{-1}E^\top = V\Lambda V^\top` with positive :math:`\Lambda` (the kernel is left out) and
    :math:`L = V\Lambda^{1/2}`. The columns of :math:`U = D^{-1/2}E^\top V\Lambda^{-1/2}` are orthonormal and
    :math:`D^{-1/2}E^\top = UL^\top`, so

    .. math:: D^{-1/2}MD^{-1/2} = I + U(L^\top SL)U^\top:

    M is positive definite if and only if :math:`\tilde M = I + L^\top SL` is. The inverse is
    :math:`\tilde M^{-1}` on the range of U and the identity on the orthogonal complement. The right-hand side
    :math:`D^{-1/2}(E^\top a + \Gamma^\top b + q)` has on the range of U the coordinates
    :math:`L^\top a + \Lambda^{-1/2}V^\top ED^{-1}(\Gamma^\top b + q)`, and on the complement what is left of
    :math:`D^{-1/2}(\Gamma^\top b + q)`; all inner products follow from the Gram matrices.
    """

    def __init__(self, inner: Inner, ridge: Tensor) -> None:
        self._inner = inner
        self._uniform = bool((ridge == ridge[0]).all())
        self._known: tuple[Spectrum, Tensor, Tensor] | None = None

    def eliminate(self, S: Tensor, s: Tensor, D: Tensor, q: Tensor) -> tuple[CostToGo, Policy] | None:
        """As for :class:`Direct`."""
        outer, EΓ, ΓΓ = self._gram(D)
        root = outer.values.sqrt()
        M = outer.coordinates(outer.coordinates(S).T) * root * root[:, None]
        M.diagonal().add_(1.0)
        factor, failed = torch.linalg.cholesky_ex(M)
        if int(failed):
            return None
        scaled = q / D
        Eq, Γq = self._inner.push(self._no_state(S), scaled), self._inner.mixed(scaled)
        NS, inside = self._inner.through_state(S)
        # coordinates in the range of U of Γᵀ and q, and of all of H and h
        own, own_q = outer.coordinates(EΓ) / root[:, None], outer.coordinates(Eq) / root
        H, h = outer.coordinates(NS.T) * root[:, None] + own, outer.coordinates(s) * root + own_q
        solved = torch.linalg.solve_triangular(factor, torch.cat([H, h[:, None]], dim=1), upper=False)
        gain, offset = solved[:, :-1], solved[:, -1]
        cost = CostToGo(
            inside.addmm_(gain.T, gain, alpha=-1) - (ΓΓ - own.T @ own),
            self._inner.pull(s) - offset @ gain - (Γq - own_q @ own),
            0.5 * (offset.dot(offset) + (q.dot(scaled) - own_q.dot(own_q)).clamp(min=0)),
        )

        def policy(y: Tensor) -> Tensor:
            inside_range = torch.linalg.solve_triangular(factor.T, (gain @ y + offset)[:, None], upper=True)[:, 0]
            pushed = outer.combined((inside_range - own @ y - own_q) / root)
            pulled = self._inner.pull_parameters(pushed) + self._inner.mixed_transposed(y) + q
            return -pulled / D

        return cost, policy

    def _no_state(self, S: Tensor) -> Tensor:
        return S.new_zeros(self._inner.pull(S[0]).shape)

    def _gram(self, D: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
        """ED⁻¹Eᵀ, ED⁻¹Γᵀ and ΓD⁻¹Γᵀ; with one weight for all parameters they are found once for all D."""
        if not self._uniform:
            return self._inner.gram(1.0 / D)
        if self._known is None:
            self._known = self._inner.gram(torch.ones_like(D))
        outer, EΓ, ΓΓ = self._known
        return outer.over(D[0]), EΓ / D[0], ΓΓ / D[0]
