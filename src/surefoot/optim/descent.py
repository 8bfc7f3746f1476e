"""Descent without a learning rate: every step is proved to descend before it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from surefoot.blockwise import block_inverse_smoothness
from surefoot.calculus.adjoint.gradient import ProvedGradient
from surefoot.calculus.segment.along import Along
from surefoot.calculus.segment.majorant import Majorant
from surefoot.certificate import Certificate
from surefoot.graph import Graph
from surefoot.guarantees import GuaranteeError
from surefoot.objectives import Objective
from surefoot.operations.moving import Norms
from surefoot.optim.base import Closure, GuaranteedOptimizer
from surefoot.optim.moving_ball import GROWTH, INSIDE, ROOM, MovingBall
from surefoot.optim.record import StepRecord
from surefoot.optim.stored import Proposal, Tensors, flat_product, norm_of, promised, resolution, stored

Mode = Literal["segment", "ball", "blocks"]

_LONGEST = 2.0**1000  # no segment is longer
_START = 1e-3  # first length, relative to the parameters over the direction, where nothing better is known


class CertifiedDescent(GuaranteedOptimizer):
    r"""Descent with steps that are proved to descend; there is no learning rate to choose.

    * ``mode="segment"``: with :math:`F(u + \eta d) \le F + \eta F' + \frac S2\eta^2` on a segment
      (:mod:`surefoot.calculus.segment`) the step is the minimiser of the right-hand side. The segment is somewhat
      longer than the step before, so one certificate per step is enough.
    * ``mode="ball"``: with the smoothness L on a ball of radius r around the weights, the step
      :math:`\min(1/L, r/\|\nabla F\|)` against the gradient.
    * ``mode="blocks"``: one proved step size per layer on the same ball
      (:func:`surefoot.blockwise.block_inverse_smoothness`), shortened together if they would leave it.

    Every record in the history holds the proof: the smoothness and the step size, the decrease that was promised
    and the one that came out. :meth:`stationarity` is the anytime bound on the smallest gradient norm.

    The promise is about the objective of the batch it was given, in exact arithmetic, between the weights as they
    were and the new ones as they are stored, rounded to their type (:mod:`surefoot.optim.stored`). Along a segment
    of a model that is not in double precision, the step :math:`\eta d` is rounded to a move :math:`v'`, and the
    bound along :math:`v'` itself, from 0 to 1, is what promises; in double precision the rounding counts as an
    error of the direction (:func:`surefoot.calculus.segment.walk.leaf_models`). A step whose promise is not
    positive is not taken, and the record says why. With mini-batches every step descends on its own batch; for the objective of all data nothing
    is proved.

    What is kept from step to step is checked against the live model and made anew if the model was changed.

    Args:
        model: the network.
        objective: a loss without targets.
        mode: see above.
        direction: along segments, ``"conjugate"`` (the default: Polak and Ribière's direction, and the gradient
            where it does not descend; it needs fewer steps) or ``"gradient"``.
        order: Taylor coefficients along a segment, 2 to 5: more cost more and allow longer steps.
        lower: a number that the objective never falls below; see :class:`GuaranteedOptimizer`.
        progress: called with the record of each step.

    >>> import torch, surefoot as sf
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    >>> x = torch.randn(16, 2).double()
    >>> optimizer = CertifiedDescent(model, sf.CrossEntropy())
    >>> losses = [optimizer.step(x, (x[:, 0] > 0).long()) for _ in range(50)]
    >>> all(after < before for before, after in zip(losses, losses[1:])), losses[-1] < 0.1
    (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        mode: Mode = "segment",
        direction: Literal["conjugate", "gradient"] | None = None,
        order: int = 3,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        if mode not in ("segment", "ball", "blocks"):
            raise ValueError(f"mode is 'segment', 'ball' or 'blocks', got {mode!r}")
        direction = direction or ("conjugate" if mode == "segment" else "gradient")
        if direction not in ("gradient", "conjugate"):
            raise ValueError(f"direction is 'gradient' or 'conjugate', got {direction!r}")
        if direction == "conjugate" and mode != "segment":
            raise ValueError("conjugate directions need mode='segment': a ball promises descent of the gradient")
        if order not in range(2, 6):
            raise ValueError(f"a segment carries 2 to 5 Taylor coefficients, got {order!r}")
        super().__init__(model, objective, lower=lower, progress=progress)
        self.mode, self.direction, self.order = mode, direction, order
        self._reach: float | None = None  # length of the next segment
        self._ball = MovingBall(_START)
        self.forget()

    def forget(self) -> None:
        """Drop norms of layers, the graph along segments, and the direction before."""
        self._norms = Norms()
        self._last: tuple[Tensors, Tensors] | None = None  # gradient and direction of the step before
        self._along: tuple[tuple[str, Graph], Along] | None = None

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One step that is proved to descend."""
        loss, gradient = self.value_and_gradient(x, y, closure)
        graph = self.graph(x)
        size = norm_of(gradient)
        if size == 0:
            proposal = Proposal({}, 0.0, 0.0, 0.0, 0.0, note="the gradient is zero")
        elif self.mode == "segment":
            slopes = gradient if self._is_double else self.in_double(x, y, loss, graph).gradient
            proposal = self._on_segment(x, y, slopes, loss, graph)
        else:
            proved = self.proved_gradient(x, y, loss)
            proposal = self._ball.step(
                self.model,
                x,
                self.objective.bound_to(y),
                self.trainable,
                lambda certificate, radius: self._within(certificate, radius, gradient, proved),
            )
        return self.take(proposal, loss, size, self.fingerprint(x, y))

    @property
    def _is_double(self) -> bool:
        return all(value.dtype == torch.float64 for value in self.trainable.values())

    def _on_segment(self, x: Any, y: Any, gradient: Tensors, loss: float, graph: Graph) -> Proposal:
        along = self._along_for(x, y, graph)
        direction = self._next_direction(gradient)
        note = ""
        if not flat_product(gradient, direction) < 0:
            direction, note = {name: -g.double() for name, g in gradient.items()}, "restarted along the gradient"
        bound = self._certified(along, direction)
        self.check_value(bound.value, loss)
        step = bound.step
        self._reach = min(step * (GROWTH if step >= 0.99 * bound.length else ROOM), _LONGEST)
        self._last = ({name: g.clone() for name, g in gradient.items()}, direction)
        after, move = stored(self.trainable, {name: step * d for name, d in direction.items()})
        if self._is_double and step >= bound.length / 8:
            promise, radius = bound.decrease(step), bound.length * norm_of(direction)
        else:
            bound, radius = along.majorant(move, 1.0, self.order), norm_of(move)
            promise = bound.decrease(1.0) if radius and math.isfinite(bound.curvature) else 0.0
            note = note if promise > 0 else resolution(self.trainable)
        return Proposal(after, step, bound.curvature, promise, radius, note=note)

    def _along_for(self, x: Any, y: Any, graph: Graph) -> Along:
        """The objective of the batch along segments; kept while the batch and the graph are the same."""
        key = self.fingerprint(x, y), graph
        if self._along is None or self._along[0] != key:
            if self._along is not None and self._along[0][1] is not graph:
                self._norms = Norms()  # they are known by the names of operations
            self._along = (
                key,
                Along(self.model, x, self.objective.bound_to(y), self._norms, stored=self._is_double),
            )
        return self._along[1]

    def _next_direction(self, gradient: Tensors) -> Tensors:
        """Minus the gradient, plus a part of the direction before that Polak and Ribière's formula gives."""
        descent = {name: -g.double() for name, g in gradient.items()}
        if self.direction == "gradient" or self._last is None:
            return descent
        before, direction = self._last
        turned = {name: g.double() - before[name].double() for name, g in gradient.items()}
        weight = max(0.0, flat_product(gradient, turned) / flat_product(before, before))
        return {name: d + weight * direction[name] for name, d in descent.items()}

    def _certified(self, along: Along, direction: Tensors) -> Majorant:
        """A bound along the direction that is not much longer than the step it allows."""
        length = self._first_length(along, direction) if self._reach is None else self._reach
        bound = along.longest(direction, along.majorant(direction, length, self.order), self.order)
        if bound.step > 0:
            return bound
        raise GuaranteeError(
            "no step along this direction can be proved to descend: a kink is too near, or the curvature is not "
            "bounded. Use smooth activations (surefoot.smooth(model)), or compute in double precision"
        )

    def _first_length(self, along: Along, direction: Tensors) -> float:
        """Where the second-order Taylor polynomial is lowest; a fraction of the parameters where it has no
        lowest.
        """
        size = norm_of({name: parameter.detach() for name, parameter in self.trainable.items()})
        length = min(_START * (size or 1.0) / norm_of(direction), _LONGEST)
        bound = along.majorant(direction, length, max(self.order, 3))
        curvature = bound.curvature_at_start
        return min(-bound.slope / curvature, _LONGEST) if curvature > 0 and bound.slope < 0 else length

    def _within(
        self, certificate: Certificate, radius: float, gradient: Tensors, proved: ProvedGradient
    ) -> Proposal:
        """The step on a ball: 1/L against the gradient, or one step size per block."""
        smoothness, size, longest = float(certificate.smoothness), norm_of(gradient), radius * INSIDE
        sizes = dict.fromkeys(gradient, certificate.inverse_smoothness)
        curvature = dict.fromkeys(gradient, smoothness)
        if self.mode == "blocks":
            blocks = block_inverse_smoothness(certificate)
            sizes = {name: blocks[_block(name, blocks)] for name in gradient}
            curvature = {n: math.nextafter(1 / step, math.inf) if step else math.inf for n, step in sizes.items()}
        wanted = {name: -min(sizes[name], radius / size) * g.double() for name, g in gradient.items()}
        length = norm_of(wanted)
        scale = min(1.0, longest / length) if length else 0.0  # the step underflows
        after, move = stored(self.trainable, {name: scale * m for name, m in wanted.items()})
        inside = norm_of(move) <= radius
        promise = promised(proved.slopes, move, curvature, proved.errors) if inside else 0.0
        note = "" if promise > 0 else resolution(self.trainable)
        return Proposal(after, scale * length / size, smoothness, promise, radius, scale * length, note)

    def extra_state(self) -> dict[str, Any]:
        """The next reach, and what conjugate directions are made of."""
        before, direction = self._last if self._last and self.direction == "conjugate" else ({}, {})
        return {
            "reach": self._reach,
            "radius": self._ball.radius,
            "gradient": dict(before),
            "direction": dict(direction),
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave; norms of layers are computed anew."""
        self.forget()
        self._reach, self._ball.radius = state["reach"], state["radius"]
        self._last = (dict(state["gradient"]), dict(state["direction"])) if state["gradient"] else None

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        if not self.history:
            return "nothing yet: the first step brings its own proof"
        several = len({record.data for record in self.history}) > 1
        rest = " For the objective of all data nothing is proved." if several else ""
        return self.promises_kept() + rest


def _block(parameter: str, blocks: dict[str, float]) -> str:
    """The block of a parameter: the module that owns it."""
    path = parameter.rpartition(".")[0]
    if path not in blocks:
        raise GuaranteeError(f"'{parameter}' belongs to no block of the certificate")
    return path


__all__ = ["CertifiedDescent"]
