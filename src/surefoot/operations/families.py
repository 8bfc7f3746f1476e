"""Every family of rules; importing this module registers them."""

from surefoot.operations import (
    arithmetic,
    choices,
    convolution,
    elementwise,
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
    "convolution",
    "elementwise",
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
