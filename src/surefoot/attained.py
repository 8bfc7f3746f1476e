r"""Lower bounds that a search attained, and their comparison with proved upper bounds.

A :class:`LowerBound` on a supremum is a value that the function takes somewhere. It is the opposite of a
:class:`~surefoot.magnitude.Magnitude`, which is never below the truth: a sum or a product of the two would bound
nothing, so there is no arithmetic here at all, and neither type accepts the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from functools import total_ordering
from typing import TYPE_CHECKING, Any, NoReturn

from surefoot.domains import VARIABLES
from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

_ROUNDOFF = 1e-9  # the relative error of an attained value in double precision


@total_ordering
@dataclass(frozen=True, eq=True, repr=False)
class LowerBound:
    """A finite number at or below a supremum; printed rounded down.

    It can be compared only with other lower bounds; ``float()`` gives the plain number.

    >>> LowerBound(2.71828), float(LowerBound(0.25)), LowerBound(1.0) < LowerBound(2.0)
    (LowerBound(2.718e+00), 0.25, True)

    Raises:
        ValueError: if the number is negative, infinite or NaN: none of these is ever attained.
    """

    value: float

    __array_ufunc__ = None

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ValueError(f"a lower bound is a finite number ≥ 0, got {self.value!r}")

    def __float__(self) -> float:
        return float(self.value)

    def __lt__(self, other: object) -> bool:
        return self.value < other.value if isinstance(other, LowerBound) else NotImplemented

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to become an array, and so a magnitude: an attained value is no upper bound."""
        raise TypeError("a LowerBound cannot be used as an upper bound; float() gives the plain number")

    def __str__(self) -> str:
        if self.value == 0:
            return "0"
        exact = Decimal(self.value)
        exponent = exact.adjusted()
        return f"{exact.scaleb(-exponent).quantize(Decimal('0.001'), ROUND_FLOOR)}e{exponent:+03d}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"LowerBound({self})"


@dataclass(frozen=True)
class Estimate:
    r"""The result of a search in the domain.

    Attributes:
        bound: a value of :math:`\|f(u)\|_2`, so at most :math:`m`.
        lipschitz: a value of :math:`\|Df(u)^\top w\|_2` with :math:`\|w\|_2 = 1`, so at most :math:`\ell`.
        smoothness: a value of :math:`\|D^2f(u)[v, \cdot]^\top w\|_2` with unit :math:`v, w`, or of
            :math:`\|(Df(u) - Df(u'))^\top w\|_2 / \|u - u'\|_2`, so at most :math:`L`.
        domain: the domain in words.
        wrt: what varies: ``"params"`` or ``"input"``.
    """

    bound: LowerBound
    lipschitz: LowerBound
    smoothness: LowerBound
    domain: str = ""
    wrt: str = "params"

    def __str__(self) -> str:
        return (
            f"Found with respect to {VARIABLES[self.wrt]}: {self.domain}\n"
            f"  bound m ≥ {self.bound}   Lipschitz ℓ ≥ {self.lipschitz}   smoothness L ≥ {self.smoothness}"
        )


class Contradiction(SurefootError):
    """A value was attained that a certificate excludes: one of the two is wrong."""


def bracket(certificate: Certificate, estimate: Estimate) -> str:
    r"""Lower bound, upper bound and their ratio, with a line for each of the three constants.

    The certificate and the estimate are of the same model, batch, objective and domain.

    Raises:
        Contradiction: if a lower bound exceeds the upper one by more than the round-off of its evaluation.

    >>> from surefoot.certificate import Certificate
    >>> two = Magnitude.of(2.0)
    >>> certificate = Certificate(two, two, two, {}, Magnitude.zero((0, 0)))
    >>> print(bracket(certificate, Estimate(LowerBound(1.0), LowerBound(2.0), LowerBound(0.0))))
    1.000e+00 ≤ bound m      ≤ 2.000e+00  (ratio 2.00)
    2.000e+00 ≤ Lipschitz ℓ  ≤ 2.000e+00  (ratio 1.00)
            0 ≤ smoothness L ≤ 2.000e+00  (ratio ∞)
    """
    lines = [
        ("bound m", estimate.bound, certificate.bound),
        ("Lipschitz ℓ", estimate.lipschitz, certificate.lipschitz),
        ("smoothness L", estimate.smoothness, certificate.smoothness),
    ]
    left, right = (max(len(str(line[k])) for line in lines) for k in (1, 2))
    return "\n".join(
        f"{low!s:>{left}} ≤ {name:<12} ≤ {high!s:<{right}}  (ratio {_ratio(name, low, high)})"
        for name, low, high in lines
    )


def _ratio(name: str, low: LowerBound, high: Magnitude) -> str:
    """The upper bound over the lower one."""
    if Magnitude.of(float(low)) > high * (1 + _ROUNDOFF):
        raise Contradiction(
            f"the {name} {low} was attained, but the certificate says {high}: check that both speak of the same "
            "model, batch and domain; if they do, the certificate is wrong, and a report is welcome"
        )
    if float(low) == 0:
        return "1.00" if high.is_zero else "∞"
    quotient = high / float(low)
    return f"{float(quotient):.2f}" if float(quotient) < 1e3 else str(quotient)
