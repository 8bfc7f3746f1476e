"""Every family of rules; importing this module registers them."""

from surefoot.rules import (
    arithmetic,
    convolution,
    elementwise,
    layout,
    normalisation,
    pooling,
    products,
    softmax,
)

__all__ = [
    "arithmetic",
    "convolution",
    "elementwise",
    "layout",
    "normalisation",
    "pooling",
    "products",
    "softmax",
]
