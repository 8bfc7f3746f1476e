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

from surefoot.enclosure import Enclosure
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import batched_spectral_norm
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import ONE, aligned
from surefoot.operations.composed_series import product_along
from surefoot.operations.products import Partial, biaffine, costate_norm
from surefoot.operations.record import Form, InSingle, Rule, declare, operation, record_of
from surefoot.operations.sparsity import Contraction, Sparsity, linear_terms, product, tensors
from surefoot.operations.written_out import written_out


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
    return operation(*names, factors=factors, taylor=product_along, **(common | readings))


@_matrices_product("aten.matmul", "aten.vdot", factors=("self", "other"))
@_matrices_product("aten.mm", "aten.bmm", factors=("self", "mat2"))
@_matrices_product("aten.mv", factors=("self", "vec"))
@_matrices_product("aten.dot", factors=("self", "tensor"))
@_matrices_product("aten.outer", factors=("self", "vec2"), rows=lambda use: ("self",),
                   cost=lambda use: product(use, use.numel, "self", "vec2", counted=False))  # fmt: skip
def matrix_product(call: Call) -> Bounds:
    """Batches of products, with broadcasting; vectors are matrices of one row or column."""
    first, second = record_of(call.node).factors
    a, b = call[first], call[second]
    left, right = _matrices(call.node.op, a.shape, b.shape)
    by_a, by_b = _met(b, right, left, 0), _met(a, left, right, 1)
    constants = Partial(by_a.norm, by_b.norm, by_b.centre, ONE)
    return replace(
        biaffine(call, (first, second, ""), a, b, None, constants, inner=left[-1]),
        curvature_along=lambda costate: {(first, second): _costate_norm(costate, left, right)},
    )


def _as_dense(node: Node) -> Iterator[Node]:
    """A product with a sparse matrix, which a graph holds as a dense one; without bounds, if it does not sum."""
    sums = len(node.args) == 2
    yield replace(node, op="aten.mm", target=torch.ops.aten.mm.default) if sums else node


declare("aten._sparse_mm", canonical=_as_dense)
declare("aten.baddbmm", form=Form.PRODUCT, factors=("batch1", "batch2"), rows=_product_rows, cost=_product_cost)
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
    move = costate.longest_move(costate.shape[:1] == left[:1])
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
    move = e.longest_move(rank > 2 and len(e.shape) == rank and 0 in apart)
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


declare("aten.einsum", form=Form.PRODUCT, factors=("tensors",), rows=_einsum_rows, cost=_einsum_cost)


@written_out("aten.einsum")
def _contracted(equation: str, tensors: list[Tensor], path: Any = None) -> Tensor:
    """Tensors two at a time, from the left; without indices that nobody needs any more."""
    terms, result = einsum_indices(equation, [tuple(x.shape) for x in tensors])
    total, term = _reduced(tensors[0], terms[0], result + "".join(terms[1:]))
    for k in range(1, len(terms)):
        later = result + "".join(terms[k + 1 :])
        kept = later if k == len(terms) - 1 else "".join(i for i in dict.fromkeys(term + terms[k]) if i in later)
        total, term = _pair(total, term, *_reduced(tensors[k], terms[k], term + later), kept), kept
    return _ordered(total, term, result)


def _reduced(x: Tensor, term: str, needed: str) -> tuple[Tensor, str]:
    """A tensor with diagonals in place of indices that occur twice, and sums over those that nobody needs."""
    for index in dict.fromkeys(term):
        while term.count(index) > 1:
            second = term.rindex(index)
            first = term.rindex(index, 0, second)
            x = x.diagonal(0, first, second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + index
    alone = [k for k, index in enumerate(term) if index not in needed]
    return (x.sum(alone) if alone else x), "".join(index for index in term if index in needed)


def _pair(a: Tensor, term: str, b: Tensor, other: str, kept: str) -> Tensor:
    """A batch of matrix products; the batch are the indices of both factors that are kept.

    The first factor is the one whose rows are those of the result, and its dimensions stay apart.
    """
    if kept[:1] not in term:
        a, term, b, other = b, other, a, term
    a, term = _reduced(a, term, kept + other)
    sizes = dict(zip(term + other, (*a.shape, *b.shape), strict=True))
    batch, free = ([i for i in kept if i in term and (i in other) is both] for both in (True, False))
    inner, rest = [i for i in term if i not in kept], [i for i in kept if i not in term]
    outer, width = [sizes[i] for i in batch], math.prod(sizes[i] for i in inner)
    rows, columns = [sizes[i] for i in free] or [1], math.prod(sizes[i] for i in rest)
    left = _shaped(_ordered(a, term, [*batch, *free, *inner]), [*outer, *rows, width])
    right = _shaped(_ordered(b, other, [*batch, *inner, *rest]), [*outer, *[1] * (len(rows) - 1), width, columns])
    order = [*batch, *free, *rest]
    return _ordered(_shaped(left @ right, [sizes[i] for i in order]), "".join(order), kept)


def _ordered(x: Tensor, term: str, order: Sequence[str]) -> Tensor:
    return x if list(term) == list(order) else x.permute([term.index(i) for i in order])


def _shaped(x: Tensor, shape: list[int]) -> Tensor:
    return x if list(x.shape) == shape else x.reshape(shape)


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
