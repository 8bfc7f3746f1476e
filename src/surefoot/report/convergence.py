"""A verdict about convergence as a page: the result, its verified hypotheses, the theorem and its proof."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable
from pathlib import Path

from surefoot.certificate.numbers import count, down, power_of_ten, readable
from surefoot.guarantees import GuaranteeError
from surefoot.report import rules
from surefoot.report.page import rendered, written
from surefoot.report.summary import Figure
from surefoot.theorems.record import METHODS, Convergence, most

_DIGITS = (1, 3, 6, 9)  # decimal digits by which the objective is lowered


def write_convergence(path: str | os.PathLike[str], verdict: Convergence, *, title: str | None = None) -> Path:
    """Write the page of a verdict and return its path; the file appears complete or not at all.

    Args:
        path: the HTML file, in an existing folder.
        verdict: the result of :func:`surefoot.convergence`.
        title: title of the page; by default the name of the method.

    Raises:
        OSError: if the file cannot be written.

    >>> import tempfile, torch, surefoot as sf
    >>> model, x = nn.Linear(2, 1).double(), torch.eye(2).double()
    >>> verdict = sf.convergence(model, x, sf.Square(model(x).detach() + 1e-6))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sf.report.write_convergence(f"{folder}/proof.html", verdict).name
    'proof.html'
    """
    return written(path, render_convergence(verdict, title=title))


def render_convergence(verdict: Convergence, *, title: str | None = None) -> str:
    """The page as a string; see :func:`write_convergence`.

    >>> model, x = nn.Linear(2, 1).double(), torch.eye(2).double()
    >>> verdict = sf.convergence(model, x, sf.Square(model(x).detach() + 1e-6))
    >>> "Convergence of Gauss-Newton" in sf.report.render_convergence(verdict)
    True
    """
    name = METHODS[verdict.method]
    claim, proof = rules.summary(type(verdict.statement).__doc__ if verdict.statement is not None else None)
    return rendered(
        "convergence.html.j2",
        title=title or f"Convergence of {name}",
        method=name,
        verdict=verdict,
        figures=_figures(verdict),
        iterations=_iterations(verdict),
        blocks=verdict.block_step_sizes or {},
        missing=[] if verdict.proved else verdict.remarks,
        claim=claim,
        proof=proof,
        json=base64.b64encode(verdict.to_json(indent=None).encode()).decode(),
    )


def _figures(verdict: Convergence) -> list[Figure]:
    """The numbers that follow from the theorem, or the factor that is missing."""
    if not verdict.proved:
        return [Figure("f", "factor", readable(most(verdict.missing)), "by which a hypothesis fails")]
    shown: list[tuple[str, str, float | None, Callable[[float], str], str]] = [
        ("ρ", "radius", verdict.radius, most, "no step leaves this ball"),
        ("t", "distance", verdict.distance, most, "of the limit from the weights"),
        ("η", "step size", verdict.step_size, down, "smallest blocks" if verdict.weights else "of every step"),
        ("β", "momentum", verdict.momentum, lambda value: f"{value:.6g}", "of every step"),
        ("F", "objective", verdict.loss, most, "above its minimum at the weights"),
    ]
    return [
        Figure(symbol, name, readable(written_as(value)), meaning)
        for symbol, name, value, written_as, meaning in shown
        if value is not None
    ]


def _iterations(verdict: Convergence) -> list[tuple[str, str]]:
    """Accuracies and the numbers of steps that reach them."""
    if not verdict.proved:
        return []
    first = math.floor(math.log10(verdict.loss)) if verdict.loss else -3
    shown = []
    for power in [first - digits for digits in _DIGITS if first - digits > -300]:
        try:
            shown.append((power_of_ten(power), count(verdict.iterations(10.0**power))))
        except GuaranteeError:
            break
    return shown
