"""Gauss-Newton steps with a fixed damping: one rate for all of them, known before the first step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flint import arb

from surefoot.guarantees import damped_rate
from surefoot.theorems.balls import above, below
from surefoot.theorems.gradient_steps import SquareOnBall


@dataclass(frozen=True)
class DampedGaussNewton(SquareOnBall):
    r"""Gauss-Newton with one damping reaches the global minimum, at a linear rate (prox-linear majorisation).

    Let :math:`F = \frac{\mu_h}2\|\psi - y\|^2`, :math:`\sigma_\rho > 0` a lower bound of
    :math:`\sigma_{\min}(D\psi)` and K a Lipschitz constant of :math:`D\psi` on :math:`B(u_0, \rho)`,

    .. math:: \kappa \ge \tfrac{1 + \sqrt2}2\,\mu_hK\|r\|, \qquad
        q = \frac\kappa{\kappa + \mu_h\sigma_\rho^2}, \qquad
        \frac{\|r\|}{\sigma_\rho(1 - \sqrt q)} < \rho .

    *Then* the steps :math:`u_{k+1} = u_k + v_k`, :math:`v_k` the minimiser of :math:`m_k(v) =
    \frac{\mu_h}2\|\psi(u_k) - y + D\psi(u_k)v\|^2 + \frac\kappa2\|v\|^2`, stay in the ball, :math:`F(u_k) \le
    q^kF(u_0)`, and they converge to a global minimiser.

    *Proof.* Let :math:`u_k` be in the ball with residual :math:`r_k`, :math:`\|r_k\| \le \|r\|`, :math:`J =
    D\psi(u_k)`, and :math:`v_k` such that the segment to :math:`u_{k+1}` is in the ball. :math:`m_k(v_k) \le
    m_k(0)` gives :math:`\|r_k + Jv_k\| \le \|r_k\|` and :math:`\kappa\|v_k\|^2 \le \mu_h\|r_k\|^2`. By Taylor's
    formula :math:`\psi(u_{k+1}) - y = r_k + Jv_k + e` with :math:`\|e\| \le \frac K2\|v_k\|^2`, so

    .. math:: F(u_{k+1}) \le \tfrac{\mu_h}2\|r_k + Jv_k\|^2 + \mu_h\|r_k\|\|e\| + \tfrac{\mu_h}2\|e\|^2
        \le \tfrac{\mu_h}2\|r_k + Jv_k\|^2 + \tfrac{\mu_h}2\Big(K\|r_k\| + \tfrac{\mu_hK^2\|r_k\|^2}{4\kappa}\Big)
        \|v_k\|^2 ,

    and with :math:`\kappa = c\mu_hK\|r\|` the bracket is at most :math:`(1 + \frac1{4c})K\|r\| \le \kappa/\mu_h`,
    as :math:`c \ge 1 + \frac1{4c}` for :math:`c \ge \frac{1 + \sqrt2}2`: the model majorises F at its minimiser.
    So :math:`F(u_{k+1}) \le m_k(v_k) \le qF(u_k)` (:func:`surefoot.guarantees.damped_rate`), and :math:`\|r_k\|
    \le q^{k/2}\|r\|`. As :math:`v_k = -J^\top(JJ^\top + \frac\kappa{\mu_h}I)^{-1}r_k`, it is at most
    :math:`\|r_k\|/\sigma_\rho` long, and all steps together are shorter than :math:`\sum_kq^{k/2}\|r\|/\sigma_\rho
    < \rho`: no segment reaches the edge, and the path has a limit. (A. S. Lewis and S. J. Wright, Math. Program.
    158, 2016, and D. Drusvyatskiy and C. Paquette, Math. Program. 178, 2019, for prox-linear steps.)

    >>> profile = sf.theorems.Profile.of([(1.0, 0.01)])
    >>> theorem = sf.theorems.DampedGaussNewton(1.0, 2.0, profile, 0.01, radius=1.0, residual=0.1, weight=1.0)
    >>> theorem.holds, theorem.rate < 0.01
    (True, True)
    """

    theorem: ClassVar[str] = "prox-linear majorisation on a ball"

    @property
    def kappa(self) -> float:
        """:math:`\\kappa`, rounded up; a solved problem or a linear network needs almost no damping."""
        needed = arb(self.weight) * arb(self.bending) * arb(self.residual) * (1 + arb(2).sqrt()) / 2
        return max(above(needed), 1e-12)

    @property
    def rate(self) -> float:
        """q, rounded up."""
        if not self.is_finite:
            return math.inf
        return damped_rate(self.kappa, below(self.lowest), self.weight * (1 - 2.0**-48))

    @property
    def factor(self) -> float:
        """As in :class:`SquareOnBall`."""
        if not self.rate < 1:
            return math.inf
        left = self.lowest * arb(self.radius) * (1 - arb(self.rate).sqrt())
        return above(arb(self.residual) / left)
