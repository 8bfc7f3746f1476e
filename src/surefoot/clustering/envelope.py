r"""The common part of the three clustering objectives: each is the distance of the outputs from simple points.

With the outputs stacked into an n × d matrix :math:`\hat y` and :math:`s = 1/n` (a mean over the samples, as all
losses here) or :math:`s = 1` (the sum, as in the paper),

.. math:: h(\hat y) = s\,\min_z\ \tfrac12\|\hat y - z\|^2 + \Omega(z) .

* k-means: z has at most k different rows, :math:`\Omega = 0` there;
* spectral clustering: z has rank at most k (Eckart and Young, Psychometrika 1, 1936);
* convex clustering: :math:`\Omega(z) = \lambda\sum w_{ij}\|z_i - z_j\|`.

Three facts follow for all of them, with z a minimiser at :math:`\hat y`:

* *gradient* (Danskin): :math:`s(\hat y - z)` wherever h is differentiable, a Clarke subgradient where the
  minimiser is not unique;
* *descent lemma*: with z held, the right-hand side is above h everywhere and equal to it at :math:`\hat y`, so
  :math:`h(\hat y + v) \le h(\hat y) + \langle s(\hat y - z), v\rangle + \frac s2\|v\|^2`, kinks or not: they all
  point upwards. So :math:`h(\psi(u))` is below the square loss with targets z, which is smooth
  (:meth:`Envelope.majoriser`);
* *second derivative*: :math:`s(I - Dz)`, where z has a derivative.

**Bounds.** Without a penalty h is :math:`\frac s2` times the squared distance from a set that contains zero. A
distance is 1-Lipschitz and at most the norm, so over the domain

.. math:: \|\nabla h\| = s\,\mathrm{dist}(\hat y) \le s\min(\sup\|\hat y\|,\ \|\hat y^* - z\| + \text{spread})

for *any* z of the set: that the solver may have missed the nearest one makes the bound looser, not wrong. At kinks
this is the Lipschitz constant of h, by continuity.

**The solver is not trusted.** Each objective proves how far its value and its point are from those of the exact
solution (:class:`Accuracy`). The computed gradient :math:`s(\hat y - z)` is off by s times the distance of the
points, plus round-off. Where the distance has no bound (k-means with 1 < k < n, whose assignment may be one of
many; spectral clustering at a tie) both gradients have a norm of at most :math:`s\|\hat y - z\|`, and differ by at
most twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from surefoot.enclosure import norm
from surefoot.graph.nodes import Spec
from surefoot.magnitude import Magnitude, minimum
from surefoot.objectives.base import Objective, shape_of
from surefoot.objectives.constants import ObjectiveError
from surefoot.objectives.entrywise import Square
from surefoot.operations.call import Bounds, Call, Slot
from surefoot.operations.common import ONE, ZERO
from surefoot.operations.record import LossFacts, Rule, operation
from surefoot.operations.softmax import summed
from surefoot.scalar import Rounded

Result = TypeVar("Result")
UNIT = 2.0**-52


class Accuracy(NamedTuple):
    r"""Bounds on the errors of a solution, without the factor s."""

    # of :math:`\frac12\|\hat y - z\|^2 + \Omega(z)`, with z as stored and :math:`\Omega` as computed, compared
    # with its minimum; for k-means with the minimum over the centres of the assignment that was found
    value: float
    point: float | None  # of z, as its distance from the exact solution; ``None`` if there is no bound


@dataclass(frozen=True)
class Nearest(Generic[Result]):
    r"""A solution of the inner problem."""

    point: Tensor  # :math:`z`, of the shape of the outputs
    penalty: float  # :math:`\Omega(z)`
    derivative: Callable[[Tensor], Tensor]  # applies the symmetric :math:`Dz(\hat y)`, also to stacked directions
    accuracy: Callable[[], Accuracy]  # proves bounds on its errors
    result: Result  # the clusters, as the objective reports them


class Proximity(Generic[Result]):
    """Solves the inner problem; remembers the last solution, so that value and derivatives share one."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Nearest[Result]] | None = None

    def solved(self, outputs: Tensor) -> Nearest[Result]:
        """The solution at these outputs, in double precision; refuses those that are not finite."""
        point = outputs.detach().to(torch.float64)
        if self._last is not None and self._last[0].device == point.device and torch.equal(self._last[0], point):
            return self._last[1]
        if not bool(torch.isfinite(point.square().sum())):
            raise ObjectiveError(
                "the outputs have entries that are not finite, or too large to square, and cannot be clustered: "
                "look for a step that was too long, or an input that is not finite"
            )
        nearest = self.nearest(point)
        self._last = point.clone(), nearest
        return nearest

    def nearest(self, outputs: Tensor) -> Nearest[Result]:
        """Solve the inner problem in double precision."""
        raise NotImplementedError

    def forget(self) -> None:
        """Start afresh at the next call."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


class Envelope(Objective, Generic[Result]):
    """A clustering objective: a function of all outputs together, without targets.

    Args:
        proximity: the inner problem.
        reduction: ``"mean"`` over the samples, or ``"sum"``.

    Raises:
        ObjectiveError: if the reduction is neither.

    >>> isinstance(sf.clustering.KMeans(2), sf.clustering.Envelope)
    True
    """

    takes_targets = False
    k: int | None = None  # the number of clusters, where it is an option

    def __init__(self, proximity: Proximity[Result], reduction: str) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ObjectiveError(f"the reduction is 'mean' or 'sum', got {reduction!r}")
        self.proximity, self.reduction = proximity, reduction

    @property
    def options(self) -> dict[str, Hashable]:
        """The inner problem and the reduction."""
        return {"proximity": self.proximity, "reduction": self.reduction}

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Outputs are n × d real numbers, at least one sample per cluster."""
        if len(outputs.shape) != 2 or not outputs.numel or not outputs.dtype.is_floating_point:
            raise ObjectiveError(
                f"{type(self).__name__} reads real outputs (samples × dimensions), got {shape_of(outputs)} of "
                f"{outputs.dtype}; flatten each sample"
            )
        if self.k is not None and self.k > outputs.shape[0]:
            raise ObjectiveError(
                f"{self.k} clusters need at least {self.k} samples, got {outputs.shape[0]}: lower k, or take more "
                "samples"
            )

    def bound_to(self, targets: Any) -> Self:
        """Itself, as there are no targets; refuses targets."""
        if targets is not None:
            raise ObjectiveError(f"{type(self).__name__} compares outputs with each other: it has no targets")
        return self

    def solve(self, outputs: Tensor) -> Result:
        """The clusters of these outputs."""
        self.check(Spec(tuple(outputs.shape), outputs.dtype), None)
        return self.proximity.solved(outputs).result

    def majoriser(self, outputs: Tensor) -> Square:
        r"""The square loss with the nearest point as targets, :math:`\frac s2\|\hat y - z\|^2`.

        Up to the constant :math:`s\,\Omega(z)` it is above h everywhere and equal to h at these outputs. It is
        smooth, and a step that is proved to decrease it by some amount decreases h by at least as much, even if
        the clusters change.
        """
        self.check(Spec(tuple(outputs.shape), outputs.dtype), None)
        return Square(self.proximity.solved(outputs).point.to(outputs.dtype), reduction=self.reduction)

    def forget(self) -> None:
        """Drop everything kept from earlier calls."""
        self.proximity.forget()

    def extra_repr(self) -> str:
        """The number of clusters, and the reduction if it is not the mean."""
        clusters = [] if self.k is None else [f"k={self.k}"]
        return ", ".join(clusters + ([] if self.reduction == "mean" else [f"reduction={self.reduction!r}"]))


def envelope(outputs: Tensor, proximity: Proximity[Any], reduction: str) -> Tensor:
    """The value, twice differentiable by automatic differentiation."""
    scale = 1.0 / outputs.shape[0] if reduction == "mean" else 1.0
    value: Tensor = _Value.apply(outputs, _Held(proximity), scale)
    return value


def _valued(outputs: Tensor, nearest: Nearest[Any], scale: float) -> Tensor:
    """The value of a solution, in double precision."""
    return scale * (0.5 * (outputs.detach().to(torch.float64) - nearest.point).square().sum() + nearest.penalty)


class _Held:
    """The solution for the derivatives; it is computed in the forward pass, where tensors are plain."""

    def __init__(self, proximity: Proximity[Any]) -> None:
        self.proximity = proximity
        self.nearest: Nearest[Any] | None = None

    def __call__(self, outputs: Tensor) -> Nearest[Any]:
        if self.nearest is None:
            self.nearest = self.proximity.solved(outputs)
        return self.nearest


class Over:
    """A clustering objective over the enclosure of its outputs.

    ``scale`` is s; ``nearest`` is the solution at the centre, if the centre has values.
    """

    def __init__(self, call: Call) -> None:
        self.outputs, value = call["outputs"], call["outputs"].value
        self.scale = ONE / self.outputs.shape[0] if call["reduction"] == "mean" else ONE
        at_hand = isinstance(value, Tensor) and value.device.type != "meta"
        self.nearest: Nearest[Any] | None = call["proximity"].solved(value) if at_hand else None

    @property
    def distance(self) -> Magnitude:
        """A bound on the distance of the centre from the set, with the round-off of means and singular vectors."""
        assert self.nearest is not None
        shape = self.outputs.shape
        off = self.outputs.centre_norm * (16.0 * (sum(shape) + 16) * min(shape) ** 0.5 * UNIT)
        return norm(self.outputs.value - self.nearest.point) + off

    def half_square(self, curvature: Magnitude, reason: str) -> Bounds:
        """Half the squared distance from the set, scaled."""
        distance = self.outputs.bound
        if self.nearest is not None:
            distance = minimum(distance, self.distance + self.outputs.spread)
        return Bounds(
            jacobian={"outputs": distance * self.scale},
            curvature={("outputs", "outputs"): curvature * self.scale},
            bound=distance**2 * self.scale / 2,
            reduction=self.outputs.numel,
            reason=reason,
        )


def value_error(call: Call, value: Any) -> Magnitude | None:
    """A bound on the distance between the value and that of the exact solution: a sum of squares, times s.

    A solver that starts where it ended last may have reached another solution since.
    """
    over = Over(call)
    assert over.nearest is not None
    again = float(_valued(over.outputs.value, over.nearest, float(over.scale)))
    size, apart = over.outputs.numel, abs(float(value) - again)
    rounded = Magnitude.of(again + apart) * ((size + 16) * 2 * UNIT) + Magnitude.of(size * 2.0**-1022)
    return over.scale * over.nearest.accuracy().value + rounded + Magnitude.of(apart)


def pullback(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """s(ŷ - z) with the error of z; see the module."""
    over = Over(call)
    if over.nearest is None:
        return {}
    difference = Rounded.exact(over.outputs.value.double()) - Rounded.exact(over.nearest.point)
    off = over.nearest.accuracy().point
    if off is None:
        off = 2 * float(over.distance) * (1 + 2.0**-40)
    wide = Rounded(difference.value, (difference.error + off) * (1 + 2.0**-50))
    scale = 1.0 / over.outputs.shape[0] if call["reduction"] == "mean" else 1.0
    return {"outputs": wide.scaled(scale) * costate}


def push(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded | None:
    """The product of the gradient and the tangent."""
    gradient = pullback(call, torch.ones((), dtype=torch.float64, device=tangents["outputs"].device))
    if not gradient:
        return None
    total = summed(gradient["outputs"] * tangents["outputs"], (0, 1))
    return Rounded(total.value.reshape(()), total.error.reshape(()))


def clustering(name: str, *, convex: bool = False) -> Callable[[Rule], Rule]:
    """Register the bounds of a clustering objective; it is smooth if it is convex."""
    loss = LossFacts(envelope, convex=convex, smooth=convex, nonnegative=True)
    return operation(name, loss=loss, error=value_error, pullback=pullback, push=push)


def zero(call: Call) -> Bounds:
    """The bounds of an objective that is zero everywhere."""
    jacobian, curvature = {"outputs": ZERO}, {("outputs", "outputs"): ZERO}
    return Bounds(jacobian=jacobian, curvature=curvature, bound=ZERO, reduction=call["outputs"].numel)


class _Differentiated(torch.autograd.Function):
    """The common part of the derivatives below: they depend on the outputs, the solution and the scale."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        outputs, *_, ctx.held, ctx.scale = inputs
        ctx.save_for_backward(outputs)
        ctx.save_for_forward(outputs)


class _Value(_Differentiated):
    @staticmethod
    def forward(outputs: Tensor, held: _Held, scale: float) -> Tensor:
        return _valued(outputs, held(outputs), scale).to(outputs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * _Slope.apply(*ctx.saved_tensors, ctx.held, ctx.scale), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return (_Slope.apply(*ctx.saved_tensors, ctx.held, ctx.scale) * tangents[0]).sum()


class _Slope(_Differentiated):
    @staticmethod
    def forward(outputs: Tensor, held: _Held, scale: float) -> Tensor:
        return (scale * (outputs.detach().to(torch.float64) - held(outputs).point)).to(outputs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Curve.apply(*ctx.saved_tensors, grads[0], ctx.held, ctx.scale), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Curve.apply(*ctx.saved_tensors, tangents[0], ctx.held, ctx.scale)


class _Curve(_Differentiated):
    """The second derivative applied to a direction: linear and symmetric in it, and not differentiated further."""

    @staticmethod
    def forward(outputs: Tensor, direction: Tensor, held: _Held, scale: float) -> Tensor:
        wide = direction.detach().to(torch.float64)
        return (scale * (wide - held(outputs).derivative(wide))).to(direction.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[0]:
            raise NotImplementedError("clustering objectives have no third derivatives here")
        return None, _Curve.apply(*ctx.saved_tensors, grads[0], ctx.held, ctx.scale), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if tangents[0] is not None:
            raise NotImplementedError("clustering objectives have no third derivatives here")
        return _Curve.apply(*ctx.saved_tensors, tangents[1], ctx.held, ctx.scale)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        outputs, direction, held, scale = inputs
        if in_dims[0] is not None or in_dims[1] is None:
            raise NotImplementedError(
                "clustering objectives are functions of one batch of outputs: loop over batches"
            )
        return _Curve.apply(outputs, direction.movedim(in_dims[1], 0), held, scale), 0
