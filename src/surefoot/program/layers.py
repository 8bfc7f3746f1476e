"""Operations of ATen in terms of primitives: soft-max, normalisation, convolution, pooling and interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import CaptureError, UnsupportedOperation
from surefoot.program.decompositions import RULES, rule, symbol_of
from surefoot.program.symbol import Symbol

_MASKED = -1e30  # at and below, an entry of a mask that is added stands for minus infinity


# Soft-max.


def unmasked(x: Symbol) -> tuple[Symbol, Symbol | None]:
    """The argument of a soft-max without entries that are minus infinity by a fixed mask, and the mask.

    Infinities in a program would meet zeros and make NaN; a mask of zeros and ones says the same.
    """
    name, options, operands = x.origin
    if name == "constant":
        value = x.builder.constants[x.index]
        hidden = value <= _MASKED
        if value.is_meta or not bool(hidden.any()):
            return x, None
        return x.lift(value.masked_fill(hidden, 0.0)), x.lift((~hidden).double())
    if name in ("reshape", "expand", "permute", "slice"):
        inner, mask = unmasked(operands[0])
        return (x, None) if mask is None else (inner.emit(name, **options), mask.emit(name, **options))
    if name == "cat":
        parts = [unmasked(part) for part in operands]
        if any(mask is not None for _, mask in parts):
            inners = [inner for inner, _ in parts]
            masks = [p.lift(torch.ones(p.shape)) if mask is None else mask for p, mask in parts]
            return inners[0].emit(name, *inners[1:], **options), masks[0].emit(name, *masks[1:], **options)
    if name == "add":
        parts = [unmasked(term) for term in operands]
        masks = [mask for _, mask in parts if mask is not None]
        if masks:
            total = parts[0][0]
            for inner, _ in parts[1:]:
                total = total + inner
            mask = masks[0]
            for other in masks[1:]:
                mask = mask * other
            return total, mask
    return x, None


def _refuse_empty(x: Symbol, mask: Symbol | None, dim: int) -> None:
    """Refuse a fibre of a soft-max in which all is masked: the result would be NaN."""
    if mask is not None and not bool((x.builder.constants[mask.index].sum(dim) > 0).all()):
        what = "a mask hides everything from a row of the attention, and the model returns NaN"
        remedy = "Leave at least one entry visible in each row, or drop the samples that have none."
        raise CaptureError(what, where=x.builder.path, remedy=remedy)


@rule("_softmax", "softmax")
def _softmax(x: Symbol, dim: int, *_: Any) -> Symbol:
    dim = dim % max(1, x.dim())
    inner, mask = unmasked(x)
    _refuse_empty(x, mask, dim)
    return inner.emit("softmax", *([] if mask is None else [mask]), dim=dim)


@rule("_safe_softmax")
def _safe_softmax(x: Symbol, dim: int, *_: Any, **__: Any) -> Symbol:
    """Zeros where all is masked, as the primitive has it."""
    inner, mask = unmasked(x)
    return inner.emit("softmax", *([] if mask is None else [mask]), dim=dim % x.dim())


@rule("logsumexp")
def _logsumexp(x: Symbol, dims: Any, keepdim: bool = False) -> Symbol:
    dims = x.dims(dims)
    shape = [1 if k in dims else size for k, size in enumerate(x.shape)]
    if len(dims) > 1:  # the dimensions as the last one
        rest = [k for k in range(x.dim()) if k not in dims]
        flat = x.permute([*rest, *dims]).reshape([*(x.shape[k] for k in rest), -1])
        value = _logsumexp(flat, -1)
        return value.reshape(shape) if keepdim else value
    inner, mask = unmasked(x)
    _refuse_empty(x, mask, dims[0])
    return inner.emit("logsumexp", *([] if mask is None else [mask]), dim=dims[0], keepdim=keepdim)


@rule("_log_softmax", "log_softmax")
def _log_softmax(x: Symbol, dim: int, *_: Any) -> Symbol:
    return x - _logsumexp(x, dim, True)


@rule("_softmax_backward_data")
def _softmax_backward(g: Any, y: Any, dim: int, *_: Any) -> Symbol:
    some = symbol_of(g, y)
    return some.lift(g).emit("softmax_back", some.lift(y), dim=dim % some.dim())


@rule("_log_softmax_backward_data")
def _log_softmax_backward(g: Any, y: Any, dim: int, *_: Any) -> Symbol:
    """g − p Σg, where the probabilities p are also the soft-max of their logarithms y."""
    some = symbol_of(g, y)
    total = some.lift(g).sum(dim, True)
    return some.lift(g) - some.lift(y).emit("softmax", dim=dim % some.dim()) * total


# Normalisation.


def _affine(z: Symbol, weight: Any, bias: Any, shape: Sequence[int]) -> Symbol:
    for operand, combined in ((weight, Symbol.__mul__), (bias, Symbol.__add__)):
        if operand is not None:
            z = combined(z, z.lift(operand).reshape(shape))
    return z


def _normalized(x: Symbol, dims: Sequence[int], eps: float) -> tuple[Symbol, Symbol, Symbol]:
    """The tensor normalised along dimensions, its mean and the reciprocal of its deviation."""
    z, r = (x.emit(name, dims=tuple(dims), eps=float(eps)) for name in ("normalize", "rstd"))
    return z, x.mean(dims, True), r


@rule("native_layer_norm")
def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Symbol, ...]:
    x = symbol_of(x, weight, bias).lift(x)
    z, mean, r = _normalized(x, range(x.dim() - len(shape), x.dim()), eps)
    return _affine(z, weight, bias, shape), mean, r


@rule("native_group_norm")
def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Symbol, ...]:
    x = symbol_of(x, weight, bias).lift(x)
    z, mean, r = _normalized(x.reshape([n, groups, -1]), (2,), eps)
    z = _affine(z.reshape(x.shape), weight, bias, [channels, *[1] * (x.dim() - 2)])
    return z, mean.reshape([n, groups]), r.reshape([n, groups])


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
      "_batch_norm_with_update", "_batch_norm_with_update_functional", "miopen_batch_norm")  # fmt: skip
def _batch_norm(x: Any, weight: Any, bias: Any, *arguments: Any) -> tuple[Any, ...]:
    """By the statistics of the batch while training, by fixed ones else; (…, mean, variance, training,
        momentum, ε),
    and in the overload ``no_stats`` without mean and variance.
    """
    x = symbol_of(x, weight, bias).lift(x)
    with_stats = not isinstance(arguments[0], bool)
    mean, variance = arguments[:2] if with_stats else (None, None)
    numbers = [item for item in arguments if isinstance(item, bool | int | float)]
    training, eps = bool(numbers[0]), float(numbers[-1])
    wide = [x.shape[1], *[1] * (x.dim() - 2)]
    if training or mean is None:
        dims = (0, *range(2, x.dim()))
        z, average, r = _normalized(x, dims, eps)
        return _affine(z, weight, bias, wide), average.reshape([-1]), r.reshape([-1]), None, None
    r = (x.lift(variance) + eps).scalar("rsqrt")
    z = (x - x.lift(mean).reshape(wide)) * r.reshape(wide)
    return _affine(z, weight, bias, wide), None, None, None, None


RULES["_native_batch_norm_legit_no_training"] = lambda x, weight, bias, mean, variance, momentum, eps: _batch_norm(
    x, weight, bias, mean, variance, False, momentum, eps
)


@rule("_fused_rms_norm")
def _rms_norm(x: Any, shape: Sequence[int], weight: Any, eps: float | None) -> tuple[Symbol, Symbol]:
    x = symbol_of(x, weight).lift(x)
    dims = range(x.dim() - len(shape), x.dim())
    r = (
        x.scalar("square").mean(list(dims), True) + (torch.finfo(torch.float64).eps if eps is None else eps)
    ).scalar("rsqrt")
    return _affine(x * r, weight, None, shape), r


# Convolution.


@rule("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution")
def _convolution(
    x: Any, w: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int, *_: Any,
) -> Symbol:  # fmt: skip
    some = symbol_of(x, w, bias)
    x, w = some.lift(x), some.lift(w)
    count = w.dim() - 2
    single = x.dim() == count + 1
    x = x.reshape([1, *x.shape]) if single else x
    wide = [tuple(item) * (count if len(item) == 1 else 1) for item in (stride, padding, dilation)]
    options = {**dict(zip(("stride", "padding", "dilation"), wide, strict=True)), "groups": groups}
    if transposed:
        extra = tuple(output_padding) * (count if len(output_padding) == 1 else 1)
        sizes, more = [], []
        for n, step, pad, wide_step, k, rest in zip(x.shape[2:], *wide, w.shape[2:], extra, strict=True):
            span = wide_step * (k - 1) + 1
            sizes.append((n - 1) * step - 2 * pad + span + rest)
            more.append((0, (sizes[-1] + 2 * pad - span) // step + 1 - n))  # windows that only padding has
        x = x.emit("pad", widths=((0, 0), (0, 0), *more))
        z = x.emit("conv_input", w, shape=(x.shape[0], w.shape[1] * groups, *sizes), **options)
    else:
        z = x.emit("conv", w, **options)
    z = z if bias is None else z + z.lift(bias).reshape([-1, *[1] * count])
    return z.reshape(z.shape[1:]) if single else z


@rule("convolution_backward")
def _convolution_backward(
    g: Any, x: Any, w: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> tuple[Symbol | None, ...]:  # fmt: skip
    some = symbol_of(g, x, w)
    if transposed:
        raise UnsupportedOperation("the derivative of a transposed convolution inside of forward")
    g, x, w = some.lift(g), some.lift(x), some.lift(w)
    options = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation), "groups": groups}
    return (
        g.emit("conv_input", w, shape=tuple(x.shape), **options) if wanted[0] else None,
        g.emit("conv_weight", x, shape=tuple(w.shape), **options) if wanted[1] else None,
        g.sum([0, *range(2, g.dim())]) if wanted[2] else None,
    )


@rule("im2col")
def _im2col(x: Symbol, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Symbol:
    options = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    single = x.dim() == 3
    z = (x.reshape([1, *x.shape]) if single else x).emit("unfold", **{k: tuple(v) for k, v in options.items()})
    return z.reshape(z.shape[1:]) if single else z


@rule("col2im")
def _col2im(x: Symbol, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Symbol:
    options = {"size": size, "kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    single = x.dim() == 2
    z = (x.reshape([1, *x.shape]) if single else x).emit("fold", **{k: tuple(v) for k, v in options.items()})
    return z.reshape(z.shape[1:]) if single else z


# Pooling and interpolation: the same matrix along one dimension after the other.


def along(x: Symbol, dim: int, matrix: Tensor) -> Symbol:
    """Each fibre along a dimension times a fixed matrix (new size × old size)."""
    if tuple(matrix.shape) == (x.shape[dim],) * 2 and torch.equal(matrix, torch.eye(len(matrix)).to(matrix)):
        return x
    if bool(((matrix == 1).sum(1) == 1).all()) and float(matrix.abs().sum()) == len(matrix):  # entries are moved
        return x.emit("rows", x.index_of(matrix.argmax(1)), dim=dim)
    last = x.swapped(dim, x.dim() - 1)
    flat = last.reshape([-1, x.shape[dim]]).matmul(x.lift(matrix.T.contiguous()))
    return flat.reshape([*last.shape[:-1], len(matrix)]).swapped(dim, x.dim() - 1)


def _windows(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> list[list[int]]:
    """The places that each window of a pooling covers."""
    places = [[k * stride - padding + dilation * j for j in range(kernel)] for k in range(out)]
    return [[p for p in window if 0 <= p < size] for window in places]


def _adaptive(size: int, out: int) -> list[list[int]]:
    return [list(range(k * size // out, -(-(k + 1) * size // out))) for k in range(out)]


def _sizes(x: Symbol, out: Any, count: int) -> list[int]:
    """The new sizes of the last dimensions; None stays as it is."""
    out = [out] * count if isinstance(out, int) or out is None else list(out)
    return [x.shape[k - count] if size is None else size for k, size in enumerate(out)]


def _spread(argument: Any, count: int, default: Any) -> list[int]:
    argument = default if argument is None or argument == [] else argument
    items = [argument] if isinstance(argument, int) else list(argument)
    return items * count if len(items) == 1 else items


def _pooled_size(n: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """How many windows torch takes; the last one starts inside of the tensor or its padding on the left."""
    span = n + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil else 0)
    out = span // stride + 1
    return out - 1 if ceil and (out - 1) * stride >= n + padding else out


def _average(x: Symbol, dim: int, windows: Sequence[Sequence[int]], divisors: Sequence[float]) -> Symbol:
    """Sums over windows along a dimension, divided; disjoint windows of one size by a sum."""
    size, n = len(windows[0]), x.shape[dim]
    plain = [list(range(k * size, (k + 1) * size)) for k in range(len(windows))]
    if [list(w) for w in windows] == plain and len(set(divisors)) == 1:
        part = x.part(dim, 0, size * len(windows))
        split = part.reshape([*x.shape[:dim], len(windows), size, *x.shape[dim + 1 :]])
        return split.sum(dim + 1).scale(1 / divisors[0])
    matrix = torch.zeros(len(windows), n, dtype=torch.float64, device=x.builder.device)
    for row, (window, divisor) in enumerate(zip(windows, divisors, strict=True)):
        matrix[row, list(window)] = 1 / divisor
    return along(x, dim, matrix)


def _avg_pool(count: int) -> Any:
    def pooled(
        x: Symbol, kernel: Any, stride: Any = None, padding: Any = 0, ceil: bool = False, include: bool = True,
        divisor: int | None = None,
    ) -> Symbol:  # fmt: skip
        kernels, paddings = _spread(kernel, count, 1), _spread(padding, count, 0)
        strides = _spread(stride, count, kernels)
        for k, (size, step, pad) in enumerate(zip(kernels, strides, paddings, strict=True)):
            dim = x.dim() - count + k
            n = x.shape[dim]
            out = _pooled_size(n, size, step, pad, 1, ceil)
            windows = _windows(n, out, size, step, pad)
            whole = [min(i * step - pad + size, n + pad) - (i * step - pad) for i in range(out)]
            counts = whole if include else [len(w) for w in windows]
            x = _average(x, dim, windows, [1.0] * out if divisor else [float(c) for c in counts])
        return x.scale(1 / divisor) if divisor else x

    return pooled


def _adaptive_avg_pool(count: int) -> Any:
    def pooled(x: Symbol, out: Any) -> Symbol:
        for k, size in enumerate(_sizes(x, out, count)):
            dim = x.dim() - count + k
            windows = _adaptive(x.shape[dim], size)
            x = _average(x, dim, windows, [float(len(w)) for w in windows])
        return x

    return pooled


def _maxima(x: Symbol, windows: Sequence[Sequence[Sequence[int]]]) -> Symbol:
    """The largest entry of each window; entries of short windows are repeated, which changes no maximum."""
    first = x.dim() - len(windows)
    for k, along_one in enumerate(windows):  # a dimension becomes one of windows and one of places within
        longest, dim = max(map(len, along_one)), first + 2 * k
        places = [p for w in along_one for p in (*w, *[w[0]] * (longest - len(w)))]
        if places == list(range(len(places))):
            rows = x.part(dim, 0, len(places))
        else:
            rows = x.emit("rows", x.index_of(torch.tensor(places, device=x.builder.device)), dim=dim)
        x = rows.reshape([*x.shape[:dim], len(along_one), longest, *x.shape[dim + 1 :]])
    return x.emit("amax", dims=tuple(range(first + 1, x.dim(), 2)), keepdim=False)


def _max_pool(count: int) -> Any:
    def pooled(
        x: Symbol, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> tuple[Symbol, None]:
        kernels = _spread(kernel, count, 1)
        options = zip(
            x.shape[-count:], kernels, _spread(stride, count, kernels), _spread(padding, count, 0),
            _spread(dilation, count, 1), strict=True,
        )  # fmt: skip
        return _maxima(
            x, [_windows(n, _pooled_size(n, k, s, p, d, ceil), k, s, p, d) for n, k, s, p, d in options]
        ), None

    return pooled


def _adaptive_max_pool(count: int) -> Any:
    def pooled(x: Symbol, out: Any) -> tuple[Symbol, None]:
        sizes = _sizes(x, out, count)
        return _maxima(x, [_adaptive(n, m) for n, m in zip(x.shape[-count:], sizes, strict=True)]), None

    return pooled


for _count in (1, 2, 3):
    rule(f"avg_pool{_count}d")(_avg_pool(_count))
    rule(f"_adaptive_avg_pool{_count}d", f"adaptive_avg_pool{_count}d")(_adaptive_avg_pool(_count))
    rule(f"max_pool{_count}d_with_indices")(_max_pool(_count))
    rule(f"adaptive_max_pool{_count}d")(_adaptive_max_pool(_count))


def _interpolated(mode: str, count: int) -> Any:
    """Interpolation along each of the last dimensions, by the matrix that it is."""

    def computed(x: Symbol, out: Any, *arguments: Any) -> Symbol:
        align = arguments[0] if arguments and isinstance(arguments[0], bool) else False
        factors = [a for a in arguments if not isinstance(a, bool)]
        factors = list(factors[0]) if factors and isinstance(factors[0], list | tuple) else factors
        for k in range(count):
            dim = x.dim() - count + k
            factor = factors[k] if k < len(factors) else None
            size = out[k] if out is not None else math.floor(x.shape[dim] * float(factor or 1))
            eye = torch.eye(x.shape[dim], dtype=torch.float64)[:, None]  # unit vectors, as images of one row
            matrix = _resized(eye, size, mode, align, factor)
            x = along(x, dim, matrix.to(x.builder.device))
        return x

    return computed


def _resized(eye: Tensor, size: int, mode: str, align: bool, factor: float | None) -> Tensor:
    """The matrix of interpolating vectors, from the images of the unit vectors."""
    aten: Any = torch.ops.aten
    if mode == "bicubic":
        return aten.upsample_bicubic2d(eye[:, :, None], [1, size], align, None, factor)[:, 0, 0].T
    if mode == "linear":
        return aten.upsample_linear1d(eye, [size], align, factor)[:, 0].T
    exact = {"nearest": aten.upsample_nearest1d, "nearest-exact": aten._upsample_nearest_exact1d}[mode]
    return exact(eye, [size], factor)[:, 0].T


for _count, _linear in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    rule(f"upsample_{_linear}")(_interpolated("linear", _count))
    rule(f"upsample_nearest{_count}d")(_interpolated("nearest", _count))
    rule(f"_upsample_nearest_exact{_count}d")(_interpolated("nearest-exact", _count))
rule("upsample_bicubic2d")(_interpolated("bicubic", 2))


@rule("linalg_vector_norm")
def _vector_norm(x: Symbol, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Symbol:
    if order == math.inf:
        return x.scalar("abs").emit("amax", dims=x.dims(dims), keepdim=keepdim)
    if order == 1:
        return x.scalar("abs").sum(dims, keepdim)
    if order == 2:
        return x.scalar("square").sum(dims, keepdim).scalar("sqrt")
    if order <= 0:
        raise UnsupportedOperation(f"a norm of order {order:g}")
    return x.scalar("abs").scalar("power", order).sum(dims, keepdim).scalar("power", 1 / order)


@rule("_cdist_forward")
def _distances(a: Any, b: Any, order: float, *_: Any) -> Symbol:
    some = symbol_of(a, b)
    a, b = some.lift(a), some.lift(b)
    rows, columns = (
        [*x.shape[:-2], *lead, x.shape[-1]] for x, lead in ((a, (a.shape[-2], 1)), (b, (1, b.shape[-2])))
    )
    return _vector_norm(a.reshape(rows) - b.reshape(columns), order, -1)


def _loss(losses: Any) -> Any:
    """A loss of the differences of two tensors, with a reduction."""

    def computed(x: Any, y: Any, reduction: int = 1, *parameters: float) -> Symbol:
        return _reduced(losses(symbol_of(x, y).lift(x) - y, *parameters), reduction)

    return computed


def _smooth(x: Symbol, beta: float = 1.0) -> Symbol:
    return x.scalar("huber", beta).scale(1 / beta) if beta else x.scalar("abs")


RULES |= {
    "mse_loss": _loss(lambda x: x.scalar("square")),
    "l1_loss": _loss(lambda x: x.scalar("abs")),
    "huber_loss": _loss(lambda x, delta=1.0: x.scalar("huber", delta)),
    "smooth_l1_loss": _loss(_smooth),
}


@rule("binary_cross_entropy_with_logits")
def _logistic(x: Any, y: Any, weight: Any = None, positive: Any = None, reduction: int = 1) -> Symbol:
    """(1 − y) x + (1 + (w − 1) y) softplus(−x), with w the weight of positive samples."""
    x = symbol_of(x, y, weight, positive).lift(x)
    losses = (-x).scalar("softplus", 1.0)
    if positive is not None:
        losses = losses * (x.lift(y) * (x.lift(positive) - 1.0) + 1.0)
    losses = (1.0 - x.lift(y)) * x + losses
    return _reduced(losses if weight is None else losses * weight, reduction)


def _reduced(losses: Symbol, reduction: int) -> Symbol:
    """All losses (0), their mean (1) or their sum (2), as torch counts."""
    return (losses, losses.mean(), losses.sum())[reduction] if reduction else losses
