r"""The automatic-differentiation oracle (Algorithms "Forward pass", "Backward pass", "Autodiff").

One forward pass computes :math:`\psi(u)` and stores what the derivatives need. After it, each call
:math:`\mu \mapsto \nabla\psi(u)\mu` (pull-back) or :math:`v \mapsto \nabla\psi(u)^\top v` (push-forward) is one
pass over the chain, for as many slopes as one likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.errors import ChainError
from surefoot.graph import Graph


class Autodiff:
    """The value of a chain at a point, and its derivative as a linear operator.

    Args:
        graph: the function.
        inputs: what it reads.
        parameters: where, by path: all trainable parameters that the graph reads. Frozen ones among them are
            constants; the derivative in any other is zero.

    Attributes:
        value: the output, detached; a tuple of tensors if the model returns several.
        calls: how many pull-backs and push-forwards were made so far.

    >>> from surefoot.operations.captured import capture
    >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> oracle = sf.oracles.Autodiff(capture(model, x), [x], dict(model.named_parameters()))
    >>> oracle.pullback(torch.ones(1, 1))["weight"]
    tensor([[3., 4.]])
    >>> oracle.pushforward({"weight": torch.ones(1, 2)}), oracle.calls
    (tensor([[7.]]), 2)
    """

    def __init__(self, graph: Graph, inputs: Sequence[Any], parameters: Mapping[str, Tensor]) -> None:
        frozen = {leaf.path for leaf in graph.frozen}
        with torch.inference_mode(False), torch.enable_grad(), _differentiable_attention():
            values = {path: _usable(value) for path, value in parameters.items()}
            varying = {path: v for path, v in values.items() if path not in frozen and v.is_floating_point()}
            self._leaves = {path: v.requires_grad_() for path, v in varying.items()}
            self._outputs = graph.run(values, [_usable(value) for value in inputs])
        self._linear: tuple[tuple[Tensor, ...], dict[str, Tensor]] | None = None
        self.calls = 0
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

    def pushforward(self, direction: Mapping[str, Tensor]) -> Any:
        r"""The Jacobian-vector product :math:`\nabla\psi(u)^\top v`, of the shape of the value.

        The pull-back is linear in its slope, so its own derivative is the push-forward: no second forward pass.
        The direction v is given by parameter path; a missing path means zero.

        Raises:
            ChainError: if a path is unknown, or a direction is not of the shape and type of its parameter.
        """
        for path, given in direction.items():
            if path not in self._leaves:
                raise ChainError(f"the chain has no trainable parameter '{path}'")
            _check_like(f"the direction of '{path}'", given, "the parameter", self._leaves[path])
        if self._linear is None:  # the pull-back at a symbolic slope, kept for all later push-forwards
            with torch.inference_mode(False), torch.enable_grad(), _differentiable_attention():
                unknown = tuple(torch.zeros_like(output).requires_grad_() for output in self._outputs)
                self._linear = unknown, self._gradients(unknown, create_graph=True)
        slopes, gradients = self._linear
        self.calls += 1
        paths = [path for path in direction if gradients[path].requires_grad]
        return _one_or_all(
            _differentiated([gradients[path] for path in paths], slopes, [direction[path] for path in paths])
        )

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


def _differentiated(
    outputs: Sequence[Tensor], variables: Sequence[Tensor], weights: Sequence[Tensor], create_graph: bool = False
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
