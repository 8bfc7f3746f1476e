"""The graph: leaves, nodes in order, parameter blocks, and which tensors are alive between two nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.nodes import Block, Leaf, Node, Ref, Role, Source, Spec, roles_of
from surefoot.torch_private import FakeTensor


@dataclass(frozen=True, eq=False)
class Graph:
    """A model as a list of operations on named tensors.

    The graph depends on shapes, not on values: parameters are passed when it is run. Buffers, constants and
    frozen parameters come along by reference.

    Attributes:
        leaves: inputs, and the parameters, buffers and constants that the output depends on, by name.
        nodes: the operations, in an order in which they can be computed.
        outputs: names of the tensors the model returns.
        blocks: parameter blocks, by module path, in order of first use.
        held: values of buffers, constants and frozen parameters, by leaf name.
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
        """Names of the nodes that depend neither on the input nor on the parameters."""
        return frozenset(node.name for node in self.nodes if self.roles[node.name] == Role.CONSTANT)

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
                values[node.name] = node.run(values)
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
        values = self.bind(parameters, inputs)
        for node in self.nodes:
            if node.name not in self.constant_names:
                values[node.name] = node.run(values)
                for name in self.finished[node.name]:
                    del values[name]
        return tuple(values[name] for name in self.outputs)

    def bind(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Values of all leaves and constants, by name.

        A frozen parameter has the model's value unless another one is given.

        Raises:
            KeyError: if a parameter is missing.
            ValueError: if the number of inputs is not the graph's.
        """
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

    PyTorch counts the writes to a tensor, but not those through ``.data`` or through a NumPy array that shares
    its memory. What was computed from a buffer would then silently be out of date, so values are compared.

    Args:
        held: tensors by name.
        names: which of them to copy; names of other tensors are ignored.

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


__all__ = ["Block", "Graph", "Leaf", "Node", "Ref", "Role", "Source", "Spec"]
