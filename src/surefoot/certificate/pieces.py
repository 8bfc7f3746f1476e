r"""The certificate of data in pieces, from those of the batches.

**An objective.** Let :math:`F = \sum_bw_bF_b` with :math:`w_b = W_b/\sum W_b` for a mean over samples
(:mod:`surefoot.valuation.streamed`), and :math:`w_b = 1` for a sum. Then :math:`\|\nabla^2F\| \le
\sum_bw_b\|\nabla^2F_b\|`, and likewise value, gradient and each pair of blocks: the constants are averages of
those of the batches. So are κ of Gauss-Newton steps (what the model of :math:`F_b` misses is at most
:math:`\frac{\kappa_b}2\|v\|^2`), the curvature :math:`\bar L` that a single move from the weights meets
(:func:`surefoot.guarantees.seen_from_weights`), and the curvature S along the segment against the gradient of F
(:mod:`surefoot.certificate.downhill`). On a ball of radius r around the weights also :math:`\ell \le \|\nabla
F(u_0)\| + Lr`.

**A network.** Its outputs on all batches, one below the other, have derivatives with :math:`\|D\psi\|^2 \le
\sum_b\|D\psi_b\|^2`, and so on: the constants are roots of sums of squares.

Both are upper bounds. That of the joined batch may be smaller, where a bound is one of a norm of all samples
together, or larger, where Cauchy and Schwarz lose more over many samples than over few. The gradient at the
weights is that of F itself, added up with its errors: so is the length of a step that stays in a ball. A
regulariser is added once.

The batches may lie with several processes: each sends the constants of its part, a few numbers for each block and
each pair of them, and process 0 decides on which balls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any

from torch import Tensor, nn

from surefoot.batches import Batches, digest_of, numbered, refuse_other_models, refuse_statistics
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import effort_named, in_gradients
from surefoot.calculus.segment.along import Majorant
from surefoot.certificate.downhill import Downhill
from surefoot.certificate.proving import longest_proved, proved_of, refuse_penalty
from surefoot.certificate.record import Certificate
from surefoot.certificate.regularised import Penalty, regularised
from surefoot.certificate.summed import ProvedSum
from surefoot.domains import Ball, Box, Domain, DomainError, ProductBall, Segment
from surefoot.errors import EvaluationError, UnsupportedOperation
from surefoot.graph.fetched import Fetched, opened
from surefoot.graph.outline import is_outline
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.processes import Processes
from surefoot.valuation.streamed import is_weightless, refuse_objective, weight_of


@dataclass
class _Part:
    """What one process knows: the sum over its batches, by weight, and the penalty, where it has any.

    They are sent as fields: what is copied as a :class:`Certificate` is complete, and keeps no functions.
    """

    fields: dict[str, Any] | None = None
    total: Fraction = Fraction(0)
    penalty: dict[str, Any] | None = None


class InPieces:
    """The certificate of a model, or of an objective of it, on all batches of all processes.

    Args:
        model: the network.
        batches: those that are here.
        objective: a loss without targets, or ``None`` for the network.
        regularizer: added to the objective, or ``None``.
        effort: see :func:`surefoot.certify`.
        processes: those that have a part of the data each, or ``None``.
        weights: the parameters, if they lie with these processes; each is gathered when an operation reads it.

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
        weights: Fetched | None = None,
    ) -> None:
        if objective is not None:
            refuse_objective(objective)
        refuse_penalty(regularizer, is_objective=objective is not None)
        self.model, self.batches, self.objective, self.processes = model, batches, objective, processes
        self.regularizer, self.weights = regularizer, weights
        self._named = effort_named(effort)
        once = self._named.operations / 4  # where every ball starts from the weights again
        self.effort = replace(self._named, shells=0, downhill=False, composed=0.0, operations=once)
        self._summed: ProvedSum | None = None

    def certify(self, domain: Domain | Box | Segment | None) -> Certificate:
        """On a domain; by default, for an objective, the ball on which the longest step can be proved.

        Raises:
            DomainError: along a segment.
            EvaluationError: if there are no batches, or the model computes statistics from each of them.
        """
        if isinstance(domain, Segment):
            raise DomainError("a segment is about one batch: for data in pieces use surefoot.Ball or a box")
        if isinstance(domain, Ball) and domain.radius == 0:
            self.effort = replace(self.effort, composed=self._named.composed)

        def lead() -> Certificate:
            if self.objective is None:
                return self.on(ProductBall(1.0) if domain is None else domain)
            return self._downhill(self.longest() if domain is None else self.on(domain))

        if self.processes is None:
            return lead()
        fixed = [value for value in self.model.parameters() if not is_outline(value)]
        refuse_other_models(self.processes.gathered(lambda: digest_of([*fixed, *self.model.buffers()])))
        return Certificate(**self.processes.led(lambda: _fields(lead()), self.serve, EvaluationError))

    def longest(self) -> Certificate:
        """On the ball on which the longest step can be proved; process 0 calls it, the others serve it."""
        return longest_proved(self.on, self.effort)

    def _downhill(self, found: Certificate) -> Certificate:
        """With the longest step that is proved on the segment against the gradient of all data."""
        wanted = self._named.downhill and self.regularizer is None and isinstance(found.radius, float)
        if not (wanted and found.step_size):
            return found
        lengths: list[float] = []

        def bound(length: float) -> Majorant:
            lengths.append(length)
            if self.processes is not None:
                self.processes.ask(("along", length))
            return self._along(length)

        step = Downhill.of(self.gradient(), self._varying).longest(bound, found.step_size)
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
            return [(weight, _bound(down, analysis, length)) for _, analysis, weight in self._analyses()]

        parts = [here()] if self.processes is None else self.processes.gathered(here)
        total = sum((weight for part in parts for weight, _ in part), Fraction(0)) if self.is_mean else Fraction(1)
        pairs = [(float(weight / total), bound) for part in parts for weight, bound in part]
        slopes, curvatures = [w * one.slope for w, one in pairs], [w * one.curvature for w, one in pairs]
        curvature = math.fsum(curvatures) + math.fsum(map(abs, curvatures)) * 2.0**-45
        return Majorant(math.nan, math.fsum(slopes), curvature, math.nan, length, math.inf, math.inf)

    def on(self, domain: Domain | Box) -> Certificate:
        """The same on one domain; process 0 calls it, the others serve it."""
        if self.processes is not None:
            self.processes.ask(domain)
        return self._shared(domain)

    def _shared(self, domain: Domain | Box) -> Certificate:
        """What all processes say together about a domain."""
        several = self.processes
        parts = [self._here(domain)] if several is None else several.gathered(lambda: self._here(domain))
        found = [Certificate(**part.fields) for part in parts if part.fields is not None]
        total = sum((part.total for part in parts), Fraction(0))
        if not found or not total:
            raise EvaluationError("no batch has a sample with a weight: there is nothing to certify")
        whole = _added([(Magnitude.of(1.0), one) for one in found], stacked=self.objective is None)
        if self.objective is not None:
            whole = _added([(_up(Fraction(1) / total), whole)]) if self.is_mean else whole
            if whole.radius is not None:
                norms = self._gradient().norms()
                whole = replace(whole, block_gradients=norms)
                if isinstance(whole.radius, float):
                    reached = whole.smoothness * whole.radius + math.hypot(*norms.values()) * (1 + 1e-12)
                    whole = replace(whole, lipschitz=minimum(whole.lipschitz, reached))
        added = next((part.penalty for part in parts if part.penalty is not None), None)
        if added is None:
            return whole
        penalty = Certificate(**added)
        sizes, more = whole.block_gradients, penalty.block_gradients
        gradients = sizes and more and {p: math.nextafter(size + more[p], math.inf) for p, size in sizes.items()}
        summed = _added([(Magnitude.of(1.0), one) for one in (whole, penalty)])
        damping, name = whole.make_damping, repr(self.regularizer)
        return replace(summed, block_gradients=gradients, make_damping=damping, regularizer=name)

    @property
    def is_mean(self) -> bool:
        """Whether the objective divides by the weights of its batches."""
        return self.objective.options["reduction"] in ("mean", "entries")

    def _here(self, domain: Domain | Box) -> _Part:
        """The certificates of the batches that are here, added up."""
        part = _Part()
        with opened(self.weights):
            for number, analysis, weight in self._analyses():
                with numbered(number):
                    found = proved_of(analysis, domain, self.effort)
                before = [] if part.fields is None else [(Magnitude.of(1.0), Certificate(**part.fields))]
                part.fields = _fields(_added([*before, (_up(weight), found)], stacked=self.objective is None))
                part.total += weight
                if self.regularizer is not None and part.penalty is None:
                    part.penalty = _fields(self._penalty(analysis, found, domain))
        return part

    def _analyses(self) -> Iterator[tuple[int, Analysis, Fraction]]:
        """The number, the analysis and the weight of each batch that is here and has a weight."""
        for number, x, y in self.batches:
            with numbered(number):
                options = {} if self.objective is None else self.objective.options
                if self.objective is not None and is_weightless(options, y):
                    continue
                bound = None if self.objective is None else self.objective.bound_to(y)
                analysis = Analysis.of(self.model, x, bound, weights=self.weights)
                refuse_statistics(analysis.reading.graph)
                weight = Fraction(1) if bound is None else weight_of(analysis.reading.graph, options, y)
            yield number, analysis, weight

    def _penalty(self, analysis: Analysis, like: Certificate, domain: Domain | Box) -> Certificate:
        """That of the regulariser alone."""
        assert self.regularizer is not None
        balls = analysis.balls_around(domain) if isinstance(domain, Box) else domain
        nothing = _added([(Magnitude.zero(), replace(like, gradients=0))])
        empty = replace(nothing, block_gradients=dict.fromkeys(like.block_lipschitz, 0.0))
        return regularised(empty, self.regularizer, analysis.variables(), analysis.enclosed(balls)[0])

    def gradient(self) -> ProvedSum:
        """The gradient of all data at the weights, computed once; process 0 calls it, the others serve it."""
        if self._summed is None and self.processes is not None:
            self.processes.ask(("gradient",))
        return self._gradient()

    def _gradient(self) -> ProvedSum:
        if self._summed is None:
            trained = dict(self.model.named_parameters())
            self._summed = ProvedSum(self._analyses, trained, self.is_mean, self.processes, self.weights)
        return self._summed

    def serve(self, word: Any) -> object:
        """On a process that does not lead: take part in the certificate on a domain, or in the gradient."""
        if not isinstance(word, tuple):
            return self._shared(word)
        if word[0] == "along":
            return self._along(word[1])
        return self._gradient() if word[0] == "gradient" else self._gradient().bent_here(word[1])


def _added(parts: Sequence[tuple[Magnitude, Certificate]], *, stacked: bool = False) -> Certificate:
    """The certificate of a weighted sum, or of outputs below each other; without a table."""
    first = parts[0][1]

    def total(read: Callable[[Certificate], Magnitude]) -> Magnitude:
        together = stack([weight * read(one) for weight, one in parts])
        return together.norm(axis=0) if stacked else together.sum(axis=0)

    costs = [one.gradients for _, one in parts]
    damping: Callable[[], Any] | None = None
    if not stacked and all(one.make_damping is not None for _, one in parts):
        pairs = [(weight, one.make_damping()) for weight, one in parts if one.make_damping is not None]
        composite = stack([weight * value for weight, (value, _) in pairs]).sum()
        damping = partial(tuple, (composite, all(quadratic for _, (_, quadratic) in pairs)))
    return replace(
        first,
        one_step=total(_of_one_step) if not stacked and any(one.one_step for _, one in parts) else None,
        gradient_step=None,
        bound=total(lambda one: one.bound),
        lipschitz=total(lambda one: one.lipschitz),
        smoothness=total(lambda one: one.smoothness),
        block_lipschitz={p: total(lambda one: one.block_lipschitz[p]) for p in first.block_lipschitz},  # noqa: B023
        block_smoothness=total(lambda one: one.block_smoothness),
        reasons=tuple(dict.fromkeys(reason for _, one in parts for reason in one.reasons)),
        remarks=tuple(dict.fromkeys(remark for _, one in parts for remark in one.remarks)),
        scalar=first.scalar and not stacked,
        nonnegative=all(one.nonnegative for _, one in parts),
        block_gradients=None,
        curvature=None,
        gradients=None if any(cost is None for cost in costs) else sum(cost or 0 for cost in costs),
        make_rows=tuple,
        make_damping=damping,
    )


def _fields(certificate: Certificate) -> dict[str, Any]:
    return {one.name: getattr(certificate, one.name) for one in fields(certificate)}


def _bound(down: Downhill, analysis: Analysis, length: float) -> Majorant:
    try:
        return down.bound(analysis, length)
    except UnsupportedOperation:
        return Majorant(math.nan, 0.0, math.inf, math.nan, length, math.inf)


def _of_one_step(certificate: Certificate) -> Magnitude:
    return certificate.smoothness if certificate.one_step is None else certificate.one_step


def _up(number: Fraction) -> Magnitude:
    return Magnitude.of(math.nextafter(float(number), math.inf))
