"""A ball around the present parameters whose radius follows the length of the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from surefoot.certificate import Certificate
from surefoot.domains import Ball
from surefoot.guarantees import GuaranteeError
from surefoot.optim.stored import Proposal, norm_of

_TRIALS = 40  # balls before giving up
GROWTH = 2.0  # how much larger the next ball is than a step that went to the end of this one
ROOM = 1.25  # and than a step that did not
INSIDE = 1 - 1e-6  # of the radius, up to which a step may go: rounding the weights moves them a little
_LOOSE = 0.25  # a step shorter than this part of the first radius is looked for again on a smaller ball


class MovingBall:
    """The radius for the next step: somewhat larger than the last step, so that one certificate is enough."""

    def __init__(self, start: float) -> None:
        self.start = start  # the first radius, relative to the parameters
        self.radius: float | None = None  # for the next step

    def step(
        self,
        certify: Callable[[Ball], Certificate],
        weights: Mapping[str, Tensor],
        propose: Callable[[Certificate, float], Proposal],
    ) -> Proposal:
        """The step that is proposed on a ball that is neither too large nor without a certificate.

        A ball on which the smoothness is not finite is made ten times smaller. The first step looks for a ball of
        its own size, because a bound on a ball that is much larger than the step is loose. If no such ball is
        found, it is refused.
        """
        known = self.radius is not None
        radius = self.start * (norm_of(weights) or 1.0) if self.radius is None else self.radius
        for _ in range(_TRIALS):
            certificate = certify(Ball(radius))
            if not certificate.smoothness.is_finite:
                radius, known = radius / 10, False
                continue
            proposal = propose(certificate, radius)
            moved = proposal.moved
            if known or moved >= _LOOSE * radius or moved == 0:
                self.radius = moved * (GROWTH if moved >= 0.99 * radius else ROOM) or radius
                return proposal
            radius = 2 * moved
        raise GuaranteeError(
            "no ball around the weights has a finite smoothness: "
            + "; ".join(certificate.reasons or ("use smooth activations (surefoot.smooth(model))",))
        )
