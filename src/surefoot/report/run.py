"""A training run as a page: the loss by work, promised and actual decreases, and the bound on the gradient."""

from __future__ import annotations

import itertools
import math
import operator
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from surefoot.certificate.numbers import count, down, readable, upper
from surefoot.magnitude import Magnitude
from surefoot.optim import GuaranteedOptimizer, StepRecord
from surefoot.optim.record import best_stationarity, last_run
from surefoot.report import rules
from surefoot.report.growth import Quantity, drawn, ticks
from surefoot.report.page import ReportError, rendered, written
from surefoot.report.summary import Figure, in_digits

_MOST_PLACES = 400  # in a chart; longer runs leave out some steps
_MOST_ROWS = 120
_HEAD = ("step", "loss", "gradient", "step size", "promised", "decrease")


def write_run(
    path: str | os.PathLike[str],
    optimizer: GuaranteedOptimizer,
    *,
    title: str | None = None,
    work: Sequence[float] | None = None,
) -> Path:
    """Write the page of a training run and return its path; the file appears complete or not at all.

    Args:
        path: the HTML file, in an existing folder.
        optimizer: the optimizer that trained, with its history.
        title: title of the page; by default the name of the optimizer.
        work: the work before each step, in gradients or any other unit; by default steps are counted.

    Raises:
        ReportError: if no step was taken, or the work is not that of these steps.
        OSError: if the file cannot be written.

    >>> import tempfile, torch, surefoot as sf
    >>> model, x = nn.Linear(2, 1), torch.eye(2)
    >>> optimizer = sf.CertifiedDescent(model, sf.Square())
    >>> losses = [optimizer.step(x, torch.ones(2, 1)) for _ in range(3)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sf.report.write_run(f"{folder}/run.html", optimizer).name
    'run.html'
    """
    return written(path, render_run(optimizer, title=title, work=work))


def render_run(
    optimizer: GuaranteedOptimizer, *, title: str | None = None, work: Sequence[float] | None = None
) -> str:
    """The page as a string; see :func:`write_run`.

    >>> optimizer = sf.CertifiedDescent(nn.Linear(2, 1), sf.Square())
    >>> loss = optimizer.step(torch.eye(2), torch.ones(2, 1))
    >>> "A run of CertifiedDescent" in sf.report.render_run(optimizer)
    True
    """
    history = optimizer.history
    if not history:
        raise ReportError("a report of a run shows its steps, and none is in the history: take steps first")
    if not isinstance(history[0], StepRecord):
        raise ReportError(f"a report of a run shows steps, and {type(optimizer).__name__} keeps other records")
    if work is not None and len(work) != len(history):
        raise ReportError(f"work is what was spent before each of {len(history)} steps, got {len(work)} numbers")
    made, kept = promises(optimizer)
    if not made:
        kind, word = "idle", "Nothing was promised"
    elif made == kept:
        kind, word = "good", "Every promise was kept"
    else:
        kind, word = "open", "A promise was broken"
    claim, proof = rules.summary(best_stationarity.__doc__)
    stated = optimizer.stationarity()
    chosen = [round(k) for k in _spread(len(history), _MOST_PLACES)]
    return rendered(
        "run.html.j2",
        title=title or f"A run of {type(optimizer).__name__}",
        word=word,
        kind=kind,
        guarantee=in_digits(str(getattr(optimizer, "guarantee", ""))),
        figures=_figures(history, made, kept, stated.smallest, stated.bound),
        bounded=stated.bound is not None,
        why=stated.why,
        charts=list(_charts(history, chosen, work, optimizer.lower)),
        head=_HEAD,
        rows=[_cells(history[round(k)]) for k in _spread(len(history), _MOST_ROWS)],
        steps=len(history),
        claim=claim,
        proof=proof,
    )


def promises(optimizer: GuaranteedOptimizer) -> tuple[int, int]:
    """The number of steps that promised a decrease and whose actual decrease is known, and how many kept it.

    A promise holds in exact arithmetic, so the round-off of the losses is allowed for.
    """
    real = next(
        (p.dtype for p in optimizer.model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )
    slack = 64 * torch.finfo(real).eps  # round-off relative to the loss
    excess = [
        r.actual_decrease - r.promised_decrease + slack * max(abs(r.loss), 1.0)
        for r in optimizer.history
        if r.promised_decrease is not None and r.actual_decrease is not None
    ]
    return len(excess), sum(each >= 0 for each in excess)


def _spread(size: int, most: int) -> list[float]:
    """All positions of a list, or ``most`` of them, evenly from the first to the last."""
    return [k * (size - 1) / (most - 1) for k in range(most)] if size > most else list(range(size))


def _figures(
    history: Sequence[StepRecord], made: int, kept: int, smallest: float, bound: float | None
) -> list[Figure]:
    first, last = history[0].loss, history[-1].loss
    shown = [
        Figure(
            "F", "objective", readable(f"{last:.3e}"), f"before the last step; {readable(f'{first:.3e}')} at first"
        ),
        Figure("N", "steps", count(len(history)), f"{count(sum(r.step_size > 0 for r in history))} were taken"),
        Figure("p", "promises kept", f"{count(kept)} of {count(made)}", "whose outcome is known"),
        Figure("‖∇F‖", "smallest gradient", readable(f"{smallest:.3e}"), "that was seen"),
    ]
    if bound is not None:
        shown.append(Figure("‖∇F‖", "proved", upper(Magnitude.of(bound)), "at most this, from the promises alone"))
    return shown


def _charts(
    history: Sequence[StepRecord], chosen: Sequence[int], work: Sequence[float] | None, lower: float
) -> Iterable[dict[str, Any]]:
    """The charts, each with its title, its curves, and the texts that appear under the pointer."""
    records = [history[k] for k in chosen]
    reading = 0.0  # the work of reading the model once: what the first step took beyond the others
    if work is not None and len(work) > 2:
        reading = max(work[1] - work[0] - statistics.median(map(operator.sub, work[2:], work[1:])), 0.0)
    spent = [float(history[k].step) if work is None else work[k] - reading * (k > 0) for k in chosen]
    unit = "steps" if work is None else "gradients"
    what, lead = "step" if work is None else "work", f"The objective before each step, by {unit} spent."
    lead += f" Reading the model, once, took {reading:.0f} more." if reading else ""
    losses: list[Quantity] = [("F", "objective", [_size(r.loss) for r in records])]
    yield _chart("loss", f"Loss by {what}", lead, losses, records, spent, unit)
    if any(r.promised_decrease for r in records):
        sizes: list[Quantity] = [
            ("p", "promised", [_size(r.promised_decrease) for r in records]),
            ("a", "actual", [_size(r.actual_decrease) for r in records]),
        ]
        lead = "How much each step promised to lower the objective before it was taken, and how much it did."
        yield _chart("promises", "Promised and actual decrease", lead, sizes, records, spent, unit)
    if best_stationarity(history, lower).bound is None:
        return
    run = last_run(history)
    since = len(history) - len(run)
    bounds = {history[k].step: best_stationarity(run[: k + 1 - since], lower).bound for k in chosen if k >= since}
    lowest = itertools.accumulate((r.stationarity for r in run), min)
    best = {r.step: size for r, size in zip(run, lowest, strict=True)}
    sizes = [
        ("g", "smallest seen", [_size(best.get(r.step)) for r in records]),
        ("b", "proved bound", [_size(bounds.get(r.step)) for r in records]),
    ]
    lead = "The smallest gradient so far, and what the promises prove about it without looking."
    yield _chart("gradient", "Gradient", lead, sizes, records, spent, unit)


def _chart(
    name: str, title: str, lead: str, quantities: list[Quantity], records: Sequence[StepRecord],
    spent: Sequence[float], unit: str,
) -> dict[str, Any]:  # fmt: skip
    width = max(*spent, 1.0) if len(spent) > 1 else 1.0
    texts = [["" if value is None else upper(value) for value in values] for _, _, values in quantities]
    rows = [
        [f"step {r.step}", f"after {readable(down(at))} {unit}", *shown]
        for r, at, *shown in zip(records, spent, *texts, strict=True)
    ]
    curves = drawn(quantities, [min(at, width) for at in spent], width, ticks(width))
    names = [name for _, name, _ in quantities]
    return {"id": name, "title": title, "lead": lead, "curves": curves, "unit": unit,
            "data": {"rows": rows, "names": names, "places": curves.places, "width": width}}  # fmt: skip


def _size(value: float | None) -> Magnitude | None:
    """A value for a logarithmic axis; ``None`` if it is negative or not a number."""
    return Magnitude.of(value) if value is not None and 0 <= value < math.inf else None


def _cells(record: StepRecord) -> tuple[str, ...]:
    shown = (record.gradient_norm, record.step_size, record.promised_decrease, record.actual_decrease)
    return (str(record.step), f"{record.loss:.6g}", *("–" if v is None else readable(f"{v:.2e}") for v in shown))
