r"""Scalar functions: expressions in one real variable.

A :class:`ScalarFunction` is a list of steps, each an elementary function of earlier steps. It is hashable, it
can be evaluated on tensors, and every bound of this package is computed from it. Build one by name, by
operators, or step by step as a graph pass does:

>>> x = ScalarFunction.variable()
>>> silu = x * ScalarFunction.apply("sigmoid", x)
>>> silu == ScalarFunction.named("silu")
True
>>> silu(torch.tensor([0.0, 1.0]))
tensor([0.0000, 0.7311])

Functions with kinks are *piecewise*: the pieces of a step are themselves scalar functions, of the argument of
that step. How smoothly two pieces join is not stated but computed (:mod:`surefoot.scalar.enclosure`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import torch

from surefoot.scalar.primitives import PRIMITIVES

Affine: TypeAlias = "tuple[Fraction, Fraction] | None"
Operator: TypeAlias = "Callable[[ScalarFunction, ScalarFunction | float], ScalarFunction]"

ACTIVATIONS: dict[str, Callable[..., ScalarFunction]] = {}  # filled by surefoot.scalar.activations


def _operator(name: str) -> tuple[Operator, Operator]:
    """A binary operator with the function on the left, and on the right."""
    return lambda f, other: ScalarFunction.apply(name, f, other), lambda f, other: ScalarFunction.apply(
        name, other, f
    )


@dataclass(frozen=True)
class Step:
    """``"variable"``, ``"constant"``, ``"piecewise"`` or one of :data:`PRIMITIVES`, applied to earlier steps.

    ``parameters`` are the value of a constant, the exponent of a power, or the breaks of a piecewise function, of
    which there is one fewer than of its pieces.
    """

    op: str
    operands: tuple[int, ...] = ()
    parameters: tuple[float, ...] = ()
    pieces: tuple[ScalarFunction, ...] = ()


@dataclass(frozen=True)
class ScalarFunction:
    """A function from the reals to the reals: its steps in order, the last one being the result."""

    steps: tuple[Step, ...]

    @staticmethod
    def variable() -> ScalarFunction:
        """The function x."""
        return ScalarFunction((Step("variable"),))

    @staticmethod
    def constant(value: float) -> ScalarFunction:
        """A constant function."""
        if not math.isfinite(value):
            raise ValueError(f"a constant of a scalar function is a finite number, got {value!r}")
        return ScalarFunction((Step("constant", parameters=(float(value),)),))

    @staticmethod
    def apply(name: str, *operands: ScalarFunction | float) -> ScalarFunction:
        """One of :data:`PRIMITIVES`, ``"maximum"``, ``"minimum"`` or an activation without parameters, applied to
        functions of the same variable or to numbers. The exponent of ``"pow"`` is a number.
        """
        if name == "pow" and len(operands) == 2 and not isinstance(operands[1], ScalarFunction):
            return _build("pow", [_lift(operands[0])], ScalarFunction.constant(operands[1]).steps[0].parameters)
        functions = [_lift(operand) for operand in operands]
        if name in ("maximum", "minimum") and len(functions) == 2:
            return _extremum(name, *functions)
        if name in PRIMITIVES and name != "pow" and len(functions) == PRIMITIVES[name].arity:
            return _rewrite(name, functions) or _build(name, functions)
        if name not in PRIMITIVES and len(functions) == 1:
            return ScalarFunction.named(name).compose(functions[0])
        raise ValueError(f"cannot apply {name!r} to {len(operands)} arguments as a scalar function")

    @staticmethod
    def named(name: str, **parameters: float | str | None) -> ScalarFunction:
        """An activation of torch by its name, e.g. ``named("leaky_relu", negative_slope=0.2)``."""
        if name in ACTIVATIONS:
            return ACTIVATIONS[name](**parameters)
        if name in PRIMITIVES and PRIMITIVES[name].arity == 1 and not parameters:
            return ScalarFunction.apply(name, ScalarFunction.variable())
        raise ValueError(
            f"no scalar function is named {name!r} with parameters {sorted(parameters)}; build it with "
            f"ScalarFunction.apply or ScalarFunction.piecewise. Known: {', '.join(sorted(ACTIVATIONS))}"
        )

    @staticmethod
    def piecewise(breaks: Sequence[float], pieces: Sequence[ScalarFunction | float]) -> ScalarFunction:
        """The function equal to ``pieces[i]`` on ``(breaks[i-1], breaks[i]]``; breaks at infinity are dropped."""
        functions = [_lift(piece) for piece in pieces]
        ordered = all(a < b for a, b in pairwise(breaks)) and not any(map(math.isnan, breaks))
        if len(functions) != len(breaks) + 1 or not ordered:
            raise ValueError(f"expected increasing breaks and one more piece, got {breaks}, {len(pieces)} pieces")
        ends = zip([-math.inf, *breaks], [*breaks, math.inf], functions, strict=True)
        used = tuple(piece for left, right, piece in ends if left < math.inf and right > -math.inf)
        finite = tuple(float(point) for point in breaks if math.isfinite(point))
        return ScalarFunction((Step("variable"), Step("piecewise", (0,), finite, used))) if finite else used[0]

    def compose(self, inner: ScalarFunction) -> ScalarFunction:
        """The function x -> self(inner(x))."""
        steps: dict[Step, int] = {}
        result = _include(steps, self, variable=_include(steps, inner))
        return _part(tuple(steps), result)

    def part(self, index: int) -> ScalarFunction:
        """The function that the step of that index computes."""
        return _part(self.steps, index)

    @cached_property
    def affine(self) -> tuple[Affine, ...]:
        """For each step slope and intercept, exactly, if it is known to be an affine function of x."""
        pairs: list[Affine] = []
        for step in self.steps:
            pairs.append(_affine(step, [pairs[index] for index in step.operands]))
        return tuple(pairs)

    @cached_property
    def _hash(self) -> int:
        return hash(self.steps)

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The values at the entries of a tensor, in its dtype; not a number where an argument is not."""
        values: list[torch.Tensor] = []
        for step in self.steps:
            arguments = [values[index] for index in step.operands]
            if step.op == "variable":
                value = x
            elif step.op == "constant":
                value = torch.as_tensor(step.parameters[0], dtype=x.dtype, device=x.device)
            elif step.op == "piecewise":
                value = step.pieces[0](arguments[0])
                for point, piece in zip(step.parameters, step.pieces[1:], strict=True):
                    value = torch.where(arguments[0] > point, piece(arguments[0]), value)
                value = torch.where(arguments[0].isnan(), arguments[0], value)
            else:
                value = PRIMITIVES[step.op].tensor(*arguments, *step.parameters)
            values.append(value)
        return values[-1].expand(x.shape)

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")

    def __neg__(self) -> ScalarFunction:
        return ScalarFunction.apply("neg", self)

    def __pow__(self, exponent: float) -> ScalarFunction:
        return ScalarFunction.apply("pow", self, exponent)


def _lift(operand: ScalarFunction | float) -> ScalarFunction:
    return operand if isinstance(operand, ScalarFunction) else ScalarFunction.constant(operand)


def _include(steps: dict[Step, int], function: ScalarFunction, variable: int | None = None) -> int:
    """Add the steps of a function, each one once; its variable may be an earlier step. Returns its index."""
    place: list[int] = []
    for step in function.steps:
        if step.op == "variable" and variable is not None:
            place.append(variable)
            continue
        moved = replace(step, operands=tuple(place[index] for index in step.operands))
        place.append(steps.setdefault(moved, len(steps)))
    return place[-1]


def _build(op: str, functions: Sequence[ScalarFunction], parameters: tuple[float, ...] = ()) -> ScalarFunction:
    steps: dict[Step, int] = {}
    operands = tuple(_include(steps, function) for function in functions)
    return _part((*steps, Step(op, operands, parameters)), len(steps))


def _part(steps: Sequence[Step], index: int) -> ScalarFunction:
    """The steps that the one of that index needs, in an order that only depends on what it computes."""
    place: dict[int, int] = {}
    kept: list[Step] = []
    waiting = [index]
    while waiting:
        step = steps[waiting[-1]]
        missing = [operand for operand in reversed(step.operands) if operand not in place]
        if missing:
            waiting += missing
            continue
        done = waiting.pop()
        if done not in place:
            place[done] = len(kept)
            kept.append(replace(step, operands=tuple(place[operand] for operand in step.operands)))
    return ScalarFunction(tuple(kept))


def _extremum(name: str, first: ScalarFunction, second: ScalarFunction) -> ScalarFunction:
    """max(f, c) is piecewise in f; max(f, g) = g + max(f - g, 0), and likewise for the minimum."""
    if first.steps[-1].op == "constant":
        first, second = second, first
    x, last = ScalarFunction.variable(), second.steps[-1]
    if last.op != "constant":
        return second + _extremum(name, first - second, ScalarFunction.constant(0.0))
    pieces = [second, x] if name == "maximum" else [x, second]
    return ScalarFunction.piecewise(last.parameters, pieces).compose(first)


def _rewrite(op: str, functions: list[ScalarFunction]) -> ScalarFunction | None:
    """1 * f = f, and forms without cancellation: 1 + tanh(v) = 2 sigmoid(2v) and 1 + erf(v) = erfc(-v).

    The latter, parts of the GELU, keep the decay at minus infinity, which the sum of two balls forgets.
    """
    ones = [function.steps[-1] == Step("constant", parameters=(1.0,)) for function in functions]
    if op not in ("add", "mul") or not any(ones):
        return None
    other = functions[0] if ones[1] else functions[1]
    last = other.steps[-1]
    if op == "mul":
        return other
    if last.op == "tanh":
        return 2.0 * ScalarFunction.apply("sigmoid", 2.0 * other.part(last.operands[0]))
    if last.op == "erf":
        return ScalarFunction.apply("erfc", -other.part(last.operands[0]))
    return None


def _affine(step: Step, operands: list[Affine]) -> Affine:
    """Slope and intercept of a step from those of its operands, in exact arithmetic."""
    if step.op == "variable":
        return Fraction(1), Fraction(0)
    if step.op == "constant":
        return Fraction(0), Fraction(step.parameters[0])
    (a, b), *rest = [pair or (None, None) for pair in operands]
    if a is None or b is None:
        return None
    if step.op == "neg":
        return -a, -b
    if not rest or rest[0][0] is None or rest[0][1] is None:
        return None
    c, d = rest[0]
    if step.op in ("add", "sub"):
        return (a + c, b + d) if step.op == "add" else (a - c, b - d)
    if step.op == "mul" and a * c == 0:
        return a * d + b * c, b * d
    if step.op == "div" and c == 0 and d != 0:
        return a / d, b / d
    return None
