"""Cutting a graph in parts and putting two graphs one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.errors import ChainError
from surefoot.graph.structure import Block, Graph, Leaf, Node, Ref, Source, Spec, ordered


def restrict(graph: Graph, before: Sequence[str], nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
    """The part of a graph that computes ``outputs`` from ``before``, which become its inputs."""
    inputs = {name: _as_input(graph, name) for name in before}
    constants = [node for node in graph.nodes if node.name in graph.constant_names]
    kept = [*constants, *nodes]
    read = {name for node in kept for name in node.inputs} | set(outputs)
    leaves = inputs | {
        name: leaf for name, leaf in graph.leaves.items() if name in read and leaf.source is not Source.INPUT
    }
    return _rebuild(graph, leaves, kept, tuple(outputs))


def compose(
    first: Graph, second: Graph, first_path: Callable[[str], str], second_path: Mapping[str, str]
) -> Graph:
    """The graph of ``second`` after ``first``; parameters get the given paths, equal paths become one leaf.

    Raises:
        ChainError: if what the first returns is not what the second reads.
    """
    returned = [first.spec(name) for name in first.outputs]
    wanted = [leaf.spec for leaf in second.inputs]
    if returned != wanted:
        raise ChainError(
            f"the first chain returns {_shapes(returned)}, the second reads {_shapes(wanted)}: "
            "build the second on the output of the first"
        )
    leaves = {
        name: replace(leaf, path=first_path(leaf.path)) if leaf.source is Source.PARAMETER else leaf
        for name, leaf in first.leaves.items()
    }
    names = {leaf.name: name for leaf, name in zip(second.inputs, first.outputs, strict=True)}
    taken = {*leaves, *first.by_name}
    known = {leaf.path: leaf.name for leaf in leaves.values() if leaf.source is Source.PARAMETER}
    for leaf in second.leaves.values():
        if leaf.source is Source.INPUT:
            continue
        path = second_path[leaf.path] if leaf.source is Source.PARAMETER else leaf.path
        if leaf.source is Source.PARAMETER and path in known:
            names[leaf.name] = known[path]
            continue
        names[leaf.name] = _fresh(leaf.name, taken)
        leaves[names[leaf.name]] = replace(leaf, name=names[leaf.name], path=path)
    nodes = list(first.nodes)
    for node in second.nodes:
        names[node.name] = _fresh(node.name, taken)
        nodes.append(
            replace(
                node,
                name=names[node.name],
                args=tuple(_rename(a, names) for a in node.args),
                kwargs={key: _rename(a, names) for key, a in node.kwargs.items()},
            )
        )
    held = {**first.held, **{names[name]: value for name, value in second.held.items()}}
    return _rebuild(replace(first, held=held), leaves, nodes, tuple(names[name] for name in second.outputs))


def blocks_of(nodes: Sequence[Node], leaves: Mapping[str, Leaf]) -> dict[str, Block]:
    """Parameter blocks by the path of the owning module, in order of first use."""
    owners: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for node in nodes for name in node.inputs):
        if name in leaves and leaves[name].source is Source.PARAMETER:
            owners.setdefault(leaves[name].path.rpartition(".")[0], []).append(name)
    return {path: Block(path, tuple(names)) for path, names in owners.items()}


def _rebuild(graph: Graph, leaves: dict[str, Leaf], nodes: Sequence[Node], outputs: tuple[str, ...]) -> Graph:
    arranged = ordered(nodes, leaves)
    return Graph(
        leaves=leaves,
        nodes=tuple(arranged),
        outputs=outputs,
        blocks=blocks_of(arranged, leaves),
        held={name: value for name, value in graph.held.items() if name in leaves},
    )


def _as_input(graph: Graph, name: str) -> Leaf:
    spec = graph.spec(name)
    if not isinstance(spec, Spec):
        raise ChainError(f"the state at this cut holds the pieces of '{name}', which are not one tensor")
    return Leaf(name, name, Source.INPUT, spec)


def _fresh(name: str, taken: set[str]) -> str:
    candidate, k = name, 1
    while candidate in taken:
        candidate, k = f"{name}_{k}", k + 1
    taken.add(candidate)
    return candidate


def _rename(argument: Any, names: Mapping[str, str]) -> Any:
    if isinstance(argument, Ref):
        return Ref(names[argument.name])
    if isinstance(argument, list | tuple):
        return type(argument)(_rename(item, names) for item in argument)
    return argument


def _shapes(specs: Sequence[Spec | tuple[Spec, ...]]) -> str:
    return ", ".join(str(spec.shape if isinstance(spec, Spec) else [s.shape for s in spec]) for spec in specs)
