"""The judge of values: a program run with 200 bits, on arrays of balls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flint import arb, arb_mat, arb_series, ctx
from torch import Tensor

from bounds.test_scalars import JUDGES
from surefoot.program import PRIMITIVES, Node, Program, Scalar

BITS = 200
Array = Any

_MOVES = ["reshape", "permute", "flip", "slice", "embed", "pad", "expand", "gather", "rows", "cat", "unfold"]


def exactly(value: Tensor) -> Array:
    """The numbers of a tensor as balls of radius 0."""
    return mapped(lambda x: arb(float(x)), value.detach().double().numpy())


def mapped(function: Callable[..., Any], *arrays: Array) -> Array:
    """A function of the entries."""
    wide = np.broadcast_arrays(*arrays)
    out = np.empty(wide[0].shape, dtype=object)
    for place in np.ndindex(out.shape):
        out[place] = function(*(w[place] for w in wide))
    return out


def run(program: Program, values: Mapping[str, Tensor], noise: Mapping[int, Tensor] | None = None) -> list[Any]:
    """The tensors of all nodes; with given errors added, by node."""
    old, ctx.prec = ctx.prec, BITS
    try:
        tensors: list[Any] = []
        names = {k: name for name, k in program.inputs.items()}
        for node in program.nodes:
            if node.index in names:
                found = exactly(values[names[node.index]])
            elif node.primitive.kind == "constant":
                constant = program.constants[node.index]
                found = exactly(constant) if constant.is_floating_point() else constant
            else:
                found = computed(node, [tensors[k] for k in node.inputs])
            if noise is not None and node.index in noise:
                found = found + exactly(noise[node.index].expand(node.shape))
            tensors.append(found if isinstance(found, Tensor) else np.asarray(found, dtype=object))
        return tensors
    finally:
        ctx.prec = old


def computed(node: Node, t: list[Any]) -> Array:
    """One primitive."""
    name, options, primitive = node.primitive.name, node.options, node.primitive
    if name in _MOVES:
        real = t if name == "cat" else t[:1]
        flat = np.concatenate([[arb(0)], *(x.reshape(-1) for x in real)])
        places, start = [], 1
        for x in real:
            places.append(torch.arange(start, start + x.size).reshape(x.shape).double())
            start += x.size
        return flat[primitive.run([*places, *t[len(real) :]], **options).long().numpy()]
    if name in ("scatter", "rows_back", "fold"):  # by the places of the transposed move
        back = {"scatter": "gather", "rows_back": "rows", "fold": "unfold"}[name]
        rest = {k: v for k, v in options.items() if k not in ("shape", "size")}
        if name == "rows_back":
            rest = {"dim": options["dim"]}
        at = PRIMITIVES[back].run(
            [torch.arange(1, node.shape.numel() + 1).reshape(node.shape).double(), *t[1:]], **rest
        )
        out = np.array([arb(0)] * (node.shape.numel() + 1), dtype=object)
        for place, x in zip(at.long().reshape(-1).tolist(), t[0].reshape(-1), strict=True):
            out[place] += x
        return out[1:].reshape(node.shape)
    match name:
        case "add":
            return sum(t[1:], t[0])
        case "scale":
            return t[0] * arb(options["factor"])
        case "weigh" | "mul":
            return t[0] * t[1]
        case "sum":
            return np.asarray(t[0].sum(axis=tuple(options["dims"]), keepdims=options["keepdim"]), dtype=object)
        case "cumsum":
            return np.cumsum(t[0], axis=options["dim"])
        case "matmul":
            return np.matmul(t[0], t[1])
        case "conv":
            return convolved(t[0], t[1], **options)
        case "conv_input":  # a sum over the entries of the costate and the kernel: the transpose of conv
            return transposed_convolution(t[0], t[1], **options)
        case "solve":
            found = arb_mat(t[0].tolist()).solve(arb_mat(t[1].tolist())).table()
            return np.array(found, dtype=object).reshape(node.shape)
        case "select_like" | "pick_like":
            dims = tuple(options["dims"])
            chosen = t[1] >= t[1].max(axis=dims, keepdims=True)
            if (chosen.sum(axis=dims) != 1).any():
                raise NotImplementedError("ties")
            picked = np.where(chosen, t[0], arb(0))
            return picked if name == "select_like" else picked.sum(axis=dims, keepdims=True)
        case "scalar":
            return mapped(lambda x: scalar(options["function"], x), t[0])
        case "softmax" | "logsumexp":
            dim, x = options["dim"], t[0]
            mask = (
                np.broadcast_to(t[1].numpy() if isinstance(t[1], Tensor) else mapped(float, t[1]), x.shape)
                if t[1:]
                else None
            )
            top = mapped(
                lambda v: arb(max(map(float, np.atleast_1d(v)))), np.asarray(x.max(axis=dim, keepdims=True))
            )
            power = mapped(lambda v: v.exp(), x - top)
            power = power if mask is None else np.where(mask == 0, arb(0), power)
            total = power.sum(axis=dim, keepdims=True)
            if name == "softmax":
                return power / total
            found = mapped(lambda v: v.log(), total) + top
            return found if options["keepdim"] else found.squeeze(dim)
        case "normalize" | "rstd":
            dims, count = tuple(options["dims"]), math.prod(t[0].shape[d] for d in options["dims"])
            centred = t[0] - t[0].sum(axis=dims, keepdims=True) / count
            r = mapped(
                lambda v: (v / count + arb(options["eps"])).rsqrt(),
                (centred * centred).sum(axis=dims, keepdims=True),
            )
            return centred * r if name == "normalize" else r
        case "softmax_back":
            return t[1] * (t[0] - (t[0] * t[1]).sum(axis=options["dim"], keepdims=True))
        case "normalize_back":
            dims, count = tuple(options["dims"]), math.prod(t[0].shape[d] for d in options["dims"])
            mean = lambda x: x.sum(axis=dims, keepdims=True) / count  # noqa: E731
            return t[2] * (t[0] - mean(t[0]) - t[1] * mean(t[0] * t[1]))
        case "amax":
            return np.asarray(t[0].max(axis=tuple(options["dims"]), keepdims=options["keepdim"]), dtype=object)
        case "maximum":
            return np.where(t[0] > t[1], t[0], t[1])
        case "sort":
            order = np.sort(t[0], axis=options["dim"])
            return np.flip(order, options["dim"]) if options["descending"] else order
    raise NotImplementedError(name)


def convolved(x: Array, w: Array, stride: Any, padding: Any, dilation: Any, groups: int) -> Array:
    """By the definition: a sum over the places of the kernel."""
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=arb(0))
    size = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)
    ]
    parts = []
    for images, kernels in zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True):
        total = 0
        for place in itertools.product(*map(range, w.shape[2:])):
            where = [
                slice(k * d, k * d + s * (n - 1) + 1, s)
                for k, d, s, n in zip(place, dilation, stride, size, strict=True)
            ]
            window = images[(slice(None), slice(None), *where)]
            total = total + np.moveaxis(
                np.tensordot(window, kernels[(slice(None), slice(None), *place)], (1, 1)), -1, 1
            )
        parts.append(total)
    return np.concatenate(parts, 1)


def transposed_convolution(
    g: Array, w: Array, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    """Every entry of the costate, times the kernel, added where the kernel lay."""
    out = np.array(
        [arb(0)] * math.prod((*shape[:2], *(n + 2 * p for n, p in zip(shape[2:], padding, strict=True)))),
        dtype=object,
    )
    out = out.reshape(*shape[:2], *(n + 2 * p for n, p in zip(shape[2:], padding, strict=True)))
    for part, (costates, kernels) in enumerate(zip(np.split(g, groups, 1), np.split(w, groups, 0), strict=True)):
        channels = slice(part * w.shape[1], (part + 1) * w.shape[1])
        for place in itertools.product(*map(range, w.shape[2:])):
            where = [
                slice(k * d, k * d + s * (n - 1) + 1, s)
                for k, d, s, n in zip(place, dilation, stride, g.shape[2:], strict=True)
            ]
            added = np.moveaxis(np.tensordot(costates, kernels[(slice(None), slice(None), *place)], (1, 0)), -1, 1)
            out[(slice(None), channels, *where)] = out[(slice(None), channels, *where)] + added
    return out[(slice(None), slice(None), *(slice(p, p + n) for p, n in zip(padding, shape[2:], strict=True)))]


def scalar(function: Scalar, x: arb) -> arb:
    """A scalar function, or its derivative; of kinked ones at a point of a piece."""
    name, order, p = function.name, function.order, [arb(a) for a in function.parameters]
    series = arb_series([x, 1], prec=order + 1)
    if name == "power":
        whole = function.parameters[0]
        found = series ** int(whole) if whole == int(whole) and whole >= 0 else (p[0] * series.log()).exp()
        if whole == int(whole) and whole < 0:
            found = (series ** int(-whole)).inv()
    elif name == "softplus" and p:
        found = JUDGES[name](series * p[0]) / p[0]
    elif name in _PIECES:
        found = arb_series([0, 0], prec=order + 1) + _PIECES[name](series, x, *p)
    elif name == "softsign":
        found = JUDGES[name](series) if x > 0 else -JUDGES[name](-series)
    else:
        found = JUDGES[name](series)
    return found[order] * math.factorial(order)


_PIECES: dict[str, Callable[..., Any]] = {  # from a series and its first term
    "relu": lambda s, x: s if x > 0 else 0,
    "abs": lambda s, x: s if x > 0 else -s if x < 0 else 0 * s,
    "leaky_relu": lambda s, x, slope: s if x > 0 else slope * s,
    "relu6": lambda s, x: 6 if x > 6 else s if x > 0 else 0,
    "hardtanh": lambda s, x, low, high: high if x > high else s if x > low else low,
    "elu": lambda s, x, a: s if x > 0 else a * (s.exp() - 1),
    "celu": lambda s, x, a: s if x > 0 else a * ((s / a).exp() - 1),
    "selu": lambda s, x: arb(1.0507009873554805) * (s if x > 0 else arb(1.6732632423543772) * (s.exp() - 1)),
    "huber": lambda s, x, d: s * s / 2 if abs(x) <= d else d * ((s if x > 0 else -s) - d / 2),
    "hardsigmoid": lambda s, x: 1 if x > 3 else s / 6 + arb(1) / 2 if x > -3 else 0,
    "hardswish": lambda s, x: s if x > 3 else s * (s / 6 + arb(1) / 2) if x > -3 else 0,
}
