"""What torch's soft-plus leaves out."""

from __future__ import annotations

import math


def softplus_gap(beta: float = 1.0, threshold: float = 20.0) -> float:
    """A bound on what torch's soft-plus differs from the function: log(1 + exp(-t)) <= exp(-t), over beta.

    A threshold below 20 is part of the function, and nothing is left out.
    """
    return math.exp(-threshold) / abs(beta) * (1 + 2.0**-50) if threshold >= 20.0 else 0.0
