"""Tensors written into others at fixed places."""

from __future__ import annotations

from collections.abc import Callable

import torch

from operations.case import Case, Fixed, operation
from operations.tensors import real, yes_or_no

aten = torch.ops.aten
Thunk = Callable[[], Case]
_IDS = torch.tensor([[0, 2, 0], [1, 1, 1]])

CASES: dict[str, list[Thunk]] = {
    "aten.select_scatter": [
        lambda: operation(aten.select_scatter.default, real(3, 2), real(3), 1, 0),
        lambda: operation(aten.select_scatter.default, real(3, 2), real(2), 0, -1),
    ],
    "aten.slice_scatter": [
        lambda: operation(aten.slice_scatter.default, real(3, 4), real(3, 2), 1, 1, 3),
        lambda: operation(aten.slice_scatter.default, real(4, 2), real(2, 2), 0, 0, 4, 2),
    ],
    "aten.diagonal_scatter": [lambda: operation(aten.diagonal_scatter.default, real(3, 3), real(2), 1)],
    "aten.index_copy": [
        lambda: operation(aten.index_copy.default, real(3, 4), 1, torch.tensor([3, 0]), real(3, 2)),
        lambda: operation(aten.index_copy.default, real(3, 2), 0, torch.tensor([1]), real(1, 2)),
    ],
    "aten.index_fill": [
        lambda: operation(aten.index_fill.int_Scalar, real(3, 4), 1, torch.tensor([3, 0]), -2.0),
        lambda: operation(aten.index_fill.int_Tensor, real(3, 2), 0, torch.tensor([1]), Fixed(torch.tensor(3.0))),
    ],
    "aten.scatter": [
        lambda: operation(aten.scatter.src, real(2, 4), 1, torch.tensor([[0, 3], [1, 2]]), real(2, 2)),
        lambda: operation(aten.scatter.value, real(2, 4), 1, torch.tensor([[0, 3], [1, 2]]), 5.0),
        lambda: operation(aten.scatter.src, real(3, 2), 0, torch.tensor([[0, 2]]), real(1, 2)),
    ],
    "aten.masked_scatter": [
        lambda: operation(aten.masked_scatter.default, real(3, 2), yes_or_no(3, 2), real(6)),
        lambda: operation(aten.masked_scatter.default, real(3, 2), yes_or_no(2), real(3, 2)),
    ],
    "aten.index_put": [
        lambda: operation(aten.index_put.default, real(3, 4), [None, torch.tensor([0, 2])], real(3, 2)),
        lambda: operation(aten.index_put.default, real(3, 4), [None, torch.tensor([0, 2])], real(2)),
        lambda: operation(aten.index_put.default, real(3, 4), [torch.tensor([0, 2, 0])], real(3, 4), True),
        lambda: operation(aten.index_put.default, real(3, 4), [torch.tensor([0, 0]), torch.tensor([1, 1])], real(),
                          True),
        lambda: operation(aten.index_put.default, real(3, 2), [yes_or_no(3, 2)], real()),
    ],
    "aten.index_add": [
        lambda: operation(aten.index_add.default, real(2, 3), 1, torch.tensor([0, 2, 0, 0]), real(2, 4)),
        lambda: operation(aten.index_add.default, real(3, 2), 0, torch.tensor([1, 1]), real(2, 2), alpha=-2.0),
    ],
    "aten.scatter_add": [
        lambda: operation(aten.scatter_add.default, real(2, 3), 1, _IDS, real(2, 3)),
        lambda: operation(aten.scatter_add.default, real(3, 3), 0, _IDS, real(2, 3)),
    ],
    "aten.scatter_reduce": [
        lambda: operation(aten.scatter_reduce.two, real(2, 3), 1, _IDS, real(2, 3), "amax"),
        lambda: operation(aten.scatter_reduce.two, 9 * real(3, 3), 0, _IDS, real(2, 3), "amin"),
        lambda: operation(aten.scatter_reduce.two, real(2, 3), 1, _IDS, 9 * real(2, 3), "amax",
                          include_self=False),
    ],
    "aten.fill": [lambda: operation(aten.fill.Scalar, real(3, 2), -2.0)],
    "aten.diag_embed": [
        lambda: operation(aten.diag_embed.default, real(3, 2)),
        lambda: operation(aten.diag_embed.default, real(3), 1, 0, 1),
    ],
}  # fmt: skip
