"""The report: certificates as one self-contained page.

The page needs no network and no server: style, script, drawings and data are inside it, and its content security
policy allows nothing else. Every name that comes from a model is escaped by the template engine; the script
inserts text only as text, and gets names as JSON with ``<``, ``>``, ``&`` and ``'`` escaped.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.attained import Estimate
from surefoot.certificate import Certificate
from surefoot.certificate.notebook import environment
from surefoot.certificate.numbers import shape_text, upper
from surefoot.certificate.rows import MODEL, lines
from surefoot.errors import SurefootError
from surefoot.report import summary
from surefoot.report.blocks import architecture, blocks, heat
from surefoot.report.growth import curves
from surefoot.report.rules import errata, families
from surefoot.report.summary import comparison
from surefoot.report.variants import WhatIf

Named = Sequence[tuple[str, Certificate]]
Estimates = Mapping[str, Estimate] | Sequence[Estimate | None]


class ReportError(SurefootError, ValueError):
    """There is nothing to report, or the arguments do not fit together."""


def write_report(
    path: str | os.PathLike[str],
    certificates: Named,
    *,
    title: str | None = None,
    estimates: Estimates | None = None,
    what_if: Mapping[str, WhatIf] | None = None,
) -> Path:
    """Write the report of one certificate, or of several that are compared with the first, and return its path.

    The file appears complete or not at all: the page is written to a temporary file that then takes its place.

    Args:
        path: the HTML file, in an existing folder.
        certificates: names and certificates.
        title: title of the page; by default made of the names.
        estimates: lower bounds by name, or in the order of the certificates; by default those attached to them.
        what_if: results of :func:`~surefoot.report.what_if` by name, for other radii and layers.

    Raises:
        ReportError: if there is no certificate, or the estimates do not fit.
        Contradiction: if a value was attained that a certificate excludes.
        OSError: if the file cannot be written.

    >>> import tempfile, torch, surefoot as sf
    >>> certificate = sf.certify(nn.Linear(2, 1), torch.eye(2), domain=sf.Ball(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sf.report.write_report(f"{folder}/page.html", [("linear", certificate)]).name
    'page.html'
    """
    return written(path, render_report(certificates, title=title, estimates=estimates, what_if=what_if))


def written(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page into a file, whole or not at all."""
    with written_whole(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return Path(path)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to, beside ``path``; it replaces ``path`` when the body ends without an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem[:100]}-", suffix=path.suffix, dir=path.absolute().parent)
    os.close(handle)
    try:
        yield Path(name)
        os.umask(mask := os.umask(0))
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~mask
        os.chmod(name, mode)  # a temporary file is private; the result has the usual permissions
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def render_report(
    certificates: Named,
    *,
    title: str | None = None,
    estimates: Estimates | None = None,
    what_if: Mapping[str, WhatIf] | None = None,
) -> str:
    """The page as a string; see :func:`write_report`.

    >>> certificate = sf.certify(nn.Linear(2, 1), torch.eye(2), domain=sf.Ball(0.1))
    >>> "Certificate of linear" in sf.report.render_report([("linear", certificate)])
    True
    """
    if not certificates:
        raise ReportError("a report shows one certificate or more, and none was given")
    lower = _estimates(certificates, estimates)
    names, only = zip(*certificates, strict=True)
    others = [(what_if or {}).get(name, WhatIf()) for name in names]
    return rendered(
        "report.html.j2",
        title=title or f"{'Certificate' if len(names) == 1 else 'Certificates'} of {_listed(names)}",
        models=[_model(*each) for each in zip(range(1, len(only) + 1), names, only, lower, others, strict=True)],
        comparison=comparison(certificates),
        families=families(only),
        errata=errata(only),
        as_printed=any(c.constants != "certified" for c in only),
        has_scalar=any(c.scalar for c in only),
        has_segment=any(summary.is_along_a_segment(c) for c in only),
    )


def rendered(template: str, **variables: Any) -> str:
    """A page with the style and the script of all reports."""
    style, script = _asset("report.css"), _asset("report.js")
    return (
        _environment()
        .get_template(template)
        .render(version=__version__, style=style, script=script, policy=_policy(style, script), **variables)
    )


def _model(
    number: int, name: str, certificate: Certificate, estimate: Estimate | None, other: WhatIf
) -> dict[str, Any]:
    """The variables of the template for one certificate."""
    rows, drawn = certificate.rows, heat(certificate)
    boxes = architecture(certificate)
    radii = summary.by_radius(certificate, other.radii)
    return {
        "id": f"model-{number}",
        "name": name,
        "certificate": certificate,
        "where": summary.where(certificate),
        "verdict": summary.verdict(certificate),
        "figures": summary.figures(certificate),
        "iterations": summary.iterations(certificate),
        "brackets": list(summary.brackets(certificate, estimate)),
        "parts": summary.parts(certificate),
        "limits": summary.limits(certificate),
        "lines": lines(rows),
        "operations": len(rows),
        "has_constants": any(row.slope is not None or row.curvature is not None for row in rows),
        "architecture": boxes,
        "radii": radii,
        "variants": [("as it is", certificate), *other.variants] if other.variants else [],
        "curves": curves(rows),
        "heat": drawn,
        "blocks": blocks(certificate),
        "data": {
            "rows": [[row.module or MODEL, f"{row.operation}, {shape_text(row.shape)}",
                      *map(upper, (row.bound, row.lipschitz, row.smoothness))] for row in rows],
            "names": ["m", "ℓ", "L"],
            "boxes": [] if boxes is None else [box.facts for box in boxes.boxes],
            "radii": radii,
            "blocks": [] if drawn is None else drawn.names,
            "cells": [] if drawn is None else drawn.values,
        },
        "json": base64.b64encode(certificate.to_json(indent=None).encode()).decode(),
        "file": f"{''.join(c if c.isalnum() or c in '-_' else '-' for c in name)[:60] or 'certificate'}.json",
    }  # fmt: skip


def _estimates(certificates: Named, estimates: Estimates | None) -> list[Estimate | None]:
    """One estimate or none for each certificate."""
    if isinstance(estimates, Mapping):
        names = {name for name, _ in certificates}
        if unknown := sorted(set(estimates) - names):
            raise ReportError(
                f"estimates were given for {_listed(unknown)}, but the certificates are those of "
                f"{_listed(sorted(names))}"
            )
        estimates = [estimates.get(name) for name, _ in certificates]
    if estimates is None:
        estimates = [None] * len(certificates)
    if len(estimates) != len(certificates):
        raise ReportError(
            f"{len(estimates)} estimates were given for {len(certificates)} certificates: give one for each, or "
            "None"
        )
    return [c.estimate if one is None else one for one, (_, c) in zip(estimates, certificates, strict=True)]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _policy(style: str, script: str) -> str:
    """The content security policy: this style, this script, and nothing else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> str:
    return files("surefoot.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    templates = environment("surefoot.report")
    templates.filters |= {"in_digits": summary.in_digits, "ratio": summary.ratio, "verdict": summary.verdict}
    return templates
