"""Operations of ATen in terms of primitives: arithmetic, functions of entries, conditions, choices and products.

A rule is called like the operation. Tensors that vary are symbols; those that do not are plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import UnsupportedOperation
from surefoot.program.symbol import Symbol

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""The rules, by the names of operations without overloads."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Declare a function as the rule of operations."""

    def declared(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return declared


def symbol_of(*operands: Any) -> Symbol:
    """The first symbol among operands."""
    return next(item for item in operands if isinstance(item, Symbol))


# Arithmetic.


@rule("add")
def _add(a: Any, b: Any, alpha: float = 1, **_: Any) -> Symbol:
    some = symbol_of(a, b)
    return some.lift(a) + (b if alpha == 1 else some.lift(b) * alpha)


@rule("mul", "multiply", "logical_and", "bitwise_and", "__and__")
def _mul(a: Any, b: Any) -> Symbol:
    return symbol_of(a, b).lift(a) * b if isinstance(a, Tensor | Symbol) else b * a


@rule("div", "divide", "true_divide")
def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode is not None:
        raise UnsupportedOperation(f"division rounded ({rounding_mode}) has no derivative")
    return symbol_of(a, b).lift(a) / b


@rule("lerp")
def _lerp(a: Any, b: Any, weight: Any) -> Symbol:
    start = symbol_of(a, b, weight).lift(a)
    return start + (start.lift(b) - start) * weight


@rule("pow")
def _pow(x: Any, exponent: Any) -> Symbol:
    if isinstance(exponent, Symbol):  # a^x = exp(x log a)
        return (exponent * exponent.lift(x).scalar("log")).scalar("exp")
    if isinstance(exponent, Tensor):
        if exponent.numel() != 1:
            raise UnsupportedOperation("a power with different exponents for different entries")
        exponent = exponent.item()
    named = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in (0, 1):
        return x if exponent else x.scale(0.0) + 1.0
    return x.scalar(named[exponent]) if exponent in named else x.scalar("power", exponent)


RULES |= {
    "sub": lambda a, b, alpha=1, **_: _add(a, b, -alpha),
    "subtract": lambda a, b, alpha=1: _add(a, b, -alpha),
    "rsub": lambda a, b, alpha=1: _add(b, a, -alpha),
    "addcmul": lambda a, b, c, value=1: _add(a, symbol_of(a, b, c).lift(b) * c, value),
    "addcdiv": lambda a, b, c, value=1: _add(a, symbol_of(a, b, c).lift(b) / c, value),
    "neg": lambda x: -x,
}


# Functions of each entry.


def _function(name: str) -> Rule:
    return lambda x: x.scalar(name)


_PLAIN = (
    "exp log sqrt rsqrt reciprocal tanh sigmoid erf sin cos sinh cosh atan log1p expm1 abs square relu relu6 "
    "hardswish hardsigmoid softsign silu mish selu"
)
RULES |= {name: _function(name) for name in _PLAIN.split()}
RULES |= {
    "asinh": _function("arcsinh"),
    "arcsinh": _function("arcsinh"),
    "arctan": _function("atan"),
    "sign": lambda x: x.scalar("abs", order=1),
    "sgn": lambda x: x.scalar("abs", order=1),
    "tan": lambda x: x.scalar("sin") * x.scalar("cos").scalar("reciprocal"),
    "erfc": lambda x: 1.0 - x.scalar("erf"),
    "exp2": lambda x: x.scale(math.log(2)).scalar("exp"),
    "log2": lambda x: x.scalar("log").scale(1 / math.log(2)),
    "log10": lambda x: x.scalar("log").scale(1 / math.log(10)),
    "atanh": lambda x: (x.scalar("log1p") - (-x).scalar("log1p")).scale(0.5),
    "gelu": lambda x, approximate="none": x.scalar(_gelu(approximate)),
    "leaky_relu": lambda x, slope=0.01: x.scalar("leaky_relu", slope),
    "rrelu_with_noise": lambda x, noise, low=1 / 8, high=1 / 3, *_: x.scalar("leaky_relu", (low + high) / 2),
    "rrelu_with_noise_functional": lambda x, noise, low, high, *_: x.scalar("leaky_relu", (low + high) / 2),
    "celu": lambda x, alpha=1: x.scalar("celu", alpha),
    "log_sigmoid_forward": lambda x: (x.scalar("logsigmoid"), None),
    "clamp_min": lambda x, low: _clamp(x, low),
    "clamp_max": lambda x, high: _clamp(x, None, high),
}


def _gelu(approximate: str) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


@rule("logit")
def _logit(x: Symbol, eps: float | None = None) -> Symbol:
    x = x if eps is None else x.scalar("hardtanh", eps, 1 - eps)
    return x.scalar("log") - (-x).scalar("log1p")


@rule("softplus")
def _softplus(x: Symbol, beta: float = 1, threshold: float = 20) -> Symbol:
    if threshold < 20:
        what = f"soft-plus with threshold {threshold:g} jumps where it becomes the identity"
        raise UnsupportedOperation(f"{what}: use a threshold of 20 or more")
    return x.scalar("softplus", beta)


@rule("elu")
def _elu(x: Symbol, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Symbol:
    if input_scale != 1:  # celu: α (exp(x/α) − 1)
        return x.scalar("celu", alpha)
    if scale != 1 and math.isclose(scale, 1.0507009873554805) and math.isclose(alpha, 1.6732632423543772):
        return x.scalar("selu")
    return x.scalar("elu", alpha).scale(scale)


@rule("hardtanh")
def _hardtanh(x: Symbol, low: float = -1, high: float = 1) -> Symbol:
    return x.scalar("relu6") if (low, high) == (0, 6) else x.scalar("hardtanh", low, high)


@rule("_prelu_kernel", "prelu")
def _prelu(x: Any, weight: Any) -> Symbol:
    """relu(x) − w relu(−x)."""
    x = symbol_of(x, weight).lift(x)
    return x.scalar("relu") - (-x).scalar("relu") * weight


@rule("clamp", "clip")
def _clamp(x: Any, low: Any = None, high: Any = None) -> Symbol:
    x = symbol_of(x, low, high).lift(x)
    if all(isinstance(bound, int | float) for bound in (low, high)):
        return x.scalar("hardtanh", low, high)
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


@rule("threshold")
def _threshold(x: Symbol, threshold: float, value: float) -> Symbol:
    """x above the threshold, a value elsewhere."""
    if threshold == value:
        return (x - threshold).scalar("relu") + threshold
    above = (x - threshold).step()
    return x * above + (1.0 - above) * value


# Their derivatives, where a model takes derivatives itself.


def _slope(name: str) -> Callable[..., Symbol]:
    """The derivative of a function of these parameters at x, times g."""
    return lambda g, x, *parameters: symbol_of(g, x).lift(x).scalar(name, *parameters, order=1) * g


def _slope_by_value(name: str, formula: Callable[[Symbol], Symbol]) -> Rule:
    """The derivative of a function from its value y, and not by the formula where what y is of is known."""

    def computed(g: Any, y: Any) -> Symbol:
        y = symbol_of(g, y).lift(y)
        primitive, options, operands = y.origin
        if primitive == "scalar" and (options["function"].name, options["function"].order) == (name, 0):
            return operands[0].scalar(name, order=1) * g
        return formula(y) * g

    return computed


RULES |= {f"{name}_backward": _slope(name) for name in ("silu", "mish", "hardswish", "hardsigmoid")}
RULES |= {
    "tanh_backward": _slope_by_value("tanh", lambda y: 1.0 - y.scalar("square")),
    "sigmoid_backward": _slope_by_value("sigmoid", lambda y: y * (1.0 - y)),
    "log_sigmoid_backward": lambda g, x, buffer: _slope("logsigmoid")(g, x),
    "gelu_backward": lambda g, x, approximate="none": _slope(_gelu(approximate))(g, x),
    "softplus_backward": lambda g, x, beta, threshold: _slope("softplus")(g, x, beta),
    "leaky_relu_backward": lambda g, x, slope, is_result: _slope("leaky_relu")(g, x, slope),
    "hardtanh_backward": _slope("hardtanh"),
}


@rule("threshold_backward")
def _threshold_backward(g: Any, x: Any, threshold: float) -> Symbol:
    """relu and its result are positive at the same places."""
    x = symbol_of(g, x).lift(x)
    primitive, options, operands = x.origin
    if threshold == 0 and primitive == "scalar" and options["function"].name == "relu":
        x = operands[0]
    return (x - threshold).step() * g


@rule("elu_backward")
def _elu_backward(g: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: Any) -> Symbol:
    if is_result:
        raise UnsupportedOperation("the derivative of an ELU that is computed in place")
    if input_scale != 1:
        return _slope("celu")(g, x, alpha)
    return _slope("elu")(g, x, alpha).scale(scale)


# Conditions: 1 where they hold, 0 elsewhere.


RULES |= {
    "gt": lambda a, b: (symbol_of(a, b).lift(a) - b).step(),
    "lt": lambda a, b: (symbol_of(a, b).lift(b) - a).step(),
    "ge": lambda a, b: 1.0 - RULES["lt"](a, b),
    "le": lambda a, b: 1.0 - RULES["gt"](a, b),
    "logical_or": lambda a, b: _add(a, b) - _mul(a, b),
    "bitwise_or": lambda a, b: _add(a, b) - _mul(a, b),
    "logical_not": lambda a: 1.0 - a,
    "bitwise_not": lambda a: 1.0 - a,
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
}


@rule("where")
def _where(condition: Any, a: Any, b: Any) -> Symbol:
    """condition·a + (1 − condition)·b; entries of fixed tensors that are not chosen may be infinite."""
    some = symbol_of(condition, a, b)
    if isinstance(condition, Symbol):
        return some.lift(a) * condition + some.lift(b) * (1.0 - condition)
    shape = torch.broadcast_shapes(*(i.shape for i in (condition, a, b) if isinstance(i, Tensor | Symbol)))
    chosen, parts = condition.expand(shape), []
    for item, mask in ((a, chosen), (b, ~chosen)):
        if isinstance(item, Symbol):
            parts.append(item.expand(shape) * mask)
        else:
            value = torch.as_tensor(item, dtype=torch.float64, device=mask.device).expand(shape)
            parts.append(some.lift(torch.where(mask, value, 0.0)))
    return parts[0] + parts[1]


# The larger of two, and the largest.


@rule("maximum", "fmax")
def _maximum(a: Any, b: Any) -> Symbol:
    left, right = symbol_of(a, b).lift(a).together(b)
    if right.is_constant and right.builder.is_all(right.index, 0.0):
        return left.scalar("relu")
    return left.emit("maximum", right)


@rule("minimum", "fmin")
def _minimum(a: Any, b: Any) -> Symbol:
    some = symbol_of(a, b)
    return -_maximum(-some.lift(a), -some.lift(b))


@rule("amax")
def _amax(x: Symbol, dims: Any = (), keepdim: bool = False) -> Symbol:
    return x.emit("amax", dims=x.dims(dims), keepdim=keepdim)


@rule("amin")
def _amin(x: Symbol, dims: Any = (), keepdim: bool = False) -> Symbol:
    return -_amax(-x, dims, keepdim)


def _extreme(of_two: Rule, along: Rule) -> Rule:
    """``max`` and ``min``: of two tensors, along a dimension with the positions, or of all."""

    def computed(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Tensor | Symbol):
            return of_two(x, dim)
        return along(x) if dim is None else (along(x, dim, keepdim), None)

    return computed


RULES |= {"max": _extreme(_maximum, _amax), "min": _extreme(_minimum, _amin)}


@rule("sort")
def _sort(x: Symbol, *arguments: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    dims = [item for item in arguments if not isinstance(item, bool | None)]
    order = descending or any(item is True for item in arguments)
    return x.emit("sort", dim=(dims[0] if dims else dim) % x.dim(), descending=order), None


@rule("topk")
def _topk(x: Symbol, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> tuple[Symbol, None]:
    dim = dim % x.dim()
    return x.emit("sort", dim=dim, descending=largest).part(dim, 0, k), None


@rule("kthvalue")
def _kthvalue(x: Symbol, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Symbol, None]:
    dim = dim % x.dim()
    chosen = x.emit("sort", dim=dim, descending=False).part(dim, k - 1, k)
    return chosen if keepdim else chosen.sum(dim), None


@rule("median")
def _median(x: Symbol, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return _kthvalue(x.reshape([-1]), (x.numel() + 1) // 2)[0]
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


# Sums and products.


def _statistic(what: Callable[[Symbol, Symbol], Any]) -> Rule:
    """Of variance and mean: (x, unbiased), (x, dims, unbiased, keepdim) or (x, dims, *, correction)."""

    def computed(
        x: Symbol,
        dims: Any = None,
        *more: Any,
        correction: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
    ) -> Any:
        if more and isinstance(more[0], bool):
            unbiased, keepdim = more[0], more[1] if len(more) > 1 else keepdim
        if isinstance(dims, bool):
            dims, unbiased = None, dims
        correction = correction if unbiased is None else float(unbiased)
        mean = x.mean(dims, True)
        free = math.prod(x.shape[d] for d in x.dims(dims)) - (1 if correction is None else float(correction))
        spread = (x - mean).scalar("square").sum(dims, keepdim).scale(1 / free if free > 0 else math.inf)
        return what(spread, mean if keepdim else x.mean(dims))

    return computed


@rule("prod")
def _prod(x: Symbol, dim: int | None = None, keepdim: bool = False, **_: Any) -> Symbol:
    if dim is None:
        x, dim = x.reshape([-1]), 0
    dim = dim % max(1, x.dim())
    shape = x.shape
    while x.shape[dim] > 1:  # halves are multiplied, so the depth is that of a tree
        half, odd = divmod(x.shape[dim], 2)
        paired = x.part(dim, 0, half) * x.part(dim, half, 2 * half)
        rest = [x.part(dim, 2 * half, 2 * half + 1)] if odd else []
        x = paired.emit("cat", *rest, dim=dim)
    return x if keepdim else x.reshape([*shape[:dim], *shape[dim + 1 :]])


@rule("mm", "bmm")
def _mm(a: Any, b: Any, **_: Any) -> Symbol:
    some = symbol_of(a, b)
    return some.lift(a).matmul(some.lift(b))


@rule("mv")
def _mv(a: Any, b: Any) -> Symbol:
    some = symbol_of(a, b)
    return some.lift(a).matmul(some.lift(b).reshape([-1, 1])).reshape([-1])


@rule("addmm", "baddbmm", "addmv")
def _addmm(a: Any, b: Any, c: Any, *, beta: float = 1, alpha: float = 1, **_: Any) -> Symbol:
    some = symbol_of(a, b, c)
    product = (_mv if len(c.shape) == 1 else _mm)(some.lift(b), c).scale(alpha)
    return product if beta == 0 else product + some.lift(a) * beta


RULES |= {
    "var": _statistic(lambda variance, mean: variance),
    "std": _statistic(lambda variance, mean: variance.scalar("sqrt")),
    "var_mean": _statistic(lambda variance, mean: (variance, mean)),
    "std_mean": _statistic(lambda variance, mean: (variance.scalar("sqrt"), mean)),
    "sum": lambda x, dims=None, keepdim=False, **_: x.sum(dims, keepdim),
    "mean": lambda x, dims=None, keepdim=False, **_: x.mean(dims, keepdim),
    "cumsum": lambda x, dim, **_: x.emit("cumsum", dim=dim % x.dim()) if x.dim() else x,
    "dot": lambda a, b: (symbol_of(a, b).lift(a) * b).sum(),
    "vdot": lambda a, b: (symbol_of(a, b).lift(a) * b).sum(),
}


@rule("_trilinear")
def _trilinear(a: Any, b: Any, c: Any, new_a: Any, new_b: Any, new_c: Any, dims: Any, *_: Any) -> Symbol:
    """Σ a b c over dimensions, each with new ones."""
    some, parts = symbol_of(a, b, c), []
    for item, new in ((a, new_a), (b, new_b), (c, new_c)):
        part = some.lift(item)
        for dim in new:
            part = part.reshape([*part.shape[:dim], 1, *part.shape[dim:]])
        parts.append(part)
    return (parts[0] * parts[1] * parts[2]).sum(list(dims))


@rule("_linalg_solve_ex")
def _solve(a: Any, b: Any, *, left: bool = True, **_: Any) -> tuple[Any, ...]:
    some = symbol_of(a, b)
    matrix, right = some.lift(a), some.lift(b)
    vector = right.dim() == matrix.dim() - 1
    right = right.reshape([*right.shape, 1]) if vector else right
    if not left:
        matrix, right = matrix.swapped(-1, -2), right.swapped(-1, -2)
    x = matrix.emit("solve", right)
    x = x if left else x.swapped(-1, -2)
    return (x.reshape(x.shape[:-1]) if vector else x), None, None, None


@rule("linalg_inv_ex")
def _inverse(a: Symbol, **_: Any) -> tuple[Symbol, None]:
    eye = torch.eye(a.shape[-1], dtype=torch.float64, device=a.builder.device)
    return a.emit("solve", a.lift(eye).expand(a.shape)), None
