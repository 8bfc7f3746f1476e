"""Numbers as the report prints them: ``59.25``, ``1.903×10¹⁸``, ``∞``.

Upper bounds keep the rounding of :meth:`Magnitude.format`, upwards; steps and attained values are rounded down.
"""

from __future__ import annotations

import math
from decimal import Decimal

from surefoot.certificate.numbers import log10
from surefoot.lower import LowerBound
from surefoot.magnitude import Magnitude

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_MOST_WRITTEN_OUT = 10**7


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


def power_of_ten(exponent: int) -> str:
    """``10¹⁸``."""
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def upper(value: Magnitude) -> str:
    """An upper bound, rounded upwards.

    The same digits as those of :meth:`Magnitude.format`, in a fiftieth of its time: a double knows the mantissa to
    a relative 1e-9 when the exponent is below 1e5, which decides the fourth digit unless the mantissa is within
    1e-6 of a number of four digits.
    """
    log = log10(value)
    if abs(log) < 1e5:
        exponent = math.floor(log)
        digits = 1000 * 10 ** (log - exponent)
        above = math.ceil(digits)
        if 1e-3 < above - digits < 1 - 1e-3:
            return readable(
                f"{above // 1000}.{above % 1000:03d}e{exponent}" if above < 10000 else f"1e{exponent + 1}"
            )
    return readable(str(value))


def lower(value: LowerBound | float) -> str:
    """An attained value or a safe step, rounded downwards."""
    number = float(value)
    return "∞" if number == math.inf else readable(LowerBound(number).format(3))


def count(number: int) -> str:
    """A whole number: with its digits in groups of three, or rounded upwards where it has very many."""
    return f"{number:,}".replace(",", "\u202f") if number < _MOST_WRITTEN_OUT else upper(Magnitude.of(number))


def ratio(value: Magnitude, reference: Magnitude) -> str:
    """How many times the reference, to three digits; a comparison of two bounds, and itself no bound.

    Empty where one of them is zero or infinite and the other is not.

    >>> ratio(Magnitude.of(6.0), Magnitude.of(2.0)), ratio(Magnitude.infinity(), Magnitude.of(2.0))
    ('×3', '')
    """
    if value == reference:
        return "×1"
    if not value.is_finite or not reference.is_finite or value.is_zero or reference.is_zero:
        return ""
    log = log10(value) - log10(reference)
    exponent = math.floor(log)
    mantissa = f"{10 ** (log - exponent):.2f}"
    return f"×{readable(f'{mantissa}e{exponent}' if mantissa != '10.00' else f'1.00e{exponent + 1}')}"


def share(part: float) -> str:
    """A part of the whole in per cent; empty where it rounds to nothing."""
    return "" if part < 5e-4 else f"{100 * part:.0f}\u202f%" if part >= 0.0995 else f"{100 * part:.1f}\u202f%"


def sort_key(value: Magnitude) -> str:
    """A key that orders magnitudes of any size and that JavaScript reads as a number."""
    if math.isinf(value.log2):
        return "Infinity" if value.log2 > 0 else "-Infinity"
    return repr(float(value.log2))


def _shortened(digits: str) -> str:
    """Without zeros behind the last decimal."""
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


__all__ = ["count", "lower", "power_of_ten", "ratio", "readable", "share", "sort_key", "upper"]
