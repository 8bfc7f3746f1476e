"""Numbers as a person reads them: upper bounds rounded upwards, steps and promises rounded downwards."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_DOWN, Context, Decimal, localcontext

from surefoot.magnitude import Magnitude

_LOG10_2 = math.log10(2.0)


def log10(value: Magnitude) -> float:
    """The decimal logarithm of a magnitude of any size, to the nearest double; infinite for zero and infinity."""
    return float(value.log2) * _LOG10_2


def short(value: Magnitude | None) -> str:
    """Three digits at most, rounded upwards unless within a millionth: 0.25 reads 0.25; empty for ``None``.

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
        with localcontext(Context(prec=3, rounding=ROUND_CEILING)):
            nearest = +Decimal(number)
    return f"{float(nearest):g}"


def down(step: float, digits: int = 4) -> str:
    """So many digits, rounded towards zero: a step that is printed is as safe as the one it stands for.

    >>> down(0.29999), down(0.0), down(math.inf)
    ('2.999e-01', '0', '∞')
    """
    if not 0 < step < math.inf:
        return "0" if step == 0 else "∞"
    with localcontext(Context(prec=digits, rounding=ROUND_DOWN)):
        return f"{float(+Decimal(step)):.{digits - 1}e}"


def times(factor: float) -> str:
    """A factor with two digits, rounded downwards.

    >>> times(1.999), times(31.6), times(12345.0)
    ('1.9', '31', '1.2e+04')
    """
    with localcontext(Context(prec=2, rounding=ROUND_DOWN)):
        rounded = float(+Decimal(factor))
    return f"{rounded:g}" if rounded < 1000 else f"{rounded:.1e}"


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


__all__ = ["down", "log10", "shape_text", "share_text", "short", "times"]
