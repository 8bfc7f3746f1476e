"""Entries in order, and inverses and determinants."""

from __future__ import annotations

from collections.abc import Callable

import torch

from operations.case import Case, operation, pieces
from operations.tensors import real
from surefoot.operations.inverses import inverted

aten = torch.ops.aten
Thunk = Callable[[], Case]


def _apart(*shape: int) -> torch.Tensor:
    """Entries that differ by three at least."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return 3.0 * order.double().reshape(shape)


def _diagonal(*numbers: float) -> torch.Tensor:
    return torch.diag(torch.tensor(numbers, dtype=torch.float64))


CASES: dict[str, list[Thunk]] = {
    "aten.sort": [
        lambda: pieces(aten.sort.default, real(3, 4)),
        lambda: pieces(aten.sort.default, _apart(3, 4), 0, True),
        lambda: pieces(aten.sort.stable, _apart(2, 3), stable=True),
    ],
    "aten.topk": [
        lambda: pieces(aten.topk.default, real(3, 4), 2),
        lambda: pieces(aten.topk.default, _apart(2, 4), 1),
    ],
    "aten.kthvalue": [
        lambda: pieces(aten.kthvalue.default, real(3, 4), 2),
        lambda: pieces(aten.kthvalue.default, _apart(3, 2), 1, 0),
    ],
    "aten.median": [
        lambda: pieces(aten.median.dim, real(3, 5), 1),
        lambda: operation(aten.median.default, _apart(3, 3)),
    ],
    "aten.cummax": [
        lambda: pieces(aten.cummax.default, real(3, 4), 1),
        lambda: pieces(aten.cummax.default, torch.tensor([[9.0, 1.0, 5.0]]).double(), 1),
    ],
    "aten.cummin": [
        lambda: pieces(aten.cummin.default, real(3, 4), 0),
        lambda: pieces(aten.cummin.default, torch.tensor([[-9.0, 1.0, 5.0]]).double(), 1),
    ],
    "aten.linalg_inv": [
        lambda: operation(inverted, _diagonal(4.0, 5.0, -7.0), op="aten.linalg_inv"),
        lambda: operation(inverted, 9 * torch.eye(2).double() + real(3, 2, 2), op="aten.linalg_inv"),
    ],
    "aten.logdet": [
        lambda: operation(aten.logdet.default, _diagonal(5.0, 5.0)),
        lambda: operation(aten.logdet.default, 9 * torch.eye(3).double() + real(2, 3, 3)),
    ],
}
