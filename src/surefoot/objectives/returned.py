"""Models that return their loss."""

from __future__ import annotations

from surefoot.errors import ObjectiveError
from surefoot.graph.nodes import Spec
from surefoot.objectives.base import Objective, shape_of


class ModelLoss(Objective):
    """The loss that the model itself computes and returns, from targets among its inputs.

    Whether that is convex in anything, or never negative, is not known: optimizers ask for a lower bound before
    they speak of one.

    >>> float(sf.objectives.ModelLoss()(torch.tensor(3.0)))
    3.0
    """

    operation = "surefoot.returned"
    takes_targets = False

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """There is one number."""
        if outputs.numel != 1:
            raise ObjectiveError(
                f"ModelLoss is for models that return one number, their loss, got {shape_of(outputs)} outputs"
            )
