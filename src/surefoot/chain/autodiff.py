r"""The automatic-differentiation oracle (Algorithms "Forward pass", "Backward pass", "Autodiff").

One forward pass computes :math:`\psi(u)` and stores what the derivatives need. After it, each call
:math:`\mu \mapsto \nabla\psi(u)\mu` (pull-back) or :math:`v \mapsto \nabla\psi(u)^\top v` (push-forward) is one
pass over the chain, for as many slopes as one likes. Passes are recorded by automatic differentiation, anew at
each point (:mod:`surefoot.chain.recorded`). Who makes many of them on one graph has them traced
(:mod:`surefoot.chain.traced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.chain.recorded import Recorded, bound
from surefoot.chain.traced import Traced, find, is_traced, refuse, trace
from surefoot.errors import ChainError
from surefoot.graph import Graph
from surefoot.program.checks import differentiable_attention, recordable, with_gradients


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

    @with_gradients()
    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        parameters: Mapping[str, Tensor],
        along: Mapping[str, Tensor] | None = None,
    ) -> None:
        frozen, self.calls = {leaf.path for leaf in graph.frozen}, 0
        values = {path: recordable(value).detach() for path, value in parameters.items()}
        self._at = graph, values, [recordable(value).detach() for value in inputs]
        self._leaves = {path: v for path, v in values.items() if path not in frozen and v.is_floating_point()}
        names = {leaf.path: leaf.name for leaf in graph.parameters}
        self._names = {path: names[path] for path in self._leaves if path in names}
        passes = self._traced() if is_traced(graph) else None
        self._way: Recorded | Traced = passes or Recorded(*self._at, self._leaves, along)
        self._outputs = tuple(output.detach() for output in self._way.outputs)
        self.pushed: Any = None if self._way.pushed is None else _one_or_all(self._way.pushed)
        self.value = _one_or_all(self._outputs)

    @property
    def is_traced(self) -> bool:
        """Whether its passes were traced."""
        return isinstance(self._way, Traced)

    @with_gradients()
    def trace(self) -> None:
        r"""Trace the passes, for this oracle and for all of the same graph that are made from now on.

        They are taken if they agree with automatic differentiation here to half the digits: in the gradient for
        one slope μ, and in :math:`\langle\mu, JJ^\top\mu\rangle = \|J^\top\mu\|^2`.
        """
        if self.is_traced or not self._names:
            return
        values, run = bound(*self._at)
        with differentiable_attention():
            passes = trace(self._at[0], values, self._names, run)
        if passes is None:
            return
        way = Traced(passes, values, self._leaves)
        slopes = tuple(
            torch.linspace(0, 1, o.numel(), device=o.device).cos().to(o).view_as(o) for o in self._outputs
        )
        expected, found = self._way.pull(slopes), way.pull(slopes)
        size = _square(expected.values())
        apart = _square(found[path] - slope for path, slope in expected.items())
        product = sum(float((s * c).double().sum()) for s, c in zip(slopes, way.push(found), strict=True))
        slack = max(torch.finfo(value.dtype).eps for value in self._leaves.values()) ** 0.5
        if apart <= slack**2 * size and abs(product - size) <= slack * size:
            self._way = way
        else:
            refuse(self._at[0], values, self._names)

    def _traced(self) -> Traced | None:
        """By passes that were traced before, if there are any for such tensors."""
        values, _ = bound(*self._at)
        passes = find(self._at[0], values, self._names)
        return None if passes is None else Traced(passes, values, self._leaves)

    @with_gradients()
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
        return self._way.pull(slopes)

    @with_gradients()
    def pull_onto(self, sums: Mapping[str, Tensor], slope: Tensor) -> None:
        r"""Add :math:`\nabla\psi(u)\mu` to tensors by path, for one output; no second set of them is held."""
        _check_like("the slope", slope, "the value", self._outputs[0])
        self.calls += 1
        self._way.pull_onto(sums, slope)

    @with_gradients()
    def pushforward(self, direction: Mapping[str, Tensor]) -> Any:
        r"""The Jacobian-vector product :math:`\nabla\psi(u)^\top v`, of the shape of the value.

        The direction v is given by parameter path; a missing path means zero.

        Raises:
            ChainError: if a path is unknown, or a direction is not of the shape and type of its parameter.
        """
        for path, given in direction.items():
            if path not in self._leaves:
                raise ChainError(f"the chain has no trainable parameter '{path}'")
            _check_like(f"the direction of '{path}'", given, "the parameter", self._leaves[path])
        self.calls += 1
        return _one_or_all(self._way.push(direction))

    @with_gradients()
    def bent(self, direction: Mapping[str, Tensor], slope: Tensor, curved: Tensor) -> dict[str, Tensor]:
        r""":math:`\nabla^2\langle\mu, \psi(u)\rangle v + \nabla\psi(u)c`, by path, for one output: its curvature
        along the slope μ times the direction v, and the pull-back of c. It counts as one call.
        """
        self.calls += 1
        if isinstance(self._way, Traced):  # of first derivatives
            self._way = Recorded(*self._at, self._leaves)
        return self._way.bent(direction, recordable(slope), curved)


def _square(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _one_or_all(values: tuple[Tensor, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _check_like(what: str, given: Tensor, other: str, expected: Tensor) -> None:
    for name in ("shape", "dtype", "device"):
        a, b = getattr(given, name), getattr(expected, name)
        if a != b:
            a, b = (tuple(a), tuple(b)) if name == "shape" else (a, b)
            raise ChainError(f"{what} has {name} {a}, {other} has {name} {b}")
