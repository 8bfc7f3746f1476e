r"""Lower bounds on the constants of a model over a domain: ascent from several starting points.

For fixed :math:`u` the norm of the Jacobian is found by power iteration, :math:`v \propto Df^\top w`,
:math:`w \propto Df\,v`; that of the second derivative by the same idea for a tensor,
:math:`v \propto D^2\langle w, f\rangle v`, :math:`w \propto D^2f[v, v]` (maximising in one factor at a time). For
fixed directions, :math:`u` takes projected gradient steps, shortened until the value grows. Only improvements are
kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.attained import Estimate, LowerBound, ProbableBound
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.leaves import Wrt
from surefoot.domains import Ball, Domain, DomainError, ProductBall
from surefoot.graph.checks import plainly
from surefoot.lower.function import Expansion, Function, Objective, Space, unit
from surefoot.lower.krylov import krylov

_LONGEST, _GROWTH, _SHRINKAGE, _SHORTEST = 2.0, 1.5, 0.25, 1e-3
# Gradients in double precision are trusted to this relative error, which is taken off their difference.
_GRADIENT_ERROR = 1e-12
_HALVINGS = 24


@dataclass(frozen=True)
class Attained:
    r"""A value at a point, how it grows there, and the directions it belongs to."""

    value: float  # the value
    point: Tensor  # where it is attained
    uphill: Tensor  # the gradient of the value in the point
    left: Tensor  # :math:`w`
    right: Tensor  # :math:`v`


_Score = Callable[[Expansion, Tensor, Tensor, Tensor], Attained]


def climb(
    function: Function, space: Space, score: _Score, start: Attained, steps: int, until: float = math.inf
) -> Iterator[Attained]:
    """Projected ascent: the starting point and every improvement, until ``until`` gradients are spent."""
    best = score(function.at(start.point), start.point, start.left, start.right)
    yield best
    length = _LONGEST
    for _ in range(steps):
        if function.spent >= until:
            return
        point = space.ascend(best.point, best.uphill, length)
        trial = score(function.at(point), point, best.left, best.right)
        if best.value < trial.value < math.inf:
            best, length = trial, min(_LONGEST, length * _GROWTH)
            yield best
        else:
            length *= _SHRINKAGE
            if length < _SHORTEST:
                return


def size(expansion: Expansion, point: Tensor, left: Tensor, right: Tensor) -> Attained:
    r""":math:`\|f(u)\|`, which grows along :math:`Df^\top f/\|f\|`."""
    outward = unit(expansion.value)
    value = float(torch.linalg.vector_norm(expansion.value))
    return Attained(value, point, expansion.pull(outward), outward, right)


def slope(iterations: int) -> _Score:
    r""":math:`\|Df(u)^\top w\|` after some power iterations; it grows along :math:`D^2\langle w, f\rangle v`."""

    def score(expansion: Expansion, point: Tensor, left: Tensor, right: Tensor) -> Attained:
        pulled = expansion.pull(left)
        for _ in range(iterations):
            pushed = unit(expansion.push(unit(pulled)))
            if not bool(pushed.any()):
                break
            left, pulled = pushed, expansion.pull(pushed)
        value, right = float(torch.linalg.vector_norm(pulled)), unit(pulled)
        return Attained(value, point, expansion.bend(left, right), left, right)

    return score


def curvature(iterations: int) -> _Score:
    r""":math:`\|D^2\langle w, f\rangle(u)v\|` after some alternating steps; it grows along a third derivative."""

    def score(expansion: Expansion, point: Tensor, left: Tensor, right: Tensor) -> Attained:
        bent, used = expansion.bend(left, right), right
        for _ in range(iterations):
            if not bool(bent.any()):
                break
            used = unit(bent)
            turned = expansion.bend_twice(used)
            left = unit(turned) if bool(turned.any()) else left
            bent = expansion.bend(left, used)
        value = float(torch.linalg.vector_norm(bent))
        sign = 1.0 if float(bent @ used) >= 0 else -1.0
        return Attained(value, point, sign * expansion.twist(left, used), left, used)

    return score


def steepest_part(function: Function, first: Tensor, second: Tensor, w: Tensor, until: float = math.inf) -> float:
    r"""A lower bound on the smoothness from differences of gradients, which see kinks.

    Where :math:`Df` jumps, the second derivative at a point shows nothing, but for any two points
    :math:`L \ge \|(Df(u) - Df(u'))^\top w\|_2 / \|u - u'\|_2` with :math:`\|w\|_2 = 1`. By the triangle
    inequality one half of the segment has at least the ratio of the whole, so halving never loses: the ratio tends
    to the curvature where there is one, and doubles with every halving at a kink. The largest one is returned.
    """
    a, b = first, second
    at_a, at_b = function.at(a).pull(w), function.at(b).pull(w)
    best = _ratio(a, b, at_a, at_b)
    for _ in range(_HALVINGS):
        if function.spent >= until:
            break
        middle = (a + b) / 2
        at_middle = function.at(middle).pull(w)
        left, right = _ratio(a, middle, at_a, at_middle), _ratio(middle, b, at_middle, at_b)
        if left >= right:
            b, at_b = middle, at_middle
        else:
            a, at_a = middle, at_middle
        best = max(best, left, right)
    return best


def _ratio(a: Tensor, b: Tensor, at_a: Tensor, at_b: Tensor) -> float:
    distance = float(torch.linalg.vector_norm(a - b))
    change = float(torch.linalg.vector_norm(at_a - at_b))
    error = _GRADIENT_ERROR * float(torch.linalg.vector_norm(at_a) + torch.linalg.vector_norm(at_b))
    return max(0.0, change - error) / distance if distance > 0 else 0.0


_POWER_ITERATIONS = 4
_BUDGET = 200.0
_SHARES = (0.08, 0.35, 0.7)  # parts of the budget of a start that the value, the slope and the curvature end at
_STARTS, _STEPS = 4, 12
_LIKELY, _PRODUCTS, _FAILURE = 0.3, 60, 1e-12  # of the probable bound: part of the budget, products, probability
_APART = 0x5EED  # keeps the random start apart from the random numbers that the weights are made of


@plainly
def estimate(
    model: nn.Module,
    x: Any,
    *,
    domain: Domain | None = None,
    objective: Objective | None = None,
    wrt: Wrt = "params",
    budget: float | None = None,
    starts: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Callable[[Estimate, float], object] | None = None,
) -> Estimate:
    r"""Lower bounds on the constants that :func:`surefoot.certify` bounds from above, by ascent in the domain.

    Every number is attained in the domain, in double precision: a value of :math:`\|f\|`, of :math:`\|Df^\top w\|`
    with a unit :math:`w`, of :math:`\|D^2\langle w, f\rangle v\|` with unit :math:`v, w`, or a difference quotient
    of :math:`Df^\top w`, which shows kinks. For a real-valued function, a third of the budget goes into an upper
    bound on its second derivative at the centre that holds with a stated probability
    (:mod:`surefoot.lower.krylov`). The model is not changed.

    Args:
        model: any module that can be captured; its weights must have values (not on ``meta``).
        x: a batch.
        domain: where the variables may be; by default within 1 of the origin, every block or the input. To compare
            with a certificate, pass its domain.
        objective: a map from the model's outputs to a number; then the constants are those of the objective.
        wrt: what varies: the parameters, or the input.
        budget: the work allowed, in gradients of the model; a search that exceeds it finishes its current step and
            returns the best so far. By default 200, and no limit if starts or steps are given.
        starts: number of points from which the ascent starts: the centre, then random ones. By default 4.
        steps: largest number of steps of each ascent, by default 12.
        seed: seed of the random points and directions.
        progress: called with the best so far and the gradients spent, at every improvement.

    Raises:
        CaptureError: if the model cannot be read.
        DomainError: if the domain does not fit, or the model has no values.

    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.eye(2)
    >>> lower, upper = (bound(model, x, domain=sf.Ball(0.1)) for bound in (sf.estimate, sf.certify))
    >>> float(lower.lipschitz) <= float(upper.lipschitz)
    True
    """
    domain = ProductBall(1.0) if domain is None else domain
    if budget is None:
        budget = _BUDGET if starts is None and steps is None else math.inf
    starts, steps = _STARTS if starts is None else starts, _STEPS if steps is None else steps
    if starts < 1 or steps < 0:
        raise DomainError(f"an ascent needs at least one start and no negative steps, got {starts} and {steps}")
    if not budget > 0:
        raise DomainError(f"a search needs a positive budget of gradients, got {budget!r}")
    analysis = Analysis.of(model, x)
    if any(value.device.type == "meta" for value in analysis.values.values()):
        raise DomainError(
            "a search needs values, and the meta device has none: move the model and the input to one"
        )
    if isinstance(objective, nn.Module):
        objective = copy.deepcopy(objective).double()
    function, space = _function(analysis, domain, wrt, objective)
    generator = torch.Generator().manual_seed(seed)
    outputs = function(space.center).numel()
    best, likely = [0.0, 0.0, 0.0], None
    if outputs == 1:
        likely = _likely(function, space, min(_PRODUCTS, int(_LIKELY * min(budget, 1e6) / 1.5)), seed)

    def reached() -> Estimate:
        value, steepness, bend = map(LowerBound, best)
        return Estimate(value, steepness, bend, str(domain), wrt, likely)

    def meet(which: int, value: float) -> None:
        """Keep the largest finite value; an overflow is not attained."""
        if best[which] < value < math.inf:
            best[which] = value
            if progress is not None:
                progress(reached(), function.spent)

    for k in range(starts):
        before = function.spent
        if before >= budget:
            break
        point = space.center if k == 0 else space.random(generator, 1.0 if k % 2 else 0.5)
        for which, score in enumerate((size, slope(_POWER_ITERATIONS), curvature(_POWER_ITERATIONS))):
            highest = first = _start(point, outputs, generator)
            until = before + _SHARES[which] * (budget - before)
            for highest in climb(function, space, score, first, steps, until):
                meet(which, highest.value)
            point = highest.point
        for end in _ends(space, highest, generator):
            if function.spent < budget:
                meet(2, steepest_part(function, highest.point, end, highest.left, budget))
    return reached()


def curvature_at_weights(model: nn.Module, x: Any, objective: nn.Module, products: int) -> LowerBound | None:
    r"""The largest :math:`|\lambda|` of some Lanczos steps from the gradient: at most :math:`\|\nabla^2F(u)\|`.

    Ritz values are eigenvalues of :math:`Q^\top\nabla^2F(u)Q` with orthonormal :math:`Q`, so none is larger in
    size than the norm (Cauchy's interlacing); in double precision up to a relative 1e-12 or so. A product with the
    Hessian costs about two gradients, and a handful of them is accurate to a few per cent; three vectors are kept.
    ``None`` if the Hessian is zero, as where a function is affine.

    >>> curvature_at_weights(nn.Linear(1, 1, bias=False), torch.ones(4, 1), sf.Square(torch.ones(4, 1)), 3)
    LowerBound(1.000e+00)
    """
    function, space = _function(Analysis.of(model, x, objective), Ball(0.0), "params", None)
    at_weights = function.at(space.center)
    one = torch.ones_like(at_weights.value)
    steps = krylov(lambda v: at_weights.bend(one, v), at_weights.pull(one), products)
    largest = 0.0 if steps is None else steps.largest
    return LowerBound(largest) if largest > 0 else None


def _function(analysis: Analysis, domain: Domain, wrt: Wrt, objective: Objective | None) -> tuple[Function, Space]:
    """The model as a function on the domain, and the domain as a space."""
    leaves, region = analysis.enclosed(domain, wrt)
    values: dict[str, Tensor] = {name: enclosure.value for name, enclosure in leaves.items()}
    space = Space.of(region, values)
    fixed = {name: value for name, value in values.items() if name not in space.names}
    return Function(analysis.reading.graph, fixed, space, objective), space


def _likely(function: Function, space: Space, products: int, seed: int) -> ProbableBound | None:
    """A probable bound on the second derivative at the centre, from this many products with it."""
    generator, centre = torch.Generator().manual_seed(seed + _APART), function.at(space.center)
    start = torch.randn(space.center.shape, dtype=torch.float64, generator=generator).to(space.center.device)
    steps = krylov(lambda v: centre.bend(torch.ones_like(centre.value), v), start, products)
    return None if steps is None else ProbableBound(steps.most_likely(_FAILURE), _FAILURE)


def _start(point: Tensor, outputs: int, generator: torch.Generator) -> Attained:
    """A point with random directions, so that no symmetry of the model hides a larger value."""
    left, right = (
        unit(torch.randn(n, dtype=torch.float64, generator=generator).to(point.device))
        for n in (outputs, point.numel())
    )
    return Attained(0.0, point, torch.zeros_like(point), left, right)


def _ends(space: Space, start: Attained, generator: torch.Generator) -> list[Tensor]:
    """The ends of three chords through the point: two along the direction of the curvature, one at random."""
    if space.radius == 0:
        return []
    ends = [space.ascend(start.point, direction, 1.0) for direction in (start.right, -start.right)]
    return [*ends, space.random(generator)]
