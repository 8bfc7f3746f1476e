"""Where a forward pass cuts the gradient, so that autograd would not give the derivative of the function."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from surefoot.errors import CaptureError
from surefoot.graph.naming import module_path
from surefoot.torch_private import HigherOrderOperator


def refuse_severed(program: ExportedProgram) -> None:
    """Refuse a tensor that depends on trainable parameters, reaches the output, and is cut off from its gradient.

    This is decided on the program as it was traced: its functional form no longer says where gradients were off.

    Raises:
        CaptureError: naming the module that calls ``detach`` or works under ``torch.no_grad``.
    """
    values = program.state_dict
    paths = program.graph_signature.inputs_to_parameters
    trainable = {name for name, path in paths.items() if path in values and values[path].requires_grad}
    placeholders = program.graph.find_nodes(op="placeholder")
    _check(program.graph_module, [node for node in placeholders if node.name in trainable])


def _check(module: fx.GraphModule, sources: Iterable[fx.Node]) -> None:
    nodes = list(module.graph.nodes)
    varying = set(sources)
    for node in nodes:
        if varying.intersection(node.all_input_nodes):
            varying.add(node)
    wanted: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or wanted.intersection(node.users) or node in wanted:
            wanted.update((node, *node.all_input_nodes))
    for node in nodes:
        if node in varying and node in wanted and node.op == "call_function":
            _check_node(node, module, varying)


def _check_node(node: fx.Node, module: fx.GraphModule, varying: set[fx.Node]) -> None:
    if node.target in _DETACH and _is_real(node.meta.get("val")):
        raise _severed("is detached", node)
    if not isinstance(node.target, HigherOrderOperator):
        return
    body = next(_bodies(node, module), None)
    if str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
        # Decisions have no gradient anyway: only real numbers that leave the region are cut off.
        results = [user for user in node.users if user.target is operator.getitem and user.users]
        if any(_is_real(result.meta.get("val")) for result in results):
            raise _severed("is computed under torch.no_grad()", next(_computing(body), node))
    elif body is not None:
        operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
        inputs = body.graph.find_nodes(op="placeholder")
        _check(body, [p for p, o in zip(inputs, operands[-len(inputs) :], strict=False) if o in varying])


def _bodies(node: fx.Node, module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            body = getattr(module, str(argument.target), None)
            if isinstance(body, fx.GraphModule):
                yield body


def _computing(body: fx.GraphModule | None) -> Iterator[fx.Node]:
    if body is not None:
        yield from (node for node in body.graph.nodes if node.op == "call_function")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _severed(how: str, node: fx.Node) -> CaptureError:
    return CaptureError(
        f"a tensor that depends on the parameters {how}",
        where=module_path(node),
        remedy="Its gradient would not be the derivative of the function, so no step along it could be "
        "guaranteed: let the gradient pass (in torch.utils.checkpoint, with use_reentrant=False), or freeze these "
        "parameters with requires_grad_(False).",
    )


_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
