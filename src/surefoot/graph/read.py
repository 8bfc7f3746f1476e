"""From an exported program to a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from surefoot.errors import CaptureError
from surefoot.graph.nodes import PREFIX, Leaf, Node, Ref, Source, Spec, fresh, module_path, operation
from surefoot.graph.structure import Graph, assemble
from surefoot.program.checks import span
from surefoot.torch_private import HigherOrderOperator, storage_of

Rewrite = Callable[[Iterable[Node]], list[Node]]
UNKNOWN = -1  # a size that only the data decides


def read(program: ExportedProgram, model: nn.Module, rewrite: Rewrite) -> Graph:
    """The graph of a traced model, its operations rewritten."""
    owned = Owned(model)
    leaves: dict[str, Leaf] = {}
    held: dict[str, Tensor] = {}
    values: dict[fx.Node, Any] = {}
    first: dict[tuple[Source, str], str] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for placeholder in program.graph.find_nodes(op="placeholder"):
        leaf, value = _leaf(placeholder, specs[placeholder.name], program, owned)
        name = first.setdefault((leaf.source, leaf.path), leaf.name)
        values[placeholder] = Ref(name)
        if name == leaf.name:
            leaves[name] = leaf
            if value is not None:
                held[name] = value
    nodes = list(operations(program.graph_module, values, set(leaves)))
    (returned,) = program.graph.find_nodes(op="output")
    outputs = [
        values[node].name
        for node, spec in zip(returned.args[0], program.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    graph = assemble(leaves, rewrite(nodes), tuple(outputs), held, owned.aliases)
    _refuse_written(program, graph)
    return graph


def _leaf(
    placeholder: fx.Node, spec: InputSpec, program: ExportedProgram, owned: Owned
) -> tuple[Leaf, Tensor | None]:
    """A leaf, and its value if the graph holds it."""
    value = placeholder.meta["val"]
    path = (spec.target or placeholder.name).removeprefix(f"{PREFIX}.")
    source, held = Source.INPUT, None
    match spec.kind:
        case InputKind.PARAMETER | InputKind.BUFFER:
            source, path, held = owned.find(path)
        case InputKind.CONSTANT_TENSOR:
            source, path, held = owned.identify(path, program.constants[spec.target or ""])
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"the model reads '{placeholder.name}', which is no tensor", remedy="Pass tensors only."
        )
    if value.layout is not torch.strided and placeholder.users and held is None:
        owner, _, name = path.rpartition(".")
        remedy = "Hold it as a dense tensor: value.to_dense(). Buffers may be sparse."
        raise CaptureError(f"the {source.value} '{name}' is a sparse tensor", where=owner, remedy=remedy)
    return Leaf(placeholder.name, path, source, _spec(value)), None if held is None else dense(held)


def dense(value: Tensor, before: Tensor | None = None) -> Tensor:
    """A tensor that a graph holds, as a dense one; that of before, if a sparse one has not changed."""
    if value.layout is torch.strided:
        return value
    written_out = value.detach().to_dense()
    unchanged = before is not None and before.dtype == value.dtype and torch.equal(before, written_out)
    return before if before is not None and unchanged else written_out


def operations(module: fx.GraphModule, values: dict[fx.Node, Any], taken: set[str]) -> Iterator[Node]:
    """The operations of a graph module; bodies of ``no_grad`` and ``autocast`` regions are read in place."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values.setdefault(node, getattr(module, str(node.target)))
        elif node.op == "call_function":
            if isinstance(node.target, HigherOrderOperator):
                yield from _region(node, values, taken)
                continue
            result = node.meta.get("val")
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            if result is None:  # assertions
                continue
            if isinstance(result, int | float | bool):
                values[node] = result
            elif node.target is operator.getitem and isinstance(args[0], tuple | list):
                values[node] = args[0][args[1]]
            else:
                values[node] = Ref(fresh(node.name, taken))
                yield _node(node, values[node].name, args, kwargs)


def _node(node: fx.Node, name: str, args: Any, kwargs: Mapping[str, Any]) -> Node:
    result = node.meta["val"]
    found = Node(
        name=name,
        op=operation(node.target),
        target=node.target,  # type: ignore[arg-type]
        args=tuple(_plain(argument) for argument in args),
        kwargs={key: _plain(argument) for key, argument in kwargs.items()},
        module=module_path(node),
        spec=_specs(result),
    )
    return plain(found, result.device) if isinstance(result, Tensor) else found


def _region(node: fx.Node, values: dict[fx.Node, Any], taken: set[str]) -> Iterator[Node]:
    """The body of a higher-order operation that only says how gradients or element types are handled."""
    name = str(node.target)
    bodies = [a for a in node.args if isinstance(a, fx.Node) and isinstance(values.get(a), fx.GraphModule)]
    if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast") or len(bodies) != 1:
        what = f"the model contains the control flow operation '{name}'"
        remedy = "A certificate covers one function: unroll the loop or fix the branch."
        raise CaptureError(what, where=module_path(node), remedy=remedy)
    if name == "wrap_with_autocast" and node.args[2]:
        what = "the forward pass switches to a lower precision (torch.autocast)"
        remedy = "A certificate speaks of real numbers: leave the choice of precision to the training loop."
        raise CaptureError(what, where=module_path(node), remedy=remedy)
    body: fx.GraphModule = values[bodies[0]]
    operands = node.args[node.args.index(bodies[0]) + 1 :]
    inner: dict[fx.Node, Any] = {}
    for placeholder, operand in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
        inner[placeholder] = fx.map_arg(operand, lambda n: values[n])
    yield from operations(body, inner, taken)
    (output,) = body.graph.find_nodes(op="output")
    values[node] = fx.map_arg(output.args[0], lambda n: inner[n])


def _refuse_written(program: ExportedProgram, graph: Graph) -> None:
    """Refuse a program that changes what its next run would compute.

    Running statistics are written to as well, but what a batch normalisation returns while it trains does not
    depend on them: they are no leaves of the graph.
    """
    paths = {leaf.path for leaf in graph.leaves.values()}
    for spec in program.graph_signature.output_specs:
        path = (spec.target or "").removeprefix(f"{PREFIX}.")
        owner, _, name = path.rpartition(".")
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            what, where = "the forward pass writes into its input", ""
        elif spec.kind is OutputKind.PARAMETER_MUTATION:
            what, where = f"the forward pass writes into the parameter '{name}'", owner
        elif spec.kind is OutputKind.BUFFER_MUTATION and path in paths:
            what, where = f"the forward pass reads the buffer '{name}' and writes into it", owner
        else:
            continue
        remedy = (
            "Make forward a pure function: work on a copy (x = x.clone()), or call model.eval() if that stops it."
        )
        raise CaptureError(what, where=where, remedy=remedy)


def _plain(argument: Any) -> Any:
    """Immutable fx containers as ordinary ones."""
    if type(argument) is tuple:
        return tuple(map(_plain, argument))
    if isinstance(argument, list | tuple) and not isinstance(argument, torch.Size):
        return list(map(_plain, argument))
    return argument


def _specs(value: Any) -> Spec | tuple[Spec, ...]:
    """One spec or several; none at all for a number that was taken out of a tensor."""
    if isinstance(value, Tensor):
        return _spec(value)
    items = value if isinstance(value, tuple | list) else ()
    return tuple(_spec(item) for item in items if isinstance(item, Tensor))


def _spec(value: Tensor) -> Spec:
    return Spec(tuple(n if type(n) is int else UNKNOWN for n in value.shape), value.dtype)


class Owned:
    """Parameters and buffers of a model.

    Attributes:
        aliases: for a tensor with several paths, every further path to the first one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, tuple[Source, Tensor]] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._tensors[path] = Source.PARAMETER if parameter.requires_grad else Source.FROZEN, parameter
        for path, buffer in model.named_buffers(remove_duplicate=False):
            self._tensors[path] = Source.BUFFER, buffer
        first: dict[int, str] = {}
        self._first = {path: first.setdefault(id(value), path) for path, (_, value) in self._tensors.items()}
        self.aliases = {path: first for path, first in self._first.items() if path != first}

    def find(self, path: str) -> tuple[Source, str, Tensor | None]:
        """What goes by a path: its kind, its first path, and its value unless it varies."""
        first = self._first[path]
        source, value = self._tensors[first]
        return source, first, None if source is Source.PARAMETER else value

    def identify(self, path: str, value: Tensor) -> tuple[Source, str, Tensor | None]:
        """What a constant of a traced program is: a parameter reached by another way, or a constant."""
        for name, (source, owned) in self._tensors.items():
            overlaps = _overlap(owned, value)
            same = overlaps and span(owned) == span(value) and owned.shape == value.shape
            if owned is value or (same and owned.stride() == value.stride()):
                return self.find(name)
            if source is Source.PARAMETER and overlaps:
                what = f"the forward pass reads a view of the parameter '{name}' that was made outside of it"
                remedy = "Make the view inside forward, so that its gradient reaches the parameter."
                raise CaptureError(what, where=name.rpartition(".")[0], remedy=remedy)
        return Source.CONSTANT, path, value


def _overlap(a: Tensor, b: Tensor) -> bool:
    if any(value.layout is not torch.strided or not value.numel() for value in (a, b)):
        return False
    if storage_of(a) != storage_of(b):
        return False
    (start, stop), (other, end) = span(a), span(b)
    return start < end and other < stop


_aten: Any = torch.ops.aten


def plain(node: Node, device: torch.device) -> Node:
    """The same computation by the plainest operation there is; other nodes unchanged.

    Memory that is not initialised is filled with zeros: what a model returns may not depend on it. A view is a
    reshape that promises a memory layout, and layouts may differ between two runs. As a function, to detach is to
    do nothing; where that would matter the model is refused.
    """
    if node.op in _FILLS and isinstance(node.spec, Spec):
        value = node.arguments["fill_value"] if _FILLS[node.op] is None else _FILLS[node.op]
        settings = {"dtype": node.spec.dtype, "device": device}
        if not isinstance(value, Ref):
            return node.by(_aten.full.default, args=(list(node.spec.shape), value), kwargs=settings)
    if node.op in _VIEWS and len(node.args) == 2 and isinstance(node.args[1], list):
        return node.by(_aten.reshape.default)
    return node.by(_aten.alias.default) if node.op in _DETACHES else node


_VIEWS = ("aten.view", "aten._unsafe_view")
_DETACHES = ("aten.detach", "aten.detach_")
_FILLS: dict[str, float | None] = {
    "aten.zeros_like": 0, "aten.new_zeros": 0, "aten.empty": 0, "aten.empty_like": 0, "aten.empty_strided": 0,
    "aten.new_empty": 0, "aten.ones_like": 1, "aten.new_ones": 1, "aten.full_like": None, "aten.new_full": None,
}  # fmt: skip
