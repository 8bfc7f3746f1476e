"""Proved certificates: from the passes of the calculus to one record.

Without a domain, the ball around the weights is searched for on which the longest step is proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from surefoot import guarantees
from surefoot.calculus.adjoint.bounds import Centre, scalar_bounds
from surefoot.calculus.adjoint.whole import Whole
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.assemble import (
    Curvature,
    Term,
    assemble,
    by_block,
    damping_of,
    in_blocks,
    is_nonnegative,
    smoothness,
    terms,
    weighted_curvature,
)
from surefoot.calculus.breakdown import (
    largest_curvature,
    largest_slope,
    reasons,
    shares,
    smoothness_by_tensor,
)
from surefoot.calculus.effort import NORMAL, Effort, effort_named, in_gradients
from surefoot.calculus.forward import Pass, Shared
from surefoot.calculus.increments import input_gain
from surefoot.calculus.leaves import Wrt, ordinary_device
from surefoot.calculus.segment.along import Along
from surefoot.certificate.added import Bounds
from surefoot.certificate.downhill import gradient_step
from surefoot.certificate.from_hessian import AroundWeights, near_weights
from surefoot.certificate.record import Certificate, Row
from surefoot.certificate.regularised import Penalty, regularised
from surefoot.certificate.segments import on_segment
from surefoot.domains import Ball, Box, Domain, DomainError, ProductBall, Segment
from surefoot.errors import UnsupportedOperation
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.operations.call import label
from surefoot.operations.evaluation import remarks

_MANY = 4000  # with more variables than this, second derivatives are bounded between blocks
_CLOSE = 1.1  # radii with at most this ratio count as equal
_GUESSES = 8  # balls in one piece that are looked at for the scale
_SHELLS = 60  # that are looked at in the search for the longest step
_SHORTER = 1 / 16  # the next radius, where a ball has infinite curvature because it reaches a kink


def longest_proved(
    certify: Callable[[Ball], Certificate], effort: Effort = NORMAL, whole: Whole | None = None
) -> Certificate:
    r"""The certificate with the longest step, among those of several balls around the weights.

    With L(r) a bound on the smoothness on the ball of radius r and :math:`g = \|\nabla F\|` at its centre, the
    step :math:`\gamma(r) = \min(1/L(r),\ r/g)` is proved to descend (:func:`surefoot.guarantees.longest_step`).
    The first is non-increasing in r and the second grows, so the longest step is where they meet, :math:`r =
    g/L(r)`. For every r this radius is between r and :math:`g/L(r)`; the search starts at :math:`g/L(0)`. Any
    radius makes a valid certificate; the search only chooses one.

    If the curvature is infinite on every ball that was tried, the certificate is that of the last ball, which says
    why. An effort with shells goes further from there (:func:`_through_shells`).
    """
    at_weights = certify(Ball(0.0))
    gradient = math.hypot(*(at_weights.block_gradients or {}).values())
    slowest = at_weights.inverse_smoothness
    if slowest == math.inf:  # flat or affine: any radius will do
        return certify(Ball(1.0))
    if not 0 < gradient < math.inf or not slowest > 0:
        return at_weights
    high = gradient * slowest
    if whole is not None:
        radius = longest_radius(whole, gradient)
        return from_weights(certify(Ball(radius)), radius, whole.path[:-1])
    best, radius, low = None, high, 0.0
    for _ in range(effort.balls):
        certificate = certify(Ball(radius))
        if best is None or certificate.step_size > best.step_size:
            best = certificate
        meets = gradient * guarantees.inverse_of_one_step(certificate)  # how far a step 1/L(radius) would go
        if meets == 0:
            high, radius = radius, radius * _SHORTER
            continue
        low, high = max(low, min(radius, meets)), min(high, max(radius, meets))
        if high <= low * _CLOSE:
            break
        radius = math.sqrt(low * high)
    assert best is not None
    return _through_shells(certify, best, gradient, effort) if best.step_size and effort.shells else best


def longest_radius(whole: Whole, gradient: float) -> float:
    r"""The radius of the ball on which the longest step is proved, looked for from the centre outwards.

    First the radius where :math:`r = g/L(r)` for the bound of the whole ball in one piece, to know the scale; then
    shells of a part of that, until :math:`1/\bar L` (:func:`surefoot.guarantees.seen_from_weights`) does not reach
    the edge. The last shell ends where it would just do so, interpolated.
    """
    high = gradient / float(whole.norm)
    low = high * 2.0**-16
    for _ in range(_GUESSES):
        radius = math.sqrt(low * high)
        low, high = (radius, high) if whole.once(radius) * radius <= gradient else (low, radius)
    width, edge, ahead = low / whole.parts, 0.0, 0.0
    for _ in range(_SHELLS):
        whole.moved(edge + width)
        beyond = gradient / float(guarantees.seen_from_weights(whole.path)) - edge - width
        if beyond < 0 and not whole.path[-1][1].is_finite and width > edge / 64:  # a kink is within reach
            width /= 4
        elif not whole.path[-1][1].is_finite:
            return edge or width / 4
        elif beyond < 0:
            return edge + max(width * ahead / (ahead - beyond), width / 8) if edge else width / 2
        else:
            edge, ahead = edge + width, beyond
    return edge


def _through_shells(
    certify: Callable[[Ball], Certificate], best: Certificate, gradient: float, effort: Effort
) -> Certificate:
    r"""A certificate with a longer step, if the curvature that one step meets on its way allows it.

    Balls grow by the same amount. :math:`\bar L` (:func:`surefoot.guarantees.seen_from_weights`), which uses the
    bounds of all balls inside, grows with them until :math:`1/\bar L` does not reach the edge. The last radius is
    interpolated between the last two.
    """
    width = best.step_size * gradient / effort.parts
    inner: list[tuple[float, Magnitude]] = []
    ahead = 0.0  # how much further than the edge the step would go
    for k in range(1, effort.shells + 1):
        radius = k * width
        certificate = from_weights(certify(Ball(radius)), radius, inner)
        beyond = gradient * guarantees.inverse_of_one_step(certificate) - radius
        if beyond < 0:
            radius = max(radius - width * beyond / (beyond - ahead), width / 2)
            certificate = from_weights(certify(Ball(radius)), radius, inner)
        best = max(best, certificate, key=lambda each: each.step_size)
        if beyond < 0:
            break
        inner.append((radius, certificate.smoothness))
        ahead = beyond
    return best


def from_weights(certificate: Certificate, radius: float, inner: list[tuple[float, Magnitude]]) -> Certificate:
    """The certificate with the curvature that is seen from the weights, given the bounds on balls inside."""
    return replace(certificate, one_step=guarantees.seen_from_weights([*inner, (radius, certificate.smoothness)]))


def with_gradient_step(certificate: Certificate, analysis: Analysis, cost: int) -> Certificate:
    """The certificate with the longest step that is proved on the segment against the gradient."""
    try:
        step, expansions = gradient_step(analysis, certificate.step_size)
    except UnsupportedOperation:
        return certificate
    return replace(certificate, gradient_step=step, gradients=cost + in_gradients(expansions=expansions))


def certify_proved(
    model: nn.Module,
    x: Any,
    *,
    objective: nn.Module | None = None,
    domain: Domain | Box | Segment | None = None,
    wrt: Wrt = "params",
    input_norm: float | None = None,
    regularizer: Penalty | None = None,
    effort: str | Effort = "normal",
) -> Certificate:
    """The certificate of a model, or of an objective of it; see :func:`surefoot.certify`."""
    if wrt not in ("params", "input"):
        raise DomainError(f"wrt is 'params' or 'input', got {wrt!r}")
    if isinstance(domain, Segment):
        if wrt != "params":
            raise DomainError("along a segment the parameters vary, and the constants are certified ones")
        if regularizer is not None:
            raise DomainError("a regulariser is added on balls and boxes, not along a segment: use surefoot.Ball")
        with ordinary_device():
            return on_segment(Along(model, x, objective), domain)
    spent = effort if isinstance(effort, Effort) else effort_named(effort)
    ball = domain if isinstance(domain, Ball) and domain.center == "present" else None
    if wrt == "params" and input_norm is None and regularizer is None and domain is ball:
        with ordinary_device():
            around = AroundWeights.of(model, x, objective, spent)
            if around is not None:
                certificate = _on_balls(around, ball, spent)
                if not (spent.downhill and certificate.step_size):
                    return certificate
                return with_gradient_step(certificate, Analysis.of(model, x, objective), around.cost)
    return proved_of(Analysis.of(model, x, objective), domain, spent, wrt, input_norm, regularizer)


def _on_balls(around: AroundWeights, domain: Ball | None, effort: Effort) -> Certificate:
    """The certificate on a ball, or the one with the longest step; through the shells on the way."""
    if domain is None:
        return longest_proved(around.on, effort, around.whole)
    certificate, inner = around.on(domain), around.whole.path[:-1]
    return from_weights(certificate, domain.radius, inner) if inner else certificate


class Proof:
    """What is proved of one function over domains with one centre.

    Args:
        analysis: the function.
        domain: the last of these domains; ``None`` for balls around the weights that are searched for.
        spent: what it may cost.
        wrt: what varies.
        input_norm: see :func:`surefoot.certify`.
        keep: whether second derivatives at the centre are kept, instead of their norms.

    Attributes:
        has_gradient: whether the function is real-valued, with values at hand.
        at_weights: whether it has a gradient, and domains are balls around the weights.
        centre: what is known there.
    """

    def __init__(
        self,
        analysis: Analysis,
        domain: Domain | Box | None,
        spent: Effort,
        wrt: Wrt = "params",
        input_norm: float | None = None,
        keep: bool = False,
    ) -> None:
        self.analysis, self.wrt, self._norm, self._shared = analysis, wrt, input_norm, Shared()
        around = domain is None or (isinstance(domain, Ball) and domain.center == "present")
        self.has_gradient = analysis.reading.is_scalar and analysis.has_values and input_norm is None
        self.at_weights = around and self.has_gradient
        alone = self.at_weights and isinstance(domain, Ball) and domain.radius == 0
        whole = Whole.of_analysis(analysis, spent, keep) if self.at_weights and wrt == "params" else None
        self.spent, self.centre = spent, Centre(spent, whole, alone, keep)

    def over(self, domain: Domain) -> Pass:
        """The forward pass over a domain."""
        shared = self._shared if domain.center == "present" else None
        return self.analysis.over(domain, self.wrt, self._norm, shared)

    def on(self, domain: Domain | Box) -> tuple[Bounds, Pass]:
        """What is proved on a domain, and the forward pass over it."""
        balls = self.analysis.balls_around(domain, self.wrt) if isinstance(domain, Box) else domain
        result = self.over(balls)
        bounds = bounds_of(result, balls, self.wrt, self.centre)
        notes = remarks(self.analysis.reading.graph.nodes, lambda: result.enclosures)
        certificate = replace(bounds.certificate, remarks=notes, domain=str(domain))
        certificate = near_weights(certificate, bounds.value)
        return replace(bounds, certificate=certificate), result

    def inside(self, domain: Domain | Box) -> list[float]:
        """The radii of the balls inside a domain that are looked at before it."""
        if not (isinstance(domain, Ball) and domain.radius > 0 and self.at_weights and self.spent.parts > 1):
            return []
        shells = self.centre.shells(self.over(domain))
        return [domain.radius * k / shells for k in range(1, shells)]

    def holds_weights(self, domain: Domain | Box) -> bool | None:
        """Whether the present weights, or inputs, lie in a domain; ``None`` if they are not known."""
        here = self.analysis
        return here.is_in_box(domain, self.wrt) if isinstance(domain, Box) else here.is_inside(domain, self.wrt)


def proved_of(
    analysis: Analysis,
    domain: Domain | Box | None,
    spent: Effort,
    wrt: Wrt = "params",
    input_norm: float | None = None,
    regularizer: Penalty | None = None,
) -> Certificate:
    """The certificate of an analysis over any domain but a segment."""
    refuse_penalty(regularizer, is_objective=wrt == "params" and analysis.reading.is_scalar)
    with ordinary_device():
        proof = Proof(analysis, domain, spent, wrt, input_norm)
        centre, downhill = proof.centre, proof.spent.downhill and regularizer is None and wrt == "params"
        whole = centre.whole if regularizer is None else None  # of the objective without what is added

        def on(domain: Domain | Box) -> Certificate:
            bounds, result = proof.on(domain)
            if regularizer is None:
                return bounds.certificate
            return regularised(bounds.certificate, regularizer, analysis.variables(wrt), result.enclosures)

        if domain is not None:
            inner: list[tuple[float, Magnitude]] = []
            for radius in proof.inside(domain) if whole is None else ():
                inner.append((radius, on(Ball(radius)).smoothness))
                if not inner[-1][1].is_finite:  # nor is it on any larger one
                    break
            certificate = on(domain)
            if whole is not None:
                inner = whole.path[:-1]
            if isinstance(domain, Ball) and inner:
                certificate = from_weights(certificate, domain.radius, inner)
            if downhill and proof.at_weights and certificate.step_size:
                certificate = with_gradient_step(certificate, analysis, centre.cost)
            return replace(certificate, weights_inside=proof.holds_weights(domain))
        if wrt != "params" or not proof.has_gradient:
            return on(ProductBall(1.0))
        certificate = longest_proved(on, proof.spent, whole)
        if downhill:
            return with_gradient_step(certificate, analysis, centre.cost)
        return replace(certificate, gradients=certificate.gradients and centre.cost)


def refuse_penalty(penalty: Penalty | None, *, is_objective: bool) -> None:
    """Refuse what is not a regulariser, or is added to anything but an objective of the parameters.

    Raises:
        DomainError: saying which.
    """
    if penalty is None:
        return
    if not hasattr(penalty, "curvature_of"):
        raise DomainError(f"regularizer is a surefoot.objectives.Regularizer such as Ridge(1e-3), got {penalty!r}")
    if not is_objective:
        raise DomainError("a regulariser is added to an objective of the parameters: give objective=…")


def bounds_of(result: Pass, domain: Domain, wrt: str, centre: Centre) -> Bounds:
    """The certificate of the stacked outputs of a forward pass, and what may be added up over batches; ``centre``
    holds derivatives at its centre.
    """
    ends = [result.enclosures[name] for name in result.outputs]
    lipschitz = stack([e.lipschitz for e in ends]).norm(axis=0)
    gain = Magnitude.of(input_gain(result)) if wrt == "input" else Magnitude.infinity()
    adjoint, result = scalar_bounds(result, centre), result.without_values()
    summands = terms(result, weighted_curvature(result))
    region, blocks = result.region, result.region.blocks
    many = adjoint is None and len(region.variables) > _MANY
    matrix = (
        assemble(in_blocks(summands, region), len(blocks)) if many else assemble(summands, len(region.variables))
    )
    moved = variation = hessian = infinite = Magnitude.infinity()
    if adjoint is not None:
        summands = adjoint.summands if smoothness(adjoint.matrix) <= smoothness(matrix) else summands
        lipschitz, matrix = minimum(lipschitz, adjoint.gradient), minimum(matrix, adjoint.matrix)
        moved = infinite if adjoint.moved is None else adjoint.moved
        variation = infinite if adjoint.variation is None else adjoint.variation
        hessian = infinite if centre.found is None else centre.found.norm
    lipschitz, members = minimum(lipschitz, gain), None if many else tuple(blocks.values())
    curvature = Curvature(matrix, moved, variation if variation.shape else matrix + variation)
    smooth, matrix = curvature.bounded(hessian)
    certificate = Certificate(
        bound=stack([e.bound for e in ends]).norm(),
        lipschitz=lipschitz.norm(),
        smoothness=smooth,
        block_lipschitz={path: lipschitz[list(members)].norm() for path, members in blocks.items()},
        block_smoothness=matrix if members is None else by_block(matrix, members),
        reasons=() if smooth.is_finite else tuple(reasons(summands)),
        domain=str(domain),
        wrt=wrt,
        scalar=sum(e.numel for e in ends) == 1,
        nonnegative=is_nonnegative(result),
        block_gradients=None if adjoint is None else adjoint.by_block(blocks),
        radius=domain.extent(blocks) if domain.center == "present" else None,
        effort=centre.effort.name,
        gradients=None if adjoint is None else centre.cost,
        make_rows=lambda: _rows(result, summands, smooth, gain),
        make_damping=damping_of(result),
    )
    value = stack([e.centre_norm + e.error for e in ends]).norm()
    return Bounds(certificate, region.variables, members, value, curvature)


def _rows(result: Pass, summands: Sequence[Term], smooth: Magnitude, gain: Magnitude) -> list[Row]:
    """One row per operation that varies, with the constants of its result as a function of the variables."""
    by_tensor = smoothness_by_tensor(result)
    slopes = {step.node.name: result.enclosures[step.node.name].lipschitz.norm() for step in result.steps}
    if len(result.outputs) == 1:
        (output,) = result.outputs
        by_tensor[output], slopes[output] = smooth, minimum(slopes.get(output, gain), gain)
    share = shares(summands)
    parameters = set() if set(result.region.blocks) == {"input"} else set(result.region.variables)
    return [
        Row(
            module=step.node.module,
            operation=label(step.node),
            shape=step.node.specs[0].shape,
            bound=result.enclosures[step.node.name].bound,
            lipschitz=slopes[step.node.name],
            smoothness=by_tensor[step.node.name],
            share=share.get(step.node.name, 0.0),
            slope=largest_slope(step, parameters),
            curvature=largest_curvature(step),
        )
        for step in result.steps
    ]
