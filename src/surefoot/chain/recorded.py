"""Derivatives of a graph at a point as automatic differentiation records them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from surefoot.graph import Graph
from surefoot.graph.nodes import Node, in_double, run_widened
from surefoot.graph.structure import outputs_of
from surefoot.program.checks import differentiable_attention

Values = Mapping[str, Any]
Run = Callable[[Values], tuple[Any, ...]]


class Recorded:
    """A forward pass, recorded.

    Args:
        graph: the function.
        parameters: where, by path.
        inputs: what it reads.
        leaves: the parameters in which derivatives are taken.
        along: a direction that is pushed forward on the way, if all operations have a forward derivative.

    Attributes:
        outputs: of the graph.
        pushed: the push-forward of ``along``, or ``None``.
    """

    def __init__(
        self,
        graph: Graph,
        parameters: Mapping[str, Tensor],
        inputs: Sequence[Any],
        leaves: Mapping[str, Tensor],
        along: Mapping[str, Tensor] | None = None,
    ) -> None:
        with differentiable_attention():
            self._leaves = {path: value.requires_grad_() for path, value in leaves.items()}
            ahead = None if along is None else _pushed_ahead(graph, parameters, inputs, along)
            outputs, pushed = ahead or (run_graph(graph, parameters, inputs), None)
        self.outputs: tuple[Tensor, ...] = outputs
        self.pushed: tuple[Tensor, ...] | None = pushed
        self._linear: tuple[tuple[Tensor, ...], dict[str, GradientEdge]] | None = None

    def pull(self, slopes: Sequence[Tensor], create_graph: bool = False) -> dict[str, Tensor]:
        """The gradients for one slope per output."""
        varying = [k for k, output in enumerate(self.outputs) if output.requires_grad]
        outputs, weights = [self.outputs[k] for k in varying], [slopes[k] for k in varying]
        gradients = _differentiated(outputs, list(self._leaves.values()), weights, create_graph)
        return dict(zip(self._leaves, gradients, strict=True))

    def _edges(self, slopes: Sequence[Tensor]) -> dict[str, GradientEdge]:
        """Of the gradients as functions of slopes and leaves; their values are dropped one after the other."""
        edges: dict[str, GradientEdge] = {}

        def note(path: str, slope: Tensor) -> Tensor:
            if slope.requires_grad:
                edges[path] = get_gradient_edge(slope)
            return slope.new_zeros(()).expand_as(slope)  # zeros without memory take its place

        hooks = [leaf.register_hook(partial(note, path)) for path, leaf in self._leaves.items()]
        try:
            self.pull(slopes, create_graph=True)
        finally:
            for hook in hooks:
                hook.remove()
        return edges

    def pull_onto(self, sums: Mapping[str, Tensor], slope: Tensor) -> None:
        """Add the gradients for the slope of the only output to tensors by path."""
        if not self._leaves or not self.outputs[0].requires_grad:
            return
        leaves = list(self._leaves.values())
        try:
            for path, leaf in self._leaves.items():
                leaf.grad = sums[path]
            torch.autograd.backward(self.outputs, (slope,), retain_graph=True, inputs=leaves)
        finally:
            for leaf in leaves:
                leaf.grad = None

    def push(self, direction: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The changes of the outputs.

        The pull-back is linear in its slope, so its own derivative is the push-forward: no second forward pass.
        Its graph is recorded at the slope zero, where all slopes are zero: of these only the shapes are kept.
        """
        if self._linear is None:
            self._linear = self._at_symbolic_slope()
        slopes, edges = self._linear
        paths = [path for path in direction if path in edges]
        return _differentiated([edges[path] for path in paths], slopes, [direction[path] for path in paths])

    def _at_symbolic_slope(self) -> tuple[tuple[Tensor, ...], dict[str, GradientEdge]]:
        """The pull-back at a symbolic slope, kept for all later push-forwards: that slope, and the graph."""
        with differentiable_attention():
            unknown = tuple(o.new_zeros(()).expand_as(o).requires_grad_() for o in self.outputs)
            with saved_tensors_hooks(_without_zeros, lambda kept: kept[0].expand(kept[1])):
                return unknown, self._edges(unknown)

    def bent(self, direction: Mapping[str, Tensor], slope: Tensor, curved: Tensor) -> dict[str, Tensor]:
        """The curvature along the slope times the direction, and the pull-back of what is curved."""
        outputs: list[Any] = [output for output in self.outputs if output.requires_grad]
        with differentiable_attention():
            edges = self._edges((slope,))
        paths = [path for path in direction if path in edges]
        weights = [curved] * len(outputs) + [direction[path] for path in paths]
        changes = [*outputs, *(edges[path] for path in paths)]
        gradients = _differentiated(changes, list(self._leaves.values()), weights)
        return dict(zip(self._leaves, gradients, strict=True))


def bound(
    graph: Graph, parameters: Mapping[str, Tensor], inputs: Sequence[Any]
) -> tuple[Values, Callable[[Values], Any]]:
    """The values of all leaves of a graph, and the function from such values to its outputs: in double precision
    where parameters are, and the graph is not.
    """
    values = graph.bind(parameters, inputs)
    if not any(parameters[p.path].dtype is torch.float64 is not p.spec.dtype for p in graph.parameters):
        return values, lambda given: outputs_of(graph, given, Node.run)
    wide = {name: in_double(v) if isinstance(v, Tensor) else v for name, v in values.items()}
    return wide, lambda given: outputs_of(graph, given, run_widened)


def run_graph(graph: Graph, parameters: Mapping[str, Tensor], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a graph; in double precision where parameters are, and the graph is not."""
    values, run = bound(graph, parameters, inputs)
    return run(values)


def _pushed_ahead(
    graph: Graph, values: Mapping[str, Tensor], inputs: Sequence[Any], along: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
    """The outputs and their change; ``None`` where an operation has no forward derivative."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its first forward derivative
        moved = {path: forward_ad.make_dual(values[path], change) for path, change in along.items()}
        try:
            pairs = [forward_ad.unpack_dual(out) for out in run_graph(graph, {**values, **moved}, inputs)]
        except (RuntimeError, NotImplementedError):
            return None
    changes = [torch.zeros_like(at) if change is None else change.detach() for at, change in pairs]
    return tuple(at for at, _ in pairs), tuple(changes)


def _differentiated(
    outputs: Sequence[Any], variables: Sequence[Tensor], weights: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Vector-Jacobian products; zero where nothing depends on a variable."""
    if not outputs or not variables:
        return tuple(torch.zeros_like(variable) for variable in variables)
    return torch.autograd.grad(
        outputs,
        variables,
        weights,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )


def _without_zeros(saved: Tensor) -> Any:
    """What a graph keeps of a tensor: of zeros one, and the shape."""
    if not saved.is_floating_point() or saved.is_meta or not saved.numel():
        return saved, saved.shape
    zero = not bool(saved[(0,) * saved.dim()]) and not bool(saved.any())  # most do not begin with zero
    return saved.new_zeros(()) if zero else saved, saved.shape
