"""Real numbers at 200 bits that know where they come from: values, gradients and Hessians in ball arithmetic.

A :class:`Number` is a ball of python-flint (so every result is an interval that contains the real one) with a
tangent along one direction and the partial derivatives in what it was computed from. Going back through them once
gives the gradient and, of the tangents, the product of the Hessian with the direction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flint import arb

ZERO, ONE = arb(0), arb(1)
Partial = tuple["Number", Any, Any]  # an argument, the derivative in it, and the tangent of that derivative
Derivatives = tuple[Any, Any, Any]
_order = itertools.count()


class Undecided(Exception):
    """A ball is too wide to say on which side of a break it lies."""


class Number:
    """A real number, its tangent, and how it depends on others."""

    __array_priority__ = 1000
    __slots__ = ("order", "parents", "tangent", "value")

    def __init__(self, value: arb, tangent: arb = ZERO, parents: Sequence[Partial] = ()) -> None:
        self.value, self.tangent, self.parents, self.order = value, tangent, parents, next(_order)

    def __add__(self, other: Any) -> Number:
        if isinstance(other, Number):
            parents = ((self, ONE, ZERO), (other, ONE, ZERO))
            return Number(self.value + other.value, self.tangent + other.tangent, parents)
        return Number(self.value + other, self.tangent, ((self, ONE, ZERO),))

    __radd__ = __add__

    def __neg__(self) -> Number:
        return Number(-self.value, -self.tangent, ((self, -ONE, ZERO),))

    def __sub__(self, other: Any) -> Number:
        return self + (-other)

    def __rsub__(self, other: Any) -> Number:
        return -self + other

    def __mul__(self, other: Any) -> Number:
        if isinstance(other, Number):
            tangent = self.tangent * other.value + self.value * other.tangent
            parents = ((self, other.value, other.tangent), (other, self.value, self.tangent))
            return Number(self.value * other.value, tangent, parents)
        return Number(self.value * other, self.tangent * other, ((self, other, ZERO),))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Number:
        return self * reciprocal(other)

    def __rtruediv__(self, other: Any) -> Number:
        return reciprocal(self) * other


def value_of(x: Any) -> arb:
    """The ball of a number or a constant."""
    return x.value if isinstance(x, Number) else x


def applied(function: Callable[[arb], Derivatives], x: Any) -> Any:
    """A scalar function, given with its first two derivatives."""
    if not isinstance(x, Number):
        return function(x)[0]
    value, slope, bend = function(x.value)
    return Number(value, slope * x.tangent, ((x, slope, bend * x.tangent),))


def reciprocal(x: Any) -> Any:
    """1/x."""
    return applied(_reciprocal, x)


def _reciprocal(x: arb) -> Derivatives:
    y = 1 / x
    return y, -y * y, 2 * y * y * y


def dot(a: Iterable[Any], b: Iterable[Any]) -> Any:
    """The sum of products, as one number."""
    value, tangent, parents = ZERO, ZERO, []
    for x, y in zip(a, b, strict=True):
        p, q = value_of(x), value_of(y)
        value += p * q
        if isinstance(x, Number):
            tangent += x.tangent * q
            parents.append((x, q, y.tangent if isinstance(y, Number) else ZERO))
        if isinstance(y, Number):
            tangent += p * y.tangent
            parents.append((y, p, x.tangent if isinstance(x, Number) else ZERO))
    return Number(value, tangent, parents) if parents else value


def total(terms: Iterable[Any]) -> Any:
    """The sum, as one number."""
    terms = list(terms)
    return dot(terms, [ONE] * len(terms))


def derivatives(result: Any, leaves: Sequence[Number]) -> tuple[list[arb], list[arb]]:
    """The gradient of a result in the leaves, and its tangent: the Hessian times the direction."""
    if not isinstance(result, Number):
        return [ZERO] * len(leaves), [ZERO] * len(leaves)
    adjoints: dict[int, tuple[arb, arb]] = {id(result): (ONE, ZERO)}
    for number in sorted(_reachable(result), key=lambda n: -n.order):
        slope, bend = adjoints[id(number)]
        for parent, partial, moved in number.parents:
            s, b = adjoints.get(id(parent), (ZERO, ZERO))
            adjoints[id(parent)] = s + slope * partial, b + bend * partial + slope * moved
    pairs = [adjoints.get(id(leaf), (ZERO, ZERO)) for leaf in leaves]
    return [slope for slope, _ in pairs], [bend for _, bend in pairs]


def _reachable(result: Number) -> list[Number]:
    seen, stack = {id(result): result}, [result]
    while stack:
        for parent, *_ in stack.pop().parents:
            if id(parent) not in seen:
                seen[id(parent)] = parent
                stack.append(parent)
    return list(seen.values())


def exactly(number: float) -> arb:
    """A floating-point number or a whole one as it is, whatever the working precision.

    Raises:
        Undecided: if it is not finite.
    """
    if not math.isfinite(number):
        raise Undecided(f"a constant is {number}")
    return arb(number)


def natural_power(x: arb, n: int) -> arb:
    """xⁿ by multiplication: flint's own takes a logarithm, which a ball around zero has not."""
    return math.prod([x] * n, start=ONE)


def norm(numbers: Iterable[Any]) -> arb:
    """The Euclidean norm."""
    return sum((value_of(x) * value_of(x) for x in numbers), ZERO).nonnegative_part().sqrt()
