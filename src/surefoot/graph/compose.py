"""Cutting a graph in parts and putting two graphs one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surefoot.errors import ChainError
from surefoot.graph.nodes import Leaf, Node, Source, Spec, fresh
from surefoot.graph.structure import Graph, assemble

_OWNED = (Source.PARAMETER, Source.FROZEN)


def restrict(graph: Graph, before: Sequence[str], nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
    """The part of a graph that computes ``outputs`` from ``before``, which become its inputs."""
    inputs = {name: Leaf(name, name, Source.INPUT, _one(graph, name)) for name in before}
    others = {name: leaf for name, leaf in graph.leaves.items() if leaf.source is not Source.INPUT}
    constants = [node for node in graph.nodes if node.name in graph.constant_names]
    return assemble(inputs | others, [*constants, *nodes], tuple(outputs), graph.held, graph.aliases)


@dataclass(frozen=True)
class Naming:
    """What the parameters and modules of a graph are called in a composition."""

    parameter: Callable[[str], str]  # from the path of a parameter in its own graph to its path in the composition
    module: Callable[[str], str]  # the same for modules


def compose(first: Graph, second: Graph, naming: Naming, second_naming: Naming) -> Graph:
    """The graph of ``second`` after ``first``; parameters that get equal paths become one leaf."""
    returned = [_one(first, name) for name in first.outputs]
    wanted = [leaf.spec for leaf in second.inputs]
    if returned != wanted:
        raise ChainError(
            f"the first chain returns {_described(returned)}, the second reads {_described(wanted)}: "
            "build the second on the output of the first"
        )
    leaves = {name: _moved(leaf, naming) for name, leaf in first.leaves.items()}
    nodes = [replace(node, module=naming.module(node.module)) for node in first.nodes]
    taken = {*leaves, *first.by_name}
    known = {leaf.path: leaf.name for leaf in leaves.values() if leaf.source in _OWNED}
    names = {leaf.name: name for leaf, name in zip(second.inputs, first.outputs, strict=True)}
    for leaf in second.leaves.values():
        moved = _moved(leaf, second_naming)
        if leaf.source is Source.INPUT:
            continue
        if leaf.source in _OWNED and moved.path in known:
            names[leaf.name] = known[moved.path]
        else:
            names[leaf.name] = fresh(leaf.name, taken)
            leaves[names[leaf.name]] = replace(moved, name=names[leaf.name])
    for node in second.nodes:
        names[node.name] = fresh(node.name, taken)
        nodes.append(node.renamed(names, name=names[node.name], module=second_naming.module(node.module)))
    held = {**first.held, **{names[name]: value for name, value in second.held.items()}}
    aliases = {naming.parameter(path): naming.parameter(name) for path, name in first.aliases.items()}
    aliases |= {second_naming.parameter(path): second_naming.parameter(n) for path, n in second.aliases.items()}
    return assemble(leaves, nodes, tuple(names[name] for name in second.outputs), held, aliases)


def _moved(leaf: Leaf, naming: Naming) -> Leaf:
    return replace(leaf, path=naming.parameter(leaf.path)) if leaf.source in _OWNED else leaf


def _one(graph: Graph, name: str) -> Spec:
    spec = graph.spec(name)
    if not isinstance(spec, Spec):
        raise ChainError(f"'{name}' is several tensors: a state is made of single ones")
    return spec


def _described(specs: Sequence[Spec]) -> str:
    return ", ".join(f"{tuple(spec.shape)} {spec.dtype}" for spec in specs)
