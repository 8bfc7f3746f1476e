"""What is asked about convergence: the network, its data and its objective, and what is computed of them once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import ProvedGradient, proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.certificate.proving import certify_proved
from surefoot.certificate.record import Certificate
from surefoot.certificate.summed import ProvedSum
from surefoot.domains import Ball
from surefoot.guarantees import GuaranteeError
from surefoot.norms import frobenius_norm
from surefoot.norms.blocked import Symmetric
from surefoot.norms.hermitian import up
from surefoot.objectives import Objective, Ridge, Square
from surefoot.operations.common import separate
from surefoot.scalar import Rounded
from surefoot.theorems.affine import Affine
from surefoot.theorems.balls import Profile
from surefoot.theorems.bending import Bending, bending
from surefoot.theorems.hessian import square_weight
from surefoot.theorems.layered import Layered, layer_weights, read_layers
from surefoot.theorems.linear import (
    Jacobian,
    Linearised,
    block_weights,
    gram_of,
    jacobian_rows,
    linearise,
    linearised,
)
from surefoot.theorems.pieces import Pieces
from surefoot.theorems.record import Convergence, Hypothesis
from surefoot.theorems.relative import is_affordable, relative_bending
from surefoot.theorems.samples import Single, outputs_of_samples, single_samples
from surefoot.theorems.statements import NothingHere

_ROWS = 10_000  # outputs of networks that are not layered, one adjoint pass each
_SMALL = 200  # outputs from which relative constants are only computed if at most
_GAIN = 100.0  # this factor is missing
_EXCLUDED = 20_000  # parameters up to which a refusal also says how far away stationary points are
_FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)


class Problem:
    """What was asked of one batch, and what is computed once."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        objective: Objective,
        regularizer: Ridge | None,
        effort: str,
        per_block: bool = False,
    ) -> None:
        self.thorough, self.per_block = effort == "high", per_block
        self.model, self.x, self.objective, self.regularizer = model, x, objective, regularizer
        self.whole = Analysis.of(model, x, objective)
        self.whole.require_values()
        self.network = Analysis.of(model, x)
        self.layered: Layered | None = read_layers(self.network)
        graph = self.network.reading.graph
        self.parameters = sum(graph.numel(leaf.name) for leaf in graph.parameters if leaf.trainable)
        self.outputs = graph.numel(graph.outputs[0])
        self._met: dict[float, Bending] = {}

    def on_one_batch(self) -> Problem:
        """The same about all data as one batch."""
        return self

    def weight(self) -> float:
        """The objective is this times half of the squared residual; rounded up."""
        assert isinstance(self.objective, Square)
        outputs = self.network.centre[self.network.reading.graph.outputs[0]]
        return up(square_weight(self.objective, outputs))

    @cached_property
    def affine(self) -> Affine | None:
        """The network, if it is affine in what is trained and its layers are not read."""
        return Affine.of(self.network) if self.layered is None else None

    @cached_property
    def jacobian(self) -> Jacobian:
        """The Jacobian at the weights: layer by layer, written out, or by panels."""
        if self.layered is not None:
            return self.layered
        if self.affine is not None:
            return self.affine.rows
        if self.outputs > _ROWS:
            raise GuaranteeError(
                f"the Jacobian has {self.outputs} rows, and only those of linear layers and element-wise "
                f"functions are computed together: take at most {_ROWS} outputs"
            )
        return jacobian_rows(self.network, outputs_of_samples(self.network))

    @cached_property
    def weights(self) -> dict[str, float] | None:
        """:math:`L_b` by path, where every block has its own step size."""
        return block_weights(self.jacobian) if self.per_block else None

    @cached_property
    def gram(self) -> Symmetric:
        """:math:`JJ^\\top`."""
        return gram_of(self.jacobian, self.weights)

    @cached_property
    def linearised(self) -> Linearised:
        """The network at its weights."""
        return linearise(self.network, self.jacobian, self.gram, self.objective.chosen())

    @cached_property
    def predictions(self) -> Rounded:
        """The outputs at the weights, samples × outputs."""
        if self.layered is not None:
            return self.layered.outputs
        if self.affine is not None:
            return self.affine.by_sample
        result = self.network.over(Ball(0.0))
        value = self.network.centre[result.outputs[0]]
        value = value.reshape(len(value), -1)
        return Rounded(value, torch.full_like(value, float(result.enclosures[result.outputs[0]].error)))

    @cached_property
    def count(self) -> int | None:
        """How many samples there are; ``None`` if they interact or are not the rows of one tensor."""
        if self.layered is not None:
            return self.layered.count
        graph, x = self.network.reading.graph, self.network.x
        outputs = self.network.centre[graph.outputs[0]]
        if not isinstance(x, Tensor) or len(graph.inputs) != 1 or not outputs.ndim or len(outputs) != len(x):
            return None
        return len(x) if separate(graph, graph.nodes, [graph.inputs[0].name], len(x)) else None

    @cached_property
    def samples(self) -> tuple[Single, ...]:
        """The network on single samples, where its layers are not read."""
        return single_samples(self.network, self.thorough) if self.layered is None else ()

    def bending(self, radius: float) -> Bending:
        """K on a ball."""
        if radius not in self._met:
            self._met[radius] = self._bending(radius)
        return self._met[radius]

    def _bending(self, radius: float) -> Bending:
        return bending(self.network, self.layered, radius, self.samples, self.weights)

    def obstacles(self, radius: float) -> tuple[str, ...]:
        """What makes K infinite on a ball."""
        return self.bending(radius).obstacles if math.isfinite(radius) else ()

    @cached_property
    def relative(self) -> float:
        """:math:`\\omega` at the weights."""
        possible = self.layered is not None and self.thorough and not self.per_block
        return relative_bending(self.layered) if self.layered is not None and possible else math.inf

    def profile(self, radius: float, missing: Callable[[Profile], float]) -> Profile:
        r""":math:`\omega` on balls up to a radius, by K/σ if that is enough, otherwise by itself at the weights.

        Beyond :math:`1/\omega(0)` nothing can be proved, so the balls end there. The second is expensive for large
        Jacobians, and left out where much is missing.
        """
        sigma = self.linearised.sigma
        centre = self.bending(0.0).constant / sigma
        found, lacking = Profile(()), math.inf
        for sharp in (False, True):
            hopeless = sharp and self.outputs > _SMALL and lacking > _GAIN
            if sharp and (hopeless or not self.relative < centre):
                break
            centre = self.relative if sharp else centre
            end = min(radius, 1 / max(centre, 1e-290))
            end = next(
                (end / 4**k for k in range(30) if math.isfinite(self.bending(end / 4**k / 32).constant)), 0.0
            )
            found = Profile.of(
                (part * end, self._omega(part * end, centre if sharp else math.inf)) for part in _FRACTIONS
            )
            lacking = missing(found)
            if lacking <= 1:
                break
        return found

    def _omega(self, radius: float, centre: float) -> float:
        """:math:`\\omega` on a ball: at the weights and how far it moves, or K/σ."""
        met, sigma = self.bending(radius), self.linearised.sigma
        return up(min(met.constant / sigma, centre + up(met.variation / sigma)))

    def proved_gradient(self) -> ProvedGradient | ProvedSum:
        """The gradient of the loss at the weights."""
        return proved_gradient(self.whole)

    def gradient(self) -> tuple[float, float]:
        """Lower and upper bound of the norm of the gradient at the weights."""
        slopes, errors = zip(*self.slopes.values(), strict=True)
        size, error = math.hypot(*map(frobenius_norm, slopes)), up(math.hypot(*errors))
        return max(size * (1 - 1e-9) - error, 0.0), up(size * (1 + 1e-12) + error)

    @cached_property
    def slopes(self) -> dict[str, tuple[Tensor, float]]:
        """The gradient by path of the parameter, and how far each part may be off in norm."""
        named = dict(self.model.named_parameters())
        found = {}
        for path, slope, error in self._slopes():
            if self.regularizer is not None:
                ridge = self.regularizer.weight_of(path) * named[path].detach().double()
                slope = slope + ridge
                error += 2.0**-51 * (frobenius_norm(ridge) + frobenius_norm(slope))
            found[path] = slope, error
        return found

    def _slopes(self) -> list[tuple[str, Tensor, float]]:
        """That of the loss."""
        if self.affine is not None and isinstance(self.objective, Square):
            return self.affine.gradient(self.weight(), self.objective.chosen())
        found = self.proved_gradient()
        return [(path, slope, found.errors[path]) for path, slope in found.slopes.items()]

    def certificate(self) -> Certificate:
        """That of the loss, on the ball of the longest step that is proved."""
        return certify_proved(self.model, self.x, objective=self.objective)

    def nothing(self) -> NothingHere | None:
        """The largest ball of those tried without a stationary point."""
        if self.parameters > _EXCLUDED or not self.thorough:
            return None
        certificate = self.certificate()
        if not isinstance(certificate.radius, float) or not certificate.smoothness.is_finite:
            return None
        extra = 0.0 if self.regularizer is None else float(self.regularizer.smoothness)
        slope, smooth = self.gradient()[0], up(float(certificate.smoothness) + extra)
        radius = min(certificate.radius, slope / smooth * (1 - 1e-9)) if smooth else 0.0
        return NothingHere(slope, smooth, radius)


class PiecewiseProblem(Problem):
    """The same about the square loss of data in pieces, under a network one layer after the other; process 0 asks.

    Constants are those of all data as one batch, up to round-off. Only how far stationary points are follows from
    the certificate of data in pieces (:mod:`surefoot.certificate.pieces`), whose constants are means over batches.
    """

    def __init__(self, pieces: Pieces, effort: str, per_block: bool) -> None:
        self.thorough, self.per_block = effort == "high", per_block
        self.model, self.pieces, self.objective, self.regularizer = pieces.model, pieces, pieces.bound, None
        trained = {path for layer in pieces.shape() for path in layer.paths}
        named = dict(self.model.named_parameters())
        self.parameters, self.outputs = sum(named[path].numel() for path in trained), pieces.outputs.value.numel()
        self.layered, self._met = None, {}
        self._effort = effort

    @cached_property
    def affine(self) -> None:
        """Layers are read."""
        return None

    def on_one_batch(self) -> Problem:
        """The same about all data, which are joined on process 0."""
        x, targets = self.pieces.joined()
        return Problem(self.model, x, self.objective.bound_to(targets), None, self._effort, self.per_block)

    def weight(self) -> float:
        """As above."""
        assert isinstance(self.objective, Square)
        return up(square_weight(self.objective, self.pieces.like_outputs))

    @cached_property
    def weights(self) -> dict[str, float] | None:
        """As above."""
        return self.pieces.block_weights() if self.per_block else None

    @cached_property
    def gram(self) -> Symmetric:
        """:math:`JJ^\\top`."""
        weights = self.weights
        return self.pieces.gram([] if weights is None else layer_weights(self.pieces.shape(), weights))

    @cached_property
    def linearised(self) -> Linearised:
        """The network at its weights."""
        return linearised(self.gram, self.pieces.outputs, self.objective.chosen(), self.parameters)

    @cached_property
    def count(self) -> int:
        """How many samples there are."""
        return len(self.pieces.outputs.value)

    def _bending(self, radius: float) -> Bending:
        return bending(None, self.pieces, radius, (), self.weights)

    @cached_property
    def relative(self) -> float:
        """:math:`\\omega` at the weights; it is about the slopes of all outputs in all units at once, so that data
        are joined where it can be afforded.
        """
        possible = self.thorough and not self.per_block and is_affordable(self.pieces.shape(), self.outputs)
        return self.on_one_batch().relative if possible else math.inf

    def proved_gradient(self) -> ProvedGradient | ProvedSum:
        """The gradient of the loss at the weights."""
        return self.pieces.certified.gradient()

    def certificate(self) -> Certificate:
        """That of the loss, on the ball of the longest step that is proved."""
        return self.pieces.certified.longest()


def not_onto(problem: Problem, advice: str = "") -> str:
    """Why the Jacobian is not proved to be onto; empty where it is."""
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


def refused(
    problem: Problem, method: str, theorem: str, why: str, hypotheses: tuple[Hypothesis, ...] = ()
) -> Convergence:
    """Not proved, and no factor says what is missing."""
    return Convergence(method, theorem, False, hypotheses, math.inf, (why,), nothing=problem.nothing())
