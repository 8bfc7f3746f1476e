r"""The heavy ball reaches the global minimum, at a linear rate (Polyak-Łojasiewicz on a ball).

The steps are those of ``torch.optim.SGD`` with momentum: :math:`u_{k+1} = u_k + d_{k+1}`, :math:`d_{k+1} =
\beta d_k - \alpha\nabla F(u_k)`, :math:`d_0 = 0`, :math:`0 < \beta < 1`. Let F be L-smooth and
:math:`\|\nabla F\|^2 \ge 2\mu F` on :math:`B(u_0, \rho)`, :math:`F \ge 0`, and

.. math:: b = \frac\beta{2\alpha}, \quad c = \frac1\alpha - b - \frac L2, \quad b < a < c, \quad
    t = \beta + \alpha\sqrt{2\mu a}, \quad n = \min\Big(\frac{c - a}{1 + t/2}, \frac{2(a - b)}t\Big), \quad
    \rho > \frac{2\sqrt{F(u_0)}}{n\alpha\sqrt{2\mu}} .

*Then* the steps stay in the ball and converge to a point with F = 0, and for every :math:`\lambda \ge 0` with
:math:`a' = c - \lambda(1 + \beta) > 0`

.. math:: F(u_k) \le q^kF(u_0), \qquad q = \max\Big(1 - 2\lambda\mu\alpha^2,\ \frac{b + \lambda(1 +
    \beta)\beta}{a'}\Big).

*Proof.* Let :math:`g = \nabla F(u_k)`, :math:`d = d_{k+1}`, :math:`X = \|d\|`, :math:`y = \|d_k\|`, and let
the segment to :math:`u(s) = u_k + sd`, :math:`s \le 1`, be in the ball, :math:`x = sX`. As :math:`g = (\beta
d_k - d)/\alpha`, the descent lemma is :math:`F(u(s)) \le F(u_k) + (\beta xy - xX)/\alpha + \frac L2x^2`, and
with :math:`xy \le (x^2 + y^2)/2`, :math:`x \le X`

.. math:: F(u(s)) + a x^2 \le F(u_k) + ay^2 - (c - a)xX - (a - b)y^2. \tag{1}

*Inside.* Let :math:`E_k = F(u_k) + ay^2` and E(s) be the left side of (1). :math:`\sqrt{2\mu F(u_k)} \le
\|g\| \le (X + \beta y)/\alpha`, so :math:`\alpha\sqrt{2\mu E_k} \le X + ty`, and :math:`\alpha\sqrt{2\mu}\,
x\sqrt{E_k} \le xX + t(xX + y^2)/2 \le (E_k - E(s))/n` by (1). As :math:`\sqrt{E_k} - \sqrt{E(s)} \ge (E_k -
E(s))/2\sqrt{E_k}`, :math:`x \le 2(\sqrt{E_k} - \sqrt{E(s)})/(n\alpha\sqrt{2\mu})`. This adds up over all
steps: the length of the path to u(s) is less than :math:`\rho`, it does not reach the edge, and
:math:`u_{k+1}` is inside. (If :math:`E_k = 0`, g = 0 and nothing moves.) A path of finite length converges.
*Rate.* (1) with s = 1, a = 0: :math:`F_{k+1} + cX^2 \le F_k + by^2`. Add :math:`\lambda` times
:math:`2\mu\alpha^2F_k \le \|\beta d_k - d\|^2 \le (1 + \beta)(\beta y^2 + X^2)`: :math:`F_{k+1} + a'X^2 \le
(1 - 2\lambda\mu\alpha^2)F_k + (b + \lambda(1 + \beta)\beta)y^2 \le q(F_k + a'y^2)`.

No rate much better than that of gradient descent follows from this inequality alone (P. Yue, C. Fang and Z. Lin,
*On the lower bound of minimizing Polyak-Łojasiewicz functions*, 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from flint import arb

from surefoot.theorems.arithmetic import above, below, proved, square
from surefoot.theorems.gradient_descent import SquareOnBall

_PLACES = tuple(k / 32 for k in range(1, 32))


@dataclass(frozen=True)
class HeavyBall(SquareOnBall):
    r"""The theorem with its numbers; see :mod:`surefoot.theorems.heavy_ball`.

    Attributes:
        momentum: :math:`\beta`.
        part: :math:`\theta < 2` with :math:`\alpha = \theta(1 - \beta)/L`.

    >>> theorem = sf.theorems.HeavyBall(1.0, 2.0, bending=0.01, radius=1.0, residual=0.1, weight=1.0)
    >>> theorem.holds, round(theorem.rate, 2)
    (True, 0.97)
    """

    momentum: float = 0.5
    part: float = 1.0

    @cached_property
    def step_size(self) -> float:
        """:math:`\\alpha`, rounded down."""
        return below(arb(self.part) * (1 - arb(self.momentum)) / arb(self.smoothness))

    def _coefficients(self) -> tuple[arb, arb, arb, arb]:
        """:math:`\\alpha`, :math:`\\beta`, b and c."""
        alpha, beta = arb(self.step_size), arb(self.momentum)
        b = beta / (2 * alpha)
        return alpha, beta, b, 1 / alpha - b - arb(self.smoothness) / 2

    @cached_property
    def factor(self) -> float:
        """As in :class:`~surefoot.theorems.gradient_descent.SquareOnBall`."""
        if not self.is_onto or not self.step_size > 0:
            return math.inf
        alpha, beta, b, c = self._coefficients()
        room, twice = arb(0), 2 * self.pull
        for place in _PLACES:
            a = b + arb(place) * (c - b)
            if not (proved(b < a) and proved(a < c)):
                continue
            t = beta + alpha * (twice * a).sqrt()
            room = room.max(((c - a) / (1 + t / 2)).min(2 * (a - b) / t).lower())
        needed = 2 * arb(self.loss).sqrt() / (room * alpha * twice.sqrt() * arb(self.radius))
        return above(needed) if proved(room > 0) else math.inf

    @cached_property
    def rate(self) -> float:
        """q, rounded up: the smallest that some values of :math:`\\lambda` give."""
        alpha, beta, b, c = self._coefficients()
        highest = (c - b) / square(1 + beta)  # here the second quotient is one
        rates = [1.0]
        for place in _PLACES:
            multiplier = arb(place) * highest
            left = c - multiplier * (1 + beta)
            if proved(left > 0) and proved(multiplier >= 0):
                first = 1 - 2 * multiplier * self.pull * square(alpha)
                rates.append(above(first.max((b + multiplier * (1 + beta) * beta) / left)))
        return min(rates)
