r"""The certificate of data in pieces, from bounds of the batches.

**An objective.** Let :math:`F = \sum_bw_bF_b` with :math:`w_b = W_b/\sum W_b` for a mean over samples
(:mod:`surefoot.valuation.streamed`), and :math:`w_b = 1` for a sum. Where the effort makes them, the second
derivatives of the batches at the weights are added up, and so is what bounds how far they move, before norms are
taken (:mod:`surefoot.certificate.added`): L at the weights is that of the joined batch. Everything else is an
average of what holds for the batches: bounds on the value, on the gradient, on each pair of variables, and κ of
Gauss-Newton steps (what the model of :math:`F_b` misses is at most :math:`\frac{\kappa_b}2\|v\|^2`). The
curvature :math:`\bar L` that a single move from the weights meets follows from L on balls inside
(:func:`surefoot.guarantees.seen_from_weights`); S along the segment against the gradient of F is an average
(:mod:`surefoot.certificate.downhill`). On a ball of radius r around the weights also :math:`\ell \le \|\nabla
F(u_0)\| + Lr` and :math:`m \le |F(u_0)| + \ell r`.

**A network.** Its outputs on all batches, one below the other, have derivatives with :math:`\|D\psi\|^2 \le
\sum_b\|D\psi_b\|^2`, and so on: the constants are roots of sums of squares.

All are upper bounds. That of the joined batch may be smaller, where a bound is one of a norm of all samples
together, or larger, where Cauchy and Schwarz lose more over many samples than over few. The gradient at the
weights is that of F itself, added up with its errors: so is the length of a step that stays in a ball. A
regulariser is added once.

The batches may lie with several processes: each sends the constants of its part, a few numbers for each pair of
variables, and process 0 decides on which balls. Second derivatives of p numbers are added up over all processes,
:math:`8p^2` bytes, once for all balls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from surefoot.batches import (
    Batches,
    digest_of,
    kind_of,
    numbered,
    refuse_other_models,
    refuse_statistics,
    tensors_of,
)
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import effort_named, in_gradients
from surefoot.calculus.leaves import ordinary_device
from surefoot.calculus.segment.along import Majorant
from surefoot.certificate.added import Bounds, added, summed
from surefoot.certificate.downhill import Downhill
from surefoot.certificate.from_hessian import near_weights
from surefoot.certificate.proving import Proof, from_weights, longest_proved, refuse_penalty
from surefoot.certificate.record import Certificate
from surefoot.certificate.regularised import Penalty, regularised
from surefoot.certificate.summed import ProvedSum
from surefoot.domains import Ball, Box, Domain, DomainError, ProductBall, Segment
from surefoot.errors import EvaluationError, UnsupportedOperation
from surefoot.magnitude import Magnitude, stack
from surefoot.norms import frobenius_norm
from surefoot.norms.verified import symmetric_norm
from surefoot.processes import ProcessError, Processes
from surefoot.valuation.interaction import refuse_interaction
from surefoot.valuation.streamed import is_mean, is_weightless, refuse_objective, weight_of

T = TypeVar("T")


@dataclass
class _Part:
    """What one process knows: the sum over its batches, by weight, and the penalty, where it has any."""

    balls: dict[float, Bounds] = field(default_factory=dict)  # by radius, and on the domain itself by infinity
    total: Fraction = Fraction(0)
    penalty: Certificate | None = None
    summed: tuple[int, ...] = ()  # the batches whose second derivatives at the centre are added up
    size: int = 0  # the number of rows of these
    amount: float = 0.0  # the sum of their norms
    error: Magnitude = field(default_factory=Magnitude.zero)  # a bound on the norm of their error


class InPieces:
    """The certificate of a model, or of an objective of it, on all batches of all processes.

    Args:
        model: the network.
        batches: those that are here.
        objective: a loss without targets, or ``None`` for the network.
        regularizer: added to the objective, or ``None``.
        effort: see :func:`surefoot.certify`.
        processes: those that have a part of the data each, or ``None``.

    Raises:
        ObjectiveError: if the objective of all data is not a weighted mean of those of the batches.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        objective: Any = None,
        regularizer: Penalty | None = None,
        effort: str = "normal",
        processes: Processes | None = None,
    ) -> None:
        if objective is not None:
            refuse_objective(objective)
        refuse_penalty(regularizer, is_objective=objective is not None)
        self.model, self.batches, self.objective, self.processes = model, batches, objective, processes
        self.regularizer = regularizer
        named = self._named = effort_named(effort)
        # every ball of a search starts from the weights again, and has all of its shells at once
        parts = max(named.parts, min(named.shells, 2 * named.parts))
        self.effort = replace(
            named, shells=0, downhill=False, composed=0.0, operations=named.operations / 2, parts=parts
        )
        self._summed: ProvedSum | None = None
        self._sum: Tensor | None = None  # of second derivatives at the centre, over the batches that are here
        self._norms: dict[tuple[tuple[int, ...], ...], Magnitude] = {}  # of such sums over all processes
        self._cost = 0
        self._looked_at: set[Any] = set()  # kinds of batches whose samples do not meet

    def certify(self, domain: Domain | Box | Segment | None) -> Certificate:
        """On a domain; by default, for an objective, the ball on which the longest step can be proved.

        Raises:
            DomainError: along a segment.
            EvaluationError: if there are no batches, or the model computes statistics from each of them.
        """
        if isinstance(domain, Segment):
            raise DomainError("a segment is about one batch: for data in pieces use surefoot.Ball or a box")
        if domain is not None:
            self.effort = replace(self._named, downhill=False)

        if self.processes is None:
            return self._certified(domain)
        weights = [*self.model.parameters(), *self.model.buffers()]
        refuse_other_models(self.processes.gathered(lambda: digest_of(weights)))
        try:
            return self.processes.tell(self._certified(domain))
        except ProcessError as error:  # what another process refuses is refused here in its words
            raise (error if type(error) is not ProcessError else EvaluationError(str(error))) from error

    def _certified(self, domain: Domain | Box | None) -> Certificate:
        """All processes call it, and each step of it."""
        if self.objective is None:
            return self.on(ProductBall(1.0) if domain is None else domain)
        return self._downhill(longest_proved(self.on, self.effort) if domain is None else self.on(domain))

    def _downhill(self, found: Certificate) -> Certificate:
        """With the longest step that is proved on the segment against the gradient of all data."""
        wanted = self._named.downhill and self.regularizer is None and isinstance(found.radius, float)
        if not (wanted and found.step_size):
            return found
        lengths: list[float] = []

        def bound(length: float) -> Majorant:
            lengths.append(length)
            return self._along(length)

        step = Downhill.of(self._gradient(), self._varying).longest(bound, found.step_size)
        cost = found.gradients and found.gradients + in_gradients(expansions=len(lengths))
        return replace(found, gradient_step=step, gradients=cost)

    @property
    def _varying(self) -> dict[str, Tensor]:
        paths = {path for block in self._gradient().blocks.values() for path in block}
        return {path: value for path, value in self.model.named_parameters() if path in paths}

    def _along(self, length: float) -> Majorant:
        r"""The quadratic upper bound of the objective of all data along the segment, :math:`S = \sum_bw_bS_b`
        rounded up, which is infinite where a batch has none.
        """
        down = Downhill.of(self._gradient(), self._varying)

        def here() -> list[tuple[Fraction, Majorant]]:
            return self._each(lambda _, analysis, weight: (weight, _bound(down, analysis, length)))

        parts = [here()] if self.processes is None else self.processes.gathered(here)
        total = sum((weight for part in parts for weight, _ in part), Fraction(0)) if self.is_mean else Fraction(1)
        pairs = [(float(weight / total), bound) for part in parts for weight, bound in part]
        slopes, curvatures = [w * one.slope for w, one in pairs], [w * one.curvature for w, one in pairs]
        curvature = math.fsum(curvatures) + math.fsum(map(abs, curvatures)) * 2.0**-45
        return Majorant(math.nan, math.fsum(slopes), curvature, math.nan, length, math.inf, math.inf)

    def on(self, domain: Domain | Box) -> Certificate:
        """What is proved of all data on a domain; process 0 says it, as sums may differ by round-off."""
        if self.processes is None:
            return self._whole([self._here(domain)], domain)
        found = self._whole(self.processes.gathered(lambda: self._here(domain)), domain)
        return self.processes.tell(found)

    def _whole(self, parts: list[_Part], domain: Domain | Box) -> Certificate:
        total = sum((part.total for part in parts), Fraction(0))
        found = _joined([part.balls for part in parts if part.balls], stacked=self.objective is None)
        if not found or not total:
            raise EvaluationError("no batch has a sample with a weight: there is nothing to certify")
        if self.objective is None:
            return found[math.inf].certificate
        around = isinstance(domain, Ball) and domain.center == "present"
        hessian, share = self._hessian(parts, around), _up(1 / total) if self.is_mean else Magnitude.of(1.0)
        balls = {radius: summed([(share, one)]) for radius, one in found.items()}
        whole = balls[math.inf].certified(hessian * share)
        self._cost += whole.gradients or 0
        whole = replace(whole, gradients=whole.gradients and self._cost)
        if whole.radius is not None:
            whole = replace(whole, block_gradients=self._gradient().norms())
        if isinstance(whole.radius, float):
            inner = [(r, one.curvature.bounded(hessian * share)[0]) for r, one in balls.items() if r < math.inf]
            whole = near_weights(whole, balls[math.inf].value)
            if inner and isinstance(whole.radius, float):
                whole = from_weights(whole, whole.radius, inner)
        penalty = next((part.penalty for part in parts if part.penalty is not None), None)
        if penalty is None:
            return whole
        sizes, more = whole.block_gradients, penalty.block_gradients
        gradients = sizes and more and {p: math.nextafter(size + more[p], math.inf) for p, size in sizes.items()}
        both = added([(Magnitude.of(1.0), one) for one in (whole, penalty)])
        damping, name = whole.make_damping, repr(self.regularizer)
        return replace(both, block_gradients=gradients, make_damping=damping, regularizer=name)

    def _hessian(self, parts: Sequence[_Part], around: bool) -> Magnitude:
        """A bound on the norm of the weighted sum of second derivatives at the centre, of all batches with one.

        All processes call this. Sums of k matrices times weights are off by at most (k + 2)u times the sum of the
        Frobenius norms.
        """
        which, mine = tuple(part.summed for part in parts), self._sum
        self._sum = None
        if not any(which):
            return Magnitude.zero()
        if not around or which not in self._norms:
            size = max(part.size for part in parts)
            if mine is None:
                device = next(self.model.parameters()).device
                mine = torch.zeros(size, size, dtype=torch.float64, device=device)
            if self.processes is not None:
                self.processes.add([mine])
            error = stack([part.error for part in parts]).sum()
            amount = math.fsum(part.amount for part in parts) * (1 + 1e-9)
            count = sum(map(len, which)) + len(parts) + 4
            self._norms[which] = error + amount * count * 2.0**-52 + symmetric_norm(mine)
        return self._norms[which]

    @property
    def is_mean(self) -> bool:
        """Whether the objective divides by the weights of its batches."""
        return is_mean(self.objective.options)

    def _here(self, domain: Domain | Box) -> _Part:
        """What the batches that are here add."""
        part, self._sum = _Part(), None

        def add(number: int, analysis: Analysis, weight: Fraction) -> None:
            with numbered(number), ordinary_device():
                proof = Proof(analysis, domain, self.effort, keep=self.objective is not None)
                self._add(part, number, proof, weight, domain)
                if self.regularizer is not None and part.penalty is None:
                    certificate = part.balls[math.inf].certificate
                    part.penalty = self._penalty(analysis, certificate, domain)

        self._each(add)
        return part

    def _add(self, part: _Part, number: int, proof: Proof, weight: Fraction, domain: Domain | Box) -> None:
        """Add one batch."""
        balls: dict[float, Bounds] = {}
        for radius in proof.inside(domain):
            balls[radius], _ = proof.on(Ball(radius))
            if not balls[radius].certificate.smoothness.is_finite:  # nor is it on any larger one
                break
        last, _ = proof.on(domain)
        inside = replace(last.certificate, weights_inside=proof.holds_weights(domain))
        balls[math.inf] = replace(last, certificate=inside)
        hessian = None if proof.centre.found is None else proof.centre.found.hessian
        if hessian is not None:
            values = hessian.matrix.mul_(float(weight))
            self._sum = values if self._sum is None else self._sum.add_(values)
            part.summed, part.size = (*part.summed, number), len(values)
            part.amount += frobenius_norm(values)
            part.error = part.error + hessian.error * _up(weight)
        known = hessian is not None
        found = {radius: summed([(_up(weight), one.summand(known))]) for radius, one in balls.items()}
        part.balls = _joined([part.balls, found], stacked=self.objective is None) if part.balls else found
        part.total += weight

    def _each(self, ask: Callable[[int, Analysis, Fraction], T]) -> list[T]:
        """What is asked of each batch that is here and has a weight: its number, its analysis, its weight.

        Nothing of a batch is held while the next one is read, as the variables of a loop would be.
        """
        options = {} if self.objective is None else self.objective.options
        found = []
        for number, x, y in self.batches:
            if self.objective is None or not is_weightless(options, y):
                found.append(ask(number, *self._read(number, x, y)))
        return found

    def _read(self, number: int, x: Any, y: Any) -> tuple[Analysis, Fraction]:
        """The analysis and the weight of a batch."""
        with numbered(number):
            bound = None if self.objective is None else self.objective.bound_to(y)
            analysis = Analysis.of(self.model, x, bound)
            refuse_statistics(analysis.reading.graph)
            kind = kind_of(*tensors_of(x), y)
            if not self.batches.fixed and kind not in self._looked_at:
                refuse_interaction(self.model, x, y)
                self._looked_at.add(kind)
            if bound is None:
                return analysis, Fraction(1)
            return analysis, weight_of(analysis.reading.graph, self.objective.options, y)

    def _penalty(self, analysis: Analysis, like: Certificate, domain: Domain | Box) -> Certificate:
        """That of the regulariser alone."""
        assert self.regularizer is not None
        balls = analysis.balls_around(domain) if isinstance(domain, Box) else domain
        nothing = added([(Magnitude.zero(), replace(like, gradients=0))])
        empty = replace(nothing, block_gradients=dict.fromkeys(like.block_lipschitz, 0.0))
        return regularised(empty, self.regularizer, analysis.variables(), analysis.enclosed(balls)[0])

    def _gradient(self) -> ProvedSum:
        """Of all data at the weights, computed once."""
        if self._summed is None:
            trained = dict(self.model.named_parameters())
            self._summed = ProvedSum(self._each, trained, self.is_mean, self.processes)
        return self._summed


def _bound(down: Downhill, analysis: Analysis, length: float) -> Majorant:
    try:
        return down.bound(analysis, length)
    except UnsupportedOperation:
        return Majorant(math.nan, 0.0, math.inf, math.nan, length, math.inf)


def _joined(parts: Sequence[dict[float, Bounds]], *, stacked: bool) -> dict[float, Bounds]:
    """The sums, on all balls that every part knows of."""
    common = [radius for radius in parts[0] if all(radius in part for part in parts)] if parts else []
    return {r: summed([(Magnitude.of(1.0), part[r]) for part in parts], stacked=stacked) for r in common}


def _up(number: Fraction) -> Magnitude:
    return Magnitude.of(math.nextafter(float(number), math.inf))
