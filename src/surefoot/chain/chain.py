r"""A network as a chain of computations: the paper's Definition 1, read off the graph.

.. math:: x_t = \phi_t(x_{t-1}, u_t), \qquad \phi_t = a_{t,k_t} \circ \dots \circ a_{t,1} \circ b_t

The state :math:`x_t` is the live set of the graph at a cut, the whole batch stacked. For a plain network that is
one tensor; for residual, highway and dense networks it is the paper's augmented state
(eq. dense_net, chain_res_def), without any code for those structures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from surefoot.chain.autodiff import Autodiff
from surefoot.chain.cut import Computation, State, cut
from surefoot.errors import ChainError
from surefoot.graph import Graph
from surefoot.graph.checks import as_inputs
from surefoot.graph.compose import Naming, compose, restrict
from surefoot.operations.captured import capture

_Parameters = Mapping[str, Tensor]


class Chain:
    """A model and an input as a chain of computations.

    Args:
        model: any module that can be captured as a graph.
        x: the batch, all of it one stacked initial state.

    Attributes:
        graph: the graph the chain is read off.
        inputs: the tensors the graph reads, in order.
        computations: :math:`φ_1, …, φ_τ`.

    >>> import torch
    >>> from torch import nn
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
        graph = capture(model, x)
        used = {leaf.path for leaf in graph.parameters}
        unused = [path for path, value in model.named_parameters() if value.requires_grad and path not in used]
        self._set(graph, (*args, *kwargs.values()), lambda: dict(model.named_parameters()), unused)

    def _set(
        self,
        graph: Graph,
        inputs: Sequence[Tensor],
        source: Callable[[], dict[str, Tensor]],
        unused: Sequence[str] = (),
    ) -> Chain:
        self.graph = graph
        self.inputs = tuple(inputs)
        self.computations = cut(graph)
        self._source = source
        self._unused = tuple(unused)
        return self

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The present trainable parameters, by path; last those that the output does not depend on."""
        present = self._source()
        return {path: present[path] for path in (*(leaf.path for leaf in self.graph.parameters), *self._unused)}

    def states(self, parameters: _Parameters | None = None) -> list[State]:
        r"""The states :math:`x_0, x_1, …, x_\tau`, each a dict of the tensors alive at that cut."""
        given = self._checked(parameters)
        values = {leaf.name: value for leaf, value in zip(self.graph.inputs, self.inputs, strict=True)}
        states: list[State] = [{name: values[name] for name in self.graph.live[0]}]
        for computation in self.computations:
            states.append(computation(states[-1], given))
        return states

    def value(self, parameters: _Parameters | None = None) -> Any:
        r"""The output :math:`\psi(u) = f_{x_0, \tau}(u)`: a tensor, or a tuple of them."""
        outputs = self.graph.run(self._checked(parameters), self.inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def autodiff(self, parameters: _Parameters | None = None) -> Autodiff:
        """The automatic-differentiation oracle at the given parameters (Algorithm "Autodiff")."""
        return Autodiff(self.graph, self.inputs, self._checked(parameters))

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
