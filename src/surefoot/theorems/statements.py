r"""The theorems, as functions of verified numbers.

:math:`u_0` are the weights, :math:`\psi` the outputs of all samples stacked, :math:`J = D\psi(u_0)`, :math:`r =
\psi(u_0) - y`. Every number is a bound in the direction that the theorem needs, and what follows from them is
computed in ball arithmetic: an inequality holds only if it holds for all numbers of the balls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from flint import arb, ctx

_BITS = 256
_MOST_STEPS = 200


def above(ball: arb) -> float:
    """A double that is not below any number of a ball."""
    with ctx.workprec(_BITS):
        number = float(ball.upper())
        return number if arb(number) >= ball else math.nextafter(number, math.inf)


def below(ball: arb) -> float:
    """A double that is not above any number of a ball."""
    return -above(-ball)


def proved(claim: object) -> bool:
    """Whether an inequality of balls holds for sure."""
    return bool(claim)


@dataclass(frozen=True)
class Interpolation:
    r"""There is a solution nearby, and Gauss-Newton converges to one (Newton-Kantorovich, underdetermined).

    Let :math:`0 < \sigma \le \sigma_{\min}(J)` (J is onto), :math:`\eta \ge \|J^+r\|`, :math:`D\psi` K-Lipschitz
    on :math:`B(u_0, \rho)`, and

    .. math:: h = K\eta/\sigma \le \tfrac12, \qquad \rho \ge t^* = (1 - \sqrt{1 - 2h})\,\sigma/K .

    *Then* some :math:`u^*` has :math:`\psi(u^*) = y` and :math:`\|u^* - u_0\| \le t^*`, and the Gauss-Newton steps
    :math:`u_{k+1} = u_k - D\psi(u_k)^+(\psi(u_k) - y)` stay in the ball and converge to one, with
    :math:`\|u^* - u_k\| \le t^* - t_k`, where :math:`t_k` are Newton's iterates from 0 for the polynomial
    :math:`p(t) = \frac K2t^2 - \sigma t + \sigma\eta`, whose smaller root is :math:`t^*`: quadratically if
    :math:`h < \frac12`.

    *Proof.* :math:`t_1 = \eta`, and as p is quadratic, :math:`p(t_k) = \frac K2(t_k - t_{k-1})^2`, so
    :math:`t_{k+1} - t_k = \frac K2(t_k - t_{k-1})^2/(\sigma - Kt_k)`; the :math:`t_k` increase to :math:`t^* \le
    \sigma/K`. By induction :math:`s_k = u_{k+1} - u_k` exists and :math:`\|s_k\| \le t_{k+1} - t_k`. For k = 0,
    :math:`\|s_0\| = \|J^+r\| \le \eta`. If it holds up to k - 1, then :math:`\|u_k - u_0\| \le t_k \le t^* \le
    \rho`, the segment from :math:`u_{k-1}` to :math:`u_k` is in the ball, and as
    :math:`D\psi(u_{k-1})D\psi(u_{k-1})^+ = I`, Taylor's formula gives :math:`\|\psi(u_k) - y\| = \|\psi(u_k) -
    \psi(u_{k-1}) - D\psi(u_{k-1})s_{k-1}\| \le \frac K2\|s_{k-1}\|^2`. Singular values move by at most the norm
    of the change (Weyl), so :math:`\sigma_{\min}(D\psi(u_k)) \ge \sigma - Kt_k > 0`, the step exists, and
    :math:`\|s_k\| \le \frac K2\|s_{k-1}\|^2/(\sigma - Kt_k) \le t_{k+1} - t_k`. So the :math:`u_k` are a Cauchy
    sequence, their limit is within :math:`t^* - t_k` of :math:`u_k`, and :math:`\psi(u_k) - y \to 0`. (L. V.
    Kantorovich 1948; with the majorant as in J. M. Ortega, Amer. Math. Monthly 75, 1968.)

    Attributes:
        sigma: :math:`\sigma`.
        eta: :math:`\eta`.
        bending: K.
        radius: :math:`\rho`.
        residual: a bound on :math:`\|r\|`.
        weight: the objective is this number times half of the squared residual.
    """

    sigma: float
    eta: float
    bending: float
    radius: float
    residual: float
    weight: float

    @property
    def h(self) -> float:
        """h, rounded up."""
        if not self.sigma > 0 or not math.isfinite(self.bending):
            return math.inf
        return above(arb(self.bending) * arb(self.eta) / arb(self.sigma))

    @property
    def holds(self) -> bool:
        """Whether both hypotheses are verified."""
        return self.h <= 0.5 and self.distance <= self.radius

    @property
    def distance(self) -> float:
        """:math:`t^*`, rounded up; infinite without the first hypothesis."""
        return above(self._root()) if self.h <= 0.5 else math.inf

    def _root(self) -> arb:
        """The root in the form that does not cancel: 2η/(1 + √(1 - 2h))."""
        with ctx.workprec(_BITS):
            h = arb(self.bending) * arb(self.eta) / arb(self.sigma)
            inside = 1 - 2 * h
            return 2 * arb(self.eta) / (1 + (inside if inside >= 0 else arb(0)).sqrt())

    def majorant(self) -> Iterator[tuple[arb, arb]]:
        """The pairs :math:`t_k`, :math:`t_{k+1}`, as balls."""
        with ctx.workprec(_BITS):
            bend, sigma = arb(self.bending), arb(self.sigma)
            last, here = arb(0), arb(self.eta)
        while True:
            yield last, here
            with ctx.workprec(_BITS):
                last, here = here, here + bend / 2 * (here - last) ** 2 / (sigma - bend * here)

    def after(self, steps: int) -> tuple[float, float]:
        """Bounds on the distance to the solution and on the residual after so many steps."""
        distance, residual = self.distance, self.residual
        for k, (last, here) in enumerate(self.majorant()):
            if k == steps:
                with ctx.workprec(_BITS):
                    left = above(self._root() - last)
                return (min(distance, left) if left >= 0 else 0.0), residual
            with ctx.workprec(_BITS):
                residual = (
                    min(residual, above(arb(self.bending) / 2 * (here - last) ** 2))
                    if k
                    else above(arb(self.bending) / 2 * (here - last) ** 2)
                )
        raise AssertionError

    def iterations(self, eps: float) -> int:
        """How many steps make the objective at most eps."""
        for steps in range(_MOST_STEPS):
            residual = arb(self.after(steps)[1])
            if proved(arb(self.weight) / 2 * residual**2 <= arb(eps)):
                return steps
        raise OverflowError(f"more than {_MOST_STEPS} steps for {eps:g}: h is {self.h:.6g}, too close to ½")


@dataclass(frozen=True)
class GradientDescent:
    r"""Gradient descent reaches the global minimum, at a linear rate (Polyak-Łojasiewicz on a ball).

    Let :math:`F = h\circ\psi`, h :math:`\mu_h`-strongly convex, :math:`\Delta = F - \inf h`, :math:`\sigma_\rho =
    \sigma - K\rho > 0`, :math:`\mu = \mu_h\sigma_\rho^2`, F L-smooth on :math:`B(u_0, \rho)`, :math:`0 < \theta
    \le 1`, and

    .. math:: \rho > \frac{1}{1 - \theta/2}\sqrt{2\Delta_0/\mu} .

    *Then* the steps :math:`u_{k+1} = u_k - \frac\theta L\nabla F(u_k)` stay in the ball, :math:`\Delta_k \le
    (1 - \theta(2 - \theta)\mu/L)^k\Delta_0`, and they converge to a global minimiser. (With :math:`\theta = 1` the
    radius is :math:`\sqrt{8\Delta_0/\mu}` and the rate :math:`1 - \mu/L`.)

    *Proof.* On the ball :math:`\sigma_{\min}(D\psi) \ge \sigma_\rho` by Weyl, and strong convexity gives
    :math:`\|\nabla h\|^2 \ge 2\mu_h(h - \inf h)`, so :math:`\|\nabla F\|^2 = \|D\psi^\top\nabla h\|^2 \ge
    2\mu\Delta`. Let :math:`u_0, \dots, u_k` be in the ball, :math:`g = \|\nabla F(u_k)\| > 0`, and :math:`u(t) =
    u_k - t\frac\theta L\nabla F(u_k)`, :math:`t \le 1`, with the segment to it in the ball. By the descent lemma
    :math:`\Delta_k - \Delta(u(t)) \ge t\frac\theta L(1 - \frac\theta2)g^2 = (1 - \frac\theta2)\|u(t) - u_k\|\,g
    \ge (1 - \frac\theta2)\|u(t) - u_k\|\sqrt{2\mu\Delta_k}`, and :math:`\sqrt{\Delta_k} - \sqrt{\Delta(u(t))} \ge
    (\Delta_k - \Delta(u(t)))/(2\sqrt{\Delta_k})`. So :math:`\|u(t) - u_k\| \le 2(\sqrt{\Delta_k} -
    \sqrt{\Delta(u(t))})/((1 - \frac\theta2)\sqrt{2\mu})`, the same holds of all steps before, and the length of
    the path to u(t) is at most :math:`2\sqrt{\Delta_0}/((1 - \frac\theta2)\sqrt{2\mu}) < \rho`: it does not reach
    the edge, and :math:`u_{k+1}` is inside. With t = 1 the descent lemma is :math:`\Delta_{k+1} \le \Delta_k -
    \frac{\theta(2 - \theta)}{2L}g^2 \le (1 - \theta(2 - \theta)\mu/L)\Delta_k`. The path has finite length, so
    the steps converge. If g = 0, :math:`\Delta_k = 0` and nothing moves.

    For :math:`h = \frac{\mu_h}2\|\cdot - y\|^2`: :math:`\Delta_0 = \frac{\mu_h}2\|r\|^2`, and as :math:`\|D\psi\|
    \le S = \|J\| + K\rho` on the ball, :math:`\|\psi - y\| \le \|r\| + S\rho` and :math:`\nabla^2F =
    \mu_h(D\psi^\top D\psi + D^2\psi\cdot(\psi - y))`, :math:`L = \mu_h(S^2 + K(\|r\| + S\rho))`.

    Attributes:
        sigma: :math:`\sigma`.
        norm: a bound on :math:`\|J\|`.
        bending: K.
        radius: :math:`\rho`.
        residual: a bound on :math:`\|r\|`.
        weight: :math:`\mu_h`.
        part: :math:`\theta`.
    """

    sigma: float
    norm: float
    bending: float
    radius: float
    residual: float
    weight: float
    part: float = 1.0

    @property
    def factor(self) -> float:
        """The radius that is needed over that which is there, rounded up: it holds if this is less than one."""
        if not math.isfinite(self.bending):
            return math.inf
        sigma = self._sigma()
        room = (1 - arb(self.part) / 2) * arb(self.radius) * sigma
        return above(arb(self.residual) / room) if proved(sigma > 0) and proved(room > 0) else math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return self.factor < 1

    def _sigma(self) -> arb:
        return arb(self.sigma) - arb(self.bending) * arb(self.radius)

    @property
    def smoothness(self) -> float:
        """L on the ball."""
        steep = arb(self.norm) + arb(self.bending) * arb(self.radius)
        far = arb(self.residual) + steep * arb(self.radius)
        return above(arb(self.weight) * (steep**2 + arb(self.bending) * far))

    @property
    def step_size(self) -> float:
        """:math:`\\theta/L`, rounded down."""
        return below(arb(self.part) / arb(self.smoothness))

    @property
    def rate(self) -> float:
        """The factor of one step, rounded up."""
        mu = arb(self.weight) * self._sigma() ** 2
        part = arb(self.part)
        return min(above(1 - part * (2 - part) * mu / arb(self.smoothness)), 1.0)

    def iterations(self, eps: float) -> int:
        """How many steps make the objective at most eps."""
        return _steps(above(arb(self.weight) / 2 * arb(self.residual) ** 2), self.rate, eps)


@dataclass(frozen=True)
class StronglyConvex:
    r"""A strongly convex neighbourhood: one stationary point, a strict minimum.

    Let :math:`m_0 \le \lambda_{\min}(\nabla^2F(u_0))`, :math:`\|\nabla^2F(u) - \nabla^2F(u_0)\| \le V` on the ball
    :math:`B(u_0, \rho)`, :math:`m = m_0 - V > 0`, :math:`g \ge \|\nabla F(u_0)\|` and :math:`g < m\rho`.

    *Then* the ball contains exactly one stationary point :math:`u^*`, a strict local minimiser, and :math:`\|u_0
    - u^*\| \le g/m`, :math:`F(u_0) - F(u^*) \le g^2/2m`. If :math:`\rho \ge 2g/m`, gradient descent with steps
    1/L, :math:`L \ge \lambda_{\max}(\nabla^2F(u_0)) + V`, converges to it with :math:`\|u_{k+1} - u^*\| \le (1 -
    m/L)\|u_k - u^*\|`, and Newton's method, if 2V < m, with :math:`\|u_{k+1} - u^*\| \le \frac{2V}m\|u_k -
    u^*\|`: the factor 2V/m shrinks with the ball, so it converges faster than linearly, and quadratically where F
    has three derivatives.

    *Proof.* Eigenvalues move by at most the norm of the change, so F is m-strongly convex on the ball and has one
    minimiser there. At the edge :math:`\langle\nabla F(u), u - u_0\rangle \ge \langle\nabla F(u_0), u -
    u_0\rangle + m\rho^2 \ge (m\rho - g)\rho > 0`, so it is inside, hence stationary; a second one would
    contradict :math:`\langle\nabla F(u) - \nabla F(v), u - v\rangle \ge m\|u - v\|^2`, which with :math:`v =
    u_0`, :math:`u = u^*` gives the distance. Strong convexity at :math:`u_0`, minimised over the other point,
    gives the gap. :math:`B(u^*, \|u_0 - u^*\|)` is in the ball if :math:`\rho \ge 2g/m`. There :math:`\nabla
    F(u_k) = \bar H(u_k - u^*)` with :math:`\bar H` the mean of the Hessian on the segment: :math:`\|I - \bar
    H/L\| \le 1 - m/L`, and for Newton :math:`u_{k+1} - u^* = H_k^{-1}(H_k - \bar H)(u_k - u^*)` with :math:`\|H_k
    - \bar H\| \le 2V`. Both factors are below one, so the steps stay in that ball.

    Attributes:
        lowest: :math:`m_0`.
        highest: a bound on the largest eigenvalue.
        variation: V.
        gradient: g.
        radius: :math:`\rho`.
        newton: whether the method is Newton's.
    """

    lowest: float
    highest: float
    variation: float
    gradient: float
    radius: float
    newton: bool

    @property
    def convexity(self) -> float:
        """m, rounded down."""
        return below(arb(self.lowest) - arb(self.variation)) if math.isfinite(self.variation) else -math.inf

    @property
    def distance(self) -> float:
        """g/m, rounded up."""
        return above(arb(self.gradient) / arb(self.convexity)) if self.convexity > 0 else math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses of the method are verified."""
        inside = 2 * self.distance <= self.radius and self.distance < self.radius
        return self.convexity > 0 and inside and self.rate < 1

    @property
    def smoothness(self) -> float:
        """L on the ball."""
        return above(arb(self.highest) + arb(self.variation))

    @property
    def step_size(self) -> float:
        """1/L, rounded down."""
        return below(1 / arb(self.smoothness))

    @property
    def rate(self) -> float:
        """The factor of one step, of the distance."""
        if not self.convexity > 0:
            return math.inf
        m = arb(self.convexity)
        return above(2 * arb(self.variation) / m if self.newton else 1 - m / arb(self.smoothness))

    @property
    def gap(self) -> float:
        """A bound on F(u₀) - F(u*)."""
        return above(arb(self.gradient) ** 2 / (2 * arb(self.convexity)))

    def iterations(self, eps: float) -> int:
        """How many steps bring the objective within eps of its minimum: :math:`F - F^* \\le \\frac L2\\|u -
        u^*\\|^2`.
        """
        if self.gap <= eps:
            return 0
        start = above(arb(self.smoothness) / 2 * arb(self.distance) ** 2)
        return _steps(start, above(arb(self.rate) ** 2), eps)


@dataclass(frozen=True)
class NothingHere:
    r"""No stationary point within :math:`\rho`: :math:`\|\nabla F(u_0)\| > L\rho`, L the smoothness on that ball.

    *Proof.* :math:`\|\nabla F(u)\| \ge \|\nabla F(u_0)\| - L\|u - u_0\| > 0`. Any method has to travel farther.

    Attributes:
        gradient: a lower bound on the norm of the gradient.
        smoothness: L.
        radius: :math:`\rho`.
    """

    gradient: float
    smoothness: float
    radius: float

    @property
    def holds(self) -> bool:
        """Whether the hypothesis is verified."""
        return math.isfinite(self.smoothness) and proved(
            arb(self.gradient) > arb(self.smoothness) * arb(self.radius)
        )


def _steps(start: float, rate: float, eps: float) -> int:
    """The smallest k found with rate^k start ≤ eps, verified."""
    if not 0 < eps < math.inf:
        raise ValueError(f"the accuracy eps is a positive number, got {eps!r}")
    if start <= eps:
        return 0
    if not rate < 1:
        raise OverflowError("the rate is one up to round-off: no number of steps can be given")
    if rate <= 0:
        return 1
    with ctx.workprec(_BITS):
        needed = (arb(eps) / arb(start)).log() / arb(rate).log()
        return math.ceil(Fraction(above(needed))) if needed.is_finite() else 0


__all__ = ["GradientDescent", "Interpolation", "NothingHere", "StronglyConvex", "above", "below"]
