"""Every family of operations; importing this module registers them."""

from surefoot.operations import (
    activations,
    arithmetic,
    attention,
    choices,
    cholesky_factors,
    compositions,
    conditions,
    convolution,
    formulas,
    inverses,
    layout,
    losses,
    matmul,
    matrix_exponentials,
    maxima,
    normalisation,
    normalised_by_hand,
    pooling,
    products,
    recurrent,
    scalar_functions,
    scaled,
    softmax,
    statistics,
    without_bounds,
    writing,
)

__all__ = [
    "activations", "arithmetic", "attention", "choices", "cholesky_factors", "compositions", "conditions",
    "convolution", "formulas", "inverses", "layout", "losses", "matmul", "matrix_exponentials", "maxima",
    "normalisation", "normalised_by_hand", "pooling", "products", "recurrent", "scalar_functions", "scaled",
    "softmax", "statistics", "without_bounds", "writing",
]  # fmt: skip
