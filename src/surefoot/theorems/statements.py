r"""The theorems, as functions of verified numbers.

:math:`u_0` are the weights, :math:`\psi` the outputs of all samples stacked, :math:`J = D\psi(u_0)`, :math:`r =
\psi(u_0) - y`. Every number is a bound in the direction that the theorem needs, and what follows from them is
computed in ball arithmetic: an inequality holds only if it holds for all numbers of the balls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flint import arb, ctx

from surefoot.theorems.balls import BITS, Profile, above, below, proved, square, steps_needed

_MOST_STEPS = 200


@dataclass(frozen=True)
class Interpolation:
    r"""There is a solution nearby, and Gauss-Newton converges to one (Newton-Kantorovich, underdetermined).

    Let J be onto, :math:`\eta \ge \|J^+r\|`, :math:`\omega` as in :class:`Profile` up to :math:`\rho`, and

    .. math:: f(t) = \eta - t + \int_0^t(t - s)\,\omega(s)\,ds \le 0 \quad\text{for some } t \le \rho .

    *Then*, with :math:`t^*` the smallest root of f, some :math:`u^*` has :math:`\psi(u^*) = y` and :math:`\|u^* -
    u_0\| \le t^*`, and the Gauss-Newton steps :math:`u_{k+1} = u_k - D\psi(u_k)^+(\psi(u_k) - y)` stay in the
    ball and converge to one, with :math:`\|u^* - u_k\| \le t^* - t_k`, where :math:`t_k` are Newton's iterates
    for f from 0: quadratically if :math:`f'(t^*) < 0`. For a constant :math:`\omega = K/\sigma` the condition is
    :math:`h = K\eta/\sigma \le \frac12` and :math:`t^* = (1 - \sqrt{1 - 2h})\,\sigma/K`; in general :math:`h =
    \eta/2\max_\tau(\tau - \int_0^\tau(\tau - s)\omega(s)ds)`, so that the condition reads the same.

    *Proof.* f is convex, f(0) is positive and :math:`f'(t) = -1 + \int_0^t\omega`, so Newton's iterates from 0
    increase to :math:`t^*` and :math:`f' < 0` before it. By induction

    .. math:: \|J^+(\psi(u_k) - y)\| \le f(t_k), \qquad \|u_{k+1} - u_k\| \le t_{k+1} - t_k, \qquad
        \|u_k - u_0\| \le t_k .

    For k = 0 the first is :math:`\|J^+r\| \le \eta`. The first implies the second: :class:`Profile` bounds the
    step by :math:`f(t_k)/(1 - \int_0^{t_k}\omega) = -f(t_k)/f'(t_k) = t_{k+1} - t_k`. The second implies the
    third for k + 1, and the first: :math:`s_k = u_{k+1} - u_k` solves :math:`\psi(u_k) - y + D\psi(u_k)s_k = 0`,
    so by Taylor's formula :math:`\|J^+(\psi(u_{k+1}) - y)\| \le \int_0^1(1 - \tau)\,\omega(t_k +
    \tau\|s_k\|)\|s_k\|^2d\tau \le f(t_{k+1}) - f(t_k) - f'(t_k)(t_{k+1} - t_k) = f(t_{k+1})`, as :math:`\omega`
    does not decrease and :math:`\|s_k\| \le t_{k+1} - t_k`. So the :math:`u_k` are a Cauchy sequence whose limit
    is within :math:`t^* - t_k` of :math:`u_k`, and :math:`\|\psi(u_k) - y\| \le \|J\|f(t_k) \to 0`. (L. V.
    Kantorovich 1948; P. Deuflhard and G. Heindl, SIAM J. Numer. Anal. 16, 1979, for conditions that do not depend
    on the scaling of the equations; O. P. Ferreira and B. F. Svaiter, Comput. Optim. Appl. 42, 2009, for
    majorants.)

    Attributes:
        eta: :math:`\eta`.
        profile: :math:`\omega`.
        norm: a bound on :math:`\|J\|`.
        residual: a bound on :math:`\|r\|`.
        weight: the objective is this number times half of the squared residual.

    >>> profile = sf.theorems.Profile.of([(1.0, 1.0)])  # ω = 1 up to 1: h = η
    >>> theorem = sf.theorems.Interpolation(eta=0.125, profile=profile, norm=1.0, residual=0.125, weight=1.0)
    >>> theorem.h, theorem.holds, theorem.iterations(1e-20)
    (0.125, True, 4)
    """

    eta: float
    profile: Profile
    norm: float
    residual: float
    weight: float

    @property
    def radius(self) -> float:
        """:math:`\\rho`."""
        return self.profile.radius

    @property
    def h(self) -> float:
        """h, rounded up: the hypothesis holds if it is at most ½. Where the balls reach 2η, :math:`f(2\\eta) \\le
        0` is enough, which is :math:`\\eta\\cdot2\\int_0^{2\\eta}(2\\eta - s)\\omega(s)ds/(2\\eta)^2 \\le
        \\frac12`.
        """
        room, twice = self.profile.room()[0], 2 * self.eta
        h = above(arb(self.eta) / (2 * arb(room))) if room > 0 else math.inf
        if 0 < twice <= self.radius:
            h = min(h, above(self.profile.bend(arb(twice)) / (2 * arb(self.eta))))
        return h

    @property
    def holds(self) -> bool:
        """Whether the hypothesis is verified."""
        return self.eta <= self.profile.room()[0]

    @property
    def distance(self) -> float:
        """:math:`t^*`, rounded up; infinite if there is none."""
        return above(self._root()) if self.holds else math.inf

    def _root(self) -> arb:
        """The smallest root of f, or a point beyond it where f is not positive."""
        with ctx.workprec(BITS):
            end = arb(self.profile.room()[1])
            for low, high, omega in self.profile._pieces():
                value, slope = self._majorant(low), self.profile.turn(low) - 1
                inside = square(slope) - 2 * omega * value
                if proved(inside >= 0):
                    place = low + 2 * value / (-slope + inside.sqrt())
                    if proved(place <= high):
                        return place if proved(place <= end) else end
            return end

    def _majorant(self, t: arb) -> arb:
        return arb(self.eta) - t + self.profile.bend(t)

    def after(self, steps: int) -> tuple[float, float]:
        """Bounds on the distance to the solution and on the residual after this many steps."""
        with ctx.workprec(BITS):
            t, root = arb(0), self._root()
            for _ in range(steps):
                if not proved(self._majorant(t) > 0):
                    break
                t = t - self._majorant(t) / (self.profile.turn(t) - 1)
            left, value = root - t, self._majorant(t)
            far = above(arb(self.norm) * value) if proved(value > 0) else above(arb(self.norm) * abs(value))
            return max(above(left), 0.0), min(far, self.residual) if not steps else far

    def iterations(self, eps: float) -> int:
        """The number of steps after which the objective is at most eps."""
        for steps in range(_MOST_STEPS):
            residual = arb(self.after(steps)[1])
            if proved(arb(self.weight) / 2 * square(residual) <= arb(eps)):
                return steps
        raise OverflowError(f"more than {_MOST_STEPS} steps for {eps:g}: h is {self.h:.6g}, too close to ½")


@dataclass(frozen=True)
class StronglyConvex:
    r"""A strongly convex neighbourhood: one stationary point, a strict minimum.

    Let :math:`0 < m \le \lambda_{\min}(\nabla^2F(u))`, :math:`L \ge \lambda_{\max}(\nabla^2F(u))` and
    :math:`\|\nabla^2F(u) - \nabla^2F(u_0)\| \le V` for all u in the ball :math:`B(u_0, \rho)`, :math:`g \ge
    \|\nabla F(u_0)\|` and :math:`g < m\rho`.

    *Then* the ball contains exactly one stationary point :math:`u^*`, a strict local minimiser, and :math:`\|u_0
    - u^*\| \le g/m`, :math:`F(u_0) - F(u^*) \le g^2/2m`. If :math:`\rho \ge 2g/m`, gradient descent with steps
    1/L converges to it with :math:`\|u_{k+1} - u^*\| \le (1 -
    m/L)\|u_k - u^*\|`, and Newton's method, if 2V < m, with :math:`\|u_{k+1} - u^*\| \le \frac{2V}m\|u_k -
    u^*\|`: the factor 2V/m shrinks with the ball, so it converges faster than linearly, and quadratically where F
    has three derivatives.

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
