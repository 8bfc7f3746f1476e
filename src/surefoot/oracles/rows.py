"""Whether samples stay apart: each row of a result depends on the same row of what varies.

The answer follows from the operations and their arguments; no numbers are looked at. Only operations of which it
is known are let through; for all others the answer is no, and derivatives are found without the help of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surefoot.graph import Graph, Node, Spec
from surefoot.graph.nodes import Ref
from surefoot.operations.forms import Form, form_of


def separate(graph: Graph, nodes: Iterable[Node], varying: Iterable[str], samples: int) -> bool:
    """Whether each row of every result depends on the same row of the tensors that vary, and on no other."""
    rows = set(varying)
    for node in nodes:
        if rows.isdisjoint(node.inputs):
            continue
        if not all(spec.shape[:1] == (samples,) for spec in node.specs) or not _keeps_rows(graph, node, rows):
            return False
        rows.add(node.name)
    return True


def _keeps_rows(graph: Graph, node: Node, rows: set[str]) -> bool:
    """Whether each row of the result depends on the same row of the named arguments only."""
    arguments, op = node.arguments, node.op.rpartition(".")[2]
    reads = {name: graph.spec(name) for name in node.inputs if name in rows}
    if op == "getitem":
        return True
    shapes = [spec.shape for spec in reads.values() if isinstance(spec, Spec)]
    if len(shapes) != len(reads):
        return False
    rank = len(node.specs[0].shape)
    if op in _BROADCAST or form_of(node) is Form.ELEMENTWISE:
        return all(len(shape) == rank for shape in shapes)
    if op in _FIRST_ONLY:
        argument = arguments[_FIRST_ONLY[op]]
        return list(reads) == [argument.name] and len(shapes[0]) >= _RANK.get(op, 2)
    if op == "batch_norm":
        return form_of(node) is Form.LINEAR and not arguments["training"] and _only(arguments, "input", reads)
    if op == "scale_shift":
        return _only(arguments, "x", reads) and arguments["dim"] % rank > 0
    if op in ("layer_norm", "rms_norm"):
        return _only(arguments, "input", reads) and len(arguments["normalized_shape"]) < len(shapes[0])
    if op in _SAME_LEADING:
        return len(node.specs[0].shape) >= 3 and all(len(shape) == rank for shape in shapes)
    if op == "matmul":
        batches = rank >= 3 and all(len(shape) == rank for shape in shapes)
        return batches or (_only(arguments, "self", reads) and _rank(graph, arguments["other"]) == 2)
    if op in _ALONG:
        return _dimensions(arguments.get("dim"), len(shapes[0])).isdisjoint({0})
    if op == "expand":
        return len(shapes[0]) == rank
    if op == "permute":
        return arguments["dims"][0] % rank == 0
    if op in ("transpose", "swapaxes"):
        dims = {value % rank for key, value in arguments.items() if isinstance(value, int)}
        return 0 not in dims
    if op in ("constant_pad_nd", "pad"):
        return len(arguments["pad"]) < 2 * rank
    return False


def _only(arguments: Mapping[str, Any], key: str, reads: Mapping[str, Any]) -> bool:
    argument = arguments[key]
    return isinstance(argument, Ref) and list(reads) == [argument.name]


def _rank(graph: Graph, argument: Any) -> int:
    spec = graph.spec(argument.name) if isinstance(argument, Ref) else None
    return len(spec.shape) if isinstance(spec, Spec) else -1


def _dimensions(given: int | Sequence[int] | None, rank: int) -> set[int]:
    """Dimensions counted from the front; all of them if none is given."""
    if given is None or (not isinstance(given, int) and not given):
        return set(range(rank))
    return {d % rank for d in ([given] if isinstance(given, int) else given)}


_BROADCAST = {
    "add",
    "sub",
    "mul",
    "div",
    "multiply",
    "divide",
    "true_divide",
    "neg",
    "clone",
    "alias",
    "contiguous",
}
# Operations on one batch: the name of the argument that holds it. A reshaping that keeps the first dimension
# keeps rows, because numbers stand row by row.
_FIRST_ONLY = {
    "linear": "input",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "group_norm", "instance_norm"), "input"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "input"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "self"),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), "self"),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), "self"),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"), "self"),
}
# The least rank of the batch: with one dimension less, these take it for one sample.
_RANK = {
    f"{name}{d}d": d + 2
    for name in ("conv", "conv_transpose", "avg_pool", "max_pool", "adaptive_avg_pool")
    for d in (1, 2, 3)
}
_SAME_LEADING = {"bmm", "scaled_dot_product_attention"}
_ALONG = {"softmax", "_softmax", "log_softmax", "logsumexp", "sum", "mean", "amax", "amin", "cumsum"}
_ALONG |= {"slice", "select", "narrow", "cat", "split", "chunk", "unbind"}
