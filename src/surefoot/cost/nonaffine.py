r"""Reductions, poolings, normalisations and soft-max: what depends on more than one entry without a product.

For a normalisation the derivative on each group of :math:`M` entries is
:math:`\sigma^{-1}(I - 11^\top/M - yy^\top/M)`, for a soft-max :math:`\operatorname{diag}(p) - pp^\top`. These are
full matrices, and :math:`s_a` counts all their entries as the paper's definition says; multiplied in this
factored form they cost a few operations per entry, which is what ``application`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from surefoot.cost.products import shape_of, tensors
from surefoot.cost.record import Sparsity
from surefoot.graph import Graph, Node


def reduction(graph: Graph, node: Node) -> Sparsity:
    """Sum or mean: each input entry is used once."""
    source = node.arguments["self"]
    return Sparsity(terms=tuple((name, prod(shape_of(graph, source))) for name in tensors(source)))


def running_sum(graph: Graph, node: Node) -> Sparsity:
    """Cumulative sum along an axis of n entries: a triangle of n(n + 1)/2 entries on each line."""
    a = node.arguments
    shape = shape_of(graph, a["self"])
    length = shape[a["dim"]] if shape else 1
    return Sparsity(terms=tuple((name, prod(shape) * (length + 1) // 2) for name in tensors(a["self"])))


def average_pooling(graph: Graph, node: Node) -> Sparsity:
    """Average pooling: the entries of all patches, padding left out."""
    return Sparsity(terms=tuple((n, _patch_entries(graph, node)) for n in tensors(node.arguments["self"])))


def adaptive_pooling(graph: Graph, node: Node) -> Sparsity:
    """Average over the patches ⌊i·n/k⌋ to ⌈(i + 1)·n/k⌉ of each axis of n entries, i < k."""
    source = node.arguments["self"]
    axes = int(node.op[-2])
    count = prod(node.specs[0].shape[:-axes])
    for size, outputs in zip(shape_of(graph, source)[-axes:], node.specs[0].shape[-axes:], strict=True):
        count *= sum(-(-(i + 1) * size // outputs) - i * size // outputs for i in range(outputs))
    return Sparsity(terms=tuple((name, count) for name in tensors(source)))


def max_pooling(graph: Graph, node: Node) -> Sparsity:
    """Max-pooling: every entry of a patch is compared, one of them is passed on."""
    outputs = node.specs[0].numel
    return Sparsity(evaluation=_patch_entries(graph, node), jacobian=outputs, application=outputs)


def upsampling(graph: Graph, node: Node) -> Sparsity:
    """Interpolation: so many input entries for each output."""
    kind = node.op.rpartition("upsample_")[2][:-2]
    points = {"linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16}.get(kind, 1)
    return Sparsity(terms=((node.inputs[0], points * node.numel),))


def extremum(graph: Graph, node: Node) -> Sparsity:
    """Maximum or minimum along axes: one input entry is passed on for each output."""
    outputs = node.specs[0].numel
    return Sparsity(
        evaluation=prod(shape_of(graph, node.arguments["self"])), jacobian=outputs, application=outputs
    )


def whole_reduction(graph: Graph, node: Node) -> Sparsity:
    """Norm, variance, product, log-sum-exp: each input entry acts on one output."""
    entries = prod(shape_of(graph, node.arguments["self"]))
    return Sparsity(evaluation=entries, derivative=entries, jacobian=entries, application=entries)


def gated(graph: Graph, node: Node) -> Sparsity:
    """Gated linear unit: each output is a product of two input entries, one through a sigmoid."""
    count = 2 * node.numel
    return Sparsity(evaluation=count, derivative=count, jacobian=count, application=count)


def softmax(graph: Graph, node: Node) -> Sparsity:
    r"""Soft-max or its logarithm on lines of k entries: :math:`k^2` derivatives a line."""
    shape = node.specs[0].shape
    length = shape[node.arguments["dim"]] if shape else 1
    return _grouped(node.numel, length, evaluation=2, application=2)


def batch_norm(graph: Graph, node: Node) -> Sparsity:
    """Batch-normalisation: groups are channels, over samples and positions; with fixed statistics it is affine."""
    a = node.arguments
    if a["running_mean"] is not None:
        return Sparsity(terms=tuple((name, node.numel) for name in tensors(a["input"])))
    return _grouped(node.numel, node.numel // node.specs[0].shape[1])


def instance_norm(graph: Graph, node: Node) -> Sparsity:
    """Instance normalisation: groups are the positions of one channel of one sample."""
    a = node.arguments
    if a["running_mean"] is not None:
        return Sparsity(terms=tuple((name, node.numel) for name in tensors(a["input"])))
    return _grouped(node.numel, prod(node.specs[0].shape[2:]))


def layer_norm(graph: Graph, node: Node) -> Sparsity:
    """Layer normalisation, with or without subtracting the mean: groups are the normalised axes."""
    return _grouped(node.numel, prod(node.arguments["normalized_shape"]))


def group_norm(graph: Graph, node: Node) -> Sparsity:
    """Group normalisation: groups are some channels of one sample, over positions."""
    return _grouped(node.numel, node.numel // (node.specs[0].shape[0] * node.arguments["num_groups"]))


def _grouped(entries: int, group: int, evaluation: int = 2, application: int = 3) -> Sparsity:
    """Every entry of a group depends on every other; so many operations per entry when factored."""
    jacobian = entries * group
    return Sparsity(
        evaluation=evaluation * entries, jacobian=jacobian, application=min(application * entries, jacobian)
    )


def _patch_entries(graph: Graph, node: Node) -> int:
    """How many pairs of an output and an input entry of its patch there are, padding left out."""
    a = node.arguments
    axes = int(node.op.removesuffix("_with_indices")[-2])
    kernel = _per_axis(a["kernel_size"], axes)
    stride = _per_axis(a["stride"] or a["kernel_size"], axes)
    padding = _per_axis(a["padding"], axes)
    dilation = _per_axis(a.get("dilation", 1), axes)
    shape = node.specs[0].shape
    sizes = shape_of(graph, a["self"])[-axes:]
    count = prod(shape[:-axes])
    for axis, size in enumerate(sizes):
        count *= sum(
            0 <= i * stride[axis] - padding[axis] + j * dilation[axis] < size
            for i in range(shape[len(shape) - axes + axis])
            for j in range(kernel[axis])
        )
    return count


def _per_axis(option: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """An option of a pooling for each axis; one number is meant for all."""
    values = (option,) if isinstance(option, int) else tuple(option)
    return values * axes if len(values) == 1 else values
