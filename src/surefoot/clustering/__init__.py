"""Clustering objectives: functions of all outputs together, without targets.

* ``envelope``: what they have in common: each is the distance of the outputs from simple points.
* ``kmeans``: :class:`KMeans`, points in k places.
* ``spectral``: :class:`Spectral`, points in a space of dimension k.
* ``convex``: :class:`ConvexClustering`, points that pull each other together, and its inner problem.
* ``weights``: which pairs pull, and how strongly; differences along the edges of a graph.
* ``fusion``: the solver of convex clustering, with its proof of accuracy.
* ``reduced``: convex clustering with given clusters, and its derivative.
"""

from surefoot.clustering.convex import ConvexClustering
from surefoot.clustering.envelope import Envelope
from surefoot.clustering.fusion import ConvexClusteringResult
from surefoot.clustering.kmeans import KMeans, KMeansResult
from surefoot.clustering.spectral import Spectral, SpectralResult
from surefoot.clustering.weights import Edges, all_pairs, explicit, matrix, nearest_neighbours

__all__ = [
    "ConvexClustering", "ConvexClusteringResult", "Edges", "Envelope", "KMeans", "KMeansResult", "Spectral",
    "SpectralResult", "all_pairs", "explicit", "matrix", "nearest_neighbours",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
