r"""There is a solution nearby, and Gauss-Newton converges to one (Newton-Kantorovich, underdetermined).

:math:`u_0` are the weights, :math:`\psi` the outputs of all samples stacked, :math:`J = D\psi(u_0)`, :math:`r =
\psi(u_0) - y`. Let :math:`0 < \sigma \le \sigma_{\min}(J)`, :math:`\eta \ge \|J^+r\|`, and K be a Lipschitz
constant of :math:`D\psi` on :math:`B(u_0, \rho)`, with

.. math:: h = \frac{K\eta}\sigma \le \frac12, \qquad t^* = \frac{(1 - \sqrt{1 - 2h})\,\sigma}K =
    \frac{2\eta}{1 + \sqrt{1 - 2h}} \le \rho .

*Then* some :math:`u^*` has :math:`\psi(u^*) = y` and :math:`\|u^* - u_0\| \le t^*`, and the Gauss-Newton steps
:math:`u_{k+1} = u_k - D\psi(u_k)^+(\psi(u_k) - y)` stay in the ball and converge to one, with :math:`\|u^* - u_k\|
\le t^* - t_k`, where :math:`t_k` are Newton's iterates from 0 for :math:`f(t) = \eta - t +
\frac{K}{2\sigma}t^2`, whose smallest root is :math:`t^*`: quadratically if :math:`h < \frac12`.

*Proof.* On :math:`B(u_0, t)`, :math:`\|J^+(D\psi(u) - J)\| \le Kt/\sigma`. As :math:`JJ^+ = I`, :math:`D\psi(u) =
JT` with :math:`T = I + J^+(D\psi(u) - J)`; for :math:`Kt < \sigma` T is invertible, :math:`D\psi(u)` is onto like
J, and as :math:`T^{-1}J^+z` solves :math:`D\psi(u)v = z`, :math:`\|D\psi(u)^+z\| \le \|J^+z\|/(1 - Kt/\sigma)`
(1). f is convex, f(0) is positive and :math:`f'(t) = -1 + Kt/\sigma < 0` before :math:`t^*`, so Newton's iterates
increase to :math:`t^*`. By induction

.. math:: \|J^+(\psi(u_k) - y)\| \le f(t_k), \qquad \|u_{k+1} - u_k\| \le t_{k+1} - t_k, \qquad
    \|u_k - u_0\| \le t_k .

For k = 0 the first is :math:`\|J^+r\| \le \eta`. The first implies the second: (1) bounds the step by
:math:`f(t_k)/(1 - Kt_k/\sigma) = -f(t_k)/f'(t_k) = t_{k+1} - t_k`. The second implies the third for k + 1, and the
first: :math:`s_k = u_{k+1} - u_k` solves :math:`\psi(u_k) - y + D\psi(u_k)s_k = 0`, so by Taylor's formula
:math:`\|J^+(\psi(u_{k+1}) - y)\| \le \frac K{2\sigma}\|s_k\|^2 \le \frac K{2\sigma}(t_{k+1} - t_k)^2 =
f(t_{k+1})`, as f is its own second Taylor polynomial at :math:`t_k` and the first two terms vanish. So the
:math:`u_k` are a Cauchy sequence whose limit is within :math:`t^* - t_k` of :math:`u_k`, and :math:`\|\psi(u_k) -
y\| = \|JJ^+(\psi(u_k) - y)\| \le \|J\|f(t_k) \to 0`. (L. V. Kantorovich 1948; P. Deuflhard and G. Heindl, SIAM J.
Numer. Anal. 16, 1979, for conditions that do not depend on the scaling of the equations.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flint import arb, ctx

from surefoot.theorems.arithmetic import BITS, above, proved, square

_MOST_STEPS = 200


@dataclass(frozen=True)
class Interpolation:
    r"""The theorem with its numbers; see :mod:`surefoot.theorems.interpolation`.

    Attributes:
        eta: :math:`\eta`.
        sigma: :math:`\sigma`.
        bending: K.
        radius: :math:`\rho`.
        norm: a bound on :math:`\|J\|`.
        residual: a bound on :math:`\|r\|`.
        weight: the objective is this number times half of the squared residual.

    >>> theorem = sf.theorems.Interpolation(
    ...     eta=0.125, sigma=1.0, bending=1.0, radius=1.0, norm=1.0, residual=0.125, weight=1.0)
    >>> theorem.h, theorem.holds, theorem.iterations(1e-20)
    (0.125, True, 4)
    """

    eta: float
    sigma: float
    bending: float
    radius: float
    norm: float
    residual: float
    weight: float

    @property
    def h(self) -> float:
        """h, rounded up; infinite if the Jacobian is not proved to be onto or K is infinite."""
        if not (self.sigma > 0 and math.isfinite(self.bending) and math.isfinite(self.eta)):
            return math.inf
        return above(arb(self.bending) * arb(self.eta) / arb(self.sigma))

    @property
    def distance(self) -> float:
        """:math:`t^*`, rounded up; infinite if there is none."""
        return above(self._root()) if self.h <= 0.5 else math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return self.h <= 0.5 and self.distance <= self.radius

    @property
    def factor(self) -> float:
        """A residual this many times smaller, at the same Jacobian, is enough; one if the theorem holds."""
        return 1.0 if self.holds else max(2 * self.h, above(2 * arb(self.eta) / arb(self.radius)))

    @property
    def rate(self) -> float:
        """The bound on the distance after the first step over that before it."""
        first, second = (self.after(k)[0] for k in (0, 1))
        return second / first if first > 0 else 0.0

    def _root(self) -> arb:
        inside = 1 - 2 * arb(self.h)
        return 2 * arb(self.eta) / (1 + inside.max(arb(0)).sqrt())

    def _majorant(self, t: arb) -> arb:
        return arb(self.eta) - t + arb(self.bending) / (2 * arb(self.sigma)) * square(t)

    def after(self, steps: int) -> tuple[float, float]:
        """Bounds on the distance to the solution and on the residual after this many steps."""
        with ctx.workprec(BITS):
            t, root = arb(0), self._root()
            for _ in range(steps):
                if not proved(self._majorant(t) > 0):
                    break
                t = t + self._majorant(t) / (1 - arb(self.bending) / arb(self.sigma) * t)
            residual = above(arb(self.norm) * abs(self._majorant(t)))
            return max(above(root - t), 0.0), residual if steps else min(residual, self.residual)

    def iterations(self, eps: float) -> int:
        """The number of steps after which the objective is at most eps."""
        for steps in range(_MOST_STEPS):
            residual = arb(self.after(steps)[1])
            if proved(arb(self.weight) / 2 * square(residual) <= arb(eps)):
                return steps
        raise OverflowError(f"more than {_MOST_STEPS} steps for {eps:g}: h is {self.h:.6g}, too close to ½")
