"""A certificate in words: the verdict, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from surefoot.certificate.rows import MODEL, Row
from surefoot.magnitude import Magnitude
from surefoot.numbers import down, readable, times

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

_ENOUGH = 0.8  # share of the smoothness that the named places explain
_MOST_PLACES = 3

PROXIMAL = (
    "m and ℓ are with the absolute values of the regulariser, L is without them: steps are proximal ones, which "
    "take a gradient step on the rest and then move every entry towards zero, by the step size times the weight "
    "of its absolute value (surefoot.optim.ProjectedGradient; surefoot.CertifiedDescent searches their length)"
)
USEFUL, OF_NO_USE, NOT_CERTIFIED = "useful", "finite but of no use", "not certified"
_HOPELESS = 1e12  # times the gradient, or 1
_WASTEFUL = 1e6  # times the curvature at the weights


def point(certificate: Certificate) -> str:
    """The centre in a word: what varies are weights or an input."""
    return "weights" if certificate.wrt == "params" else "input"


def worth(certificate: Certificate) -> str:
    r"""``useful``, ``finite but of no use``, or ``not certified``.

    Not certified: L is infinite, or rests on constants that are not bounds. Of no use: no step stays in the
    domain, or a step 1/L is so short that nobody would take it. This is the case if :math:`L \ge 10^{12}\max(1,
    \|\nabla F\|)`, with the gradient at the centre: the weights then move by less than :math:`10^{-12}`. If the
    curvature c at the weights has been estimated, :math:`L \ge 10^6\max(1, \|\nabla F\|, c)` is enough: the step
    is then also less than a millionth of 1/c. A longer step that is proved in another way (``step_size``) is of
    use.
    """
    if certificate.segment_step is not None and not certificate.flags:
        return USEFUL if certificate.segment_step > 0 else NOT_CERTIFIED
    if certificate.flags or not certificate.smoothness.is_finite:
        return NOT_CERTIFIED
    if certificate.scalar and certificate.step_size == 0:
        return OF_NO_USE
    scale = max(1.0, math.hypot(*(certificate.block_gradients or {}).values()))
    curvature = certificate.curvature
    most = _HOPELESS * scale if curvature is None else _WASTEFUL * max(scale, float(curvature))
    short = certificate.smoothness >= most and not certificate.step_size * most > 1
    return OF_NO_USE if short else USEFUL


def headline(certificate: Certificate) -> str:
    """The steps that may be taken, in one sentence."""
    word = worth(certificate)
    if word == NOT_CERTIFIED or (word == OF_NO_USE and certificate.step_size == 0):
        return f"Nothing is proved about steps: {_because(certificate)}.{_instead(certificate)}"
    if not certificate.scalar:
        what = "parameters" if certificate.wrt == "params" else "input"
        return (
            f"The output changes by at most {certificate.lipschitz} times the change of the {what}, on the domain."
        )
    step = readable(down(certificate.step_size, 3))
    if certificate.segment_step is not None:
        return f"A step of {step} along the direction is proved to descend, the most of all steps on the segment."
    if word == OF_NO_USE:
        return f"Steps up to {step} are proved to descend, too short to be of use.{_instead(certificate)}"
    if certificate.radius is None:
        return f"Steps up to {step} against the gradient descend while they stay in the domain."
    claim = f"Steps up to {step} against the gradient are proved to descend"
    curvature = 0.0 if certificate.curvature is None else float(certificate.curvature)
    if (not certificate.step_size * curvature < 1 and certificate.gradient_step) or not curvature:
        return f"{claim}."
    allowed = readable((Magnitude.of(1.0) / curvature).format(2))
    return f"{claim}; the curvature at {_at(certificate)} would allow {allowed} at most."


def _at(certificate: Certificate) -> str:
    return "these weights" if certificate.wrt == "params" else "this input"


def _instead(certificate: Certificate) -> str:
    """What gives steps of use where these are none: more effort, or a proof of each step; empty where neither."""
    if not certificate.scalar or certificate.wrt != "params" or certificate.flags:
        return ""
    blurred = certificate.smoothness.is_finite and certificate.effort != "high" and certificate.radius
    more = 'effort="high" may sharpen L, and ' if blurred else ""
    return f" What helps: {more}surefoot.CertifiedDescent proves the steps that it takes, one by one."


def verdict(certificate: Certificate) -> str:
    """What the certificate is worth in a word, then what is certified or why nothing is."""
    return f"{worth(certificate)}: {_because(certificate)}"


def _because(certificate: Certificate) -> str:
    if certificate.flags:
        return "no step size is guaranteed: the smoothness rests on constants that are not bounds"
    if certificate.segment_step == 0:
        return "no step along the segment is proved to descend"
    if certificate.segment_step is not None and not certificate.smoothness.is_finite:
        return "a step along the segment descends, though L is infinite on the whole of it"
    if certificate.segment_step is not None:
        return "on the segment the objective is below a parabola of curvature L, so a step along it descends"
    if not certificate.smoothness.is_finite:
        finite = [
            name for name, size in (("m", certificate.bound), ("ℓ", certificate.lipschitz)) if size.is_finite
        ]
        rest = f"; {' and '.join(finite)} {'holds' if len(finite) == 1 else 'hold'}" if finite else ""
        return f"L is infinite because of {_culprits(certificate)}{rest}"
    if not certificate.scalar:
        return "on the domain the output is at most m, its derivative at most ℓ and L-Lipschitz"
    if certificate.step_size == 0:
        why = "no step stays in it" if certificate.inverse_smoothness else "1/L is less than any double"
        return f"the gradient is L-Lipschitz on the domain, but {why}"
    part = certificate.inverse_smoothness * float(certificate.curvature or 0.0)
    more = f"; 1/L is at least {times(part)} of what the curvature at {_at(certificate)} allows" if part else ""
    steps = "proximal" if PROXIMAL in certificate.remarks else "gradient"
    return f"the gradient is L-Lipschitz on the domain; {steps} steps of at most 1/L descend within it{more}"


def _culprits(certificate: Certificate) -> str:
    """The operations that make the smoothness infinite."""
    places: dict[str, list[str]] = {}
    for row in certificate.rows:
        if row.share > 0:
            places.setdefault(row.operation, []).append(row.module or MODEL)
    if places:
        named = [f"{op} in {at[0] if len(at) == 1 else f'{len(at)} places'}" for op, at in places.items()]
        return ", ".join(named[:-1]) + (" and " if named[1:] else "") + named[-1]
    heads = [reason.partition(":")[0] for reason in certificate.reasons]  # "module (operation)"
    if not heads or not all(head.endswith(")") for head in heads):
        return "a kink"
    return " and ".join(heads[:2]) + (f" and {len(heads) - 2} more" if len(heads) > 2 else "")


def limits(certificate: Certificate) -> list[str]:
    """A sentence on where a finite smoothness comes from; empty without shares."""
    rows = certificate.rows
    if not certificate.smoothness.is_finite or not any(row.share > 0 for row in rows):
        return []
    by_place = _shares(rows, lambda row: f"{row.module or MODEL} ({row.operation})")
    named = _leading(by_place)
    if sum(named.values()) < 0.5 and len(by_place) > _MOST_PLACES:
        largest = next(iter(by_place))
        kinds = _leading(_shares(rows, lambda row: row.operation))
        parts = ", ".join(f"{share:.0%} from {kind}" for kind, share in kinds.items())
        origins = f"L comes from many places: {parts}; the largest is {largest} with {by_place[largest]:.0%}"
    else:
        (first, share), *others = named.items()
        origins = f"{share:.0%} of L comes from {first}" + "".join(
            f", {s:.0%} from {place}" for place, s in others
        )
    return [origins]


def _shares(rows: tuple[Row, ...], key: Callable[[Row], str]) -> dict[str, float]:
    """The sum of shares by a key, largest first."""
    total: dict[str, float] = {}
    for row in rows:
        if row.share > 0:
            total[key(row)] = total.get(key(row), 0.0) + row.share
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _leading(shares: dict[str, float]) -> dict[str, float]:
    """The first few shares, until they make up most of the whole."""
    leading: dict[str, float] = {}
    for place, share in shares.items():
        if sum(leading.values()) >= _ENOUGH or len(leading) == _MOST_PLACES or (leading and share < 0.005):
            break
        leading[place] = share
    return leading
