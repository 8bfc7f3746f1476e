"""The work of ``surefoot certify`` and ``compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.certificate import Certificate
from surefoot.certificate.text import render
from surefoot.cli import output
from surefoot.cli.commands import Question
from surefoot.cli.frame import Outcome, UsageError, writing
from surefoot.cli.subject import Subject, objective_of, refusal, subject_of
from surefoot.errors import CaptureError, SurefootError
from surefoot.numbers import down, quotient
from surefoot.report import write_report

_REASONS = 3  # reasons why L is infinite that a comparison shows


def certify(name: str, question: Question, json: bool, report: Path | None) -> Outcome:
    """Certify a model and show it."""
    with output.working(f"certifying {name}"):
        subject = subject_of(name, question, question)
        certificate = _certified(subject, question)
    if report is not None:  # before anything is printed: a closed pipe does not lose it
        with writing(report, "--report"):
            write_report(report, {name: certificate})
    if json:
        output.document(_document(subject, certificate))
    else:
        norm = "" if subject.input_norm is None else f" with ‖x‖ ≤ {subject.input_norm:g}"
        output.result(f"{name}, input {subject.shape}{norm}\n\n{render(certificate, output.width())}")
    return Outcome.PROVED if _is_proved(certificate) else Outcome.NOT_PROVED


def compare(names: Sequence[str], question: Question, json: bool, report: Path | None) -> Outcome:
    """Certify several models; the failure of one does not lose the others."""
    subjects: list[tuple[Subject, Certificate]] = []
    failed: dict[str, SurefootError] = {}
    with output.progress("certifying", len(names)) as advance:
        for name in dict.fromkeys(names):
            try:
                subject = subject_of(name, question, question)
                subjects.append((subject, _certified(subject, question)))
            except SurefootError as error:
                failed[name] = error
                output.say("warning", f"there is no certificate for {name}: {error}")
            advance(name)
    if not subjects:
        raise next(iter(failed.values()))
    if report is not None:
        with writing(report, "--report"):
            write_report(report, {subject.name: certificate for subject, certificate in subjects})
    if json:
        documents = [_document(*each) for each in subjects]
        output.document({"models": documents, "failed": {name: str(error) for name, error in failed.items()}})
    else:
        _show(subjects)
    return Outcome.PROVED if any(_is_proved(each) for _, each in subjects) else Outcome.NOT_PROVED


def _certified(subject: Subject, question: Question) -> Certificate:
    radius = question.radius if question.radius is not None else (0.1 if question.is_centred else 1.0)
    center: Any = "present" if question.is_centred else "origin"
    kind = (
        sf.Ball
        if (question.domain or ("ball" if question.is_centred else "product")) == "ball"
        else sf.ProductBall
    )
    objective = None
    if question.objective is not None:
        loss, y = objective_of(question.objective, subject.data)
        objective = loss if y is None else loss.bound_to(y)
    options: dict[str, Any] = {
        "objective": objective, "domain": kind(radius, center=center), "wrt": question.wrt,
    }  # fmt: skip
    try:
        certificate = sf.certify(
            subject.model, subject.x, input_norm=subject.input_norm, constants=question.constants, **options
        )
    except CaptureError as error:
        if refusal(subject.model, subject.x) is None:
            raise
        raise UsageError(str(error)) from error
    if not question.estimate:
        return certificate
    estimate = sf.estimate(subject.model, subject.x, seed=question.seed, **options)
    return certificate.with_estimate(estimate)


def _is_proved(certificate: Certificate) -> bool:
    return certificate.smoothness.is_finite and not certificate.flags


def _document(subject: Subject, certificate: Certificate) -> dict[str, Any]:
    return {
        "model": subject.name,
        "input": subject.shape,
        "input_norm": subject.input_norm,
        "certified": _is_proved(certificate),
        "certificate": certificate.to_dict(),
    }


def _show(subjects: list[tuple[Subject, Certificate]]) -> None:
    """A table with ratios to the first finite constant, then what is not a bound, and why L is infinite."""
    certificates = [certificate for _, certificate in subjects]
    output.result(f"{certificates[0].domain}\n")
    head = ["model", "input", "bound m", "Lipschitz ℓ", "ratio", "smoothness L", "ratio", "step size"]
    head += ["lower L"] * any(each.estimate is not None for each in certificates)
    rows = []
    for subject, each in subjects:
        star = "*" if each.flags else ""
        row = [subject.name, subject.shape, f"{each.bound}{star}"]
        for field in ("lipschitz", "smoothness"):
            column = [getattr(c, field) for c in certificates]
            reference = next((c for c in column if c.is_finite and not c.is_zero), column[0])
            row += [f"{getattr(each, field)}{star}", quotient(getattr(each, field), reference) or "–"]
        row.append("–" if each.flags else down(each.step_size))
        row += [f"≥ {each.estimate.smoothness}"] if each.estimate is not None else []
        rows.append(row)
    output.table(head, rows, left=2)
    flags = dict.fromkeys(flag for each in certificates for flag in each.flags)
    if flags:
        output.result("\n".join(["\n* not an upper bound, because it rests on this:", *(f"  {f}" for f in flags)]))
    for subject, each in subjects:
        if not each.smoothness.is_finite:
            reasons = [f"  {reason}" for reason in each.reasons[:_REASONS]]
            output.result("\n".join([f"\n{subject.name}: L is infinite:", *reasons]))
