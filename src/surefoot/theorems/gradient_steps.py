r"""Gradient descent on a square loss: the hypothesis of Polyak and Łojasiewicz on a ball, and the rate.

See :mod:`surefoot.theorems.statements` for the notation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flint import arb

from surefoot.theorems.balls import Profile, above, below, proved, square, steps_needed


@dataclass(frozen=True)
class SquareOnBall:
    r"""The square loss on a ball around the weights: :math:`F = \frac{\mu_h}2\|\psi - y\|^2`.

    :math:`\sigma_\rho` and S, the bounds of :math:`D\psi` on the ball, are those of :class:`Profile`,
    :math:`\|\psi - y\| \le \|r\| + S\rho`, and as :math:`\nabla^2F = \mu_h(D\psi^\top D\psi +
    D^2\psi\cdot(\psi - y))`, F is L-smooth there with :math:`L = \mu_h(S^2 + K(\|r\| + S\rho))`.
    :math:`\|\nabla F\|^2 \ge 2\mu F`, :math:`\mu = \mu_h\sigma_\rho^2`: the Polyak-Łojasiewicz inequality.

    Norms of weights may be weighted by blocks, :math:`\|v\|^2 = \sum_bL_b\|v_b\|^2`: with :math:`\tilde u_b =
    \sqrt{L_b}u_b` the theorems are about :math:`F` as a function of :math:`\tilde u`, whose gradient steps of
    length s are steps of length :math:`s/L_b` in the blocks of u.

    Attributes:
        sigma: :math:`\sigma \le \sigma_{\min}(J)`.
        norm: a bound on :math:`\|J\|`.
        profile: :math:`\omega` up to :math:`\rho`.
        bending: K on the ball.
        radius: :math:`\rho`.
        residual: a bound on :math:`\|r\|`.
        weight: :math:`\mu_h`, rounded up.

    >>> from surefoot.theorems.gradient_steps import SquareOnBall
    >>> profile = sf.theorems.Profile.of([(1.0, 0.01)])
    >>> SquareOnBall(1.0, 2.0, profile, bending=0.01, radius=1.0, residual=0.0, weight=1.0).is_finite
    True
    """

    theorem: ClassVar[str] = "Polyak-Łojasiewicz inequality on a ball"

    sigma: float
    norm: float
    profile: Profile
    bending: float
    radius: float
    residual: float
    weight: float

    @property
    def numbers(self) -> tuple[float, float, Profile, float, float, float, float]:
        """The seven numbers, from which a theorem on the same ball is made."""
        return self.sigma, self.norm, self.profile, self.bending, self.radius, self.residual, self.weight

    @property
    def rate(self) -> float:
        """The factor by which one step multiplies the bound on the objective."""
        return math.inf

    @property
    def factor(self) -> float:
        """The needed radius over the radius of the ball, rounded up: the theorem holds if it is below one."""
        return math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return self.factor < 1

    def iterations(self, eps: float) -> int:
        """The number of steps after which the objective is at most eps."""
        return steps_needed(self.loss, self.rate, eps)

    @property
    def is_finite(self) -> bool:
        """Whether there are bounds on the ball and the Jacobian is onto everywhere in it."""
        return math.isfinite(self.bending) and self.radius <= self.profile.radius and proved(self.lowest > 0)

    @property
    def lowest(self) -> arb:
        """:math:`\\sigma_\\rho`."""
        return arb(self.sigma) * (1 - self.profile.turn(arb(self.radius)))

    @property
    def turned(self) -> arb:
        """A bound on :math:`\\|D\\psi(u) - J\\|` on the ball."""
        return (arb(self.norm) * self.profile.turn(arb(self.radius))).min(arb(self.bending) * arb(self.radius))

    @property
    def steep(self) -> arb:
        """S."""
        return arb(self.norm) + self.turned

    @property
    def smoothness(self) -> float:
        """L on the ball."""
        far = arb(self.residual) + self.steep * arb(self.radius)
        return above(arb(self.weight) * (square(self.steep) + arb(self.bending) * far))

    @property
    def loss(self) -> float:
        """A bound on F at the weights."""
        return above(arb(self.weight) / 2 * square(arb(self.residual)))

    @property
    def pull(self) -> arb:
        """:math:`\\mu`; the exact :math:`\\mu_h` may be a few roundings below the stored number."""
        return arb(self.weight) * (1 - arb(2) ** -48) * square(self.lowest)


@dataclass(frozen=True)
class GradientDescent(SquareOnBall):
    r"""Gradient descent reaches the global minimum, at a linear rate (Polyak-Łojasiewicz on a ball).

    Let :math:`F = h\circ\psi`, h :math:`\mu_h`-strongly convex, :math:`\Delta = F - \inf h`, :math:`\sigma_\rho >
    0` a lower bound of :math:`\sigma_{\min}(D\psi)` on :math:`B(u_0, \rho)`, :math:`\mu = \mu_h\sigma_\rho^2`, F
    L-smooth there, :math:`0 < \theta \le 1`, and

    .. math:: \rho > \frac{1}{1 - \theta/2}\sqrt{2\Delta_0/\mu} .

    *Then* the steps :math:`u_{k+1} = u_k - \frac\theta L\nabla F(u_k)` stay in the ball, :math:`\Delta_k \le
    (1 - \theta(2 - \theta)\mu/L)^k\Delta_0`, and they converge to a global minimiser. (With :math:`\theta = 1` the
    radius is :math:`\sqrt{8\Delta_0/\mu}` and the rate :math:`1 - \mu/L`.)

    *Proof.* Strong convexity gives :math:`\|\nabla h\|^2 \ge 2\mu_h(h - \inf h)`, so on the ball :math:`\|\nabla
    F\|^2 = \|D\psi^\top\nabla h\|^2 \ge 2\mu\Delta`. Let :math:`u_0, \dots, u_k` be in the ball, :math:`g =
    \|\nabla F(u_k)\| > 0`, and :math:`u(t) = u_k - t\frac\theta L\nabla F(u_k)`, :math:`t \le 1`, with the
    segment to it in the ball. By the descent lemma :math:`\Delta_k - \Delta(u(t)) \ge t\frac\theta L(1 -
    \frac\theta2)g^2 = (1 - \frac\theta2)\|u(t) - u_k\|\,g \ge (1 - \frac\theta2)\|u(t) -
    u_k\|\sqrt{2\mu\Delta_k}`, and :math:`\sqrt{\Delta_k} - \sqrt{\Delta(u(t))} \ge (\Delta_k -
    \Delta(u(t)))/(2\sqrt{\Delta_k})`. So :math:`\|u(t) - u_k\| \le 2(\sqrt{\Delta_k} - \sqrt{\Delta(u(t))})/((1 -
    \frac\theta2)\sqrt{2\mu})`, the same holds of all steps before, and the length of the path to u(t) is at most
    :math:`2\sqrt{\Delta_0}/((1 - \frac\theta2)\sqrt{2\mu}) < \rho`: it does not reach the edge, and
    :math:`u_{k+1}` is inside. With t = 1 the descent lemma is :math:`\Delta_{k+1} \le \Delta_k - \frac{\theta(2 -
    \theta)}{2L}g^2 \le (1 - \theta(2 - \theta)\mu/L)\Delta_k`. The path has finite length, so the steps converge.
    If g = 0, :math:`\Delta_k = 0` and nothing moves.

    For the square loss :math:`\sqrt{2\Delta_0/\mu} = \|r\|/\sigma_\rho`.

    Attributes:
        part: :math:`\theta`.

    >>> profile = sf.theorems.Profile.of([(1.0, 0.01)])
    >>> theorem = sf.theorems.GradientDescent(1.0, 2.0, profile, 0.01, radius=1.0, residual=0.1, weight=1.0)
    >>> theorem.holds, round(theorem.rate, 2)
    (True, 0.76)
    """

    part: float = 1.0

    @property
    def factor(self) -> float:
        """As in :class:`SquareOnBall`."""
        if not self.is_finite:
            return math.inf
        return above(arb(self.residual) / ((1 - arb(self.part) / 2) * arb(self.radius) * self.lowest))

    @property
    def step_size(self) -> float:
        """:math:`\\theta/L`, rounded down."""
        return below(arb(self.part) / arb(self.smoothness))

    @property
    def rate(self) -> float:
        """The factor by which one step multiplies the bound on the objective, rounded up."""
        step = arb(self.step_size)
        return min(above(1 - step * (2 - step * arb(self.smoothness)) * self.pull), 1.0)
