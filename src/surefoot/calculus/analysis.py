r"""A model, a batch and an objective, read once: what certificates, segments, estimates and steps start from.

What does not depend on the weights is in :class:`Reading`: the graph, the graph that the calculus runs on, norms
of layers that hold for all weights nearby. What does is in :class:`Analysis`: the values of all tensors at the
present weights, the *centre*, and the costates :math:`\partial F/\partial z` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.forward import Pass, Shared, forward
from surefoot.calculus.leaves import Wrt, captured, enclose_leaves, holds_present, variable_blocks
from surefoot.calculus.prepare import prepared
from surefoot.domains import Box, Domain, DomainError, ProductBall, Region
from surefoot.enclosure import Enclosure
from surefoot.graph import Graph, Leaf
from surefoot.operations.call import Norms
from surefoot.operations.evaluation import fold_in_double


@dataclass(frozen=True, eq=False)
class Reading:
    """What holds for all weights.

    Attributes:
        graph: the operations of the model, and of the objective behind it.
        norms: of layers, at weights nearby.
    """

    graph: Graph
    norms: Norms

    @cached_property
    def prepared(self) -> Graph:
        """The graph that the calculus runs on."""
        return prepared(self.graph)

    @property
    def is_scalar(self) -> bool:
        """Whether the output is one number."""
        return len(self.graph.outputs) == 1 and self.graph.numel(self.graph.outputs[0]) == 1


@dataclass(frozen=True, eq=False)
class Analysis:
    """A function of the parameters: the outputs of a model on a batch, or an objective of them.

    >>> model, x = nn.Linear(2, 1), torch.ones(3, 2)
    >>> first = Analysis.of(model, x)
    >>> Analysis.of(model, x, None, first) is first
    True
    >>> with torch.no_grad():
    ...     _ = model.weight.mul_(2.0)
    >>> second = Analysis.of(model, x, None, first)
    >>> second is first, second.reading is first.reading
    (False, True)
    """

    model: nn.Module  # the model; it is not changed
    x: Any  # a batch
    # a loss bound to its targets, or any module that maps the outputs to one number; ``None`` for the outputs
    objective: nn.Module | None
    reading: Reading  # what holds for all weights
    values: Mapping[str, Tensor]  # of the leaves of the graph, by name, as they were when it was read

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Any,
        objective: nn.Module | None = None,
        previous: Analysis | None = None,
        norms: Norms | None = None,
    ) -> Analysis:
        """The previous analysis if it still says what the model computes, otherwise a new one.

        A new one takes over what holds for all weights, if the graph is the same; otherwise it starts with these
        norms of layers.
        """
        graph, values = captured(model, x, objective)
        if previous is not None and previous.model is model and previous.reading.graph is graph:
            if previous._has(values):
                return previous
            reading = previous.reading
        else:
            reading = Reading(graph, norms or Norms())
        kept = {name: value.detach().clone() for name, value in values.items()}
        return cls(model, x, objective, reading, kept)

    def _has(self, values: Mapping[str, Tensor]) -> bool:
        """PyTorch's count of writes misses those through ``.data`` and NumPy, so values are compared."""
        return all(_equal(values[name], kept) for name, kept in self.values.items())

    @cached_property
    def centre(self) -> dict[str, Any]:
        """The values of all tensors at the present weights, by name, in double precision."""
        self.require_values()
        with torch.no_grad():
            return fold_in_double(self.reading.prepared, self.values)

    @cached_property
    def costates(self) -> dict[str, Tensor]:
        """The derivatives of the one number that is the output in all tensors that depend on parameters."""
        self.require_values()
        if not self.reading.is_scalar:
            raise DomainError("steepest descent is that of an objective: give one, or a direction")
        graph = self.reading.prepared
        trained = {leaf.name for leaf in graph.parameters}
        leaves = {
            name: value.detach().double().requires_grad_() if name in trained else value
            for name, value in self.values.items()
        }
        with torch.enable_grad():
            values = fold_in_double(graph, leaves)
            moving = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
            if graph.outputs[0] not in moving:
                return {name: torch.zeros_like(value) for name, value in moving.items()}
            output = values[graph.outputs[0]].sum()
            slopes = torch.autograd.grad(output, list(moving.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(moving, slopes, strict=True))

    @property
    def gradient(self) -> dict[str, Tensor]:
        """The derivative in each parameter, by path."""
        return {leaf.path: self.costates[leaf.name] for leaf in self.reading.graph.parameters}

    @property
    def has_values(self) -> bool:
        """Whether all values are at hand; on the meta device there are none."""
        return not any(value.device.type == "meta" for value in self.values.values())

    def require_values(self) -> None:
        """Raise a :class:`DomainError` on the meta device."""
        if not self.has_values:
            raise DomainError("a segment starts at the present weights, and on the meta device there are none")

    def enclosed(
        self, domain: Domain, wrt: Wrt = "params", input_norm: float | None = None
    ) -> tuple[dict[str, Enclosure], Region]:
        """The leaves over a domain; see :func:`surefoot.calculus.leaves.enclose_leaves`."""
        return enclose_leaves(self.reading.graph, self.values, domain, wrt, input_norm)

    def is_inside(self, domain: Domain, wrt: Wrt = "params") -> bool | None:
        """Whether the present weights, or inputs, lie in a domain; ``None`` if they are not known."""
        return holds_present(self.reading.graph, self.values, domain, wrt)

    def variables(self, wrt: Wrt = "params") -> dict[str, list[Leaf]]:
        """The leaves that vary, by block."""
        graph = self.reading.graph
        return {path: [graph.leaves[n] for n in names] for path, names in variable_blocks(graph, wrt).items()}

    def balls_around(self, box: Box, wrt: Wrt = "params") -> ProductBall:
        """The balls that contain a box, one per block."""
        blocks = self.variables(wrt)
        shapes = {leaf.path: leaf.spec.shape for leaves in blocks.values() for leaf in leaves}
        return box.around({block: tuple(v.path for v in leaves) for block, leaves in blocks.items()}, shapes)

    def is_in_box(self, box: Box, wrt: Wrt = "params") -> bool | None:
        """Whether the present weights, or inputs, lie in a box; ``None`` if they are not known."""
        if not self.has_values:
            return None
        varying = [leaf for leaves in self.variables(wrt).values() for leaf in leaves]
        return all(box.contains(leaf.path, self.values[leaf.name]) for leaf in varying)

    def over(
        self, domain: Domain, wrt: Wrt = "params", input_norm: float | None = None, shared: Shared | None = None
    ) -> Pass:
        """The forward pass over a domain, with what passes over others around the same centre have in common.

        Centre values are kept for a scalar function, for a pass backwards, and where the input varies.
        """
        leaves, region = self.enclosed(domain, wrt, input_norm)
        keep = self.reading.is_scalar or wrt == "input"
        return forward(self.reading.prepared, leaves, region, keep, shared)


def _equal(present: Tensor, kept: Tensor) -> bool:
    if present.dtype != kept.dtype or present.device != kept.device or present.shape != kept.shape:
        return False
    return kept.device.type == "meta" or torch.equal(present.detach(), kept)
