r"""Normalisations rewritten: split from their own scale and shift, and recognised where they are written out.

A layer is two things: a normalisation, which is one of the paper's non-affine parts :math:`\nu_t`, and a
biaffine map of its result and the module's parameters. As two nodes, the next computation of the chain starts
where its parameters enter, and each has one rule.

Along the last dimension frameworks write normalisations out, as

* :math:`x\,(\mathrm{mean}(x^2) + \epsilon)^{-1/2}`, or :math:`x / \sqrt{\mathrm{mean}(x^2) + \epsilon}`;
* :math:`(x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon}` with the variance that divides by the number
  of entries, or with the mean of :math:`(x - \mathrm{mean}(x))^2`.

Bounded piece by piece they would have no finite constant at all; as one operation they have slope
:math:`\epsilon^{-1/2}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec
from surefoot.operations.compositions import is_square
from surefoot.operations.record import Expansion, declare, expansion

_aten: Any = torch.ops.aten


def scale_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int) -> Tensor:
    """``weight * x + bias`` with the two laid along ``x`` from dimension ``dim`` on.

    >>> scale_shift(torch.ones(1, 2, 2), torch.tensor([2.0, 3.0]), None, 1)
    tensor([[[2., 2.],
             [3., 3.]]])
    """
    if weight is not None:
        x = x * _along(weight, x, dim)
    if bias is not None:
        x = x + _along(bias, x, dim)
    return x


def in_one_pass(x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int) -> Tensor:
    """The same, both at once where there are both."""
    if weight is None or bias is None:
        return scale_shift(x, weight, bias, dim)
    return torch.addcmul(_along(bias, x, dim), x, _along(weight, x, dim))


def _along(vector: Tensor, x: Tensor, dim: int) -> Tensor:
    trailing = x.dim() - dim - vector.dim()
    return vector.reshape(vector.shape + (1,) * trailing)


def _affine(node: Node, core: Node, weight: Any, bias: Any, dim: int) -> Iterator[Node]:
    """The normalisation without parameters, then its scale and shift if it has any."""
    if weight is None and bias is None:
        yield replace(core, name=node.name)
        return
    yield core
    yield Node(
        name=node.name,
        op="surefoot.scale_shift",
        target=scale_shift,
        args=(Ref(core.name), weight, bias, dim),
        kwargs={},
        module=node.module,
        spec=node.spec,
    )


def _core(node: Node, target: Any, *args: Any) -> Node:
    return replace(
        node, name=f"{node.name}_core", op=str(target.overloadpacket), target=target, args=args, kwargs={}
    )


def _batch_norm(node: Node) -> Iterator[Node]:
    a = node.arguments
    yield from _batch_statistics(node, a, bool(a["training"]))


def _batch_statistics(node: Node, a: dict[str, Any], training: bool) -> Iterator[Node]:
    """Batch statistics while training: running ones are not passed, so that running writes nothing."""
    mean, var = (None, None) if training else (a.get("running_mean"), a.get("running_var"))
    training = training or mean is None
    core = _core(node, _aten.batch_norm.default, a["input"], None, None, mean, var, training, 0.0, a["eps"], False)
    yield from _affine(node, core, a["weight"], a["bias"], 1)


def _instance_norm(node: Node) -> Iterator[Node]:
    a = node.arguments
    own = a["use_input_stats"] or a["running_mean"] is None
    mean, var = (None, None) if own else (a["running_mean"], a["running_var"])
    core = _core(node, _aten.instance_norm.default, a["input"], None, None, mean, var, own, 0.0, a["eps"], False)
    yield from _affine(node, core, a["weight"], a["bias"], 1)


def _layer_norm(node: Node) -> Iterator[Node]:
    a = node.arguments
    core = _core(node, _aten.layer_norm.default, a["input"], a["normalized_shape"], None, None, a["eps"], False)
    yield from _affine(node, core, a["weight"], a["bias"], _rank(node) - len(a["normalized_shape"]))


def _rms_norm(node: Node) -> Iterator[Node]:
    a = node.arguments
    eps = a["eps"]
    if eps is None:  # the default of the operation is the precision of the element type
        eps = torch.finfo(node.specs[0].dtype).eps
    core = _core(node, _aten.rms_norm.default, a["input"], a["normalized_shape"], None, eps)
    yield from _affine(node, core, a["weight"], None, _rank(node) - len(a["normalized_shape"]))


def _group_norm(node: Node) -> Iterator[Node]:
    a = node.arguments
    core = _core(node, _aten.group_norm.default, a["input"], a["num_groups"], None, None, a["eps"], False)
    yield from _affine(node, core, a["weight"], a["bias"], 1)


def _rank(node: Node) -> int:
    assert isinstance(node.spec, Spec)
    return len(node.spec.shape)


declare("aten.batch_norm", canonical=_batch_norm)
declare("aten.instance_norm", canonical=_instance_norm)
declare("aten.layer_norm", canonical=_layer_norm)
declare("aten.rms_norm", canonical=_rms_norm)
declare("aten.group_norm", canonical=_group_norm)
declare("aten._native_batch_norm_legit", "aten._native_batch_norm_legit_functional", canonical=_batch_norm)
declare(
    "aten._native_batch_norm_legit_no_training",
    canonical=lambda node: _batch_statistics(node, node.arguments, False),
)


@expansion("aten.mul", "aten.div")
def normalised_by_hand(graph: Graph, node: Node) -> Expansion | None:
    """One ``rms_norm`` or ``layer_norm`` for such an expression."""
    if len(node.inputs) != 2 or not isinstance(node.spec, Spec) or node.arguments.get("rounding_mode") is not None:
        return None
    by_name = graph.by_name
    args: tuple[Any, ...]
    data, factor = node.args[0].name, node.args[1].name
    pairs = [(data, factor)] if node.op == "aten.div" else [(data, factor), (factor, data)]
    for data, factor in pairs:
        found = _root_mean_square(data, factor, by_name, inverse=node.op == "aten.mul")
        if found is None or not _same_shape(graph, data, node.spec):
            continue
        source, eps = found
        size = [node.spec.shape[-1]]
        target, args = _aten.rms_norm.default, (Ref(data), size, None, eps)
        if source != data:
            target, args = _aten.layer_norm.default, (Ref(source), size, None, None, eps)
        return Expansion((replace(node, op=str(target.overloadpacket), target=target, args=args, kwargs={}),))
    return None


def _same_shape(graph: Graph, name: str, spec: Spec) -> bool:
    """Whether a tensor has that shape; its precision does not matter to a function of real numbers."""
    found = graph.spec(name)
    return isinstance(found, Spec) and found.shape == spec.shape


def _root_mean_square(data: str, factor: str, by_name: dict[str, Node], inverse: bool) -> tuple[str, float] | None:
    """The tensor that is normalised and eps, if ``factor`` is √(mean(data²) + eps), or one over it.

    The tensor is the data itself, or what the data is without its mean.
    """
    root = by_name.get(factor)
    if root is None or not _is_root(root, inverse):
        return None
    shifted = by_name.get(root.inputs[0])
    if shifted is None or shifted.op != "aten.add" or len(shifted.inputs) != 1 or shifted.arguments["alpha"] != 1:
        return None
    eps, mean = shifted.arguments["other"], by_name.get(shifted.inputs[0])
    if not isinstance(eps, int | float) or not eps > 0 or mean is None or not _keeps_last(mean):
        return None
    centred = _without_mean(data, by_name)
    if mean.op == "aten.var":
        a = mean.arguments
        biased = a.get("correction") == 0 or a.get("unbiased") is False
        return (centred, float(eps)) if biased and centred is not None and mean.inputs == (centred,) else None
    square = by_name.get(mean.inputs[0])
    if mean.op != "aten.mean" or square is None or square.inputs != (data,) or not is_square(square):
        return None
    return (data if centred is None else centred, float(eps))


def _is_root(node: Node, inverse: bool) -> bool:
    power = -0.5 if inverse else 0.5
    named = "aten.rsqrt" if inverse else "aten.sqrt"
    return node.op == named or (node.op == "aten.pow" and node.arguments["exponent"] == power)


def _keeps_last(node: Node) -> bool:
    """Whether it is a mean or a variance along the last dimension that leaves it with size 1."""
    a = node.arguments
    return bool(
        node.op in ("aten.mean", "aten.var")
        and a.get("keepdim")
        and isinstance(node.spec, Spec)
        and a.get("dim") in ([-1], [len(node.spec.shape) - 1])
    )


def _without_mean(data: str, by_name: dict[str, Node]) -> str | None:
    """The tensor whose mean along the last dimension was subtracted, if that is what the data is."""
    node = by_name.get(data)
    if node is None or node.op != "aten.sub" or len(node.inputs) != 2 or node.arguments["alpha"] != 1:
        return None
    source, mean = node.args[0].name, by_name.get(node.args[1].name)
    right = mean is not None and mean.op == "aten.mean" and mean.inputs == (source,) and _keeps_last(mean)
    return source if right else None
