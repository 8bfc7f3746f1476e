"""What fixed indices, masks and conditions choose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from operations.case import Case, Fixed, operation, pieces
from operations.tensors import real, whole, yes_or_no

aten = torch.ops.aten
Thunk = Callable[[], Case]

CASES: dict[str, list[Thunk]] = {
    "aten.embedding": [
        lambda: operation(aten.embedding.default, real(5, 2), torch.tensor([[0, 3, 3], [3, 1, 0]])),
        lambda: operation(aten.embedding.default, real(5, 2), torch.tensor([4, 1])),
        lambda: operation(aten.embedding.default, real(5, 2), torch.tensor(4)),
    ],
    "aten.embedding_bag": [
        lambda: pieces(aten.embedding_bag.default, real(5, 2), torch.tensor([0, 3, 3, 1]), torch.tensor([0, 2])),
        lambda: pieces(
            aten.embedding_bag.default, real(5, 2), torch.tensor([0, 3, 3, 1, 3]), torch.tensor([0, 2]), False, 1
        ),
        lambda: pieces(
            aten.embedding_bag.padding_idx,
            real(5, 2),
            torch.tensor([0, 3, 3, 1]),
            torch.tensor([0, 3, 4]),
            False,
            1,
            False,
            None,
            True,
            3,
        ),
    ],
    "aten.index_select": [
        lambda: operation(aten.index_select.default, real(3, 2), 0, torch.tensor([1, 1, 1])),
        lambda: operation(aten.index_select.default, real(3, 4), -1, torch.tensor([3, 0, 3])),
    ],
    "aten.index": [
        lambda: operation(aten.index.Tensor, real(3, 4), [torch.tensor([0, -3, 1])]),
        lambda: operation(aten.index.Tensor, real(3, 4), [None, torch.tensor([3, 3, -1])]),
        lambda: operation(aten.index.Tensor, real(3, 2, 3), [None, torch.tensor([0, 1]), torch.tensor([2, 2])]),
        lambda: operation(
            aten.index.Tensor, real(2, 2, 2, 2), [None, torch.tensor([0, 1]), None, torch.tensor([1, 1])]
        ),
        lambda: operation(aten.index.Tensor, real(3, 3), [torch.tensor([[0], [2]]), torch.tensor([[1, 1]])]),
        lambda: operation(aten.index.Tensor, real(3, 3), [torch.tensor([True, False, True])]),
    ],
    "aten.gather": [
        lambda: operation(aten.gather.default, real(3, 4), 1, torch.tensor([[0, 0, 0], [1, 2, 1], [3, 3, 0]])),
        lambda: operation(aten.gather.default, real(3, 4), -2, torch.tensor([[0, 1], [0, 2]])),
    ],
    "aten.take_along_dim": [
        lambda: operation(aten.take_along_dim.default, real(1, 4), torch.tensor([[0], [0], [2]]), 1),
        lambda: operation(aten.take_along_dim.default, real(3, 4), torch.tensor([[3, 3, 1]]), -1),
        lambda: operation(aten.take_along_dim.default, real(2, 2), torch.tensor([3, 3, 0])),
    ],
    "aten.where": [
        lambda: operation(aten.where.self, yes_or_no(3, 2), real(3, 2), real(3, 2, seed=1)),
        lambda: operation(aten.where.self, yes_or_no(3, 1), real(1, 2), real(3, 1)),
        lambda: operation(aten.where.self, yes_or_no(2), real(3, 1), real()),
        lambda: operation(aten.where.ScalarOther, yes_or_no(3, 2), real(3, 2), -7.0),
        lambda: operation(aten.where.ScalarSelf, yes_or_no(3, 2), 5.0, real(3, 2)),
        lambda: operation(aten.where.self, yes_or_no(3, 2), real(3, 2), 50 + whole(9, 3, 2)),
        lambda: (lambda x: operation(aten.where.self, yes_or_no(3, 2), x, x))(real(3, 2)),
    ],
    "aten.masked_fill": [
        lambda: operation(aten.masked_fill.Scalar, real(3, 2), yes_or_no(3, 1), -4.0),
        lambda: operation(aten.masked_fill.Scalar, real(3, 2), yes_or_no(2), 0),
        lambda: operation(aten.masked_fill.Tensor, real(3, 2), yes_or_no(3, 2), Fixed(torch.tensor(6.0))),
        lambda: operation(aten.masked_fill.Tensor, real(3, 2), yes_or_no(3, 2), torch.tensor(60)),
        lambda: operation(aten.masked_fill.Scalar, real(1, 2), yes_or_no(3, 1), -4.0),
    ],
    "aten.zeros_like": [lambda: operation(aten.zeros_like.default, real(3, 2))],
    "aten.ones_like": [lambda: operation(aten.ones_like.default, real(3, 2))],
    "aten.full_like": [lambda: operation(aten.full_like.default, real(3, 2), -2.5)],
    "aten.new_zeros": [lambda: operation(aten.new_zeros.default, real(3, 2), [2, 2])],
    "aten.new_ones": [lambda: operation(aten.new_ones.default, real(3, 2), [2, 2])],
    "aten.new_full": [lambda: operation(aten.new_full.default, real(3, 2), [4], 3)],
}
