r"""Groups of numbers, scaled and centred: what lengths, variances and normalisations are computed from.

*Scaling.* A group is divided by :math:`2^e`, where :math:`2^{e-1} \le \max|x_i| < 2^e`. That is exact, but for
entries that become smaller than :math:`2^{-1022}`; so the squares neither overflow nor, as a sum, underflow.

*Centring.* Let :math:`m` be the mean of M scaled numbers, :math:`\hat m` the computed one, :math:`t = m - \hat m`,
:math:`d = \mathrm{fl}(x - \hat m)`, :math:`\hat r` the computed mean of d, and :math:`\hat c = \mathrm{fl}(d -
\hat r)` the result; the exact one is :math:`c = x - \hat m - t`. With :math:`u = 2^{-53}` and norms over the
group, in which a number that all entries share counts with :math:`\sqrt M`,

.. math::
    \|d - (x - \hat m)\| \le u\|d\|, \quad
    \sqrt M\,|\mathrm{mean}(d) - t| \le u\|d\|, \quad
    \sqrt M\,|\hat r - \mathrm{mean}(d)| \le \gamma_M\|d\|, \quad
    \|\hat c - (d - \hat r)\| \le u\|\hat c\|

by rounding to nearest, by Cauchy-Schwarz as t is the mean of :math:`x - \hat m`, and by the error of a sum in any
order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). As :math:`\|\hat c\| \le 2\|d\|`, the
sum of all is :math:`\|\hat c - c\| \le (M + 8)\,2u\,\|d\|` with room for second orders. How wrong :math:`\hat m`
is enters only through :math:`\|d\|^2 \approx \|c\|^2 + Mt^2`: of numbers around :math:`10^{12}` with deviation 1,
the centred ones are right to 10 digits and more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import times_power
from surefoot.scalar import Rounded
from surefoot.scalar.rounded import SMALL

_UNIT = 2.0**-53
_LOST = 2.0**-1020  # more than underflow takes from one entry, in a few operations


@dataclass(frozen=True)
class Groups:
    r"""Numbers in groups, :math:`2^e` times what is stored."""

    numbers: Tensor  # one group per row; differentiable if they were made from what is
    exponents: Tensor  # e, one whole number per group, as a column
    error: Tensor  # on the distance of the stored numbers of each group from the exact ones, as a column

    @property
    def size(self) -> int:
        """How many numbers are in a group."""
        return self.numbers.shape[1]

    @property
    def units(self) -> Magnitude:
        """The powers of two that the stored numbers are multiples of."""
        return Magnitude(self.exponents.reshape(-1).cpu().numpy().astype(np.float64))

    @property
    def norms(self) -> Tensor:
        """Computed norms of the stored numbers, as a column: off by a relative (M + 4) u at most."""
        return torch.linalg.vector_norm(self.numbers, dim=1, keepdim=True)

    @property
    def exact(self) -> Rounded:
        """The numbers themselves, with their errors."""
        return Rounded(times_power(self.numbers, self.exponents), times_power(self.error, self.exponents) + SMALL)

    @property
    def errors(self) -> np.ndarray:
        """The errors of the groups."""
        return self.error.reshape(-1).cpu().numpy()

    def least_norms(self, moves: Magnitude) -> np.ndarray:
        """Lower bounds of the norms of the stored numbers, if the groups may move by so much."""
        steps = (moves / self.units).numpy()
        norms = self.norms.detach().reshape(-1).cpu().numpy() * (1 - (self.size + 16) * _UNIT)
        least = norms - (steps + self.errors) * (1 + 2.0**-50) - _LOST
        return np.where(least > 0, least * (1 - 2.0**-50), 0.0)

    def inverse_norms(self, moves: Magnitude) -> Magnitude:
        """Upper bounds of one over the norms of the groups, if they may move by so much."""
        with np.errstate(divide="ignore", over="ignore"):
            inverse = Magnitude.of(1 / self.least_norms(moves)) * (1 + 2.0**-50)
        return inverse / self.units


def scaled(groups: Tensor) -> Groups:
    """Groups in double precision, one per row, divided by powers of two."""
    tops = groups.detach().abs().amax(dim=1, keepdim=True) if groups.numel() else groups.new_zeros(len(groups), 1)
    exponents = torch.frexp(tops)[1].to(torch.int64)
    lost = torch.full_like(tops, math.sqrt(groups.shape[1]) * _LOST)
    return Groups(times_power(groups, -exponents), exponents, lost)


def centred(groups: Groups) -> Groups:
    """The groups without their means; see the module for the error."""
    if not groups.numbers.numel():
        return groups
    x = groups.numbers
    rough = x - x.detach().mean(dim=1, keepdim=True)
    fine = rough - rough.mean(dim=1, keepdim=True)
    size = torch.linalg.vector_norm(rough.detach(), dim=1, keepdim=True)
    error = size * ((groups.size + 9) * 2 * _UNIT) + 4 * groups.error
    return Groups(fine, groups.exponents, error)
