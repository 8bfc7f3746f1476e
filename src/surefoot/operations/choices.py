r"""What fixed indices, masks and conditions choose: embeddings, advanced indexing, ``where``.

Matrices of zeros and ones as in :mod:`surefoot.operations.layout`: the norm is the root of how often the most
chosen entry is chosen, counted where the indices are known.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, maximum
from surefoot.norms import spectral_norm
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import (
    ONE,
    ZERO,
    affine,
    aligned,
    broadcast_copies,
    broadcast_dims,
    largest_peak,
    multiplicity,
    normalized_dim,
    root,
    row_multiplicities,
    same_norm,
    size_of,
    unless_along,
)
from surefoot.operations.gram import lookup_rows, whole_table
from surefoot.operations.layout import layout
from surefoot.operations.record import Form, GramRows, InSingle, operation
from surefoot.operations.written_out import written_out
from surefoot.torch_private import bags

_LARGEST_BAGS = 2**20  # entries of the matrix of bags that is formed


@layout("aten.embedding", rows=lambda use: ("indices",), selects=("indices",), single=InSingle.MOVED,
        gram=GramRows(("weight",), lookup_rows, lambda use: not use["scale_grad_by_freq"] and not use["sparse"],
                      whole_table)
        )  # fmt: skip
def embedding(call: Call) -> Bounds:
    """Rows of the weight chosen by ids: √ of how often the most frequent id occurs, in all and in each sample.

    Where the ids are not known, all could be the same: √ of their number.
    """
    w, ids = call["weight"], call["indices"]
    count = multiplicity(ids.value, math.prod(ids.shape))
    rows = None
    if isinstance(ids.value, Tensor) and ids.shape:
        rows = Magnitude.of(row_multiplicities(ids.value)).sqrt() * w.spread
    return affine(call, {"weight": root(count)}, rows=rows, peak=w.peak)


def _bag_form(node: Node) -> Form:
    weighted, largest = node.arguments["per_sample_weights"] is not None, node.arguments["mode"] == 2
    return Form.OTHER if weighted or largest else Form.LINEAR


written_out("aten.embedding_bag", when=lambda graph, node: _bag_form(node) is Form.OTHER)(bags)


@operation("aten.embedding_bag", form=_bag_form, selects=("indices", "offsets"))
def embedding_bag(call: Call) -> Bounds:
    r"""Sums or means of rows of the weight: :math:`Z = AW` with the counts of ids per bag, divided for means by
    the number of ids of the bag. The norm is :math:`\|A\|_2`, or :math:`\sqrt{\|A\|_1\|A\|_\infty}` for a large
    matrix.
    """
    w, ids, offsets, mode = call["weight"], call["indices"], call["offsets"], call["mode"]
    if mode == 2 or call["per_sample_weights"] is not None:
        raise call.refuse("maxima and weighted sums of rows have bounds where they are written out, not in one")
    if not isinstance(ids.value, Tensor) or not isinstance(offsets.value, Tensor):
        return affine(call, {"weight": Magnitude.of(float(ids.numel))}, reduction=max(1, ids.numel))
    matrix = _bags(call, ids.value.reshape(-1), offsets.value, mode == 1, w.shape[0])
    norm = Magnitude.zero()
    if matrix.numel() and matrix.numel() <= _LARGEST_BAGS:
        norm = Magnitude.of(spectral_norm(matrix))
    elif matrix.numel():
        norm = Magnitude.of(float(matrix.sum(0).max() * matrix.sum(1).max())).sqrt()
    return affine(call, {"weight": norm * (1 + 1e-12)}, reduction=max(1, ids.numel))


def _bags(call: Call, ids: Tensor, offsets: Tensor, mean: bool, size: int) -> Tensor:
    """How much of each row of the weight each bag is made of."""
    starts = offsets[:-1] if call["include_last_offset"] else offsets
    place = torch.arange(len(ids), device=ids.device)
    bag = torch.bucketize(place, starts.to(place.dtype), right=True) - 1
    keep = (bag >= 0) & (ids != (-1 if call["padding_idx"] is None else call["padding_idx"] % size))
    matrix = torch.zeros(len(starts), size, dtype=torch.float64, device=ids.device)
    matrix.index_put_((bag[keep], ids[keep]), torch.ones(()).to(matrix), accumulate=True)
    return matrix / matrix.sum(1, keepdim=True).clamp(min=1) if mean else matrix


@layout("aten.index_select", rows=unless_along(), selects=("index",))
def index_select(call: Call) -> Bounds:
    """Slices chosen by indices: √ of how often the most frequent one is chosen."""
    index = call["index"]
    count = multiplicity(index.value, math.prod(index.shape))
    return affine(call, {"self": root(count)}, peak=call["self"].peak)


def _first_taken_whole(use: Use) -> list[Slot]:
    """The argument, if its first dimension is taken whole and stays first, the indices being side by side."""
    used = [k for k, index in enumerate(use["indices"]) if index is not None]
    return ["self"] if used and used[0] > 0 and used == list(range(used[0], used[-1] + 1)) else []


@layout("aten.index", rows=_first_taken_whole, selects=("indices",))
def advanced_indexing(call: Call) -> Bounds:
    """Entries chosen by several tensors of indices: √ of how often the most read entry is read, found by indexing
    positions; if an index is not known, √ of the number of places that are read.
    """
    x, indices = call["self"], call["indices"]
    used = [k for k, index in enumerate(indices) if index is not None]
    values: list[Any] = [None if index is None else index.value for index in indices]
    if any(values[k] is None for k in used):
        count = math.prod(torch.broadcast_shapes(*(indices[k].shape for k in used)))
    else:
        # dimensions that are taken whole do not change how often an entry is read; a mask may stand for several
        masked = any(values[k].dtype == torch.bool for k in used)
        shape = [n if masked or k in used else 1 for k, n in enumerate(x.shape)]
        positions = torch.arange(math.prod(shape), device=values[used[0]].device).reshape(shape)
        count = multiplicity(torch.ops.aten.index.Tensor(positions, values), call.numel)
    return affine(call, {"self": root(count)}, peak=x.peak)


@layout("aten.gather", "aten.take_along_dim",
        rows=lambda use: [] if use["dim"] is None or not use.shape else unless_along()(use),
        selects=("index", "indices"))  # fmt: skip
def gather(call: Call) -> Bounds:
    """Along one dimension, entries chosen by indices, each at its own place along the others.

    The norm is √ of how often the most read entry is read; if the indices are not known, of how many are read
    along the dimension, times the copies of a broadcast argument.
    """
    x, index = call["self"], call["index"] if call["index"] is not None else call["indices"]
    if call["dim"] is None:
        return affine(call, {"self": root(multiplicity(index.value, index.numel))}, peak=x.peak)
    rank = len(call.shape)
    if rank == 0:
        return affine(call, {"self": ONE}, peak=x.peak)
    dim = normalized_dim(call["dim"], rank)
    full = list(call.shape)
    full[dim] = x.shape[dim]
    if not isinstance(index.value, Tensor):
        copies = broadcast_copies(x.shape, full) if call.node.op == "aten.take_along_dim" else 1
        return affine(call, {"self": root(call.shape[dim] * copies)}, peak=x.peak)
    place = index.value.expand(call.shape) if call.node.op == "aten.take_along_dim" else index.value
    shape = full if call.node.op == "aten.take_along_dim" else list(x.shape)
    counts = torch.zeros(shape, dtype=torch.int64, device=place.device)
    counts.scatter_add_(dim, place, torch.ones_like(place))
    repeated = broadcast_dims(x.shape, shape)
    counts = counts.sum(dim=repeated) if repeated else counts
    most = int(counts.max()) if counts.numel() else 0
    return affine(call, {"self": root(most)}, peak=x.peak)


@layout("aten.where", rows=aligned, selects=("condition",))
def where(call: Call) -> Bounds:
    """A fixed choice between two tensors, entry by entry, in orthogonal parts of the result.

    The norm is √ of how often an entry is chosen: 1, or more for a tensor that is broadcast. A condition that
    varies would be a kink or a jump, and is refused.
    """
    condition = call["condition"]
    _fixed(call, condition)
    norms, offset, peak = {}, ZERO, ZERO
    for slot, when in (("self", True), ("other", False)):
        argument = call[slot]
        peak = maximum(peak, size_of(argument))
        if isinstance(argument, Enclosure):
            norms[slot] = root(_chosen(condition, when, argument.shape, call))
        else:
            offset = offset + size_of(argument) * root(_chosen(condition, when, (), call))
    return affine(call, norms, offset=offset, orthogonal=True, peak=peak)


@layout("aten.masked_fill", rows=aligned, selects=("mask",))
def masked_fill(call: Call) -> Bounds:
    """Entries under a fixed mask replaced by a constant: norm 1, or √ of how often an entry is left in a broadcast
    argument.
    """
    x, mask, value = call["self"], call["mask"], call["value"]
    _fixed(call, mask)
    if isinstance(value, Enclosure) and not value.is_constant:
        raise call.refuse("filling with a value that varies is not covered; use torch.where")
    size = size_of(value)
    replaced = _chosen(mask, True, (), call)
    norms = {"self": root(_chosen(mask, False, x.shape, call))}
    peak = maximum(x.peak, size) if replaced else x.peak
    if isinstance(value, Enclosure):
        return affine(call, {**norms, "value": root(replaced)}, peak=peak)
    return affine(call, norms, offset=size * root(replaced), peak=peak)


def _fixed(call: Call, condition: Any) -> None:
    if isinstance(condition, Enclosure) and not condition.is_constant:
        raise call.refuse("the condition varies over the domain: a jump or a kink that no rule bounds")


def _chosen(condition: Enclosure, when: bool, shape: tuple[int, ...], call: Call) -> int:
    """For an argument of that shape, how many entries of the result the most used entry goes to."""
    if not isinstance(condition.value, Tensor):
        return broadcast_copies(shape, call.shape)
    chosen = (condition.value.bool() == when).expand(call.shape)
    repeated = broadcast_dims(shape, call.shape)
    counts = chosen.sum(dim=repeated) if repeated else chosen
    return int(counts.max()) if counts.numel() else 0


@operation("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros", "aten.new_ones",
           "aten.new_full", "aten.fill", rounds=False)  # fmt: skip
def filled(call: Call) -> Bounds:
    """A constant whose shape or type comes from a tensor: norm 0."""
    sizes = {"aten.ones_like": 1.0, "aten.new_ones": 1.0}
    given = call["value"] if call["fill_value"] is None else call["fill_value"]
    size = size_of(sizes.get(call.node.op, 0.0) if given is None else given)
    if "value" in call.varying:
        raise call.refuse("filling with a value that varies is not covered; expand it instead")
    return affine(call, same_norm(call, ZERO), offset=size * root(call.numel), peak=size)


@layout("surefoot.finite_part", rows=aligned)
def finite_part(call: Call) -> Bounds:
    """A mask with 0 in place of -∞: the identity, for a mask that varies but is bounded and so forbids nothing."""
    if not call["mask"].peak.is_finite:
        raise call.refuse("a mask that varies over the domain and may be -∞ is not covered; use a fixed mask")
    return affine(call, {"mask": ONE}, peak=largest_peak(call))
