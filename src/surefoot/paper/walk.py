r"""A graph as the paper's list of layers :math:`a_{t,k_t}\circ\dots\circ a_{t,1}\circ b_t`.

Operations are visited in order. A fully connected layer or a convolution begins a new layer, everything else
is a function :math:`a_{t,j}` of the layer it is met in; before the first such layer :math:`b_t` is the identity
(:math:`L_b = l^u = 0`, :math:`l^x = 1`).

Earlier states that are read again are kept: the state of a dense network (eq. dense_net) is :math:`\bar x_t =
(x_0; \dots; x_t)`, that of a highway network :math:`(x_{t-1}; x_t)`, and their layers act on the concatenation of
kept states, or are the sum of products with several of them. Such a sum is bi-affine in them: with the Lipschitz
constants :math:`L_j` of the products and :math:`s(j)` the state each one reads, :math:`\|\sum_j\beta_j(x_{s(j)},
u_j)\| \le \sum_jL_j\|x_{s(j)}\|\|u_j\| \le \max_s(\sum_{s(j)=s}L_j^2)^{1/2}\|x\|\|u\|`, and :math:`l^u =
(\sum_j(l^u_j)^2)^{1/2}`. A residual network (eq. chain_res_def) adds one of them. With S a selection of the kept
states :math:`\bar x = (x_i)_i`, a layer is

.. math:: \bar x \mapsto (b(S\bar x, u) + \{0 \text{ or one } x_i\};\ \text{some } x_i),

and gets the constants of :func:`~surefoot.paper.layers.residual`. They hold whenever the part besides :math:`b`
moves each :math:`x_i` to at most one place, since it then has norm 1, as S has. A layer that adds and keeps
nothing has those of :math:`b`. An addition that does not follow :math:`b_t` at once is a layer of its own, whose
:math:`b` is the identity. A state that is added and kept, layers that act on earlier states alone, and tensors of
weights used twice are refused: the paper prints no constants for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from surefoot.errors import UnsupportedOperation
from surefoot.graph.structure import Graph, Node, Role, Spec
from surefoot.magnitude import maximum, stack
from surefoot.paper.constants import Biaffine, Computation, Smooth, merge_flags
from surefoot.paper.layers import residual
from surefoot.paper.operations import PRODUCTS, constants_of, is_rearrangement, refuse

_IDENTITY = Biaffine.of(0.0, lipschitz_state=1.0)


@dataclass(frozen=True)
class Layer:
    """One layer of the paper, read off a graph."""

    computation: Computation  # its constants, all its own tensors being parameters
    weights: tuple[str, ...]  # the leaves that hold its weights; none if :math:`b` is the identity
    biases: tuple[str, ...]  # those that hold its intercepts, if it has any
    nodes: tuple[Node, ...]  # its operations
    functions: tuple[Node, ...]  # those of them that are its functions :math:`a_{t,j}`
    label: str  # its operations by name, without rearrangements

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves it owns."""
        return (*self.weights, *self.biases)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result."""
        return self.nodes[-1].specs[0].shape


def layers_of(graph: Graph) -> tuple[Layer, ...]:
    """The layers of a graph, in order; refuses what the paper prints no constants for."""
    return _Walk(graph).run()


@dataclass
class _Draft:
    """A layer while it is being read: the states before it, its parts, and the state that is added."""

    before: tuple[str, ...]
    biaffine: Biaffine = _IDENTITY
    weights: list[str] = field(default_factory=list)
    biases: list[str] = field(default_factory=list)
    functions: list[tuple[Node, Smooth]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    added: str | None = None


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers: list[Layer] = []
        self.taken: set[str] = set()
        self.origin, self.joined = _origins(graph)
        self.sums = _sums_of_products(graph)
        self.summed_at = {name: k for k, node in enumerate(graph.nodes) for name in self.sums.get(node.name, ())}
        self.last_reader = self._last_readers()
        self.current = self._single(graph.live[0])
        self.kept: tuple[str, ...] = ()
        self.draft: _Draft | None = None

    def run(self) -> tuple[Layer, ...]:
        for index, node in enumerate(self.graph.nodes):
            if Role.INPUT not in self.graph.roles[node.name]:
                continue
            if node.name in self.joined or node.name in self.summed_at:
                continue
            if is_rearrangement(self.graph, node):
                if self.draft is not None and self.origin[node.name] == self.current:
                    self.draft.nodes.append(node)
            elif node.name in self.sums:
                summands = [self.graph.by_name[name] for name in self.sums[node.name]]
                self._products(index, node, [summand for summand in summands if summand.op in PRODUCTS])
            elif node.op == "aten.add":
                self._add(index, node)
            elif isinstance(constants := constants_of(self.graph, node), Biaffine):
                self._products(index, node, [node])
            else:
                self._function(index, node, constants)
        if self._single(self.graph.outputs) != self.current:
            raise UnsupportedOperation(
                "the paper's networks return their last state, this model another tensor. Return the last one, or "
                'use constants="certified".'
            )
        self._close(len(self.graph.nodes))
        return tuple(self.layers)

    def _products(self, index: int, node: Node, products: list[Node]) -> None:
        """A product with the state, or a sum of products with several states, begins a layer."""
        states = [self.origin[product.arguments["input"].name] for product in products]
        if self.current not in states:
            self._expect_current(products[0], *(product.arguments["input"].name for product in products))
        weights, biases = (
            [
                self._own_leaf(product, product.arguments[key].name)
                for product in products
                if product.arguments[key]
            ]
            for key in ("weight", "bias")
        )
        draft = self._open(index)
        live = {*draft.before, *(joined for joined, parts in self.joined.items() if {*parts} <= {*draft.before})}
        for product, state in zip(products, states, strict=True):
            if state not in live:
                refuse(product, "a layer acts on the last state, here on an earlier one or on several")
        draft.biaffine = _sum_of(self.graph, products, states)
        draft.weights, draft.biases = weights, biases
        draft.nodes += [self.graph.by_name[name] for name in self.sums.get(node.name, ())]
        self._extend(node)

    def _function(self, index: int, node: Node, function: Smooth) -> None:
        self._expect_current(node, *node.inputs)
        draft = self.draft
        joined = any(self.origin[name] in self.joined for name in node.inputs if name in self.origin)
        if draft is None or joined or self.last_reader[self.current] > index:
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
            or earlier not in draft.before
            or self.last_reader[self.current] > index
        ):
            draft = self._open(index)
            if earlier not in self.kept:
                refuse(node, "what is added is an earlier state, here several in one tensor, or a part of one")
        draft.added = earlier
        self._extend(node)

    def _open(self, index: int) -> _Draft:
        """Close the layer before this operation and begin one at the current state."""
        self._close(index)
        self.draft = _Draft((*self.kept, self.current))
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
        needed = tuple(name for name in draft.before if self.last_reader[name] >= index)
        if draft.added in needed:
            refuse(draft.nodes[-1], "a state is added or kept, here it is both")
        biaffine, functions = draft.biaffine, tuple(function for _, function in draft.functions)
        if needed or draft.added is not None:
            biaffine, functions = residual(biaffine, functions)
        nodes = tuple(draft.nodes)
        named = (node for node in nodes if not is_rearrangement(self.graph, node))
        label = " → ".join(node.op.rpartition(".")[2] for node in named)
        computation = Computation(biaffine, functions, nodes[0].module)
        curved = tuple(node for node, _ in draft.functions)
        self.layers.append(Layer(computation, tuple(draft.weights), tuple(draft.biases), nodes, curved, label))
        self.kept = needed

    def _expect_current(self, node: Node, *names: str) -> None:
        """Refuse an operation that reads other than the last state, alone or with earlier ones in one tensor."""
        for name in names:
            if name not in self.origin or self.origin[name] == self.current:
                continue
            parts = self.joined.get(self.origin[name], ())
            if self.current not in parts or len({*parts}) < len(parts):
                refuse(node, "a layer acts on the last state, here on an earlier one or on several")

    def _own_leaf(self, node: Node, name: str) -> str:
        """The leaf that a tensor of weights is, possibly with its numbers moved; each belongs to one layer."""
        while name not in self.graph.leaves:
            source = self.graph.by_name[name]
            if not is_rearrangement(self.graph, source):
                refuse(node, f"weights are parameters, here they are computed by '{source.op}'")
            name = source.inputs[0]
        if name in self.origin:
            refuse(node, "weights are parameters, here they depend on the input")
        if name in self.taken:
            refuse(node, "every layer has parameters of its own, here they are shared with an earlier layer")
        self.taken.add(name)
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
            if node.name not in self.joined and not is_rearrangement(self.graph, node):
                for read in (self.origin[name] for name in node.inputs if name in self.origin):
                    at = self.summed_at.get(node.name, index)
                    last |= dict.fromkeys((read, *self.joined.get(read, ())), at)
        return last | {
            self.origin[name]: len(self.graph.nodes) for name in self.graph.outputs if name in self.origin
        }


def _origins(graph: Graph) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """For each tensor that varies with the input, the one whose numbers it holds, before any rearrangement; and
    the parts of those that are concatenations.
    """
    origin = {leaf.name: leaf.name for leaf in graph.inputs}
    joined: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if Role.INPUT in graph.roles[node.name]:
            origin[node.name] = origin[node.inputs[0]] if is_rearrangement(graph, node) else node.name
            if node.op == "aten.cat" and all(name in origin for name in node.inputs):
                parts = [origin[part.name] for part in node.arguments["tensors"]]
                joined[node.name] = tuple(part for name in parts for part in joined.get(name, (name,)))
    return origin, joined


def _sums_of_products(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The parts of each sum of products, that is products and additions, by the name of its last addition."""
    readers: dict[str, int] = {}
    for name in (*(name for node in graph.nodes for name in node.inputs), *graph.outputs):
        readers[name] = readers.get(name, 0) + 1
    parts: dict[str, tuple[str, ...]] = {}
    sums: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if Role.INPUT in graph.roles[node.name] and node.op in PRODUCTS:
            parts[node.name] = (node.name,)
        elif node.op == "aten.add" and node.arguments["alpha"] == 1 and len(node.inputs) == 2:
            shapes = {spec.shape for name in node.inputs if isinstance(spec := graph.spec(name), Spec)}
            if len(shapes) == 1 and all(name in parts and readers[name] == 1 for name in node.inputs):
                sums = {name: members for name, members in sums.items() if name not in node.inputs}
                sums[node.name] = tuple(part for name in node.inputs for part in parts[name])
                parts[node.name] = (*sums[node.name], node.name)
    return sums


def _sum_of(graph: Graph, products: list[Node], states: list[str]) -> Biaffine:
    """The constants of a sum of products with states; see the module."""
    biaffine = [c for c in (constants_of(graph, product) for product in products) if isinstance(c, Biaffine)]
    if len(biaffine) == 1:
        return biaffine[0]
    by_state = {
        state: stack([c.smoothness for c, read in zip(biaffine, states, strict=True) if read == state]).norm()
        for state in states
    }
    return Biaffine(
        maximum(*by_state.values()),
        stack([c.lipschitz_parameters for c in biaffine]).norm(),
        unsound=merge_flags(*(c.unsound for c in biaffine)),
    )
