"""Every family of rules; importing this module registers them."""

from surefoot.rules import (
    arithmetic,
    choices,
    clustering,
    convolution,
    elementwise,
    implicit,
    layout,
    losses,
    matmul,
    maxima,
    normalisation,
    pooling,
    products,
    softmax,
    statistics,
)

__all__ = [
    "arithmetic",
    "choices",
    "clustering",
    "convolution",
    "elementwise",
    "implicit",
    "layout",
    "losses",
    "matmul",
    "maxima",
    "normalisation",
    "pooling",
    "products",
    "softmax",
    "statistics",
]
