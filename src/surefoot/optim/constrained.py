"""What optimizers on a set share: the set, its centre, and certificates of the objective on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.certify import certify
from surefoot.certificate import Certificate
from surefoot.domains import Ball, Domain, ProductBall
from surefoot.graph import Graph
from surefoot.guarantees import GuaranteeError, require_smooth
from surefoot.objectives import Objective
from surefoot.operations.captured import capture
from surefoot.optim.base import GuaranteedOptimizer
from surefoot.optim.projection import Balls
from surefoot.optim.record import StepRecord
from surefoot.torch_private import writes_of


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
        return self.region_of(capture(self.model, x))

    def region_of(self, graph: Graph) -> Balls:
        """The same, for a model that is captured already."""
        return Balls.of(self.domain, graph, self.centre)

    def certify(self, x: Any, y: Any = None) -> Certificate:
        """The certificate of the objective of this batch on the set.

        Raises:
            GuaranteeError: if it gives no step size.
        """
        certificate = certify(self.model, x, objective=self.objective.bound_to(y), domain=self.domain)
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
        moved = (
            sum(float((inside[name].double() - values[name].double()).square().sum()) for name in values) ** 0.5
        )
        self.write(inside)
        return f"the parameters were projected into the set, by a distance of {moved:.3g}"

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

    def fixed(self, graph: Graph) -> tuple[Any, ...]:
        """Changes whenever what certificates rest on does: the graph, what varies in it, the values held fixed."""
        fixed = [value for value in self.model.parameters() if not value.requires_grad]
        held = (*fixed, *self.model.buffers())
        return graph, tuple(self.trainable), tuple((id(value), writes_of(value)) for value in held)

    def _place(self, centre: dict[str, Tensor]) -> None:
        self.domain = replace(self.domain, center=centre)


def flat_product(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The inner product of two lists of tensors, in double precision."""
    return sum(float(torch.sum(first[name].double() * second[name].double())) for name in first)


__all__ = ["ConstrainedOptimizer", "flat_product"]
