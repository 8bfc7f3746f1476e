r"""Magnitudes: non-negative extended reals that neither overflow nor fall below the exact value.

A *valid magnitude* for an exact number :math:`m \in [0, \infty]` is any representable number
:math:`\hat m \ge m`. Every operation here maps valid magnitudes to a valid magnitude, so a whole
calculation on them ends in an upper bound, round-off included.

A magnitude is stored as :math:`\log_2 m` in double precision, so that the bound of a 1000-layer network,
:math:`10^{1000}` and more, is an ordinary number. Zero is :math:`-\infty`, infinity is :math:`+\infty`.

Why the rounding is safe. A product of magnitudes is a sum of logarithms; its rounding error is computed
exactly (Knuth's two-sum) and the sum is moved up by one unit only where it fell below. Every other result
is a logarithm, exponential or power from the C library or numpy, whose vectorised versions err by at most
4 units in the last place, so the absolute error in the log domain is at most :math:`8u(|\log_2 m| + 1)` with
:math:`u = 2^{-53}`; we add :math:`(|\log_2 m| + 2)\,2^{-50}`, which is larger: a relative inflation of about
:math:`10^{-15}` per operation for numbers of ordinary size.

:math:`0 \cdot \infty = 0`, since a constant composed with anything is constant: so NaN cannot occur.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from itertools import takewhile
from typing import Any, TypeAlias, Union

import numpy as np
import torch

Number: TypeAlias = Union["Magnitude", float, int, np.ndarray, torch.Tensor]

_ROUNDING = 2.0**-50
_LOG2_E = math.log2(math.e)
_LOWEST = -sys.float_info.max  # the logarithm of a positive number never rounds to that of zero


def _up(log2: Any) -> Any:
    """Move rounded logarithms up by more than their rounding error; infinities stay."""
    if type(log2) is float:
        return log2 + (abs(log2) + 2.0) * _ROUNDING if math.isfinite(log2) else log2
    return log2 + (np.minimum(np.abs(log2), -_LOWEST) + 2.0) * _ROUNDING  # a finite amount


def _log2(number: float, sign: float = 1.0) -> float:
    """The logarithm of a positive number, or of its reciprocal for sign = -1, rounded up; exact for 2^n."""
    log2 = math.log2(number)
    exact = log2.is_integer() and number == 2 ** int(log2)
    return sign * log2 if exact else _up(sign * log2)


def _add(a: Any, b: Any) -> Any:
    """log2(2**a + 2**b), rounded upwards; exact where one of the two is zero."""
    if type(a) is float and type(b) is float:
        low, high = (a, b) if a < b else (b, a)
        if low == -math.inf or high == math.inf:
            return high
        return _up(high + math.log1p(2.0 ** (low - high)) * _LOG2_E)
    total = np.logaddexp2(a, b)
    return np.where((a == -np.inf) | (b == -np.inf), total, _up(total))


def _multiply(a: Any, b: Any) -> Any:
    """a + b, rounded upwards only where it was rounded down; zero times infinity is zero.

    With s = fl(a + b) and v = s - a, the error a + b - s equals (a - (s - v)) + (b - v) exactly (Knuth, The
    Art of Computer Programming 2, 4.2.2, Theorem B). Infinite operands make it NaN, which is not positive.
    """
    if type(a) is float and type(b) is float:
        if a == -math.inf or b == -math.inf:
            return -math.inf
        total = max(a + b, _LOWEST)
        part = total - a
        below = (a - (total - part)) + (b - part) > 0.0
        return math.nextafter(total, math.inf) if below else total
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.maximum(a + b, _LOWEST)
        part = total - a
        below = (a - (total - part)) + (b - part) > 0.0
    zero = (a == -np.inf) | (b == -np.inf)
    return np.where(zero, -np.inf, np.where(below, np.nextafter(total, np.inf), total))


def _relation(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison of a magnitude with another or with a number, which may be negative or not a number."""

    def method(self: Magnitude, other: Any) -> Any:
        if isinstance(other, float | int) and not other >= 0:
            return compare(np.zeros(self.shape) if self.shape else 0.0, other)
        return compare(self.log2, Magnitude.of(other).log2)

    return method


class Magnitude:
    """A non-negative extended real, or an array of them, rounded upwards.

    It behaves as a number: ``+ * / **`` with numbers on either side, comparison, ``float`` and format
    specifications, ``f"{m:.3g}"``, also beyond the range of doubles. Every result is an upper bound of the same
    operation on the numbers that the operands represent. That includes division: ``1 / L`` for an upper bound L
    is rounded up, so it is a number to look at and not a safe step; ``Certificate.step_size`` rounds down.
    There is no subtraction: a difference of upper bounds bounds nothing. Comparisons are between the
    representations, a plain number being rounded upwards first; for arrays they are entry by entry.

    >>> big = Magnitude.of(10.0) ** 1000
    >>> print(big, float(big), f"{1 / big:.2g}")
    1.001e+1000 inf 1e-1000
    >>> print(Magnitude.of(0.0) * Magnitude.infinity())
    0
    >>> Magnitude.of(3.0) + 4.0 < 7.1
    True
    """

    __slots__ = ("log2",)
    __array_ufunc__ = None  # array * magnitude is left to the magnitude

    def __init__(self, log2: np.ndarray | float) -> None:
        array = isinstance(log2, np.ndarray) and log2.ndim > 0
        # single numbers are Python floats: ten times faster than 0-d arrays
        self.log2: Any = np.asarray(log2, dtype=np.float64) if array else float(log2)
        if np.isnan(self.log2).any() if array else math.isnan(self.log2):
            raise ValueError("a magnitude cannot be NaN: it stands for a non-negative extended real")

    @classmethod
    def _made(cls, log2: Any) -> Magnitude:
        """The magnitude of a logarithm that comes from other magnitudes, so that it is not NaN."""
        magnitude = cls.__new__(cls)
        magnitude.log2 = log2 if type(log2) is float or (type(log2) is np.ndarray and log2.ndim) else float(log2)
        return magnitude

    @classmethod
    def of(cls, value: Number) -> Magnitude:
        """The magnitude of a non-negative number, array or tensor, rounded upwards.

        Raises:
            ValueError: if an entry is negative or NaN.
        """
        if isinstance(value, Magnitude):
            return value
        if isinstance(value, float | int):
            if not value >= 0:
                raise ValueError(f"a magnitude is a non-negative number, got {value!r}")
            return cls(_log2(value)) if 0 < value < math.inf else cls(value or -math.inf)
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value if value.dtype is torch.int64 else value.double()).numpy()
        numbers = np.asarray(value)
        array = numbers.astype(np.float64)
        if not (array >= 0).all():
            raise ValueError(f"a magnitude is a non-negative number, got {value!r}")
        mantissa, exponent = np.frexp(array)
        with np.errstate(divide="ignore"):
            logs = np.log2(array)
        # powers of two are exact (1 stays 1), unless they come from rounding a large integer
        exact_entries = (mantissa == 0.5) & ((numbers.dtype.kind == "f") | (array < 2.0**53))
        return cls(np.where(exact_entries, exponent - 1.0, _up(logs)))

    @classmethod
    def zero(cls, shape: tuple[int, ...] = ()) -> Magnitude:
        """Zero, or an array of zeros."""
        return cls(np.full(shape, -np.inf))

    @classmethod
    def infinity(cls) -> Magnitude:
        """The magnitude of a quantity without a finite bound."""
        return cls(np.inf)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array; ``()`` for a single number."""
        return np.shape(self.log2)

    @property
    def is_finite(self) -> bool:
        """Whether every entry is finite (however large)."""
        return bool(np.all(self.log2 < np.inf))

    @property
    def is_zero(self) -> bool:
        """Whether every entry is exactly zero."""
        return bool(np.all(self.log2 == -np.inf))

    def __len__(self) -> int:
        return len(self.log2)

    def __getitem__(self, key: Any) -> Magnitude:
        return Magnitude._made(self.log2[key])

    def __iter__(self) -> Iterator[Magnitude]:
        return (self[index] for index in range(len(self)))

    def __add__(self, other: Number) -> Magnitude:
        return Magnitude._made(_add(self.log2, Magnitude.of(other).log2))

    __radd__ = __add__

    def __mul__(self, other: Number) -> Magnitude:
        return Magnitude._made(_multiply(self.log2, Magnitude.of(other).log2))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Magnitude:
        """The quotient; ∞ for 0/0 and ∞/∞, which have no bound."""
        if isinstance(other, Magnitude):
            undefined = np.isinf(self.log2) & (self.log2 == other.log2)
            return Magnitude(np.where(undefined, np.inf, _multiply(self.log2, -other.log2)))
        if not 0 < other < math.inf:
            raise ValueError(f"can only divide a magnitude by a positive number, got {other!r}")
        return self * Magnitude(_log2(other, -1.0))

    def __rtruediv__(self, other: Number) -> Magnitude:
        return Magnitude.of(other) / self

    def __pow__(self, exponent: float) -> Magnitude:
        if not 0 <= exponent < math.inf:
            raise ValueError(f"the power of an upper bound needs a finite exponent >= 0, got {exponent!r}")
        if exponent in (0, 1):
            return Magnitude(np.zeros_like(self.log2)) if exponent == 0 else self
        if type(self.log2) is float:
            log2 = self.log2
            return Magnitude._made(log2 if log2 in (0.0, -math.inf) else max(_up(log2 * exponent), _LOWEST))
        with np.errstate(over="ignore"):
            power = np.maximum(_up(self.log2 * exponent), _LOWEST)
        return Magnitude._made(np.where((self.log2 == 0) | (self.log2 == -np.inf), self.log2, power))

    def sqrt(self) -> Magnitude:
        """The square root."""
        return self**0.5

    def sum(self, axis: int | None = None) -> Magnitude:
        """The sum along an axis, or of everything."""
        if axis is None:
            few = np.size(self.log2) <= 1
            return self.max() if few else Magnitude(self.log2.reshape(-1)).sum(axis=0)
        top = np.max(self.log2, axis=axis, keepdims=True, initial=-np.inf)
        finite = np.where(np.isfinite(top), top, 0.0)
        with np.errstate(over="ignore", divide="ignore", under="ignore"):
            total = np.log2(np.exp2(self.log2 - finite).sum(axis=axis)) + np.squeeze(finite, axis=axis)
        count = self.log2.shape[axis]
        # n additions of non-negative numbers: relative error at most (n + 8) u, underflow included, since the
        # largest term is 1; in the log domain at most 1.45 times that
        total = np.squeeze(self.log2, axis=axis) if count == 1 else _up(total + (count + 8) * 2.0**-52)
        return Magnitude._made(total)

    def norm(self, axis: int | None = None) -> Magnitude:
        """The Euclidean norm along an axis, or of everything."""
        return (self**2).sum(axis).sqrt()

    def max(self, axis: int | None = None) -> Magnitude:
        """The largest entry."""
        return Magnitude._made(np.max(self.log2, axis=axis, initial=-np.inf))

    def min(self, axis: int | None = None) -> Magnitude:
        """The smallest entry."""
        return Magnitude._made(np.min(self.log2, axis=axis, initial=np.inf))

    def numpy(self) -> np.ndarray:
        """The entries as doubles, rounded upwards; ``inf`` where beyond the range of a double.

        ``exp2`` errs by at most 4 units in the last place, less than the factor 1 + 2^-49. A positive number below
        the smallest normal double becomes that double, as subnormal numbers may be flushed to zero.
        """
        log2 = np.asarray(self.log2)
        with np.errstate(over="ignore", under="ignore"):
            value = np.exp2(log2)
            raised = np.maximum(value * (1 + 2.0**-49), sys.float_info.min)
        whole = (log2 == np.floor(log2)) & (np.abs(log2) < 1000)
        return np.where((log2 == -np.inf) | whole, value, raised)

    def tensor(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """The entries as a double-precision tensor, on the device of ``like``."""
        out = torch.from_numpy(np.atleast_1d(self.numpy())).reshape(self.shape)
        return out if like is None else out.to(like.device)

    def __float__(self) -> float:
        return float(self.numpy())

    def __eq__(self, other: object) -> Any:
        comparable = isinstance(other, Magnitude | float | int)
        return _relation(operator.eq)(self, other) if comparable else NotImplemented

    __lt__, __le__ = _relation(operator.lt), _relation(operator.le)
    __gt__, __ge__ = _relation(operator.gt), _relation(operator.ge)

    def __bool__(self) -> bool:
        return len(self) > 0 if self.shape else not self.is_zero

    def __hash__(self) -> int:
        return hash((np.asarray(self.log2) + 0.0).tobytes())  # + 0.0: the two zeros are equal

    def __str__(self) -> str:
        if self.shape:
            return "[" + ", ".join(str(entry) for entry in self) + "]"
        return self.format(3)

    def __format__(self, spec: str) -> str:
        """The text for a specification; if it is one for numbers, the number is rounded up."""
        kind = spec[-1:]
        if self.shape or not ("." in spec or kind in tuple("eEfFgGn%")):
            return format(str(self), spec)
        if math.isinf(self.log2):
            return format(float(self), spec)
        digits = int("".join(takewhile(str.isdigit, spec.partition(".")[2])) or 6)
        ordinary, fixed = abs(self.log2) < 1000, kind in tuple("fF%")
        if abs(self.log2) > _PRINTABLE or (fixed and not ordinary):
            return self.format(digits)
        with localcontext(_DECIMAL):
            digits = digits + 2 * (kind == "%") if fixed else max(digits + (kind in tuple("eE")), 1)
            rounded = _ceiling(Decimal(2) ** Decimal(self.log2), digits, fixed)
            return format(float(rounded) if ordinary else rounded.normalize(), spec)

    def __repr__(self) -> str:
        return f"Magnitude({self})"

    def format(self, digits: int = 3) -> str:
        """Scientific notation with ``digits`` decimals, the last one rounded upwards; exponents of any size.

        >>> Magnitude.of(1.62751e12).format(4)
        '1.6276e+12'
        """
        log2 = float(self.log2)
        if math.isinf(log2):
            return "0" if log2 < 0 else "∞"
        with localcontext(_DECIMAL):
            has_digits = abs(log2) <= _PRINTABLE  # beyond that not even the first digit is known: a power of ten
            value = Decimal(2) ** Decimal(log2) if has_digits else Decimal(log2) * Decimal(2).log10()
            rounded = _ceiling(value, digits + 1, slack="1e-12" if has_digits else "0")
            exponent = rounded.adjusted()
            mantissa = rounded.scaleb(-exponent).quantize(Decimal(1).scaleb(-digits))
            return f"{'' if has_digits else '10^'}{mantissa}e{exponent:+03d}"


_PRINTABLE = 1e15
_DECIMAL = Context(prec=40, Emax=10**17, Emin=-(10**17))


def _ceiling(value: Decimal, digits: int, fixed: bool = False, slack: str = "1e-12") -> Decimal:
    """A number rounded up to this many digits, or decimals if ``fixed``.

    A positive number that exceeds one with this many digits by at most a relative 1e-12 becomes that one: the
    difference is the inflation of the arithmetic, and 1 should read 1.
    """
    unit = Decimal(1).scaleb((0 if fixed else value.adjusted() + 1) - digits)
    if unit < Decimal(1).scaleb(value.adjusted() - 36):
        return value
    nearest = value.quantize(unit)
    close = abs(value - nearest) <= Decimal(slack).scaleb(value.adjusted())
    return nearest if close else value.quantize(unit, ROUND_CEILING)


def maximum(*values: Number) -> Magnitude:
    """The largest of several magnitudes, entry by entry; zero if there are none."""
    return Magnitude._made(functools.reduce(np.maximum, [Magnitude.of(v).log2 for v in values], -math.inf))


def minimum(*values: Number) -> Magnitude:
    """The smallest of several magnitudes, entry by entry: the best of several valid bounds."""
    logs = [Magnitude.of(v).log2 for v in values]
    if all(type(log2) is float for log2 in logs):
        return Magnitude._made(min(logs, default=math.inf))
    return Magnitude._made(functools.reduce(np.minimum, logs))


def stack(values: list[Magnitude]) -> Magnitude:
    """Several magnitudes of one shape as one array."""
    return Magnitude(np.stack([v.log2 for v in values]))
