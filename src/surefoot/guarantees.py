r"""Consequences of a certificate: step sizes, iteration counts, the damping of Gauss-Newton steps.

Throughout, :math:`F` is real-valued and :math:`L` bounds its second derivative on the domain, a convex set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

_MOST_BITS = 1_000_000
_HAIR = 2.0**-20  # steps to the edge are shortened by this part, as gradients may be in single precision


class GuaranteeError(SurefootError, ValueError):
    """The certificate does not give this guarantee; the message says why and what to do."""


def require_smooth(certificate: Certificate) -> None:
    """Refuse a certificate that guarantees no step.

    Raises:
        GuaranteeError: if the function is not real-valued, the constants are not bounds, or the smoothness is
            infinite.
    """
    require_bounds(certificate)
    if not certificate.smoothness.is_finite:
        why = "; ".join(certificate.reasons) or "an operation is not bounded over the domain"
        raise GuaranteeError(
            f"the smoothness is infinite, so no step size is guaranteed to descend: {why}. A network with kinks "
            "(ReLU, max-pooling) has a smooth version: surefoot.smooth(model)"
        )


def require_bounds(certificate: Certificate) -> None:
    """Refuse a certificate that does not bound a real-valued function on balls or boxes."""
    if not certificate.scalar:
        raise GuaranteeError(
            "the certificate is that of a network's outputs, which are not descended: certify an objective, for "
            "example surefoot.certify(model, x, objective=surefoot.CrossEntropy(y), …)"
        )
    if certificate.segment_step is not None:
        raise GuaranteeError(
            "the certificate speaks of one direction; its guarantee is safe_step. For gradient steps certify on a "
            "set: surefoot.Ball(radius) or surefoot.ProductBall(radius)"
        )
    if certificate.flags:
        raise GuaranteeError(
            "the certificate rests on constants that are not upper bounds, so nothing is guaranteed: use "
            "constants='certified'. " + "; ".join(certificate.flags)
        )


def iterations(smoothness: Magnitude, gap: float | Magnitude, eps: float, factor: int = 2) -> int:
    r"""The smallest whole number :math:`N \ge c L (F_0 - F_{\mathrm{low}}) / \varepsilon^2`, with c the factor.

    Gradient descent :math:`u_{k+1} = u_k - \frac1L\nabla F(u_k)` that stays in the domain has c = 2:

    .. math:: F(u_{k+1}) \le F(u_k) - \tfrac1L\|\nabla F(u_k)\|^2 + \tfrac L2\tfrac1{L^2}\|\nabla F(u_k)\|^2
        = F(u_k) - \tfrac1{2L}\|\nabla F(u_k)\|^2,

    and adding up N steps gives :math:`\min_k\|\nabla F(u_k)\|^2 \le 2L(F_0 - F_{\mathrm{low}})/N \le
    \varepsilon^2`. (Functions that are smooth on the whole space have c = 4/3, by an argument that leaves the
    domain; it is not used.)

    The arithmetic is exact, however large the number is.

    Raises:
        GuaranteeError: if eps is not positive, or the number would have a million binary digits.

    >>> iterations(Magnitude.of(1.0), 1.0, 0.5)
    8
    """
    if not 0 < eps < math.inf:
        raise GuaranteeError(f"the accuracy eps is a positive number, got {eps!r}")
    if not isinstance(gap, Magnitude) and not 0 <= gap < math.inf:
        raise GuaranteeError(f"the gap F(u₀) − F_low is a finite number ≥ 0, got {gap!r}")
    distance = _fraction(gap) if isinstance(gap, Magnitude) else Fraction(gap)
    return math.ceil(factor * _fraction(smoothness) * distance / Fraction(eps) ** 2)


def _fraction(value: Magnitude) -> Fraction:
    """An exact number that is at least a magnitude."""
    number = float(value)
    if math.isfinite(number):
        return Fraction(number)
    if not value.log2 < _MOST_BITS:
        raise GuaranteeError(f"a constant of the certificate is {value}: no number of steps can be given")
    whole = math.floor(value.log2)
    return Fraction(2.0 ** (value.log2 - whole) * (1 + 2.0**-49)) * 2**whole


def step_from(curvature: Magnitude) -> float:
    """The inverse of a curvature, rounded down; 0 if it is beyond the range of doubles, infinite if it is zero."""
    number = float(curvature)
    if number == 0:
        return math.inf
    return 0.0 if math.isinf(number) else math.nextafter(1.0 / number, 0.0)


def inverse_of_one_step(certificate: Certificate) -> float:
    """A step from the weights that descends while it stays in the domain: 1/L, or more with ``one_step``."""
    one_step = certificate.one_step
    return step_from(certificate.smoothness if one_step is None else one_step)


def seen_from_weights(balls: Sequence[tuple[float, Magnitude]]) -> Magnitude:
    r"""The curvature that a single move from the weights meets, from the curvature on balls around them.

    With :math:`L_i \ge \|\nabla^2F\|` on the ball of radius :math:`r_i`, :math:`0 = r_0 < r_1 < … < r_k = r`,

    .. math:: F(u + d) \le F(u) + \langle\nabla F(u), d\rangle + \tfrac12\bar L\|d\|^2 \quad (\|d\| \le r), \qquad
        \bar L = \sum_iL_i\big((1 - t_{i-1})^2 - (1 - t_i)^2\big), \quad t_i = r_i/r .

    *Proof.* The remainder of Taylor's theorem is :math:`\int_0^1(1 - t)\,\nabla^2F(u + td)[d, d]\,dt`, the point
    :math:`u + td` lies in the ball of radius :math:`tr`, so :math:`\nabla^2F` there is at most :math:`L_i` for
    :math:`t_{i-1} < t \le t_i`, and :math:`2\int_{t_{i-1}}^{t_i}(1 - t)\,dt` is the weight of :math:`L_i`. So a
    step :math:`\gamma \le 1/\bar L` with :math:`\gamma\|\nabla F(u)\| \le r` lowers F by at least
    :math:`\frac\gamma2\|\nabla F(u)\|^2`, as 1/L does. If the curvature grows linearly, :math:`\bar L` has a third
    of the growth.

    >>> round(float(seen_from_weights([(0.5, Magnitude.of(1.0)), (1.0, Magnitude.of(2.0))])), 9)
    1.25
    """
    last, total, before = balls[-1][0], Magnitude.zero(), 0.0
    for radius, smoothness in balls:
        part = radius / last
        weight = (part - before) * (2 - part - before)
        total, before = total + smoothness * (max(weight, 0.0) * (1 + 2.0**-40) + 2.0**-48), part
    return total


def longest_step(certificate: Certificate) -> float:
    r"""The longest step against the gradient that ends in the domain, from the weights at its centre.

    It is :math:`r/\|\nabla F(u)\|` on a ball, as :math:`\|u - \gamma\nabla F(u) - u\| \le r`, and
    :math:`\min_sr_s/\|\nabla_sF(u)\|` on a product of balls. The norm of the gradient at the centre is bounded by
    ℓ if it was not computed. The result is infinite if the domain is not around the weights: then nothing is known
    about where a step ends.
    """
    if certificate.radius is None or not certificate.scalar:
        return math.inf
    sizes = gradient_sizes(certificate)
    if isinstance(certificate.radius, Mapping):
        return min((until(certificate.radius[path], size) for path, size in sizes.items()), default=math.inf)
    return until(certificate.radius, math.hypot(*sizes.values()) if sizes else float(certificate.lipschitz))


def gradient_sizes(certificate: Certificate) -> Mapping[str, float]:
    """Bounds on the norm of the gradient at the centre, by block."""
    if certificate.block_gradients is not None:
        return certificate.block_gradients
    return {path: float(size) for path, size in certificate.block_lipschitz.items()}


def until(radius: float, gradient: float) -> float:
    """The step that moves by a radius, or slightly less."""
    return math.inf if gradient == 0 else radius * (1 - _HAIR) / gradient


def require_room(certificate: Certificate, gap: float | Magnitude, eps: float) -> None:
    r"""Refuse a ball around the weights that steps 1/L may leave before :math:`\|\nabla F\| \le \varepsilon`.

    A radius :math:`r \ge 2(F_0 - F_{\mathrm{low}})/\varepsilon` is enough. Proof: let :math:`u_0, \dots, u_k` be
    in the ball with gradients longer than :math:`\varepsilon`, and :math:`u = u_k - t\nabla F(u_k)/L`,
    :math:`0 < t \le 1`, with the segment to it in the ball. Then :math:`F(u_k) - F(u) \ge (t -
    t^2/2)\|\nabla F(u_k)\|^2/L \ge \frac12\|\nabla F(u_k)\|\|u - u_k\| > \frac12\varepsilon\|u - u_k\|`, and
    likewise for the steps before, so the path to :math:`u` is shorter than :math:`2(F_0 -
    F(u))/\varepsilon \le r`: no such :math:`u` is on the edge, and :math:`u_{k+1}` is inside.

    Raises:
        GuaranteeError: with a radius that is enough.
    """
    radius = certificate.radius
    if radius is None or isinstance(radius, Mapping):
        return
    distance = gap if isinstance(gap, Magnitude) else Magnitude.of(gap)
    if (needed := distance * 2.0 / eps) > radius:
        raise GuaranteeError(
            f"steps 1/L may leave the ball of radius {radius:g} before the gradient is {eps:g}: a radius of "
            f"{needed} would do for this gap, {distance}. Certify on a larger surefoot.Ball, or give a larger eps "
            "or the gap F(u₀) − F_low if it is smaller"
        )


def damping(certificate: Certificate) -> float:
    r"""A κ with which the Gauss-Newton model majorises the objective over the domain.

    With :math:`F = h\circ\psi`, h convex, and :math:`J = D\psi(u)`, for :math:`u` and :math:`u + v` in the domain:

    1. The convex-composite model, :math:`h(\psi(u) + Jv) + \frac\kappa2\|v\|^2`, with
       :math:`\kappa \ge \ell_h L_\psi` (:func:`composite_damping`). Proof: put :math:`a = \psi(u+v)`,
       :math:`b = \psi(u) + Jv`. Convexity at :math:`a` gives :math:`h(a) \le h(b) + \langle\nabla h(a), a -
       b\rangle \le h(b) + \ell_h\|a - b\|`, and :math:`\|a - b\| \le \frac12L_\psi\|v\|^2` by Taylor's formula.
       Since :math:`a` is an output at a point of the domain, :math:`\ell_h` is needed there only.
    2. The quadratic model :math:`F(u) + \langle\nabla F(u), v\rangle + \frac12 v^\top J^\top\nabla^2h\,Jv +
       \frac\kappa2\|v\|^2`. For the square loss it is the same model, as h is quadratic. For any convex h it
       majorises F once :math:`\kappa \ge L`, even without its third term, which is not negative. For the
       cross-entropy :math:`\ell_hL_\psi` is not enough: a linear network has :math:`L_\psi = 0`, and the quadratic
       Taylor model of a logistic regression is not an upper bound.

    So this is :math:`\min(\ell_hL_\psi, L)` for the square loss and :math:`L` for other convex losses, rounded up.

    Raises:
        GuaranteeError: if the certificate is not that of such an objective, or the constant is infinite.
    """
    composite, is_quadratic = _composite(certificate)
    best = min(composite, certificate.smoothness) if is_quadratic else certificate.smoothness
    return _finite(certificate, best)


def composite_damping(certificate: Certificate) -> float:
    r""":math:`\kappa \ge \ell_hL_\psi` for the model that keeps the loss as it is; see :func:`damping`, item 1.

    Raises:
        GuaranteeError: as there.
    """
    return _finite(certificate, _composite(certificate)[0])


def _composite(certificate: Certificate) -> tuple[Magnitude, bool]:
    if certificate.make_damping is None:
        raise GuaranteeError(
            "damping is that of Gauss-Newton steps on a convex loss of a network's outputs: certify with "
            "objective=surefoot.Square(y), surefoot.CrossEntropy(y) or another convex one, and wrt='params'"
        )
    return certificate.make_damping()


def _finite(certificate: Certificate, value: Magnitude) -> float:
    if not value.is_finite:
        require_smooth(certificate)
    number = float(value)
    if math.isinf(number):
        raise GuaranteeError(f"the damping is {value}, beyond the range of doubles: take a smaller domain")
    return number


def composite_iterations(kappa: float, gap: float | Magnitude, eps: float) -> int:
    r"""A number of Gauss-Newton or prox-linear steps of which one is at most :math:`\varepsilon/\kappa` long.

    Let :math:`m_u(v) = h(\psi(u) + Jv) + \frac\kappa2\|v\|^2`, h convex, with a :math:`\kappa` for which it is at
    least :math:`F(u + v)` (:func:`damping`, item 1; for the square loss it is the quadratic model of item 2), and
    :math:`u_{k+1} = u_k + v_k`, :math:`v_k` its minimiser, in the domain. :math:`m_u` is :math:`\kappa`-strongly
    convex, so

    .. math:: F(u_k) = m_{u_k}(0) \ge m_{u_k}(v_k) + \tfrac\kappa2\|v_k\|^2
        \ge F(u_{k+1}) + \tfrac\kappa2\|v_k\|^2,

    and adding up N steps gives :math:`\min_k(\kappa\|v_k\|)^2 \le 2\kappa(F_0 - F_{\mathrm{low}})/N`. A step that
    short is near stationarity: if :math:`\nabla h` is :math:`L_h`-Lipschitz, :math:`J^\top\nabla h(\psi + Jv) =
    -\kappa v` gives :math:`\|\nabla F(u_k)\| \le (1 + L_h\|J\|^2/\kappa)\,\kappa\|v_k\|`.

    *Inside.* A ball around :math:`u_0` of radius :math:`2(F_0 - F_{\mathrm{low}})/\varepsilon`
    (:func:`require_room`) is not left before: by strong convexity :math:`m_u(tv) \le m_u(0) - \frac\kappa2
    t\|v\|^2` for :math:`t \le 1`, so while :math:`\kappa\|v\| > \varepsilon` the objective falls by more than
    :math:`\frac12\varepsilon\|tv\|` on the way to :math:`u + tv`, and the path is shorter than the radius.

    Raises:
        GuaranteeError: as :func:`iterations`.

    >>> composite_iterations(2.0, 1.0, 0.5)
    16
    """
    return iterations(Magnitude.of(kappa), gap, eps)


def gap_of(certificate: Certificate) -> Magnitude:
    """A bound on F − F_low over the domain: the bound on F if it is not negative, else twice that bound."""
    return certificate.bound if certificate.nonnegative else certificate.bound * 2.0
