"""Descent without a learning rate: every step is proved to descend before it is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from surefoot.blockwise import block_inverse_smoothness
from surefoot.calculus.segment.certify import Along
from surefoot.calculus.segment.majorant import Majorant
from surefoot.domains import Ball
from surefoot.guarantees import GuaranteeError
from surefoot.objectives import Objective
from surefoot.operations.moving import Norms
from surefoot.optim.base import Closure, GuaranteedOptimizer, norm_of
from surefoot.optim.constrained import flat_product
from surefoot.optim.moving_ball import MovingBall
from surefoot.optim.record import StepRecord

Mode = Literal["segment", "ball", "blocks"]
Tensors = dict[str, Tensor]

_START = 1e-3  # first length, relative to the parameters over the direction, where nothing better is known
_GROWTH = 2.0  # how much longer the next segment may be than a step that went to its end
_ROOM = 1.25  # and than a step that did not


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

    The promise is about the objective of the batch it was given, in exact arithmetic at the weights as they are;
    the new weights are rounded to their type. With mini-batches every step descends on its own batch; for the
    objective of all data nothing is proved.

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
        self._norms = Norms()
        self._reach: float | None = None  # length of the next segment
        self._ball = MovingBall(_START)
        self._last: tuple[Tensors, Tensors] | None = None  # gradient and direction of the step before
        self._along: tuple[Any, Along] | None = None

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One step that is proved to descend."""
        loss, gradient = self.value_and_gradient(x, y, closure)
        size = norm_of(gradient)
        if size == 0:
            return self._record(x, y, loss, size, _Proposal({}, 0.0, 0.0, 0.0, 0.0, "the gradient is zero"))
        proposal = (
            self._on_segment(x, y, gradient) if self.mode == "segment" else self._on_ball(x, y, gradient, size)
        )
        if proposal.promised > 0:
            before = {name: parameter.detach().double() for name, parameter in self.trainable.items()}
            self.write({name: before[name] + move for name, move in proposal.move.items()})
        return self._record(x, y, loss, size, proposal)

    def _record(self, x: Any, y: Any, loss: float, size: float, proposal: _Proposal) -> StepRecord:
        note = proposal.note
        if size and not proposal.promised > 0:
            note = "no step: descent cannot be told from round-off here"
        return StepRecord(
            step=len(self.history),
            loss=loss,
            gradient_norm=size,
            step_size=proposal.step if proposal.promised > 0 else 0.0,
            smoothness=proposal.smoothness,
            promised_decrease=max(proposal.promised, 0.0),
            data=self.fingerprint(x, y),
            note=note,
            radius=proposal.radius,
        )

    def _on_segment(self, x: Any, y: Any, gradient: Tensors) -> _Proposal:
        along = self._along_for(x, y)
        direction = self._next_direction(gradient)
        slope = flat_product(gradient, direction)
        note = ""
        if not slope < 0:
            direction, note = {name: -g.double() for name, g in gradient.items()}, "restarted along the gradient"
        bound = self._certified(along, direction)
        step = bound.step
        self._reach = step * (_GROWTH if step >= 0.99 * bound.length else _ROOM)
        self._last = ({name: g.clone() for name, g in gradient.items()}, direction)
        move = {name: step * d for name, d in direction.items()}
        radius = bound.length * norm_of(direction)
        return _Proposal(move, step, bound.curvature, bound.decrease(step), radius, note)

    def _along_for(self, x: Any, y: Any) -> Along:
        """The objective of the batch along segments; kept while batch, modes and parameters are the same."""
        modes = tuple(module.training for module in self.model.modules())
        parameters = tuple((id(value), value.requires_grad) for value in self.model.parameters())
        key = self.fingerprint(x, y), modes, parameters
        if self._along is None or self._along[0] != key:
            self._along = key, Along(self.model, x, self.objective.bound_to(y), self._norms)
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
        length = _START * (size or 1.0) / norm_of(direction)
        bound = along.majorant(direction, length, max(self.order, 3))
        curvature = bound.curvature_at_start
        return -bound.slope / curvature if curvature > 0 and bound.slope < 0 else length

    def _on_ball(self, x: Any, y: Any, gradient: Tensors, size: float) -> _Proposal:
        """A step on a ball whose radius follows the length of the steps."""
        from surefoot.calculus.certify import certify

        objective = self.objective.bound_to(y)
        return self._ball.step(
            {name: parameter.detach() for name, parameter in self.trainable.items()},
            lambda radius: certify(self.model, x, objective=objective, domain=Ball(radius)),
            lambda certificate, radius: self._within(certificate, radius, gradient, size),
        )

    def _within(self, certificate: Any, radius: float, gradient: Tensors, size: float) -> _Proposal:
        smoothness = float(certificate.smoothness)
        if self.mode == "ball":
            step = min(certificate.inverse_smoothness, radius / size)
            promised = step * size**2 * (1 - 0.5 * smoothness * step)
            move = {name: -step * g.double() for name, g in gradient.items()}
            return _Proposal(move, step, smoothness, promised, radius)
        sizes = block_inverse_smoothness(certificate)
        move = {name: -sizes[_block(name, sizes)] * g.double() for name, g in gradient.items()}
        scale = min(1.0, radius / norm_of(move))
        gain = -flat_product(gradient, move)  # Σ γ_s ‖g_s‖², and ½ Σ D_s ‖v_s‖² is half of it
        moved = {name: scale * m for name, m in move.items()}
        promised = (scale - 0.5 * scale**2) * gain
        return _Proposal(moved, scale * norm_of(move) / size, smoothness, promised, radius)

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
        self._reach, self._ball.radius = state["reach"], state["radius"]
        self._last = (dict(state["gradient"]), dict(state["direction"])) if state["gradient"] else None
        self._norms, self._along = Norms(), None

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        batches = len({record.data for record in self.history})
        if batches == 0:
            return "nothing yet: the first step brings its own proof"
        what = "the objective of these data" if batches == 1 else "the objective of its own mini-batch"
        rest = "" if batches == 1 else " For the objective of all data nothing is proved."
        return f"Every one of the {len(self.history)} steps decreases {what} by what it promised.{rest}"


@dataclass(frozen=True)
class _Proposal:
    """A step and its proof: the move, its size, the smoothness and radius it rests on, the promised decrease."""

    move: Tensors
    step: float
    smoothness: float
    promised: float
    radius: float
    note: str = ""


def _block(parameter: str, blocks: dict[str, float]) -> str:
    """The block of a parameter: the module that owns it."""
    path = parameter.rpartition(".")[0]
    if path not in blocks:
        raise GuaranteeError(f"'{parameter}' belongs to no block of the certificate")
    return path


__all__ = ["CertifiedDescent"]
