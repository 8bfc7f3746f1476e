r"""Batches of matrix products, outer products and sums over shared indices.

With :math:`Z_k = A_kB_k` over the batch, every pair of matrices meets at most once, so

* L = 1: :math:`\sum_k\|A_kB_k\|_F^2 \le \sum_k\|A_k\|_F^2\|B_k\|_F^2 \le \|A\|^2\|B\|^2`, reached at rank one;
* the Jacobian in A is the largest spectral norm of the matrices :math:`[B_k]` of all factors that one matrix of A
  meets, side by side: :math:`\sum_k\|\delta A\,B_k\|_F^2 = \|\delta A\,[B_1, B_2, …]\|_F^2`; and alike in B with
  the :math:`A_k` below each other.

Over the domain a spectral norm moves by at most the spread. Contracted with costates, where no matrix meets two:
:math:`\sum_k\mathrm{tr}(\Lambda_k^\top\dot A_k\dot B_k) \le \max_k\|\Lambda_k\|_2\|\dot A\|\|\dot B\|`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, row_norms
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import batched_spectral_norm
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import ONE, aligned, root, rows_of
from surefoot.operations.composed_series import matrices_along
from surefoot.operations.products import added, costate_norm
from surefoot.operations.record import Form, InSingle, Rule, declare, operation, record_of
from surefoot.operations.sparsity import Contraction, Sparsity, linear_terms, product, tensors


@dataclass(frozen=True)
class Side:
    """The norm of a product in its other factor: over the domain, and at the centre as computed."""

    norm: Magnitude
    centre: Magnitude


def _product_rows(use: Use) -> list[Slot]:
    """The first factor, where its rows are those of the result; in a batch of products also the second one's."""
    first, second = record_of(use.node).factors
    a, b = use.shapes[first], use.shapes[second]
    batched = len(b) == len(a) > 2 and a[0] == b[0]
    if len(a) < 2 or not (len(a) == len(use.shape) or len(b) == 1):
        return []
    added = [slot for slot in aligned(use) if slot not in (first, second)]
    return [first, *([second] if batched else []), *added]


def _product_cost(use: Use) -> Sparsity:
    """Outputs times the inner dimension.

    A product with a vector on the right is no matrix product to PyTorch, and not counted by it.
    """
    left, right = record_of(use.node).factors
    counted = len(use.shapes[right]) >= 2
    bias = next((slot for slot in use.names if slot not in (left, right)), "")
    return product(use, use.numel * use.shapes[left][-1], left, right, bias, counted)


def _matrices_product(*names: str, factors: tuple[Slot, Slot], **readings: Any) -> Callable[[Rule], Rule]:
    common: dict[str, Any] = {"form": Form.PRODUCT, "rows": _product_rows, "cost": _product_cost}
    return operation(*names, factors=factors, **(common | readings))


@_matrices_product("aten.matmul", "aten.vdot", factors=("self", "other"), taylor=matrices_along("self", "other"))
@_matrices_product("aten.mm", "aten.bmm", factors=("self", "mat2"), taylor=matrices_along("self", "mat2"))
@_matrices_product("aten.mv", factors=("self", "vec"))
@_matrices_product("aten.dot", factors=("self", "tensor"))
@_matrices_product("aten.outer", factors=("self", "vec2"), rows=lambda use: ("self",),
                   cost=lambda use: product(use, use.numel, "self", "vec2", counted=False))  # fmt: skip
@_matrices_product("aten.baddbmm", factors=("batch1", "batch2"))
def matrix_product(call: Call) -> Bounds:
    r"""Batches of products, with broadcasting; vectors are matrices of one row or column.

    Rows, where those of the result are those of the first factor: row i moves by at most the norm of the second
    factor times its own move, plus the norm at the centre times the move of the second factor, or of its row.
    """
    first, second = record_of(call.node).factors
    a, b = call[first], call[second]
    alpha, beta = ONE, ONE
    if call.node.op == "aten.baddbmm":
        alpha, beta = (Magnitude.of(abs(float(call[key]))) for key in ("alpha", "beta"))
    left, right = _matrices(call.node.op, a.shape, b.shape)
    by_a, by_b = _met(b, right, left, 0), _met(a, left, right, 1)
    spread = by_a.norm * a.spread + by_b.centre * b.spread
    rows = None
    row_slots = rows_of(call)
    if first in row_slots and len(a.shape) > 1 and isinstance(a.value, Tensor) and a.numel:
        if second in row_slots:
            moved = by_b.centre * b.row_spread(a.shape[0])
        else:
            moved = minimum(row_norms(a.value), by_b.centre) * b.spread
        rows = by_a.norm * a.row_spread(a.shape[0]) + moved
    jacobian = {first: alpha * by_a.norm, second: alpha * by_b.norm}
    bound = alpha * minimum(by_a.norm * a.bound, by_b.norm * b.bound)
    spread, rows = alpha * spread, None if rows is None else alpha * rows
    shift = added(call, call["self"], beta) if call.node.op == "aten.baddbmm" else None
    if shift is not None:
        jacobian["self"] = shift.norm
        bound, spread = bound + shift.norm * shift.enclosure.bound, spread + shift.norm * shift.enclosure.spread
        rows = None if rows is None else rows + shift.row * shift.enclosure.spread
    return Bounds(
        jacobian,
        curvature={(first, second): alpha},
        bound=bound,
        spread=spread,
        rows=rows,
        reduction=left[-1],
        curvature_along=lambda costate: {(first, second): alpha * _costate_norm(costate, left, right)},
    )


def _as_dense(node: Node) -> Iterator[Node]:
    """A product with a sparse matrix, which a graph holds as a dense one; without bounds, if it does not sum."""
    sums = len(node.args) == 2
    yield replace(node, op="aten.mm", target=torch.ops.aten.mm.default) if sums else node


declare("aten._sparse_mm", canonical=_as_dense)
declare("aten.mm", single=InSingle.MATRIX)
declare("aten.matmul", "aten.bmm", matched=True)


def _costate_norm(costate: Enclosure, left: tuple[int, ...], right: tuple[int, ...]) -> Magnitude:
    """The norm of the form that costates make: of each of them, or of all below each other where the second factor
    is one matrix; where both factors are repeated, that of the vector of all.
    """
    if len(right) == 2:
        return costate_norm(costate, costate.value.reshape(-1, right[-1]))
    if left[:-2] != right[:-2] or not costate.numel:
        return costate.bound
    matrices = costate.value.reshape(*left[:-1], right[-1])
    within = costate.rows is not None and costate.shape[:1] == left[:1]
    move = minimum(costate.spread, costate.rows.max()) if within and costate.rows is not None else costate.spread
    return minimum(costate.bound, _largest_norm(matrices) + move)


def _matrices(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the factors with vectors written as matrices."""
    if op == "aten.outer":
        return (*a, 1), (1, *b)
    return (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b


def _met(e: Enclosure, shape: tuple[int, ...], partner: tuple[int, ...], summed: int) -> Side:
    """For one matrix of the partner, the norm of all matrices of ``e`` that it meets, side by side.

    ``summed`` is which of the last two dimensions of ``e`` is summed over, 0 or 1; shapes are those of matrices.
    """
    if not isinstance(e.value, Tensor):
        return Side(e.bound, Magnitude.infinity())
    batch = shape[:-2]
    padded = (1,) * (len(batch) - len(partner) + 2) + partner[:-2]
    padded = padded[len(padded) - len(batch) :]
    together = [k for k, (mine, theirs) in enumerate(zip(batch, padded, strict=True)) if theirs == 1 and mine != 1]
    apart = [k for k in range(len(batch)) if k not in together]
    rank = len(shape)
    inner, free = (rank - 2, rank - 1) if summed == 0 else (rank - 1, rank - 2)
    arranged = e.value.reshape(shape).permute(*apart, inner, *together, free)
    groups = math.prod(batch[k] for k in apart)
    stacked = arranged.reshape(groups, shape[inner], math.prod([shape[free], *(batch[k] for k in together)]))
    centre = _largest_norm(stacked)
    # a group lies within one row of e if the first dimension tells groups apart
    within = e.rows is not None and rank > 2 and len(e.shape) == rank and 0 in apart
    move = minimum(e.spread, e.rows.max()) if within and e.rows is not None else e.spread
    return Side(minimum(e.bound, centre + move), centre)


def _largest_norm(matrices: Tensor) -> Magnitude:
    return Magnitude.of(batched_spectral_norm(matrices).reshape(-1)).max()


def _einsum_rows(use: Use) -> list[Slot]:
    """The factors whose first index is the first of the result and occurs in them once."""
    terms, result = einsum_indices(use["equation"], [use.shapes[slot] for slot in use.shapes])
    first = result[:1]
    pairs = zip(use.shapes, terms, strict=True)
    return [slot for slot, term in pairs if first and term[:1] == first and term.count(first) == 1]


def _einsum_cost(use: Use) -> Sparsity:
    """Contracted in pairs, first with second, the result put last, as PyTorch does it.

    A pair costs the product of the sizes of its indices; those that occur in one of the two alone and in no other
    place are summed before.
    """
    terms, output = einsum_indices(use["equation"], list(use.shapes.values()), repeated=False)
    sides = zip(terms, use.shapes.items(), strict=True)
    pending = [
        (dict(zip(term, shape, strict=True)), frozenset([use.names[slot]])) for term, (slot, shape) in sides
    ]
    pairs: list[Contraction] = []
    while len(pending) > 1:
        (left, left_names), (right, right_names), *pending = pending
        kept = {index for sizes, _ in pending for index in sizes} | set(output)
        result, count = {}, 1
        for index in {**left, **right}:
            sizes_here = left.get(index, 1), right.get(index, 1)
            if index in kept:
                result[index] = max(sizes_here)
            if index in kept or min(sizes_here) > 1:
                count *= max(sizes_here)
        pairs.append(Contraction(count, (left_names, right_names)))
        pending.append((result, left_names | right_names))
    if not pairs:
        return Sparsity(terms=linear_terms(use, math.prod(pending[0][0].values()), *use.names))
    total = sum(pair.multiplications for pair in pairs)
    return Sparsity(product=total, factors=tensors(use, *use.names), contractions=tuple(pairs))


@operation("aten.einsum", form=Form.PRODUCT, factors=("tensors",), rows=_einsum_rows, cost=_einsum_cost)
def einstein_sum(call: Call) -> Bounds:
    r"""Products of two tensors summed over shared indices, or sums and diagonals of one.

    One tensor: diagonals choose entries, and sums of n of them have norm √n. Two: an index of size n that occurs
    in one factor only and not in the result is a sum before the product, of norm √n; the rest is a batch of
    matrix products, whose batch are the indices in both factors and the result.
    """
    operands = call["tensors"]
    terms, result = einsum_indices(call["equation"], [e.shape for e in operands])
    if len(operands) == 1:
        return _one_factor(call, operands[0], terms[0], result)
    if len(operands) != 2 or any(len(set(term)) != len(term) for term in terms):
        raise call.refuse(
            "einsum is covered for two tensors without repeated indices; use matmul and mul for the rest"
        )
    a, b = operands
    sides = [_summed_side(e, term, other, result) for e, term, other in ((a, *terms), (b, *terms[::-1]))]
    alone = [_alone(e, term, other, result) for e, term, other in ((a, *terms), (b, *terms[::-1]))]
    norms = [sides[1].norm * alone[0], sides[0].norm * alone[1]]
    summed = [_sizes(a, terms[0], set(terms[0]) - set(result))]
    summed.append(_sizes(b, terms[1], set(terms[1]) - set(terms[0]) - set(result)))
    return Bounds(
        jacobian={"tensors.0": norms[0], "tensors.1": norms[1]},
        curvature={("tensors.0", "tensors.1"): alone[0] * alone[1]},
        bound=minimum(norms[0] * a.bound, norms[1] * b.bound),
        spread=norms[0] * a.spread + sides[0].centre * alone[1] * b.spread,
        reduction=max(1, math.prod(n for sizes in summed for n in sizes)),
    )


def _one_factor(call: Call, x: Enclosure, term: str, result: str) -> Bounds:
    sizes = dict(zip(term, x.shape, strict=True))
    count = math.prod(n for index, n in sizes.items() if index not in result)
    return Bounds({"tensors.0": root(count)}, offset=Magnitude.zero(), reduction=max(1, count))


def _sizes(e: Enclosure, term: str, indices: set[str]) -> list[int]:
    return [n for i, n in zip(term, e.shape, strict=True) if i in indices]


def _alone(e: Enclosure, term: str, other: str, result: str) -> Magnitude:
    """The norm of summing over the indices that only this factor has."""
    return root(math.prod(_sizes(e, term, set(term) - set(other) - set(result))))


def _summed_side(e: Enclosure, term: str, other: str, result: str) -> Side:
    """The largest norm of a factor as a batch of matrices, after the sums over indices of its own."""
    alone = _alone(e, term, other, result)
    if not isinstance(e.value, Tensor):
        return Side(e.bound * alone, Magnitude.infinity())
    batch = [i for i in term if i in other and i in result]
    inner = [i for i in term if i in other and i not in result]
    free = [i for i in term if i not in other and i in result]
    own = [k for k, i in enumerate(term) if i not in other and i not in result]
    moved = e.value.permute([*(term.index(i) for i in (*batch, *inner, *free)), *own])
    kept = len(term) - len(own)
    total = moved.flatten(kept).sum(-1) if own else moved
    sizes = [math.prod(total.shape[k] for k in group) for group in _consecutive(len(batch), len(inner), len(free))]
    count = math.prod(moved.shape[kept:])
    # the sums err by a relative n u of the sums of absolute values, of norm at most √n‖x‖
    slack = e.bound * alone * ((count + 4) * 2.0**-52) if own else Magnitude.zero()
    centre = _largest_norm(total.reshape(sizes)) + slack
    return Side(minimum(e.bound * alone, centre + e.spread * alone), centre)


def _consecutive(*counts: int) -> list[range]:
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def einsum_indices(
    equation: str, shapes: Sequence[tuple[int, ...]], repeated: bool = True
) -> tuple[list[str], str]:
    """The indices of the factors and of the result, with the dots and an implied result written out.

    Where an index has size 1 in one factor only, that factor is repeated along it: as if it had an index of its
    own there, of size 1 (unless ``repeated`` is off).

    >>> einsum_indices("ij,jk", [(2, 3), (3, 4)])
    (['ij', 'jk'], 'ik')
    """
    equation = equation.replace(" ", "")
    left, arrow, result = equation.partition("->")
    given = list(zip(left.split(","), shapes, strict=True))
    longest = max((len(shape) - len(term) + 3 for term, shape in given if "..." in term), default=0)
    spare = [letter for letter in map(chr, range(ord("A"), ord("Z") + 1)) if letter not in equation][:longest]
    terms, sizes = [], dict[str, int]()
    for term, shape in given:
        count = len(shape) - len(term) + 3 if "..." in term else 0
        terms.append(term.replace("...", "".join(spare[longest - count :])))
        for index, size in zip(terms[-1], shape, strict=True):
            sizes[index] = max(sizes.get(index, 1), size)
    letters = sorted({index for index in left if index.isalpha()})
    implied = "".join(spare) + "".join(index for index in letters if left.count(index) == 1)
    alone = map(chr, range(0x100, 0x200))  # indices that occur nowhere else
    written = [
        "".join(i if n == sizes[i] or not repeated else next(alone) for i, n in zip(term, shape, strict=True))
        for term, (_, shape) in zip(terms, given, strict=True)
    ]
    return written, result.replace("...", "".join(spare)) if arrow else implied
