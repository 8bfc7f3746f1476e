"""A question about convergence: the network, its data and its objective, and what is computed from them once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from surefoot.guarantees import GuaranteeError
from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import up
from surefoot.objectives import Ridge, Square
from surefoot.theorems.balls import Profile
from surefoot.theorems.bending import Bending, layered_bending, stacked
from surefoot.theorems.hessian import square_weight
from surefoot.theorems.linear import Linearised
from surefoot.theorems.pieces import Pieces
from surefoot.theorems.record import Convergence
from surefoot.theorems.relative import is_affordable, relative_bending
from surefoot.theorems.statements import NothingHere

_ROWS = 10_000  # outputs of networks that are not layered, one adjoint pass each
_SMALL = 200  # with more outputs than this, relative constants are computed only if
_GAIN = 100.0  # at most this factor is missing
_EXCLUDED = 20_000  # parameters up to which a refusal also says how far away stationary points are
_FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)


class Problem:
    """The question, and the numbers that answer it; with several processes, process 0 asks.

    The numbers do not depend on the batches, except for round-off and for these, which are valid bounds in any
    case: K of networks that are not layered (:func:`~surefoot.theorems.bending.stacked`), how far a written
    Hessian and :math:`\\langle\\nabla h, D^2\\psi\\rangle` move on a ball (sums over batches), and how far
    stationary points are, which follows from :mod:`surefoot.certificate.pieces`.
    """

    def __init__(self, pieces: Pieces, regularizer: Ridge | None, effort: str, per_block: bool = False) -> None:
        self.thorough, self.per_block = effort == "high", per_block
        self.model, self.pieces, self.objective, self.regularizer = pieces.model, pieces, pieces.bound, regularizer
        self.parameters, self.outputs = sum(pieces.order.values()), pieces.outputs.numel()
        self._met: dict[float, Bending] = {}

    def weight(self) -> float:
        """The number c for which the objective is c times half of the squared residual, rounded up."""
        assert isinstance(self.objective, Square)
        return up(square_weight(self.objective, self.pieces.like_outputs))

    @cached_property
    def weights(self) -> dict[str, float] | None:
        """:math:`L_b` by path, where every block has its own step size."""
        return self.pieces.block_weights() if self.per_block else None

    @cached_property
    def gram(self) -> Symmetric:
        """:math:`JJ^\\top`, in norms with weights :math:`L_b`."""
        if self.outputs > _ROWS and not self.pieces.is_layered:
            raise GuaranteeError(
                f"the Jacobian has {self.outputs} rows, and only those of linear layers and element-wise "
                f"functions are computed together: take at most {_ROWS} outputs"
            )
        weights = self.weights
        return self.pieces.gram(None if weights is None else {path: 1 / w for path, w in weights.items()})

    @cached_property
    def linearised(self) -> Linearised:
        """The network at its weights."""
        return Linearised.of(self.gram, self.pieces.outputs, self.pieces.error, self.objective.chosen())

    def bending(self, radius: float) -> Bending:
        """K on a ball."""
        if radius not in self._met and self.pieces.is_layered:
            self._met[radius] = layered_bending(self.pieces, radius, self.weights)
        elif radius not in self._met:
            self._met[radius] = stacked(self.pieces.each("bending", radius, self.weights))
        return self._met[radius]

    def obstacles(self, radius: float) -> tuple[str, ...]:
        """The reasons why K is infinite on a ball."""
        return self.bending(radius).obstacles if math.isfinite(radius) else ()

    @cached_property
    def relative(self) -> float:
        """:math:`\\omega` at the weights; infinite if it would cost too much.

        It needs the slopes of all outputs in all units at once, so the batches are joined.
        """
        possible = self.thorough and not self.per_block and self.pieces.is_layered
        if not possible or not is_affordable(self.pieces.shape(), self.outputs):
            return math.inf
        layered = self.pieces.joined()
        return math.inf if layered is None else relative_bending(layered)

    def profile(self, radius: float, missing: Callable[[Profile], float]) -> Profile:
        r""":math:`\omega` on balls up to a radius: K/σ if that is enough, otherwise from :math:`\omega(0)`.

        Beyond :math:`1/\omega(0)` nothing can be proved, so the balls end there. :math:`\omega(0)` is expensive
        for large Jacobians, and left out where much is missing.
        """
        sigma = self.linearised.sigma
        centre = self.bending(0.0).constant / sigma
        profile, lacking = Profile(()), math.inf
        for sharp in (False, True):
            hopeless = sharp and self.outputs > _SMALL and lacking > _GAIN
            if sharp and (hopeless or not self.relative < centre):
                break
            centre = self.relative if sharp else centre
            end = min(radius, 1 / max(centre, 1e-290))
            end = next(
                (end / 4**k for k in range(30) if math.isfinite(self.bending(end / 4**k / 32).constant)), 0.0
            )
            profile = Profile.of(
                (part * end, self._omega(part * end, centre if sharp else math.inf)) for part in _FRACTIONS
            )
            lacking = missing(profile)
            if lacking <= 1:
                break
        return profile

    def _omega(self, radius: float, centre: float) -> float:
        """:math:`\\omega` on a ball: its value at the weights plus how far it moves, or K/σ."""
        bend, sigma = self.bending(radius), self.linearised.sigma
        return up(min(bend.constant / sigma, centre + up(bend.variation / sigma)))

    def gradient(self) -> tuple[float, float]:
        """A lower and an upper bound on the norm of the gradient at the weights."""
        slopes, errors = zip(*self.slopes.values(), strict=True)
        size, error = math.hypot(*map(frobenius_norm, slopes)), up(math.hypot(*errors))
        return max(size * (1 - 1e-9) - error, 0.0), up(size * (1 + 1e-12) + error)

    @cached_property
    def slopes(self) -> dict[str, tuple[Tensor, float]]:
        """The gradient by path of the parameter, each with a bound on the norm of its error."""
        named = dict(self.model.named_parameters())
        slopes = {}
        for path, slope, error in self._loss_slopes():
            if self.regularizer is not None:
                ridge = self.regularizer.weight_of(path) * named[path].detach().double()
                slope = slope + ridge
                error += 2.0**-51 * (frobenius_norm(ridge) + frobenius_norm(slope))
            slopes[path] = slope, error
        return slopes

    def _loss_slopes(self) -> list[tuple[str, Tensor, float]]:
        """The gradient of the loss alone."""
        if self.pieces.affine is not None and isinstance(self.objective, Square):
            return self.pieces.affine.gradient(self.weight(), self.objective.chosen())
        gradient = self.pieces.gradient()
        return [(path, slope, gradient.errors[path]) for path, slope in gradient.slopes.items()]

    def nothing(self) -> NothingHere | None:
        """The largest ball that a certificate proves to hold no stationary point; ``None`` if it is not tried."""
        if self.parameters > _EXCLUDED or not self.thorough:
            return None
        certificate = self.pieces.certificate()
        if not isinstance(certificate.radius, float) or not certificate.smoothness.is_finite:
            return None
        extra = 0.0 if self.regularizer is None else float(self.regularizer.smoothness)
        slope, smooth = self.gradient()[0], up(float(certificate.smoothness) + extra)
        radius = min(certificate.radius, slope / smooth * (1 - 1e-9)) if smooth else 0.0
        return NothingHere(slope, smooth, radius)


def not_onto(problem: Problem, advice: str = "") -> str:
    """Why the Jacobian is not proved to be onto; empty if it is."""
    if problem.outputs > problem.parameters:
        return (
            f"There are {problem.outputs} equations and {problem.parameters} parameters, so that the Jacobian is "
            f"not onto{advice}."
        )
    if not problem.linearised.sigma > 0:
        return (
            "The smallest singular value of the Jacobian is zero up to round-off: two samples may be equal, or "
            "the network may be too small to fit any targets nearby."
        )
    return ""


def refused(problem: Problem, method: str, theorem: str, why: str) -> Convergence:
    """A verdict that nothing is proved, for a reason that no factor measures."""
    return Convergence(method, theorem, False, (), missing=math.inf, advice=(why,), nothing=problem.nothing())
