r"""Chains of scalar operations on one tensor as one scalar function.

:math:`x\,\sigma(x)`, a polynomial, or tanh-GELU written out by hand are functions of one number applied to
every entry. Bounded operation by operation :math:`x\,\sigma(x)` would look like a product of two unrelated
tensors; as one scalar function its constants are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec
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
            if graph.spec(argument.name) != node.spec and not _same_shape(graph, argument, node):
                return None
            found = known.get(argument.name, _Expression(argument.name, ScalarFunction.variable()))
            roots.add(found.root)
            operands[key] = found.function
        else:
            operands[key] = argument
    if len(roots) != 1:
        return None
    function = build(operands)
    return None if function is None else _Expression(roots.pop(), function)


def _same_shape(graph: Graph, argument: Ref, node: Node) -> bool:
    spec = graph.spec(argument.name)
    return isinstance(spec, Spec) and isinstance(node.spec, Spec) and spec.shape == node.spec.shape


def _number(graph: Graph, argument: Ref) -> float | None:
    """A constant tensor with one entry, as a number."""
    value = graph.constants.get(argument.name) if argument.name in _constants(graph) else None
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device.type == "meta":
        return None
    return float(value)


def _constants(graph: Graph) -> set[str]:
    cached: Any = graph.__dict__.get("_constant_set")
    if cached is None:
        cached = {*graph.held, *graph.constant_names}
        graph.__dict__["_constant_set"] = cached
    return cached


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
        x = o.get("self", o.get("input"))
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
