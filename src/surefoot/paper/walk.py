r"""A graph as the paper's list of layers :math:`a_{t,k_t}\circ\dots\circ a_{t,1}\circ b_t`.

Operations are visited in order. A fully connected layer or a convolution begins a new layer, everything else
is a function :math:`a_{t,j}` of the layer it is met in; before the first such layer :math:`b_t` is the identity
(:math:`L_b = l^u = 0`, :math:`l^x = 1`).

An addition of an earlier state makes a residual network (eq. chain_res_def): the layer before it keeps that
state, :math:`\bar x_t = (x_t; x_{t-1})`, and both get the constants of
:func:`~surefoot.paper.layers.residual`. These hold whenever the constant part of

.. math:: (x, y) \mapsto (b(x, u) + \{0, x \text{ or } y\};\ x \text{ or } y)

besides :math:`b` moves each of x, y to at most one place, since it then has norm 1: an earlier state may be kept
over several layers, and may be added to :math:`b` of the state itself. An addition that does not follow
:math:`b_t` at once is a layer of its own, whose :math:`b` is the identity. More than one kept state, parameters
that act on one, and tensors of weights used twice are refused: the paper prints no constants for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from surefoot.errors import UnsupportedOperation
from surefoot.graph.structure import Graph, Node, Role, Spec
from surefoot.paper.constants import Biaffine, Computation, Smooth
from surefoot.paper.layers import residual
from surefoot.paper.operations import constants_of, is_rearrangement, refuse

_IDENTITY = Biaffine.of(0.0, lipschitz_state=1.0)


@dataclass(frozen=True)
class Layer:
    """One layer of the paper, read off a graph.

    Attributes:
        computation: its constants, all its own tensors being parameters.
        weight: the leaf that holds its weights; ``None`` if :math:`b` is the identity.
        bias: the leaf that holds its intercepts, if it has any.
        nodes: its operations.
        functions: those of them that are its functions :math:`a_{t,j}`.
        label: its operations by name, without rearrangements.
    """

    computation: Computation
    weight: str | None
    bias: str | None
    nodes: tuple[Node, ...]
    functions: tuple[Node, ...]
    label: str

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves it owns."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result."""
        return self.nodes[-1].specs[0].shape


def layers_of(graph: Graph) -> tuple[Layer, ...]:
    """The layers of a graph, in order.

    Raises:
        UnsupportedOperation: where the paper prints no constants, naming operation and module.
    """
    return _Walk(graph).run()


@dataclass
class _Draft:
    """A layer while it is being read: the state it starts from, its parts, and the state that is added."""

    start: str
    biaffine: Biaffine = _IDENTITY
    weight: str | None = None
    bias: str | None = None
    functions: list[tuple[Node, Smooth]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    added: str | None = None


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers: list[Layer] = []
        self.taken: set[str] = set()
        self.origin = _origins(graph)
        self.last_reader = self._last_readers()
        self.current = self._single(graph.live[0])
        self.kept: str | None = None
        self.draft: _Draft | None = None

    def run(self) -> tuple[Layer, ...]:
        for index, node in enumerate(self.graph.nodes):
            if Role.INPUT not in self.graph.roles[node.name]:
                continue
            if is_rearrangement(self.graph, node):
                if self.draft is not None and self.origin[node.name] == self.current:
                    self.draft.nodes.append(node)
            elif node.op == "aten.add":
                self._add(index, node)
            elif isinstance(constants := constants_of(self.graph, node), Biaffine):
                self._product(index, node, constants)
            else:
                self._function(index, node, constants)
        if self._single(self.graph.outputs) != self.current:
            raise UnsupportedOperation(
                "the paper's networks return their last state, this model another tensor. Return the last one, or "
                'use constants="certified".'
            )
        self._close(len(self.graph.nodes))
        return tuple(self.layers)

    def _product(self, index: int, node: Node, biaffine: Biaffine) -> None:
        state, weight, bias = (node.arguments[key] for key in ("input", "weight", "bias"))
        leaves = [self._leaf(node, given.name) for given in (weight, bias) if given is not None]
        if not self.taken.isdisjoint(leaves):
            refuse(node, "every layer has parameters of its own, here they are shared with an earlier layer")
        self.taken.update(leaves)
        self._expect_current(node, state.name)
        draft = self._open(index)
        draft.biaffine, draft.weight = biaffine, leaves[0]
        draft.bias = leaves[1] if bias is not None else None
        self._extend(node)

    def _function(self, index: int, node: Node, function: Smooth) -> None:
        self._expect_current(node, *node.inputs)
        draft = self.draft
        if draft is None or self.last_reader[self.current] > index:
            draft = self._open(index)
        draft.functions.append((node, function))
        self._extend(node)

    def _add(self, index: int, node: Node) -> None:
        operands = [self.origin[name] for name in node.inputs if name in self.origin]
        others = [name for name in operands if name != self.current]
        shapes = {spec.shape for name in node.inputs if isinstance(spec := self.graph.spec(name), Spec)}
        if len(operands) != 2 or len(others) != 1 or node.arguments["alpha"] != 1 or len(shapes) != 1:
            refuse(node, "the last state is added to one earlier state of the same size")
        (earlier,) = others
        draft = self.draft
        if (
            draft is None
            or draft.functions
            or draft.added is not None
            or earlier not in (draft.start, self.kept)
            or self.last_reader[self.current] > index
        ):
            draft = self._open(index)
            if earlier != self.kept:
                refuse(node, "a layer reads the last state and at most one earlier one")
        draft.added = earlier
        self._extend(node)

    def _open(self, index: int) -> _Draft:
        """Close the layer before this operation and begin one at the current state."""
        self._close(index)
        self.draft = _Draft(self.current)
        return self.draft

    def _extend(self, node: Node) -> None:
        assert self.draft is not None
        self.draft.nodes.append(node)
        self.current = node.name

    def _close(self, index: int) -> None:
        """Finish the layer; an earlier state that this operation or a later one reads is kept through it."""
        draft = self.draft
        if draft is None:
            return
        needed = [
            name for name in (draft.start, self.kept) if name is not None and self.last_reader[name] >= index
        ]
        if len(needed) > 1 or draft.added in needed:
            refuse(draft.nodes[-1], "a network keeps one earlier state besides the last, here it needs more")
        biaffine, functions = draft.biaffine, tuple(function for _, function in draft.functions)
        if needed or draft.added is not None:
            biaffine, functions = residual(biaffine, functions)
        nodes = tuple(draft.nodes)
        label = " → ".join(_short(node) for node in nodes if not is_rearrangement(self.graph, node))
        computation = Computation(biaffine, functions, nodes[0].module)
        curved = tuple(node for node, _ in draft.functions)
        self.layers.append(Layer(computation, draft.weight, draft.bias, nodes, curved, label))
        self.kept = needed[0] if needed else None

    def _expect_current(self, node: Node, *names: str) -> None:
        """Refuse an operation that reads anything that varies with the input besides the last state."""
        for name in names:
            if name in self.origin and self.origin[name] != self.current:
                refuse(node, "a layer acts on the last state, here on an earlier one or on several")

    def _leaf(self, node: Node, name: str) -> str:
        """The leaf that a tensor of weights is, possibly with its numbers moved."""
        while name not in self.graph.leaves:
            source = self.graph.by_name[name]
            if not is_rearrangement(self.graph, source):
                refuse(node, f"weights are parameters, here they are computed by '{source.op}'")
            name = source.inputs[0]
        if name in self.origin:
            refuse(node, "weights are parameters, here they depend on the input")
        return name

    def _single(self, names: Iterable[str]) -> str:
        """The one tensor that goes in or out."""
        listed = list(names)
        if len(listed) != 1:
            raise UnsupportedOperation(
                f"the paper's networks have one input and one output, this model {len(listed)}. Use "
                'constants="certified", or join them in one tensor.'
            )
        return self.origin.get(listed[0], listed[0])

    def _last_readers(self) -> dict[str, int]:
        """For each tensor the last operation that reads it; what is returned is read after all of them."""
        last = dict.fromkeys(self.origin.values(), -1)
        for index, node in enumerate(self.graph.nodes):
            if not is_rearrangement(self.graph, node):
                last |= {self.origin[name]: index for name in node.inputs if name in self.origin}
        return last | {
            self.origin[name]: len(self.graph.nodes) for name in self.graph.outputs if name in self.origin
        }


def _origins(graph: Graph) -> dict[str, str]:
    """For each tensor that varies with the input, the one whose numbers it holds, before any rearrangement."""
    origin = {leaf.name: leaf.name for leaf in graph.inputs}
    for node in graph.nodes:
        if Role.INPUT in graph.roles[node.name]:
            origin[node.name] = origin[node.inputs[0]] if is_rearrangement(graph, node) else node.name
    return origin


def _short(node: Node) -> str:
    return node.op.rpartition(".")[2]
