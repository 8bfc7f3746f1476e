"""Stochastic gradient descent on a ball around weights that nearly interpolate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from flint import arb

from surefoot.theorems.statements import SquareOnBall, above, below, square, steps_needed

_PARTS = (1.0, 0.5, 0.1)
_SHARES = tuple(1 - 2.0**-k for k in range(1, 9))


@dataclass(frozen=True)
class StochasticDescent(SquareOnBall):
    r"""Steps on random batches reach the global minimum, with a probability that is known.

    :math:`F = \sum_{i\le N}f_i`, :math:`f_i = \frac{\mu_h}2\|\psi_i - y_i\|^2` the share of one sample, and
    :math:`u_{k+1} = u_k - \gamma g_k` with :math:`g_k = \frac Nb\sum_{i\in B_k}\nabla f_i(u_k)`, where
    :math:`B_k` are b samples that are drawn uniformly, with or without replacement, and independently of all
    batches before. (For a mean over samples :math:`g_k` is the gradient of the mean over the batch. Going through
    the data in a shuffled order is not covered.) Let :math:`S_* \ge \|D\psi_i\|` for every sample on
    :math:`B(u_0, \rho)`, :math:`\mu` and L as in :class:`~surefoot.theorems.statements.SquareOnBall`, :math:`0 <
    \theta < 2` and

    .. math:: v = 2N\mu_hS_*^2/b, \qquad \gamma = \frac{\theta}{L(1 + v/2\mu)}, \qquad \nu = 1 - \theta/2, \qquad
        \delta = \frac{\sqrt{2F(u_0)/\mu}}{\nu\rho_1} + \frac{\gamma vF(u_0)}{2\mu\nu\rho_2^2}, \qquad
        \rho_1 + \rho_2 = \rho .

    *Then* :math:`\mathrm E\|g - \nabla F\|^2 \le vF` on the ball, the certified variance, and with :math:`q = 1 -
    2\mu\gamma\nu`:

    * with probability at least :math:`1 - \delta` no step leaves the ball; let A be this event;
    * :math:`\mathrm E[F(u_k); A] \le q^kF(u_0)`, and on A the steps converge to a global minimiser;
    * with probability at least :math:`1 - \delta - q^kF(u_0)/\varepsilon`, no step leaves the ball and
      :math:`F(u_j) \le \varepsilon` for all :math:`j \ge k`.

    *Proof.* *Variance.* That of a mean of b draws is at most :math:`\frac1b` of that of one, :math:`\mathrm
    E\|N\nabla f_i\|^2 = N\sum\|\nabla f_i\|^2 \le N\mu_h^2S_*^2\sum\|r_i\|^2`. *Descent.* Let :math:`A_k` say that
    :math:`u_0, \dots, u_k` are in the ball, and :math:`X_k = F(u_k)1_{A_k}`. On :math:`A_{k+1}` the segment is in
    the ball and :math:`F(u_{k+1}) \le F_k - \gamma\langle\nabla F_k, g_k\rangle + \frac L2\gamma^2\|g_k\|^2`. The
    right side is never negative, because it is at least :math:`F_k - \|\nabla F_k\|^2/2L` and :math:`\|\nabla
    F\|^2 \le \mu_h^2S^2\|r\|^2 = 2\mu_hS^2F \le 2LF`; so it bounds :math:`F(u_{k+1})1_{A_{k+1}}` on all of
    :math:`A_k`, and given the past

    .. math:: \mathrm E[X_{k+1}] \le F_k - \gamma\|\nabla F_k\|^2 + \tfrac L2\gamma^2(\|\nabla F_k\|^2 + vF_k)
        \le F_k - \gamma\nu\|\nabla F_k\|^2 \le qX_k ,

    by :math:`F_k \le \|\nabla F_k\|^2/2\mu`, twice. *Drift.* :math:`\mathrm E\sqrt{X_{k+1}} \le \sqrt{X_k -
    \gamma\nu\|\nabla F_k\|^2} \le \sqrt{X_k} - \gamma\nu\|\nabla F_k\|\sqrt{2\mu}/2` on :math:`A_k`, so
    :math:`\mathrm E\sum_k\gamma\|\nabla F_k\|1_{A_k} \le \sqrt{2F(u_0)/\mu}/\nu`, and by Markov's inequality the
    sum exceeds :math:`\rho_1` with at most the first probability of :math:`\delta`. *Noise.* :math:`M_k =
    \sum_{j<k}\gamma(g_j - \nabla F_j)1_{A_j}` is a martingale with :math:`\mathrm E\|M_k\|^2 \le \gamma^2v\sum
    \mathrm EX_j \le \gamma^2vF(u_0)/(1 - q)`, and by Doob's inequality it ever exceeds :math:`\rho_2` with at most
    the second. Where neither happens no step leaves the ball, as the first to do so would have :math:`\|u_{k+1} -
    u_0\| \le \rho_1 + \rho_2`. *Later on.* :math:`X_j` is a supermartingale that is not negative, so by Ville's
    inequality :math:`\sup_{j\ge k}X_j \ge \varepsilon` has probability at most :math:`\mathrm EX_k/\varepsilon`.
    Drift and noise converge, hence so do the steps, and :math:`\sum\mathrm EX_k < \infty`.

    Attributes:
        samples: N.
        batch_size: b.
        steepest: a bound on :math:`\|J_i\|` of all samples; on the ball :math:`S_*` is at most this and
            :math:`\|D\psi - J\|`.
        confidence: the probability that is asked for. Half of what is left is for :math:`\delta`, the other half
            for :math:`\varepsilon`.
        part: :math:`\theta`.
    """

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
    def _slowed(self) -> arb:
        """:math:`L(1 + v/2\\mu)`."""
        return arb(self.smoothness) * (1 + arb(self.variance) / (2 * self.pull))

    @cached_property
    def step_size(self) -> float:
        """:math:`\\gamma`, rounded down."""
        return below(arb(self.part) / self._slowed)

    @cached_property
    def rate(self) -> float:
        """The factor of one step in expectation, rounded up."""
        return min(above(1 - self.pull * arb(self.step_size) * (2 - arb(self.part))), 1.0)

    @cached_property
    def risk(self) -> float:
        """:math:`\\delta`, rounded up."""
        if not self.is_finite or not math.isfinite(self.steepest):
            return math.inf
        nu = 1 - arb(self.part) / 2
        drift = (2 * arb(self.loss) / self.pull).sqrt() / nu
        noise = arb(self.part) / self._slowed * arb(self.variance) * arb(self.loss) / (2 * self.pull * nu)
        parts = [(arb(share) * arb(self.radius), (1 - arb(share)) * arb(self.radius)) for share in _SHARES]
        return min(above(drift / first + noise / square(second)) for first, second in parts)

    @property
    def factor(self) -> float:
        """The risk over what is allowed, rounded up. A residual f times smaller divides it by f at least, as L is
        then divided by f at most.
        """
        return above(arb(self.risk) / ((1 - arb(self.confidence)) / 2)) if math.isfinite(self.risk) else math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return self.factor <= 1

    def iterations(self, eps: float) -> int:
        """After how many steps the objective is at most eps and stays so, with the probability asked for."""
        start = above(2 * arb(self.loss) / (1 - arb(self.confidence)))
        return steps_needed(start, self.rate, eps)


def in_batches(
    ball: SquareOnBall, samples: int, batch_size: int, steepest: float, confidence: float
) -> Iterator[StochasticDescent]:
    """The theorem on a ball, with some step sizes."""
    for part in _PARTS:
        yield StochasticDescent(*ball.numbers, samples, batch_size, steepest, confidence, part)


__all__ = ["StochasticDescent", "in_batches"]
