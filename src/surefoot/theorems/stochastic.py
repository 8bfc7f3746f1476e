"""Stochastic gradient descent on a ball around weights that nearly interpolate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flint import arb

from surefoot.theorems.balls import above, below, proved, square, steps_needed
from surefoot.theorems.gradient_steps import SquareOnBall

_PARTS = (1.0, 0.5)
_SLACKS = tuple(2.0**-k for k in range(1, 9))
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class StochasticDescent(SquareOnBall):
    r"""Steps on random batches reach the global minimum, with a probability that is known.

    :math:`F = \sum_{i\le N}f_i`, :math:`f_i = \frac{\mu_h}2\|r_i\|^2` the share of one sample, :math:`r = \psi -
    y`, and :math:`u_{k+1} = u_k - \gamma g_k` with :math:`g_k = \frac Nb\sum_{i\in B_k}\nabla f_i(u_k)`, where
    :math:`B_k` are b samples that are drawn uniformly, with or without replacement, and independently of all
    batches before. (For a mean over samples :math:`g_k` is the gradient of the mean over the batch. Going through
    the data in a shuffled order is not covered.) On :math:`B(u_0, \rho)` let :math:`\|D\psi - J\| \le \tau`,
    :math:`S = \|J\| + \tau`, :math:`S_* \ge \|D\psi_i\|` for every sample, :math:`e = \tau/\sigma`, and

    .. math:: v = \frac{2N\mu_hS_*^2}b, \quad B = \mu_h\Big(1 - \frac1b\Big)S^2 + \frac v2, \quad c = 2(1 - e) -
        \gamma B, \quad q = 1 + s - \gamma\mu_h\sigma^2\Big((1 + s)c - \Big(1 + \frac1s\Big)e^2\gamma B\Big) < 1

    with a positive bracket, for some :math:`s > 0`. Let :math:`z \ge \|J^+r_0\|`, :math:`m + z + \rho_2 = \rho`,

    .. math:: \delta = \frac{z^2}{m^2} + \frac{\gamma\tau\|J\|z}{(1 - \sqrt q)\rho_2}
        \Big(\frac{\sqrt{\mu_hB}}\sigma + \mu_h\sqrt N\Big), \qquad C = \frac{\mu_h}2\|J\|^2z^2 .

    *Then* :math:`\mathrm E\|g - \nabla F\|^2 \le vF` on the ball, the certified variance;

    * with probability at least :math:`1 - \delta` no step leaves the ball; let A be this event;
    * :math:`\mathrm E[F(u_k); A] \le Cq^k`, and on A the steps converge to a global minimiser;
    * with probability at least :math:`1 - \delta - Cq^k/\varepsilon`, no step leaves the ball and :math:`F(u_j)
      \le \varepsilon` for all :math:`j \ge k`.

    *Proof.* *Variance.* That of a mean of b draws is at most :math:`\frac1b` of that of one, so :math:`\mathrm
    E\|g\|^2 \le (1 - \frac1b)\|\nabla F\|^2 + \frac Nb\sum\|\nabla f_i\|^2 \le \mu_hB\|r\|^2`, and :math:`\frac
    Nb\sum\|\nabla f_i\|^2 \le \frac Nb\mu_h^2S_*^2\|r\|^2 = vF`. *One step.* Let :math:`A_k` say that :math:`u_0,
    \dots, u_k` are in the ball, :math:`z_k = J^+r_k`, so that :math:`r_k = Jz_k`, P the projection onto the range
    of :math:`J^\top` and :math:`w_{k+1} = z_k - \gamma Pg_k`. On :math:`A_k`, given the past, :math:`\langle z_k,
    \nabla F\rangle = \mu_h\langle Jz_k + (D\psi - J)z_k, r_k\rangle \ge \mu_h(1 - e)\|r_k\|^2` as :math:`\|z_k\|
    \le \|r_k\|/\sigma`, so :math:`\mathrm E\|w_{k+1}\|^2 \le \|z_k\|^2 - \gamma\mu_hc\|r_k\|^2`. If
    :math:`u_{k+1}` is in the ball, :math:`r_{k+1} = r_k - \gamma Jg_k + \varepsilon_k` with
    :math:`\|\varepsilon_k\| \le \tau\gamma\|g_k\|`, and :math:`\|z_{k+1}\| \le \|w_{k+1}\| + e\gamma\|g_k\|`. As
    :math:`(x + y)^2 \le (1 + s)x^2 + (1 + \frac1s)y^2` and :math:`\|r_k\| \ge \sigma\|z_k\|`, the square of this
    has an expectation of at most :math:`q\|z_k\|^2`. So :math:`V_k = \|z_k\|^2` while the steps are in the ball,
    and :math:`\|w_k\|^2` once and for all when they leave it, is a supermartingale, :math:`\mathrm E[\|z_k\|^2;
    A_k] \le q^kz^2`, and by Ville's inequality :math:`V_k` ever reaches :math:`m^2` with at most the first
    probability of :math:`\delta`. *Inside.* Let :math:`u_{k+1}` be the first outside. :math:`P(u_{k+1} - u_0) =
    w_{k+1} - z_0 - \sum_{j<k} J^+\varepsilon_j`, and :math:`(I - P)g_j` is made of the :math:`(D\psi_i -
    J_i)^\top r_i` alone, so its norm has an expectation of at most :math:`\mu_h\tau\sum_i\|r_i\| \le
    \mu_h\tau\sqrt N\|r_j\|`. All that is added to :math:`w_{k+1} - z_0` has, over all steps in the ball, an
    expectation of at most :math:`\gamma\tau (\sqrt{\mu_hB}/\sigma + \mu_h\sqrt N)\sum_j\mathrm E\|r_j\|`, and
    :math:`\mathrm E[\|r_j\|; A_j] \le \|J\|q^{j/2}z`; by Markov's inequality it exceeds :math:`\rho_2` with at
    most the second probability. Where neither happens, :math:`\|u_{k+1} - u_0\| < m + z + \rho_2`: no step is the
    first outside. *Later on.* :math:`F \le \frac{\mu_h}2\|J\|^2\|z_k\|^2`, and Ville's inequality again. The sum
    of the :math:`\gamma\|g_k\|` is finite on A, so the steps converge.

    For a linear network (:math:`\tau = 0`) these are the rates of randomised methods for linear equations
    (T. Strohmer and R. Vershynin, J. Fourier Anal. Appl. 15, 2009).

    Attributes:
        samples: N.
        batch_size: b.
        steepest: a bound on :math:`\|J_i\|` of all samples; on the ball :math:`S_*` is at most this plus
            :math:`\tau`.
        confidence: the required probability. Half of the rest is allowed for :math:`\delta`, the other half for
            :math:`\varepsilon`.
        part: :math:`\theta` with :math:`\gamma = \theta/B`.

    >>> profile = sf.theorems.Profile.of([(1.0, 1e-4)])
    >>> numbers = (1.0, 2.0, profile, 1e-4, 1.0, 0.01, 1.0)
    >>> theorem = sf.theorems.StochasticDescent(*numbers, samples=4, batch_size=2, steepest=1.0)
    >>> theorem.holds, round(theorem.risk, 4)
    (True, 0.0002)
    """

    theorem: ClassVar[str] = "random batches near an exact solution"

    samples: int = 1
    batch_size: int = 1
    steepest: float = math.inf
    confidence: float = 0.95
    part: float = 1.0

    @cached_property
    def variance(self) -> float:
        """v: the variance of a step's gradient is at most this times the objective."""
        most = square((arb(self.steepest) + self.turned).min(self.steep))
        return above(2 * self.samples * arb(self.weight) * most / self.batch_size)

    @cached_property
    def _second_moment(self) -> arb:
        """B."""
        return arb(self.weight) * (1 - 1 / arb(self.batch_size)) * square(self.steep) + arb(self.variance) / 2

    @cached_property
    def step_size(self) -> float:
        """:math:`\\gamma`, rounded down."""
        return below(arb(self.part) / self._second_moment)

    @cached_property
    def rate(self) -> float:
        """q, what one step multiplies the bound by in expectation, rounded up: the smallest that some s give."""
        if not self.is_finite or not math.isfinite(self.steepest) or not self.step_size > 0:
            return 1.0
        step = arb(self.step_size)
        whole, turned = step * self._second_moment, self.turned / arb(self.sigma)
        gain = step * arb(self.weight) * (1 - arb(2) ** -48) * square(arb(self.sigma))
        c = 2 * (1 - turned) - whole
        rates = [1.0]
        for slack in _SLACKS:
            s = gain * slack
            bracket = (1 + s) * c - (1 + 1 / s) * square(turned) * whole
            if proved(bracket > 0):
                rates.append(above(1 + s - gain * bracket))
        return min(rates)

    def _risk(self, distance: arb) -> float:
        """:math:`\\delta` for a distance z."""
        room = arb(self.radius) - distance
        if not self.rate < 1 or not proved(room > 0):
            return math.inf
        weight, turned = arb(self.weight), self.turned
        each = (weight * self._second_moment).sqrt() / arb(self.sigma) + weight * arb(self.samples).sqrt()
        strayed = arb(self.step_size) * turned * arb(self.norm) * distance * each / (1 - arb(self.rate).sqrt())
        parts = [(arb(share) * room, (1 - arb(share)) * room) for share in _SHARES]
        return min(above(square(distance / first) + strayed / second) for first, second in parts)

    @property
    def _distance(self) -> arb:
        """z."""
        return arb(self.residual) / arb(self.sigma)

    @cached_property
    def risk(self) -> float:
        """:math:`\\delta`, rounded up."""
        return self._risk(self._distance)

    @cached_property
    def factor(self) -> float:
        """A factor such that a residual this many times smaller is enough, rounded up.

        A residual f times smaller makes :math:`\\delta` at least f times smaller, as nothing else depends on it.
        """
        if not self.rate < 1:
            return math.inf
        allowed = (1 - arb(self.confidence)) / 2
        directly = above(arb(self.risk) / allowed) if math.isfinite(self.risk) else math.inf
        near = arb(self.radius) / 16  # a smaller distance to start from, as the ball may not even contain z
        times = arb(self._risk(near)) / allowed
        return min(directly, above(self._distance / near * times.max(arb(1))), math.inf)

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return math.isfinite(self.risk) and proved(arb(self.risk) <= (1 - arb(self.confidence)) / 2)

    @property
    def excess(self) -> float:
        """C divided by the objective at the weights."""
        return above(square(arb(self.norm) / arb(self.sigma)) * (1 + arb(2) ** -47))

    def iterations(self, eps: float) -> int:
        """After how many steps the objective is at most eps and stays so, with the required probability."""
        start = above(2 * arb(self.excess) * arb(self.loss) / (1 - arb(self.confidence)))
        return steps_needed(start, self.rate, eps)


def in_batches(
    ball: SquareOnBall, samples: int, batch_size: int, steepest: float, confidence: float
) -> Iterator[StochasticDescent]:
    """The theorem on a ball, with several step sizes."""
    for part in _PARTS:
        yield StochasticDescent(*ball.numbers, samples, batch_size, steepest, confidence, part)
