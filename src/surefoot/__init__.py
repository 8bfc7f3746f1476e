"""Learning rates with a proof: smoothness certificates and exact optimization oracles for PyTorch models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from surefoot.loading import uncollected

__version__ = "0.1.0.dev0"

# Public names and where they live. They are loaded on first use, so that what does not compute starts at once.
_HOMES = {
    "certificate": "Certificate", "certifying": "certify evaluate", "chain": "Chain", "complexity": "cost",
    "domains": "Ball Box ProductBall Segment", "lower": "estimate",
    "objectives": "CrossEntropy Ridge Square", "operations": "register_rule",
    "optim": "CertifiedDescent GaussNewton KeepIfLower Newton ProvedEpochs", "smoothing": "smooth",
    "theorems": "convergence",
}  # fmt: skip
_NAMES = {name: f"surefoot.{home}" for home, names in _HOMES.items() for name in names.split()}
_MODULES = (
    "clustering", "data", "errors", "graph", "implicit", "objectives", "operations", "optim", "oracles", "paper",
    "report", "theorems", "zoo",
)  # fmt: skip

if TYPE_CHECKING:
    from surefoot import (
        clustering,
        data,
        errors,
        graph,
        implicit,
        objectives,
        operations,
        optim,
        oracles,
        paper,
        report,
        theorems,
        zoo,
    )
    from surefoot.certificate import Certificate
    from surefoot.certifying import certify, evaluate
    from surefoot.chain import Chain
    from surefoot.complexity import cost
    from surefoot.domains import Ball, Box, ProductBall, Segment
    from surefoot.lower import estimate
    from surefoot.objectives import CrossEntropy, Ridge, Square
    from surefoot.operations import register_rule
    from surefoot.optim import CertifiedDescent, GaussNewton, KeepIfLower, Newton, ProvedEpochs
    from surefoot.smoothing import smooth
    from surefoot.theorems import convergence

__all__ = [
    "Ball", "Box", "Certificate", "CertifiedDescent", "Chain", "CrossEntropy",
    "GaussNewton", "KeepIfLower", "Newton", "ProductBall", "ProvedEpochs", "Ridge", "Segment", "Square",
    "certify", "clustering", "convergence", "cost", "data", "errors", "estimate", "evaluate", "graph",
    "implicit", "objectives", "operations", "optim", "oracles", "paper", "register_rule", "report", "smooth",
    "theorems", "zoo",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES and name not in _MODULES:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    with uncollected():
        home = import_module(_NAMES.get(name, f"surefoot.{name}"))
    value = getattr(home, name) if name in _NAMES else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
