"""Operations of ATen in terms of primitives: arithmetic, functions of entries, choices, products and layout.

A rule is called like the operation. Tensors that vary are symbols; those that do not are plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import CaptureError, UnsupportedOperation
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
    return symbol_of(a, b).lift(a) + (b if alpha == 1 else symbol_of(a, b).lift(b) * alpha)


@rule("sub", "subtract")
def _sub(a: Any, b: Any, alpha: float = 1, **_: Any) -> Symbol:
    return _add(a, b, -alpha)


@rule("rsub")
def _rsub(a: Any, b: Any, alpha: float = 1) -> Symbol:
    return _add(b, a, -alpha)


@rule("mul", "multiply")
def _mul(a: Any, b: Any) -> Symbol:
    return symbol_of(a, b).lift(a) * b if isinstance(a, Tensor | Symbol) else b * a


@rule("div", "divide", "true_divide")
def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode is not None:
        raise UnsupportedOperation(f"division rounded ({rounding_mode}) has no derivative")
    return symbol_of(a, b).lift(a) / b


@rule("addcmul")
def _addcmul(a: Any, b: Any, c: Any, value: float = 1) -> Symbol:
    return _add(a, symbol_of(a, b, c).lift(b) * c, value)


@rule("addcdiv")
def _addcdiv(a: Any, b: Any, c: Any, value: float = 1) -> Symbol:
    return _add(a, symbol_of(a, b, c).lift(b) / c, value)


@rule("lerp")
def _lerp(a: Any, b: Any, weight: Any) -> Symbol:
    start = symbol_of(a, b, weight).lift(a)
    return start + (start.lift(b) - start) * weight


@rule("neg")
def _neg(x: Symbol) -> Symbol:
    return -x


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


# Functions of each entry.

_PLAIN = (
    "exp log sqrt rsqrt reciprocal tanh sigmoid erf sin cos sinh cosh atan log1p expm1 abs square relu relu6 "
    "hardswish hardsigmoid softsign silu mish selu"
)


def _function(name: str) -> Rule:
    return lambda x: x.scalar(name)


for _name in _PLAIN.split():
    rule(_name)(_function(_name))
rule("asinh", "arcsinh")(_function("arcsinh"))
rule("arctan")(_function("atan"))


@rule("sign", "sgn")
def _sign(x: Symbol) -> Symbol:
    return x.scalar("abs", order=1)


@rule("tan")
def _tan(x: Symbol) -> Symbol:
    return x.scalar("sin") * x.scalar("cos").scalar("reciprocal")


@rule("erfc")
def _erfc(x: Symbol) -> Symbol:
    return 1.0 - x.scalar("erf")


@rule("exp2")
def _exp2(x: Symbol) -> Symbol:
    return x.scale(math.log(2)).scalar("exp")


@rule("log2")
def _log2(x: Symbol) -> Symbol:
    return x.scalar("log").scale(1 / math.log(2))


@rule("log10")
def _log10(x: Symbol) -> Symbol:
    return x.scalar("log").scale(1 / math.log(10))


@rule("atanh", "arctanh")
def _atanh(x: Symbol) -> Symbol:
    return (x.scalar("log1p") - (-x).scalar("log1p")).scale(0.5)


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


@rule("gelu")
def _gelu(x: Symbol, approximate: str = "none") -> Symbol:
    return x.scalar("gelu_tanh" if approximate == "tanh" else "gelu")


@rule("leaky_relu")
def _leaky_relu(x: Symbol, slope: float = 0.01) -> Symbol:
    return x.scalar("leaky_relu", slope)


@rule("elu")
def _elu(x: Symbol, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Symbol:
    if input_scale != 1:  # celu: α (exp(x/α) − 1)
        return x.scalar("celu", alpha)
    if scale != 1 and math.isclose(scale, 1.0507009873554805) and math.isclose(alpha, 1.6732632423543772):
        return x.scalar("selu")
    return x.scalar("elu", alpha).scale(scale)


@rule("celu")
def _celu(x: Symbol, alpha: float = 1) -> Symbol:
    return x.scalar("celu", alpha)


@rule("hardtanh")
def _hardtanh(x: Symbol, low: float = -1, high: float = 1) -> Symbol:
    return x.scalar("relu6") if (low, high) == (0, 6) else x.scalar("hardtanh", low, high)


@rule("log_sigmoid_forward")
def _log_sigmoid(x: Symbol) -> tuple[Symbol, None]:
    return x.scalar("logsigmoid"), None


@rule("_prelu_kernel", "prelu")
def _prelu(x: Any, weight: Any) -> Symbol:
    """relu(x) − w relu(−x)."""
    x = symbol_of(x, weight).lift(x)
    return x.scalar("relu") - (-x).scalar("relu") * weight


@rule("rrelu_with_noise", "rrelu_with_noise_functional")
def _rrelu(x: Symbol, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any) -> Symbol:
    return x.scalar("leaky_relu", (lower + upper) / 2)


@rule("clamp", "clip")
def _clamp(x: Any, low: Any = None, high: Any = None) -> Symbol:
    x = symbol_of(x, low, high).lift(x)
    if all(isinstance(bound, int | float) for bound in (low, high)):
        return x.scalar("hardtanh", low, high)
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


@rule("clamp_min")
def _clamp_min(x: Symbol, low: Any) -> Symbol:
    return _clamp(x, low)


@rule("clamp_max")
def _clamp_max(x: Symbol, high: Any) -> Symbol:
    return _clamp(x, None, high)


@rule("threshold")
def _threshold(x: Symbol, threshold: float, value: float) -> Symbol:
    """x above the threshold, a value elsewhere."""
    if threshold == value:
        return (x - threshold).scalar("relu") + threshold
    above = (x - threshold).step()
    return x * above + (1.0 - above) * value


# Their derivatives, where a model takes derivatives itself.


def _slope_of(y: Symbol, name: str) -> Symbol | None:
    """The derivative of a named function where y is its value."""
    primitive, options, operands = y.origin
    if primitive == "scalar" and options["function"].name == name and options["function"].order == 0:
        return operands[0].scalar(name, order=1)
    return None


@rule("tanh_backward")
def _tanh_backward(g: Any, y: Any) -> Symbol:
    y = symbol_of(g, y).lift(y)
    return (_slope_of(y, "tanh") or 1.0 - y.scalar("square")) * g


@rule("sigmoid_backward")
def _sigmoid_backward(g: Any, y: Any) -> Symbol:
    y = symbol_of(g, y).lift(y)
    return (_slope_of(y, "sigmoid") or y * (1.0 - y)) * g


def _backward(name: str) -> Rule:
    return lambda g, x, *_, **__: symbol_of(g, x).lift(x).scalar(name, order=1) * g


for _name in ("silu", "mish", "hardswish", "hardsigmoid"):
    rule(f"{_name}_backward")(_backward(_name))
rule("log_sigmoid_backward")(_backward("logsigmoid"))


@rule("gelu_backward")
def _gelu_backward(g: Any, x: Any, approximate: str = "none") -> Symbol:
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return symbol_of(g, x).lift(x).scalar(name, order=1) * g


@rule("softplus_backward")
def _softplus_backward(g: Any, x: Any, beta: float, threshold: float) -> Symbol:
    return symbol_of(g, x).lift(x).scalar("softplus", beta, order=1) * g


@rule("leaky_relu_backward")
def _leaky_relu_backward(g: Any, x: Any, slope: float, is_result: bool) -> Symbol:
    return symbol_of(g, x).lift(x).scalar("leaky_relu", slope, order=1) * g


@rule("hardtanh_backward")
def _hardtanh_backward(g: Any, x: Any, low: float, high: float) -> Symbol:
    return symbol_of(g, x).lift(x).scalar("hardtanh", low, high, order=1) * g


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
    x = symbol_of(g, x).lift(x)
    if input_scale != 1:
        return x.scalar("celu", alpha, order=1) * g
    return x.scalar("elu", alpha, order=1).scale(scale) * g


# Conditions: 1 where they hold, 0 elsewhere.


@rule("gt")
def _gt(a: Any, b: Any) -> Symbol:
    return (symbol_of(a, b).lift(a) - b).step()


@rule("lt")
def _lt(a: Any, b: Any) -> Symbol:
    return (symbol_of(a, b).lift(b) - a).step()


@rule("ge")
def _ge(a: Any, b: Any) -> Symbol:
    return 1.0 - _lt(a, b)


@rule("le")
def _le(a: Any, b: Any) -> Symbol:
    return 1.0 - _gt(a, b)


@rule("logical_and", "bitwise_and", "__and__")
def _and(a: Any, b: Any) -> Symbol:
    return _mul(a, b)


@rule("logical_or", "bitwise_or", "__or__")
def _or(a: Any, b: Any) -> Symbol:
    return _add(a, b) - _mul(a, b)


@rule("logical_not", "bitwise_not")
def _not(a: Symbol) -> Symbol:
    return 1.0 - a


@rule("where")
def _where(condition: Any, a: Any, b: Any) -> Symbol:
    """condition·a + (1 − condition)·b; entries of fixed tensors that are not chosen may be infinite."""
    some = symbol_of(condition, a, b)
    if isinstance(condition, Symbol):
        return some.lift(a) * condition + some.lift(b) * (1.0 - condition)
    shape = torch.broadcast_shapes(
        *(item.shape for item in (condition, a, b) if isinstance(item, Tensor | Symbol))
    )
    chosen, parts = condition.expand(shape), []
    for item, mask in ((a, chosen), (b, ~chosen)):
        if isinstance(item, Symbol):
            parts.append(item.expand(shape) * mask)
        else:
            item = (
                item.expand(shape)
                if isinstance(item, Tensor)
                else torch.full(shape, float(item), dtype=torch.float64, device=mask.device)
            )
            parts.append(some.lift(torch.where(mask, item.double(), 0.0)))
    return parts[0] + parts[1]


@rule("masked_fill")
def _masked_fill(x: Any, mask: Any, value: Any) -> Symbol:
    return _where(mask, value, x)


# The larger of two, and the largest.


@rule("maximum", "max_other", "fmax")
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


@rule("max")
def _max(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Tensor | Symbol):
        return _maximum(x, dim)
    return _amax(x) if dim is None else (_amax(x, dim, keepdim), None)


@rule("min")
def _min(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if isinstance(dim, Tensor | Symbol):
        return _minimum(x, dim)
    return _amin(x) if dim is None else (_amin(x, dim, keepdim), None)


@rule("sort")
def _sort(x: Symbol, *dim: Any, descending: bool = False, stable: bool | None = None) -> tuple[Symbol, None]:
    numbers = [item for item in dim if not isinstance(item, bool)]
    along = numbers[0] % x.dim() if numbers else x.dim() - 1
    order = descending or any(item is True for item in dim)
    return x.emit("sort", dim=along, descending=order), None


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


@rule("sum")
def _sum(x: Symbol, dims: Any = None, keepdim: bool = False, **_: Any) -> Symbol:
    return x.sum(dims, keepdim)


@rule("mean")
def _mean(x: Symbol, dims: Any = None, keepdim: bool = False, **_: Any) -> Symbol:
    return x.mean(dims, keepdim)


def _variance(x: Symbol, dims: Any, correction: Any, keepdim: bool) -> tuple[Symbol, Symbol]:
    mean = x.mean(dims, True)
    count = math.prod(x.shape[d] for d in x.dims(dims))
    spread = (x - mean).scalar("square").sum(dims, keepdim)
    free = count - (1 if correction is None or correction is True else float(correction))
    return spread.scale(1 / free if free > 0 else math.inf), mean if keepdim else x.mean(dims)


def _correction(dims: Any, correction: Any, unbiased: Any) -> tuple[Any, Any]:
    """Dimensions and correction from the arguments of an overload: ``var(x, unbiased)`` has no dimensions."""
    return (None, dims) if isinstance(dims, bool) else (dims, correction if unbiased is None else unbiased)


def _statistic(what: Callable[[Symbol, Symbol], Any]) -> Rule:
    def computed(
        x: Symbol,
        dims: Any = None,
        *more: Any,
        correction: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
    ) -> Any:
        if more and isinstance(more[0], bool):  # (x, dims, unbiased, keepdim)
            unbiased, keepdim = more[0], more[1] if len(more) > 1 else keepdim
        dims, correction = _correction(dims, correction, unbiased)
        return what(*_variance(x, dims, correction, keepdim))

    return computed


rule("var")(_statistic(lambda variance, mean: variance))
rule("std")(_statistic(lambda variance, mean: variance.scalar("sqrt")))
rule("var_mean")(_statistic(lambda variance, mean: (variance, mean)))
rule("std_mean")(_statistic(lambda variance, mean: (variance.scalar("sqrt"), mean)))


@rule("cumsum")
def _cumsum(x: Symbol, dim: int, **_: Any) -> Symbol:
    return x.emit("cumsum", dim=dim % x.dim()) if x.dim() else x


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


@rule("dot", "vdot")
def _dot(a: Any, b: Any) -> Symbol:
    return (symbol_of(a, b).lift(a) * b).sum()


@rule("addmm", "baddbmm")
def _addmm(a: Any, b: Any, c: Any, *, beta: float = 1, alpha: float = 1, **_: Any) -> Symbol:
    some = symbol_of(a, b, c)
    product = _mm(some.lift(b), c).scale(alpha)
    return product if beta == 0 else product + some.lift(a) * beta


@rule("addmv")
def _addmv(a: Any, b: Any, c: Any, *, beta: float = 1, alpha: float = 1) -> Symbol:
    some = symbol_of(a, b, c)
    return _mv(some.lift(b), c).scale(alpha) + some.lift(a) * beta


@rule("_trilinear")
def _trilinear(
    a: Any,
    b: Any,
    c: Any,
    new_a: Sequence[int],
    new_b: Sequence[int],
    new_c: Sequence[int],
    dims: Sequence[int],
    *_: Any,
) -> Symbol:
    """Σ a b c over dimensions, each with new ones."""
    some, parts = symbol_of(a, b, c), []
    for item, new in ((a, new_a), (b, new_b), (c, new_c)):
        item = some.lift(item)
        for dim in new:
            item = _unsqueeze(item, dim)
        parts.append(item)
    return (parts[0] * parts[1] * parts[2]).sum(list(dims))


@rule("_linalg_solve_ex", "linalg_solve_ex")
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


@rule("linalg_inv_ex", "inverse")
def _inverse(a: Symbol, **_: Any) -> tuple[Symbol, None]:
    eye = torch.eye(a.shape[-1], dtype=torch.float64, device=a.builder.device)
    return a.emit("solve", a.lift(eye).expand(a.shape)), None


# Layout.


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_reshape_copy", "view_copy")
def _view(x: Symbol, shape: Any, *_: Any) -> Symbol:
    if isinstance(shape, torch.dtype):
        raise UnsupportedOperation("reading a tensor as numbers of another type (view(dtype))")
    return x.reshape(shape)


@rule("alias", "clone", "contiguous", "detach", "lift_fresh", "_to_copy", "to", "lift_fresh_copy", "positive")
def _same(x: Symbol, *_: Any, **__: Any) -> Symbol:
    return x


@rule("unsqueeze")
def _unsqueeze(x: Symbol, dim: int) -> Symbol:
    dim = dim % (x.dim() + 1)
    return x.reshape([*x.shape[:dim], 1, *x.shape[dim:]])


@rule("squeeze")
def _squeeze(x: Symbol, dims: Any = None) -> Symbol:
    chosen = x.dims(dims)
    return x.reshape([size for k, size in enumerate(x.shape) if k not in chosen or size != 1])


@rule("expand", "broadcast_to")
def _expand(x: Symbol, shape: Sequence[int], **_: Any) -> Symbol:
    return x.expand(shape)


@rule("permute")
def _permute(x: Symbol, dims: Sequence[int]) -> Symbol:
    return x.permute(dims)


@rule("transpose")
def _transpose(x: Symbol, a: int, b: int) -> Symbol:
    return x.swapped(a, b) if x.dim() else x


@rule("t")
def _t(x: Symbol) -> Symbol:
    return x.swapped(0, 1) if x.dim() > 1 else x


@rule("slice")
def _slice(x: Symbol, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Symbol:
    dim = dim % x.dim()
    start, stop, step = slice(start, stop, step).indices(x.shape[dim])
    return x.part(dim, start, max(start, stop), step)


@rule("select")
def _select(x: Symbol, dim: int, index: int) -> Symbol:
    dim = dim % x.dim()
    index = index % x.shape[dim]
    return x.part(dim, index, index + 1).reshape([*x.shape[:dim], *x.shape[dim + 1 :]])


@rule("split_with_sizes")
def _split_with_sizes(x: Symbol, sizes: Sequence[int], dim: int = 0) -> list[Symbol]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [x.part(dim % x.dim(), a, b) for a, b in pairwise(ends)]


@rule("split")
def _split(x: Symbol, size: Any, dim: int = 0) -> list[Symbol]:
    total = x.shape[dim]
    if isinstance(size, int):
        size = [min(size, total - k) for k in range(0, total, size)] or [0]
    return _split_with_sizes(x, size, dim)


@rule("unbind")
def _unbind(x: Symbol, dim: int = 0) -> list[Symbol]:
    return [_select(x, dim, k) for k in range(x.shape[dim])]


@rule("cat", "concat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Symbol:
    some = symbol_of(*tensors)
    parts = [some.lift(t) for t in tensors if tuple(t.shape) != (0,)]  # torch skips empty vectors
    return parts[0].emit("cat", *parts[1:], dim=dim % parts[0].dim())


@rule("stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Symbol:
    some = symbol_of(*tensors)
    return _cat([_unsqueeze(some.lift(t), dim) for t in tensors], dim % (some.dim() + 1))


@rule("flip")
def _flip(x: Symbol, dims: Sequence[int]) -> Symbol:
    return x.emit("flip", dims=x.dims(dims)) if dims else x


@rule("constant_pad_nd")
def _pad(x: Symbol, widths: Sequence[int], value: float = 0) -> Symbol:
    pairs = [(0, 0)] * (x.dim() - len(widths) // 2)
    pairs += [(widths[k], widths[k + 1]) for k in range(len(widths) - 2, -1, -2)]
    for dim, (before, after) in enumerate(pairs):
        x = x.part(dim, max(0, -before), x.shape[dim] - max(0, -after))
    pairs = [(max(0, before), max(0, after)) for before, after in pairs]
    whole = x.emit("pad", widths=tuple(pairs))
    if value == 0:
        return whole
    inner = torch.zeros(x.shape, dtype=torch.float64, device=x.builder.device)
    frame = torch.nn.functional.pad(inner, [w for pair in reversed(pairs) for w in pair], value=value)
    return whole + frame


@rule("index_select")
def _index_select(x: Symbol, dim: int, index: Tensor) -> Symbol:
    return _rows(x, dim % x.dim(), fixed(index))


def _rows(x: Symbol, dim: int, index: Tensor) -> Symbol:
    """The rows along a dimension; ids that there are none of are refused."""
    size = x.shape[dim]
    if index.numel() and not index.is_meta and (int(index.min()) < 0 or int(index.max()) >= size):
        what = f"an embedding of {size} entries is asked for ids from {int(index.min())} to {int(index.max())}"
        remedy = "Pass ids that are smaller than the number of entries."
        raise CaptureError(what, where=x.builder.path, remedy=remedy)
    return x.emit("rows", x.index_of(index.reshape(-1)), dim=dim)


@rule("embedding")
def _embedding(
    weight: Symbol, ids: Tensor, padding: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Symbol:
    for wrong, name, what in (
        (scale_grad_by_freq, "scale_grad_by_freq", "divides its gradient by how often an id occurs"),
        (sparse, "sparse", "makes sparse gradients"),
    ):
        if wrong:
            remedy = f"Set {name}=False: a gradient is then the derivative, in a dense tensor."
            raise CaptureError(f"an embedding {what}", where=weight.builder.path, remedy=remedy)
    return _rows(weight, 0, fixed(ids)).reshape([*ids.shape, *weight.shape[1:]])


@rule("embedding_dense_backward")
def _embedding_backward(g: Symbol, ids: Tensor, size: int, padding: int, *_: Any) -> Symbol:
    index = fixed(ids).reshape(-1)
    rows = g.reshape([index.numel(), g.shape[-1]]) * (index != padding).double()[:, None]
    return rows.emit("rows_back", g.index_of(index), dim=0, size=size)


def fixed(index: Any) -> Tensor:
    """An index tensor that depends on no weight and no real input."""
    if isinstance(index, Symbol):
        raise UnsupportedOperation(
            "an index is computed from real numbers: which entries it picks depends on them"
        )
    return index


def scattered(x: Symbol, places: Tensor, values: Any, accumulate: bool = False) -> Symbol:
    """The tensor with values written, or added, at places of the flattened tensor."""
    values = x.lift(values).expand(places.shape)
    spread = values.emit("scatter", x.index_of(places), shape=tuple(x.shape))
    if accumulate:
        return x + spread
    if len(places.reshape(-1).unique()) < places.numel():
        raise UnsupportedOperation("two values are written to the same entry, and either may remain")
    free = torch.ones(x.numel(), dtype=torch.float64, device=places.device)
    free[places.reshape(-1)] = 0.0
    return x * free.reshape(x.shape) + spread


def places_of(x: Symbol) -> Tensor:
    """Of each entry its place in the flattened tensor."""
    return torch.arange(x.numel(), device=x.builder.device).reshape(x.shape)


def _written(pick: Callable[..., Tensor]) -> Rule:
    """Of an operation that writes into entries: which ones, from a tensor of places and its other arguments."""

    def computed(x: Any, *arguments: Any, **options: Any) -> Symbol:
        values = arguments[0]
        x = symbol_of(x, values).lift(x)
        return scattered(x, pick(places_of(x), *arguments[1:], **options), values)

    return computed


_aten: Any = torch.ops.aten
rule("slice_scatter")(_written(_aten.slice.Tensor))
rule("select_scatter")(_written(_aten.select.int))
rule("diagonal_scatter")(_written(_aten.diagonal.default))
rule("as_strided_scatter")(_written(_aten.as_strided.default))


@rule("index_put", "_unsafe_index_put")
def _index_put(x: Any, index: Sequence[Any], values: Any, accumulate: bool = False) -> Symbol:
    x = symbol_of(x, values, *index).lift(x)
    at = tuple(slice(None) if item is None else fixed(item) for item in index)
    return scattered(x, places_of(x)[at], values, accumulate)


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(x: Any, dim: int, index: Any, values: Any, reduce: str = "", include_self: bool = True) -> Symbol:
    raise_on = reduce not in ("", "sum", "add")
    if raise_on:
        raise UnsupportedOperation(f"scatter with reduce='{reduce}'")
    x = symbol_of(x, values).lift(x)
    places = torch.gather(places_of(x), dim, fixed(index)) if x.dim() else places_of(x)
    if isinstance(values, Tensor | Symbol) and values.shape != places.shape:
        region = tuple(slice(0, size) for size in places.shape)
        values = values[region] if isinstance(values, Tensor) else values.gather(places_of(values)[region])
    return scattered(x, places, values, accumulate=bool(reduce))


@rule("scatter_add")
def _scatter_add(x: Any, dim: int, index: Any, values: Any) -> Symbol:
    return _scatter(x, dim, index, values, "sum")


@rule("index_add")
def _index_add(x: Any, dim: int, index: Any, values: Any, *, alpha: float = 1) -> Symbol:
    x = symbol_of(x, values).lift(x)
    rows = x.lift(values).emit("rows_back", x.index_of(fixed(index)), dim=dim % x.dim(), size=x.shape[dim])
    return x + rows * alpha


@rule("copy")
def _copy(x: Any, values: Any, *_: Any) -> Symbol:
    return symbol_of(x, values).lift(values).expand(x.shape)


@rule("fill", "zero")
def _fill(x: Symbol, value: Any = 0.0) -> Symbol:
    return x.lift(value).expand(x.shape)


_MOVED = (
    "index gather diagonal as_strided unfold roll repeat tril triu take take_along_dim reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle "
    "pixel_unshuffle rot90 channel_shuffle diagonal_copy unfold_copy _unsafe_index diag_embed block_diag tile "
    "repeat_interleave view_as as_strided_copy"
)


def moved(operation: Any, x: Symbol, *arguments: Any, **options: Any) -> Symbol:
    """An operation that only moves entries: run on the places of its entries (from 1, so that 0 is a zero)."""
    for item in (*arguments, *(arguments[0] if arguments and isinstance(arguments[0], list | tuple) else ())):
        fixed(item)
    padded = int(any(name in operation.name() for name in ("tril", "triu", "diag_embed")))
    places = places_of(x) + padded
    where = (
        operation(places.double() if "pad" in operation.name() else places, *arguments, **options).long() - padded
    )
    chosen = x.gather(where.clamp(min=0))
    return chosen * (where >= 0).double() if padded else chosen


MOVES = frozenset(_MOVED.split())
