"""Reproducible small tensors for the cases."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def real(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers in double precision."""
    generator = torch.Generator().manual_seed(1000 * seed + math.prod(shape) + len(shape))
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def away(*shape: int, seed: int = 0, least: float = 2.0) -> Tensor:
    """Numbers of both signs whose absolute values are at least ``least``."""
    value = real(*shape, seed=seed)
    return torch.where(value >= 0, value + least, value - least)


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers from 0 to high - 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator)


def yes_or_no(*shape: int, seed: int = 0) -> Tensor:
    """A mask that is neither empty nor full."""
    mask = whole(2, *shape, seed=seed).bool()
    mask.view(-1)[0], mask.view(-1)[-1] = True, False
    return mask
