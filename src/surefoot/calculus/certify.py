"""Names that live in ``surefoot.certificate.proving`` and in ``leaves`` of this package."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from surefoot.calculus.leaves import Wrt, ordinary_device
from surefoot.certificate.proving import certify_proved
from surefoot.certificate.record import Certificate
from surefoot.domains import Domain, DomainError, ProductBall, Segment
from surefoot.errors import ObjectiveError


def certify(
    model: nn.Module,
    x: Any,
    *,
    objective: nn.Module | None = None,
    domain: Domain | Segment | None = None,
    wrt: Wrt = "params",
    input_norm: float | None = None,
    constants: Literal["certified", "paper"] = "certified",
) -> Certificate:
    """See :func:`surefoot.certificate.proving.certify_proved`; ``constants="paper"`` is Algorithm 4 as printed."""
    if constants != "paper":
        return certify_proved(model, x, objective=objective, domain=domain, wrt=wrt, input_norm=input_norm)
    domain = ProductBall(1.0) if domain is None else domain
    if isinstance(domain, Segment):
        raise DomainError("along a segment the parameters vary, and the constants are certified ones")
    if objective is not None:
        raise ObjectiveError(
            "the paper's constants of an objective follow from those of the network by Prop. smoothobj: "
            "certify the network, then use surefoot.paper.objective"
        )
    from surefoot.paper.reader import certify_as_printed

    with ordinary_device():
        return certify_as_printed(model, x, domain=domain, wrt=wrt, input_norm=input_norm)


__all__ = ["certify", "ordinary_device"]
