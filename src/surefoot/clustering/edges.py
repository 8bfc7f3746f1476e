"""Which pairs of samples convex clustering pulls together, how strongly, and differences along these pairs."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.clustering.objective import PACKAGES, positive
from surefoot.errors import ObjectiveError
from surefoot.loading import optional

LARGEST = 2**22  # the largest number of pairs


@dataclass(frozen=True, eq=False)
class Edges:
    r"""A graph of the samples: the two ends of every edge, and its positive weight.

    B is the map with :math:`(Bx)_e = x_i - x_j` for an edge e = (i, j), row by row.

    >>> edges = sf.clustering.Edges(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.ones(2), count=3)
    >>> len(edges), edges.differences(torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
    (2, [-1.0, -2.0])
    """

    first: Tensor
    second: Tensor
    weights: Tensor
    count: int

    def __len__(self) -> int:
        return len(self.weights)

    def to(self, device: torch.device) -> Edges:
        if self.weights.device == device:
            return self
        return Edges(self.first.to(device), self.second.to(device), self.weights.to(device), self.count)

    def degrees(self, amounts: Tensor) -> Tensor:
        """The sum of amounts of the edges at every sample."""
        total = torch.zeros(self.count, dtype=amounts.dtype, device=amounts.device)
        return total.index_add_(0, self.first, amounts).index_add_(0, self.second, amounts)

    def differences(self, samples: Tensor) -> Tensor:
        """Bx, an edge per row."""
        return samples.index_select(0, self.first).sub_(samples.index_select(0, self.second))

    def sums(self, edges: Tensor) -> Tensor:
        """Bᵀz, a sample per row."""
        if self._transpose is not None:
            return torch.mm(self._transpose, edges)
        total = edges.new_zeros((self.count, edges.shape[1]))
        return total.index_add_(0, self.first, edges).index_add_(0, self.second, edges, alpha=-1)

    @cached_property
    def _transpose(self) -> Tensor | None:
        """Bᵀ by compressed rows, twenty times as fast as adding at indices; ``None`` where torch cannot."""
        node = torch.cat([self.first, self.second])
        order = torch.argsort(node, stable=True)
        starts = torch.zeros(self.count + 1, dtype=torch.long, device=node.device)
        torch.cumsum(torch.bincount(node, minlength=self.count), 0, out=starts[1:])
        signs = torch.where(order < len(self), 1.0, -1.0).to(torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls this layout a beta
            try:
                transpose = torch.sparse_csr_tensor(starts, order % len(self), signs, (self.count, len(self)))
                torch.mm(transpose, signs.new_zeros((len(self), 1)))
            except RuntimeError:
                return None
        return transpose

    def components(self, joined: Tensor) -> Tensor:
        """The connected component of every sample, where only edges that are marked join."""
        graphs = optional("scipy.sparse.csgraph", PACKAGES, "convex clustering", ObjectiveError)
        sparse = optional("scipy.sparse", PACKAGES, "convex clustering", ObjectiveError)
        ends = [end[joined].cpu().numpy() for end in (self.first, self.second)]
        matrix = sparse.coo_matrix((joined[joined].cpu().numpy(), ends), shape=(self.count, self.count))
        return torch.as_tensor(
            graphs.connected_components(matrix, directed=False)[1], dtype=torch.long, device=self.first.device
        )


def all_pairs(count: int, device: torch.device | str = "cpu") -> Edges:
    """Every pair of samples once, with weight 1, as in the paper; refused if there are too many.

    >>> sf.clustering.all_pairs(4).weights.numel()
    6
    """
    pairs = count * (count - 1) // 2
    if pairs > LARGEST:
        raise ObjectiveError(
            f"{count} samples have {pairs:,} pairs, more than {LARGEST:,}: use neighbours, "
            "ConvexClustering(weights='knn'), or give edges"
        )
    first, second = torch.triu_indices(count, count, 1, device=device)
    return Edges(first, second, torch.ones(pairs, dtype=torch.float64, device=device), count)


def nearest_neighbours(points: Tensor, neighbours: int = 10, bandwidth: float | None = None) -> Edges:
    r"""Samples joined to their nearest ones, with weights :math:`\exp(-\|x_i - x_j\|^2/(2b^2))`.

    A pair is joined if either is among the nearest of the other.

    Args:
        points: n × d, or n times any shape.
        neighbours: the smallest number of neighbours that each sample is joined to.
        bandwidth: b; by default the median length of an edge.

    Raises:
        ObjectiveError: if there are too few samples, they are not finite, or scikit-learn is not installed.

    >>> edges = sf.clustering.nearest_neighbours(torch.arange(6.0)[:, None], 1)
    >>> list(zip(edges.first.tolist(), edges.second.tolist()))[:2]
    [(0, 1), (1, 2)]
    """
    count = positive(neighbours, "neighbours")
    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise ObjectiveError(f"the bandwidth is a positive number, got {bandwidth!r}")
    if points.dim() < 1 or len(points) <= count:
        raise ObjectiveError(
            f"{count} neighbours need more than {count} samples, got points of shape {tuple(points.shape)}"
        )
    flat = points.detach().reshape(len(points), -1).to(torch.float64)
    if not bool(torch.isfinite(flat).all()):
        raise ObjectiveError("the points have entries that are not finite, and no nearest ones")
    library = optional("sklearn.neighbors", PACKAGES, "the search for neighbours", ObjectiveError)
    indices = library.NearestNeighbors(n_neighbors=count).fit(flat.cpu().numpy()).kneighbors(return_distance=False)
    other = torch.as_tensor(indices.reshape(-1), dtype=torch.long, device=flat.device)
    samples = torch.arange(len(flat), device=flat.device).repeat_interleave(count)
    pairs = torch.unique(torch.minimum(samples, other) * len(flat) + torch.maximum(samples, other))
    first, second = pairs // len(flat), pairs % len(flat)
    lengths = torch.linalg.vector_norm(flat[first] - flat[second], dim=1)
    width = float(lengths.median()) if bandwidth is None else bandwidth
    weights = torch.exp(-0.5 * (lengths / width).square()) if width > 0 else torch.ones_like(lengths)
    return _positive_edges(first, second, weights, len(flat))


def explicit(edges: Any, weights: Any = None, count: int | None = None) -> Edges:
    """Edges given as pairs of sample numbers (E × 2), with a weight each.

    Args:
        edges: E × 2 whole numbers.
        weights: E numbers ≥ 0; ones by default. Pairs that occur twice count with both weights.
        count: number of samples; by default one more than the largest sample number.

    Raises:
        ObjectiveError: if a number is out of range, an edge joins a sample to itself, or a weight is negative.

    >>> sf.clustering.explicit([(0, 1), (1, 2)]).weights.tolist()
    [1.0, 1.0]
    """
    pairs = torch.as_tensor(edges).detach()
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.is_floating_point() or pairs.dtype == torch.bool:
        raise ObjectiveError(
            f"edges are pairs of sample numbers, E × 2 whole numbers, got {tuple(pairs.shape)} of {pairs.dtype}"
        )
    pairs = pairs.long()
    samples = count if count is not None else int(pairs.max()) + 1 if len(pairs) else 0
    if len(pairs) and (int(pairs.min()) < 0 or int(pairs.max()) >= samples):
        raise ObjectiveError(
            f"an edge names a sample out of range: numbers go from 0 to {samples - 1}, got "
            f"{int(pairs.min())} to {int(pairs.max())}"
        )
    if bool((pairs[:, 0] == pairs[:, 1]).any()):
        raise ObjectiveError("an edge joins a sample to itself: leave it out")
    values = torch.ones(len(pairs), device=pairs.device) if weights is None else torch.as_tensor(weights).detach()
    if values.shape != pairs.shape[:1]:
        raise ObjectiveError(f"there is one weight per edge, {len(pairs)} of them, got {tuple(values.shape)}")
    return _positive_edges(pairs[:, 0], pairs[:, 1], values.to(pairs.device, torch.float64), samples)


def matrix(weights: Tensor) -> Edges:
    """Edges from a symmetric matrix of weights, zero where samples are not joined.

    >>> sf.clustering.matrix(torch.tensor([[0.0, 2.0], [2.0, 0.0]])).weights.tolist()
    [2.0]
    """
    values = weights.detach().to(torch.float64)
    if values.dim() != 2 or values.shape[0] != values.shape[1] or not torch.equal(values, values.mT):
        raise ObjectiveError(
            f"a matrix of weights is square and symmetric, got one of shape {tuple(values.shape)}"
        )
    first, second = torch.triu_indices(len(values), len(values), 1, device=values.device)
    return _positive_edges(first, second, values[first, second], len(values))


def _positive_edges(first: Tensor, second: Tensor, weights: Tensor, count: int) -> Edges:
    """Edges of positive weight; refuses weights that are negative or not finite."""
    if not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise ObjectiveError("weights are finite numbers ≥ 0")
    pulls = weights > 0
    return Edges(first[pulls].contiguous(), second[pulls].contiguous(), weights[pulls], count)
