"""The differences along the edges of a graph, and their transpose, on tensors of any device."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


class Incidence:
    r"""The map B with :math:`(Bx)_e = x_i - x_j` for an edge e = (i, j), row by row, and its transpose.

    Args:
        first: i of every edge.
        second: j of every edge.
        count: how many nodes.

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
                made = torch.sparse_csr_tensor(starts, order % max(edges, 1), signs, (self.count, edges))
                torch.mm(made, signs.new_zeros((edges, 1)))
            except RuntimeError:
                return None
        return made


def components(first: Tensor, second: Tensor, count: int) -> Tensor:
    """The connected component of every node, numbered from zero in order of their smallest nodes.

    Every node learns the smallest label among its neighbours' and then follows labels to their ends, until nothing
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
