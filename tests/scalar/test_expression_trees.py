"""Random expressions of scalar functions against a judge that evaluates them with 300 bits.

The judge is written for this file: the same trees as functions of exact numbers, or of power series at exact
points. Values, derivatives and difference quotients at many points, breaks and their neighbours included, must be
within what the library states for intervals that contain the points.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from flint import arb, arb_series, ctx

from surefoot.scalar import ScalarFunction, bounds, range_on, sup_on, supremum, value_range

Judge = Callable[[Any], Any]
BITS = 300
CONSTANTS = [-3.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 1.5, 2.0]
x = ScalarFunction.variable()
apply, named = ScalarFunction.apply, ScalarFunction.named


class Undecided(Exception):
    """The judge does not know on which side of a break a number is."""


@dataclass(frozen=True)
class Tree:
    """An expression twice: as the library has it, and as the judge evaluates it."""

    function: ScalarFunction
    judge: Judge
    text: str


def choose(point: float, lower: Judge, upper: Judge) -> Judge:
    """``lower`` up to a point, ``upper`` above it."""

    def decide(v: Any) -> Any:
        value = v[0] if isinstance(v, arb_series) else v
        if not value.is_finite():
            return value * v
        if value > arb(point):
            return upper(v)
        if value <= arb(point):
            return lower(v)
        raise Undecided

    return decide


def constant(value: float) -> Judge:
    return lambda v: v * 0 + value


def sigmoid(v: Any) -> Any:
    return 1 / (1 + (-v).exp())


def softplus(v: Any) -> Any:
    return (1 + v.exp()).log()


def tanh(v: Any) -> Any:
    return 2 * sigmoid(2 * v) - 1


def odd(upper: Judge, point: float) -> Judge:
    """The odd function that is ``upper`` above a point >= 0 and 0 between."""
    return choose(point, lambda v: -choose(point, constant(0.0), upper)(-v), upper)


def power(exponent: float) -> Judge:
    if exponent.is_integer():
        return lambda v: v ** int(exponent) if exponent > 0 else 1 / v ** int(-exponent)
    return lambda v: v ** arb(exponent)


UNARY: dict[str, tuple[ScalarFunction, Judge]] = {
    **{
        name: (named(name), judge)
        for name, judge in {
            "exp": lambda v: v.exp(),
            "expm1": lambda v: v.exp() - 1,
            "log": lambda v: v.log(),
            "log1p": lambda v: (1 + v).log(),
            "sqrt": lambda v: v.sqrt(),
            "rsqrt": lambda v: 1 / v.sqrt(),
            "reciprocal": lambda v: 1 / v,
            "sin": lambda v: v.sin(),
            "cos": lambda v: v.cos(),
            "tan": lambda v: v.sin() / v.cos(),
            "sinh": lambda v: (v.exp() - (-v).exp()) / 2,
            "cosh": lambda v: (v.exp() + (-v).exp()) / 2,
            "atan": lambda v: v.atan(),
            "asinh": lambda v: (v + (1 + v * v).sqrt()).log(),
            "erf": lambda v: v.erf(),
            "erfc": lambda v: v.erfc(),
            "sigmoid": sigmoid,
            "tanh": tanh,
            "softplus": softplus,
            "silu": lambda v: v * sigmoid(v),
            "mish": lambda v: v * tanh(softplus(v)),
            "gelu": lambda v: v * (-v / arb(2).sqrt()).erfc() / 2,
            "log_sigmoid": lambda v: -softplus(-v),
            "tanhshrink": lambda v: v - tanh(v),
            "square": lambda v: v * v,
            "relu": choose(0.0, constant(0.0), lambda v: v),
            "abs": choose(0.0, lambda v: -v, lambda v: v),
            "sign": odd(constant(1.0), 0.0),
            "softsign": choose(0.0, lambda v: v / (1 - v), lambda v: v / (1 + v)),
            "elu": choose(0.0, lambda v: v.exp() - 1, lambda v: v),
            "relu6": choose(0.0, constant(0.0), choose(6.0, lambda v: v, constant(6.0))),
            "hardtanh": choose(-1.0, constant(-1.0), choose(1.0, lambda v: v, constant(1.0))),
        }.items()
    },
    "leaky": (named("leaky_relu", negative_slope=-1.5), choose(0.0, lambda v: -1.5 * v, lambda v: v)),
    "celu": (named("celu", alpha=0.75), choose(0.0, lambda v: 0.75 * ((v / 0.75).exp() - 1), lambda v: v)),
    "celu-": (named("celu", alpha=-1.0), choose(0.0, lambda v: 1 - (-v).exp(), lambda v: v)),
    "elu-": (
        named("elu", alpha=-2.0, scale=0.5, input_scale=1.5),
        choose(0.0, lambda v: 1 - (1.5 * v).exp(), lambda v: v / 2),
    ),
    "softplus-jump": (
        named("softplus", beta=2.0, threshold=0.5),
        choose(0.25, lambda v: softplus(2 * v) / 2, lambda v: v),
    ),
    "softplus-mirrored": (
        named("softplus", beta=-1.0, threshold=1.0),
        lambda v: -choose(1.0, softplus, lambda w: w)(-v),
    ),
    "hardshrink": (named("hardshrink", lambd=0.5), odd(lambda v: v, 0.5)),
    "hardshrink-": (named("hardshrink", lambd=-0.5), lambda v: v),
    "softshrink": (
        named("softshrink", lambd=0.5),
        odd(lambda v: v - 0.5, 0.5),
    ),
    "threshold": (named("threshold", threshold=0.25, value=0.25), choose(0.25, constant(0.25), lambda v: v)),
    "threshold-jump": (named("threshold", threshold=0.25, value=1.0), choose(0.25, constant(1.0), lambda v: v)),
    "clamp": (named("clamp", min=1.0, max=-1.0), constant(-1.0)),
    **{f"pow{e}": (x**e, power(e)) for e in (-2.0, -1.0, -0.5, 0.5, 1.5, 2.0, 2.5, 3.0)},
}


def tree(source: random.Random, depth: int) -> Tree:
    """A random expression; leaves are the variable or an affine function of it with dyadic coefficients."""
    if depth == 0:
        if source.random() < 0.4:
            return Tree(x, lambda v: v, "x")
        a, b = source.choice(CONSTANTS), source.choice([0.0, *CONSTANTS])
        return Tree(a * x + b, lambda v: a * v + b, f"({a}x + {b})")
    if source.random() < 0.6:
        name = source.choice(list(UNARY))
        (outer, judge), inner = UNARY[name], tree(source, depth - 1)
        return Tree(outer.compose(inner.function), lambda v: judge(inner.judge(v)), f"{name}({inner.text})")
    f, g = tree(source, depth - 1), tree(source, source.randrange(depth))
    name = source.choice(["add", "sub", "mul", "div", "maximum", "minimum"])
    judges: dict[str, Judge] = {
        "add": lambda v: f.judge(v) + g.judge(v),
        "sub": lambda v: f.judge(v) - g.judge(v),
        "mul": lambda v: f.judge(v) * g.judge(v),
        "div": lambda v: f.judge(v) / g.judge(v),
        "maximum": lambda v: g.judge(v) + choose(0.0, constant(0.0), lambda w: w)(f.judge(v) - g.judge(v)),
        "minimum": lambda v: g.judge(v) + choose(0.0, lambda w: w, constant(0.0))(f.judge(v) - g.judge(v)),
    }
    return Tree(apply(name, f.function, g.function), judges[name], f"{name}({f.text}, {g.text})")


def interval(source: random.Random) -> tuple[float, float]:
    """Dyadic ends that are often breaks; sometimes a point, sometimes a half line."""
    low, width = source.randrange(-16, 17) / 4, source.choice([0.0, 0.25, 1.0, 2.0, 8.0])
    kind = source.random()
    return (low, math.inf) if kind < 0.1 else (-math.inf, low) if kind < 0.2 else (low, low + width)


def sample(source: random.Random, low: float, high: float) -> list[arb]:
    """Points of the interval: quarters, which breaks are likely to be, neighbours of some, and random ones."""
    start, end = (
        (low, high) if math.isfinite(high - low) else (low, low + 64) if high == math.inf else (high - 64, high)
    )
    quarters = [n / 4 for n in range(math.ceil(4 * start), math.floor(4 * end) + 1)]
    centres = [*source.sample(quarters, min(10, len(quarters))), start, end]
    centres += [source.randrange(2**20) / 2**20 * (end - start) + start for _ in range(6)]
    if end - start == 64.0:
        centres += [math.copysign(2.0**n, end if high == math.inf else -1.0) for n in (8, 15, 40)]
    near = [
        arb(c) + side * arb(2) ** -n for c in centres for side in (1, -1) for n in (100, source.randrange(4, 60))
    ]
    inside = [p for p in [*map(arb, centres), *near] if arb(low) <= p and p <= arb(high)]
    return sorted(inside, key=lambda p: (float(p), p - float(p) > 0, p - float(p)))


def facts(judge: Judge, point: arb) -> tuple[arb, list[arb]] | None:
    """The value at a point (not finite where the function is not defined) and the first three derivatives."""
    try:
        value = judge(point)
        series = judge(arb_series([point, 1], prec=4))
    except (Undecided, ZeroDivisionError, ValueError):
        return None
    derivatives = [series[k] * math.factorial(k) for k in range(4)]
    return value, derivatives


def check(seed: int, table: bool) -> None:
    source = random.Random(seed)
    expression, (low, high) = tree(source, source.randrange(1, 4)), interval(source)
    f, where = expression.function, f"{expression.text} on [{low}, {high}], seed {seed}"
    ends = torch.tensor([low]).double(), torch.tensor([high]).double()
    claims = [(value_range(f, low, high), [supremum(f, order, low, high) for order in range(4)])]
    if table:
        least, most = range_on(f, *ends)
        claims.append(((float(least), float(most)), [float(sup_on(f, order, *ends)) for order in range(4)]))
    with ctx.workprec(BITS):
        points = [(p, facts(expression.judge, p)) for p in sample(source, low, high)]
        for (least, most), suprema in claims:
            tops = [arb(s) for s in suprema]
            for p, fact in points:
                if fact is None:
                    continue
                value, derivatives = fact
                if not value.is_finite():
                    undefined = value.is_nan() or value.abs_lower() == math.inf
                    assert not undefined or math.inf in (most, -least, suprema[0]), f"undefined at {p}: {where}"
                    continue
                assert not value < arb(least), f"value {value} at {p}: {where}"
                assert not value > arb(most), f"value {value} at {p}: {where}"
                for order, (d, top) in enumerate(zip(derivatives, tops, strict=True)):
                    assert not abs(d) > top, f"order {order}, {d} at {p}: {where}"
            defined = [(p, d) for p, d in points if d is not None and d[0].is_finite()]
            for (p, (v, d)), (q, (w, e)) in pairwise(defined):
                if q > p:
                    assert not abs(w - v) > tops[1] * (q - p), f"Lipschitz from {p} to {q}: {where}"
                    for order in (1, 2):
                        assert not abs(e[order] - d[order]) > tops[order + 1] * (q - p), f"{order} at {p}: {where}"


@pytest.fixture(autouse=True)
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are true however early branch and bound stops; to stop early is faster."""
    monkeypatch.setattr(bounds, "MAXIMUM_CELLS", 40)


@pytest.mark.parametrize("block", [*range(8), *(pytest.param(k, marks=pytest.mark.slow) for k in range(8, 20))])
def test_random_expressions(block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        check(seed, table=seed % 25 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_many_random_expressions(block: int) -> None:
    for seed in range(1000 + 50 * block, 1000 + 50 * (block + 1)):
        check(seed, table=seed % 5 == 0)
