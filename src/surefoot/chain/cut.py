r"""One computation of a chain, and where a graph is cut into them.

A computation :math:`\phi_t` ends where parameters enter and the result would no longer be biaffine in its state
and its parameters. Computations that share parameters are joined with all that stands between them, because a
chain has each parameter in one computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from surefoot.graph import Graph, Node, Role
from surefoot.operations.forms import Degree, Form, degree_of, form_of

State = dict[str, Any]
_Piece = dict[str, Any]  # the fields of a computation, all but its graph
_pieces_of: WeakKeyDictionary[Graph, tuple[_Piece, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Computation:
    r"""One computation :math:`\phi_t = a_{t,k} \circ \dots \circ a_{t,1} \circ b_t`, from live set to live set.

    Every operation whose result is at most of degree one in the state :math:`x_{t-1}` and at most of degree one
    in the parameters :math:`u_t` belongs to :math:`b_t`, whatever stands between them in the order of the graph:
    the arguments of such an operation are of that kind too, so :math:`b_t` can be computed first.

    Attributes:
        graph: the graph it is part of.
        nodes: its operations, in order.
        blocks: paths of the parameter blocks it reads, the parts of :math:`u_t`.
        before: names of the tensors of :math:`x_{t-1}`.
        after: names of the tensors of :math:`x_t`.
        biaffine: the operations of :math:`b_t`.
        nonaffine: the operations of :math:`a_{t,1}, …, a_{t,k}`, one tuple each.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    biaffine: tuple[Node, ...]
    nonaffine: tuple[tuple[Node, ...], ...]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for path in self.blocks for name in self.graph.blocks[path].parameters)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Paths of the parameters it reads."""
        return tuple(self.graph.leaves[name].path for name in self._names)

    @property
    def state_size(self) -> int:
        """Dimension :math:`d_t` of the state after it."""
        return sum(map(self.graph.numel, self.after))

    @property
    def parameter_size(self) -> int:
        """Dimension :math:`p_t` of its parameters."""
        return sum(map(self.graph.numel, self._names))

    def __call__(self, state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> State:
        """The next state :math:`x_t = φ_t(x_{t-1}, u_t)`; parameters are given by path, as many as one likes."""
        values = {**self.graph.constants_at(parameters), **state}
        values |= {name: parameters[self.graph.leaves[name].path] for name in self._names}
        for node in self.nodes:
            values[node.name] = node.run(values)
        return {name: values[name] for name in self.after}

    def __str__(self) -> str:
        names = [[node.op.rpartition(".")[2] for node in part] for part in (self.biaffine, *self.nonaffine)]
        return " → ".join("+".join(part) or "identity" for part in names)


def cut(graph: Graph) -> tuple[Computation, ...]:
    """The computations of a graph, in order; cut once per graph."""
    pieces = _pieces_of.get(graph)
    if pieces is None:
        pieces = tuple(_piece(graph, *part) for part in _joined(graph, list(_pieces(graph))))
        _pieces_of[graph] = pieces
    return tuple(Computation(graph=graph, **piece) for piece in pieces)


def initial_degrees(graph: Graph, state: Iterable[str]) -> dict[str, Degree]:
    """Degrees at the start of a computation: its state and the parameters are of degree one in themselves.

    Integers and truth values in the state do not vary continuously: they count as constants.
    """
    degrees = {name: Degree(state=1) for name in state if _is_real(graph, name)}
    return degrees | dict.fromkeys((leaf.name for leaf in graph.parameters), Degree(parameters=1))


def _pieces(graph: Graph) -> Iterator[list[Node]]:
    """The nodes between two cuts, for all cuts; functions of parameters go with their first reader."""
    nodes = [node for node in graph.nodes if graph.roles[node.name] != Role.CONSTANT]
    start = 0
    while start < len(nodes):
        stop = _next_cut(graph, nodes, start)
        yield nodes[start:stop]
        start = stop


def _next_cut(graph: Graph, nodes: Sequence[Node], start: int) -> int:
    """Where the computation that starts at a node ends.

    It must end where a block enters and the result would not be biaffine. It ends before, where the first block
    entered behind something that is not affine, if a biaffine result of such a block is still waiting there to
    be used. So a gate and what it gates are one computation, and a dense network has the paper's states: the map
    of an old state is left to the layer that uses it.
    """
    degrees = initial_degrees(graph, graph.live[graph.position[nodes[start].name]])
    late: set[str] = set()  # biaffine results of blocks that entered behind something that is not affine
    first_late: int | None = None
    reads, bends, entry = False, False, start
    for k in range(start, len(nodes)):
        node = nodes[k]
        degrees[node.name] = degree_of(node, degrees)
        if Role.INPUT not in graph.roles[node.name]:
            continue
        is_biaffine, enters = degrees[node.name].is_biaffine, bool(graph.blocks_read[node.name]) and entry > start
        if enters and not is_biaffine and (reads or _is_biaffine_from(graph, nodes, entry, k)):
            waiting = late.intersection(graph.live[graph.position[nodes[entry].name]])
            return first_late if waiting and first_late is not None else entry
        if enters and is_biaffine and bends and first_late is None:
            first_late = entry
        if is_biaffine and ((enters and bends) or late.intersection(node.inputs)):
            late.add(node.name)
        reads = reads or bool(graph.blocks_read[node.name])
        bends = bends or not is_biaffine
        entry = k + 1  # functions of parameters between here and the next node go with that one
    return len(nodes)


def _is_biaffine_from(graph: Graph, nodes: Sequence[Node], start: int, stop: int) -> bool:
    """Whether a node would be biaffine in a computation that starts with the functions of parameters it reads."""
    degrees = initial_degrees(graph, graph.live[graph.position[nodes[start].name]])
    for node in nodes[start : stop + 1]:
        degrees[node.name] = degree_of(node, degrees)
    return degrees[nodes[stop].name].is_biaffine


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
    paths: list[str] = []
    for node in piece:
        paths += [graph.owners[name] for name in node.inputs if name in graph.owners]
        paths += sorted(graph.blocks_read.get(node.name, ()))
    return tuple(dict.fromkeys(paths))


def _piece(graph: Graph, nodes: Sequence[Node], blocks: tuple[str, ...]) -> _Piece:
    start, stop = graph.position[nodes[0].name], graph.position[nodes[-1].name] + 1
    before, after = graph.live[start], graph.live[stop]
    if stop == len(graph.nodes):  # what is returned is the last state, also where it depends on parameters alone
        after = tuple(dict.fromkeys(graph.outputs))
    degrees = initial_degrees(graph, before)
    biaffine: list[Node] = []
    parts: list[list[Node]] = []
    for node in nodes:
        degrees[node.name] = degree_of(node, degrees)
        if degrees[node.name].is_biaffine:
            biaffine.append(node)
        elif parts and form_of(node) is Form.LAYOUT and {n.name for n in parts[-1]}.intersection(node.inputs):
            parts[-1].append(node)
        else:
            parts.append([node])
    found = {"nodes": tuple(nodes), "blocks": blocks, "before": before, "after": after}
    return {**found, "biaffine": tuple(biaffine), "nonaffine": tuple(map(tuple, parts))}


def _is_real(graph: Graph, name: str) -> bool:
    return all(spec.is_real for spec in graph.specs(name))
