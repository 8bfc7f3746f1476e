r"""Groups of numbers divided by their root-mean-square: values, slopes and curvatures with their errors.

A group of :math:`M` numbers, from which the mean may have been subtracted, becomes

.. math:: g(x) = x / \rho_\epsilon, \qquad \rho_\epsilon = \sqrt{\rho^2 + \epsilon}, \qquad \rho^2 = \|x\|^2/M .

*Jacobian.* :math:`Dg = (I - xx^\top/(M\rho_\epsilon^2))/\rho_\epsilon` has eigenvalues :math:`1/\rho_\epsilon` and
:math:`\epsilon/\rho_\epsilon^3`, so :math:`\|Dg\| = 1/\rho_\epsilon \le \epsilon^{-1/2}`.

*Curvature.* :math:`D^2g` is the symmetric tensor :math:`3x^{\otimes3}/(M^2\rho_\epsilon^5) - \mathrm{sym}(x
\otimes I)/(M\rho_\epsilon^3)`. The norm of a symmetric tensor is reached on the diagonal (Banach), where with
:math:`t = \langle x, v\rangle \in [0, \|x\|]` it is :math:`3t/(M\rho_\epsilon^3)\,(1 -
t^2/(M\rho_\epsilon^2))`. It grows up to :math:`t^2 = M\rho_\epsilon^2/3`. So

.. math:: \|D^2g\| = \frac{1}{\sqrt M}\begin{cases} 3\rho\epsilon/\rho_\epsilon^5 & \rho^2 \le \epsilon/2\\
    (2/\sqrt3)/\rho_\epsilon^2 & \rho^2 \ge \epsilon/2 \end{cases}

whose maximum, at :math:`\rho^2 = \epsilon/4`, is :math:`\kappa M^{-1/2}\epsilon^{-1}` with :math:`\kappa =
\tfrac32(\tfrac45)^{5/2} \approx 0.8587`; from there on it decreases.

*Third derivative.* g is the gradient of :math:`M\rho_\epsilon`, so :math:`D^3g` is symmetric too. Along a unit
vector v that is :math:`\sqrt M\sqrt{y^2 + D}`, y moving with speed one, :math:`y^2 + D = Q = M\rho_\epsilon^2`,
with the fourth derivative :math:`\sqrt M\,\theta(12 - 15\theta)Q^{-3/2}`, :math:`\theta = D/Q \in [0, 1]`. So
:math:`\|D^3g\| \le 3/(M\rho_\epsilon^3)`.

Subtracting the mean is an orthogonal projection, which can only lower either: it leaves both as they are where
there are directions orthogonal to x left, so from three numbers per group on (two without the mean). Groups are
separate, so the Jacobian and the tensor are block diagonal and their norms are the largest over the groups. Each
group has norm below :math:`\sqrt M`, and its largest entry is below :math:`\sqrt{M - 1}` if the entries add up to
zero: then :math:`x_i^2 = (\sum_{j \ne i} x_j)^2 \le (M-1)(\|x\|^2 - x_i^2)`. Contracted with a costate, the blocks
count with the norms of their parts of it.

*Evaluation.* The kernels of torch are not used: some compute the variance as a difference of means. A group is
scaled and centred (:mod:`surefoot.operations.groups`), with an error of norm at most :math:`e`, and if
:math:`\epsilon` is larger than its squares scaled down further, so that nothing overflows. The mean of the M
squares, the sum with :math:`\epsilon`, the root and the quotient have a relative error of :math:`(M + 8)u`
together (Higham, section 3.1). The map g has slope at most :math:`1/\rho_\epsilon`, so the result of a group is
off by at most

.. math:: (M + 8)\,u\,\|\hat z\| + e / \min\rho_\epsilon,

the minimum over the points within :math:`e` of what was computed; and never by more than :math:`2\sqrt M` and
round-off, as the exact and the computed result have norm at most :math:`\sqrt M`.

*Pulling back.* :math:`Dg^\top\lambda = P(\lambda - z\langle z, \lambda\rangle/M)/\rho_\epsilon`, P subtracting
the mean if that is subtracted, computed by this formula with the errors of every entry: an entry of the centred
group is off by at most e, and :math:`\rho_\epsilon` by :math:`e/\sqrt M`, as its slope :math:`\|x\|/(M
\rho_\epsilon)` is at most that, and a relative :math:`(M + 32)2u + 2^{-48}`. Where :math:`\epsilon` is lost on the
scale of the group, it and the 2⁻¹⁰⁰⁰ in its place change :math:`\rho_\epsilon` by less than :math:`2^{-499}`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from surefoot.magnitude import Magnitude, minimum
from surefoot.norms.hermitian import times_power
from surefoot.operations.common import ONE, root
from surefoot.operations.groups import Groups, centred, scaled
from surefoot.operations.record import Near
from surefoot.operations.softmax import summed
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

_UNIT = 2.0**-53
_KAPPA = 1.5 * 0.8**2.5 * (1 + 1e-15)


def normalised(groups: Tensor, eps: float, *, centre: bool) -> Tensor:
    """Groups, one per row, divided by their root-mean-square."""
    if not groups.numel():
        return groups
    data = _prepared(groups, centre=centre)
    halvings, shift = _shift(data, eps)
    squares = times_power(data.numbers.square().mean(dim=1, keepdim=True), -2 * halvings)
    return times_power(data.numbers, -halvings) / (squares + shift.clamp_min(2.0**-1000)).sqrt()


def _prepared(groups: Tensor, *, centre: bool) -> Groups:
    data = scaled(groups)
    return centred(data) if centre else data


def _shift(data: Groups, eps: float) -> tuple[Tensor, Tensor]:
    """How often groups are halved besides, so that eps is at most 1 on the scale of their squares; and eps on that
    scale, zero if below 2^-1000; as columns.

    Where it is zero, squares that do not vanish add up to more than 2^-500: some entry is 1/2 or more, and all
    differences of such entries to the mean are multiples of 2^-110, up to a division by M.
    """
    mantissa, exponent = math.frexp(eps)
    powers = exponent - 2 * data.exponents
    halvings = torch.div(powers + 1, 2, rounding_mode="floor").clamp_min(0)
    rest = (powers - 2 * halvings).double()
    return halvings, torch.where(rest < -1000, 0.0, mantissa * torch.exp2(rest.clamp_min(-1000.0)))


def evaluation_error(groups: Tensor, eps: float, *, centre: bool) -> Magnitude:
    """How far what :func:`normalised` computes may be from the exact value; see the module for the proof."""
    if not groups.numel():
        return Magnitude.zero()
    data = _prepared(groups, centre=centre)
    halvings, shift = _shift(data, eps)
    down = -halvings.reshape(-1).cpu().numpy()
    size = data.size
    least = np.ldexp(data.least_norms(Magnitude.zero((len(groups),))), down) / math.sqrt(size)
    rho = np.hypot(least, shift.sqrt().reshape(-1).cpu().numpy()) * (1 - 2.0**-40)
    whole = math.sqrt(size) * (1 + 2.0**-40)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        error = np.nan_to_num(np.ldexp(data.errors, down) / rho, nan=np.inf, posinf=np.inf)
        norms = np.nan_to_num(
            np.ldexp(data.norms.reshape(-1).cpu().numpy(), down) / rho, nan=np.inf, posinf=np.inf
        )
    total = np.minimum(error, 2 * whole) + np.minimum(norms, whole) * ((size + 16) * 2 * _UNIT)
    return Magnitude.of(total).norm() * (1 + 2.0**-40) + root(groups.numel()) * (2.0**-1018 * size)


def _parts(data: Groups, eps: float) -> tuple[Rounded, Rounded]:
    """The root-mean-squares on the scale of the groups, as a column, and the groups divided by them."""
    halvings, shift = _shift(data, eps)
    squares = times_power(data.numbers.square().mean(dim=1, keepdim=True), -2 * halvings)
    rho = (squares + shift.clamp_min(2.0**-1000)).sqrt()
    off = times_power(data.error, -halvings) * (1 + 2.0**-40) + 2.0**-1020
    wrong = rho * ((data.size + 32) * 2 * _UNIT + 2.0**-48) + off / math.sqrt(data.size) * (1 + 2.0**-40)
    length = Rounded(rho, wrong + (shift == 0).double() * 2.0**-499)
    return length, Rounded(times_power(data.numbers, -halvings), off) / length


def pulled(groups: Tensor, costate: Tensor, eps: float, *, centre: bool) -> Rounded:
    """The transposed Jacobian of :func:`normalised` times a costate; see the module for the errors."""
    if not groups.numel():
        return Rounded.exact(costate)
    data = _prepared(groups, centre=centre)
    size, halvings = data.size, _shift(data, eps)[0]
    length, z = _parts(data, eps)
    slope = Rounded.exact(costate)
    tilted = slope - z * summed(z * slope, 1) / float(size)
    if centre:
        tilted = tilted - summed(tilted, 1) / float(size)
    scaled = tilted / length
    down = -data.exponents - halvings
    value, error = (times_power(part.expand(costate.shape), down) for part in (scaled.value, scaled.error))
    return Rounded(value, error + SMALL)


def near(groups: Tensor, move: Tensor, eps: float, *, centre: bool) -> Near:
    r"""With c the move, centred if the group is, and :math:`s = \langle z, c\rangle/M`: :math:`(c -
    sz)/\rho_\epsilon + \frac12(3s^2z - 2sc - \|c\|^2z/M)/\rho_\epsilon^2`, as :math:`D\rho_\epsilon = s` and
    :math:`D^2\rho_\epsilon = (\|c\|^2/M - s^2)/\rho_\epsilon`.

    Let E be the norm of the error of z and r the relative one of :math:`\rho_\epsilon`. As :math:`\|z\| \le
    \sqrt M`, for :math:`\|c\| = 1` the first is off by :math:`(3E/\sqrt M + 2r)/\rho_\epsilon`, the second by
    :math:`(16E/M + 16r/\sqrt M)/\rho_\epsilon^2`; sums of M products round by a few units for each.
    """
    data = _prepared(groups, centre=centre)
    size = data.size
    rho, z = _parts(data, eps)
    inverse = times_power(1 / rho.value, -data.exponents - _shift(data, eps)[0])
    c = move - move.mean(dim=1, keepdim=True) if centre else move
    s = (z.value * c).sum(dim=1, keepdim=True) / size
    first = (c - s * z.value) * inverse
    square = c.square().sum(dim=1, keepdim=True) / size
    second = (3 * s.square() * z.value - 2 * s * c - square * z.value) * inverse.square()
    relative = rho.error / (rho.value - rho.error).clamp(min=0.0) + (size + 32) * 2 * _UNIT
    wrong = torch.linalg.vector_norm(z.error.expand(z.value.shape), dim=1, keepdim=True) / math.sqrt(size)
    errors = (
        (3 * wrong + 4 * relative) * inverse,
        (16 * wrong + 16 * relative) * inverse.square() / math.sqrt(size),
    )
    bounds = [float((error * (1 + 2.0**-30)).nan_to_num(nan=torch.inf).max()) for error in errors]
    return Near(first + 0.5 * second, bounds[0], bounds[1])


def constants(
    groups: Tensor | None, moves: Magnitude | None, eps: float, size: int, centre: bool
) -> tuple[Magnitude, Magnitude]:
    """Slope and curvature of each group over the domain, from a lower bound of ρ: the norm at the centre minus how
    far it may move, over √M. All on the scale of the group, where nothing overflows.
    """
    everywhere = (ONE / eps).sqrt(), ONE / eps * _KAPPA / math.sqrt(max(1, size)) * (1 + 1e-15)
    if groups is None or moves is None or not groups.numel():
        return Magnitude(np.array([everywhere[0].log2])), Magnitude(np.array([everywhere[1].log2]))
    data = _prepared(groups, centre=centre)
    halvings, shift = (column.reshape(-1).cpu().numpy() for column in _shift(data, eps))
    rho = np.ldexp(data.least_norms(moves), -halvings) / math.sqrt(size) * (1 - 2.0**-50)
    units = Magnitude(data.units.log2 + halvings)
    squared = Magnitude(2 * units.log2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        total = (rho**2 + shift) * (1 - 1e-14)
        ratio = np.where(shift > 0, rho**2 / shift, np.where(rho > 0, np.inf, 0.0)) * (1 - 1e-14)
        close = np.where(ratio <= 0.25, _KAPPA, 3 * np.sqrt(np.minimum(ratio, 0.5)) / (1 + ratio) ** 2.5)
        slope = Magnitude.of(1 / np.sqrt(total)) / units * (1 + 1e-14)
        far = Magnitude.of(2 / math.sqrt(3) / total) / squared * (1 + 1e-14)
    bend = np.where(ratio <= 0.5, (Magnitude.of(close) / eps).log2, far.log2)
    curvature = Magnitude(bend) / math.sqrt(size) * (1 + 1e-14)
    return minimum(slope, everywhere[0]), minimum(curvature, everywhere[1])
