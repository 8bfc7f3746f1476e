"""Convolutions, plain and transposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from operations.case import Case, Fixed, operation
from operations.tensors import real

aten = torch.ops.aten
Thunk = Callable[[], Case]


def _convolution(
    target: Any, x: tuple[int, ...], w: tuple[int, ...], *rest: Any, bias: int = 0, curved: bool = True
) -> Thunk:
    def build() -> Case:
        offset = real(bias, seed=2) if bias else None
        return replace(operation(target, real(*x), real(*w, seed=1), offset, *rest), curved=curved)

    return build


_c1, _c2, _c3 = aten.conv1d, aten.conv2d, aten.conv3d
_t1, _t2, _t3 = aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input

CASES: dict[str, list[Thunk]] = {
    "aten.conv1d": [
        _convolution(_c1.default, (2, 2, 4), (2, 2, 3), [2], [1], bias=2),
        _convolution(_c1.default, (2, 4, 3), (4, 2, 2), [1], [0], [1], 2),
        _convolution(_c1.default, (1, 1, 6), (1, 1, 3), [1], [2], [2]),
        _convolution(_c1.padding, (2, 1, 4), (1, 1, 2), [1], "same"),
        _convolution(_c1.padding, (1, 1, 1), (1, 1, 2), [1], "same"),
        _convolution(_c1.padding, (2, 1, 5), (2, 1, 3), [2], "valid", [2]),
        _convolution(_c1.default, (2, 4), (2, 2, 2), [1], [1], bias=2),
        _convolution(_c1.default, (2, 2, 4), (2, 2, 2), [2], bias=2),
        lambda: operation(_c1.default, Fixed(real(2, 1, 4)), real(2, 1, 2), real(2)),
        lambda: operation(_c1.default, real(2, 1, 4), Fixed(real(2, 1, 2)), Fixed(real(2))),
    ],
    "aten.conv2d": [
        _convolution(_c2.default, (2, 1, 3, 2), (2, 1, 2, 2), [1, 1], [0, 1], bias=2),
        _convolution(_c2.default, (1, 2, 3, 2), (2, 1, 2, 2), [2, 1], [1, 1], [1, 2], 2),
        _convolution(_c2.padding, (1, 1, 3, 4), (1, 1, 2, 4), [1, 1], "same", curved=False),
        _convolution(_c2.padding, (1, 1, 3, 4), (1, 1, 3, 3), [1, 1], "same", curved=False),
        _convolution(_c2.default, (2, 3, 3), (2, 2, 2, 2), bias=2, curved=False),
        _convolution(_c2.default, (2, 2, 2, 2), (2, 2, 1, 1), bias=2),
        _convolution(_c2.default, (1, 1, 4, 2), (2, 1, 2, 2), [2, 2]),
    ],
    "aten.conv3d": [
        _convolution(_c3.default, (1, 1, 2, 3, 2), (1, 1, 2, 2, 1), [1, 1, 1], [0, 1, 0], bias=1),
        _convolution(_c3.default, (1, 2, 2, 2, 2), (2, 2, 2, 2, 2), bias=2),
    ],
    "aten.conv_transpose1d": [
        _convolution(_t1, (2, 2, 3), (2, 1, 3), [2], [1], [1], bias=1),
        _convolution(_t1, (1, 4, 2), (4, 1, 2), [2], [0], [0], 2, [2]),
        _convolution(_t1, (2, 3), (2, 2, 2), [1], bias=2),
        _convolution(_t1, (2, 2, 2), (2, 2, 2), [2], bias=2),
        _convolution(_t1, (1, 1, 3), (1, 1, 2), [1], [0], [1], 1, [3]),
    ],
    "aten.conv_transpose2d": [
        _convolution(_t2, (1, 1, 2, 2), (1, 2, 2, 3), [2, 1], [0, 1], [1, 0], bias=2),
        _convolution(_t2, (1, 2, 2, 1), (2, 1, 2, 2), [1, 2], [0, 0], [0, 1], 2, [2, 1]),
        _convolution(_t2, (1, 1, 2, 2), (1, 2, 2, 2), [2, 2], bias=2),
    ],
    "aten.conv_transpose3d": [
        _convolution(_t3, (1, 1, 2, 1, 2), (1, 1, 2, 2, 1), [2, 1, 1], [1, 0, 0], [1, 0, 0]),
        _convolution(_t3, (1, 1, 1, 2, 1), (1, 2, 2, 2, 2), [2, 2, 2], bias=2),
    ],
}
