r"""The constants of an objective as a function of the stacked outputs.

For :math:`h(\hat y)` over :math:`\|\hat y\|_2 \le \rho`: the Lipschitz constants of h and of its gradient. The
certified ones are what the rule of the objective claims on that ball, so they are the ones that
:func:`surefoot.certify` composes with a network. For a mean over n samples they are :math:`\ell =
\max_i\ell_i/\sqrt n` and :math:`L = \max_iL_i/n` (ERRATA 12).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, constant, unknown_constant
from surefoot.errors import ObjectiveError
from surefoot.graph.nodes import Node, Ref, Spec
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call
from surefoot.operations.record import rules

if TYPE_CHECKING:
    from surefoot.objectives.base import Objective


@dataclass(frozen=True)
class Constants:
    r"""Constants of an objective over :math:`\|\hat y\|_2 \le \rho`.

    Attributes:
        lipschitz: :math:`\ell \ge \sup\|\nabla h\|_2`.
        smoothness: the Lipschitz constant L of :math:`\nabla h`; :math:`\sup\|\nabla^2h\|_{2,2}` where it exists.
        convex: whether h is convex.
        smooth: whether L is finite.
        flags: why a constant is infinite or, in the paper's table, not an upper bound.
    """

    lipschitz: Magnitude
    smoothness: Magnitude
    convex: bool
    smooth: bool
    flags: tuple[str, ...] = ()


def certified(objective: Objective, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
    """What the rule of an objective says on a ball of outputs around zero; targets may be unknown.

    Raises:
        ObjectiveError: if the objective has no rule.
    """
    rule = rules().get(objective.operation)
    if rule is None:
        raise ObjectiveError(
            f"no rule is known for '{objective.operation}': register one with surefoot.register_rule, or override "
            f"{type(objective).__name__}.constants"
        )
    device = torch.device("cpu") if targets is None else targets.device
    enclosures = {"outputs": _ball(outputs, radius, device)}
    if objective.takes_targets:
        if targets is None or targets.device.type == "meta":
            spec = objective.target_spec(outputs) if targets is None else spec_of(targets)
            enclosures["targets"] = unknown_constant(spec, 1)
        else:
            enclosures["targets"] = constant(targets, 1)
    node = Node(
        name="loss",
        op=objective.operation,
        target=type(objective).function,
        args=tuple(map(Ref, enclosures)),
        kwargs=objective.options,
        module="objective",
        spec=Spec((), outputs.dtype),
    )
    bounds = rule(Call(node, enclosures))
    slope, curvature = bounds.jacobian["outputs"], bounds.curvature.get(("outputs", "outputs"), Magnitude.zero())
    flags = () if curvature.is_finite or not bounds.reason else (bounds.reason,)
    return Constants(slope, curvature, objective.convex, bool(curvature.is_finite), flags)


def _ball(spec: Spec, radius: float, device: torch.device) -> Enclosure:
    """The outputs on a ball around zero; no centre is known if the ball is everything, or on the meta device."""
    size, unit = Magnitude.of(radius), Magnitude.zero((1,))
    if math.isinf(radius) or device.type == "meta":
        infinite = Magnitude.infinity()
        return Enclosure(spec, None, size, size, infinite, None, infinite, unit)
    centre = torch.zeros(spec.shape, dtype=torch.float64, device=device)
    return Enclosure(spec, centre, size, size, size, None, Magnitude.zero(), unit)


def spec_of(outputs: Tensor | Sequence[int]) -> Spec:
    """Shape and type of outputs, or of a shape; refuses what is neither."""
    if isinstance(outputs, Tensor):
        return Spec(tuple(outputs.shape), outputs.dtype)
    try:
        shape = tuple(int(size) for size in outputs)
    except (TypeError, ValueError):
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise ObjectiveError(f"outputs are a tensor or its shape, such as (samples, classes), got {outputs!r}")
    return Spec(shape, torch.get_default_dtype())


def checked_radius(radius: float) -> float:
    """The radius of a ball of outputs; refuses one that is negative or NaN."""
    if not float(radius) >= 0:
        raise ObjectiveError(f"the radius of a ball of outputs is a number ≥ 0, got {radius!r}")
    return float(radius)
