"""An estimate next to a certificate: the truth is between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.errors import SurefootError
from surefoot.lower.value import Estimate, LowerBound
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

# What an evaluation in double precision may add to an attained value.
_ROUNDOFF = 1e-9


class Contradiction(SurefootError):
    """A value was attained that a certificate excludes: one of the two is wrong."""


def bracket(certificate: Certificate, estimate: Estimate) -> str:
    r"""Lower bound, supremum, upper bound and their ratio, a line for each of the three constants.

    Args:
        certificate: of the same model, batch, objective and domain.
        estimate: what a search found there.

    Raises:
        Contradiction: if a lower bound exceeds the upper one by more than the round-off of its evaluation.

    >>> from surefoot.certificate import Certificate
    >>> two = Magnitude.of(2.0)
    >>> certificate = Certificate(two, two, two, {}, Magnitude.zero((0, 0)))
    >>> print(bracket(certificate, Estimate(LowerBound(1.0), LowerBound(2.0), LowerBound(0.0))))
    1.000e+00 ≤ bound m      ≤ 2.000e+00  (ratio 2.00)
    2.000e+00 ≤ Lipschitz ℓ  ≤ 2.000e+00  (ratio 1.00)
            0 ≤ smoothness L ≤ 2.000e+00  (ratio ∞)
    """
    lines = [
        ("bound m", estimate.bound, certificate.bound),
        ("Lipschitz ℓ", estimate.lipschitz, certificate.lipschitz),
        ("smoothness L", estimate.smoothness, certificate.smoothness),
    ]
    lowers, uppers = [str(low) for _, low, _ in lines], [str(high) for _, _, high in lines]
    left, right = max(map(len, lowers)), max(map(len, uppers))
    return "\n".join(
        f"{below:>{left}} ≤ {name:<12} ≤ {above:<{right}}  (ratio {_ratio(name, low, high)})"
        for (name, low, high), below, above in zip(lines, lowers, uppers, strict=True)
    )


def _ratio(name: str, low: LowerBound, high: Magnitude) -> str:
    """How many times the upper bound is the lower one."""
    if Magnitude.of(float(low)) > high * (1 + _ROUNDOFF):
        raise Contradiction(
            f"the {name} {low} was attained, but the certificate says {high}: check that both speak of the same "
            "model, batch and domain; if they do, the certificate is wrong, and a report is welcome"
        )
    if float(low) == 0:
        return "1.00" if high.is_zero else "∞"
    quotient = high / float(low)
    return f"{float(quotient):.2f}" if float(quotient) < 1e3 else str(quotient)


__all__ = ["Contradiction", "bracket"]
