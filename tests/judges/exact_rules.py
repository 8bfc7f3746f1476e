"""What the operations of torch compute, on arrays of exact numbers.

Operations that move numbers are run on whole numbers that stand for the places they are taken from. A rule gets
the arguments with arrays in place of tensors, and the options by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from flint import arb
from torch import Tensor

from judges import exact_functions as functions
from judges.exact_numbers import ONE, ZERO, Undecided, applied, dot, exactly, total, value_of

Array = np.ndarray
RULES: dict[str, Callable[..., Any]] = {}
LAYOUT = frozenset(
    """view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze clone alias detach cat
    stack split split_with_sizes unsafe_split unbind flip roll index_select gather index constant_pad_nd unfold
    repeat _to_copy lift_fresh lift_fresh_copy contiguous as_strided diagonal view_as movedim embedding
    copy_""".split()  # noqa: SIM905
)


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def filled(shape: Sequence[int], numbers: Iterator[Any]) -> Array:
    """An array of objects with these entries, in order."""
    array = np.empty(tuple(shape), dtype=object)
    flat = array.reshape(-1)
    for k, number in enumerate(numbers):
        flat[k] = number
    return array


def mapped(function: Callable[..., Any], *arrays: Any) -> Array:
    """A function of the entries, with broadcasting."""
    wide = np.broadcast_arrays(*(np.asarray(a, dtype=object) for a in arrays))
    return filled(wide[0].shape, (function(*entries) for entries in zip(*(w.flat for w in wide), strict=True)))


def _scalar(x: Any) -> Any:
    return exactly(x) if isinstance(x, int | float) else x


def _entrywise(build: Callable[..., functions.Function]) -> Callable[..., Array]:
    """A rule from what makes a scalar function of the options."""

    def compute(x: Array, *options: Any, **named: Any) -> Array:
        function = build(*options, **named)
        return mapped(lambda entry: applied(function, entry), x)

    return compute


for _f in (
    *(functions.tanh, functions.sigmoid, functions.exp, functions.expm1, functions.log, functions.log1p),
    *(functions.sqrt, functions.rsqrt, functions.sin, functions.cos, functions.atan, functions.erf),
    *(functions.silu, functions.mish, functions.sign),
):
    RULES[_f.__name__] = _entrywise(lambda f=_f: f)
RULES |= {
    "gelu": _entrywise(functions.gelu),
    "elu": _entrywise(functions.elu),
    "celu": _entrywise(functions.celu),
    "clamp": _entrywise(functions.clamp),
    "hardtanh": _entrywise(functions.clamp),
    "softplus": _entrywise(functions.thresholded_softplus),
    "leaky_relu": _entrywise(functions.leaky_relu),
    "pow": _entrywise(functions.power),
}
RULES["abs"] = lambda x: mapped(lambda entry: applied(functions.absolute, entry), x)
RULES["relu"] = lambda x: mapped(lambda entry: applied(functions.leaky_relu(0.0), entry), x)
RULES["clamp_min"] = lambda x, low: RULES["clamp"](x, low)
RULES |= {f"{name}_": RULES[name] for name in ("sigmoid", "tanh")}
RULES["square"] = lambda x: x * x
RULES["neg"] = lambda x: -x
RULES["reciprocal"] = lambda x: ONE / x
RULES["log_sigmoid_forward"] = lambda x: (mapped(lambda entry: applied(functions.log_sigmoid, entry), x), None)


@rule("add", "add_")
def _add(a: Any, b: Any, alpha: float = 1) -> Any:
    b = _scalar(b)
    return a + (b if alpha == 1 else b * exactly(alpha))


@rule("sub", "sub_")
def _sub(a: Any, b: Any, alpha: float = 1) -> Any:
    return _add(a, -_scalar(b), alpha)


@rule("rsub")
def _rsub(a: Any, b: Any, alpha: float = 1) -> Any:
    return _sub(_scalar(b), a, alpha)


@rule("mul", "mul_")
def _mul(a: Any, b: Any) -> Any:
    return a * _scalar(b)


@rule("div", "div_")
def _div(a: Any, b: Any) -> Any:
    return a / _scalar(b)


for _name, _compare in {"gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b,
                        "le": lambda a, b: a <= b}.items():  # fmt: skip

    def _compared(a: Any, b: Any, compare: Callable[..., bool] = _compare) -> Any:
        def decided(x: Any, y: Any) -> bool:
            p, q = value_of(x), value_of(y)
            if p.overlaps(q) and not (p.is_exact() and q.is_exact()):
                raise Undecided("a comparison of overlapping balls")
            return bool(compare(p, q))

        return mapped(decided, a, arb(b) if isinstance(b, float) and math.isinf(b) else _scalar(b))

    RULES[_name] = _compared


@rule("where")
def _where(condition: Array, a: Any, b: Any) -> Array:
    return mapped(lambda c, x, y: x if c else y, condition, _scalar(a), _scalar(b))


@rule("masked_fill")
def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return _where(mask, value, x)


@rule("mm", "bmm", "mv", "dot", "matmul")
def _product(a: Array, b: Array) -> Array:
    """Sums of products of rows and columns, batch by batch."""
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    shape = (*left.shape[:-1], right.shape[-1])
    batches = itertools.product(*map(range, left.shape[:-2]))
    result = np.empty(shape, dtype=object)
    for batch in batches:
        for i, k in itertools.product(range(shape[-2]), range(shape[-1])):
            result[(*batch, i, k)] = dot(left[(*batch, i)], right[(*batch, slice(None), k)])
    result = result[..., 0] if b.ndim == 1 else result
    return result[0] if a.ndim == 1 else result


def _eliminated(matrix: Array) -> tuple[Array, Any]:
    """The inverse of a matrix and its determinant, by elimination without exchanges of rows."""
    n, determinant = len(matrix), ONE
    work = np.concatenate(
        [matrix, filled((n, n), (ONE if i == j else ZERO for i in range(n) for j in range(n)))], 1
    )
    for k in range(n):
        pivot = work[k, k]
        if value_of(pivot).contains(0):
            raise Undecided("a pivot that may be zero")
        determinant = pivot * determinant
        work[k] = mapped(lambda entry, by=pivot: entry / by, work[k])
        for i in set(range(n)) - {k}:
            work[i] = mapped(lambda entry, other, by=work[i, k]: entry - by * other, work[i], work[k])
    return work[:, n:], determinant


@rule("linalg_inv_ex")
def _inverses(a: Array, check_errors: bool = False) -> tuple[Array, None]:
    flat = a.reshape(-1, *a.shape[-2:])
    return np.stack([_eliminated(matrix)[0] for matrix in flat]).reshape(a.shape), None


@rule("_linalg_solve_ex")
def _solutions(a: Array, b: Array, left: bool = True, check_errors: bool = False) -> tuple[Array | None, ...]:
    inverse = _inverses(a)[0]
    return _product(inverse, b) if left else _product(b, inverse), None, None, None


@rule("_linalg_slogdet")
def _log_determinants(a: Array) -> tuple[Array | None, ...]:
    """Of matrices with positive determinants: sign and logarithm, and two factors that nobody reads."""
    flat = a.reshape(-1, *a.shape[-2:])
    determinants = filled(a.shape[:-2], (_eliminated(matrix)[1] for matrix in flat))
    sign = mapped(lambda d: ONE, determinants)
    return sign, mapped(lambda d: applied(functions.log, d), determinants), None, None


@rule("addmm", "addmv", "baddbmm")
def _added_product(bias: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Array:
    return _mul(bias, beta) + _mul(_product(a, b), alpha)


@rule("linear")
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    flat = _product(x.reshape(-1, x.shape[-1]), weight.T)
    flat = flat if bias is None else flat + bias
    return flat.reshape(*x.shape[:-1], weight.shape[0])


@rule("convolution")
def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Array:
    if transposed:
        raise NotImplementedError("the judge has no transposed convolution")
    spatial = x.ndim - 2
    stride, padding, dilation = ([*v] * spatial if len(v) == 1 else [*v] for v in (stride, padding, dilation))
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=ZERO)
    kernel = weight.shape[2:]
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, d, k, s in zip(padded.shape[2:], dilation, kernel, stride, strict=True)
    ]
    result = np.empty((x.shape[0], weight.shape[0], *sizes), dtype=object)
    for place in np.ndindex(*result.shape):
        n, o, *at = place
        group = o // (weight.shape[0] // groups)
        channels = slice(group * weight.shape[1], (group + 1) * weight.shape[1])
        window = tuple(
            slice(a * s, a * s + d * (k - 1) + 1, d)
            for a, s, d, k in zip(at, stride, dilation, kernel, strict=True)
        )
        result[place] = dot(padded[(n, channels, *window)].flat, weight[o].flat)
    return result if bias is None else result + bias.reshape(1, -1, *(1,) * spatial)


def _dims(x: Array, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in (dim if isinstance(dim, list | tuple) else [dim])) if x.ndim else ()


def _reduced(x: Array, dim: Any, keepdim: bool, reduce: Callable[[Array], Any]) -> Array:
    dims = _dims(x, dim)
    rest = [d for d in range(x.ndim) if d not in dims]
    moved = x.transpose(*rest, *dims).reshape(*(x.shape[d] for d in rest), -1)
    result = filled(moved.shape[:-1], (reduce(moved[place]) for place in np.ndindex(*moved.shape[:-1])))
    return result.reshape([1 if d in dims else x.shape[d] for d in range(x.ndim)]) if keepdim else result


@rule("sum")
def _sum(x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return _reduced(x, dim, keepdim, total)


@rule("mean")
def _mean(x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return _reduced(x, dim, keepdim, lambda row: total(row) / exactly(len(row)))


def _centred(row: Sequence[Any]) -> list[Any]:
    mean = total(row) / exactly(len(row))
    return [entry - mean for entry in row]


def _variance(row: Sequence[Any], correction: float = 0) -> Any:
    centred = _centred(row)
    return dot(centred, centred) / exactly(len(row) - correction)


@rule("var")
def _var(x: Array, dim: Any = None, correction: float = 1, keepdim: bool = False) -> Array:
    return _reduced(x, dim, keepdim, lambda row: _variance(row, correction))


@rule("std")
def _std(x: Array, dim: Any = None, correction: float = 1, keepdim: bool = False) -> Array:
    return RULES["sqrt"](_var(x, dim, correction, keepdim))


@rule("linalg_vector_norm")
def _norm(x: Array, order: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    if order != 2:
        raise NotImplementedError("the judge has Euclidean norms alone")
    return _reduced(x, dim, keepdim, lambda row: applied(functions.sqrt, dot(row, row)))


@rule("max")
def _max(x: Array, dim: int, keepdim: bool = False) -> tuple[Any, ...]:
    def largest(row: Sequence[Any]) -> Any:
        top = row[0]
        for entry in row[1:]:
            top = entry if functions.at_least(value_of(entry) - value_of(top), 0) else top
        return top

    return _reduced(x, dim, keepdim, largest), None


def _log_sum(row: Sequence[Any]) -> Any:
    """log Σ exp xᵢ = x_m + log(1 + Σ' exp(xᵢ − x_m)), so that what is far below the largest is not lost."""
    top = max(range(len(row)), key=lambda k: float(value_of(row[k]).mid()))
    rest = total(applied(functions.exp, x - row[top]) for k, x in enumerate(row) if k != top)
    return row[top] + applied(functions.log1p, rest)


@rule("logsumexp")
def _logsumexp(x: Array, dim: Any, keepdim: bool = False) -> Array:
    return _reduced(x, dim, keepdim, _log_sum)


@rule("_log_softmax")
def _log_softmax(x: Array, dim: int, half: bool = False) -> Array:
    """x_k − log Σ exp xᵢ = −log(1 + Σ' exp(xᵢ − x_k)) without cancellation."""
    result = np.empty(x.shape, dtype=object)
    moved, target = np.moveaxis(x, dim, -1), np.moveaxis(result, dim, -1)
    for place in np.ndindex(*moved.shape):
        row, k = moved[place[:-1]], place[-1]
        others = [applied(functions.exp, entry - row[k]) for j, entry in enumerate(row) if j != k]
        target[place] = -applied(functions.log1p, total(others)) if others else ZERO * row[k]
    return result


@rule("_softmax", "_safe_softmax")
def _softmax(x: Array, dim: int, half: Any = None) -> Array:
    return RULES["exp"](_log_softmax(x, dim))


def _normalised(x: Array, groups: int, eps: float) -> Array:
    """Each of the groups of consecutive entries minus its mean over √(variance + ε)."""
    flat = x.reshape(groups, -1)
    rows = []
    for row in flat:
        centred = _centred(row)
        scale = applied(functions.rsqrt, dot(centred, centred) / exactly(len(row)) + exactly(eps))
        rows.append([entry * scale for entry in centred])
    return filled(x.shape, itertools.chain(*rows))


@rule("native_layer_norm")
def _layer_norm(x: Array, shape: list[int], weight: Any, bias: Any, eps: float) -> tuple[Any, ...]:
    y = _normalised(x, x.size // max(math.prod(shape), 1), eps)
    return _affine(y, weight, bias), None, None


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _over_channels(numbers: Any, dims: int) -> Any:
    return None if numbers is None else numbers.reshape(1, -1, *(1,) * (dims - 2))


@rule("native_group_norm")
def _group_norm(
    x: Array, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Any, ...]:
    y = _normalised(x, n * groups, eps)
    return _affine(y, _over_channels(weight, x.ndim), _over_channels(bias, x.ndim)), None, None


@rule("native_batch_norm", "cudnn_batch_norm")
def _batch_norm(x: Array, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
                eps: float) -> tuple[Any, ...]:  # fmt: skip
    if training:
        y = np.moveaxis(_normalised(np.moveaxis(x, 1, 0), x.shape[1], eps), 0, 1)
    else:
        scale = mapped(lambda v: applied(functions.rsqrt, v + exactly(eps)), var)
        y = (x - _over_channels(mean, x.ndim)) * _over_channels(scale, x.ndim)
    return _affine(y, _over_channels(weight, x.ndim), _over_channels(bias, x.ndim)), None, None


def _reduced_loss(entries: Array, reduction: int) -> Any:
    if reduction == 0:
        return entries
    number = total(entries.flat)
    return filled((), iter([number / exactly(entries.size) if reduction == 1 else number]))


@rule("nll_loss_forward")
def _nll(x: Array, target: Array, weight: Any, reduction: int, ignored: int) -> tuple[Any, ...]:
    """Whole numbers come as they are."""
    classes = [int(k) for k in target.reshape(-1)]
    rows = x.reshape(-1, x.shape[-1])
    weights = [ZERO if k == ignored else ONE if weight is None else weight[k] for k in classes]
    losses = [-rows[n, k] * weights[n] for n, k in enumerate(classes) if k != ignored]
    number = total(losses)
    return filled((), iter([number / sum(weights, ZERO) if reduction == 1 else number])), None


@rule("binary_cross_entropy_with_logits")
def _bce(x: Array, y: Array, weight: Any = None, positive: Any = None, reduction: int = 1) -> Any:
    def entry(z: Any, t: Any) -> Any:
        return applied(functions.softplus, z) * (1 - t) + applied(functions.softplus, -z) * t

    if positive is not None:
        raise NotImplementedError("the judge has no weights of positive targets")
    losses = mapped(entry, x, y)
    return _reduced_loss(losses if weight is None else losses * weight, reduction)


@rule("huber_loss")
def _huber(x: Array, y: Array, reduction: int = 1, delta: float = 1.0) -> Any:
    return _reduced_loss(mapped(lambda z: applied(functions.huber(delta), z), x - y), reduction)


@rule("mse_loss")
def _mse(x: Array, y: Array, reduction: int = 1) -> Any:
    return _reduced_loss((x - y) * (x - y), reduction)


def moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], arrays: Callable[[Tensor], Any]) -> Any:
    """An operation that moves numbers, run on the places they come from; a place −1 holds zero."""
    pool: list[Any] = []

    def places(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            array = arrays(argument)
            start = len(pool)
            pool.extend(array.reshape(-1))
            return torch.arange(start, start + argument.numel()).reshape(argument.shape)
        if isinstance(argument, list | tuple):
            return type(argument)(places(item) for item in argument)
        return argument

    kept = {key: value for key, value in kwargs.items() if key not in ("dtype", "memory_format", "layout")}
    arguments = [places(argument) for argument in args]
    if "constant_pad_nd" in str(func):
        arguments[2:] = [-1]
    if "_to_copy" in str(func):
        result: Any = arguments[0]
    else:
        result = func(*arguments, **kept)
    pool.append(ZERO)

    def gathered(index: Tensor) -> Array:
        return filled(index.shape, (pool[k] for k in index.reshape(-1).tolist()))

    return gathered(result) if isinstance(result, Tensor) else [gathered(part) for part in result]
