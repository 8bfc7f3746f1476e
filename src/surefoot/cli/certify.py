"""``surefoot certify``: the constants of one model."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.files import check_destination
from surefoot.cli.frame import Outcome, UsageError, guarded

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot.certificate import Certificate
    from surefoot.cli.request import Case, Request

ConstantsOption = Annotated[
    o.Constants,
    typer.Option(
        metavar="certified|paper|both",
        rich_help_panel="What is certified",
        help="Proved ones, the paper's as printed, or both.",
    ),
]
Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        metavar="",
        rich_help_panel="What is certified",
        help="Also search for lower bounds, so that the truth is between the two.",
    ),
]


@guarded
def certify(
    model: o.Model,
    batch: o.Batch = None,
    inputs: o.Input = None,
    data: o.Data = None,
    weights: o.Weights = None,
    smooth: o.Smooth = False,
    evaluation: o.Eval = False,
    seed: o.Seed = 0,
    domain: o.Domain = None,
    radius: o.Radius = None,
    center: o.CenterOption = None,
    around_weights: o.AroundWeights = False,
    wrt: o.WrtOption = o.Wrt.params,
    objective: o.Objective = None,
    constants: ConstantsOption = o.Constants.certified,
    input_norm: o.InputNorm = None,
    estimate: Estimate = False,
    json: o.Json = False,
    report: o.Report = None,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> Outcome:
    """Bound a model, its slope and its curvature over a set of parameters, and say which step sizes are safe.

    Exit code 0 if the smoothness is finite and proved, 1 if it is infinite or not proved.

    Examples:

      surefoot certify vgg16-smooth --batch 128 --radius 1

      surefoot certify mlp --data digits --objective cross-entropy --radius 0.03 --estimate

      surefoot certify mypackage.models:make_model --input 8,3,32,32 --json
    """
    check_destination(report, "--report", (".html",))
    with output.working("importing torch"):
        from surefoot.cli.request import Request, case

    request = Request(
        batch, inputs, data, weights, smooth, evaluation, seed, name_of(domain), radius,
        name_of(center_of(center, around_weights)), wrt.value, objective, input_norm, estimate,
    )  # fmt: skip
    with output.working(f"certifying {model}"):
        subject = case(model, request)
        found = certificates(subject, request, constants)
    if json:
        documents = [document(subject, kind, certificate) for kind, certificate in found.items()]
        output.document(documents[0] if len(documents) == 1 else {"certificates": documents})
    else:
        output.result(f"{subject.described}\n")
        output.result("\n\n".join(map(str, found.values())))
    if report is not None:
        write_report(report, [(titled(model, kind, found), each) for kind, each in found.items()])
    return outcome(found.get("certified", next(iter(found.values()))))


def certificates(subject: Case, request: Request, constants: o.Constants) -> dict[str, Certificate]:
    """The certificate for each choice of constants; proved ones with lower bounds, if the request asks for them.

    Raises:
        SurefootError: as ``surefoot.certify``.
    """
    import surefoot as sf
    from surefoot.cli.request import refusals_are_usage

    asked: dict[str, Any] = {"objective": subject.objective, "domain": request.set, "wrt": request.wrt}
    kinds: Any = ("certified", "paper") if constants is o.Constants.both else (constants.value,)
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


def write_report(path: Path, found: list[tuple[str, Certificate]]) -> None:
    """The page, whole or not at all."""
    from surefoot.report import write_report as write

    write(path, found)
    output.note(f"the report is in {path}")


def titled(model: str, kind: str, found: dict[str, Certificate]) -> str:
    """What a certificate is called next to others."""
    return model if len(found) == 1 else f"{model}, {kind}"


def center_of(center: o.Center | None, around_weights: bool) -> o.Center | None:
    """The centre that two options say.

    Raises:
        UsageError: if they contradict each other.
    """
    if around_weights and center is o.Center.zero:
        raise UsageError("--around-weights and --center zero contradict each other")
    return o.Center.weights if around_weights else center


def name_of(choice: Enum | None) -> str | None:
    """The text of a choice."""
    return None if choice is None else str(choice.value)
