r"""What optimizers on a set share: the set, its centre, certificates of the objective on it, proximal steps.

The objective is :math:`F + r + \lambda\|\cdot\|_1` on a convex set, F the loss and r the smooth part of a
regulariser. A step is :math:`p = \arg\min_p\frac1{2\gamma}\|p - (u - \gamma g)\|^2 + \lambda\|p\|_1` over the
set, the projected gradient step if there are no absolute values. As p minimises a :math:`\frac1\gamma`-strongly
convex function, for every z of the set

.. math:: \langle g, p - z\rangle + \lambda\|p\|_1 - \lambda\|z\|_1
    \le \tfrac1{2\gamma}\big(\|z - u\|^2 - \|p - u\|^2 - \|z - p\|^2\big),

which is all that the theorems about projected steps use: they hold for :math:`F + r + \lambda\|\cdot\|_1` with L
the smoothness of :math:`F + r`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import ProvedGradient
from surefoot.certificate import Certificate
from surefoot.certificate.proving import certify_proved
from surefoot.domains import Ball, Box, Domain, ProductBall
from surefoot.guarantees import GuaranteeError, require_smooth
from surefoot.objectives import Objective, Regularizer
from surefoot.optim.base import GuaranteedOptimizer
from surefoot.optim.evaluation import explained
from surefoot.optim.projection import Balls, Intervals
from surefoot.optim.record import StepRecord
from surefoot.optim.stored import Tensors, norm_of, promised


class ConstrainedOptimizer(GuaranteedOptimizer):
    """An optimizer whose parameters stay in a product of balls, in a ball, or in a box.

    Args:
        model: the network.
        objective: a loss without targets.
        domain: the set; by default every block within 1 of the origin. ``center="present"`` means the parameters
            at the time the optimizer is made.
        regularizer: a function of the parameters that is added; absolute values are met by proximal steps.
        lower: a number that the objective never falls below; see :class:`GuaranteedOptimizer`.
        progress: called with the record of each step.

    Attributes:
        domain: the set, with its centre written out.
    """

    @explained
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        domain: Domain | Box | None = None,
        *,
        regularizer: Regularizer | None = None,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        domain = ProductBall(1.0) if domain is None else domain
        if not isinstance(domain, ProductBall | Ball | Box):
            raise TypeError(f"the set is a ProductBall, a Ball or a Box, got {type(domain).__name__}")
        super().__init__(model, objective, regularizer=regularizer, lower=lower, progress=progress)
        self.domain: ProductBall | Ball | Box = domain
        if not isinstance(domain, Box) and domain.center != "origin":
            given = dict(model.named_parameters()) if domain.center == "present" else domain.center
            self._place({name: value.detach().double().clone() for name, value in given.items()})

    @property
    def centre(self) -> dict[str, Tensor]:
        """The centre by parameter name; empty for the origin, and for a box."""
        centre = getattr(self.domain, "center", None)
        return dict(centre) if isinstance(centre, Mapping) else {}

    def region(self, x: Any) -> Balls | Intervals:
        """The set, as balls or intervals of parameters."""
        if isinstance(self.domain, Box):
            return Intervals.of(self.domain, self.trainable)
        return Balls.of(self.domain, self.graph(x), self.centre)

    def certify(self, x: Any, y: Any = None) -> Certificate:
        """The certificate of the objective of this batch on the set, without absolute values.

        Raises:
            GuaranteeError: if it gives no step size.
        """
        added = None if self.regularizer is None else self.regularizer.smooth_part
        objective = self.objective.bound_to(y)
        certificate = certify_proved(self.model, x, objective=objective, domain=self.domain, regularizer=added)
        require_smooth(certificate)
        if certificate.inverse_smoothness == 0:
            raise GuaranteeError(
                f"the smoothness is {certificate.smoothness}: 1/L is beyond the range of doubles. Take smaller "
                "radii, fewer layers, or a set around the present parameters: surefoot.Ball(0.1)"
            )
        return certificate

    def enter(self, region: Balls | Intervals) -> str:
        """Project the parameters into the set if they are outside; says so."""
        values = {name: parameter.detach() for name, parameter in self.trainable.items()}
        if region.contains(values):
            return ""
        inside = region.rounded(region.project(values), values)
        moved = norm_of({name: inside[name].double() - values[name].double() for name in values})
        self.write(inside)
        return f"the parameters were projected into the set, by a distance of {moved:.3g}"

    def project(self, gradient: Tensors, step: float, region: Balls | Intervals) -> tuple[Tensors, Tensors, float]:
        """The proximal gradient step as it is stored, the move to it, and the norm of the gradient mapping."""
        before = {name: parameter.detach().double() for name, parameter in self.trainable.items()}
        thresholds = {name: step * weight for name, weight in self.thresholds.items()}
        aim = {name: before[name] - step * gradient[name].double() for name in before}
        exact = region.project(aim, thresholds)
        mapping = norm_of({name: (before[name] - exact[name]) / step for name in before})
        after = region.rounded(exact, self.trainable)
        return after, {name: after[name].double() - before[name] for name in before}, mapping

    @property
    def thresholds(self) -> dict[str, float]:
        """The weights of absolute values, by parameter."""
        return {n: 0.0 if self.regularizer is None else self.regularizer.threshold_of(n) for n in self.trainable}

    def promise(self, proved: ProvedGradient, move: Tensors, after: Tensors, smoothness: float) -> float:
        r"""By how much the objective falls at least, for the move v between stored weights.

        :math:`-\langle\nabla F + \nabla r, v\rangle - \frac L2\|v\|^2 + \lambda\|u\|_1 - \lambda\|u + v\|_1`. The
        computed gradient of r is off by a relative 2⁻⁴⁸ of each entry: a dozen operations without cancellation.
        """
        if self.regularizer is None:
            return promised(proved.slopes, move, smoothness, proved.errors)
        before = {name: parameter.detach().double() for name, parameter in self.trainable.items()}
        added = self.regularizer.gradient(before)
        slopes = {name: proved.slopes[name].double() + added[name] for name in before}
        lost = {n: 2.0**-48 * (float(added[n].norm()) + float(slopes[n].norm())) + 2.0**-1000 for n in before}
        errors = {name: proved.errors[name] + lost[name] for name in before}
        total = promised(slopes, move, smoothness, errors)
        for name, weight in self.thresholds.items():
            if weight:
                here, there = (weight * float(values[name].double().abs().sum()) for values in (before, after))
                total += here - there - (here + there) * (before[name].numel() + 64) * 2.0**-52
        return total

    def extra_state(self) -> dict[str, Any]:
        """The set: its radii and its centre; of a box nothing, as it is given anew."""
        radius = getattr(self.domain, "radius", 0.0)
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
        assert not isinstance(self.domain, Box)
        self.domain = replace(self.domain, center=centre)
