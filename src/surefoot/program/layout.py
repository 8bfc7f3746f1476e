"""Operations of ATen that move, pick and write entries, in terms of primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import CaptureError, UnsupportedOperation
from surefoot.program.decompositions import RULES, Rule, rule, symbol_of
from surefoot.program.symbol import Symbol


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_reshape_copy", "view_copy")
def _view(x: Symbol, shape: Any, *_: Any) -> Symbol:
    if isinstance(shape, torch.dtype):
        raise UnsupportedOperation("reading a tensor as numbers of another type (view(dtype))")
    return x.reshape(shape)


@rule("unsqueeze")
def _unsqueeze(x: Symbol, dim: int) -> Symbol:
    dim = dim % (x.dim() + 1)
    return x.reshape([*x.shape[:dim], 1, *x.shape[dim:]])


@rule("squeeze")
def _squeeze(x: Symbol, dims: Any = None) -> Symbol:
    chosen = x.dims(dims)
    return x.reshape([size for k, size in enumerate(x.shape) if k not in chosen or size != 1])


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


@rule("cat", "concat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Symbol:
    some = symbol_of(*tensors)
    parts = [some.lift(t) for t in tensors if tuple(t.shape) != (0,)]  # torch skips empty vectors
    return parts[0].emit("cat", *parts[1:], dim=dim % parts[0].dim())


@rule("stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Symbol:
    some = symbol_of(*tensors)
    return _cat([_unsqueeze(some.lift(t), dim) for t in tensors], dim % (some.dim() + 1))


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


@rule("masked_scatter")
def _masked_scatter(x: Any, mask: Any, values: Any) -> Symbol:
    x = symbol_of(x, values).lift(x)
    places = places_of(x)[fixed(mask).expand(x.shape)]
    return scattered(x, places, x.lift(values).reshape([-1]).part(0, 0, places.numel()))


@rule("scatter", "scatter_reduce")
def _scatter(x: Any, dim: int, index: Any, values: Any, reduce: str = "", include_self: bool = True) -> Symbol:
    if reduce not in ("", "sum", "add"):
        raise UnsupportedOperation(f"scatter with reduce='{reduce}'")
    x = symbol_of(x, values).lift(x)
    places = torch.gather(places_of(x), dim, fixed(index)) if x.dim() else places_of(x)
    if isinstance(values, Tensor | Symbol) and values.shape != places.shape:
        region = tuple(slice(0, size) for size in places.shape)
        values = values[region] if isinstance(values, Tensor) else values.gather(places_of(values)[region])
    return scattered(x, places, values, accumulate=bool(reduce))


@rule("index_add")
def _index_add(x: Any, dim: int, index: Any, values: Any, *, alpha: float = 1) -> Symbol:
    x = symbol_of(x, values).lift(x)
    rows = x.lift(values).emit("rows_back", x.index_of(fixed(index)), dim=dim % x.dim(), size=x.shape[dim])
    return x + rows * alpha


_SAME = "alias clone contiguous detach lift_fresh _to_copy to lift_fresh_copy positive"
RULES |= {name: lambda x, *_, **__: x for name in _SAME.split()}
RULES |= {
    "expand": lambda x, shape, **_: x.expand(shape),
    "broadcast_to": lambda x, shape: x.expand(shape),
    "permute": lambda x, dims: x.permute(dims),
    "transpose": lambda x, a, b: x.swapped(a, b) if x.dim() else x,
    "t": lambda x: x.swapped(0, 1) if x.dim() > 1 else x,
    "flip": lambda x, dims: x.emit("flip", dims=x.dims(dims)) if dims else x,
    "unbind": lambda x, dim=0: [_select(x, dim, k) for k in range(x.shape[dim])],
    "scatter_add": lambda x, dim, index, values: _scatter(x, dim, index, values, "sum"),
    "copy": lambda x, values, *_: symbol_of(x, values).lift(values).expand(x.shape),
    "fill": lambda x, value: x.lift(value).expand(x.shape),
    "zero": lambda x: x.lift(0.0).expand(x.shape),
}


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
