"""Sums, products and quotients entry by entry."""

from __future__ import annotations

from collections.abc import Callable

import torch

from operations.case import Case, Fixed, operation
from operations.tensors import away, real, whole, yes_or_no

aten = torch.ops.aten
Thunk = Callable[[], Case]


def _twice(target: object, x: torch.Tensor) -> Case:
    return operation(target, x, x)


_SUMS: dict[str, list[Thunk]] = {
    "aten.add": [
        lambda: operation(aten.add.Tensor, real(3, 2), real(3, 2, seed=1)),
        lambda: operation(aten.add.Tensor, real(3, 1), real(1, 2), alpha=-2.5),
        lambda: operation(aten.add.Tensor, real(3), real(3, 3), alpha=2),
        lambda: operation(aten.add.Tensor, real(), real(2, 2)),
        lambda: operation(aten.add.Tensor, real(3, 2), 3.0, alpha=2.0),
        lambda: operation(aten.add.Scalar, real(3, 2), -1, 3),
        lambda: operation(aten.add.Tensor, real(3, 2), 20 + whole(9, 3, 2)),
        lambda: operation(aten.add.Tensor, real(3, 2), Fixed(real(2, scale=9.0))),
        lambda: _twice(aten.add.Tensor, real(3, 2)),
        lambda: operation(aten.add.Tensor, real(0, 2), real(1, 2)),
    ],
    "aten.sub": [
        lambda: operation(aten.sub.Tensor, real(3, 2), real(2)),
        lambda: operation(aten.sub.Tensor, real(3, 2), yes_or_no(3, 2).to(torch.int8), alpha=3),
    ],
    "aten.rsub": [
        lambda: operation(aten.rsub.Scalar, real(3, 2), 4.0, 2.0),
        lambda: operation(aten.rsub.Tensor, real(3, 2), real(2), alpha=-3.0),
    ],
    "aten.sum": [
        lambda: operation(aten.sum.default, real(3, 2)),
        lambda: operation(aten.sum.dim_IntList, real(3, 2, 2), [-1, 1]),
        lambda: operation(aten.sum.dim_IntList, real(3, 2, 2), [0], True),
        lambda: operation(aten.sum.dim_IntList, real(3, 2), []),
        lambda: operation(aten.sum.dim_IntList, real(3, 2), None),
        lambda: operation(aten.sum.dim_IntList, real(3, 2), [1], True, dtype=torch.float64),
        lambda: operation(aten.sum.default, real()),
        lambda: operation(aten.sum.dim_IntList, real(), [0]),
        lambda: operation(aten.sum.dim_IntList, real(3, 0), [1]),
    ],
    "aten.mean": [
        lambda: operation(aten.mean.default, real(3, 2)),
        lambda: operation(aten.mean.dim, real(3, 2, 2), [1, 2], True),
        lambda: operation(aten.mean.dim, real(3, 2), [0]),
        lambda: operation(aten.mean.dim, real(3, 2), []),
        lambda: operation(aten.mean.dim, real(3, 2), None),
    ],
    "aten.cumsum": [
        lambda: operation(aten.cumsum.default, real(5), 0),
        lambda: operation(aten.cumsum.default, real(2, 4), -1),
        lambda: operation(aten.cumsum.default, real(), 0),
    ],
}

_PRODUCTS: dict[str, list[Thunk]] = {
    "aten.mul": [
        lambda: operation(aten.mul.Tensor, real(3, 2), real(3, 2, seed=1)),
        lambda: operation(aten.mul.Tensor, real(3, 1), real(1, 2)),
        lambda: operation(aten.mul.Tensor, real(2), real(3, 2)),
        lambda: operation(aten.mul.Tensor, real(3), real(3, 3)),
        lambda: operation(aten.mul.Tensor, real(), real(3, 2)),
        lambda: operation(aten.mul.Tensor, real(3, 1, 2), real(4, 1)),
        lambda: operation(aten.mul.Tensor, real(3, 2), -1.7),
        lambda: operation(aten.mul.Scalar, real(3, 2), 3),
        lambda: operation(aten.mul.Tensor, real(3, 2), yes_or_no(3, 1)),
        lambda: operation(aten.mul.Tensor, real(3, 2), (100 + whole(9, 3, 2)).to(torch.int8)),
        lambda: operation(aten.mul.Tensor, Fixed(real(3, 2)), real(3, 2, seed=1)),
        lambda: _twice(aten.mul.Tensor, real(3, 2)),
        lambda: operation(aten.mul.Tensor, real(3, 0), real(3, 1)),
    ],
    "aten.multiply": [lambda: operation(aten.multiply.Tensor, real(3, 2), real(2))],
}


def _quotients(op: str) -> list[Thunk]:
    target = getattr(aten, op)
    return [
        lambda: operation(target.Tensor, real(3, 2), away(3, 2)),
        lambda: operation(target.Tensor, real(3, 1), away(1, 2)),
        lambda: operation(target.Tensor, real(3, 2), away(2)),
        lambda: operation(target.Tensor, real(2), away(3, 1)),
        lambda: operation(target.Tensor, real(3, 2), Fixed(away(3, 1))),
        lambda: operation(target.Tensor, 5 + whole(9, 3, 2), away(3, 2)),
        lambda: operation(target.Tensor, real(3, 2), 2 + whole(9, 3, 2)),
        lambda: operation(target.Tensor, real(3, 2), real(3, 2, seed=1)),
        lambda: operation(target.Tensor, real(3, 2), -4.0),
        lambda: operation(target.Scalar, real(3, 2), 3),
        lambda: _twice(target.Tensor, away(2, 2)),
        lambda: operation(target.Tensor, torch.full((1, 1), 2.0).double(), torch.full((1, 1), -2.0).double()),
    ]


CASES: dict[str, list[Thunk]] = {
    **_SUMS,
    **_PRODUCTS,
    "aten.div": _quotients("div"),
    "aten.divide": _quotients("divide")[:1] + _quotients("divide")[-1:],
    "aten.true_divide": _quotients("true_divide")[:1] + _quotients("true_divide")[-1:],
}
