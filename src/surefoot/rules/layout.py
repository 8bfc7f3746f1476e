r"""Operations that move numbers around: reshape, permute, slice, concatenate, pad, copy, look up.

Each is a matrix :math:`A` of zeros and ones with at most one entry 1 per row. If no column has more than
:math:`c` ones, :math:`\|Ax\|_2^2 = \sum_j c_j x_j^2 \le c\|x\|_2^2`, so the operator norm is
:math:`\sqrt{\max_j c_j}`: reached at the entry that is copied most. Entries stay what they are, so the peak is
kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from surefoot.calculus.enclosure import Enclosure
from surefoot.magnitude import Magnitude, maximum
from surefoot.rules.common import ONE, ZERO, affine, largest_peak, multiplicity, normalized_dim, root, same_norm
from surefoot.rules.registry import Bounds, Call, register_rule


@register_rule(
    "aten.contiguous", "aten.clone", "aten.alias", "aten.lift_fresh_copy", "aten.to", "aten._to_copy",
    "aten.type_as", "aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.neg", "aten.detach",
)  # fmt: skip
def isometry(call: Call) -> Bounds:
    """The identity, or its negative: norm 1. Casts are the identity in real arithmetic; dropout is captured
    only where it is off.
    """
    return affine(call, same_norm(call), rowwise=True, peak=largest_peak(call))


@register_rule("aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as",
               "aten.squeeze", "aten.unsqueeze")  # fmt: skip
def reshape(call: Call) -> Bounds:
    """The same numbers in the same order: norm 1.

    Rows: when the first dimension is split or kept, every new row is a part of one old row; when whole rows are
    joined, a new row is made of consecutive old ones.
    """
    x = call["self"] if call["self"] is not None else call["input"]
    rows = _regrouped(x, call)
    return affine(call, same_norm(call), rows=rows, peak=largest_peak(call))


def _regrouped(x: Enclosure, call: Call) -> Magnitude | None:
    old, new = (x.shape or (1,))[0], (call.shape or (1,))[0]
    if x.is_constant or not x.shape or not call.shape or not old or not new:
        return None
    spreads = x.row_spread(old)
    if new % old == 0:
        return Magnitude(spreads.log2.repeat(new // old))
    if old % new == 0:
        return Magnitude(spreads.log2.reshape(new, old // new)).norm(axis=1)
    return None


@register_rule("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.mT", "aten.movedim",
               "aten.swapaxes", "aten.flip", "aten.roll", "aten.channel_shuffle", "aten.pixel_shuffle",
               "aten.pixel_unshuffle")  # fmt: skip
def permutation(call: Call) -> Bounds:
    """A permutation of the entries: norm 1. Row-wise when the first dimension stays where it is."""
    return affine(call, same_norm(call), rowwise=_first_stays(call), peak=largest_peak(call))


def _first_stays(call: Call) -> bool:
    x = call["self"]
    rank = len(x.shape)
    match call.node.op:
        case "aten.permute":
            return bool(normalized_dim(call["dims"][0], rank) == 0)
        case "aten.transpose":
            return 0 not in (normalized_dim(call["dim0"], rank), normalized_dim(call["dim1"], rank))
        case "aten.swapaxes":
            return 0 not in (normalized_dim(call["axis0"], rank), normalized_dim(call["axis1"], rank))
        case "aten.mT":
            return rank > 2
        case "aten.flip" | "aten.roll":
            dims = [normalized_dim(d, rank) for d in call["dims"] or [0]]
            return 0 not in dims
        case "aten.channel_shuffle" | "aten.pixel_shuffle" | "aten.pixel_unshuffle":
            return rank > 3
        case _:
            return False


@register_rule("aten.slice", "aten.narrow", "aten.select", "aten.split", "aten.split_with_sizes", "aten.chunk",
               "aten.unbind", "aten.tensor_split", "aten.diagonal", "aten.tril", "aten.triu",
               "getitem")  # fmt: skip
def selection(call: Call) -> Bounds:
    """Some of the entries, each at most once: norm 1 (0 if nothing is left). The pieces of a split count as one
    vector. Row-wise when it selects along another dimension than the first.
    """
    if call.node.op == "getitem":
        (whole,) = call.slots.values()
        return affine(call, same_norm(call), rows=whole.rows, peak=largest_peak(call))
    x = call["self"]
    rank = len(x.shape)
    dim = normalized_dim(call["dim"] if call["dim"] is not None else call["dim1"] or 0, rank)
    inside = call.node.op in ("aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk",
                              "aten.select", "aten.unbind", "aten.tensor_split")  # fmt: skip
    triangle = call.node.op in ("aten.tril", "aten.triu") and rank > 2
    return affine(call, same_norm(call), rowwise=(inside and dim != 0) or triangle, peak=largest_peak(call))


@register_rule("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.repeat", "aten.tile")
def copies(call: Call) -> Bounds:
    """Every entry copied c times: norm √c."""
    x = call["self"]
    count = math.prod(call.shape) // max(1, x.numel)
    aligned = len(x.shape) == len(call.shape) and x.shape[:1] == call.shape[:1]
    norms = {"self": root(count)}
    return affine(call, norms, rowwise=aligned, peak=largest_peak(call))


@register_rule("aten.repeat_interleave")
def repeat_interleave(call: Call) -> Bounds:
    """Every entry copied ``repeats`` times: norm √repeats."""
    repeats = call["repeats"]
    if not isinstance(repeats, int):
        raise call.refuse("only a whole number of repeats is covered; expand and reshape instead")
    dim = call["dim"]
    rowwise = dim is not None and normalized_dim(dim, len(call["self"].shape)) != 0
    return affine(call, {"self": root(repeats)}, rowwise=rowwise, peak=largest_peak(call))


@register_rule("aten.cat", "aten.stack", "aten.concat", "aten.hstack", "aten.vstack")
def concatenation(call: Call) -> Bounds:
    r"""Arguments side by side: norm 1 each, in orthogonal parts of the result.

    So :math:`\|Dz[v]\|^2 = \sum_k \|Dx_k[v]\|^2`, and by Minkowski's inequality the Lipschitz vector is the
    root of the sum of squares. Row-wise when joined along another dimension than the first.
    """
    rank = len(call.shape)
    along = {"aten.hstack": min(1, rank - 1), "aten.vstack": 0}.get(call.node.op)
    dim = normalized_dim(call["dim"] or 0, rank) if along is None else along
    return affine(call, same_norm(call), rowwise=dim != 0, orthogonal=True, peak=largest_peak(call))


@register_rule("aten.pad", "aten.constant_pad_nd")
def pad(call: Call) -> Bounds:
    """Padding with a constant: norm 1, and the constant's entries at zero. Other modes copy entries: counted."""
    x, value, mode = call["self"], call["value"] or 0.0, call["mode"] or "constant"
    amounts = call["pad"]
    outside = call.numel - x.numel
    rowwise = len(amounts) < 2 * len(x.shape)
    peak = maximum(largest_peak(call), Magnitude.of(abs(float(value))))
    if mode == "constant":
        offset = root(max(outside, 0)) * abs(float(value))
        return affine(call, {"self": ONE}, offset=offset, rowwise=rowwise, peak=peak)
    return affine(call, {"self": root(_pad_copies(call, x))}, rowwise=rowwise, peak=largest_peak(call))


@register_rule("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d",
               "aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d")  # fmt: skip
def copying_pad(call: Call) -> Bounds:
    """Reflection, replication and circular padding copy entries: √ of the largest number of copies, counted."""
    x = call["self"]
    return affine(call, {"self": root(_pad_copies(call, x))}, rowwise=True, peak=largest_peak(call))


def _pad_copies(call: Call, x: Enclosure) -> int:
    """How often padding uses the most copied entry, found by padding the positions of one sample."""
    shape = (1, 1, *x.shape[2:]) if len(x.shape) > 2 else x.shape
    positions = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    args = [positions, *call.node.args[1:]]
    return multiplicity(call.node.target(*args, **dict(call.node.kwargs)), call.numel)


@register_rule("aten.embedding", "aten.index_select", "aten.index", "aten.gather", "aten.take_along_dim")
def lookup(call: Call) -> Bounds:
    """Rows or entries chosen by indices: √ of how often the most frequent one is chosen.

    Where the indices are not known, each could be the same: √ of their number.
    """
    if call.node.op == "aten.embedding":
        indices = call["indices"]
        count = multiplicity(indices.value, math.prod(indices.shape))
        return affine(call, {"weight": root(count)}, peak=largest_peak(call))
    if call.node.op == "aten.index":
        return affine(call, {"self": root(_index_copies(call))}, peak=largest_peak(call))
    index = call["index"] if call["index"] is not None else call["indices"]
    if call.node.op == "aten.index_select":
        count = multiplicity(index.value, math.prod(index.shape))
        rowwise = normalized_dim(call["dim"], len(call["self"].shape)) != 0
        return affine(call, {"self": root(count)}, rowwise=rowwise, peak=largest_peak(call))
    dim = normalized_dim(call["dim"], len(call["self"].shape))
    most = index.shape[dim]  # along the other dimensions each entry is read at its own place
    return affine(call, {"self": root(most)}, peak=largest_peak(call))


def _index_copies(call: Call) -> int:
    """How often advanced indexing reads the most read entry, found by indexing positions."""
    x, indices = call["self"], call["indices"]
    values = [None if i is None else i.value for i in indices]
    if any(i is not None and v is None for i, v in zip(indices, values, strict=True)):
        return call.numel
    positions = torch.arange(x.numel).reshape(x.shape)
    device = next((v.device for v in values if v is not None), positions.device)
    return multiplicity(torch.ops.aten.index.Tensor(positions.to(device), values), call.numel)


@register_rule("aten.where")
def where(call: Call) -> Bounds:
    """A fixed choice between two tensors, entry by entry: norm 1 each (√c for a tensor broadcast c times), in
    orthogonal parts of the result. A condition that varies would be a kink or a jump, and is refused.
    """
    _fixed(call, call["condition"])
    norms = {slot: root(_copies(e, call)) for slot, e in call.slots.items()}
    constants = [v for v in (call["self"], call["other"]) if isinstance(v, int | float)]
    offset = Magnitude.of(max([abs(float(v)) for v in constants], default=0.0)) * root(call.numel)
    peak = maximum(largest_peak(call), *[Magnitude.of(abs(float(v))) for v in constants])
    return affine(call, norms, offset=offset, orthogonal=True, rowwise=_aligned(call), peak=peak)


@register_rule("aten.masked_fill")
def masked_fill(call: Call) -> Bounds:
    """Entries under a fixed mask replaced by a constant: norm 1."""
    _fixed(call, call["mask"])
    value = call["value"]
    size = value.peak if isinstance(value, Enclosure) else Magnitude.of(abs(float(value)))
    if isinstance(value, Enclosure) and not value.is_constant:
        raise call.refuse("filling with a value that varies is not covered; use torch.where")
    norms = {"self": root(_copies(call["self"], call))}
    peak = maximum(call["self"].peak, size)
    return affine(call, norms, offset=size * root(call.numel), rowwise=_aligned(call), peak=peak)


def _fixed(call: Call, condition: Any) -> None:
    if isinstance(condition, Enclosure) and not condition.is_constant:
        raise call.refuse("the condition varies over the domain: a jump or a kink that no rule bounds")


def _copies(e: Enclosure, call: Call) -> int:
    return call.numel // max(1, e.numel)


def _aligned(call: Call) -> bool:
    return all(e.shape[:1] == call.shape[:1] and len(e.shape) == len(call.shape) for e in call.varying.values())


@register_rule(
    "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros", "aten.new_ones", "aten.new_full"
)
def filled(call: Call) -> Bounds:
    """A constant whose shape comes from a tensor: norm 0."""
    sizes = {"aten.ones_like": 1.0, "aten.new_ones": 1.0}
    value = call["fill_value"] if call["fill_value"] is not None else sizes.get(call.node.op, 0.0)
    size = Magnitude.of(abs(float(value)))
    return affine(call, same_norm(call, ZERO), offset=size * root(call.numel), peak=size)
