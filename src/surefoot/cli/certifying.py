"""What ``surefoot certify`` does: the constants of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.certificate import Certificate
from surefoot.cli import output
from surefoot.cli.cases import Case, case, domain_of, refusals_are_usage
from surefoot.cli.guard import Outcome
from surefoot.cli.options import Request
from surefoot.report import write_report


def certify_one(model: str, request: Request, json: bool, report: Path | None) -> Outcome:
    """Certify a model and show it."""
    with output.working(f"certifying {model}"):
        subject = case(model, request)
        found = certificates(subject, request)
    if json:
        documents = [document(subject, kind, certificate) for kind, certificate in found.items()]
        output.document(documents[0] if len(documents) == 1 else {"certificates": documents})
    else:
        output.result(f"{subject.described}\n")
        output.result("\n\n".join(map(str, found.values())))
    write_page(report, [(subject, found)])
    return outcome(found.get("certified", next(iter(found.values()))))


def certificates(subject: Case, request: Request) -> dict[str, Certificate]:
    """The certificate for each choice of constants; proved ones with lower bounds, if the request asks for them.

    Raises:
        SurefootError: as ``surefoot.certify``.
    """
    asked: dict[str, Any] = {"objective": subject.objective, "domain": domain_of(request), "wrt": request.wrt}
    kinds: Any = request.kinds
    with refusals_are_usage(subject):
        found = {
            kind: sf.certify(subject.model, subject.x, input_norm=subject.input_norm, constants=kind, **asked)
            for kind in kinds
        }
    if request.estimate:
        lower = sf.estimate(subject.model, subject.x, seed=request.seed, **asked)
        if "certified" in found:  # what the paper prints may well be below what is found
            found["certified"] = found["certified"].with_estimate(lower)
        else:
            output.note(f"found by search: {str(lower).partition(': ')[2]}")
    return found


def outcome(certificate: Certificate) -> Outcome:
    """Whether something is proved."""
    proved = certificate.smoothness.is_finite and not certificate.flags
    return Outcome.CERTIFIED if proved else Outcome.NOT_CERTIFIED


def document(subject: Case, constants: str, certificate: Certificate) -> dict[str, Any]:
    """A certificate with what it is about, for JSON."""
    return {
        "model": subject.name,
        "input": subject.shapes,
        "input_norm": subject.input_norm,
        "constants": constants,
        "certified": outcome(certificate) is Outcome.CERTIFIED,
        "certificate": certificate.to_dict(),
    }


def write_page(path: Path | None, found: list[tuple[Case, dict[str, Certificate]]]) -> None:
    """The report, whole or not at all, if one is asked for."""
    if path is None:
        return
    shown = [
        (subject.name if len(kinds) == 1 else f"{subject.name}, {kind}", certificate)
        for subject, kinds in found
        for kind, certificate in kinds.items()
    ]
    write_report(path, shown)
    output.note(f"the report is in {path}")
