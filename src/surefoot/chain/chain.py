r"""A network as a chain of computations: the paper's Definition 1, read off the graph.

.. math:: x_t = \phi_t(x_{t-1}, u_t), \qquad \phi_t = a_{t,k_t} \circ \dots \circ a_{t,1} \circ b_t

The state :math:`x_t` is the live set of the graph at a cut, the whole batch stacked. For a plain network that is
one tensor; for residual, highway and dense networks it is the paper's augmented state
(eq. dense_net, chain_res_def), without any code for those structures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from surefoot.batches import Batches, kind_of, numbered, refuse_statistics, tensors_of
from surefoot.chain.autodiff import Autodiff
from surefoot.chain.batched import Batched, Piece
from surefoot.chain.cut import Computation, State, cut
from surefoot.errors import ChainError
from surefoot.graph import Graph
from surefoot.graph.compose import Naming, compose, restrict
from surefoot.operations.captured import capture
from surefoot.processes import Processes
from surefoot.program.checks import is_loader, unwrapped

_Parameters = Mapping[str, Tensor]


def _present(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


_NOTHING = Graph({}, (), (), {}, {})  # of a process without data


class Chain:
    """A model and an input as a chain of computations.

    Args:
        model: any module that can be captured as a graph.
        x: the batch, all of it one stacked initial state; or a loader of batches ``(x, y)``, all of which are
            meant in the memory of one (:mod:`surefoot.chain.batched`). Then computations and graph are those of
            the first batch, and there are no states. A process without data passes ``[]``.

    Attributes:
        graph: the graph the chain is read off.
        batches: where the data are given in pieces; ``None`` for one batch.
        inputs: the tensors the graph reads, in order.
        computations: :math:`φ_1, …, φ_τ`.

    >>> chain = sf.Chain(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(5, 3))
    >>> print(chain)
    Chain of 2 computations
      φ_1: linear → tanh    u_1: 0    x_1: 5×4
      φ_2: linear           u_2: 2    x_2: 5×2
    >>> chain[0].parameter_size, chain[0].state_size
    (16, 20)
    """

    def __init__(self, model: nn.Module, x: Any) -> None:
        model = unwrapped(model)
        batches, graph = (Batches(x, ordered=True), _NOTHING) if is_loader(x) else (None, capture(model, x))
        self._model, self._graphs = model, dict[Any, Graph]()
        inputs = () if batches is not None else tensors_of(x)
        self._set(graph, inputs, partial(_present, model), (), batches)
        if batches is not None:
            self.graph, self.inputs = next(self.pieces(), (graph, ()))
            self.computations = cut(self.graph)
        used = {leaf.path for leaf in self.graph.parameters}
        named = model.named_parameters()
        self._unused = tuple(path for path, value in named if value.requires_grad and path not in used)

    def _set(
        self,
        graph: Graph,
        inputs: Sequence[Tensor],
        source: Callable[[], dict[str, Tensor]],
        unused: Sequence[str] = (),
        batches: Batches | None = None,
    ) -> Chain:
        self.graph, self.batches = graph, batches
        self.inputs = tuple(inputs)
        self.computations = cut(graph)
        self._source = source
        self._unused = tuple(unused)
        return self

    def pieces(self) -> Iterator[Piece]:
        """The graph and the inputs of every batch, one after the other.

        Raises:
            CaptureError: naming the batch, if it cannot be read.
            EvaluationError: if batches change, or the model computes statistics from each of them.
        """
        if self.batches is None:
            yield self.graph, self.inputs
            return
        for number, x, _ in self.batches:
            tensors = tensors_of(x)
            key = tuple(x) if isinstance(x, Mapping) else (), *kind_of(*tensors)
            if key not in self._graphs:
                with numbered(number):
                    self._graphs[key] = capture(self._model, x)
                refuse_statistics(self._graphs[key])
            yield self._graphs[key], tensors

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The present trainable parameters, by path; last those that the output does not depend on."""
        present = self._source()
        return {path: present[path] for path in (*(leaf.path for leaf in self.graph.parameters), *self._unused)}

    def states(self, parameters: _Parameters | None = None) -> list[State]:
        r"""The states :math:`x_0, x_1, …, x_\tau`, each a dict of the tensors alive at that cut."""
        if self.batches is not None:
            raise ChainError("states are those of one batch: use surefoot.Chain(model, x) with one of them")
        given = self._checked(parameters)
        values = {leaf.name: value for leaf, value in zip(self.graph.inputs, self.inputs, strict=True)}
        states: list[State] = [{name: values[name] for name in self.graph.live[0]}]
        for computation in self.computations:
            states.append(computation(states[-1], given))
        return states

    def value(self, parameters: _Parameters | None = None) -> Any:
        r"""The output :math:`\psi(u) = f_{x_0, \tau}(u)`: a tensor, or a tuple of them."""
        if self.batches is not None:
            return self.autodiff(parameters).value
        outputs = self.graph.run(self._checked(parameters), self.inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def autodiff(
        self, parameters: _Parameters | None = None, processes: Processes | None = None
    ) -> Autodiff | Batched:
        """The automatic-differentiation oracle at the given parameters (Algorithm "Autodiff"); with a loader, or
        with processes that have a part of the data each, that of all data together.
        """
        given = self._checked(parameters)
        if self.batches is None and processes is None:
            return Autodiff(self.graph, self.inputs, given)
        return Batched(self.pieces, dict(sorted(given.items())), processes)

    def split(self, start: int, stop: int) -> Chain:
        r"""The part that takes state ``start`` to state ``stop``.

        This is the paper's :math:`\phi_{s \to t}` with s = start + 1 and t = stop. Its input is the present value
        of that state, whose tensors are its inputs.
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
        return Chain.__new__(Chain)._set(graph, [state[leaf.name] for leaf in graph.inputs], self._source)

    def __rshift__(self, second: Chain) -> Chain:
        """The composition: the output of this chain is the input of the second (auto-encoders).

        Parameters keep their paths; if the two chains share a path for different tensors, they become
        ``0.<path>`` and ``1.<path>``, as in ``nn.Sequential(first, second)``. A tensor that both use is one
        parameter, under the path it has in the first.
        """
        if not isinstance(second, Chain):
            return NotImplemented
        if self.batches is not None or second.batches is not None:
            raise ChainError("chains of one batch each can be composed, not those of loaders")
        mine, theirs = self._source(), second._source()
        clash = any(mine[path] is not theirs[path] for path in mine.keys() & theirs.keys())
        before, behind = ("0.", "1.") if clash else ("", "")
        tied = {id(value): before + path for path, value in mine.items()}
        paths = {path: tied.get(id(value), behind + path) for path, value in theirs.items()}
        naming = Naming(lambda path: before + path, lambda path: (before + path).rstrip("."))
        other = Naming(lambda path: paths.get(path, behind + path), lambda path: (behind + path).rstrip("."))
        graph = compose(self.graph, second.graph, naming, other)

        def source() -> dict[str, Tensor]:
            joined = {paths[path]: value for path, value in second._source().items()}
            return joined | {before + path: value for path, value in self._source().items()}

        used = {leaf.path for leaf in graph.parameters}
        unused = dict.fromkeys([*map(naming.parameter, self._unused), *map(other.parameter, second._unused)])
        return Chain.__new__(Chain)._set(graph, self.inputs, source, [path for path in unused if path not in used])

    def _checked(self, parameters: _Parameters | None) -> dict[str, Tensor]:
        """The parameters the chain is asked about, from a mapping that may hold more.

        A tied parameter may go by any of its paths. A frozen one has the model's value if none is given.

        Raises:
            ChainError: if one is missing or has another shape, or if a tied one has two values.
        """
        if parameters is None:
            return self.parameters
        checked: dict[str, Tensor] = {}
        for leaf in (*self.graph.parameters, *self.graph.frozen):
            paths = [leaf.path, *(path for path, name in self.graph.aliases.items() if name == leaf.path)]
            values = [parameters[path] for path in paths if path in parameters]
            if not values and leaf.trainable:
                raise ChainError(f"no value was given for parameter '{leaf.path}'")
            for value in values:
                if tuple(value.shape) != leaf.spec.shape:
                    expected, got = leaf.spec.shape, tuple(value.shape)
                    raise ChainError(f"parameter '{leaf.path}' has shape {expected}, got {got}")
                if value is not values[0] and not torch.equal(value, values[0]):
                    raise ChainError(
                        f"the tied parameters {', '.join(map(repr, paths))} were given different values"
                    )
            if values:
                checked[leaf.path] = values[0]
        return checked | {path: parameters[path] for path in self._unused if path in parameters}

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
            sizes = ", ".join(" ".join(map(str, self.graph.specs(name))) for name in computation.after)
            rows.append((f"  φ_{t}: {computation}", f"u_{t}: {blocks}", f"x_{t}: {sizes}"))
        widths = [max((len(row[k]) for row in rows), default=0) for k in range(2)]
        lines = [f"{a:<{widths[0]}}    {b:<{widths[1]}}    {c}" for a, b, c in rows]
        return "\n".join([f"Chain of {len(self)} computation{'s' if len(self) != 1 else ''}", *lines])
