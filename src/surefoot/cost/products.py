r"""Products: layers, convolutions, matrix products, contractions of tensors, attention.

The sparsity :math:`s_\beta` of a product is the number of non-zero entries of its multilinear tensor: the
multiplications of :math:`\beta(x, u)`, and equally those of :math:`\beta(\cdot, u)^\top\lambda` and
:math:`\beta(x, \cdot)^\top\lambda` (paper, appendix "Detailed complexities of forward and backward passes").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from surefoot.cost.record import Contraction, Sparsity
from surefoot.graph import Graph, Node, Ref


def shape_of(graph: Graph, argument: Any) -> tuple[int, ...]:
    """The shape of a tensor argument; that of a number is empty."""
    if not isinstance(argument, Ref):
        return ()
    spec = graph.spec(argument.name)
    return (spec[0] if isinstance(spec, tuple) else spec).shape


def tensors(*arguments: Any) -> tuple[str, ...]:
    """Names of those arguments that are tensors, in order."""
    return tuple(argument.name for argument in arguments if isinstance(argument, Ref))


def bilinear(node: Node, count: int, left: Any, right: Any, bias: Any = None, counted: bool = True) -> Sparsity:
    """A product of two factors plus a bias, which is copied along the result: one entry per output.

    Args:
        node: the operation.
        count: the multiplications.
        left: the first factor.
        right: the second factor.
        bias: what is added, or nothing.
        counted: whether it is a product of matrices or a convolution.
    """
    factors = tensors(left, right)
    sides = tuple(frozenset([name]) for name in factors)
    return Sparsity(
        product=count,
        factors=factors,
        terms=tuple((name, node.numel) for name in tensors(bias)),
        contractions=(Contraction(count, sides),) if counted else (),
    )


def linear(graph: Graph, node: Node) -> Sparsity:
    r"""Fully-connected layer: :math:`s_\beta = m \tilde\delta \delta`, outputs times inputs of one output."""
    a = node.arguments
    return bilinear(node, node.numel * shape_of(graph, a["weight"])[-1], a["input"], a["weight"], a["bias"])


def convolution(graph: Graph, node: Node) -> Sparsity:
    r"""Convolution: :math:`s_\beta = m\, n^p\, n^f\, s^f`, patches times coefficients of all filters.

    Each coefficient of the weight (:math:`n^f s^f` of them, whatever the groups) meets each patch once. A
    convolution has one patch per output position, its transpose one per input position. Zero padding is not
    subtracted, as in the paper, so with padding this is above the number of non-zero entries.
    """
    a = node.arguments
    weight, inputs = shape_of(graph, a["weight"]), shape_of(graph, a["input"])
    axes = len(weight) - 2
    batch = inputs[0] if len(inputs) == axes + 2 else 1
    transposed = "transpose" in node.op or bool(a.get("transposed"))
    patches = prod((inputs if transposed else node.specs[0].shape)[-axes:])
    return bilinear(node, batch * patches * prod(weight), a["input"], a["weight"], a["bias"])


def matrix_product(graph: Graph, node: Node) -> Sparsity:
    """Matrix product, also of stacks of matrices or with a vector: outputs times the inner dimension.

    A product with a vector on the right is no matrix product to PyTorch, and not counted by it.
    """
    a = node.arguments
    left, right, added = _MATRIX_ARGUMENTS[node.op]
    matrices = len(shape_of(graph, a[right])) >= 2
    count = node.numel * shape_of(graph, a[left])[-1]
    return bilinear(node, count, a[left], a[right], a.get(added), matrices)


def entrywise_product(graph: Graph, node: Node) -> Sparsity:
    """Product of entries, or of a tensor with a number: one multiplication per output."""
    a = node.arguments
    return bilinear(node, node.numel, a["self"], a["other"], counted=False)


def outer_product(graph: Graph, node: Node) -> Sparsity:
    """Outer product of two vectors: one multiplication per output."""
    a = node.arguments
    return bilinear(node, node.numel, a["self"], a["vec2"], counted=False)


def scale_shift(graph: Graph, node: Node) -> Sparsity:
    """Scale and shift of a normalisation: one multiplication per output, and the shift is a bias."""
    a = node.arguments
    if a["weight"] is None:
        return Sparsity(terms=tuple((name, node.numel) for name in tensors(a["x"], a["bias"])))
    return bilinear(node, node.numel, a["x"], a["weight"], a["bias"], counted=False)


def bilinear_layer(graph: Graph, node: Node) -> Sparsity:
    """The layer of two inputs ``nn.Bilinear``: outputs times the entries of one of its matrices."""
    a = node.arguments
    count = node.numel * prod(shape_of(graph, a["weight"])[1:])
    factors = tensors(a["input1"], a["input2"], a["weight"])
    return Sparsity(product=count, factors=factors, terms=tuple((n, node.numel) for n in tensors(a["bias"])))


def einsum(graph: Graph, node: Node) -> Sparsity:
    """Contraction of tensors: in pairs, first with second, the result put last, as PyTorch does it.

    A pair costs the product of the sizes of its indices; those that occur in one of the two alone and in no
    other place are summed before.
    """
    a = node.arguments
    operands = list(a["tensors"])
    indices, output = _parse(a["equation"], [len(shape_of(graph, operand)) for operand in operands])
    pending = []
    for names, operand in zip(indices, operands, strict=True):
        sizes: dict[str, int] = dict(zip(names, shape_of(graph, operand), strict=True))
        pending.append((sizes, frozenset(tensors(operand))))
    found: list[Contraction] = []
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
        found.append(Contraction(count, (left_names, right_names)))
        pending.append((result, left_names | right_names))
    if not found:
        return Sparsity(terms=tuple((name, prod(pending[0][0].values())) for name in tensors(*operands)))
    return Sparsity(
        product=sum(c.multiplications for c in found), factors=tensors(*operands), contractions=tuple(found)
    )


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The indices of each operand and of the result; an ellipsis stands for indices ``0, 1, …``."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    extra = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
    longest = max((e for e, part in zip(extra, parts, strict=True) if "..." in part), default=0)

    def names(part: str, count: int) -> list[str]:
        before, dots, after = part.partition("...")
        return [*before, *(str(k) for k in range(longest - count, longest) if dots), *after]

    indices = [names(part, count) for part, count in zip(parts, extra, strict=True)]
    if arrow:
        return indices, names(right, longest)
    counts = Counter(index for operand in indices for index in operand)
    return indices, sorted(index for index, count in counts.items() if count == 1 or index.isdigit())


def attention(graph: Graph, node: Node) -> Sparsity:
    r"""Attention :math:`\operatorname{softmax}(QK^\top)V`: two matrix products with a soft-max in between.

    With stacks of :math:`\ell \times e` queries, :math:`s \times e` keys and :math:`s \times v` values, the
    products take :math:`\ell s (e + v)` multiplications; a mask does not reduce them. Output entry
    :math:`(i, k)` depends on query :math:`i`, all keys, and column :math:`k` of the values, so the derivative
    has :math:`\ell v (e + s e + s)` non-zero entries; it is applied with two products of each kind.
    """
    a = node.arguments
    query, key, value = a["query"], a["key"], a["value"]
    *stack, rows, width = shape_of(graph, query)
    keys, outputs = shape_of(graph, key)[-2], shape_of(graph, value)[-1]
    stacks = prod(torch.broadcast_shapes(stack, node.specs[0].shape[:-2]))
    scores, weighted = stacks * rows * keys * width, stacks * rows * keys * outputs
    entries = stacks * rows * keys
    jacobian = stacks * rows * outputs * (width + keys * width + keys)
    q, k, v = (frozenset(tensors(argument)) for argument in (query, key, value))
    return Sparsity(
        evaluation=scores + weighted + 2 * entries,
        jacobian=jacobian,
        application=min(2 * (scores + weighted + entries), jacobian),
        contractions=(Contraction(scores, (q, k)), Contraction(weighted, (q | k, v))),
    )


def recurrent(graph: Graph, node: Node) -> Sparsity:
    """Recurrent layers: every entry of every weight matrix is used once for each step of each sample.

    The derivative goes along both factors of each product, so it is applied with twice as many. An output may
    depend on all inputs of its sample and on all parameters, which bounds the entries of the derivative.
    """
    a = node.arguments
    output, inputs = node.specs[0], shape_of(graph, a["input"])
    samples = inputs[0 if a["batch_first"] else 1] if len(inputs) == 3 else 1
    shapes = [shape_of(graph, parameter) for parameter in a["params"]]
    count = prod(inputs[:-1]) * sum(prod(shape) for shape in shapes if len(shape) == 2)
    reached = prod(inputs) // samples + sum(map(prod, shapes))
    sides = frozenset(tensors(a["input"])), frozenset(tensors(*a["params"]))
    return Sparsity(
        evaluation=count + node.numel,
        derivative=node.numel,
        jacobian=output.numel * reached,
        application=2 * count + node.numel,
        contractions=(Contraction(count, sides),),
    )


_MATRIX_ARGUMENTS = {
    "aten.matmul": ("self", "other", ""),
    "aten.mm": ("self", "mat2", ""),
    "aten.bmm": ("self", "mat2", ""),
    "aten.mv": ("self", "vec", ""),
    "aten.dot": ("self", "tensor", ""),
    "aten.addmm": ("mat1", "mat2", "self"),
    "aten.baddbmm": ("batch1", "batch2", "self"),
}
