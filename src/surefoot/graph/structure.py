"""The graph: leaves, nodes in order, parameter blocks, and which tensors are alive between two nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ref:
    """A tensor of the graph, by name, in the arguments of a node."""

    name: str


@dataclass(frozen=True)
class Spec:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return int(torch.Size(self.shape).numel())


class Source(Enum):
    """Where the value of a leaf comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


class Role(Flag):
    """What the value of a tensor depends on: nothing, the parameters, the input, or both."""

    CONSTANT = 0
    PARAMETERS = auto()
    INPUT = auto()


@dataclass(frozen=True)
class Leaf:
    """A tensor that comes from outside: an input, a parameter, a buffer or a constant.

    Attributes:
        name: its name in the graph.
        path: its name in the model: ``features.0.weight``.
        source: where it comes from.
        spec: its shape and type.
        trainable: whether a parameter asks for gradients.
    """

    name: str
    path: str
    source: Source
    spec: Spec
    trainable: bool = False


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        name: the name of its result.
        op: the operation without its overload: ``aten.conv2d``.
        target: the function that computes it.
        args: positional arguments, with :class:`Ref` in place of tensors.
        kwargs: keyword arguments, likewise.
        module: path of the module that called it; ``""`` is the model itself.
        spec: shape and type of the result, a tuple of them if there are several.
    """

    name: str
    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str
    spec: Spec | tuple[Spec, ...]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, each once, in order of appearance."""
        names = [ref.name for ref in _refs((self.args, dict(self.kwargs)))]
        return tuple(dict.fromkeys(names))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the name the operation's signature gives them, defaults filled in."""
        schema = getattr(self.target, "_schema", None)
        if schema is None:
            return {**dict(zip(_parameter_names(self.target), self.args, strict=False)), **self.kwargs}
        bound: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments):
            if position < len(self.args):
                bound[argument.name] = self.args[position]
            elif argument.name in self.kwargs:
                bound[argument.name] = self.kwargs[argument.name]
            else:
                bound[argument.name] = argument.default_value if argument.has_default_value() else None
        return bound

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of its results, one or several."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,)

    @property
    def numel(self) -> int:
        """How many numbers the result holds."""
        return sum(spec.numel for spec in self.specs)

    def run(self, values: Mapping[str, Any]) -> Any:
        """Compute it from the values of its inputs."""
        args = [_fill(argument, values) for argument in self.args]
        kwargs = {key: _fill(argument, values) for key, argument in self.kwargs.items()}
        return self.target(*args, **kwargs)


@dataclass(frozen=True)
class Block:
    """What one module directly owns: weight and bias together, the paper's :math:`u_t`.

    Attributes:
        path: path of the owning module.
        parameters: names of its leaves in the graph.
    """

    path: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """A model as a list of operations on named tensors.

    The graph depends on shapes, not on values: parameters are passed when it is run. Buffers and constants
    come along by reference.

    Attributes:
        leaves: inputs, parameters, buffers and constants that the output depends on, by name.
        nodes: the operations, in an order in which they can be computed.
        outputs: names of the tensors the model returns.
        blocks: parameter blocks, by module path, in order of first use.
        held: values of buffers and constants, by leaf name.
        aliases: for tied weights, every further path to the path under which the graph knows it.
    """

    leaves: Mapping[str, Leaf]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    blocks: Mapping[str, Block]
    held: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def inputs(self) -> tuple[Leaf, ...]:
        """The leaves that are the model's input."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.source is Source.INPUT)

    @cached_property
    def parameters(self) -> tuple[Leaf, ...]:
        """The leaves that are parameters."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.source is Source.PARAMETER)

    @cached_property
    def roles(self) -> dict[str, Role]:
        """What each tensor depends on."""
        return _roles(self.nodes, self.leaves)

    @cached_property
    def blocks_read(self) -> dict[str, frozenset[str]]:
        """For each node that depends on the input, the blocks it reads, also through functions of parameters.

        A tensor computed from parameters alone belongs to the nodes that read it.
        """
        owner = {name: frozenset([path]) for path, block in self.blocks.items() for name in block.parameters}
        read: dict[str, frozenset[str]] = {}
        for node in self.nodes:
            sources = (owner[name] for name in node.inputs if name in owner)
            blocks = frozenset[str]().union(*sources)
            if Role.INPUT in self.roles[node.name]:
                read[node.name] = blocks
            else:
                owner[node.name] = blocks
        return read

    @cached_property
    def constant_names(self) -> frozenset[str]:
        """Names of the nodes that depend neither on the input nor on the parameters."""
        return frozenset(node.name for node in self.nodes if self.roles[node.name] == Role.CONSTANT)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Values of buffers, constants and what is computed from them alone."""
        values: dict[str, Any] = dict(self.held)
        for node in self.nodes:
            if node.name in self.constant_names:
                values[node.name] = node.run(values)
        return values

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each tensor."""
        readers: dict[str, list[Node]] = {name: [] for name in (*self.leaves, *self.by_name)}
        for node in self.nodes:
            for name in node.inputs:
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def live(self) -> tuple[tuple[str, ...], ...]:
        """The live set at every cut: ``live[k]`` is the state between nodes ``k - 1`` and ``k``.

        It holds what depends on the input, was computed before the cut and is read after it (or returned).
        So it is :math:`x_t` for a plain network, and the paper's augmented state
        :math:`(x_{t-1}; x_t)` or :math:`(x_0; …; x_t)` for residual and dense ones.
        """
        born = {leaf.name: 0 for leaf in self.inputs}
        born |= {node.name: k + 1 for k, node in enumerate(self.nodes) if Role.INPUT in self.roles[node.name]}
        last = dict.fromkeys(born, -1)
        for k, node in enumerate(self.nodes):
            for name in node.inputs:
                if name in last:
                    last[name] = k
        for name in self.outputs:
            if name in last:
                last[name] = len(self.nodes)
        return tuple(
            tuple(name for name in born if born[name] <= cut <= last[name])
            for cut in range(len(self.nodes) + 1)
        )

    def spec(self, name: str) -> Spec | tuple[Spec, ...]:
        """Shape and type of a tensor."""
        return self.leaves[name].spec if name in self.leaves else self.by_name[name].spec

    def numel(self, name: str) -> int:
        """How many numbers a tensor holds."""
        return self.leaves[name].spec.numel if name in self.leaves else self.by_name[name].numel

    def run(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The outputs at the given parameters (by path) and inputs; intermediate values are freed early."""
        values = self.bind(parameters, inputs)
        for node, finished in self._schedule:
            values[node.name] = node.run(values)
            for name in finished:
                del values[name]
        return tuple(values[name] for name in self.outputs)

    @cached_property
    def _schedule(self) -> tuple[tuple[Node, tuple[str, ...]], ...]:
        """The nodes that depend on input or parameters, each with the tensors no longer needed after it."""
        nodes = [node for node in self.nodes if node.name not in self.constant_names]
        last_reader = {name: node for node in nodes for name in node.inputs}
        return tuple(
            (node, tuple(n for n in node.inputs if last_reader[n] is node and n not in self.outputs))
            for node in nodes
        )

    def bind(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Values of all leaves and constants, by name.

        Raises:
            KeyError: if a parameter is missing.
            ValueError: if the number of inputs is not the graph's.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(f"the graph reads {len(self.inputs)} inputs, got {len(inputs)}")
        values: dict[str, Any] = dict(self.constants)
        values |= {leaf.name: value for leaf, value in zip(self.inputs, inputs, strict=True)}
        for leaf in self.parameters:
            if leaf.path not in parameters:
                raise KeyError(f"no value was given for parameter '{leaf.path}'")
            values[leaf.name] = parameters[leaf.path]
        return values

    def __str__(self) -> str:
        rows = [f"{node.name:<28} {node.op:<34} {_shape(node):<20} {node.module}" for node in self.nodes]
        counts = f"{len(self.nodes)} operations, {len(self.blocks)} parameter blocks"
        return "\n".join([f"Graph: {counts}, returns {', '.join(self.outputs)}", *rows])


def _roles(nodes: Iterable[Node], leaves: Mapping[str, Leaf]) -> dict[str, Role]:
    roles = {name: _ROLE_OF.get(leaf.source, Role.CONSTANT) for name, leaf in leaves.items()}
    for node in nodes:
        role = Role.CONSTANT
        for name in node.inputs:
            role |= roles[name]
        roles[node.name] = role
    return roles


_ROLE_OF = {Source.INPUT: Role.INPUT, Source.PARAMETER: Role.PARAMETERS}


def ordered(nodes: Sequence[Node], leaves: Mapping[str, Leaf]) -> list[Node]:
    """Nodes in reading order: constants first, functions of parameters right before their first reader.

    So what depends on parameters alone is never part of a state of the chain.
    """
    roles = _roles(nodes, leaves)
    by_name = {node.name: node for node in nodes}
    placed: dict[str, Node] = {}

    def place(node: Node) -> None:
        for name in node.inputs:
            if name in by_name and name not in placed:
                place(by_name[name])
        placed[node.name] = node

    constants = [node for node in nodes if roles[node.name] == Role.CONSTANT]
    data = [node for node in nodes if Role.INPUT in roles[node.name]]
    for node in (*constants, *data, *nodes):  # last, outputs that depend on parameters alone
        if node.name not in placed:
            place(node)
    return list(placed.values())


def _shape(node: Node) -> str:
    return " ".join("×".join(map(str, spec.shape)) or "scalar" for spec in node.specs)


def _refs(argument: Any) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from _refs(item)
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _refs(item)


def _fill(argument: Any, values: Mapping[str, Any]) -> Any:
    """The argument with references replaced by values."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, list | tuple):
        return type(argument)(_fill(item, values) for item in argument)
    return argument


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    import inspect

    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # builtins such as operator.getitem
        return ("self", "index")
