"""What optimizers on a set share: the set, its centre, and certificates of the objective on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from surefoot.certificate import Certificate
from surefoot.certificate.proving import certify_proved
from surefoot.domains import Ball, Domain, ProductBall
from surefoot.guarantees import GuaranteeError, require_smooth
from surefoot.objectives import Objective
from surefoot.optim.base import GuaranteedOptimizer
from surefoot.optim.projection import Balls
from surefoot.optim.record import StepRecord
from surefoot.optim.stored import Tensors, norm_of


class ConstrainedOptimizer(GuaranteedOptimizer):
    """An optimizer whose parameters stay in a product of balls or in a ball.

    Args:
        model: the network.
        objective: a loss without targets.
        domain: the set; by default every block within 1 of the origin. ``center="present"`` means the parameters
            at the time the optimizer is made.
        lower: a number that the objective never falls below; see :class:`GuaranteedOptimizer`.
        progress: called with the record of each step.

    Attributes:
        domain: the set, with its centre written out.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        domain: Domain | None = None,
        *,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        domain = ProductBall(1.0) if domain is None else domain
        if not isinstance(domain, ProductBall | Ball):
            raise TypeError(f"the set is a ProductBall or a Ball, got {type(domain).__name__}")
        super().__init__(model, objective, lower=lower, progress=progress)
        self.domain: ProductBall | Ball = domain
        if domain.center != "origin":
            given = dict(model.named_parameters()) if domain.center == "present" else domain.center
            self._place({name: value.detach().double().clone() for name, value in given.items()})

    @property
    def centre(self) -> dict[str, Tensor]:
        """The centre by parameter name; empty for the origin."""
        return dict(self.domain.center) if isinstance(self.domain.center, Mapping) else {}

    def region(self, x: Any) -> Balls:
        """The set, as balls of parameters."""
        return Balls.of(self.domain, self.graph(x), self.centre)

    def certify(self, x: Any, y: Any = None) -> Certificate:
        """The certificate of the objective of this batch on the set.

        Raises:
            GuaranteeError: if it gives no step size.
        """
        certificate = certify_proved(self.model, x, objective=self.objective.bound_to(y), domain=self.domain)
        require_smooth(certificate)
        if certificate.inverse_smoothness == 0:
            raise GuaranteeError(
                f"the smoothness is {certificate.smoothness}: 1/L is beyond the range of doubles. Take smaller "
                "radii, fewer layers, or a set around the present parameters: surefoot.Ball(0.1)"
            )
        return certificate

    def enter(self, region: Balls) -> str:
        """Project the parameters into the set if they are outside; says so."""
        values = {name: parameter.detach() for name, parameter in self.trainable.items()}
        if region.contains(values):
            return ""
        inside = region.rounded(region.project(values), values)
        moved = norm_of({name: inside[name].double() - values[name].double() for name in values})
        self.write(inside)
        return f"the parameters were projected into the set, by a distance of {moved:.3g}"

    def project(self, gradient: Tensors, step: float, region: Balls) -> tuple[Tensors, Tensors, float]:
        """The projected gradient step as it is stored, the move to it, and the norm of the gradient mapping."""
        before = {name: parameter.detach().double() for name, parameter in self.trainable.items()}
        exact = region.project({name: before[name] - step * gradient[name].double() for name in before})
        mapping = norm_of({name: (before[name] - exact[name]) / step for name in before})
        after = region.rounded(exact, self.trainable)
        return after, {name: after[name].double() - before[name] for name in before}, mapping

    def extra_state(self) -> dict[str, Any]:
        """The set: its radii and its centre."""
        radius = self.domain.radius
        return {
            "set": type(self.domain).__name__,
            "radius": dict(radius) if isinstance(radius, Mapping) else float(radius),
            "centre": self.centre,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """The centre of the saved run; its radii have to be those of this one.

        Raises:
            ValueError: if they are not.
        """
        own = self.extra_state()
        if (state["set"], state["radius"]) != (own["set"], own["radius"]):
            raise ValueError(
                f"the state is that of a run on {state['set']}({state['radius']}), this is one on "
                f"{own['set']}({own['radius']})"
            )
        if bool(state["centre"]) != bool(own["centre"]):
            raise ValueError("the state is that of a run on a set with another centre: one of them is the origin")
        if state["centre"]:
            self._place({name: value.double() for name, value in state["centre"].items()})

    def _place(self, centre: dict[str, Tensor]) -> None:
        self.domain = replace(self.domain, center=centre)


__all__ = ["ConstrainedOptimizer"]
