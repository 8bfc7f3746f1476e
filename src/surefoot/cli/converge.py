"""What ``surefoot converge`` does: steps until convergence is proved, and the theorem with its numbers."""

from __future__ import annotations

from pathlib import Path

import surefoot as sf
from surefoot.cli import output
from surefoot.cli.cases import trainable
from surefoot.cli.guard import Outcome, UsageError, writing
from surefoot.cli.options import Start
from surefoot.report import write_convergence
from surefoot.theorems import until_proved
from surefoot.theorems.deciding import Method

METHODS: dict[str, Method] = {
    "gauss-newton": "gauss_newton",
    "damped": "damped",
    "gradient": "gradient",
    "momentum": "momentum",
    "stochastic": "stochastic",
    "newton": "newton",
}


def prove(
    start: Start, batch: int, steps: int, method: str, ridge: float, json: bool, report: Path | None
) -> Outcome:
    """Train on some samples until a theorem applies; Gauss-Newton steps, or Newton's for other objectives."""
    if method not in METHODS:
        raise UsageError(f"--method is one of {', '.join(METHODS)}, got {method!r}")
    parts = trainable(start, test=0.0)
    x, y = parts.train.x[:batch], parts.train.y
    if y is None:
        raise UsageError(
            f"--objective {start.objective} has no targets: convergence is proved for those that have"
        )
    regularizer = sf.Ridge(ridge) if ridge else None
    interpolates = isinstance(parts.objective, sf.Square) and regularizer is None
    kind, called = (sf.optim.GaussNewton, "Gauss-Newton") if interpolates else (sf.optim.Newton, "Newton")
    optimizer = kind(parts.model, parts.objective, regularizer=regularizer)
    objective = parts.objective.bound_to(y[:batch])
    with output.working("taking steps until convergence is proved"):
        taken, verdict = until_proved(
            lambda: optimizer.step(x, y[:batch]), parts.model, x, objective, regularizer, METHODS[method], steps
        )
    if report is not None:  # before anything is printed: a closed pipe does not lose it
        name = f"Convergence of {start.model} on {len(x)} samples of {start.data}, after {taken} steps"
        with writing(report, "--report"):
            write_convergence(report, verdict, title=name)
        output.note(f"the report is in {report}")
    if json:
        output.document({"model": start.model, "data": start.data, "samples": len(x), "steps": taken,
                         "convergence": verdict.to_dict()})  # fmt: skip
    else:
        output.result(f"{start.model} on {len(x)} samples of {start.data}, after {taken} {called} steps\n")
        output.result(str(verdict))
    return Outcome.CERTIFIED if verdict.proved else Outcome.NOT_CERTIFIED
