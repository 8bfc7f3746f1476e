r"""A strongly convex neighbourhood: one stationary point, a strict minimum.

Let :math:`0 < m \le \lambda_{\min}(\nabla^2F(u))`, :math:`L \ge \lambda_{\max}(\nabla^2F(u))` and
:math:`\|\nabla^2F(u) - \nabla^2F(u_0)\| \le V` for all u in the ball :math:`B(u_0, \rho)`, :math:`g \ge
\|\nabla F(u_0)\|` and :math:`g < m\rho`.

*Then* the ball contains exactly one stationary point :math:`u^*`, a strict local minimiser, and :math:`\|u_0
- u^*\| \le g/m`, :math:`F(u_0) - F(u^*) \le g^2/2m`. If :math:`\rho \ge 2g/m`, gradient descent with steps
1/L converges to it with :math:`\|u_{k+1} - u^*\| \le (1 - m/L)\|u_k - u^*\|`, and Newton's method, if 2V < m,
with :math:`\|u_{k+1} - u^*\| \le \frac{2V}m\|u_k - u^*\|`: the factor 2V/m shrinks with the ball, so it
converges faster than linearly, and quadratically where F has three derivatives.

*Proof.* F is m-strongly convex on the ball and has one minimiser there. At the edge :math:`\langle\nabla F(u),
u - u_0\rangle \ge \langle\nabla F(u_0), u - u_0\rangle + m\rho^2 \ge (m\rho - g)\rho > 0`, so it is inside,
hence stationary; a second one would contradict :math:`\langle\nabla F(u) - \nabla F(v), u - v\rangle \ge m\|u
- v\|^2`, which with :math:`v = u_0`, :math:`u = u^*` gives the distance. Strong convexity at :math:`u_0`,
minimised over the other point, gives the gap. :math:`B(u^*, \|u_0 - u^*\|)` is in the ball if :math:`\rho \ge
2g/m`. There :math:`\nabla F(u_k) = \bar H(u_k - u^*)` with :math:`\bar H` the mean of the Hessian on the
segment: :math:`\|I - \gamma\bar H\| \le 1 - \gamma m` for steps :math:`\gamma \le 1/L`, and for Newton
:math:`u_{k+1} - u^* = H_k^{-1}(H_k - \bar H)(u_k - u^*)` with :math:`\|H_k - \bar H\| \le 2V`. Both factors
are below one, so the steps stay in that ball.

As eigenvalues move by at most the norm of a change, m may be :math:`\lambda_{\min}(\nabla^2F(u_0)) - V`.

*By the Newton step.* Let :math:`m_0 \le \lambda_{\min}(H)`, :math:`H = \nabla^2F(u_0)`, :math:`V < m_0`, and
:math:`\eta \ge \|H^{-1}\nabla F(u_0)\|`, :math:`\delta \ge \langle\nabla F(u_0), H^{-1}\nabla F(u_0)\rangle`.
With :math:`q = V/m_0`, all this holds with :math:`\eta/(1 - q)` in place of g/m, and :math:`F(u_0) - F(u^*)
\le \delta/2(1 - q)`. A gradient along directions of large curvature leads less far than g/m says.

*Proof.* :math:`T(u) = u - H^{-1}\nabla F(u)` has the derivative :math:`H^{-1}(H - \nabla^2F(u))`, of norm at
most q, and moves :math:`u_0` by at most :math:`\eta`; for :math:`\eta/(1 - q) \le \rho` it maps the ball into
itself, where it has exactly one fixed point, :math:`u^*`, at most :math:`\eta/(1 - q)` away. On the ball
:math:`\nabla^2F \succeq H - VI \succeq (1 - q)H`, so with :math:`v = u^* - u_0` :math:`F(u^*) \ge F(u_0) +
\langle\nabla F(u_0), v\rangle + \frac{1 - q}2\langle v, Hv\rangle \ge F(u_0) - \delta/2(1 - q)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flint import arb

from surefoot.theorems.arithmetic import above, below, proved, square, steps_needed


@dataclass(frozen=True)
class StronglyConvex:
    r"""The theorem with its numbers; see :mod:`surefoot.theorems.strongly_convex`.

    Attributes:
        convexity: m.
        smoothness: L.
        variation: V.
        gradient: g.
        radius: :math:`\rho`.
        newton: whether the method is Newton's.
        start: :math:`m_0`.
        step: :math:`\eta`; infinite if there is no bound.
        decrease: :math:`\delta`; infinite if there is no bound.

    >>> theorem = sf.theorems.StronglyConvex(1.0, 2.0, variation=0.1, gradient=0.1, radius=1.0, newton=False)
    >>> theorem.holds, theorem.distance >= 0.1, theorem.rate
    (True, True, 0.5)
    """

    convexity: float
    smoothness: float
    variation: float
    gradient: float
    radius: float
    newton: bool
    start: float = 0.0
    step: float = math.inf
    decrease: float = math.inf

    @property
    def distance(self) -> float:
        r"""The smaller of g/m and :math:`\eta/(1 - q)`, rounded up."""
        straight = above(arb(self.gradient) / arb(self.convexity)) if self.convexity > 0 else math.inf
        return min(straight, self._contracted(self.step))

    def _contracted(self, value: float) -> float:
        """A number divided by 1 - q, rounded up; infinite if 1 - q is not proved to be positive."""
        if not (math.isfinite(value) and 0 <= self.variation < self.start):
            return math.inf
        left = 1 - arb(self.variation) / arb(self.start)
        return above(arb(value) / left) if proved(left > 0) else math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses of the method are verified."""
        inside = 2 * self.distance <= self.radius and self.distance < self.radius
        return self.convexity > 0 and inside and self.rate < 1

    @property
    def factor(self) -> float:
        """A gradient this many times smaller, at the same Hessian, is enough; infinite if none is."""
        if not self.convexity > 0 or (self.newton and not self.rate < 1):
            return math.inf
        return 2 * self.distance / self.radius

    @property
    def step_size(self) -> float:
        """1/L, rounded down."""
        return below(1 / arb(self.smoothness))

    @property
    def rate(self) -> float:
        """The factor by which one step multiplies the distance to the minimum, at most."""
        if not self.convexity > 0:
            return math.inf
        m = arb(self.convexity)
        return above(2 * arb(self.variation) / m if self.newton else 1 - m * arb(self.step_size))

    @property
    def gap(self) -> float:
        """A bound on F(u₀) - F(u*)."""
        straight = above(square(arb(self.gradient)) / (2 * arb(self.convexity)))
        return min(straight, self._contracted(self.decrease) / 2)

    def iterations(self, eps: float) -> int:
        """The number of steps to within eps of the minimum, as :math:`F - F^* \\le \\frac L2\\|u - u^*\\|^2`."""
        if self.gap <= eps:
            return 0
        start = above(arb(self.smoothness) / 2 * square(arb(self.distance)))
        return steps_needed(start, above(square(arb(self.rate))), eps)


@dataclass(frozen=True)
class NothingHere:
    r"""No stationary point within :math:`\rho`: :math:`\|\nabla F(u_0)\| > L\rho`, L the smoothness on that ball.

    *Proof.* :math:`\|\nabla F(u)\| \ge \|\nabla F(u_0)\| - L\|u - u_0\| > 0`. Any method has to travel farther.

    Attributes:
        gradient: a lower bound on the norm of the gradient.
        smoothness: L.
        radius: :math:`\rho`.

    >>> sf.theorems.NothingHere(gradient=1.0, smoothness=2.0, radius=0.25).holds
    True
    """

    gradient: float
    smoothness: float
    radius: float

    @property
    def holds(self) -> bool:
        """Whether the hypothesis is verified."""
        farthest = arb(self.smoothness) * arb(self.radius)
        return math.isfinite(self.smoothness) and proved(arb(self.gradient) > farthest)
