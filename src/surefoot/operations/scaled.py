r"""A normalisation split from its own scale and shift.

It is two things: a normalisation, which is one of the paper's non-affine parts :math:`\nu_t`, and a biaffine map
of its result and the module's parameters. As two nodes, the next computation of the chain starts where its
parameters enter, and each has one rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.nodes import Node, Ref, Spec
from surefoot.operations.record import declare

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


def _batch_norm_eval(node: Node) -> Iterator[Node]:
    yield from _batch_statistics(node, node.arguments, False)


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
declare("aten._native_batch_norm_legit_no_training", canonical=_batch_norm_eval)
