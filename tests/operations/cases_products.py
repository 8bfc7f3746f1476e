"""Fully-connected layers, matrix products, scale and shift, forms of three tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from operations.case import Case, Fixed, operation, traced
from operations.tensors import real
from surefoot.operations.scaled import scale_shift

aten = torch.ops.aten
Thunk = Callable[[], Case]


def _shifted(*args: object) -> Case:
    return operation(scale_shift, *args, op="surefoot.scale_shift")


def _einsum(equation: str, *shapes: tuple[int, ...]) -> Thunk:
    return lambda: traced(
        lambda *tensors: torch.einsum(equation, *tensors),
        *(real(*shape, seed=k) for k, shape in enumerate(shapes)),
    )


def _matmul(a: tuple[int, ...], b: tuple[int, ...]) -> Thunk:
    return lambda: operation(aten.matmul.default, real(*a), real(*b, seed=1))


def _itself(target: object, x: torch.Tensor) -> Case:
    return operation(target, x, x)


def _rank_one(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def _lstm_step(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.lstm_cell(x, (h, c), w, v)


def _lstm_tensors() -> list[torch.Tensor]:
    return [real(2, 3), real(2, 2, seed=1), real(2, 2, seed=4), real(8, 3, seed=2), real(8, 2, seed=3)]


CASES: dict[str, list[Thunk]] = {
    "surefoot.gated_state": [
        lambda: traced(torch.gru_cell, real(2, 3), real(2, 2, seed=1), real(6, 3, seed=2), real(6, 2, seed=3))
    ],
    "surefoot.gated_cell": [lambda: traced(_lstm_step, *_lstm_tensors())],
    "surefoot.gated_output": [lambda: traced(_lstm_step, *_lstm_tensors())],
    "aten.linear": [
        lambda: operation(aten.linear.default, real(3, 2), real(4, 2), real(4)),
        lambda: operation(aten.linear.default, real(2, 3, 2), real(2, 2), real(2)),
        lambda: operation(aten.linear.default, real(3), real(2, 3), real(2)),
        lambda: operation(aten.linear.default, real(3, 2), real(4, 2)),
        lambda: operation(aten.linear.default, Fixed(real(3, 2)), real(4, 2), real(4)),
        lambda: operation(aten.linear.default, real(3, 2), Fixed(real(4, 2)), Fixed(real(4))),
        lambda: _itself(aten.linear.default, real(3, 3)),
        lambda: operation(aten.linear.default, real(3, 2), real(2)),
        lambda: operation(aten.linear.default, real(0, 2), real(4, 2), real(4)),
        lambda: operation(aten.linear.default, real(3, 0), real(2, 0), real(2)),
    ],
    "aten.addmm": [
        lambda: operation(aten.addmm.default, real(4), real(3, 2), real(2, 4)),
        lambda: operation(aten.addmm.default, real(3, 1), real(3, 2), real(2, 4)),
        lambda: operation(aten.addmm.default, real(3, 4), real(3, 2), real(2, 4), beta=-2, alpha=0.5),
        lambda: operation(aten.addmm.default, real(1, 4), real(3, 2), real(2, 4), alpha=0),
        lambda: operation(aten.addmm.default, real(), real(3, 2), real(2, 4)),
    ],
    "surefoot.scale_shift": [
        lambda: _shifted(real(3, 2, 2), real(2), real(2, seed=1), 1),
        lambda: _shifted(real(2, 2, 3), real(2, 3), real(2, 3, seed=1), 1),
        lambda: _shifted(real(3, 2), real(3, 2, seed=1), real(3, 2, seed=2), 0),
        lambda: _shifted(real(2, 2, 3), real(3), None, 2),
        lambda: _shifted(real(3, 2, 2), None, real(2), 1),
        lambda: _shifted(real(3, 3), real(3), real(3, seed=1), 1),
        lambda: _shifted(real(3, 2), Fixed(torch.ones(2)), real(2), 1),
        lambda: _shifted(real(0, 2), real(2), real(2, seed=1), 1),
    ],
    "aten.matmul": [
        _matmul((3,), (3,)),
        _matmul((3,), (3, 2)),
        _matmul((2, 3), (3,)),
        _matmul((2, 3), (3, 2)),
        _matmul((2, 2, 3), (3, 2)),
        _matmul((2, 3), (2, 3, 2)),
        _matmul((2, 2, 3), (2, 3, 2)),
        _matmul((2, 2, 3), (3,)),
        _matmul((3,), (2, 3, 2)),
        _matmul((2, 1, 2, 2), (3, 2, 2)),
        _matmul((1, 2, 2), (3, 2, 2)),
        _matmul((2, 2, 3), (2, 2, 3, 2)),
        _matmul((3, 1, 2, 1), (1, 2, 1, 2)),
        lambda: _itself(aten.matmul.default, real(3, 3)),
        lambda: operation(aten.matmul.default, real(3, 2), Fixed(real(2, 2))),
        lambda: operation(aten.matmul.default, real(3, 2).T, real(3, 2)),
        lambda: operation(aten.matmul.default, real(2, 0), real(0, 2)),
        lambda: operation(aten.matmul.default, real(0, 2, 2), real(0, 2, 2)),
        _einsum("ij,jk->ik", (2, 3), (3, 2)),
        _einsum("bij,bkj->bik", (2, 2, 3), (2, 2, 3)),
        _einsum("bhid,bhjd->bhij", (2, 1, 2, 2), (2, 1, 3, 2)),
        _einsum("bhij,bjhd->bihd", (1, 2, 2, 2), (1, 2, 2, 2)),
        _einsum("...ij,...jk->...ik", (2, 2, 3), (2, 3, 2)),
        _einsum("...ij,...jk->...ik", (1, 2, 2), (3, 2, 2)),
        _einsum("...ij,jk->...ik", (2, 2, 2), (2, 3)),
        _einsum("... i, ... i -> ...", (3, 2), (3, 2)),
        _einsum("i,j->ij", (3,), (2,)),
        _einsum("i,i->", (3,), (3,)),
        _einsum("ij,k->k", (2, 3), (2,)),
        _einsum("ij,jk", (2, 3), (3, 2)),
        _einsum("ba,ca", (2, 3), (2, 3)),
        _einsum("ij,ij->j", (1, 2), (3, 2)),
        _einsum("ij,ji->", (2, 1), (1, 2)),
        lambda: traced(lambda x: torch.einsum("ij,kj->ik", x, x), real(2, 3)),
    ],
    "aten.mm": [lambda: operation(aten.mm.default, real(3, 2), real(2, 4))],
    "aten.bmm": [lambda: operation(aten.bmm.default, real(3, 2, 2), real(3, 2, 2, seed=1))],
    "aten.mv": [lambda: operation(aten.mv.default, real(3, 2), real(2))],
    "aten.dot": [
        lambda: operation(aten.dot.default, real(3), real(3, seed=1)),
        lambda: _itself(aten.dot.default, real(3)),
    ],
    "aten.vdot": [lambda: operation(aten.vdot.default, real(3), real(3, seed=1))],
    "aten.outer": [lambda: operation(aten.outer.default, real(3), real(2))],
    "aten.bilinear": [
        lambda: operation(aten.bilinear.default, real(3, 2), real(3, 2, seed=1), real(2, 2, 2), real(2)),
        lambda: operation(aten.bilinear.default, real(2, 2, 2), real(2, 2, 1), real(2, 2, 1)),
        lambda: operation(aten.bilinear.default, real(2), real(3), real(2, 2, 3), real(2)),
        lambda: operation(aten.bilinear.default, _rank_one(2, 2), _rank_one(2, 2), _rank_one(1, 2, 2), real(1)),
    ],
}
