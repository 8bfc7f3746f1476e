"""Averages, maxima and interpolation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from operations.case import Case, Fixed, operation, pieces
from operations.tensors import real

aten = torch.ops.aten
Thunk = Callable[[], Case]


def _apart(*shape: int) -> torch.Tensor:
    """Distinct numbers, each 0.2 away from the next, in a scrambled order."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return (0.2 * (order - count // 2)).double().reshape(shape)


def _increasing(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).double().reshape(shape)


def _peaked(*shape: int) -> torch.Tensor:
    """Distinct numbers with the largest in the middle, so that it leads in every patch around it."""
    value = _apart(*shape)
    value[tuple(side // 2 for side in shape)] = 9.0
    return value


_GRID = Fixed(torch.tanh(real(2, 2, 3, 2)))
_ONE = Fixed(torch.zeros(1, 1, 1, 2, dtype=torch.float64))

CASES: dict[str, list[Thunk]] = {
    "aten.grid_sampler_2d": [
        lambda: operation(aten.grid_sampler_2d.default, real(2, 2, 3, 4), _GRID, 0, 0, False),
        lambda: operation(aten.grid_sampler_2d.default, real(2, 1, 3, 3), _GRID, 1, 1, True),
        lambda: operation(aten.grid_sampler_2d.default, real(1, 1, 3, 3), _ONE, 2, 2, False),
    ],
    "aten.grid_sampler_3d": [
        lambda: operation(
            aten.grid_sampler_3d.default, real(1, 2, 2, 2, 2), Fixed(torch.tanh(real(1, 1, 2, 2, 3))), 0, 0, True
        )
    ],
    "aten.avg_pool1d": [
        lambda: operation(aten.avg_pool1d.default, real(2, 1, 5), [2]),
        lambda: operation(aten.avg_pool1d.default, real(2, 5), [3], [2], [1], True, False),
        lambda: operation(aten.avg_pool1d.default, real(2, 1, 6), [3], [2], [1], True, True),
    ],
    "aten.avg_pool2d": [
        lambda: operation(aten.avg_pool2d.default, real(2, 1, 4, 3), [2, 1]),
        lambda: operation(aten.avg_pool2d.default, real(1, 1, 4, 3), [3, 2], [2, 1], [1, 0], True, True),
        lambda: operation(aten.avg_pool2d.default, real(1, 1, 4, 3), [3, 2], [2, 1], [1, 1], False, False),
        lambda: operation(aten.avg_pool2d.default, real(1, 4, 3), [3, 2], [2, 2], [1, 1], True, True, -2),
    ],
    "aten.avg_pool3d": [
        lambda: operation(aten.avg_pool3d.default, real(1, 1, 2, 3, 3), [2, 1, 2], [1, 2, 1], [1, 0, 1]),
        lambda: operation(aten.avg_pool3d.default, real(1, 1, 3, 3, 2), [2], [2], [0], True, True, 3),
    ],
    "aten.adaptive_avg_pool1d": [lambda: operation(aten.adaptive_avg_pool1d.default, real(2, 1, 5), [3])],
    "aten.adaptive_avg_pool2d": [
        lambda: operation(aten.adaptive_avg_pool2d.default, real(1, 1, 5, 3), [3, 2]),
        lambda: operation(aten.adaptive_avg_pool2d.default, real(1, 2, 3), [3, 1]),
    ],
    "aten.adaptive_avg_pool3d": [
        lambda: operation(aten.adaptive_avg_pool3d.default, real(1, 1, 3, 2, 3), [2, 1, 2])
    ],
    "aten.max_pool1d": [
        lambda: operation(aten.max_pool1d.default, _apart(2, 1, 5), [2]),
        lambda: operation(aten.max_pool1d.default, _increasing(1, 7), [3], [1], [1]),
        lambda: operation(aten.max_pool1d.default, _apart(2, 6), [3], [2], [1], [1], True),
    ],
    "aten.max_pool2d": [
        lambda: operation(aten.max_pool2d.default, _apart(1, 2, 4, 3), [2, 2], [1, 1]),
        lambda: operation(aten.max_pool2d.default, _apart(2, 5, 4), [2, 2], [2, 1], [1, 1], [2, 1], True),
        lambda: operation(aten.max_pool2d.default, _apart(1, 1, 7, 3), [3, 1], [2, 1], [0, 0], [2, 1], True),
        lambda: operation(aten.max_pool2d.default, torch.zeros(1, 1, 2, 2).double(), [2, 2]),
        lambda: operation(aten.max_pool2d.default, _increasing(1, 1, 3, 3), [1, 1]),
    ],
    "aten.max_pool3d": [
        lambda: operation(aten.max_pool3d.default, _apart(1, 1, 3, 3, 2), [2, 2, 2], [1, 1, 1]),
        lambda: operation(aten.max_pool3d.default, _peaked(1, 1, 3, 3, 2), [2, 2, 2], [1, 1, 1]),
    ],
    "aten.max_pool1d_with_indices": [lambda: pieces(aten.max_pool1d_with_indices.default, _apart(2, 1, 5), [2])],
    "aten.max_pool2d_with_indices": [
        lambda: pieces(aten.max_pool2d_with_indices.default, _apart(2, 1, 4, 3), [2, 2], [1, 1], [1, 0])
    ],
    "aten.max_pool3d_with_indices": [
        lambda: pieces(aten.max_pool3d_with_indices.default, _apart(1, 1, 2, 3, 2), [2])
    ],
    "aten.adaptive_max_pool1d": [lambda: pieces(aten.adaptive_max_pool1d.default, _apart(2, 1, 5), [3])],
    "aten.adaptive_max_pool2d": [
        lambda: pieces(aten.adaptive_max_pool2d.default, _apart(1, 2, 4, 3), [3, 2]),
        lambda: pieces(aten.adaptive_max_pool2d.default, _peaked(1, 1, 3, 3), [2, 2]),
    ],
    "aten.adaptive_max_pool3d": [
        lambda: pieces(aten.adaptive_max_pool3d.default, _peaked(1, 1, 3, 2, 3), [2, 1, 2])
    ],
    "aten.amax": [
        lambda: operation(aten.amax.default, _apart(3, 4), [1]),
        lambda: operation(aten.amax.default, _apart(3, 4), [0], True),
        lambda: operation(aten.amax.default, _apart(3, 4)),
    ],
    "aten.amin": [lambda: operation(aten.amin.default, _apart(3, 2, 2), [-1, 1])],
    "aten.max": [
        lambda: operation(aten.max.default, _apart(3, 4)),
        lambda: pieces(aten.max.dim, _apart(3, 4), 1),
    ],
    "aten.min": [lambda: pieces(aten.min.dim, _apart(3, 4), 0, True)],
    "aten.upsample_nearest1d": [
        lambda: operation(aten.upsample_nearest1d.vec, real(2, 1, 3), None, [1.7]),
        lambda: operation(aten.upsample_nearest1d.default, real(2, 1, 3), [5]),
        lambda: operation(aten.upsample_nearest1d.default, real(2, 1, 5), [2], 0.4),
    ],
    "aten.upsample_nearest2d": [
        lambda: operation(aten.upsample_nearest2d.vec, real(1, 1, 3, 2), None, [1.5, 2.6])
    ],
    "aten.upsample_nearest3d": [
        lambda: operation(aten.upsample_nearest3d.vec, real(1, 1, 2, 3, 2), [3, 2, 4], None)
    ],
    "aten._upsample_nearest_exact1d": [
        lambda: operation(aten._upsample_nearest_exact1d.vec, real(2, 1, 3), None, [1.7])
    ],
    "aten._upsample_nearest_exact2d": [
        lambda: operation(aten._upsample_nearest_exact2d.default, real(1, 1, 3, 3), [4, 2], 1.5, None)
    ],
    "aten._upsample_nearest_exact3d": [
        lambda: operation(aten._upsample_nearest_exact3d.vec, real(1, 1, 2, 2, 2), None, [1.5, 2.0, 1.0])
    ],
    "aten.upsample_linear1d": [
        lambda: operation(aten.upsample_linear1d.vec, real(2, 1, 3), None, True, [1.7]),
        lambda: operation(aten.upsample_linear1d.vec, real(2, 1, 3), None, False, [1.7]),
        lambda: operation(aten.upsample_linear1d.vec, real(2, 1, 5), [3], False, None),
    ],
    "aten.upsample_bilinear2d": [
        lambda: operation(aten.upsample_bilinear2d.vec, real(1, 1, 3, 2), None, False, [1.7, 2.0]),
        lambda: operation(aten.upsample_bilinear2d.vec, real(1, 1, 3, 2), [4, 5], True, None),
        lambda: operation(aten.upsample_bilinear2d.default, real(1, 1, 3, 2), [4, 5], False, None, 2.4),
    ],
    "aten.upsample_trilinear3d": [
        lambda: operation(aten.upsample_trilinear3d.vec, real(1, 1, 2, 3, 2), None, False, [1.5, 1.0, 2.0])
    ],
    "aten.upsample_bicubic2d": [
        lambda: operation(aten.upsample_bicubic2d.vec, real(1, 1, 3, 3), None, False, [1.7, 2.0]),
        lambda: operation(aten.upsample_bicubic2d.vec, real(1, 1, 3, 3), [5, 2], True, None),
    ],
    "aten._upsample_bilinear2d_aa": [
        lambda: operation(aten._upsample_bilinear2d_aa.vec, real(1, 1, 4, 5), [2, 3], False, None),
        lambda: operation(aten._upsample_bilinear2d_aa.vec, real(1, 1, 4, 1), [2, 1], False, None),
        lambda: operation(aten._upsample_bilinear2d_aa.vec, real(1, 1, 1, 4), [3, 2], True, None),
    ],
    "aten._upsample_bicubic2d_aa": [
        lambda: operation(aten._upsample_bicubic2d_aa.vec, real(1, 1, 4, 5), None, False, [0.6, 0.5])
    ],
}
