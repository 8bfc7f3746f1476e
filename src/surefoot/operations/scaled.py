r"""Normalisations split from their scale and shift; they and directions recognised where they are written out.

A layer is two things: a normalisation, which is one of the paper's non-affine parts :math:`\nu_t`, and a
biaffine map of its result and the module's parameters. As two nodes, the next computation of the chain starts
where its parameters enter, and each has one rule.

Along the last dimension frameworks write normalisations out, as

* :math:`x\,(\mathrm{mean}(x^2) + \epsilon)^{-1/2}`, or :math:`x / \sqrt{\mathrm{mean}(x^2) + \epsilon}`;
* :math:`(x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon}` with the variance that divides by the number
  of entries, or with the mean of :math:`(x - \mathrm{mean}(x))^2`.

Bounded piece by piece they would have no finite constant at all; as one operation they have slope
:math:`\epsilon^{-1/2}`. Divisions by a length, and roots of sums of squares, are recognised as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec
from surefoot.operations.record import Expansion, declare, expansion
from surefoot.torch_private import schema_of

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


def _split(node: Node, target: Any) -> Iterator[Node]:
    """The normalisation without parameters, then its scale and shift if it has any.

    Where the statistics are those of the batch, running ones are not passed, so that running writes nothing.
    """
    a = node.arguments
    usual = {"weight": None, "bias": None, "momentum": 0.0, "cudnn_enable": False, "cudnn_enabled": False}
    changed = {**a, **usual}
    if {"running_mean", "training"} & a.keys():
        own = bool(a.get("training") or a.get("use_input_stats")) or a.get("running_mean") is None
        changed |= {"training": own, "use_input_stats": own}
        changed |= {"running_mean": None, "running_var": None} if own else {}
    if a["eps"] is None:  # the default is the precision of the element type
        changed["eps"] = torch.finfo(node.specs[0].dtype).eps
    args = tuple(changed[argument.name] for argument in schema_of(target).arguments)
    weight, bias = a["weight"], a.get("bias")
    core = replace(
        node, name=f"{node.name}_core", op=str(target.overloadpacket), target=target, args=args, kwargs={}
    )
    if weight is None and bias is None:
        yield replace(core, name=node.name)
        return
    yield core
    dim = len(node.specs[0].shape) - len(a["normalized_shape"]) if "normalized_shape" in a else 1
    scaled = (Ref(core.name), weight, bias, dim)
    yield replace(node, op="surefoot.scale_shift", target=scale_shift, args=scaled, kwargs={})


for _name in ("batch_norm", "instance_norm", "layer_norm", "rms_norm", "group_norm"):
    declare(f"aten.{_name}", canonical=partial(_split, target=getattr(_aten, _name).default))
for _name in ("", "_functional", "_no_training"):
    declare(f"aten._native_batch_norm_legit{_name}", canonical=partial(_split, target=_aten.batch_norm.default))


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
    if mean.op != "aten.mean" or square is None or square.inputs != (data,) or not _is_square(square):
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


def _is_square(node: Node) -> bool:
    """Whether it is the square of its one argument."""
    if node.op == "aten.mul":
        return len(node.args) == 2 and node.args[0] == node.args[1]
    return node.op == "aten.square" or (node.op == "aten.pow" and node.arguments["exponent"] == 2)


def unit(x: Tensor, dim: int | list[int] | None, eps: float) -> Tensor:
    """The direction of x along some dimensions: x divided by its length, or by eps if that is larger.

    >>> unit(torch.tensor([3.0, 4.0]), 0, 1e-12)
    tensor([0.6000, 0.8000])
    """
    return x / torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps)


@expansion("aten.div")
def divided_by_its_length(graph: Graph, node: Node) -> Expansion | None:
    """A division by the length of the numerator, bounded below by eps: what ``functional.normalize`` does.

    Piece by piece it would be a quotient of two tensors that know nothing of each other.
    """
    data, divisor = node.arguments["self"], node.arguments["other"]
    found = None
    if isinstance(data, Ref) and isinstance(divisor, Ref) and graph.spec(data.name) == node.spec:
        found = _length_of(data, divisor, graph.by_name)
    if found is None or node.arguments.get("rounding_mode") is not None:
        return None
    return Expansion((replace(node, op="surefoot.unit", target=unit, args=(data, *found), kwargs={}),))


def _length_of(data: Ref, divisor: Ref, by_name: dict[str, Node]) -> tuple[Any, float] | None:
    """Dimensions and eps, if the divisor is the length of the data along them, bounded below."""
    node = by_name.get(divisor.name)
    if node is not None and node.op in ("aten.expand_as", "aten.expand"):
        node = by_name.get(node.inputs[0])
    eps = 0.0
    if node is not None and node.op in ("aten.clamp_min", "aten.clamp"):
        if node.arguments.get("max") is not None or not isinstance(node.arguments["min"], int | float):
            return None
        eps, node = float(node.arguments["min"]), by_name.get(node.inputs[0])
    if node is None or node.op != "aten.linalg_vector_norm" or node.inputs != (data.name,):
        return None
    a = node.arguments
    whole = a["dim"] is None
    if a["ord"] != 2 or not (a["keepdim"] or whole) or eps < 0:
        return None
    return a["dim"], eps


@expansion("aten.sqrt", "aten.pow")
def length_by_hand(graph: Graph, node: Node) -> Expansion | None:
    """The root of a sum of squares is a length."""
    if node.op == "aten.pow" and node.arguments["exponent"] != 0.5:
        return None
    total = graph.by_name.get(node.inputs[0]) if node.inputs else None
    square = graph.by_name.get(total.inputs[0]) if total is not None and total.op == "aten.sum" else None
    if total is None or square is None or len(square.inputs) != 1 or not _is_square(square):
        return None
    a = total.arguments
    args = (Ref(square.inputs[0]), 2, a.get("dim"), bool(a.get("keepdim")))
    target = _aten.linalg_vector_norm.default
    return Expansion((replace(node, op="aten.linalg_vector_norm", target=target, args=args, kwargs={}),))
