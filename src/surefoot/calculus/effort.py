"""How much a certificate of an objective may cost, in gradients of the objective.

* ``"quick"``: products of norms, about ten gradients for each ball.
* ``"normal"``: derivatives sample by sample where samples do not interact, if that takes at most 2·10¹⁰
  multiplications of numbers, some thousand gradients: with 64 samples five layers of width 265. Two layers cost
  as much as 10⁵ of them however narrow they are, so that deeper networks than 447 layers take products of norms.
  If the variables hold at most 1,000 numbers, the second derivative at the weights is added up from them.
  Exact derivatives at the weights along every direction (:mod:`surefoot.bounds.hessian`) where they take at most
  1.5·10¹¹ multiplications: with 64 samples some hundred to two thousand weights, whatever the layers.
  Beyond, for the weights alone, Jacobians between the cuts of a network
  (:mod:`surefoot.calculus.adjoint.composed`), in at most 1,900 gradients and 3·10¹¹ multiplications. Balls are
  taken apart in few shells.
* ``"high"``: sample by sample up to 6·10¹¹, and where the variables hold at most 12,000 numbers, exact derivatives
  at the weights along every direction, about ten gradients for each number; beyond, Jacobians between cuts in
  1,900 gradients whatever their size; balls are taken apart in more shells, and the segment against the gradient
  is looked at (:mod:`surefoot.certificate.downhill`).

What a certificate states is the cost of all balls and segments that were tried for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.domains import DomainError


@dataclass(frozen=True)
class Effort:
    """What may be spent."""

    name: str  # what it is called
    products: float  # linear layers are followed sample by sample as long as these are not more multiplications
    directions: int  # all directions of the variables are followed if they are not more
    composed: float = 0.0  # what Jacobians between cuts may cost, in gradients
    multiplications: float = math.inf  # the same in multiplications
    operations: float = math.inf  # of all balls at most, if directions are followed
    balls: int = 6  # how many are tried, after the weights alone, for the longest step
    both: bool = False  # whether directions are followed whatever else can be, and whatever a direction costs
    shells: int = 0  # in how many at most a ball is then taken apart, to sum up what each adds to the curvature
    downhill: bool = False  # whether the segment against the gradient is looked at
    whole: float = 0.0  # what the second derivative in all weights together may cost, in multiplications
    parts: int = 1  # how many of them reach as far as the longest step of these balls, or a ball that is given

    def follows(self, directions: int, operations: int, work: float, balls: int = 1) -> bool:
        """Whether all directions are followed, of a model with so many operations that takes so many
        multiplications, if so many balls are looked at.
        """
        once = 3 * _ONE_DIRECTION * work  # a gradient is three times the model
        affordable = operations * balls <= self.operations and directions * once <= self.products
        return 0 < directions <= self.directions and (self.both or affordable)

    def searching(self, operations: int) -> Effort:
        """Without shells after the search for the longest step, where directions are followed and these would be
        too many balls.
        """
        enough = operations * (1 + self.balls + self.shells) <= self.operations
        return self if enough else replace(self, shells=0)

    def separates(self, widths: Sequence[int], count: int) -> bool:
        """Whether layers of these widths are followed sample by sample."""
        return count * sum(widths) ** 2 * max(widths) + _PAIR * len(widths) ** 2 <= self.products

    def adds_up(self, numbers: int, count: int) -> bool:
        """Whether the second derivative in so many numbers is added up, sample by sample."""
        return 0 < numbers <= self.directions and (count + numbers) * numbers**2 <= _SUMMED


_SUMMED = 2e9  # multiplications that add up a second derivative and find its norm
_PAIR = 1e5  # multiplications that take as long as the calls for two layers
QUICK = Effort("quick", 0.0, 0)
NORMAL = Effort("normal", 2e10, 1000, 1900.0, 3e11, 1500, shells=8, whole=1.5e11, parts=4)
HIGH = Effort("high", 6e11, 12_000, 1900.0, both=True, shells=64, downhill=True, whole=5e13, parts=8)
ONE_OF_MANY = replace(NORMAL, parts=1)  # a ball beside which others are tried
_ONE_DIRECTION, _ONE_UNIT, _ONE_EXPANSION = 10, 10, 20  # gradients, measured
ONE_BALL, AROUND_DIRECTIONS, AROUND_SAMPLES = 10, 30, 90  # for each ball: norms, and what starts from the centre


def effort_named(name: str) -> Effort:
    """The effort of this name."""
    for effort in (QUICK, NORMAL, HIGH):
        if effort.name == name:
            return effort
    raise DomainError(f"effort is 'quick', 'normal' or 'high', got {name!r}")


def in_gradients(
    widths: Sequence[int] = (), weights: int = 0, directions: int = 0, expansions: int = 0, numbers: int = 0
) -> int:
    """The cost in gradients: of linear layers of these widths with so many weights that are followed sample by
    sample, of directions, and of a second derivative in so many numbers that is added up, once for all balls, and
    of expansions along a segment.

    A gradient multiplies every weight with every sample a few times; sample by sample the derivatives of
    every layer in every other are products of matrices.
    """
    separate = _ONE_UNIT * sum(widths) ** 2 * max(widths) / max(1, weights) if widths else 0.0
    return round(separate + numbers + _ONE_DIRECTION * directions + _ONE_EXPANSION * expansions)
