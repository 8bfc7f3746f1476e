"""Clustering objectives: functions of all outputs together, without targets.

Each is half the squared distance of the outputs from simple points, plus a penalty. A *majoriser* is the square
loss with the nearest simple point as targets: it is above the objective and equal to it at the present outputs,
so proved steps on it descend the objective (:mod:`surefoot.clustering.objective`).

* ``objective``: :class:`Clustering`, what they share; :class:`KMeans` and :class:`Spectral`.
* ``convex``: :class:`ConvexClustering`, by accelerated dual ascent with a proved gap.
* ``edges``: which samples convex clustering pulls together.
"""

from surefoot.clustering.convex import ConvexClustering, ConvexClusteringResult
from surefoot.clustering.edges import Edges, all_pairs, explicit, matrix, nearest_neighbours
from surefoot.clustering.objective import Clustering, KMeans, KMeansResult, Spectral, SpectralResult

__all__ = [
    "Clustering", "ConvexClustering", "ConvexClusteringResult", "Edges", "KMeans", "KMeansResult", "Spectral",
    "SpectralResult", "all_pairs", "explicit", "matrix", "nearest_neighbours",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
