"""Which pairs of samples convex clustering pulls together, how strongly, and differences along these pairs."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.clustering.kmeans import PACKAGES, positive
from surefoot.loading import optional
from surefoot.objectives.constants import ObjectiveError

LARGEST = 2**22  # the largest number of pairs


@dataclass(frozen=True, eq=False)
class Edges:
    """A graph of the samples: the two ends of every edge, and its positive weight.

    >>> edges = sf.clustering.Edges(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.ones(2), count=3)
    >>> len(edges)
    2
    """

    first: Tensor
    second: Tensor
    weights: Tensor
    count: int

    def __len__(self) -> int:
        return len(self.weights)

    @cached_property
    def incidence(self) -> Incidence:
        """Differences along the edges."""
        return Incidence(self.first, self.second, self.count)

    def to(self, device: torch.device) -> Edges:
        """The edges on a device."""
        if self.weights.device == device:
            return self
        return Edges(self.first.to(device), self.second.to(device), self.weights.to(device), self.count)


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
    return kept(first, second, weights, len(flat))


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
    pairs = torch.as_tensor(edges)
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.is_floating_point() or pairs.dtype == torch.bool:
        raise ObjectiveError(
            f"edges are pairs of sample numbers, E × 2 whole numbers, got {tuple(pairs.shape)} of {pairs.dtype}"
        )
    pairs = pairs.detach().long()
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
    return kept(pairs[:, 0], pairs[:, 1], values.to(pairs.device, torch.float64), samples)


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
    return kept(first, second, values[first, second], len(values))


def kept(first: Tensor, second: Tensor, weights: Tensor, count: int) -> Edges:
    """Edges of positive weight; refuses weights that are negative or not finite."""
    if not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise ObjectiveError("weights are finite numbers ≥ 0")
    pulls = weights > 0
    return Edges(first[pulls].contiguous(), second[pulls].contiguous(), weights[pulls], count)


class Incidence:
    r"""The map B with :math:`(Bx)_e = x_i - x_j` for an edge e = (i, j), row by row, and its transpose.

    >>> b = Incidence(torch.tensor([0, 0]), torch.tensor([1, 2]), 3)
    >>> b.differences(torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)).T.tolist()
    [[-1.0, -3.0]]
    >>> b.sums(torch.tensor([[1.0], [10.0]], dtype=torch.float64)).T.tolist()
    [[11.0, -1.0, -10.0]]
    """

    def __init__(self, first: Tensor, second: Tensor, count: int) -> None:
        self.first, self.second, self.count = first, second, count
        self._transpose = self._sparse()
        self._scratch: Tensor | None = None

    def __len__(self) -> int:
        return len(self.first)

    def degrees(self, amounts: Tensor) -> Tensor:
        """The sum of amounts of the edges at every node."""
        total = torch.zeros(self.count, dtype=amounts.dtype, device=amounts.device)
        return total.index_add_(0, self.first, amounts).index_add_(0, self.second, amounts)

    def differences(self, nodes: Tensor, out: Tensor | None = None) -> Tensor:
        """Bx, an edge per row."""
        shape = (len(self), nodes.shape[1])
        out = nodes.new_empty(shape) if out is None else out
        if self._scratch is None or self._scratch.shape != shape:
            self._scratch = nodes.new_empty(shape)
        torch.index_select(nodes, 0, self.first, out=out)
        torch.index_select(nodes, 0, self.second, out=self._scratch)
        return out.sub_(self._scratch)

    def sums(self, edges: Tensor, out: Tensor | None = None) -> Tensor:
        """Bᵀz, a node per row."""
        out = edges.new_empty((self.count, edges.shape[1])) if out is None else out
        if self._transpose is not None:
            return torch.mm(self._transpose, edges, out=out)
        return out.zero_().index_add_(0, self.first, edges).index_add_(0, self.second, edges, alpha=-1)

    def _sparse(self) -> Tensor | None:
        """Bᵀ by compressed rows, twenty times as fast as adding at indices; ``None`` where torch cannot."""
        edges = len(self)
        node = torch.cat([self.first, self.second])
        order = torch.argsort(node, stable=True)
        starts = torch.zeros(self.count + 1, dtype=torch.long, device=node.device)
        torch.cumsum(torch.bincount(node, minlength=self.count), 0, out=starts[1:])
        signs = torch.where(order < edges, 1.0, -1.0).to(torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls this layout a beta
            try:
                transpose = torch.sparse_csr_tensor(starts, order % max(edges, 1), signs, (self.count, edges))
                torch.mm(transpose, signs.new_zeros((edges, 1)))
            except RuntimeError:
                return None
        return transpose


def components(first: Tensor, second: Tensor, count: int) -> Tensor:
    """The connected component of every node, numbered from zero in order of their smallest nodes.

    Every node takes the smallest label among its neighbours and then follows labels to their ends, until nothing
    changes.

    >>> components(torch.tensor([0, 3]), torch.tensor([2, 4]), 5).tolist()
    [0, 1, 0, 2, 2]
    """
    label = torch.arange(count, device=first.device)
    while True:
        low = torch.minimum(label[first], label[second])
        new = label.clone()
        for end in (first, second):
            new.scatter_reduce_(0, end, low, "amin")  # the nodes themselves
            new.scatter_reduce_(0, label[end], low, "amin")  # and the nodes they point to
        while not torch.equal(new, new[new]):
            new = new[new]
        if torch.equal(new, label):
            return torch.unique(label, return_inverse=True)[1]
        label = new
