r"""Chains of scalar operations on one tensor as one scalar function.

:math:`x\,\sigma(x)`, a polynomial, or tanh-GELU written out by hand are functions of one number applied to
every entry. Bounded operation by operation :math:`x\,\sigma(x)` would look like a product of two unrelated
tensors; as one scalar function its constants are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Role, Spec
from surefoot.scalar import ScalarFunction

OPERATION = "surefoot.scalar"


@dataclass(frozen=True)
class _Expression:
    """A tensor as a scalar function of the entries of another."""

    root: str
    function: ScalarFunction


def scalar(x: Tensor, function: ScalarFunction) -> Tensor:
    """A scalar function on every entry."""
    return function(x)


def fuse(graph: Graph) -> Graph:
    """Every node that is a scalar function of one tensor, and not affine, becomes one node."""
    known: dict[str, _Expression] = {}
    nodes = []
    for node in graph.nodes:
        expression = _expression(graph, node, known)
        if expression is None:
            nodes.append(node)
            continue
        known[node.name] = expression
        if expression.function.affine[-1] is not None:
            nodes.append(node)
        else:
            args = (Ref(expression.root), expression.function)
            nodes.append(replace(node, op=OPERATION, target=scalar, args=args, kwargs={}))
    return replace(graph, nodes=tuple(nodes))


def _expression(graph: Graph, node: Node, known: dict[str, _Expression]) -> _Expression | None:
    build = _BUILDERS.get(node.op.removeprefix("aten."))
    if build is None or not isinstance(node.spec, Spec) or not node.spec.dtype.is_floating_point:
        return None
    operands: dict[str, Any] = {}
    roots: set[str] = set()
    for key, argument in node.arguments.items():
        if isinstance(argument, Ref):
            number = _number(graph, argument)
            if number is not None:
                operands[key] = number
                continue
            if not _same_shape(graph, argument, node):
                return None
            found = known.get(argument.name, _Expression(argument.name, ScalarFunction.variable()))
            roots.add(found.root)
            operands[key] = found.function
        else:
            operands[key] = argument
    if len(roots) != 1:
        return None
    infinite = {key for key, value in operands.items() if isinstance(value, float) and not math.isfinite(value)}
    if infinite - {"min", "max"}:  # an infinite limit limits nothing
        return None
    function = build(operands)
    return None if function is None else _Expression(roots.pop(), function)


def _same_shape(graph: Graph, argument: Ref, node: Node) -> bool:
    """Whether a tensor of real numbers meets the result entry by entry; whole numbers are not functions of x."""
    spec = graph.spec(argument.name)
    if not isinstance(spec, Spec) or not isinstance(node.spec, Spec) or not spec.dtype.is_floating_point:
        return False
    return spec.shape == node.spec.shape


def _number(graph: Graph, argument: Ref) -> float | None:
    """A constant tensor with one entry, as a number.

    A number that was computed from others counts if its value does not depend on the precision: otherwise it is a
    rounded one, and not the number that the model defines.
    """
    if argument.name in graph.held:
        return _finite(graph.held[argument.name])
    spec = graph.spec(argument.name)
    if graph.roles[argument.name] != Role.CONSTANT or not isinstance(spec, Spec) or spec.numel != 1:
        return None
    computed, precise = _finite(graph.constants[argument.name]), _finite(_in_double(graph)[argument.name])
    return computed if computed == precise else None


def _finite(value: Any) -> float | None:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type == "meta":
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _in_double(graph: Graph) -> dict[str, Any]:
    """The constants computed in double precision; computed once per graph."""
    cached: Any = graph.__dict__.get("_in_double")
    if cached is None:
        cached = {n: v.double() if v.is_floating_point() else v for n, v in graph.held.items()}
        for node in graph.nodes:
            if node.name in graph.constant_names:
                args = tuple(_widened(a) for a in node.args)
                wide = replace(node, args=args, kwargs={key: _widened(a) for key, a in node.kwargs.items()})
                cached[node.name] = wide.run(cached)
        graph.__dict__["_in_double"] = cached
    return cached


def _widened(argument: Any) -> Any:
    return torch.float64 if argument in (torch.float32, torch.float16, torch.bfloat16) else argument


_Builder = Callable[[dict[str, Any]], "ScalarFunction | None"]


def _sum(sign: float, reverse: bool = False) -> _Builder:
    def build(o: dict[str, Any]) -> ScalarFunction | None:
        alpha = o.get("alpha")
        first, second = (o["other"], o["self"]) if reverse else (o["self"], o["other"])
        scaled = second if alpha in (None, 1) else second * float(alpha)
        if not isinstance(first, ScalarFunction) and not isinstance(scaled, ScalarFunction):
            return None
        return first + scaled if sign > 0 else first - scaled

    return build


def _product(o: dict[str, Any]) -> ScalarFunction | None:
    return o["self"] * o["other"]


def _quotient(o: dict[str, Any]) -> ScalarFunction | None:
    return None if o.get("rounding_mode") is not None else o["self"] / o["other"]


def _power(o: dict[str, Any]) -> ScalarFunction | None:
    base, exponent = o["self"], o["exponent"]
    if isinstance(base, ScalarFunction) and isinstance(exponent, int | float):
        return base ** float(exponent)
    return None


def _named(name: str, *keys: str) -> _Builder:
    """An activation with the parameters that the operation's signature names alike."""

    def build(o: dict[str, Any]) -> ScalarFunction | None:
        x: Any = o.get("self", o.get("input"))
        parameters = {key: o[key] for key in keys if o.get(key) is not None}
        if any(isinstance(value, ScalarFunction) for value in parameters.values()):
            return None
        return ScalarFunction.named(name, **parameters).compose(x)

    return build


def _clamp(o: dict[str, Any]) -> ScalarFunction | None:
    limits = {key: o.get(key) for key in ("min", "max")}
    if any(isinstance(value, ScalarFunction) for value in limits.values()):
        return None
    return ScalarFunction.named("clamp", **limits).compose(o["self"])


def _rrelu(o: dict[str, Any]) -> ScalarFunction | None:
    """Randomised slopes as they are evaluated, with their mean; while training they are refused before."""
    mean = (float(o["lower"]) + float(o["upper"])) / 2
    return ScalarFunction.named("leaky_relu", negative_slope=mean).compose(o["self"])


def _extreme(name: str) -> _Builder:
    return lambda o: ScalarFunction.apply(name, o["self"], o["other"])


_BUILDERS: dict[str, _Builder] = {
    "add": _sum(1.0),
    "sub": _sum(-1.0),
    "rsub": _sum(-1.0, reverse=True),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"),
    "leaky_relu": _named("leaky_relu", "negative_slope"),
    "elu": _named("elu", "alpha", "scale", "input_scale"),
    "celu": _named("celu", "alpha"),
    "gelu": _named("gelu", "approximate"),
    "softplus": _named("softplus", "beta", "threshold"),
    "hardtanh": _named("hardtanh", "min_val", "max_val"),
    "threshold": _named("threshold", "threshold", "value"),
    "rrelu": _rrelu,
    "softshrink": _named("softshrink", "lambd"),
    "hardshrink": _named("hardshrink", "lambd"),
    **{
        name: _named(name)
        for name in [
            "relu",
            "relu6",
            "selu",
            "silu",
            "mish",
            "sigmoid",
            "log_sigmoid",
            "tanh",
            "hardswish",
            "hardsigmoid",
            "sin",
            "cos",
            "tan",
            "atan",
            "sinh",
            "cosh",
            "asinh",
            "exp",
            "expm1",
            "log",
            "log1p",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "square",
            "abs",
            "sign",
            "erf",
            "erfc",
            "neg",
        ]
    },
}
