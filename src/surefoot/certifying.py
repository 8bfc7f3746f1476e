"""``surefoot.certify``: proved constants, or Algorithm 4 as printed."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from surefoot.calculus.leaves import ordinary_device
from surefoot.certificate import Certificate
from surefoot.certificate.proving import certify_proved
from surefoot.domains import Box, Domain, DomainError, ProductBall, Segment
from surefoot.objectives import ObjectiveError, Regularizer
from surefoot.paper.reader import certify_as_printed


def certify(
    model: nn.Module,
    x: Any,
    *,
    objective: nn.Module | None = None,
    domain: Domain | Box | Segment | None = None,
    wrt: Literal["params", "input"] = "params",
    input_norm: float | None = None,
    regularizer: Regularizer | None = None,
    constants: Literal["certified", "paper"] = "certified",
) -> Certificate:
    r"""Bound, Lipschitz constant and smoothness of a model's output over a domain, proved.

    Args:
        model: any module that can be captured; on the ``meta`` device nothing is allocated.
        x: a batch; the certificate speaks of the stacked outputs of this batch.
        objective: certify this function of the outputs instead: a loss bound to its targets, such as
            ``surefoot.CrossEntropy(y)``, or any module that maps the outputs to one number.
        domain: where the variables may be. By default, for a real-valued function, the ball around the weights on
            which the longest gradient step can be proved (:mod:`surefoot.certificate.proving`); otherwise
            every parameter block within 1 of the origin, or with ``wrt="input"`` the input within 1 of the origin.
        wrt: what varies: the parameters, or the input for fixed parameters (Corollary smooth_state).
        input_norm: use this bound on the norm of the stacked batch instead of the data; required on ``meta``.
        regularizer: a smooth function of the parameters that is added to the objective, such as
            ``surefoot.Ridge(1e-4)``.
        constants: ``"certified"``, or ``"paper"`` for Algorithm 4 as printed, with the paper's constants.

    Returns:
        The certificate; its smoothness may be infinite, and then it says which operation is to blame.

    Raises:
        CaptureError: if the model cannot be read.
        UnsupportedOperation: if an operation has no rule.
        DomainError: if the domain does not fit.
        ObjectiveError: if the objective does not fit the outputs.
    """
    if constants != "paper":
        options: dict[str, Any] = {"wrt": wrt, "input_norm": input_norm, "regularizer": regularizer}
        return certify_proved(model, x, objective=objective, domain=domain, **options)
    domain = ProductBall(1.0) if domain is None else domain
    if wrt not in ("params", "input"):
        raise DomainError(f"wrt is 'params' or 'input', got {wrt!r}")
    if isinstance(domain, Segment | Box):
        raise DomainError("the paper's algorithm is for balls: use ProductBall, Ball, or constants='certified'")
    if objective is not None or regularizer is not None:
        raise ObjectiveError(
            "the paper's constants of an objective follow from those of the network by Prop. smoothobj: "
            "certify the network, then use surefoot.paper.objective"
        )
    with ordinary_device():
        return certify_as_printed(model, x, domain=domain, wrt=wrt, input_norm=input_norm)
