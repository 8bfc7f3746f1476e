"""Numbers as people read them: upper bounds rounded up, steps and decreases rounded down."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_DOWN, Context, Decimal, localcontext

from surefoot.magnitude import Magnitude

_LOG10_2 = math.log10(2.0)
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def log10(value: Magnitude) -> float:
    """The decimal logarithm of a magnitude of any size, to the nearest double; infinite for zero and infinity."""
    return float(value.log2) * _LOG10_2


def short(value: Magnitude | None) -> str:
    """At most three digits, rounded up unless the error is below a millionth: 0.25 stays 0.25; empty for ``None``.

    >>> [short(Magnitude.of(v)) for v in (0.0, 0.25, 1.0, 316.228, 12345.0, 1e-7)]
    ['0', '0.25', '1', '317', '1.24e+04', '1.00e-07']
    """
    if value is None:
        return ""
    number = float(value)
    if not 1e-3 <= number < 1e4:
        return value.format(2)
    nearest = Decimal(f"{number:.3g}")
    if abs(Decimal(number) - nearest) > nearest * Decimal("1e-6"):
        nearest = Context(prec=3, rounding=ROUND_CEILING).create_decimal(number)
    return f"{float(nearest):g}"


def down(step: float, digits: int = 4) -> str:
    """A number rounded towards zero to this many digits: a printed step is as safe as the exact one.

    >>> down(0.29999), down(0.0), down(math.inf)
    ('2.999e-01', '0', '∞')
    """
    if not 0 < step < math.inf:
        return "0" if step == 0 else "∞"
    return f"{float(Context(prec=digits, rounding=ROUND_DOWN).create_decimal(step)):.{digits - 1}e}"


def times(factor: float) -> str:
    """A factor with two digits, rounded down.

    >>> times(1.999), times(31.6), times(12345.0)
    ('1.9', '31', '1.2e+04')
    """
    rounded = float(Context(prec=2, rounding=ROUND_DOWN).create_decimal(factor))
    return f"{rounded:g}" if rounded < 1000 else f"{rounded:.1e}"


def quotient(value: Magnitude, reference: Magnitude, digits: int = 2) -> str:
    """The quotient of two bounds in scientific notation; it compares them and is not a bound itself.

    It is empty if one of them is zero or infinite and the other is not.

    >>> quotient(Magnitude.of(6.0), Magnitude.of(2.0)), quotient(Magnitude.infinity(), Magnitude.of(2.0))
    ('3.00e+0', '')
    """
    if value == reference:
        return f"{1:.{digits}e}"
    if not (math.isfinite(value.log2) and math.isfinite(reference.log2)):
        return ""
    with localcontext(Context(prec=20, Emax=10**17, Emin=-(10**17))):
        return f"{Decimal(10) ** Decimal(log10(value) - log10(reference)):.{digits}e}"


def readable(scientific: str) -> str:
    """A number in scientific notation the way a person writes it; the digits stay the same.

    >>> readable("1.903e+18"), readable("5.925e+01"), readable("3.200e-07"), readable("∞"), readable("10^3.1e+15")
    ('1.903×10¹⁸', '59.25', '3.2×10⁻⁷', '∞', '10^(3.1×10¹⁵)')
    """
    if scientific.startswith("10^"):
        return f"10^({readable(scientific[3:])})"
    mantissa, e, exponent = scientific.partition("e")
    if not e:
        return scientific
    if -3 <= int(exponent) <= 3:
        return _shortened(format(Decimal(scientific), "f"))
    return f"{_shortened(mantissa)}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def _shortened(digits: str) -> str:
    """The digits without trailing zeros."""
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as it is printed: ``128×10``, or ``scalar``."""
    return "×".join(map(str, shape)) or "scalar"
