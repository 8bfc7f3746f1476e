"""The sparsity of every operation: a table from names to the functions that count."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.cost import nonaffine, products
from surefoot.cost.record import Sparsity
from surefoot.graph import Graph, Node, Role
from surefoot.operations.forms import Form, form_of

Family = Callable[[Graph, Node], Sparsity]


def sparsity(graph: Graph, node: Node) -> Sparsity:
    """The non-zero entries of an operation's tensors.

    What has no function of its own is counted by its form: moving numbers costs nothing (the paper does not
    count the extraction of patches either), a lookup in an embedding included; everything else costs one
    operation for each entry of the result and each argument that varies. This is exact for sums and for
    functions applied to each entry, and the default for operations that are not known.

    Args:
        graph: the graph, for the shapes of the arguments.
        node: the operation.
    """
    count = _FAMILIES.get(node.op)
    if count is not None:
        return count(graph, node)
    form = form_of(node)
    if form is Form.LAYOUT:
        return Sparsity()
    varying = [name for name in node.inputs if graph.roles[name] != Role.CONSTANT]
    if form is Form.LINEAR:
        return Sparsity(terms=tuple((name, node.numel) for name in varying))
    derivatives = node.numel * len(varying)
    return Sparsity(evaluation=node.numel, derivative=derivatives, jacobian=derivatives, application=derivatives)


def _table(function: Family, names: str) -> dict[str, Family]:
    return {f"aten.{name}": function for name in names.split()}


_FAMILIES: dict[str, Family] = {
    "aten.linear": products.linear,
    **_table(
        products.convolution,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    ),
    **_table(products.matrix_product, "matmul mm bmm mv dot addmm baddbmm"),
    **_table(products.entrywise_product, "mul multiply"),
    "aten.outer": products.outer_product,
    "aten.einsum": products.einsum,
    **_table(products.recurrent, "lstm gru rnn_tanh rnn_relu"),
    "aten.bilinear": products.bilinear_layer,
    "aten.scaled_dot_product_attention": products.attention,
    "surefoot.scale_shift": products.scale_shift,
    **_table(nonaffine.reduction, "sum mean"),
    "aten.cumsum": nonaffine.running_sum,
    **_table(nonaffine.average_pooling, "avg_pool1d avg_pool2d avg_pool3d"),
    **_table(nonaffine.adaptive_pooling, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    **_table(
        nonaffine.max_pooling,
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
    ),
    **_table(
        nonaffine.upsampling,
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d",
    ),
    **_table(nonaffine.extremum, "amax amin max min median"),
    **_table(nonaffine.whole_reduction, "norm linalg_vector_norm linalg_norm var std prod logsumexp"),
    "aten.glu": nonaffine.gated,
    **_table(nonaffine.softmax, "softmax _softmax log_softmax _log_softmax softmin"),
    "aten.batch_norm": nonaffine.batch_norm,
    "aten.instance_norm": nonaffine.instance_norm,
    **_table(nonaffine.layer_norm, "layer_norm rms_norm"),
    "aten.group_norm": nonaffine.group_norm,
}
