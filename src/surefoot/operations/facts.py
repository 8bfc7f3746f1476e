"""What is known of losses beyond the bounds of their rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossFacts:
    """A loss as a function of the outputs.

    Attributes:
        convex: whether it is convex.
        nonnegative: whether it is never below zero.
        quadratic: whether it is a quadratic function.
    """

    convex: bool
    nonnegative: bool
    quadratic: bool


LOSSES: dict[str, LossFacts] = {}  # by operation; each loss enters itself where its class is made
