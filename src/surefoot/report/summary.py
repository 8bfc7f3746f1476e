"""A certificate in words and in a few figures; several side by side, with logarithmic bars."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.attained import Estimate
from surefoot.certificate import Certificate, advice
from surefoot.certificate.numbers import count, log10, lower, per_cent, power_of_ten, quotient, readable, upper
from surefoot.certificate.rows import Row
from surefoot.guarantees import GuaranteeError
from surefoot.magnitude import Magnitude
from surefoot.report.growth import Axis

_ACCURACIES = ((1e-1, "0.1"), (1e-2, "0.01"), (1e-3, "0.001"))
_MOST_PARTS = 5
_CONSTANTS = (("m", "bound", "bound"), ("ℓ", "Lipschitz constant", "lipschitz"), ("L", "smoothness", "smoothness"))
_KINDS = {advice.USEFUL: "good", advice.OF_NO_USE: "idle", advice.NOT_CERTIFIED: "open"}
_NUMBER = re.compile(r"\b\d(?:\.\d+)?e[+-]\d+\b")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a certificate."""

    kind: str  # ``good``, ``idle`` (of no use), ``open`` (nothing finite is proved) or ``doubtful`` (not a proof)
    word: str  # what the certificate is worth
    sentence: str  # what that means
    step: str  # the size of steps that are proved to descend; empty if there is none


@dataclass(frozen=True)
class Figure:
    """A number with its name and what it means."""

    symbol: str
    name: str
    value: str
    meaning: str


def verdict(certificate: Certificate) -> Verdict:
    """The verdict on a certificate."""
    word, _, sentence = advice.verdict(certificate).partition(": ")
    kind = "doubtful" if certificate.flags else _KINDS[word]
    has_step = kind in ("good", "idle") and certificate.scalar and certificate.step_size > 0
    text = f"{advice.headline(certificate)} {_sentence(sentence)}" if has_step else _sentence(sentence)
    return Verdict(kind, _sentence(word), text, lower(certificate.step_size) if has_step else "")


def limits(certificate: Certificate) -> list[str]:
    """Sentences on what limits the smoothness and what would help, and on why no number of steps is given."""
    sentences = [*certificate.flags, *map(_sentence, (*advice.limits(certificate), *certificate.remarks))]
    sentences += certificate.reasons
    if certificate.scalar and certificate.segment_step is None and certificate.step_size and not certificate.flags:
        try:
            certificate.iterations(_ACCURACIES[0][0])
        except GuaranteeError as error:
            sentences.append(_sentence(str(error)))
    return [f"{in_digits(text).rstrip('.')}." for text in sentences]


def in_digits(text: str) -> str:
    """A text with its numbers as a page shows them."""
    return _NUMBER.sub(lambda match: readable(match[0]), text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def where(certificate: Certificate) -> str:
    """The domain of the numbers, as the end of a sentence."""
    point = "weights" if certificate.wrt == "params" else "input"
    radius = certificate.radius
    if isinstance(radius, Mapping) and len(set(radius.values())) == 1:
        return f"with each block within {next(iter(radius.values())):g} of the {point}"
    if radius is None or isinstance(radius, Mapping):
        return f"on the domain ({certificate.domain})" if certificate.domain else "on the domain"
    return f"within {radius:g} of the {point}"


def figures(certificate: Certificate) -> list[Figure]:
    """The constants and what follows from them."""
    f, on = "F" if certificate.scalar else "f", where(certificate)
    meanings = tuple(
        ("as printed, of {}" if certificate.flags else "{} is at most this, {}").format(what, on)
        for what in (f"‖{f}‖", f"‖D{f}‖", f"‖D²{f}‖")
    )
    if is_along_a_segment(certificate):
        curve = "below a parabola of this curvature" if certificate.scalar else "within ½Lη² of a straight line"
        meanings = f"‖{f}‖ is at most this", f"a step of η moves {f} by at most ℓη", f"{f} is {curve}"
    shown = [
        Figure(symbol, name, upper(getattr(certificate, field)), meaning)
        for (symbol, name, field), meaning in zip(_CONSTANTS, meanings, strict=True)
    ]
    if certificate.flags:
        return shown
    step, inverse = lower(certificate.step_size), lower(certificate.inverse_smoothness)
    if certificate.segment_step is not None:
        shown.append(Figure("η", "safe step", step, "along the direction of the segment"))
    elif certificate.scalar and certificate.step_size < certificate.inverse_smoothness:
        shown.append(Figure("r/‖∇F‖", "step size", step, f"as far as the domain reaches; 1/L is {inverse}"))
    elif certificate.scalar and certificate.step_size > certificate.inverse_smoothness:
        shown.append(Figure("γ", "step size", step, f"one step from the weights; 1/L on the domain is {inverse}"))
    elif certificate.scalar and certificate.step_size:
        shown.append(Figure("1/L", "step size", step, f"proved to descend, {on}"))
    try:
        damping = upper(Magnitude.of(certificate.damping))
        shown.append(Figure("κ", "Gauss-Newton damping", damping, f"makes the model an upper bound, {on}"))
    except GuaranteeError:
        pass
    return shown


def is_along_a_segment(certificate: Certificate) -> bool:
    """Whether the constants are those of one direction: they are certified and there are none for blocks."""
    return certificate.constants == "certified" and not certificate.block_lipschitz


def iterations(certificate: Certificate) -> list[tuple[str, str]]:
    """Accuracies and the numbers of steps that are guaranteed to reach them."""
    shown = []
    for eps, written in _ACCURACIES:
        try:
            shown.append((written, count(certificate.iterations(eps))))
        except GuaranteeError:
            break
    return shown


def brackets(certificate: Certificate, estimate: Estimate | None) -> Iterator[tuple[str, ...]]:
    """Symbol, name, lower bound, upper bound and their ratio of each constant; raises if they contradict."""
    if estimate is None:
        return
    certificate.bracket(estimate)
    for symbol, name, field in _CONSTANTS:
        low, high = getattr(estimate, field), getattr(certificate, field)
        yield symbol, name, lower(low), upper(high), ratio(high, Magnitude.of(float(low)))


def by_radius(certificate: Certificate, radii: Sequence[tuple[float, Certificate]]) -> dict[str, Any] | None:
    """The contents of the slider: rows of texts, the radius first and a sentence last; and where it starts."""
    if not radii:
        return None
    names = ["smoothness L", "Lipschitz ℓ", *(["step size"] if certificate.scalar else [])]
    rows = []
    for radius, each in radii:
        step = [verdict(each).step or "none"] if certificate.scalar else []
        sentence = advice.headline(each) if each.scalar else _sentence(f"{advice.verdict(each)}.")
        rows.append([readable(f"{radius:.3e}"), upper(each.smoothness), upper(each.lipschitz), *step, sentence])
    at = next((k for k, (_, each) in enumerate(radii) if each is certificate), len(rows) // 2)
    return {"names": names, "rows": rows, "at": at}


def parts(certificate: Certificate) -> list[Row]:
    """The operations with the largest shares of a finite smoothness."""
    if not certificate.smoothness.is_finite:
        return []
    return [
        row for row in sorted(certificate.rows, key=lambda row: -row.share)[:_MOST_PARTS] if per_cent(row.share)
    ]


_BEFORE_INFINITY = 88.0  # the end of finite bars, in per cent, if one bar is infinite


@dataclass(frozen=True)
class Bar:
    """One model: its value, the ratio to the first finite value, and the width of its bar in per cent."""

    model: str
    value: str
    ratio: str
    width: float
    infinite: bool


@dataclass(frozen=True)
class Quantity:
    """One constant of all models; its bars go from ``low`` to ``high``."""

    symbol: str
    name: str
    bars: list[Bar]
    low: str
    high: str


def comparison(certificates: Sequence[tuple[str, Certificate]]) -> list[Quantity]:
    """The constants of two certificates or more."""
    if len(certificates) < 2:
        return []
    names, constants = zip(*certificates, strict=True)
    return [
        _quantity(symbol, name, names, [getattr(each, field) for each in constants])
        for symbol, name, field in _CONSTANTS
    ]


def ratio(value: Magnitude, reference: Magnitude) -> str:
    """The quotient of a value and a reference, to three digits; empty if it is not a number."""
    times = quotient(value, reference)
    return f"×{readable(times)}" if times else ""


def _quantity(symbol: str, name: str, models: Sequence[str], values: Sequence[Magnitude]) -> Quantity:
    axis = Axis.of(values)
    low = axis.low - 1  # the smallest value has a bar too
    first = next((k for k, value in enumerate(values) if value.is_finite and not value.is_zero), 0)
    bars = [
        Bar(
            model=model,
            value=upper(value),
            ratio="" if k == first else ratio(value, values[first]),
            width=_width(log10(value), low, axis.high, _BEFORE_INFINITY if axis.has_infinity else 100.0),
            infinite=not value.is_finite,
        )
        for k, (model, value) in enumerate(zip(models, values, strict=True))
    ]
    return Quantity(symbol, name, bars, power_of_ten(int(low)), power_of_ten(int(axis.high)))


def _width(log: float, low: float, high: float, room: float) -> float:
    if math.isinf(log):
        return 100.0 if log > 0 else 0.0
    return round(room * (log - low) / (high - low), 2)
