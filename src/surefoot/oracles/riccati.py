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


class Policy(Protocol):
    """The best parameters as a function of the state before: the gains K_t and k_t of the paper."""

    def __call__(self, y: Tensor) -> Tensor:
        """−M⁻¹(Hy + h)."""


class Elimination(Protocol):
    """A computation eliminated for one κ; the linear terms may be given later, and more than once."""

    @property
    def C(self) -> Tensor:
        """The curvature of the cost-to-go of the state before."""

    def affine(self, s: Tensor, q: Tensor) -> tuple[Tensor, Policy]:
        """The slope c of the cost-to-go at y = 0, and the policy.

        Args:
            s: Gᵀc.
            q: the slope in the parameters alone; that of the regulariser.
        """


class Direct:
    """Elimination with the matrix M of the size of the parameters."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    def eliminate(self, S: Tensor, D: Tensor) -> Elimination | None:
        """The elimination; ``None`` if M is not positive definite.

        Args:
            S: K + GᵀCG.
            D: κ plus the curvature of the regulariser, one number per parameter.
        """
        inside, H, M = self._inner.reduced(S)  # H transposed
        M.diagonal().add_(D)
        factor, failed = torch.linalg.cholesky_ex(M)
        if int(failed):
            return None
        gain = torch.linalg.solve_triangular(factor, H.T, upper=False)
        return _DirectElimination(self._inner, inside.addmm_(gain.T, gain, alpha=-1), factor, gain)


@dataclass(frozen=True)
class _DirectElimination:
    """With LLᵀ = M: the gain L⁻¹H and the offset L⁻¹h."""

    inner: Inner
    C: Tensor
    factor: Tensor
    gain: Tensor

    def affine(self, s: Tensor, q: Tensor) -> tuple[Tensor, Policy]:
        factor, gain = self.factor, self.gain
        slope = q + self.inner.pull_parameters(s)
        offset = torch.linalg.solve_triangular(factor, slope[:, None], upper=False)[:, 0]

        def policy(y: Tensor) -> Tensor:
            moved = torch.addmv(offset, gain, y) if len(y) else offset
            return -torch.linalg.solve_triangular(factor.T, moved[:, None], upper=True)[:, 0]

        return self.inner.pull(s) - offset @ gain, policy


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

    def eliminate(self, S: Tensor, D: Tensor) -> Elimination | None:
        """The same as in :class:`Direct`."""
        outer, EΓ, ΓΓ = self._gram(D)
        root = outer.values.sqrt()
        M = outer.coordinates(outer.coordinates(S).T) * root * root[:, None]
        M.diagonal().add_(1.0)
        factor, failed = torch.linalg.cholesky_ex(M)
        if int(failed):
            return None
        NS, inside = self._inner.through_state(S)
        own = outer.coordinates(EΓ) / root[:, None]  # of Γᵀ, in the range of U
        H = outer.coordinates(NS.T) * root[:, None] + own
        gain = torch.linalg.solve_triangular(factor, H, upper=False)
        C = inside.addmm_(gain.T, gain, alpha=-1) - (ΓΓ - own.T @ own)
        return _WoodburyElimination(self._inner, C, factor, gain, outer, root, own, D)

    def _gram(self, D: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
        """ED⁻¹Eᵀ, ED⁻¹Γᵀ and ΓD⁻¹Γᵀ; with one weight for all parameters they are found once for all D."""
        if not self._uniform:
            return self._inner.gram(1.0 / D)
        if self._known is None:
            self._known = self._inner.gram(torch.ones_like(D))
        outer, EΓ, ΓΓ = self._known
        return outer.over(D[0]), EΓ / D[0], ΓΓ / D[0]


@dataclass(frozen=True)
class _WoodburyElimination:
    """The same in coordinates of the range of U; ``own`` are those of Γᵀ."""

    inner: Inner
    C: Tensor
    factor: Tensor
    gain: Tensor
    outer: Spectrum
    root: Tensor
    own: Tensor
    D: Tensor

    def affine(self, s: Tensor, q: Tensor) -> tuple[Tensor, Policy]:
        inner, outer, factor, gain, own = self.inner, self.outer, self.factor, self.gain, self.own
        scaled, pulled = q / self.D, inner.pull(s)
        own_q = outer.coordinates(inner.push(torch.zeros_like(pulled), scaled)) / self.root
        h = outer.coordinates(s) * self.root + own_q
        offset = torch.linalg.solve_triangular(factor, h[:, None], upper=False)[:, 0]

        def policy(y: Tensor) -> Tensor:
            inside_range = torch.linalg.solve_triangular(factor.T, (gain @ y + offset)[:, None], upper=True)[:, 0]
            pushed = outer.combined((inside_range - own @ y - own_q) / self.root)
            return -(inner.pull_parameters(pushed) + inner.mixed_transposed(y) + q) / self.D

        return pulled - offset @ gain - (inner.mixed(scaled) - own_q @ own), policy
