r"""The automatic-differentiation oracle (Algorithms "Forward pass", "Backward pass", "Autodiff").

One forward pass computes :math:`\psi(u)` and stores what the derivatives need. After it, each call
:math:`\mu \mapsto \nabla\psi(u)\mu` (pull-back) or :math:`v \mapsto \nabla\psi(u)^\top v` (push-forward) is one
pass over the chain, for as many slopes as one likes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.errors import ChainError
from surefoot.graph import Graph
from surefoot.graph.nodes import in_double
from surefoot.graph.structure import outputs_of


class Autodiff:
    """The value of a chain at a point, and its derivative as a linear operator.

    Args:
        graph: the function.
        inputs: what it reads.
        parameters: where, by path: all trainable parameters that the graph reads. Frozen ones among them are
            constants; the derivative in any other is zero.
            Where they are in double precision, so is everything, whatever the model's.
        along: a direction that is pushed forward in the forward pass, if all operations have a forward derivative.

    Attributes:
        value: the output, detached; a tuple of tensors if the model returns several.
        pushed: the push-forward of ``along``, or ``None``.
        calls: how many pull-backs and push-forwards were made so far.

    >>> from surefoot.operations.captured import capture
    >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> oracle = sf.oracles.Autodiff(capture(model, x), [x], dict(model.named_parameters()))
    >>> oracle.pullback(torch.ones(1, 1))["weight"]
    tensor([[3., 4.]])
    >>> oracle.pushforward({"weight": torch.ones(1, 2)}), oracle.calls
    (tensor([[7.]]), 2)
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        parameters: Mapping[str, Tensor],
        along: Mapping[str, Tensor] | None = None,
    ) -> None:
        frozen, self.calls = {leaf.path for leaf in graph.frozen}, 0
        with torch.inference_mode(False), torch.enable_grad(), _differentiable_attention():
            values = {path: _usable(value) for path, value in parameters.items()}
            varying = {path: v for path, v in values.items() if path not in frozen and v.is_floating_point()}
            self._leaves = {path: v.requires_grad_() for path, v in varying.items()}
            read = [_usable(value) for value in inputs]
            ahead = None if along is None else _pushed_ahead(graph, values, read, along)
            outputs, pushed = ahead or (run_graph(graph, values, read), None)
        self._outputs: tuple[Tensor, ...] = outputs
        self.pushed: Any = pushed
        self._linear: tuple[tuple[Tensor, ...], dict[str, GradientEdge]] | None = None
        self.value = _one_or_all(tuple(output.detach() for output in self._outputs))

    def pullback(self, slope: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
        r"""The gradient-vector product :math:`\nabla\psi(u)\mu`, by parameter path.

        The slope μ has the shape of the value; it is a sequence if there are several outputs.

        Raises:
            ChainError: if the slope is not of the shape and type of the value.
        """
        slopes = (slope,) if isinstance(slope, Tensor) else tuple(slope)
        if len(slopes) != len(self._outputs):
            raise ChainError(f"the chain returns {len(self._outputs)} tensors, got {len(slopes)} slopes")
        for given, output in zip(slopes, self._outputs, strict=True):
            _check_like("the slope", given, "the value", output)
        self.calls += 1
        return self._gradients(slopes, create_graph=False)

    def pull_onto(self, sums: Mapping[str, Tensor], slope: Tensor) -> None:
        r"""Add :math:`\nabla\psi(u)\mu` to tensors by path, for one output; no second set of them is held."""
        _check_like("the slope", slope, "the value", self._outputs[0])
        self.calls += 1
        if not self._leaves or not self._outputs[0].requires_grad:
            return
        leaves = list(self._leaves.values())
        try:
            for path, leaf in self._leaves.items():
                leaf.grad = sums[path]
            torch.autograd.backward(self._outputs, (slope,), retain_graph=True, inputs=leaves)
        finally:
            for leaf in leaves:
                leaf.grad = None

    def pushforward(self, direction: Mapping[str, Tensor]) -> Any:
        r"""The Jacobian-vector product :math:`\nabla\psi(u)^\top v`, of the shape of the value.

        The pull-back is linear in its slope, so its own derivative is the push-forward: no second forward pass.
        Its graph is recorded at the slope zero, where all slopes are zero: of these only the shapes are kept.
        The direction v is given by parameter path; a missing path means zero.

        Raises:
            ChainError: if a path is unknown, or a direction is not of the shape and type of its parameter.
        """
        for path, given in direction.items():
            if path not in self._leaves:
                raise ChainError(f"the chain has no trainable parameter '{path}'")
            _check_like(f"the direction of '{path}'", given, "the parameter", self._leaves[path])
        if self._linear is None:
            self._linear = self._at_symbolic_slope()
        slopes, edges = self._linear
        self.calls += 1
        paths = [path for path in direction if path in edges]
        return _one_or_all(
            _differentiated([edges[path] for path in paths], slopes, [direction[path] for path in paths])
        )

    def _at_symbolic_slope(self) -> tuple[tuple[Tensor, ...], dict[str, GradientEdge]]:
        """The pull-back at a symbolic slope, kept for all later push-forwards: that slope, and the graph."""
        with torch.inference_mode(False), torch.enable_grad(), _differentiable_attention():
            unknown = tuple(o.new_zeros(()).expand_as(o).requires_grad_() for o in self._outputs)
            with saved_tensors_hooks(_without_zeros, lambda kept: kept[0].expand(kept[1])):
                found = self._gradients(unknown, create_graph=True)
            return unknown, {path: get_gradient_edge(g) for path, g in found.items() if g.requires_grad}

    def bent(self, direction: Mapping[str, Tensor], slope: Tensor, curved: Tensor) -> dict[str, Tensor]:
        r""":math:`\nabla^2\langle\mu, \psi(u)\rangle v + \nabla\psi(u)c`, by path, for one output: its curvature
        along the slope μ times the direction v, and the pull-back of c. It counts as one call.
        """
        self.calls += 1
        leaves = list(self._leaves.values())
        with torch.inference_mode(False), torch.enable_grad(), _differentiable_attention():
            first = self._gradients((slope,), create_graph=True)
            outputs, weights = [*self._outputs], [curved]
            for path, along in direction.items():
                if first[path].requires_grad:
                    outputs.append(first[path])
                    weights.append(along)
            moving = [k for k, output in enumerate(outputs) if output.requires_grad]
            found = _differentiated([outputs[k] for k in moving], leaves, [weights[k] for k in moving])
        return dict(zip(self._leaves, found, strict=True))

    def _gradients(self, slopes: Sequence[Tensor], create_graph: bool) -> dict[str, Tensor]:
        varying = [k for k, output in enumerate(self._outputs) if output.requires_grad]
        outputs, weights = [self._outputs[k] for k in varying], [slopes[k] for k in varying]
        found = _differentiated(outputs, list(self._leaves.values()), weights, create_graph)
        return dict(zip(self._leaves, found, strict=True))


def run_graph(graph: Graph, parameters: Mapping[str, Tensor], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a graph; in double precision where parameters are, and the graph is not."""
    if not any(parameters[p.path].dtype is torch.float64 is not p.spec.dtype for p in graph.parameters):
        return graph.run(parameters, inputs)
    bound = graph.bind(parameters, inputs).items()
    return outputs_of(graph, {name: in_double(v) if isinstance(v, Tensor) else v for name, v in bound})


def _pushed_ahead(
    graph: Graph, values: Mapping[str, Tensor], inputs: Sequence[Any], along: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], Any] | None:
    """The outputs and their change; ``None`` where an operation has no forward derivative."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its first forward derivative
        moved = {path: forward_ad.make_dual(values[path], change) for path, change in along.items()}
        try:
            pairs = [forward_ad.unpack_dual(out) for out in run_graph(graph, {**values, **moved}, inputs)]
        except (RuntimeError, NotImplementedError):
            return None
    changes = [torch.zeros_like(at) if change is None else change.detach() for at, change in pairs]
    return tuple(at for at, _ in pairs), _one_or_all(tuple(changes))


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


def _usable(value: Any) -> Any:
    """A tensor that shares its memory with the given one, and takes part in a new derivative."""
    return value.clone() if value.is_inference() else value.detach()


def _differentiable_attention() -> Any:
    return sdpa_kernel(SDPBackend.MATH)  # the fused kernels have no second derivative


def _one_or_all(values: tuple[Tensor, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _check_like(what: str, given: Tensor, other: str, expected: Tensor) -> None:
    for name in ("shape", "dtype", "device"):
        a, b = getattr(given, name), getattr(expected, name)
        if a != b:
            a, b = (tuple(a), tuple(b)) if name == "shape" else (a, b)
            raise ChainError(f"{what} has {name} {a}, {other} has {name} {b}")
