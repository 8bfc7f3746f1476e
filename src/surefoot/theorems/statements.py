r"""The theorems, as functions of verified numbers.

:math:`u_0` are the weights, :math:`\psi` the outputs of all samples stacked, :math:`J = D\psi(u_0)`, :math:`r =
\psi(u_0) - y`. Every number is a bound in the direction that the theorem needs, and what follows from them is
computed in ball arithmetic: an inequality holds only if it holds for all numbers of the balls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from flint import arb, ctx

BITS = 256
_MOST_STEPS = 200


def above(ball: arb) -> float:
    """A double that is not below any number of a ball."""
    with ctx.workprec(BITS):
        number = float(ball.upper())
        return number if arb(number) >= ball else math.nextafter(number, math.inf)


def below(ball: arb) -> float:
    """A double that is not above any number of a ball."""
    return -above(-ball)


def proved(claim: object) -> bool:
    """Whether an inequality of balls holds for sure."""
    return bool(claim)


@dataclass(frozen=True)
class Profile:
    r"""How fast the Jacobian changes, measured by itself: :math:`\omega(t) \ge \|J^+D^2\psi(u)\|` for
    :math:`\|u - u_0\| \le t`, a step function that does not decrease.

    On a ball :math:`B(u_0, t)`, :math:`\|J^+(D\psi(u) - J)\| \le \int_0^t\omega` (:meth:`turn`). As :math:`JJ^+ =
    I`, :math:`D\psi(u) = JT` with :math:`T = I + J^+(D\psi(u) - J)`; if the integral is less than one, T is
    invertible, :math:`D\psi(u)` is onto like J, and as :math:`T^{-1}J^+z` solves :math:`D\psi(u)v = z`,

    .. math:: \|D\psi(u)^+z\| \le \frac{\|J^+z\|}{1 - \int_0^t\omega}, \qquad
        \sigma_{\min}(D\psi(u)) \ge \sigma\Big(1 - \int_0^t\omega\Big), \qquad
        \|D\psi(u)\| \le \|J\|\Big(1 + \int_0^t\omega\Big).

    :math:`\omega = K/\sigma` is always a choice.

    Attributes:
        steps: pairs of a radius and :math:`\omega` up to it, by increasing radius.

    >>> profile = sf.theorems.Profile.of([(0.5, 2.0), (0.1, 1.0)])
    >>> profile.radius, profile.steps[0]
    (0.5, (0.1, 1.0))
    """

    steps: tuple[tuple[float, float], ...]

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> Profile:
        """From finite bounds on balls of any order; a bound on a larger ball holds on a smaller one."""
        found: list[tuple[float, float]] = []
        for radius, omega in sorted(pairs, reverse=True):
            if math.isfinite(omega) and radius > 0:
                found.insert(0, (radius, min(omega, found[0][1]) if found else omega))
        return Profile(tuple(found))

    @property
    def radius(self) -> float:
        """The radius of the largest ball."""
        return self.steps[-1][0] if self.steps else 0.0

    def _pieces(self) -> Iterator[tuple[arb, arb, arb]]:
        start = arb(0)
        for radius, omega in self.steps:
            yield start, arb(radius), arb(omega)
            start = arb(radius)

    def turn(self, t: arb) -> arb:
        """The integral of :math:`\\omega` up to t."""
        return sum(
            (omega * (_positive(t - low) - _positive(t - high)) for low, high, omega in self._pieces()), arb(0)
        )

    def bend(self, t: arb) -> arb:
        """The integral of :math:`(t - s)\\omega(s)` up to t."""
        squares = (
            omega * (square(_positive(t - low)) - square(_positive(t - high))) / 2
            for low, high, omega in self._pieces()
        )
        return sum(squares, arb(0))

    def room(self) -> tuple[float, float]:
        """The largest first step :math:`\\max_\\tau\\tau - \\int_0^\\tau(\\tau - s)\\omega(s)ds`, rounded down,
        and its :math:`\\tau`.
        """
        with ctx.workprec(BITS):
            places = [radius for radius, _ in self.steps]
            turned = arb(0)
            for low, high, omega in self._pieces():
                if proved(omega > 0) and proved(turned < 1):
                    place = low + (1 - turned) / omega
                    if proved(place < high):
                        places.append(below(place))
                turned += omega * (high - low)
            found = [
                (below(arb(tau) - self.bend(arb(tau))), tau) for tau in places if proved(self.turn(arb(tau)) <= 1)
            ]
        return max(found, default=(0.0, 0.0))


def _positive(ball: arb) -> arb:
    return ball.max(arb(0))


def square(ball: arb) -> arb:
    """A power of a ball around zero would not be a number."""
    return ball * ball


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
        found = [above(arb(self.eta) / (2 * arb(room)))] if room > 0 else [math.inf]
        if 0 < twice <= self.radius:
            found.append(above(self.profile.bend(arb(twice)) / (2 * arb(self.eta))))
        return min(found)

    @property
    def holds(self) -> bool:
        """Whether the hypothesis is verified."""
        return self.eta <= self.profile.room()[0]

    @property
    def distance(self) -> float:
        """:math:`t^*`, rounded up; infinite if there is none."""
        return above(self._root()) if self.holds else math.inf

    def _root(self) -> arb:
        """The smallest root, or a point behind it where f is not positive."""
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
        """Bounds on the distance to the solution and on the residual after so many steps."""
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
        """How many steps make the objective at most eps."""
        for steps in range(_MOST_STEPS):
            residual = arb(self.after(steps)[1])
            if proved(arb(self.weight) / 2 * square(residual) <= arb(eps)):
                return steps
        raise OverflowError(f"more than {_MOST_STEPS} steps for {eps:g}: h is {self.h:.6g}, too close to ½")


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

    >>> from surefoot.theorems.statements import SquareOnBall
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
        """All of them, for a theorem on the same ball."""
        return self.sigma, self.norm, self.profile, self.bending, self.radius, self.residual, self.weight

    @property
    def rate(self) -> float:
        """The factor of one step, of a bound on the objective."""
        return math.inf

    @property
    def factor(self) -> float:
        """The radius that is needed over that which is there, rounded up: it holds if this is less than one."""
        return math.inf

    @property
    def holds(self) -> bool:
        """Whether the hypotheses are verified."""
        return self.factor < 1

    def iterations(self, eps: float) -> int:
        """How many steps make the objective at most eps."""
        return steps_needed(self.loss, self.rate, eps)

    @property
    def is_finite(self) -> bool:
        """Whether there are bounds on the ball, and the Jacobian is onto everywhere."""
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
        """:math:`\\mu`; the exact :math:`\\mu_h` may be a few roundings below the stored one."""
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
        """The factor of one step, rounded up."""
        step = arb(self.step_size)
        return min(above(1 - step * (2 - step * arb(self.smoothness)) * self.pull), 1.0)


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
    segment: :math:`\|I - \bar H/L\| \le 1 - m/L`, and for Newton :math:`u_{k+1} - u^* = H_k^{-1}(H_k - \bar
    H)(u_k - u^*)` with :math:`\|H_k - \bar H\| \le 2V`. Both factors are below one, so the steps stay in that
    ball.

    As eigenvalues move by at most the norm of a change, m may be :math:`\lambda_{\min}(\nabla^2F(u_0)) - V`.

    Attributes:
        convexity: m.
        smoothness: L.
        variation: V.
        gradient: g.
        radius: :math:`\rho`.
        newton: whether the method is Newton's.

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
        return above(square(arb(self.gradient)) / (2 * arb(self.convexity)))

    def iterations(self, eps: float) -> int:
        """How many steps bring the objective within eps of its minimum: :math:`F - F^* \\le \\frac L2\\|u -
        u^*\\|^2`.
        """
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
        return math.isfinite(self.smoothness) and proved(
            arb(self.gradient) > arb(self.smoothness) * arb(self.radius)
        )


def steps_needed(start: float, rate: float, eps: float) -> int:
    """The smallest k found with rate^k start ≤ eps, verified."""
    if not 0 < eps < math.inf:
        raise ValueError(f"the accuracy eps is a positive number, got {eps!r}")
    if start <= eps:
        return 0
    if not rate < 1:
        raise OverflowError("the rate is one up to round-off: no number of steps can be given")
    if rate <= 0:
        return 1
    with ctx.workprec(BITS):
        needed = (arb(eps) / arb(start)).log() / arb(rate).log()
        if not needed.is_finite():
            raise OverflowError(f"no number of steps can be given from {start!r} to {eps!r}")
        return math.ceil(Fraction(above(needed)))
