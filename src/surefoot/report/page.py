"""Write a page.

It needs no network, no server and no script: style, drawings and data are inside it, and its content security
policy allows nothing else. Every name that comes from a model is escaped by the template engine.
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

from surefoot.errors import SurefootError
from surefoot.report.document import run_document
from surefoot.report.views import comparison, in_digits, view


class ReportError(SurefootError, ValueError):
    """There is nothing to report, or it is nothing that a page can show."""


def write_report(path: str | os.PathLike[str], subject: Any, *, title: str | None = None) -> Path:
    """Write the page and return its path; the file appears complete or not at all.

    Args:
        path: the HTML file, in an existing folder.
        subject: a certificate, a verdict of convergence, an optimizer with its history, or the dictionary of one
            of them; or several: a list, or a mapping from names.
        title: title of the page; by default made of the names.

    Raises:
        ReportError: if there is nothing to show.
        OSError: if the file cannot be written.

    >>> import tempfile
    >>> certificate = sf.certify(nn.Linear(2, 1), torch.eye(2), domain=sf.Ball(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sf.report.write_report(f"{folder}/page.html", {"linear": certificate}).name
    'page.html'
    """
    page = render_report(subject, title=title)
    with written_whole(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return Path(path)


def render_report(subject: Any, *, title: str | None = None) -> str:
    """The page as a string; see :func:`write_report`."""
    documents = _documents(subject)
    views = [view(document, name, f"part-{k}") for k, (name, document) in enumerate(documents)]
    names = [each["name"] for each in views]
    style = _template("page.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return str(
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title or ", ".join(names),
            views=views,
            comparison=comparison(views),
            style=style,
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        )
    )


def fragment(document: Mapping[str, Any]) -> str:
    """One document as a part of another page, such as a notebook."""
    module = _environment().get_template("parts.html.j2").module
    return (
        f'<div class="surefoot"><style>{_template("page.css")}</style>{module.part(view(document, "", ""))}</div>'
    )


def _documents(subject: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and documents of what is to be shown."""
    if isinstance(subject, Mapping) and "schema" not in subject:
        named = list(subject.items())
    elif isinstance(subject, Sequence) and not isinstance(subject, str):
        named = [each if isinstance(each, tuple) else ("", each) for each in subject]
    else:
        named = [("", subject)]
    documents = []
    for name, each in named:
        if hasattr(each, "history"):
            if not each.history:
                raise ReportError("a page of a run shows its steps, and none is in the history: take steps first")
            each = run_document(each)
        elif hasattr(each, "to_dict"):
            each = each.to_dict()
        if not isinstance(each, Mapping) or "schema" not in each:
            raise ReportError(f"a page shows certificates, runs and verdicts, got {type(each).__name__}")
        documents.append((str(name), each))
    if not documents:
        raise ReportError("a page shows one certificate, run or verdict at least, and there is none")
    return documents


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


@cache
def _template(name: str) -> str:
    return files("surefoot.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("surefoot.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    templates.filters["digits"] = in_digits
    return templates
