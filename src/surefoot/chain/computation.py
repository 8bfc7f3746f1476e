"""One computation of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from surefoot.graph import Graph, Node

State = dict[str, Any]


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
        return sum(self.graph.numel(name) for path in self.blocks for name in self.graph.blocks[path].parameters)

    def __call__(self, state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> State:
        """The next state :math:`x_t = φ_t(x_{t-1}, u_t)`; parameters are given by path, as many as one likes."""
        leaves = self.graph.leaves
        values = {**self.graph.constants_at(parameters), **state}
        for path in self.blocks:
            for name in self.graph.blocks[path].parameters:
                values[name] = parameters[leaves[name].path]
        for node in self.nodes:
            values[node.name] = node.run(values)
        return {name: values[name] for name in self.after}

    def __str__(self) -> str:
        parts = ["+".join(_short(node) for node in self.biaffine) or "identity"]
        parts += ["+".join(_short(node) for node in part) for part in self.nonaffine]
        return " → ".join(parts)


def _short(node: Node) -> str:
    return node.op.rpartition(".")[2]
