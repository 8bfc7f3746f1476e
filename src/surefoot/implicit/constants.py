r"""Constants of an inner problem, and the error of an inexact solution.

Write :math:`g = \nabla_\beta\zeta`, :math:`\alpha` for the input and the parameters together, :math:`\hat\beta`
for the computed and :math:`\beta^*` for the exact minimiser, :math:`\hat H = \nabla_\beta g(\alpha, \hat\beta)`.
Over the arguments that matter let :math:`\nabla_\beta g \succeq \mu I`, :math:`\|\nabla_\alpha g\| \le L`, and let
:math:`\nabla_\alpha g` and :math:`\nabla_\beta g` be H-Lipschitz in :math:`\beta`.

*Distance.* By strong convexity :math:`\mu\|\hat\beta - \beta^*\|^2 \le \langle g(\alpha, \hat\beta) -
g(\alpha, \beta^*), \hat\beta - \beta^*\rangle`, so :math:`\|\hat\beta - \beta^*\| \le \epsilon = \|g(\alpha,
\hat\beta)\|/\mu`.

*Derivative* (the paper's Lemma approximplicitgrad). With :math:`A = \nabla_\alpha g`,

.. math:: \hat H^{-1}\hat A - H^{-1}A = \hat H^{-1}(\hat A - A) + \hat H^{-1}(H - \hat H)H^{-1}A,

of norm at most :math:`E_1 = H\mu^{-1}(1 + L\mu^{-1})\epsilon`.

*Further corrections.* The layer returns :math:`\beta_k`, where :math:`\beta_0 = \hat\beta` and :math:`\beta_{j+1}
= \beta_j - \hat H^{-1}g(\alpha, \beta_j)`, and its derivative :math:`D_j` obeys :math:`D_{j+1} = D_j - \hat
H^{-1}(\nabla_\alpha g + \nabla_\beta g\,D_j)` at :math:`\beta_j`. Let :math:`d_j = \|\beta_j - \hat\beta\|`,
:math:`\epsilon_j = \|\beta_j - \beta^*\|`, :math:`E_j = \|D_j - D^*\|`. The average of :math:`\nabla_\beta g` over
the segment from :math:`\beta^*` to :math:`\beta_j` is within :math:`\frac H2(\epsilon + d_j)` of :math:`\hat H`,
so

.. math:: \epsilon_{j+1} \le \tfrac{H}{2\mu}(\epsilon + d_j)\epsilon_j, \qquad
    E_{j+1} \le \tfrac H\mu d_jE_j + \tfrac H\mu(1 + \tfrac L\mu)\epsilon_j ,

the second as :math:`D_{j+1} - D^* = (I - \hat H^{-1}\nabla_\beta g(\beta_j))(D_j - D^*) - \hat
H^{-1}(\nabla_\alpha g(\beta_j) + \nabla_\beta g(\beta_j)D^*)`, whose last bracket vanishes at :math:`\beta^*`.
With :math:`d_0 = 0` the first step is the lemma; the second one is of order :math:`\epsilon^2`. As long as
:math:`\epsilon_j \le \epsilon` all of this happens within :math:`2\epsilon` of :math:`\hat\beta`, where the
constants have to hold; a correction that might lead farther has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from surefoot.errors import SurefootError


class ImplicitError(SurefootError, RuntimeError):
    """An inner problem could not be solved, or is not posed as it should be.

    Args:
        what: what went wrong.
        remedy: what to do next.
        residual: the norm of the gradient that was reached, if there is one; also an attribute.

    >>> print(ImplicitError("the inner problem is not strongly convex", "Add a ridge.", residual=0.5))
    The inner problem is not strongly convex (gradient norm reached: 0.5). Add a ridge.
    """

    def __init__(self, what: str, remedy: str, *, residual: float | None = None) -> None:
        self.residual = residual
        reached = "" if residual is None else f" (gradient norm reached: {residual:.3g})"
        super().__init__(f"{what[:1].upper()}{what[1:]}{reached}. {remedy}")


BETA = "beta"
Pair = tuple[str, str]


@dataclass(frozen=True)
class Constants:
    r"""Constants of :math:`\zeta(x, u, \beta)`; if every sample has its own minimiser, of a single sample.

    Smoothness and Hessian-Lipschitz constant are one number each, as in the paper, or one number per argument and
    per pair of arguments: ``{"x": 2.0, "A.weight": 1.0, "beta": 3.0}``, ``{("x", "beta"): 0.5}``. By default
    none are declared, and there are no certificates.

    Attributes:
        strong_convexity: :math:`\mu > 0`, such that :math:`\zeta - \frac\mu2\|\beta\|^2` is convex in
            :math:`\beta`.
        smoothness: a bound on :math:`\|\nabla^2\zeta\|`; by argument s, on :math:`\|\nabla^2_{\beta s}\zeta\|`.
        hessian_lipschitz: a bound on :math:`\|\nabla^3\zeta\|`; by pair, on :math:`\|\nabla^3_{\beta s
            s'}\zeta\|`, where missing pairs are zero.

    >>> sf.implicit.Constants(strong_convexity=0.5, smoothness=2.0, hessian_lipschitz=1.0).slope("x")
    2.0
    """

    strong_convexity: float
    smoothness: float | Mapping[str, float] | None = None
    hessian_lipschitz: float | Mapping[Pair, float] | None = None

    def __post_init__(self) -> None:
        mu = self.strong_convexity
        if not (isinstance(mu, int | float) and 0 < mu < math.inf):
            raise ImplicitError(
                f"the strong convexity is {mu!r}", "Pass a positive number, for example the weight of a ridge."
            )
        if (self.smoothness is None) != (self.hessian_lipschitz is None):
            raise ImplicitError("of smoothness and hessian_lipschitz one was given", "Pass both, or none.")
        for constant in (self.smoothness, self.hessian_lipschitz):
            for number in constant.values() if isinstance(constant, Mapping) else (constant,):
                if number is not None and not (isinstance(number, int | float) and number >= 0):
                    raise ImplicitError(f"a constant is {number!r}", "Pass numbers that are not negative.")

    @property
    def complete(self) -> bool:
        """Whether smoothness and Hessian-Lipschitz constant are declared, as certificates need them."""
        return self.smoothness is not None

    def slope(self, argument: str) -> float:
        r"""The bound on :math:`\|\nabla^2_{\beta s}\zeta\|` for an argument s.

        Raises:
            ImplicitError: if constants are given by argument and this one is missing.
        """
        if not isinstance(self.smoothness, Mapping):
            assert self.smoothness is not None
            return float(self.smoothness)
        if argument not in self.smoothness:
            raise ImplicitError(
                f"the smoothness has no entry for '{argument}'", f"Add it to {sorted(self.smoothness)}."
            )
        return float(self.smoothness[argument])

    def bend(self, first: str, second: str) -> float:
        r"""The bound on :math:`\|\nabla^3_{\beta ss'}\zeta\|` for a pair of arguments."""
        bound = self.hessian_lipschitz
        if not isinstance(bound, Mapping):
            assert bound is not None
            return float(bound)
        return float(max(bound.get((first, second), 0.0), bound.get((second, first), 0.0)))


# from bounds on the norms of the arguments by name, and of β as "beta" where β is not the exact minimiser
ConstantsOf = Callable[[Mapping[str, float]], Constants]


def gradient_error(constants: Constants, arguments: tuple[str, ...], distance: float, order: int) -> float:
    r"""A bound on the error of the recorded derivative of the minimiser, in the spectral norm.

    The constants are complete, and those of one sample. ``arguments``, together α, are those in which the
    minimiser is differentiated; ``distance`` is ε, a bound on the distance from the solution to the exact
    minimiser; ``order`` is the number of corrections, where 1 is the paper's lemma.
    """
    mu, bend = constants.strong_convexity, constants.bend(BETA, BETA)
    per_argument = isinstance(constants.smoothness, Mapping)
    slope = math.hypot(*map(constants.slope, arguments)) if per_argument else constants.slope(BETA)
    per_pair = isinstance(constants.hessian_lipschitz, Mapping)
    cross = math.hypot(*(constants.bend(name, BETA) for name in arguments)) if per_pair else bend
    error, left, move = slope / mu, distance, 0.0
    for _ in range(order):
        if left > distance:
            return math.inf
        error = bend / mu * move * error + (cross + bend * slope / mu) / mu * left
        left = bend / (2 * mu) * (distance + move) * left
        move = distance + left
    return error * (1 + 1e-12)
