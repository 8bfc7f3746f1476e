r"""Passes of a graph as lists of calls: forward, push-forward and pull-back, traced once.

Automatic differentiation records a graph anew at every point, and another one to push forward. Both are the same
at all points. Here they are traced once: :math:`\psi(u)`, :math:`v \mapsto \nabla\psi(u)^\top v` by forward and
:math:`\mu \mapsto \nabla\psi(u)\mu` by backward derivatives become three functions without branches.

*The cut.* What the outputs need is computed in the forward pass, which keeps the part of it that the other two
read. All else, also what depends on u alone, is computed in the pass that reads it: so no more is held between
passes than a gradient holds.

*Trust.* A trace with an operation that draws random numbers or writes to an argument is not taken. It is used for
tensors of the same types, shapes, strides and places, and :class:`surefoot.chain.autodiff.Autodiff` compares it
with automatic differentiation before its first use.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.func import functionalize, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.graph import Graph
from surefoot.operations.record import Form, Operation, records
from surefoot.torch_private import schema_of

Run = Callable[[Mapping[str, Any]], tuple[Any, ...]]
_aten: Any = torch.ops.aten
_COPIES = (_aten.alias.default, _aten.detach.default)
_known: WeakKeyDictionary[Graph, dict[Any, Passes | None]] = WeakKeyDictionary()


class Passes:
    """The passes of a graph for tensors of one kind.

    Args:
        run: computes the outputs from the values of all leaves, by name.
        values: such values.
        names: of the leaves in which derivatives are taken, by path.

    Attributes:
        paths: of these leaves, in the order of directions and gradients.
        push: from what :meth:`at` keeps and one direction per leaf that varies to the changes of the outputs.
        pull: from what is kept and one slope per output to the gradients.
        pull_onto: the same with sums as further arguments, to which each gradient is added as soon as it is known.

    Raises:
        RuntimeError: if it cannot be traced.
    """

    def __init__(self, run: Run, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.paths, varying = tuple(names), tuple(names.values())
        self._names = [name for name, value in values.items() if isinstance(value, Tensor)]

        def all_three(given: list[Tensor], along: list[Tensor], slopes: list[Tensor]) -> tuple[Any, ...]:
            leaves = {**values, **dict(zip(self._names, given, strict=True))}

            def outputs(*moving: Tensor) -> tuple[Any, ...]:
                return run({**leaves, **dict(zip(varying, moving, strict=True))})

            at = tuple(leaves[name] for name in varying)
            pair: Any = jvp(outputs, at, tuple(along))
            return *pair, vjp(outputs, *at)[1](tuple(slopes))

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its derivatives
            slopes = [torch.zeros_like(output, memory_format=torch.contiguous_format) for output in run(values)]
            along = [torch.zeros_like(values[name], memory_format=torch.contiguous_format) for name in varying]
            given = [values[name].detach() for name in self._names]
            module = make_fx(functionalize(all_three, remove="mutations"))(given, along, slopes)
        graph, count = module.graph, len(slopes)
        _simplify(graph)
        read = list(graph.find_nodes(op="placeholder"))
        leaves, read = read[: len(given)], read[len(given) :]
        forward = _ancestors(_parts(graph, count)[0])
        forward |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in forward}
        _join_products(graph, forward)
        outputs, changes, gradients = _parts(graph, count)
        push, pull = _ancestors(changes, forward), _ancestors(gradients, forward)
        needed = {*changes, *gradients}.union(*(node.all_input_nodes for node in (*push, *pull)))
        kept = [node for node in graph.nodes if node in forward & needed and node.op != "placeholder"]
        self._outputs, held = count, [*leaves, *kept]
        self._forward = _function(module, forward, leaves, [*outputs, *kept])
        self.push = _function(module, push, [*held, *read[: len(along)]], changes)
        self.pull = _function(module, pull, [*held, *read[len(along) :]], gradients)
        self.pull_onto = _function(module, pull, [*held, *read[len(along) :]], gradients, onto=True)

    def at(self, values: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The outputs, and what the other passes take first."""
        leaves = [values[name] for name in self._names]
        found = self._forward(*leaves)
        return found[: self._outputs], [*leaves, *found[self._outputs :]]


class Traced:
    """The passes of a graph at a point; compare :class:`surefoot.chain.recorded.Recorded`.

    Args:
        passes: those of the graph.
        values: of all leaves, by name.
        leaves: the parameters in which derivatives are taken, by path, also such as the graph does not read.
    """

    pushed = None

    def __init__(self, passes: Passes, values: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> None:
        self._passes, self._leaves = passes, leaves
        with torch.no_grad():
            self.outputs, self._held = passes.at(values)

    def pull(self, slopes: Sequence[Tensor]) -> dict[str, Tensor]:
        """The gradients for one slope per output."""
        with torch.no_grad():
            found = self._passes.pull(*self._held, *(slope.contiguous() for slope in slopes))
            known = dict(zip(self._passes.paths, found, strict=True))
            return {
                path: known[path] if path in known else torch.zeros_like(u) for path, u in self._leaves.items()
            }

    def pull_onto(self, sums: Mapping[str, Tensor], slope: Tensor) -> None:
        """Add the gradients for the slope of the only output to tensors by path."""
        with torch.no_grad():
            self._passes.pull_onto(*self._held, slope.contiguous(), *(sums[path] for path in self._passes.paths))

    def push(self, direction: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The changes of the outputs."""
        with torch.no_grad():
            along = (
                direction[p] if p in direction else torch.zeros_like(self._leaves[p]) for p in self._passes.paths
            )
            return self._passes.push(*self._held, *(each.contiguous() for each in along))


def is_traced(graph: Graph) -> bool:
    """Whether passes of it were traced, for tensors of some kind."""
    return graph in _known


def find(graph: Graph, values: Mapping[str, Any], names: Mapping[str, str]) -> Passes | None:
    """The passes of a graph for values of this kind, if they were traced."""
    return _known.get(graph, {}).get(_kind(values, names))


def trace(graph: Graph, values: Mapping[str, Any], names: Mapping[str, str], run: Run) -> Passes | None:
    """The same, traced if they were not; ``None`` where that is not possible."""
    known, kind = _known.setdefault(graph, {}), _kind(values, names)
    if kind not in known:
        try:
            known[kind] = Passes(run, values, names)
        except RuntimeError:  # an operation without a forward derivative, or one that is not traced
            known[kind] = None
    return known[kind]


def refuse(graph: Graph, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Do not use what was traced."""
    _known[graph][_kind(values, names)] = None


def _kind(values: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.device, value.shape, value.stride()
        return repr(value)

    return tuple(names), tuple((name, of(value)) for name, value in values.items())


def _simplify(graph: fx.Graph) -> None:
    """Equal operations are made once, and what is zero for certain is not added.

    Raises:
        RuntimeError: if an operation draws random numbers or writes to an argument.
    """
    seen: dict[Any, fx.Node] = {}
    zeros: set[fx.Node] = set()
    known = records()
    for node in list(graph.nodes):
        schema = schema_of(node.target)
        if node.op != "call_function":
            continue
        if schema is not None:
            if schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
                raise RuntimeError(f"{node.target} cannot be traced")
            if _is_zero(node, known.get(str(node.target.overloadpacket)), zeros):
                zeros.add(node)
        rest = [part for part in node.args if part not in zeros] if _is_sum(node) else []
        if len(rest) == 1 and _dtype(rest[0]) == _dtype(node):
            with graph.inserting_before(node):
                same = graph.call_function(_aten.expand.default, (rest[0], list(_shape(node))))
            same.meta = node.meta
        elif node.target in _COPIES:
            same = node.args[0]
        else:
            same = seen.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)


def _parts(graph: fx.Graph, count: int) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """The outputs, so many, their changes, and the gradients."""
    returned: Any = graph.output_node().args[0]
    return tuple(map(list, (returned[:count], returned[count : 2 * count], returned[2 * count :])))  # type: ignore[return-value]


def _is_zero(node: fx.Node, record: Operation | None, zeros: set[fx.Node]) -> bool:
    """Whether a result is zero: made so, moved from zeros, or a product with a factor that is."""
    if node.target is _aten.zeros.default:
        return True
    if record is None or not node.all_input_nodes:
        return False
    if record.form is Form.LAYOUT:
        return all(part in zeros for part in node.all_input_nodes)
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    tensors = {name for name, value in given.items() if isinstance(value, fx.Node)}
    return (
        record.form is Form.PRODUCT
        and tensors <= set(record.factors)
        and any(given[name] in zeros for name in tensors)
    )


def _is_sum(node: fx.Node) -> bool:
    two = all(isinstance(part, fx.Node) for part in node.args) and len(node.args) == 2
    return node.target is _aten.add.Tensor and two and not node.kwargs


def _dtype(node: fx.Node) -> Any:
    return getattr(node.meta.get("tensor_meta"), "dtype", None)


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("tensor_meta"), "shape", None)


def _join_products(graph: fx.Graph, without: set[fx.Node]) -> None:
    """A sum of a matrix and a matrix product is one call; the forward pass stays as it is."""
    for node in list(graph.nodes):
        if node in without or not _is_sum(node):
            continue
        for first, second in (node.args, node.args[::-1]):
            shaped = (
                second.target is _aten.mm.default
                and second.meta["tensor_meta"].shape == node.meta["tensor_meta"].shape
            )
            if shaped and len(second.users) == 1 and second not in without and _dtype(first) == _dtype(node):
                with graph.inserting_before(node):
                    joined = graph.call_function(_aten.addmm.default, (first, *second.args))
                joined.meta = node.meta
                node.replace_all_uses_with(joined)
                break


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value if isinstance(value, fx.Node) else (type(value), value)


def _ancestors(nodes: Iterable[Any], without: Iterable[fx.Node] = ()) -> set[fx.Node]:
    found, waiting = set(without), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found.difference(without)


def _function(
    module: fx.GraphModule, nodes: set[fx.Node], reads: list[fx.Node], returns: list[fx.Node], onto: bool = False
) -> Callable[..., Any]:
    """The nodes as a function; or one that adds what it would return to further arguments."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in reads}
    sums = [graph.placeholder(f"onto_{k}") for k in range(len(returns))] if onto else []
    for node in module.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for k in range(len(sums)):
            if returns[k] is node:
                graph.call_function(_aten.add_.Tensor, (sums[k], copies[node]))
    graph.output(() if onto else tuple(copies[node] for node in returns))
    return fx.GraphModule(module, graph).forward
