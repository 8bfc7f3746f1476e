r"""A network as a chain of computations: the paper's Definition 1, read off the graph.

.. math:: x_t = \phi_t(x_{t-1}, u_t), \qquad \phi_t = a_{t,k_t} \circ \dots \circ a_{t,1} \circ b_t

The state :math:`x_t` is the live set of the graph at a cut, the whole batch stacked. For a plain network that is
one tensor; for residual, highway and dense networks it is the paper's augmented state
(eq. dense_net, chain_res_def), without any code for those structures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor, nn

from surefoot.errors import ChainError
from surefoot.graph import Graph, Node, Role, capture
from surefoot.graph.checks import as_inputs
from surefoot.graph.compose import compose, restrict
from surefoot.oracles.autodiff import Autodiff
from surefoot.rules.forms import Degree, Form, degree_of, form_of

State = dict[str, Any]


@dataclass(frozen=True)
class Computation:
    r"""One computation :math:`\phi_t`, from the live set before it to the live set after it.

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

    @property
    def parameters(self) -> tuple[str, ...]:
        """Paths of the parameters it reads."""
        leaves = self.graph.leaves
        return tuple(leaves[name].path for path in self.blocks for name in self.graph.blocks[path].parameters)

    @property
    def state_size(self) -> int:
        """Dimension :math:`d_t` of the state after it."""
        return sum(self.graph.numel(name) for name in self.after)

    @property
    def parameter_size(self) -> int:
        """Dimension :math:`p_t` of its parameters."""
        return sum(
            self.graph.numel(name) for path in self.blocks for name in self.graph.blocks[path].parameters
        )

    def __call__(self, state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> State:
        """The next state :math:`x_t = φ_t(x_{t-1}, u_t)`."""
        leaves = self.graph.leaves
        values = {**self.graph.constants, **state}
        for path in self.blocks:
            for name in self.graph.blocks[path].parameters:
                values[name] = parameters[leaves[name].path]
        for node in self.nodes:
            values[node.name] = node.run(values)
        return {name: values[name] for name in self.after}

    def __str__(self) -> str:
        parts = ["+".join(_short(n) for n in self.biaffine) or "identity"]
        parts += ["+".join(_short(n) for n in part) for part in self.nonaffine]
        return " → ".join(parts)


class Chain:
    """A model and an input as a chain of computations.

    Args:
        model: any module that can be captured as a graph.
        x: the batch, all of it one stacked initial state.

    >>> chain = Chain(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(5, 3))
    >>> print(chain)
    Chain of 2 computations
      φ_1: linear → tanh    u_1: 0    x_1: 5×4
      φ_2: linear           u_2: 2    x_2: 5×2
    >>> chain[0].parameter_size, chain[0].state_size
    (16, 20)
    """

    def __init__(self, model: nn.Module, x: Any) -> None:
        args, kwargs = as_inputs(x)
        self._set(capture(model, x), (*args, *kwargs.values()), lambda: dict(model.named_parameters()))

    def _set(self, graph: Graph, inputs: Sequence[Any], source: Callable[[], dict[str, Tensor]]) -> None:
        self.graph = graph
        self.inputs = tuple(inputs)
        self._source = source
        self.computations = tuple(_computations(graph))

    @classmethod
    def _of(cls, graph: Graph, inputs: Sequence[Any], source: Callable[[], dict[str, Tensor]]) -> Chain:
        chain = cls.__new__(cls)
        chain._set(graph, inputs, source)
        return chain

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The present parameters, by path: those the chain depends on."""
        present = self._source()
        return {leaf.path: present[leaf.path] for leaf in self.graph.parameters}

    def states(self, parameters: Mapping[str, Tensor] | None = None) -> list[State]:
        r"""The states :math:`x_0, x_1, …, x_\tau`, each a dict of the tensors alive at that cut."""
        given = self.parameters if parameters is None else self._checked(parameters)
        states: list[State] = [
            {leaf.name: value for leaf, value in zip(self.graph.inputs, self.inputs, strict=True)}
        ]
        for computation in self.computations:
            states.append(computation(states[-1], given))
        return states

    def value(self, parameters: Mapping[str, Tensor] | None = None) -> Any:
        r"""The output :math:`\psi(u) = f_{x_0, \tau}(u)`: a tensor, or a tuple of them."""
        given = self.parameters if parameters is None else self._checked(parameters)
        outputs = self.graph.run(given, self.inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def autodiff(self, parameters: Mapping[str, Tensor] | None = None) -> Autodiff:
        """The automatic-differentiation oracle at the given parameters (Algorithm "Autodiff")."""
        given = self.parameters if parameters is None else self._checked(parameters)
        return Autodiff(self.graph, self.inputs, given)

    def split(self, start: int, stop: int) -> Chain:
        r"""The part that takes state ``start`` to state ``stop``: the paper's :math:`\phi_{s \to t}`, s = start + 1.

        Its input is the present value of that state, whose tensors are its inputs.
        """
        if not 0 <= start < stop <= len(self):
            raise ChainError(
                f"a chain of {len(self)} computations has states 0 to {len(self)}: "
                f"cannot go from state {start} to state {stop}"
            )
        state = self.states()[start]
        first, last = self.computations[start], self.computations[stop - 1]
        nodes = [node for computation in self.computations[start:stop] for node in computation.nodes]
        final = self.graph.outputs if stop == len(self) else last.after
        graph = restrict(self.graph, first.before, nodes, final)
        return Chain._of(graph, [state[leaf.name] for leaf in graph.inputs], self._source)

    def __rshift__(self, second: Chain) -> Chain:
        """The composition: the output of this chain is the input of the second (auto-encoders).

        Parameters keep their paths; if the two chains share a path for different tensors, they become
        ``0.<path>`` and ``1.<path>``, as in ``nn.Sequential(first, second)``.
        """
        if not isinstance(second, Chain):
            return NotImplemented
        mine, theirs = self.parameters, second.parameters
        clash = any(mine[path] is not theirs[path] for path in mine.keys() & theirs.keys())
        first_path: Callable[[str], str] = (lambda p: f"0.{p}") if clash else (lambda p: p)
        tied = {id(value): first_path(path) for path, value in mine.items()}
        second_path = {
            path: tied.get(id(value), f"1.{path}" if clash else path) for path, value in theirs.items()
        }
        graph = compose(self.graph, second.graph, first_path, second_path)

        def source() -> dict[str, Tensor]:
            joined = {second_path[path]: value for path, value in second.parameters.items()}
            return joined | {first_path(path): value for path, value in self.parameters.items()}

        return Chain._of(graph, self.inputs, source)

    def _checked(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters the chain reads, from a mapping that may hold more.

        Raises:
            ChainError: if one is missing or has another shape.
        """
        checked = {}
        for leaf in self.graph.parameters:
            value = parameters.get(leaf.path)
            if value is None:
                raise ChainError(f"no value was given for parameter '{leaf.path}'")
            if tuple(value.shape) != leaf.spec.shape:
                raise ChainError(
                    f"parameter '{leaf.path}' has shape {leaf.spec.shape}, got {tuple(value.shape)}"
                )
            checked[leaf.path] = value
        return checked

    def __len__(self) -> int:
        return len(self.computations)

    def __iter__(self) -> Iterator[Computation]:
        return iter(self.computations)

    @overload
    def __getitem__(self, index: int) -> Computation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Computation, ...]: ...
    def __getitem__(self, index: int | slice) -> Computation | tuple[Computation, ...]:
        return self.computations[index]

    def __str__(self) -> str:
        rows = []
        for t, computation in enumerate(self.computations, start=1):
            blocks = ", ".join(path or "(model)" for path in computation.blocks) or "none"
            sizes = ", ".join(_shape(self.graph, name) for name in computation.after)
            rows.append((f"  φ_{t}: {computation}", f"u_{t}: {blocks}", f"x_{t}: {sizes}"))
        widths = [max(len(row[k]) for row in rows) for k in range(2)]
        lines = [f"{a:<{widths[0]}}    {b:<{widths[1]}}    {c}" for a, b, c in rows]
        return "\n".join([f"Chain of {len(self)} computations", *lines])


def _computations(graph: Graph) -> Iterator[Computation]:
    """Cut the graph where parameters enter and the result would no longer be biaffine."""
    data = [node for node in graph.nodes if graph.roles[node.name] != Role.CONSTANT]
    for piece in _merge_shared(graph, list(_pieces(graph, data))):
        yield _computation(graph, piece)


def _pieces(graph: Graph, nodes: list[Node]) -> Iterator[list[Node]]:
    current: list[Node] = []
    degrees = _initial_degrees(graph, graph.live[0])
    waiting: list[Node] = []  # functions of parameters, which belong to their first reader
    for node in nodes:
        if Role.INPUT not in graph.roles[node.name]:
            degrees[node.name] = degree_of(node, degrees)
            waiting.append(node)
            continue
        degree = degree_of(node, degrees)
        affine_so_far = all(degrees[n.name].is_biaffine for n in current)
        if graph.blocks_read[node.name] and current and not (affine_so_far and degree.is_biaffine):
            yield current
            degrees = _initial_degrees(graph, [n for n in degrees if Role.INPUT in graph.roles[n]])
            current = []
            for earlier in waiting:
                degrees[earlier.name] = degree_of(earlier, degrees)
            degree = degree_of(node, degrees)
        degrees[node.name] = degree
        current += [*waiting, node]
        waiting = []
    if current or waiting:
        yield current + waiting


def _initial_degrees(graph: Graph, state: Sequence[str]) -> dict[str, Degree]:
    degrees = {name: Degree(state=1) for name in state}
    degrees |= {leaf.name: Degree(parameters=1) for leaf in graph.parameters}
    return degrees


def _merge_shared(graph: Graph, pieces: list[list[Node]]) -> list[list[Node]]:
    """Join all pieces between two uses of one block: a chain has each parameter in one computation."""
    first_use: dict[str, int] = {}
    last_use: dict[str, int] = {}
    for k, piece in enumerate(pieces):
        for path in _blocks_of(graph, piece):
            first_use.setdefault(path, k)
            last_use[path] = k
    merged: list[list[Node]] = []
    reach = -1
    for k, piece in enumerate(pieces):
        if k <= reach:
            merged[-1] = merged[-1] + piece
        else:
            merged.append(list(piece))
        reach = max([reach, *(last_use[path] for path, start in first_use.items() if start == k)])
    return merged


def _blocks_of(graph: Graph, piece: Sequence[Node]) -> tuple[str, ...]:
    read = [path for node in piece for path in _in_order(graph, node)]
    return tuple(dict.fromkeys(read))


def _in_order(graph: Graph, node: Node) -> list[str]:
    owners = {name: path for path, block in graph.blocks.items() for name in block.parameters}
    direct = [owners[name] for name in node.inputs if name in owners]
    return direct + sorted(graph.blocks_read.get(node.name, frozenset()) - set(direct))


def _computation(graph: Graph, piece: Sequence[Node]) -> Computation:
    position = {node.name: k for k, node in enumerate(graph.nodes)}
    before = graph.live[position[piece[0].name]]
    after = graph.live[position[piece[-1].name] + 1]
    degrees = _initial_degrees(graph, before)
    biaffine: list[Node] = []
    parts: list[list[Node]] = []
    for node in piece:
        degrees[node.name] = degree_of(node, degrees)
        if degrees[node.name].is_biaffine and not parts:
            biaffine.append(node)
        elif parts and form_of(node) is Form.LAYOUT:
            parts[-1].append(node)
        else:
            parts.append([node])
    return Computation(
        graph=graph,
        nodes=tuple(piece),
        blocks=_blocks_of(graph, piece),
        before=before,
        after=after,
        biaffine=tuple(biaffine),
        nonaffine=tuple(map(tuple, parts)),
    )


def _short(node: Node) -> str:
    return node.op.rpartition(".")[2]


def _shape(graph: Graph, name: str) -> str:
    spec = graph.spec(name)
    specs = spec if isinstance(spec, tuple) else (spec,)
    return " ".join("×".join(map(str, s.shape)) or "scalar" for s in specs)
