"""From a PyTorch model to a graph, through ``torch.export``."""

from __future__ import annotations

import dataclasses
import logging
import operator
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from surefoot.errors import CaptureError, SurefootError
from surefoot.graph.canonical import canonical
from surefoot.graph.checks import as_inputs, check_inputs, check_model
from surefoot.graph.compose import blocks_of
from surefoot.graph.fingerprint import fingerprint
from surefoot.graph.outputs import select_outputs
from surefoot.graph.preserve import preserved
from surefoot.graph.refusals import refuse_unfaithful
from surefoot.graph.structure import Graph, Leaf, Node, Ref, Source, Spec, ordered

_PREFIX = "model"
_cache: WeakKeyDictionary[nn.Module, dict[Any, tuple[Graph, tuple[Any, ...]]]] = WeakKeyDictionary()


def capture(model: nn.Module, x: Any) -> Graph:
    """Read a model as a graph of operations.

    The model is left exactly as it was: mode, attributes, hooks, gradient flags, buffers, random state.
    A capture depends on shapes, not on values, so it is cached per model and shape.

    Args:
        model: any module that ``torch.export`` can trace; it may live on the ``meta`` device.
        x: an example batch: a tensor, a tuple of tensors, or a dict of keyword tensors.

    Returns:
        The graph, whose buffers and constants refer to the model's.

    Raises:
        CaptureError: if the model or the input cannot be read faithfully; it says what, where, what to do.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> print(capture(model, torch.ones(2, 3)))
    Graph: 2 operations, 1 parameter blocks, returns relu
    linear   aten.linear  2×4  0
    relu     aten.relu    2×4  1
    """
    check_model(model)
    args, kwargs = as_inputs(x)
    check_inputs(args, kwargs)
    key = (
        fingerprint(model),
        tuple(map(_describe, args)),
        tuple((k, _describe(v)) for k, v in kwargs.items()),
    )
    graphs = _cache.setdefault(model, {})
    if key not in graphs:
        graphs[key] = _capture(model, args, kwargs), ()
    graph, versions = graphs[key]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    held = {
        leaf.name: buffers[leaf.path] if leaf.source is Source.BUFFER else graph.held[leaf.name]
        for leaf in graph.leaves.values()
        if leaf.source in (Source.BUFFER, Source.CONSTANT)
    }
    present = tuple((id(value), value._version) for value in held.values())
    if present != versions:  # what the graph computes from buffers and constants has to be computed anew
        graph = dataclasses.replace(graph, held=held)
        graphs[key] = graph, present
    return graph


class _Selected(nn.Module):
    """The model with its output reduced to tensors, while it is being traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return select_outputs(self.model(*args, **kwargs))


def _capture(model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Graph:
    with preserved(model), _quiet():
        program = _export(model, args, dict(kwargs))
    graph = _read(program, model)
    refuse_unfaithful(graph)
    return graph


def _export(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> ExportedProgram:
    """Run ``torch.export``, in functional form, and translate what it raises."""
    torch.backends.mha.set_fastpath_enabled(False)  # the fused kernel has no derivative; same function
    try:
        with torch.enable_grad():
            program = torch.export.export(_Selected(model), args, kwargs, strict=False)
            if any(_mutates(node) for node in program.graph.nodes):
                program = program.run_decompositions({})
        return program
    except SurefootError:
        raise
    except Exception as error:  # torch.export raises many types; all mean the same to the user
        raise _translate(error, model) from error


def _mutates(node: fx.Node) -> bool:
    """Whether an operation writes into one of its arguments (counting batches does not matter)."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return False
    target = node.args[0] if node.args else None
    return not (isinstance(target, fx.Node) and target.name.endswith("num_batches_tracked"))


def _translate(error: Exception, model: nn.Module) -> CaptureError:
    """An error of ``torch.export`` in the user's terms, with the module in which it arose."""
    where, text = _place(error, model), str(error)
    summary = text.strip().split("\n")[0][:300]
    if re.search(
        r"data.dependent|GuardOnDataDependent|Could not guard|_local_scalar_dense|unbacked", text, re.I
    ):
        return CaptureError(
            f"the control flow depends on the data ({summary})",
            where=where,
            remedy="A certificate covers one function: replace the branch by torch.where, or fix its outcome.",
        )
    if re.search(
        r"assigned during export|attribute.*(mutat|assign)|in-?place|mutat|leaf [Vv]ariable", text, re.I
    ):
        return CaptureError(
            f"the forward pass writes into a tensor or an attribute ({summary})",
            where=where,
            remedy="Make forward a pure function: return new tensors, keep no results on self.",
        )
    return CaptureError(
        f"the forward pass failed while it was traced: {type(error).__name__}: {summary}",
        where=where,
        remedy="Check that model(x) runs on this input; if it does, simplify what torch.export cannot trace.",
    )


def _place(error: BaseException, model: nn.Module) -> str | None:
    """The path of the innermost module of the model on the error's traceback."""
    paths = {id(module): path for path, module in model.named_modules()}
    place = None
    while error.__cause__ is not None:
        error = error.__cause__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            place = paths[id(owner)]
    return place


def _read(program: ExportedProgram, model: nn.Module) -> Graph:
    """Translate the exported program."""
    leaves: dict[str, Leaf] = {}
    held: dict[str, Tensor] = {}
    names: dict[fx.Node, Any] = {}
    known, aliases = _tied(model)
    first_leaf: dict[tuple[Source, str], str] = {}
    inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for placeholder in program.graph.find_nodes(op="placeholder"):
        spec = inputs[placeholder.name]
        value = placeholder.meta["val"]
        if not isinstance(value, Tensor):
            raise CaptureError(f"input '{placeholder.name}' is no tensor", remedy="Pass tensors only.")
        source, path, trainable = _origin(spec.kind, spec.target, known)
        leaf_name = first_leaf.setdefault((source, path or placeholder.name), placeholder.name)
        names[placeholder] = Ref(leaf_name)
        if leaf_name == placeholder.name:
            leaves[leaf_name] = Leaf(leaf_name, path or leaf_name, source, _spec(value), trainable)
            if source is Source.CONSTANT:
                held[leaf_name] = program.constants[spec.target or ""]
    nodes = list(_nodes(program.graph_module, names))
    returned = {
        spec.arg.name for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"
    }
    (output,) = program.graph.find_nodes(op="output")
    outputs = tuple(names[n].name for n in output.args[0] if isinstance(n, fx.Node) and n.name in returned)
    return _assemble(leaves, canonical(nodes), outputs, held, aliases)


def _tied(model: nn.Module) -> tuple[dict[str, tuple[str, bool]], dict[str, str]]:
    """Every path of a parameter to (the first path of the same tensor, trainable); and the tied ones alone."""
    first: dict[int, str] = {}
    known: dict[str, tuple[str, bool]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), path)
        known[path] = first[id(parameter)], parameter.requires_grad
    return known, {path: name for path, (name, _) in known.items() if path != name}


def _origin(
    kind: InputKind, target: str | None, known: Mapping[str, tuple[str, bool]]
) -> tuple[Source, str, bool]:
    path = (target or "").removeprefix(f"{_PREFIX}.")
    match kind:
        case InputKind.PARAMETER:
            name, trainable = known[path]
            return Source.PARAMETER, name, trainable
        case InputKind.BUFFER:
            return Source.BUFFER, path, False
        case InputKind.CONSTANT_TENSOR:
            return Source.CONSTANT, path, False
        case InputKind.USER_INPUT:
            return Source.INPUT, "", False
        case _:
            raise CaptureError(f"the model reads a {kind.name.lower()}", remedy="Pass tensors only.")


def _nodes(module: fx.GraphModule, names: dict[fx.Node, Any]) -> Iterator[Node]:
    """The operations of a graph module; bodies of ``no_grad`` and ``autocast`` regions are read in place."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            names[node] = getattr(module, str(node.target))
        elif node.op == "call_function":
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                yield from _region(node, names)
                continue
            value = node.meta.get("val")
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: names[n])
            if isinstance(value, int | float | bool):
                names[node] = value
                continue
            if value is None:  # assertions
                continue
            if node.target is operator.getitem and isinstance(arguments[0][0], tuple | list):
                names[node] = arguments[0][0][arguments[0][1]]
                continue
            names[node] = Ref(node.name)
            yield Node(
                name=node.name,
                op=_operation(node.target),
                target=node.target,
                args=tuple(_plain(a) for a in arguments[0]),
                kwargs={key: _plain(a) for key, a in arguments[1].items()},
                module=_module_path(node),
                spec=_specs(value),
            )


def _region(node: fx.Node, names: dict[fx.Node, Any]) -> Iterator[Node]:
    """The body of a higher-order operation that only changes how gradients or types are handled."""
    name = str(node.target)
    graphs = [a for a in node.args if isinstance(a, fx.Node) and isinstance(names.get(a), fx.GraphModule)]
    if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast") or len(graphs) != 1:
        raise CaptureError(
            f"the model contains the control flow operation '{name}'",
            where=_module_path(node),
            remedy="A certificate covers one function: unroll the loop or fix the branch.",
        )
    body: fx.GraphModule = names[graphs[0]]
    operands = node.args[node.args.index(graphs[0]) + 1 :]
    inner: dict[fx.Node, Any] = {}
    for placeholder, operand in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
        inner[placeholder] = fx.map_arg(operand, lambda n: names[n])
    for child in _nodes(body, inner):
        yield dataclasses.replace(
            child, name=f"{node.name}_{child.name}", **_renamed(child, node.name, inner)
        )
    (output,) = body.graph.find_nodes(op="output")
    local = {n.name for n in body.graph.nodes if n.op == "call_function"}
    names[node] = fx.map_arg(output.args[0], lambda n: _rename(inner[n], node.name, local))


def _renamed(child: Node, prefix: str, inner: Mapping[fx.Node, Any]) -> dict[str, Any]:
    local = {n.name for n in inner if n.op == "call_function"}
    return {
        "args": tuple(_rename(a, prefix, local) for a in child.args),
        "kwargs": {key: _rename(a, prefix, local) for key, a in child.kwargs.items()},
    }


def _rename(argument: Any, prefix: str, local: set[str]) -> Any:
    """Names of a region's own tensors get the region's name in front, so that they stay unique."""
    if isinstance(argument, Ref) and argument.name in local:
        return Ref(f"{prefix}_{argument.name}")
    if isinstance(argument, list | tuple):
        return type(argument)(_rename(item, prefix, local) for item in argument)
    return argument


def _assemble(
    leaves: dict[str, Leaf],
    nodes: list[Node],
    outputs: tuple[str, ...],
    held: dict[str, Tensor],
    aliases: dict[str, str],
) -> Graph:
    """Drop what no output depends on and collect the parameter blocks."""
    needed = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed.update(node.inputs)
    kept.reverse()
    leaves = {name: leaf for name, leaf in leaves.items() if name in needed or leaf.source is Source.INPUT}
    arranged = ordered(kept, leaves)
    used = {leaf.path for leaf in leaves.values()}
    return Graph(
        leaves=leaves,
        nodes=tuple(arranged),
        outputs=outputs,
        blocks=blocks_of(arranged, leaves),
        held={name: value for name, value in held.items() if name in leaves},
        aliases={path: name for path, name in aliases.items() if name in used},
    )


def _operation(target: Any) -> str:
    """``aten.conv2d`` for ``aten.conv2d.default``; the plain name of a Python function."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


def _plain(argument: Any) -> Any:
    """Immutable fx containers as ordinary ones."""
    if isinstance(argument, list | tuple) and not isinstance(argument, torch.Size):
        return (
            type(argument)(map(_plain, argument)) if type(argument) is tuple else list(map(_plain, argument))
        )
    return argument


def _module_path(node: fx.Node) -> str:
    """The path of the innermost module that called the operation."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path).removeprefix(_PREFIX).removeprefix(".")


def _specs(value: Any) -> Spec | tuple[Spec, ...]:
    if isinstance(value, Tensor):
        return _spec(value)
    return tuple(_spec(item) for item in value if isinstance(item, Tensor))


def _spec(value: Tensor) -> Spec:
    return Spec(tuple(int(n) for n in value.shape), value.dtype)


def _describe(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype, value.device


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what ``torch.export`` says to its own developers; errors still come through."""
    loggers = [logging.getLogger(name) for name in ("torch.fx", "torch._export", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


__all__ = ["capture"]
