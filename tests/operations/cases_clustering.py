"""Clustering objectives of outputs."""

from __future__ import annotations

import torch

from operations.case import Case, operation
from operations.tensors import real
from surefoot.clustering import ConvexClustering, Envelope, KMeans, Spectral


def _case(objective: Envelope, outputs: torch.Tensor) -> Case:
    return operation(type(objective).function, outputs, op=type(objective).operation, **objective.options)


def _cut(last: float) -> torch.Tensor:
    """Outputs with a gap between the second and the third singular value."""
    return torch.diag(torch.tensor([3.0, 2.0, last, 0.1], dtype=torch.float64))


def _apart() -> torch.Tensor:
    """Two points so far apart that they pull each other with all their weight."""
    return torch.tensor([[0.0, 0.0], [30.0, 40.0]], dtype=torch.float64)


CASES = {
    "surefoot.kmeans": [
        lambda: _case(KMeans(1), real(5, 2)),
        lambda: _case(KMeans(2, reduction="sum"), real(6, 2)),
        lambda: _case(KMeans(4), real(4, 2)),
    ],
    "surefoot.spectral": [
        lambda: _case(Spectral(2), _cut(1.6)),
        lambda: _case(Spectral(2, reduction="sum"), _cut(0.5)),
        lambda: _case(Spectral(1), real(5, 3)),
        lambda: _case(Spectral(3), real(5, 3)),
    ],
    "surefoot.convex_clustering": [
        lambda: _case(ConvexClustering(penalty=5.0, tolerance=1e-12), real(5, 2)),
        lambda: _case(ConvexClustering(penalty=0.05, reduction="sum", tolerance=1e-12), real(6, 2)),
        lambda: _case(ConvexClustering(reduction="sum", tolerance=1e-12), _apart()),
    ],
}
