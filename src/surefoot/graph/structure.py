"""The graph: leaves, nodes in order, parameter blocks, and which tensors are alive between two nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import CaptureError
from surefoot.graph.nodes import Block, Leaf, Node, Ref, Role, Source, Spec, in_double, roles_of, run_widened
from surefoot.torch_private import FakeTensor

Run = Callable[[Node, Mapping[str, Any]], Any]


@dataclass(frozen=True, eq=False)
class Graph:
    """A model as a list of operations on named tensors.

    The graph depends on shapes, not on values: parameters are passed when it is run. Buffers, constants and
    frozen parameters come along by reference.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> [node.op for node in graph.nodes], sorted(graph.leaves)
    (['aten.linear'], ['args_0', 'p_model_bias', 'p_model_weight'])
    """

    # inputs, and the parameters, buffers and constants that the output depends on, by name
    leaves: Mapping[str, Leaf]
    nodes: tuple[Node, ...]  # the operations, in an order in which they can be computed
    outputs: tuple[str, ...]  # names of the tensors the model returns
    blocks: Mapping[str, Block]  # parameter blocks, by module path, in order of first use
    held: Mapping[str, Tensor]  # values of buffers, constants and frozen parameters, by leaf name
    # for tied weights, every further path to the path under which the graph knows it
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def position(self) -> dict[str, int]:
        """Where each node stands in the order."""
        return {node.name: k for k, node in enumerate(self.nodes)}

    @cached_property
    def inputs(self) -> tuple[Leaf, ...]:
        """The leaves that are the model's input."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.source is Source.INPUT)

    @cached_property
    def parameters(self) -> tuple[Leaf, ...]:
        """The leaves that are parameters and vary; frozen ones do not."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.source is Source.PARAMETER)

    @cached_property
    def frozen(self) -> tuple[Leaf, ...]:
        """The leaves that are parameters and do not vary."""
        return tuple(leaf for leaf in self.leaves.values() if leaf.source is Source.FROZEN)

    @cached_property
    def roles(self) -> dict[str, Role]:
        """What each tensor depends on."""
        return roles_of(self.leaves, self.nodes)

    @cached_property
    def is_complex(self) -> bool:
        """Whether it computes with complex numbers."""
        return any(spec.dtype.is_complex for node in self.nodes for spec in node.specs)

    @cached_property
    def owners(self) -> dict[str, str]:
        """The path of the block that each parameter leaf belongs to."""
        return {name: path for path, block in self.blocks.items() for name in block.parameters}

    @cached_property
    def blocks_read(self) -> dict[str, frozenset[str]]:
        """For each node that depends on the input, the blocks it reads, also through functions of parameters.

        A tensor computed from parameters alone belongs to the nodes that read it.
        """
        owner = {name: frozenset([path]) for name, path in self.owners.items()}
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
        """Names of the nodes that depend neither on the input, nor on targets, nor on the parameters."""
        found: set[str] = set()
        for node in self.nodes:
            read = all(name in self.held or name in found for name in node.inputs)
            if read and self.roles[node.name] == Role.CONSTANT:
                found.add(node.name)
        return frozenset(found)

    @property
    def constants(self) -> dict[str, Any]:
        """Values of buffers, constants and frozen parameters, and of what is computed from them alone.

        They are the present values: what was computed from a buffer is computed anew when the buffer changed.
        """
        copies, computed = self._computed
        if copies.outdated(self.held):
            del vars(self)["_computed"]
            copies, computed = self._computed
        return {**self.held, **computed}

    @cached_property
    def constant_sources(self) -> frozenset[str]:
        """The buffers, constants and frozen parameters that other constants are computed from."""
        read = {name for node in self.nodes if node.name in self.constant_names for name in node.inputs}
        return frozenset(read & self.held.keys())

    @cached_property
    def _computed(self) -> tuple[HeldCopies, dict[str, Any]]:
        return HeldCopies(self.held, self.constant_sources), self._compute(self.held)

    def _compute(self, held: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(held)
        for node in self.nodes:
            if node.name in self.constant_names:
                try:
                    values[node.name] = node.run(values)
                except (RuntimeError, ValueError, TypeError) as error:  # tracing does not look at values
                    remedy = "Check that model(x) runs on this input."
                    what = f"the forward pass fails: {str(error).splitlines()[0] if str(error) else error!r}"
                    raise CaptureError(what, where=node.module, remedy=remedy) from error
        return {name: values[name] for name in self.constant_names}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each tensor."""
        readers: dict[str, list[Node]] = {name: [] for name in (*self.leaves, *self.by_name)}
        for node in self.nodes:
            for name in node.inputs:
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def last_readers(self) -> dict[str, Node]:
        """The last node that reads each tensor; a tensor that none reads has no entry."""
        return {name: node for node in self.nodes for name in node.inputs}

    @cached_property
    def finished(self) -> dict[str, tuple[str, ...]]:
        """For each node, the tensors that no later node reads and that are not returned: free to forget."""
        last, kept = self.last_readers, set(self.outputs)
        return {
            node.name: tuple(name for name in node.inputs if last[name] is node and name not in kept)
            for node in self.nodes
        }

    @cached_property
    def live(self) -> tuple[tuple[str, ...], ...]:
        """The live set at every cut: ``live[k]`` is the state between nodes ``k - 1`` and ``k``.

        It holds what depends on the input, was computed before the cut and is read after it (or returned).
        So it is :math:`x_t` for a plain network, and the paper's augmented state
        :math:`(x_{t-1}; x_t)` or :math:`(x_0; …; x_t)` for residual and dense ones.
        """
        last = {name: self.position[node.name] for name, node in self.last_readers.items()}
        last |= dict.fromkeys(self.outputs, len(self.nodes))
        alive = [leaf.name for leaf in self.inputs if leaf.name in last]
        cuts = [tuple(alive)]
        for k, node in enumerate(self.nodes):
            alive = [name for name in alive if last[name] > k]
            if Role.INPUT in self.roles[node.name] and node.name in last:
                alive.append(node.name)
            cuts.append(tuple(alive))
        return tuple(cuts)

    def spec(self, name: str) -> Spec | tuple[Spec, ...]:
        """Shape and type of a tensor."""
        return self.leaves[name].spec if name in self.leaves else self.by_name[name].spec

    def specs(self, name: str) -> tuple[Spec, ...]:
        """Shapes and types of a tensor, or of the several results of an operation."""
        return (self.leaves[name].spec,) if name in self.leaves else self.by_name[name].specs

    def numel(self, name: str) -> int:
        """How many numbers a tensor holds."""
        return sum(spec.numel for spec in self.specs(name))

    def run(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The outputs at the given parameters (by path) and inputs; intermediate values are freed early."""
        return outputs_of(self, self.bind(parameters, inputs), Node.run)

    def bind(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Values of all leaves and constants, by name; a frozen parameter has the model's unless one is given."""
        if len(inputs) != len(self.inputs):
            raise ValueError(f"the graph reads {len(self.inputs)} inputs, got {len(inputs)}")
        values = self.constants_at(parameters)
        values |= {leaf.name: value for leaf, value in zip(self.inputs, inputs, strict=True)}
        for leaf in self.parameters:
            if leaf.path not in parameters:
                raise KeyError(f"no value was given for parameter '{leaf.path}'")
            values[leaf.name] = parameters[leaf.path]
        return values

    def constants_at(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """The constants, where frozen parameters (by path) may have other values than the model's."""
        given = {leaf.name: parameters[leaf.path] for leaf in self.frozen if leaf.path in parameters}
        if all(value is self.held[name] for name, value in given.items()):
            return dict(self.constants)
        held = {**self.held, **given}
        return {**held, **self._compute(held)}

    def __str__(self) -> str:
        rows = [(node.name, node.op, " ".join(map(str, node.specs)), node.module) for node in self.nodes]
        widths = [max((len(row[k]) for row in rows), default=0) for k in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        counts = f"{_count(len(rows), 'operation')}, {_count(len(self.blocks), 'parameter block')}"
        return "\n".join([f"Graph: {counts}, returns {', '.join(self.outputs)}", *lines])


class HeldCopies:
    """Copies of some tensors, to notice later that a buffer or a constant was written to.

    PyTorch counts the writes to a tensor, but not those through ``.data`` or through a NumPy array that shares its
    memory. What was computed from a buffer would then silently be out of date, so values are compared. Names of
    tensors that are not held are ignored.

    >>> held = {"scale": torch.ones(2)}
    >>> copies = HeldCopies(held, ["scale"])
    >>> held["scale"].data[0] = 3.0
    >>> copies.outdated(held)
    True
    """

    def __init__(self, held: Mapping[str, Tensor], names: Collection[str]) -> None:
        self._tensors = {name: held[name] for name in names if name in held}
        self._copies = {
            name: value.detach().clone() for name, value in self._tensors.items() if _has_values(value)
        }

    def outdated(self, held: Mapping[str, Tensor]) -> bool:
        """Whether one of the tensors is another one now or has other entries."""
        if any(held[name] is not value for name, value in self._tensors.items()):
            return True
        return not all(_equal(held[name], copy) for name, copy in self._copies.items())


def _equal(present: Tensor, copy: Tensor) -> bool:
    same_kind = present.dtype == copy.dtype and present.device == copy.device
    return same_kind and torch.equal(present.detach(), copy)


def _has_values(value: Tensor) -> bool:
    """Whether there are entries to compare: on the meta device and in fake tensors there are none."""
    return not isinstance(value, FakeTensor) and value.device.type != "meta"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def assemble(
    leaves: Mapping[str, Leaf],
    nodes: Sequence[Node],
    outputs: tuple[str, ...],
    held: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> Graph:
    """The graph of these nodes, without what no output depends on; inputs stay, read or not."""
    kept = needed(nodes, outputs)
    read = {name for node in kept for name in node.inputs} | set(outputs)
    leaves = {name: leaf for name, leaf in leaves.items() if name in read or leaf.source is Source.INPUT}
    arranged = ordered(kept, leaves)
    paths = {leaf.path for leaf in leaves.values()}
    return Graph(
        leaves=leaves,
        nodes=tuple(arranged),
        outputs=outputs,
        blocks=blocks_of(arranged, leaves, outputs),
        held={name: value for name, value in held.items() if name in leaves},
        aliases={path: name for path, name in aliases.items() if name in paths},
    )


def needed(nodes: Sequence[Node], outputs: Iterable[str]) -> list[Node]:
    """The nodes that an output depends on, in the same order."""
    wanted = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(node.inputs)
    return kept[::-1]


def ordered(nodes: Sequence[Node], leaves: Mapping[str, Leaf]) -> list[Node]:
    """Nodes in reading order: constants first, functions of parameters right before their first reader.

    So what depends on parameters alone is never part of a state of the chain. The pieces of an operation with
    several results follow it at once, so that states are made of tensors and not of tuples.
    """
    roles = roles_of(leaves, nodes)
    pieces: dict[str, list[Node]] = {}
    for node in nodes:
        if node.target is operator.getitem:
            pieces.setdefault(node.inputs[0], []).append(node)
    by_name = {node.name: node for node in nodes}
    placed: dict[str, Node] = {}

    def place(node: Node) -> None:
        waiting = [node]
        while waiting:
            missing = [n for n in waiting[-1].inputs if n in by_name and n not in placed]
            if missing:
                waiting += [by_name[name] for name in reversed(missing)]
                continue
            ready = waiting.pop()
            if ready.name not in placed:
                placed[ready.name] = ready
                waiting += pieces.get(ready.name, [])[::-1]

    constants = [node for node in nodes if roles[node.name] == Role.CONSTANT]
    data = [node for node in nodes if Role.INPUT in roles[node.name]]
    for node in (*constants, *data, *nodes):  # last, outputs that depend on parameters alone
        place(node)
    return list(placed.values())


def blocks_of(nodes: Sequence[Node], leaves: Mapping[str, Leaf], outputs: Sequence[str]) -> dict[str, Block]:
    """Parameter blocks by the path of the owning module, in order of first use."""
    owners: dict[str, list[str]] = {}
    for name in dict.fromkeys([*(name for node in nodes for name in node.inputs), *outputs]):
        if name in leaves and leaves[name].source is Source.PARAMETER:
            owners.setdefault(leaves[name].path.rpartition(".")[0], []).append(name)
    return {path: Block(path, tuple(names)) for path, names in owners.items()}


def outputs_of(graph: Graph, values: Mapping[str, Any], run: Run = run_widened) -> tuple[Any, ...]:
    """The outputs of a graph from values of its leaves by name, in double precision, differentiable.

    Nodes that have a value already keep it; others are freed after their last reader.
    """
    present = dict(values)
    for node in graph.nodes:
        if node.name not in present:
            present[node.name] = run(node, present)
        for name in graph.finished[node.name]:
            del present[name]
    return tuple(present[name] for name in graph.outputs)


def fold(graph: Graph, values: Mapping[str, Any], run: Run = run_widened) -> dict[str, Any]:
    """The given values, and in double precision all that can be computed from them alone."""
    present = {name: in_double(value) for name, value in values.items()}
    for node in graph.nodes:
        if all(name in present for name in node.inputs):
            present[node.name] = run(node, present)
    return present


__all__ = ["Block", "Graph", "Leaf", "Node", "Ref", "Role", "Source", "Spec"]
