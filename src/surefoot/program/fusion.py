"""Formulas that a model writes out, as what they are: soft-max, log-sum-exp, normalisation, activations.

Bounds of a soft-max that is an exponential over a sum know nothing of what cancels between the two. Each pattern
is an identity of real functions; it is looked for in what a node was computed from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from surefoot.program.builder import Builder
from surefoot.program.ir import Program
from surefoot.program.layers import unmasked
from surefoot.program.symbol import Symbol


def fuse(program: Program) -> Program:
    """The same program with recognised formulas in the place of what they are spelled out with."""
    builder = Builder(device=program.device)
    number: dict[int, int] = {}
    names = {k: name for name, k in program.inputs.items()}
    for node in program.nodes:
        builder.path, builder.dtype = node.path, node.dtype
        if node.index in names:
            name = names[node.index]
            number[node.index] = builder.input(name, node.shape, node.dtype, name in program.parameters)
        elif node.primitive.kind == "constant":
            number[node.index] = builder.constant(program.constants[node.index])
        else:
            k = builder.emit(node.primitive.name, *(number[i] for i in node.inputs), **node.options)
            number[node.index] = k if k in builder.constants else _recognised(Symbol(builder, k)).index
    return builder.finish([number[k] for k in program.outputs])


def _recognised(s: Symbol) -> Symbol:
    """A symbol, or another one that is equal to it."""
    name, options, operands = s.origin
    if name == "mul":
        for a, b in (operands, operands[::-1]):
            inner, factor = _scaled(a)
            if (better := _product(a, b)) is not None:
                return better
            if factor != 1 and (better := _product(inner, b)) is not None:
                return better.scale(factor)
    elif name == "scalar" and options["function"].order == 0:
        return _of_function(options["function"].name, operands[0]) or s
    elif name == "add" and len(operands) == 2:
        for a, b in (operands, operands[::-1]):
            if (better := _shifted_back(a, b)) is not None:
                return better
    return s


def _product(a: Symbol, b: Symbol) -> Symbol | None:
    """The product of two symbols, where it is a function that is recognised."""
    if a.index == b.index:
        return a.scalar("square")
    matches = (formula(a, b) for formula in (_softmax, _normalized, _gated, _cube, _one_sided))
    return next((better for better in matches if better is not None), None)


def _argument(s: Symbol, *names: str) -> Symbol | None:
    """The argument of one of these functions, if s is its value."""
    name, options, operands = s.origin
    plain = name == "scalar" and options["function"].order == 0 and options["function"].name in names
    return operands[0] if plain else None


def _scaled(s: Symbol) -> tuple[Symbol, float]:
    """What s is a multiple of, and the factor."""
    name, options, operands = s.origin
    return (operands[0], options["factor"]) if name == "scale" else (s, 1.0)


def _plus(s: Symbol, amount: float) -> Symbol | None:
    """What s is the sum of and a number."""
    name, _, operands = s.origin
    if name == "add" and len(operands) == 2:
        for a, b in (operands, operands[::-1]):
            if s.builder.is_all(b.index, amount):
                return a
    return None


def _spread(s: Symbol) -> Symbol:
    """What s repeats."""
    name, _, operands = s.origin
    return operands[0] if name == "expand" else s


def _terms(y: Symbol, dim: int) -> tuple[Symbol, Symbol | None]:
    """y = x + c with c the same all along a dimension,
    and then of size 1 there; c is None if there is no such term."""
    name, _, operands = y.origin
    if name == "add" and len(operands) == 2:
        for a, b in (operands, operands[::-1]):
            small = _spread(b)
            if small is not b and small.dim() == y.dim() and small.shape[dim] == 1 < y.shape[dim]:
                return a, small
    return y, None


def _softmax(e: Symbol, rest: Symbol) -> Symbol | None:
    """exp(y) / Σ exp(y), also where y = x − max(x): what is subtracted cancels."""
    y, total = _argument(e, "exp"), _argument(_spread(rest), "reciprocal")
    if y is None or total is None:
        return None
    name, options, operands = total.origin
    if name != "sum" or operands[0].index != e.index or len(options["dims"]) != 1 or not options["keepdim"]:
        return None
    dim = options["dims"][0]
    x, mask = unmasked(_terms(y, dim)[0])
    return x.emit("softmax", *([] if mask is None else [mask]), dim=dim)


def _log_sum_exp(total: Symbol) -> Symbol | None:
    """log Σ exp(y); with y = x + c, it is c + log Σ exp(x)."""
    name, options, operands = total.origin
    y = _argument(operands[0], "exp") if name == "sum" and len(options["dims"]) == 1 else None
    if y is None:
        return None
    dim = options["dims"][0]
    y, shift = _terms(y, dim)
    x, mask = unmasked(y)
    value = x.emit("logsumexp", *([] if mask is None else [mask]), dim=dim, keepdim=options["keepdim"])
    if shift is None:
        return value
    return value + shift.expand([1 if k == dim else n for k, n in enumerate(y.shape)]).reshape(total.shape)


def _shifted_back(s: Symbol, m: Symbol) -> Symbol | None:
    """(log Σ exp(x) − m) + m."""
    name, _, operands = s.origin
    if name != "add" or len(operands) != 2:
        return None
    for a, b in (operands, operands[::-1]):
        inner, factor = _scaled(_bare(b))
        if factor == -1 and _bare(inner).index == _bare(m).index and a.origin[0] == "logsumexp":
            return a
    return None


def _bare(s: Symbol) -> Symbol:
    """s without the dimensions of size 1 that were added or removed."""
    name, _, operands = s.origin
    same = name == "reshape" and [n for n in s.shape if n != 1] == [n for n in operands[0].shape if n != 1]
    return _bare(operands[0]) if same else s


def _centred(c: Symbol) -> tuple[Symbol, tuple[int, ...]] | None:
    """x and the dimensions, where c = x − mean(x)."""
    name, _, operands = c.origin
    if name != "add" or len(operands) != 2:
        return None
    for x, b in (operands, operands[::-1]):
        total, factor = _scaled(_spread(b))
        kind, options, inner = total.origin
        if kind == "sum" and options["keepdim"] and inner[0].index == x.index:
            count = math.prod(x.shape[d] for d in options["dims"])
            if math.isclose(factor, -1 / count, rel_tol=1e-15):
                return x, options["dims"]
    return None


def _normalized(c: Symbol, rest: Symbol) -> Symbol | None:
    """(x − mean(x)) / √(mean((x − mean(x))²) + ε)."""
    centre = _centred(c)
    if centre is None:
        return None
    r = _spread(rest)
    root = _argument(r, "reciprocal")
    variance = _argument(r, "rsqrt") or (None if root is None else _argument(root, "sqrt"))
    if variance is None:
        return None
    (x, dims), eps, (name, _, operands) = centre, 0.0, variance.origin
    if name == "add" and len(operands) == 2:
        for a, b in (operands, operands[::-1]):
            if b.is_constant and b.builder.is_uniform(b.index):
                variance, eps = a, float(b.builder.constants[b.index].reshape(-1)[0])
    total, factor = _scaled(variance)
    name, options, operands = total.origin
    count = math.prod(x.shape[d] for d in dims)
    if name != "sum" or options["dims"] != dims or not math.isclose(factor, 1 / count, rel_tol=1e-15):
        return None
    square = _argument(operands[0], "square")
    if square is None or square.index != c.index:
        return None
    return x.emit("normalize", dims=dims, eps=eps)


def _gated(x: Symbol, gate: Symbol) -> Symbol | None:
    """x times a function of x that is an activation: x σ(x), x (1 + erf(x/√2)), x tanh(softplus(x)), …"""
    for name, argument in _gates(gate):
        if argument.index == x.index:
            return argument.scalar(name).scale(1.0 if name in ("silu", "mish", "relu") else 2.0)
    return None


def _gates(gate: Symbol) -> Iterator[tuple[str, Symbol]]:
    """The activations that are their argument times this, or half of that, and the argument."""
    if (x := _argument(gate, "sigmoid")) is not None:
        yield "silu", x
    if (softplus := _argument(gate, "tanh")) is not None and (x := _argument(softplus, "softplus")) is not None:
        yield "mish", x
    name, options, operands = gate.origin
    if name == "scalar" and (options["function"].name, options["function"].order) == ("relu", 1):
        yield "relu", operands[0]
    one = _plus(gate, 1.0)
    if one is None:
        return
    if (inner := _argument(one, "erf")) is not None:
        x, factor = _scaled(inner)
        if math.isclose(factor, math.sqrt(0.5), rel_tol=1e-12):
            yield "gelu", x
    if (inner := _argument(one, "tanh")) is not None:
        polynomial, factor = _scaled(inner)
        name, _, operands = polynomial.origin
        if name == "add" and len(operands) == 2 and math.isclose(factor, math.sqrt(2 / math.pi), rel_tol=1e-12):
            for x, b in (operands, operands[::-1]):
                cube, part = _scaled(b)
                if math.isclose(part, 0.044715, rel_tol=1e-12) and _is_cube(cube, x):
                    yield "gelu_tanh", x


def _is_cube(s: Symbol, x: Symbol) -> bool:
    name, options, operands = s.origin
    return name == "scalar" and str(options["function"]) == "power(3)" and operands[0].index == x.index


def _cube(square: Symbol, x: Symbol) -> Symbol | None:
    """x² x."""
    inner = _argument(square, "square")
    return x.scalar("power", 3) if inner is not None and inner.index == x.index else None


def _one_sided(x: Symbol, rest: Symbol) -> Symbol | None:
    """x where x ≤ 0 and 0 elsewhere: −relu(−x)."""
    below = _plus(rest, 1.0)
    step, sign = (rest, 0.0) if below is None else _scaled(below)
    name, options, operands = step.origin
    plain = name == "scalar" and (options["function"].name, options["function"].order) == ("relu", 1)
    return -(-x).scalar("relu") if sign == -1 and plain and operands[0].index == x.index else None


def _of_function(name: str, y: Symbol) -> Symbol | None:
    """Functions of what another function returns."""
    if name == "log":
        kind, options, operands = y.origin
        if kind == "softmax" and len(operands) == 1:
            return operands[0] - operands[0].emit("logsumexp", dim=options["dim"], keepdim=True)
        one = _plus(y, 1.0)
        if one is not None and (x := _argument(one, "exp")) is not None:
            return x.scalar("softplus", 1.0)
        return _log_sum_exp(y)
    if name == "log1p" and (x := _argument(y, "exp")) is not None:
        return x.scalar("softplus", 1.0)
    if name == "reciprocal":
        one = _plus(y, 1.0)
        if one is not None and (minus := _argument(one, "exp")) is not None:
            return (-minus).scalar("sigmoid")
    return None


__all__ = ["fuse"]
