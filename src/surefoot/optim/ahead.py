"""Steps that are proved to descend before anything is evaluated: along segments, on balls, per layer."""

from __future__ import annotations

import math
from typing import Any

import torch

from surefoot.blockwise import block_inverse_smoothness
from surefoot.calculus.adjoint.gradient import ProvedGradient
from surefoot.calculus.effort import ONE_OF_MANY
from surefoot.calculus.segment.along import Along, Majorant
from surefoot.certificate import Certificate
from surefoot.certificate.proving import certify_proved
from surefoot.graph import Graph
from surefoot.guarantees import GuaranteeError
from surefoot.operations.call import Norms
from surefoot.optim.base import Closure, GuaranteedOptimizer
from surefoot.optim.directions import polak_ribiere
from surefoot.optim.moving_ball import GROWTH, INSIDE, ROOM, MovingBall
from surefoot.optim.record import StepRecord
from surefoot.optim.stored import Proposal, Tensors, flat_product, norm_of, promised, resolution, stored
from surefoot.optim.vectors import Layout

AHEAD = ("segment", "ball", "blocks")

_LONGEST = 2.0**1000  # no segment is longer
_START = 1e-3  # first length, relative to the parameters over the direction, where nothing better is known


class Ahead:
    r"""Promises ahead of the step, from derivatives alone.

    * ``"segment"``: with :math:`F(u + \eta d) \le F + \eta F' + \frac S2\eta^2` on a segment
      (:mod:`surefoot.calculus.segment`) the step is the minimiser of the right-hand side. The segment is somewhat
      longer than the step before, so one certificate per step is enough.
    * ``"ball"``: with the smoothness L on a ball of radius r around the weights, the step
      :math:`\min(1/L, r/\|\nabla F\|)` against the gradient.
    * ``"blocks"``: one proved step size per layer on the same ball
      (:func:`surefoot.blockwise.block_inverse_smoothness`), shortened together if they would leave it.

    Along a segment of a model that is not in double precision, the step :math:`\eta d` is rounded to a move
    :math:`v'`, and the bound along :math:`v'` itself, from 0 to 1, is what promises; in double precision the
    rounding counts as an error of the direction (:func:`surefoot.calculus.segment.walk.leaf_models`).

    Args:
        owner: the optimizer.
        proof: see above.
        direction: along segments, ``"conjugate"`` or ``"gradient"``.
        order: Taylor coefficients along a segment, 2 to 5.
    """

    def __init__(self, owner: GuaranteedOptimizer, proof: str, direction: Any, order: int) -> None:
        allowed = ("conjugate", "gradient") if proof == "segment" else ("gradient",)
        direction = direction or allowed[0]
        if direction not in allowed:
            raise ValueError(
                f"proof={proof!r} promises along {' or '.join(map(repr, allowed))} directions, got {direction!r}; "
                "proof='evaluation' takes any"
            )
        self.owner, self.proof, self.direction, self.order = owner, proof, direction, order
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
        owner = self.owner
        loss, gradient = owner.value_and_gradient(x, y, closure)
        graph = owner.graph(x)
        size, slopes = norm_of(gradient), gradient
        if self.proof == "segment" and not self._is_double:
            slopes = owner.in_double(x, y, loss, graph).gradient
        if size == 0 or norm_of(slopes) == 0:
            proposal = Proposal({}, 0.0, 0.0, 0.0, 0.0, note="the gradient is zero")
        elif self.proof == "segment":
            proposal = self._on_segment(x, y, slopes, loss, graph)
        else:
            proved = owner.proved_gradient(x, y, loss)
            proposal = self._ball.step(
                lambda ball: certify_proved(
                    owner.model, x, objective=owner.objective.bound_to(y), domain=ball, effort=ONE_OF_MANY
                ),
                owner.trainable,
                lambda certificate, radius: self._within(certificate, radius, gradient, proved),
            )
        return owner.take(proposal, loss, size, owner.fingerprint(x, y))

    @property
    def _is_double(self) -> bool:
        return all(value.dtype == torch.float64 for value in self.owner.trainable.values())

    def _on_segment(self, x: Any, y: Any, gradient: Tensors, loss: float, graph: Graph) -> Proposal:
        along = self._along_for(x, y, graph)
        direction = self._next_direction(gradient)
        note = ""
        if not flat_product(gradient, direction) < 0:
            direction, note = {name: -g.double() for name, g in gradient.items()}, "restarted along the gradient"
        bound = self._certified(along, direction)
        self.owner.check_value(bound.value, loss)
        step = bound.step
        self._reach = min(step * (GROWTH if step >= 0.99 * bound.length else ROOM), _LONGEST)
        self._last = ({name: g.clone() for name, g in gradient.items()}, direction)
        after, move = stored(self.owner.trainable, {name: step * d for name, d in direction.items()})
        if self._is_double and step >= bound.length / 8:
            promise, radius = bound.decrease(step), bound.length * norm_of(direction)
        else:
            bound, radius = along.majorant(move, 1.0, self.order), norm_of(move)
            promise = bound.decrease(1.0) if radius and math.isfinite(bound.curvature) else 0.0
            note = note if promise > 0 else resolution(self.owner.trainable)
        return Proposal(after, step, bound.curvature, promise, radius, note=note)

    def _along_for(self, x: Any, y: Any, graph: Graph) -> Along:
        """The objective of the batch along segments; kept while the batch and the graph are the same."""
        key = self.owner.fingerprint(x, y), graph
        if self._along is None or self._along[0] != key:
            if self._along is not None and self._along[0][1] is not graph:
                self._norms = Norms()  # they are known by the names of operations
            objective, double = self.owner.objective.bound_to(y), self._is_double
            self._along = key, Along(self.owner.model, x, objective, self._norms, stored=double)
        return self._along[1]

    def _next_direction(self, gradient: Tensors) -> Tensors:
        """Minus the gradient, plus a part of the direction before that Polak and Ribière's formula gives."""
        if self.direction == "gradient" or self._last is None:
            return {name: -g.double() for name, g in gradient.items()}
        layout = Layout.of(gradient)
        return layout.unpack(polak_ribiere(layout.dot, *map(layout.pack, (gradient, *self._last))))

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
        size = norm_of({name: parameter.detach() for name, parameter in self.owner.trainable.items()})
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
        if self.proof == "blocks":
            blocks = block_inverse_smoothness(certificate)
            sizes = {name: blocks[_block(name, blocks)] for name in gradient}
            curvature = {n: math.nextafter(1 / step, math.inf) if step else math.inf for n, step in sizes.items()}
        wanted = {name: -min(sizes[name], radius / size) * g.double() for name, g in gradient.items()}
        length = norm_of(wanted)
        scale = min(1.0, longest / length) if length else 0.0  # the step underflows
        after, move = stored(self.owner.trainable, {name: scale * m for name, m in wanted.items()})
        inside = norm_of(move) <= radius
        promise = promised(proved.slopes, move, curvature, proved.errors) if inside else 0.0
        note = "" if promise > 0 else resolution(self.owner.trainable)
        return Proposal(after, scale * length / size, smoothness, promise, radius, scale * length, note)

    def state(self) -> dict[str, Any]:
        """The next reach, and what conjugate directions are made of."""
        before, direction = self._last if self._last and self.direction == "conjugate" else ({}, {})
        return {
            "reach": self._reach,
            "radius": self._ball.radius,
            "gradient": dict(before),
            "direction": dict(direction),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave; norms of layers are computed anew."""
        self.forget()
        self._reach, self._ball.radius = state["reach"], state["radius"]
        self._last = (dict(state["gradient"]), dict(state["direction"])) if state["gradient"] else None


def _block(parameter: str, blocks: dict[str, float]) -> str:
    """The block of a parameter: the module that owns it."""
    path = parameter.rpartition(".")[0]
    if path not in blocks:
        raise GuaranteeError(f"'{parameter}' belongs to no block of the certificate")
    return path
