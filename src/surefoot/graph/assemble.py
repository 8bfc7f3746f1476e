"""Putting a graph together from its parts: what is needed, in which order, in which blocks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from surefoot.graph.nodes import Block, Leaf, Node, Role, Source, roles_of
from surefoot.graph.structure import Graph


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
