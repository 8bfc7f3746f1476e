"""Numbers as people read them: upper bounds rounded up, steps and promises rounded down.

Plain text has ``1.903e+18``; a page has ``1.903×10¹⁸``, by :func:`readable`.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_DOWN, Context, Decimal, localcontext

from surefoot.attained import LowerBound
from surefoot.magnitude import Magnitude

_LOG10_2 = math.log10(2.0)
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_MOST_WRITTEN_OUT = 10**7


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


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as it is printed.

    >>> shape_text((128, 10)), shape_text(())
    ('128×10', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"


def share_text(share: float, whole: Magnitude) -> str:
    """A share of a magnitude in percent, empty below one half; of an infinite one ∞."""
    if not whole.is_finite:
        return "∞" if share > 0 else ""
    return f"{share:.0%}" if share >= 0.005 else ""


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
    return f"{_shortened(mantissa)}×{power_of_ten(int(exponent))}"


def _shortened(digits: str) -> str:
    """The digits without trailing zeros."""
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def power_of_ten(exponent: int) -> str:
    """``10¹⁸``."""
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def upper(value: Magnitude) -> str:
    """An upper bound for a page, rounded up.

    The digits are those of :meth:`Magnitude.format`, in a fiftieth of its time: a double has the mantissa to a
    relative 1e-9 when the exponent is below 1e5, which decides the fourth digit unless the mantissa is within 1e-6
    of a number of four digits.
    """
    log = log10(value)
    if abs(log) < 1e5:
        exponent = math.floor(log)
        digits = 1000 * 10 ** (log - exponent)
        above = math.ceil(digits)
        if 1e-3 < above - digits < 1 - 1e-3 and above < 10000:
            return readable(f"{above // 1000}.{above % 1000:03d}e{exponent}")
    return readable(str(value))


def lower(value: LowerBound | float) -> str:
    """An attained value or a safe step for a page, rounded down."""
    return readable(down(float(value)))


def count(number: int) -> str:
    """A whole number with its digits in groups of three; rounded up if it has very many digits."""
    return f"{number:,}".replace(",", "\u202f") if number < _MOST_WRITTEN_OUT else upper(Magnitude.of(number))


def per_cent(part: float) -> str:
    """A part of the whole in per cent; empty if it rounds to nothing."""
    return "" if part < 5e-4 else f"{100 * part:.0f}\u202f%" if part >= 0.0995 else f"{100 * part:.1f}\u202f%"


def sort_key(value: Magnitude) -> str:
    """A key that orders magnitudes of any size and that JavaScript reads as a number."""
    if math.isinf(value.log2):
        return "Infinity" if value.log2 > 0 else "-Infinity"
    return repr(float(value.log2))
