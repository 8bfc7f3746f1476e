"""A loss in one file: √(1 + r²) − 1 of every difference r."""

from surefoot.objectives import Loss
from surefoot.operations.losses import separable
from surefoot.scalar import ScalarFunction

r = ScalarFunction.variable()


class PseudoHuber(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_{ij}(\sqrt{1 + (\hat y_{ij} - y_{ij})^2} - 1)`."""

    operation = separable("example.pseudo_huber", (1.0 + r**2.0) ** 0.5 - 1.0, nonnegative=True)
