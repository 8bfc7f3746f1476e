"""``surefoot compare``: the constants of several models side by side."""

from __future__ import annotations

import math
from decimal import ROUND_DOWN, Context, Decimal, localcontext
from typing import TYPE_CHECKING, Any

from surefoot.cli import certify as one
from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.files import check_destination
from surefoot.cli.frame import Outcome, guarded
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.certificate import Certificate
    from surefoot.cli.request import Case
    from surefoot.magnitude import Magnitude

Found = list[tuple["Case", dict[str, "Certificate"]]]

_HEAD = ("model", "bound m", "Lipschitz ℓ", "ℓ ratio", "smoothness L", "L ratio", "1/L")
_FOUND = "found L"
_REASONS = 3  # that are shown of why L is infinite


@guarded
def compare(
    models: o.Models,
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
    constants: one.ConstantsOption = o.Constants.certified,
    input_norm: o.InputNorm = None,
    estimate: one.Estimate = False,
    json: o.Json = False,
    report: o.Report = None,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> Outcome:
    """Certify several models, or variants of one, and put the constants side by side.

    Ratios are to the first model whose constant is finite. Exit code 0 if at least one model is certified.

    Examples:

      surefoot compare vgg16 vgg16-smooth vgg16-batchnorm

      surefoot compare vgg16-smooth vgg16-batchnorm@batch_norm=100 --constants both

      surefoot compare mlp@activation=tanh mlp --data digits --objective cross-entropy
    """
    check_destination(report, "--report", (".html",))
    with output.working("importing torch"):
        from surefoot.cli.request import Request, case

    request = Request(
        batch, inputs, data, weights, smooth, evaluation, seed, one.name_of(domain), radius,
        one.name_of(one.center_of(center, around_weights)), wrt.value, objective, input_norm, estimate,
    )  # fmt: skip
    found: Found = []
    with output.progress("certifying", len(models)) as advance:
        for model in models:
            try:
                subject = case(model, request)
                found.append((subject, one.certificates(subject, request, constants)))
            except SurefootError:
                output.note(f"there is no certificate for {model}:")
                raise
            advance(model)
    if json:
        output.document(
            {"models": [one.document(s, kind, each) for s, kinds in found for kind, each in kinds.items()]}
        )
    else:
        _show(found, constants)
    if report is not None:
        one.write_report(
            report, [(one.titled(s.name, k, kinds), c) for s, kinds in found for k, c in kinds.items()]
        )
    outcomes = {one.outcome(each) for _, kinds in found for each in kinds.values()}
    return Outcome.CERTIFIED if Outcome.CERTIFIED in outcomes else Outcome.NOT_CERTIFIED


def _show(found: Found, constants: o.Constants) -> None:
    domain = next(iter(found[0][1].values())).domain
    inputs = {subject.described.removeprefix(f"{subject.name}, ") for subject, _ in found}
    about = f"{next(iter(inputs))}, " if len(inputs) == 1 else ""
    output.result(f"{about}{domain}\n")
    kinds = ("certified", "paper") if constants is o.Constants.both else (constants.value,)
    flags: dict[str, None] = {}
    for kind in kinds:
        chosen = [(subject.name, each[kind]) for subject, each in found]
        if len(kinds) > 1:
            output.result(("" if kind == kinds[0] else "\n") + _TITLES[kind])
        searched = any(each.estimate is not None for _, each in chosen)
        output.table((*_HEAD, _FOUND) if searched else _HEAD, _rows(chosen, searched))
        flags |= dict.fromkeys(flag for _, each in chosen for flag in each.flags)
    if flags:
        output.result("\n* not an upper bound, because it rests on this:")
        for flag in flags:
            output.result(f"  {flag}")
    for subject, each in found:
        certificate = each[kinds[0]]
        if not certificate.smoothness.is_finite:
            output.result(f"\n{subject.name}: L is infinite:")
            for reason in certificate.reasons[:_REASONS]:
                output.result(f"  {reason}")


_TITLES = {"certified": "Proved:", "paper": "As the paper prints it:"}


def _rows(chosen: list[tuple[str, Certificate]], searched: bool) -> list[tuple[str, ...]]:
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
                rounded_down(each.step_size) if not each.flags else "–",
                *([f"≥ {each.estimate.smoothness}" if each.estimate is not None else "–"] if searched else []),
            )
        )
    return rows


def ratio(value: Magnitude, column: list[Any]) -> str:
    """How many times the first finite value of a column it is, as text because it may be beyond a double."""
    reference = next((each for each in column if each.is_finite and not each.is_zero), None)
    if reference is None or not value.is_finite:
        return "–"
    if value.is_zero:
        return "0"
    digits = (float(value.log2) - float(reference.log2)) * math.log10(2)
    if abs(digits) < 3:
        return f"{10**digits:.3g}"
    with localcontext(Context(prec=20, Emax=10**17, Emin=-(10**17))):
        return f"{Decimal(10) ** Decimal(digits):.1e}"


def rounded_down(step: float) -> str:
    """Four digits towards zero: a step that is printed is as safe as the one it stands for."""
    if not 0 < step < math.inf:
        return "0" if step == 0 else "∞"
    return f"{float(Context(prec=4, rounding=ROUND_DOWN).create_decimal(Decimal(step))):.3e}"
