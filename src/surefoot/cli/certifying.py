"""The work of ``surefoot certify`` and ``compare``: the constants of one model, or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.certificate import Certificate
from surefoot.certificate.numbers import down, log10, quotient
from surefoot.certificate.text import WIDTH, render
from surefoot.cli import output
from surefoot.cli.cases import Case, case, dataset_of, domain_of, refusals_are_usage
from surefoot.cli.guard import Outcome, UsageError, writing
from surefoot.cli.options import Request, Sweep
from surefoot.cli.sweep import Certified, Job, Lines, certified, finished, jobs_of
from surefoot.data import Dataset
from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude
from surefoot.report import WhatIf, what_if, write_report


def certify_each(
    models: Sequence[str], request: Request, sweep: Sweep, json: bool, report: Path | None, compared: bool
) -> Outcome:
    """Certify a model and show it, or several with a row for each as it finishes."""
    jobs = jobs_of(models, request)
    if len(jobs) > 1 or sweep.log is not None:
        if compared:
            raise UsageError("--what-if is about one model, without --log")
        return certify_all(models, request, sweep, json, report, as_finished=True)
    return _certify_one(jobs[0].model, jobs[0].request, json, report, compared)


def _certify_one(model: str, request: Request, json: bool, report: Path | None, compared: bool) -> Outcome:
    with output.working(f"certifying {model}"):
        subject = case(model, request)
        by_kind = certificates(subject, request)
        others = _others(subject, by_kind, request) if compared else {}
    result = certified(subject.name, subject, by_kind)
    write_page(report, [result], others)  # before anything is printed: a closed pipe does not lose it
    if json:
        documents = [document(result, kind, certificate) for kind, certificate in by_kind.items()]
        output.document(documents[0] if len(documents) == 1 else {"certificates": documents})
    else:
        output.result(f"{subject.described}\n")
        output.result("\n\n".join(render(each, output.width() or WIDTH) for each in by_kind.values()))
    return outcome(by_kind.get("certified", next(iter(by_kind.values()))))


def certificates(subject: Case, request: Request) -> dict[str, Certificate]:
    """The certificate for each kind of constants; the proved one with lower bounds, if they are asked for."""
    question: dict[str, Any] = {"objective": subject.objective, "domain": domain_of(request), "wrt": request.wrt}
    kinds: Any = request.kinds
    with refusals_are_usage(subject):
        by_kind = {
            kind: sf.certify(subject.model, subject.x, input_norm=subject.input_norm, constants=kind, **question)
            for kind in kinds
        }
    if request.estimate:
        lower = sf.estimate(subject.model, subject.x, seed=request.seed, **question)
        if "certified" in by_kind:  # the paper's constants may be below the lower bounds
            by_kind["certified"] = by_kind["certified"].with_estimate(lower)
        else:
            output.note(f"found by search: {str(lower).partition(': ')[2]}")
    return by_kind


def _others(subject: Case, by_kind: dict[str, Certificate], request: Request) -> dict[str, WhatIf]:
    """The proved certificate with other radii and other layers, by the name on the page."""
    if "certified" not in by_kind:
        return {}
    options: Any = {"objective": subject.objective, "wrt": request.wrt, "input_norm": subject.input_norm}
    name = subject.name if len(by_kind) == 1 else f"{subject.name}, certified"
    return {name: what_if(subject.model, subject.x, by_kind["certified"], domain=domain_of(request), **options)}


def outcome(certificate: Certificate) -> Outcome:
    """The exit code for a certificate."""
    proved = certificate.smoothness.is_finite and not certificate.flags
    return Outcome.CERTIFIED if proved else Outcome.NOT_CERTIFIED


def document(subject: Certified, constants: str, certificate: Certificate) -> dict[str, Any]:
    """A certificate with its model and input, for JSON."""
    return {
        "model": subject.name,
        "input": subject.shapes,
        "input_norm": subject.input_norm,
        "constants": constants,
        "certified": outcome(certificate) is Outcome.CERTIFIED,
        "certificate": certificate.to_dict(),
    }


def write_page(path: Path | None, results: Sequence[Certified], others: dict[str, WhatIf] | None = None) -> None:
    """Write the report, if there is a path for it; the file appears whole or not at all."""
    if path is None:
        return
    with writing(path, "--report"):
        write_report(path, [each for result in results for each in _named(result)], what_if=others)
    output.note(f"the report is in {path}")


def _named(subject: Certified) -> list[tuple[str, Certificate]]:
    """The certificates by name; the name has the kind of constants if there are several."""
    several = len(subject.certificates) > 1
    return [
        (f"{subject.name}, {kind}" if several else subject.name, each)
        for kind, each in subject.certificates.items()
    ]


_HEAD = ("model", "bound m", "Lipschitz ℓ", "ℓ ratio", "smoothness L", "L ratio")
_TITLES = {"certified": "Proved:", "paper": "As the paper prints it:"}
_NUMBER = 12  # width of a column of constants
_REASONS = 3  # reasons why L is infinite that are shown


def certify_all(
    models: Sequence[str],
    request: Request,
    sweep: Sweep,
    json: bool,
    report: Path | None,
    as_finished: bool = False,
) -> Outcome:
    """Certify models and show them side by side; the failure of one does not lose the others.

    With ``as_finished`` each is shown as it finishes, and all must be certified for the exit code 0; otherwise one
    is enough.
    """
    jobs = jobs_of(models, request)
    data = dataset_of(request)  # refuses at once what is wrong with it
    lines = Lines(sweep.log, sweep.resume)
    work = partial(certify_job, data=data if sweep.workers == 1 else None)
    results = dict[str, Certified | SurefootError]()
    show = _row_of(jobs, lines, json) if as_finished else lambda job, result: None
    for job in jobs:
        if (earlier := lines.earlier(job)) is not None:
            results[job.name] = earlier
            show(job, earlier)
    left = [job for job in jobs if job.name not in results]
    with output.progress("certifying", len(jobs), len(results)) as advance:
        for job, result in finished(left, work, sweep.workers):
            results[job.name] = result
            lines.add(job, result)
            if isinstance(result, SurefootError):
                output.warn(f"there is no certificate for {job.name}: {result}")
            show(job, result)
            advance(job.name)
    ordered = {job.name: results[job.name] for job in jobs}
    done = [result for result in ordered.values() if isinstance(result, Certified)]
    failed = {name: result for name, result in ordered.items() if isinstance(result, SurefootError)}
    if not done:
        raise next(iter(failed.values()))
    write_page(report, done)
    if not as_finished and json:
        documents = [document(s, kind, each) for s in done for kind, each in s.certificates.items()]
        output.document({"models": documents, "failed": {model: str(why) for model, why in failed.items()}})
    elif not as_finished:
        _show(done, request.kinds)
    proved = [outcome(each) is Outcome.CERTIFIED for subject in done for each in subject.certificates.values()]
    enough = all(proved) and not failed if as_finished else any(proved)
    return Outcome.CERTIFIED if enough else Outcome.NOT_CERTIFIED


def _row_of(jobs: Sequence[Job], lines: Lines, json: bool) -> Callable[[Job, Certified | SurefootError], None]:
    """A function that shows a finished job: a row of a table, whose head is printed now, or a line of JSON."""
    head = ("model", "bound m", "Lipschitz ℓ", "smoothness L", "step size")
    kinds = jobs[0].request.kinds
    width = max(len(job.name) for job in jobs) + (max(map(len, kinds)) + 2 if len(kinds) > 1 else 0)

    def row(cells: Sequence[str]) -> None:
        first, *others = cells
        output.result("  ".join([f"{first:<{width}}", *(f"{cell:>{_NUMBER}}" for cell in others)]))

    def show(job: Job, result: Certified | SurefootError) -> None:
        if json:
            output.document(lines.line(job, result), indent=None)
        elif isinstance(result, Certified):
            for name, each in _named(result):
                star, bounds = "*" if each.flags else "", (each.bound, each.lipschitz, each.smoothness)
                row([name, *(f"{value}{star}" for value in bounds), "–" if star else down(each.step_size)])

    if not json:
        row(head)
    return show


def certify_job(job: Job, data: Dataset | None) -> Certified:
    """Certify one of several, perhaps in another process; ``data`` are those of the request if already loaded."""
    subject = case(job.model, job.request, data)
    return certified(job.name, subject, certificates(subject, job.request))


def _show(results: Sequence[Certified], kinds: Sequence[str]) -> None:
    domain = results[0].certificates[kinds[0]].domain
    inputs = {subject.described.removeprefix(f"{subject.name}, ") for subject in results}
    about = f"{next(iter(inputs))}, " if len(inputs) == 1 else ""
    output.result(f"{about}{domain}\n")
    flags: dict[str, None] = {}
    for kind in kinds:
        chosen = [(subject.name, subject.certificates[kind]) for subject in results]
        if len(kinds) > 1:
            output.result(("" if kind == kinds[0] else "\n") + _TITLES[kind])
        output.table(*_table(chosen))
        flags |= dict.fromkeys(flag for _, each in chosen for flag in each.flags)
    if flags:
        output.result("\n".join(["\n* not an upper bound, because it rests on this:", *(f"  {f}" for f in flags)]))
    for subject in results:
        certificate = subject.certificates[kinds[0]]
        if not certificate.smoothness.is_finite:
            reasons = [f"  {reason}" for reason in certificate.reasons[:_REASONS]]
            output.result("\n".join([f"\n{subject.name}: L is infinite:", *reasons]))


def _table(chosen: list[tuple[str, Certificate]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows; with safe steps for objectives, and lower bounds if there was a search."""
    searched, scalar = (any(each) for each in zip(*((c.estimate, c.scalar) for _, c in chosen), strict=True))
    head = (*_HEAD, "step size" if scalar else "1/L", *(["found L"] if searched else []))
    rows: list[tuple[str, ...]] = []
    for name, each in chosen:
        star = "*" if each.flags else ""
        rows.append(
            (
                name,
                f"{each.bound}{star}",
                f"{each.lipschitz}{star}",
                ratio(each.lipschitz, [c.lipschitz for _, c in chosen]),
                f"{each.smoothness}{star if each.smoothness.is_finite else ''}",
                ratio(each.smoothness, [c.smoothness for _, c in chosen]),
                down(each.step_size) if not each.flags else "–",
                *([f"≥ {each.estimate.smoothness}" if each.estimate is not None else "–"] if searched else []),
            )
        )
    return head, rows


def ratio(value: Magnitude, column: Sequence[Magnitude]) -> str:
    """The quotient of a value and the first finite value of its column, as text, as it may be beyond a double."""
    reference = next((each for each in column if each.is_finite and not each.is_zero), None)
    if reference is None or not value.is_finite:
        return "–"
    if value.is_zero:
        return "0"
    digits = log10(value) - log10(reference)
    return f"{10**digits:.3g}" if abs(digits) < 3 else quotient(value, reference, 1)
