"""Learning rates with a proof: smoothness certificates and exact optimization oracles for PyTorch models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Public names and where they live. They are loaded on first use, so that what does not compute starts at once.
_NAMES = {
    "Ball": "surefoot.domains",
    "Box": "surefoot.domains",
    "Certificate": "surefoot.certificate",
    "CertifiedDescent": "surefoot.optim",
    "Chain": "surefoot.chain",
    "Convergence": "surefoot.theorems",
    "CrossEntropy": "surefoot.objectives",
    "ElasticNet": "surefoot.objectives",
    "GaussNewton": "surefoot.optim",
    "Magnitude": "surefoot.magnitude",
    "Newton": "surefoot.optim",
    "ProductBall": "surefoot.domains",
    "ProvedEpochs": "surefoot.optim",
    "Ridge": "surefoot.objectives",
    "Segment": "surefoot.domains",
    "Square": "surefoot.objectives",
    "certify": "surefoot.certifying",
    "convergence": "surefoot.theorems",
    "cost": "surefoot.complexity",
    "estimate": "surefoot.lower",
    "evaluate": "surefoot.certifying",
    "register_rule": "surefoot.operations",
    "smooth": "surefoot.smoothing",
}
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
    from surefoot.magnitude import Magnitude
    from surefoot.objectives import CrossEntropy, ElasticNet, Ridge, Square
    from surefoot.operations import register_rule
    from surefoot.optim import CertifiedDescent, GaussNewton, Newton, ProvedEpochs
    from surefoot.smoothing import smooth
    from surefoot.theorems import Convergence, convergence

__all__ = [
    "Ball", "Box", "Certificate", "CertifiedDescent", "Chain", "Convergence", "CrossEntropy", "ElasticNet",
    "GaussNewton", "Magnitude", "Newton", "ProductBall", "ProvedEpochs", "Ridge", "Segment", "Square",
    "certify", "clustering", "convergence", "cost", "data", "errors", "estimate", "evaluate", "graph",
    "implicit", "objectives", "operations", "optim", "oracles", "paper", "register_rule", "report", "smooth",
    "theorems", "zoo",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"surefoot.{name}")
    else:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
