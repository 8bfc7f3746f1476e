"""Gradient descent with momentum on a ball: one theorem that applies early, and one with a faster rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flint import arb

from surefoot.theorems.balls import above, below, proved, square, steps_needed
from surefoot.theorems.gradient_steps import SquareOnBall

_MOMENTA = (0.1, 0.5, 0.9)
_PARTS = (1.0, 0.5)
_PLACES = tuple(k / 32 for k in range(1, 32))
_SHARES = (0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.15)


@dataclass(frozen=True)
class HeavyBall(SquareOnBall):
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

    No rate much better than that of gradient descent follows from this inequality alone (P. Yue, C. Fang and
    Z. Lin, *On the lower bound of minimizing Polyak-Łojasiewicz functions*, 2023); see
    :class:`FastHeavyBall`.

    Attributes:
        momentum: :math:`\beta`.
        part: :math:`\theta < 2` with :math:`\alpha = \theta(1 - \beta)/L`.

    >>> profile = sf.theorems.Profile.of([(1.0, 0.01)])
    >>> theorem = sf.theorems.HeavyBall(1.0, 2.0, profile, bending=0.01, radius=1.0, residual=0.1, weight=1.0)
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
        """As in :class:`~surefoot.theorems.gradient_steps.SquareOnBall`."""
        if not self.is_finite or not self.step_size > 0:
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


@dataclass(frozen=True)
class FastHeavyBall(SquareOnBall):
    r"""The heavy ball near a solution: :math:`\sqrt{L/\mu}` steps where gradient descent needs :math:`L/\mu`.

    The steps are those of :class:`HeavyBall`, :math:`F = \frac{\mu_h}2\|r\|^2` with :math:`r = \psi - y`, and
    :math:`\tau \ge \|D\psi(u) - J\|` on :math:`B(u_0, \rho)`. Let :math:`G = JJ^\top`, :math:`S = (1 + \beta)I -
    \alpha\mu_hG`, and

    .. math:: \epsilon = 1 - \max_{\sigma^2\le\lambda\le\|J\|^2}\frac{(1 + \beta - \alpha\mu_h\lambda)^2}{4\beta}
        > 0, \quad a = \frac{\alpha\mu_h(\|J\| + \tau)}{\sqrt\epsilon}, \quad R = \sqrt\beta +
        \frac{2\tau a}{1 - \sqrt\beta} < 1, \quad q_0 = \sqrt{\alpha\mu_h}\|J\|\|r_0\|, \quad
        \Pi = \frac{aq_0}{(1 - \beta)(1 - R)}, \quad
        \rho > \frac{\|r_0\| + q_0/\sqrt\epsilon + \tau\Pi}\sigma + \frac{\tau\Pi}{\|J\|} .

    *Then* the steps stay in the ball, converge to a point with F = 0 on a path of length :math:`\Pi` at most, and
    :math:`\|r_k\| \le R^kq_0/\sqrt\epsilon`.

    *Proof.* :math:`Q(x, y) = \|x\|^2 - \langle x, Sy\rangle + \beta\|y\|^2` is, in the eigenvectors of S, a sum
    of :math:`(\sqrt\beta y_i - s_ix_i/2\sqrt\beta)^2 + (1 - s_i^2/4\beta)x_i^2`: the square of a norm, at least
    :math:`\epsilon\|x\|^2`. And :math:`Q(Sx - \beta y, x) = \beta Q(x, y)`: multiply out. So if :math:`r_{k+1} =
    Sr_k - \beta r_{k-1} + e_k`, :math:`q_k = \sqrt{Q(r_k, r_{k-1})}` has :math:`q_{k+1} \le \sqrt\beta q_k +
    \|e_k\|`; :math:`Q(r_0, r_0) = \alpha\mu_h\langle r_0, Gr_0\rangle`. Let :math:`u_0, \dots, u_k` and their
    segments be in the ball, :math:`r_j - r_{j-1} = Jd_j + \varepsilon_j`, so that :math:`\|\varepsilon_j\| \le
    \tau\|d_j\|`, and :math:`W_j = q_j + \gamma\|d_j\| \le R^jq_0`, with :math:`\gamma = 2\tau\sqrt\beta/(1 -
    \sqrt\beta)`. *Lengths.* :math:`\|d_{k+1}\| \le \alpha\mu_h(\|J\| + \tau)\|r_k\| + \beta\|d_k\| \le aq_k +
    \beta\|d_k\|`, which adds up to :math:`\sum\|d_j\| \le \Pi`. *Without the last* :math:`\varepsilon`. As
    :math:`Jd_{k+1} = -\alpha\mu_hGr_k - \alpha\mu_hJ(D\psi(u_k) - J)^\top r_k + \beta(r_k - r_{k-1} -
    \varepsilon_k)`, :math:`r_k + Jd_{k+1} = Sr_k - \beta r_{k-1} + e'_k` with :math:`\|e'_k\| \le \tau(aq_k +
    \beta\|d_k\|)`, so its norm is at most :math:`(\sqrt\beta q_k + \|e'_k\|)/\sqrt\epsilon \le
    q_0/\sqrt\epsilon`, by the next inequality. *Inside.* For :math:`u(s) = u_k + sd_{k+1}`, :math:`J(u(s) - u_0)
    = (1 - s)r_k + s(r_k + Jd_{k+1}) - r_0 - \sum_{j\le k}\varepsilon_j`, so the part of :math:`u(s) - u_0` in the
    range of :math:`J^\top` is at most :math:`(q_0/\sqrt\epsilon + \|r_0\| + \tau\Pi)/\sigma`; the rest comes from
    the :math:`\alpha\mu_h(D\psi - J)^\top r_j` alone and is at most :math:`\alpha\mu_h\tau\sum\|r_j\|/(1 - \beta)
    \le \tau\Pi/\|J\|`. So the next segment is in the ball as well. *Rate.* There :math:`e_k = e'_k +
    \varepsilon_{k+1}`, :math:`\|e_k\| \le \tau(2aq_k + 2\beta\|d_k\|)`, and :math:`W_{k+1} \le (\sqrt\beta +
    (2\tau + \gamma)a)q_k + (2\tau + \gamma)\beta\|d_k\| = Rq_k + \sqrt\beta\gamma\|d_k\| \le RW_k`.

    With :math:`\kappa = \|J\|/\sigma`, :math:`\tau = 0` and the largest steps, R is near :math:`(\kappa -
    1)/(\kappa + 1)` (B. T. Polyak 1964, for quadratic functions); the condition asks for :math:`\tau` of the order
    :math:`\|J\|/\kappa^3`, where :class:`HeavyBall` asks for :math:`\|J\|/\kappa`.

    Attributes:
        momentum: :math:`\beta`, for a positive :math:`\epsilon` above :math:`((\kappa - 1)/(\kappa + 1))^2`.

    >>> profile = sf.theorems.Profile.of([(1.0, 1e-4)])
    >>> theorem = sf.theorems.FastHeavyBall(1.0, 2.0, profile, bending=1e-4, radius=1.0, residual=0.1, weight=1.0)
    >>> theorem.holds, round(theorem.rate, 2)
    (True, 0.91)
    """

    theorem: ClassVar[str] = "heavy ball near an exact solution"

    momentum: float = 0.9

    @cached_property
    def step_size(self) -> float:
        """:math:`\\alpha`."""
        return below(square(2 / (arb(self.norm) + arb(self.sigma))) / arb(self.weight))

    @cached_property
    def _gain(self) -> arb:
        """:math:`\\alpha\\mu_h`, as a ball that contains the exact number."""
        return arb(self.step_size) * arb(self.weight) * (1 - arb(0, 2.0**-48))

    @cached_property
    def _room(self) -> arb:
        """:math:`\\epsilon`."""
        beta = arb(self.momentum)
        ends = [1 + beta - self._gain * square(arb(end)) for end in (self.sigma, self.norm)]
        return 1 - square(ends[0]).max(square(ends[1])) / (4 * beta) if self.momentum > 0 else arb(-1)

    @cached_property
    def _reach(self) -> arb:
        """a."""
        return self._gain * self.steep / self._room.sqrt()

    @cached_property
    def _contraction(self) -> arb:
        """R; one where the hypotheses fail."""
        if not self.is_finite or not proved(self._room > 0):
            return arb(1)
        root = arb(self.momentum).sqrt()
        return root + 2 * self.turned * self._reach / (1 - root)

    @cached_property
    def _start(self) -> arb:
        """:math:`q_0`."""
        return self._gain.sqrt() * arb(self.norm) * arb(self.residual)

    @cached_property
    def factor(self) -> float:
        """As in :class:`~surefoot.theorems.gradient_steps.SquareOnBall`."""
        left = (1 - arb(self.momentum)) * (1 - self._contraction)
        if not proved(left > 0):
            return math.inf
        strayed = self.turned * self._reach * self._start / left
        inner = arb(self.residual) + self._start / self._room.sqrt() + strayed
        return above((inner / arb(self.sigma) + strayed / arb(self.norm)) / arb(self.radius))

    @property
    def rate(self) -> float:
        """:math:`R^2`, the factor by which one step multiplies the bound on the objective."""
        return min(above(square(self._contraction)), 1.0)

    @property
    def excess(self) -> float:
        """C in :math:`F(u_k) \\le CR^{2k}F(u_0)`, which is :math:`\\alpha\\mu_h\\|J\\|^2/\\epsilon`."""
        return above(self._gain * square(arb(self.norm)) / self._room)

    def iterations(self, eps: float) -> int:
        """The number of steps after which the objective is at most eps."""
        return 0 if self.loss <= eps else steps_needed(above(arb(self.excess) * arb(self.loss)), self.rate, eps)


def with_momentum(ball: SquareOnBall, momentum: float | None) -> Iterator[HeavyBall | FastHeavyBall]:
    """The theorems about momentum on a ball, with this momentum or with several values."""
    for beta in _MOMENTA if momentum is None else (momentum,):
        for part in _PARTS:
            yield HeavyBall(*ball.numbers, beta, part)
    slow = 2 / (ball.norm / ball.sigma + 1)  # 1 - √β of the fastest one
    for beta in [(1 - share * slow) ** 2 for share in _SHARES] if momentum is None else (momentum,):
        yield FastHeavyBall(*ball.numbers, beta)
