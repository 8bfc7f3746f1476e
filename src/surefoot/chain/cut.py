r"""Where a graph is cut into computations.

A new computation :math:`\phi_t` starts where parameters enter and the result would no longer be biaffine in the
state and the parameters of the present one. Computations that share parameters are joined with all that stands
between them, because a chain has each parameter in one computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from surefoot.chain.computation import Computation
from surefoot.graph import Graph, Node, Role, Spec
from surefoot.rules.forms import Degree, Form, degree_of, form_of


def cut(graph: Graph) -> tuple[Computation, ...]:
    """The computations of a graph, in order; found once per graph."""
    known = vars(graph).get("_computations")
    if known is None:
        known = tuple(_computation(graph, *piece) for piece in _joined(graph, list(_pieces(graph))))
        vars(graph)["_computations"] = known
    return known


def initial_degrees(graph: Graph, state: Iterable[str]) -> dict[str, Degree]:
    """Degrees at the start of a computation: its state and the parameters are of degree one in themselves.

    Integers and truth values in the state do not vary continuously: they count as constants.
    """
    degrees = {name: Degree(state=1) for name in state if _is_real(graph, name)}
    degrees |= {leaf.name: Degree(parameters=1) for leaf in graph.parameters}
    return degrees


def _pieces(graph: Graph) -> Iterator[list[Node]]:
    """The nodes between two cuts, for all cuts; functions of parameters go with their first reader."""
    current: list[Node] = []
    waiting: list[Node] = []
    degrees = initial_degrees(graph, graph.live[0])
    for k, node in enumerate(graph.nodes):
        role = graph.roles[node.name]
        if role == Role.CONSTANT:
            continue
        degree = degree_of(node, degrees)
        if Role.INPUT not in role:
            degrees[node.name] = degree
            waiting.append(node)
            continue
        if graph.blocks_read[node.name] and current and not degree.is_biaffine:
            of_parameters = {n: d for n, d in degrees.items() if Role.INPUT not in graph.roles[n]}
            anew = initial_degrees(graph, graph.live[k]) | of_parameters
            # A cut before something that is not biaffine from there either helps only to part two blocks.
            if degree_of(node, anew).is_biaffine or any(graph.blocks_read.get(n.name) for n in current):
                yield current
                current, degrees = [], anew
                degree = degree_of(node, degrees)
        degrees[node.name] = degree
        current += [*waiting, node]
        waiting = []
    if current or waiting:
        yield current + waiting


def _joined(graph: Graph, pieces: list[list[Node]]) -> Iterator[tuple[list[Node], tuple[str, ...]]]:
    """Join all pieces between two uses of one block; with each, the blocks it reads."""
    read = [_blocks_of(graph, piece) for piece in pieces]
    if read:  # a parameter that is returned as it is belongs to the last state
        read[-1] += tuple(graph.owners[name] for name in graph.outputs if name in graph.owners)
    last_use = {path: k for k, blocks in enumerate(read) for path in blocks}
    nodes: list[Node] = []
    blocks: dict[str, None] = {}
    reach = 0
    for k, piece in enumerate(pieces):
        nodes += piece
        blocks |= dict.fromkeys(read[k])
        reach = max([k, reach, *(last_use[path] for path in read[k])])
        if k == reach:
            yield nodes, tuple(blocks)
            nodes, blocks = [], {}


def _blocks_of(graph: Graph, piece: Sequence[Node]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for node in piece:
        direct = [graph.owners[name] for name in node.inputs if name in graph.owners]
        found |= dict.fromkeys([*direct, *sorted(graph.blocks_read.get(node.name, frozenset()))])
    return tuple(found)


def _computation(graph: Graph, piece: Sequence[Node], blocks: tuple[str, ...]) -> Computation:
    start, stop = graph.position[piece[0].name], graph.position[piece[-1].name] + 1
    before, after = graph.live[start], graph.live[stop]
    if stop == len(graph.nodes):  # what is returned is the last state, also where it depends on parameters alone
        after = tuple(dict.fromkeys(graph.outputs))
    degrees = initial_degrees(graph, before)
    biaffine: list[Node] = []
    parts: list[list[Node]] = []
    for node in piece:
        degrees[node.name] = degree_of(node, degrees)
        if degrees[node.name].is_biaffine:
            biaffine.append(node)
        elif parts and form_of(node) is Form.LAYOUT and {n.name for n in parts[-1]}.intersection(node.inputs):
            parts[-1].append(node)
        else:
            parts.append([node])
    return Computation(
        graph=graph,
        nodes=tuple(piece),
        blocks=blocks,
        before=before,
        after=after,
        biaffine=tuple(biaffine),
        nonaffine=tuple(map(tuple, parts)),
    )


def _is_real(graph: Graph, name: str) -> bool:
    spec = graph.spec(name)
    return all(item.is_real for item in ((spec,) if isinstance(spec, Spec) else spec))
