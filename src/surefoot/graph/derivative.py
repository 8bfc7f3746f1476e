"""Where autograd would not give the derivative of the function: gradients that are cut, and hand-written ones."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.export import ExportedProgram

from surefoot.errors import CaptureError
from surefoot.graph.checks import select_outputs
from surefoot.graph.evaluate import double_by_default, in_double, outputs_of
from surefoot.graph.naming import module_path
from surefoot.graph.structure import Graph
from surefoot.torch_private import HigherOrderOperator

_NO_STEP = "Its gradient would not be the derivative of the function, so no step along it could be guaranteed: "


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


def custom_functions(outputs: Iterable[Tensor]) -> tuple[str, ...]:
    """Names of the functions with a hand-written backward (``torch.autograd.Function``) behind some tensors.

    Operators of ``torch.library`` are left out: they are operations of the graph as they are, and their backward
    is the derivative that every reading of the graph takes.
    """
    waiting: list[Any] = [output.grad_fn for output in outputs]
    met: set[Any] = {None}
    names: dict[str, None] = {}
    while waiting:
        step = waiting.pop()
        if step not in met:
            met.add(step)
            waiting += [before for before, _ in step.next_functions]
            name = type(step).__name__.removesuffix("Backward")
            if isinstance(step, BackwardCFunction) and not name.startswith("GeneratedBackwardFor_"):
                names[name] = None
    return tuple(names)


def refuse_other_derivative(
    model: nn.Module,
    graph: Graph,
    args: Sequence[Tensor],
    kwargs: Mapping[str, Tensor],
    names: Sequence[str],
) -> None:
    """Refuse hand-written backward functions that do not give the derivative of the function.

    Vector-Jacobian products of the model are compared in double precision with those of its graph, which are
    derivatives of what forward computes, at the example and at eight times it, for random slopes. That is a test
    at two inputs and no proof: a backward that is wrong elsewhere only passes. Constants and promises are
    those of what forward computes, with derivatives from the graph.

    Raises:
        CaptureError: naming the functions, if they differ or cannot be compared.
    """
    functions = " and ".join(f"'{name}'" for name in names)
    try:
        twin = copy.deepcopy(model).double()
        same = not any(value.is_meta for value in (*twin.parameters(), *args, *kwargs.values()))
        same = same and all(_same_derivative(twin, graph, args, kwargs, scale) for scale in (1.0, 8.0))
    except Exception:  # a copy or a run in double precision may fail in many ways
        same = False
    if not same:
        remedy = f"{_NO_STEP}write forward with differentiable operations, and pass a model with values in memory."
        what = (
            f"the backward of {functions} (torch.autograd.Function) is not seen to be the derivative of forward "
            "at the example and at eight times it, where the two are compared"
        )
        raise CaptureError(what, where="", remedy=remedy)


def _same_derivative(
    model: nn.Module, graph: Graph, args: Sequence[Tensor], kwargs: Mapping[str, Tensor], scale: float
) -> bool:
    inputs = [_scaled(value, scale) for value in (*args, *kwargs.values())]
    keywords = dict(zip(kwargs, inputs[len(args) :], strict=True))
    parameters = dict(model.named_parameters())
    values = {name: in_double(value.detach()) for name, value in graph.held.items()}
    values |= {leaf.name: parameters[leaf.path] for leaf in graph.parameters}
    values |= {leaf.name: value for leaf, value in zip(graph.inputs, inputs, strict=True)}
    variables = [value for value in (*parameters.values(), *inputs) if value.requires_grad]
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad(), double_by_default():
        live, read = select_outputs(model(*inputs[: len(args)], **keywords)), outputs_of(graph, values)
    slopes = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.device) for out in live]
    found = [
        torch.autograd.grad(sum((out * slope).sum() for out, slope in zip(outs, slopes, strict=True)), variables,
                            allow_unused=True, materialize_grads=True)
        for outs in (live, read)
    ]  # fmt: skip
    if scale != 1 and not all(bool(b.isfinite().all()) for b in found[1]):
        return True  # too far from the example to say anything
    sizes = [float(b.abs().max()) for b in found[1]]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4 * size) for a, b, size in zip(*found, sizes, strict=True))


def _scaled(value: Tensor, scale: float) -> Tensor:
    return (value.detach().double() * scale).requires_grad_() if value.is_floating_point() else value


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
    attributes = [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    bodies = [body for a in attributes if isinstance(body := getattr(module, str(a.target), None), fx.GraphModule)]
    body = bodies[0] if bodies else None
    if str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False:
        # Decisions have no gradient anyway: only real numbers that leave the region are cut off.
        results = [user for user in node.users if user.target is operator.getitem and user.users]
        if any(_is_real(result.meta.get("val")) for result in results):
            computing = [inner for inner in body.graph.nodes if inner.op == "call_function"] if body else []
            raise _severed("is computed under torch.no_grad()", computing[0] if computing else node)
    elif body is not None:
        operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
        inputs = body.graph.find_nodes(op="placeholder")
        _check(body, [p for p, o in zip(inputs, operands[-len(inputs) :], strict=False) if o in varying])


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _severed(how: str, node: fx.Node) -> CaptureError:
    remedy = (
        f"{_NO_STEP}let the gradient pass (in torch.utils.checkpoint, with use_reentrant=False), or freeze these "
        "parameters with requires_grad_(False)."
    )
    what = f"a tensor that depends on the parameters {how}"
    return CaptureError(what, where=module_path(node), remedy=remedy)


_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
