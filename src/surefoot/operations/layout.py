r"""Operations that move numbers around: reshape, permute, slice, concatenate, pad, copy, cut into windows.

Each is a matrix :math:`A` of zeros and ones with at most one entry 1 per row. If column :math:`j` has
:math:`c_j` ones, the columns are orthogonal and :math:`\|Ax\|_2^2 = \sum_j c_j x_j^2 \le \max_j c_j\,\|x\|_2^2`,
so the operator norm is :math:`\sqrt{\max_j c_j}`: reached at the entry that is copied most. Entries stay what they
are, so the peak is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, maximum
from surefoot.norms import patch_overlap
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import (
    ONE,
    ZERO,
    affine,
    aligned,
    batch,
    largest_peak,
    multiplicity,
    normalized_dim,
    root,
    same_norm,
    unless_along,
)
from surefoot.operations.record import Form, InSingle, Rows, Rule, declare, operation


def layout(*names: str, rows: Rows, **readings: Any) -> Callable[[Rule], Rule]:
    """Register operations that only move numbers: linear, without arithmetic, so without cost."""
    return operation(*names, form=Form.LAYOUT, rows=rows, **{"rounds": False, **readings})


@layout("aten.contiguous", "aten.clone", "aten.alias", "aten.lift_fresh_copy", "aten.to", "aten._to_copy",
        "aten.type_as", "aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout",
        "aten.neg", "aten.detach", rows=aligned, identity=True, lends=("other",))  # fmt: skip
def isometry(call: Call) -> Bounds:
    """The identity, or its negative: norm 1.

    Casts between floating-point types are the identity in real arithmetic; a cast to whole numbers jumps, and is
    refused. Dropout is the identity where it is off or drops nothing.
    """
    if call["train"] and call["p"]:
        raise call.refuse("dropout is random while training; call model.eval()")
    if not call.node.specs[0].dtype.is_floating_point:
        raise call.refuse("a tensor that varies over the domain is turned into whole numbers, which jump")
    moved = next(iter(call.tensors))  # the first argument; a second one only lends its type
    norms = {slot: ONE if slot == moved else ZERO for slot in call.tensors}
    return affine(call, norms, peak=call.tensors[moved].peak)


declare("aten.neg", form=Form.LINEAR, identity=False, single=InSingle.ENTRIES)
declare("aten.contiguous", "aten.clone", "aten.alias", single=InSingle.PERMUTED, in_order=True)
declare("aten.detach", single=InSingle.PERMUTED)


@layout("aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as",
        "aten.reshape_as", "aten.squeeze", "aten.unsqueeze", rows=batch("self", 1), lends=("other",),
        single=InSingle.PERMUTED, in_order=True)  # fmt: skip
def reshape(call: Call) -> Bounds:
    """The same numbers in the same order: norm 1. Another tensor only lends its shape.

    Rows: when the number of rows grows by a whole factor, every new row is a part of one old row; when it
    shrinks by a whole factor, a new row is made of consecutive old ones.
    """
    if call["dtype"] is not None:
        raise call.refuse("the bits of a tensor are read as another type: no function of real numbers")
    x = call["self"]
    norms = {slot: ONE if slot == "self" else ZERO for slot in call.slots}
    return affine(call, norms, rows=_regrouped(x, call), peak=x.peak)


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


def _unless_moved(use: Use) -> list[Slot]:
    """The argument, if its first dimension stays where it is.

    Where dimensions are exchanged, their strides are: those of a contiguous tensor differ, but for dimensions of
    size 1, which do not matter.
    """
    shape = use.shapes["self"]
    if not shape or not use.shape:
        return []
    before = torch.empty(shape, device="meta")
    after = use.node.target(before, *use.node.args[1:], **dict(use.node.kwargs))
    return ["self"] if after.shape[0] == before.shape[0] and after.stride()[0] == before.stride()[0] else []


@layout("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.mT", "aten.mH", "aten.adjoint",
        "aten.movedim", "aten.moveaxis", "aten.swapaxes", "aten.swapdims", rows=_unless_moved,
        single=InSingle.PERMUTED)  # fmt: skip
def permutation(call: Call) -> Bounds:
    """A permutation of the entries: norm 1. Rows stay rows when the first dimension stays where it is."""
    return affine(call, same_norm(call), peak=largest_peak(call))


layout("aten.flip", "aten.roll", rows=unless_along(key="dims"))(permutation)
layout("aten.fliplr", rows=batch("self"))(permutation)
layout("aten.channel_shuffle", "aten.pixel_shuffle", "aten.pixel_unshuffle", rows=batch("self", 4))(permutation)
layout("aten.flipud", "aten.rot90", rows=lambda use: ())(permutation)


@layout("aten.slice", "aten.narrow", "aten.select", rows=unless_along(), single=InSingle.MOVED)
@layout("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split",
        "aten.unsafe_split", "aten.unsafe_split_with_sizes", rows=unless_along(),
        single=InSingle.PERMUTED)  # fmt: skip
def selection(call: Call) -> Bounds:
    """Some of the entries, each at most once: norm 1, or 0 if nothing is left. The pieces of a split count as one
    vector.

    Rows stay rows when it selects along another dimension than the first; triangles of matrices keep entries in
    place.
    """
    return affine(call, same_norm(call, ONE if call.numel else ZERO), peak=largest_peak(call))


def _off_diagonal(use: Use) -> list[Slot]:
    dims = [normalized_dim(use[key], len(use.shapes["self"])) for key in ("dim1", "dim2")]
    return [] if 0 in dims else ["self"]


layout("aten.diagonal", rows=_off_diagonal)(selection)
layout("aten.tril", "aten.triu", rows=aligned)(selection)


@layout("getitem", rows=batch("a", 1), single=InSingle.MOVED)
def item(call: Call) -> Bounds:
    """One of several results: norm 1, with the row spreads of all of them together."""
    (whole,) = call.slots.values()
    if not call.node.specs[0].dtype.is_floating_point:
        raise call.refuse(
            "places of maxima and other whole numbers jump as the tensor varies: use the values only"
        )
    return affine(call, same_norm(call), rows=whole.rows, peak=whole.peak)


@layout("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.repeat", "aten.tile",
        rows=lambda use: [slot for slot in aligned(use) if slot == "self"], lends=("other",),
        single=InSingle.MOVED)  # fmt: skip
def copies(call: Call) -> Bounds:
    """Every entry copied c times: norm √c. Another tensor only lends its shape."""
    x = call["self"]
    count = math.prod(call.shape) // max(1, x.numel)
    norms = {slot: root(count) if slot == "self" else ZERO for slot in call.slots}
    return affine(call, norms, peak=x.peak)


def _repeated_within(use: Use) -> list[Slot]:
    """The argument, unless its first dimension is repeated; without a dimension it is flattened before."""
    return [] if use["dim"] is None or normalized_dim(use["dim"], len(use.shapes["self"])) == 0 else ["self"]


@layout("aten.repeat_interleave", rows=_repeated_within, selects=("repeats",))
def repeat_interleave(call: Call) -> Bounds:
    """Every entry copied ``repeats`` times, or as often as its place along ``dim`` says: norm √ of the largest."""
    repeats = call["repeats"]
    if isinstance(repeats, Enclosure):
        if not isinstance(repeats.value, torch.Tensor) or not repeats.is_constant:
            raise call.refuse("numbers of repeats that are not known are not covered; expand and reshape instead")
        repeats = int(repeats.value.max()) if repeats.value.numel() else 0
    return affine(call, {"self": root(repeats)}, peak=call["self"].peak)


def _diagonal_within(use: Use) -> list[Slot]:
    """The argument, if its first dimension stays first."""
    dims = [normalized_dim(use[key], len(use.shape)) for key in ("dim1", "dim2")]
    return [] if 0 in dims or len(use.shapes["self"]) < 2 else ["self"]


_JOINED_ALONG = {"aten.hstack": 1, "aten.vstack": 0, "aten.dstack": 2, "aten.column_stack": 1}


def _joined_within(use: Use) -> list[Slot]:
    """All arguments, unless they are joined along the first dimension."""
    rank = len(use.shape)
    dim = min(_JOINED_ALONG.get(use.op, normalized_dim(use["dim"] or 0, rank)), rank - 1)
    within = dim != 0 and all(shape[:1] == use.shape[:1] for shape in use.shapes.values())
    return list(use.shapes) if within else []


layout("aten.diag_embed", rows=_diagonal_within)(permutation)


@layout("aten.cat", "aten.concat", "aten.stack", "aten.hstack", "aten.vstack", "aten.dstack", "aten.column_stack",
        rows=_joined_within, single=InSingle.MOVED)  # fmt: skip
def concatenation(call: Call) -> Bounds:
    r"""Arguments side by side: norm 1 each, in orthogonal parts of the result.

    So :math:`\|Dz[v]\|^2 = \sum_k \|Dx_k[v]\|^2`, and by Minkowski's inequality the Lipschitz vector is the
    root of the sum of squares.
    """
    norms = dict.fromkeys(call.tensors, ONE)
    return affine(call, norms, orthogonal=True, peak=largest_peak(call, call.tensors))


def _amounts(use: Use) -> list[int]:
    """How much is padded, in pairs for the last dimensions."""
    return list(use["pad"] if use["pad"] is not None else use["padding"])


def _unless_padded_first(use: Use) -> list[Slot]:
    amounts, rank = _amounts(use), len(use.shapes["self"])
    return ["self"] if len(amounts) < 2 * rank or not any(amounts[2 * rank - 2 :]) else []


@layout("aten.pad", "aten.constant_pad_nd", "aten.reflection_pad1d", "aten.reflection_pad2d",
        "aten.reflection_pad3d", "aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d",
        rows=_unless_padded_first)  # fmt: skip
def pad(call: Call) -> Bounds:
    """Padding with a constant: norm 1, and the constant's entries at zero. Reflection, replication and circular
    padding copy entries: √ of the largest number of copies, counted.

    Negative amounts cut off.
    """
    x, amounts = call["self"], _amounts(call)
    constant = call.node.op == "aten.constant_pad_nd" or call["mode"] == "constant"
    if constant:
        value = Magnitude.of(abs(float(call["value"] or 0.0)))
        outside = call.numel - _kept(x.shape, amounts)
        peak = maximum(x.peak, value) if outside else x.peak
        return affine(call, {"self": ONE}, offset=value * root(outside), peak=peak)
    return affine(call, {"self": root(_pad_copies(call, x, amounts))}, peak=x.peak)


def _kept(shape: tuple[int, ...], amounts: list[int]) -> int:
    """How many entries negative amounts of padding leave."""
    kept = list(shape)
    for k in range(len(amounts) // 2):
        kept[-1 - k] = max(0, kept[-1 - k] + min(0, amounts[2 * k]) + min(0, amounts[2 * k + 1]))
    return math.prod(kept)


def _pad_copies(call: Call, x: Enclosure, amounts: list[int]) -> int:
    """How often padding uses the most copied entry, found by padding the positions of one channel."""
    sides = x.shape[len(x.shape) - len(amounts) // 2 :]
    positions = torch.arange(math.prod(sides), dtype=torch.float64).reshape(1, 1, *sides)
    return multiplicity(call.node.target(positions, *call.node.args[1:], **dict(call.node.kwargs)), call.numel)


@layout("aten.im2col", rows=batch("self", 4))
def windows(call: Call) -> Bounds:
    """Patches of an image as columns: √c, with c the number of patches that contain the most covered entry.

    Adding columns up to an image is the adjoint: the same norm, and up to c numbers in each sum.
    """
    x, image = call["self"], call["self"].shape[-2:] if call.node.op == "aten.im2col" else call.shape[-2:]
    settings = [tuple(call[key]) for key in ("kernel_size", "stride", "padding", "dilation")]
    overlap = patch_overlap(image, *settings)
    sums = 1 if call.node.op == "aten.im2col" else overlap
    return affine(call, {"self": root(overlap)}, peak=x.peak * float(sums), reduction=sums)


layout("aten.col2im", rows=batch("self", 3), rounds=True)(windows)


@layout("aten.unfold", rows=unless_along(key="dimension"))
def sliding(call: Call) -> Bounds:
    """Windows along one dimension: √ of how many contain the most covered entry."""
    x = call["self"]
    dim = normalized_dim(call["dimension"], len(x.shape))
    side = x.shape[dim] if x.shape else 1
    overlap = patch_overlap((side,), (call["size"],), (call["step"],)) if call.numel else 0
    return affine(call, {"self": root(overlap)}, peak=x.peak)
