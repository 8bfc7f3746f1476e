r"""Gradient descent reaches the global minimum, at a linear rate (Polyak-Łojasiewicz on a ball).

Let :math:`F = h\circ\psi`, h :math:`\mu_h`-strongly convex, :math:`\Delta = F - \inf h`, :math:`\sigma_\rho > 0` a
lower bound of :math:`\sigma_{\min}(D\psi)` on :math:`B(u_0, \rho)`, :math:`\mu = \mu_h\sigma_\rho^2`, F L-smooth
there, :math:`0 < \theta \le 1`, and

.. math:: \rho > \frac{1}{1 - \theta/2}\sqrt{2\Delta_0/\mu} .

*Then* the steps :math:`u_{k+1} = u_k - \frac\theta L\nabla F(u_k)` stay in the ball, :math:`\Delta_k \le (1 -
\theta(2 - \theta)\mu/L)^k\Delta_0`, and they converge to a global minimiser. (With :math:`\theta = 1` the radius
is :math:`\sqrt{8\Delta_0/\mu}` and the rate :math:`1 - \mu/L`.)

*Proof.* Strong convexity gives :math:`\|\nabla h\|^2 \ge 2\mu_h(h - \inf h)`, so on the ball :math:`\|\nabla F\|^2
= \|D\psi^\top\nabla h\|^2 \ge 2\mu\Delta`. Let :math:`u_0, \dots, u_k` be in the ball, :math:`g = \|\nabla
F(u_k)\| > 0`, and :math:`u(t) = u_k - t\frac\theta L\nabla F(u_k)`, :math:`t \le 1`, with the segment to it in the
ball. By the descent lemma :math:`\Delta_k - \Delta(u(t)) \ge t\frac\theta L(1 - \frac\theta2)g^2 = (1 -
\frac\theta2)\|u(t) - u_k\|\,g \ge (1 - \frac\theta2)\|u(t) - u_k\|\sqrt{2\mu\Delta_k}`, and
:math:`\sqrt{\Delta_k} - \sqrt{\Delta(u(t))} \ge (\Delta_k - \Delta(u(t)))/(2\sqrt{\Delta_k})`. So :math:`\|u(t) -
u_k\| \le 2(\sqrt{\Delta_k} - \sqrt{\Delta(u(t))})/((1 - \frac\theta2)\sqrt{2\mu})`, the same holds of all steps
before, and the length of the path to u(t) is at most :math:`2\sqrt{\Delta_0}/((1 - \frac\theta2)\sqrt{2\mu}) <
\rho`: it does not reach the edge, and :math:`u_{k+1}` is inside. With t = 1 the descent lemma is
:math:`\Delta_{k+1} \le \Delta_k - \frac{\theta(2 - \theta)}{2L}g^2 \le (1 - \theta(2 - \theta)\mu/L)\Delta_k`. The
path has finite length, so the steps converge. If g = 0, :math:`\Delta_k = 0` and nothing moves.

*The square loss* :math:`F = \frac{\mu_h}2\|\psi - y\|^2`. With :math:`J = D\psi(u_0)`, :math:`r = \psi(u_0) - y`
and K a Lipschitz constant of :math:`D\psi` on the ball, :math:`\|D\psi - J\| \le K\rho` there, so
:math:`\sigma_\rho = \sigma - K\rho`, :math:`\|D\psi\| \le S = \|J\| + K\rho`, :math:`\|\psi - y\| \le \|r\| +
S\rho`, and as :math:`\nabla^2F = \mu_h(D\psi^\top D\psi + D^2\psi\cdot(\psi - y))`, :math:`L = \mu_h(S^2 + K(\|r\|
+ S\rho))`. Here :math:`\sqrt{2\Delta_0/\mu} = \|r\|/\sigma_\rho`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flint import arb

from surefoot.theorems.arithmetic import above, below, proved, square, steps_needed


@dataclass(frozen=True)
class SquareOnBall:
    r"""The square loss on a ball around the weights: what theorems about gradient steps have in common.

    Attributes:
        sigma: :math:`\sigma \le \sigma_{\min}(J)`.
        norm: a bound on :math:`\|J\|`.
        bending: K on the ball.
        radius: :math:`\rho`.
        residual: a bound on :math:`\|r\|`.
        weight: :math:`\mu_h`, rounded up.
    """

    theorem: ClassVar[str] = "Polyak-Łojasiewicz inequality on a ball"

    sigma: float
    norm: float
    bending: float
    radius: float
    residual: float
    weight: float

    @property
    def rate(self) -> float:
        """The factor by which one step multiplies the bound on the objective."""
        raise NotImplementedError

    @property
    def factor(self) -> float:
        """The needed radius over the radius of the ball, rounded up."""
        raise NotImplementedError

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return self.factor < 1

    @property
    def distance(self) -> float:
        """A bound on the distance to the limit."""
        return self.radius

    def iterations(self, eps: float) -> int:
        """The number of steps after which the objective is at most eps."""
        return steps_needed(self.loss, self.rate, eps)

    @property
    def is_onto(self) -> bool:
        """Whether there are bounds on the ball and the Jacobian is onto everywhere in it."""
        return math.isfinite(self.bending) and proved(self.lowest > 0)

    @property
    def lowest(self) -> arb:
        """:math:`\\sigma_\\rho`."""
        return arb(self.sigma) - arb(self.bending) * arb(self.radius)

    @property
    def smoothness(self) -> float:
        """L on the ball."""
        steep = arb(self.norm) + arb(self.bending) * arb(self.radius)
        far = arb(self.residual) + steep * arb(self.radius)
        return above(arb(self.weight) * (square(steep) + arb(self.bending) * far))

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
    r"""The theorem with its numbers; see :mod:`surefoot.theorems.gradient_descent`.

    Attributes:
        part: :math:`\theta`.

    >>> theorem = sf.theorems.GradientDescent(1.0, 2.0, bending=0.01, radius=1.0, residual=0.1, weight=1.0)
    >>> theorem.holds, round(theorem.rate, 2)
    (True, 0.76)
    """

    part: float = 1.0

    @property
    def factor(self) -> float:
        """As in :class:`SquareOnBall`."""
        if not self.is_onto:
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
