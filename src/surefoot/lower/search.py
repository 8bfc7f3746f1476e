r"""Lower bounds on the constants of a model over a domain: ascent from several starting points.

For fixed :math:`u` the norm of the Jacobian is found by power iteration, :math:`v \propto Df^\top w`,
:math:`w \propto Df\,v`; that of the second derivative by the same idea for a tensor,
:math:`v \propto D^2\langle w, f\rangle v`, :math:`w \propto D^2f[v, v]`. For fixed directions, :math:`u` takes
projected gradient steps, shortened until the value grows. Only improvements are kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.attained import Estimate, LowerBound
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.leaves import Wrt
from surefoot.domains import Ball, Domain, DomainError, ProductBall
from surefoot.linear_solve import Flat, lowest_ritz
from surefoot.lower.function import Derivatives, Function, Objective, Space
from surefoot.program.checks import plainly

_LONGEST, _GROWTH, _SHRINKAGE, _SHORTEST = 2.0, 1.5, 0.25, 1e-3  # steps of an ascent, in radii
_GRADIENT_ERROR = 1e-12  # relative; taken off differences of gradients in double precision
_POWER_ITERATIONS, _HALVINGS = 4, 24
_BUDGET, _STARTS, _STEPS = 200.0, 4, 12
_SHARES = (0.08, 0.35, 0.7)  # parts of the budget of a start that the value, the slope and the curvature end at


@dataclass(frozen=True)
class Attained:
    r"""A value at a point, its gradient in the point, and the directions :math:`w, v` it belongs to."""

    value: float
    point: Tensor
    uphill: Tensor
    left: Tensor
    right: Tensor


_Score = Callable[[Derivatives, Tensor, Tensor, Tensor], Attained]


@plainly
def estimate(
    model: nn.Module,
    x: Any,
    objective: Objective | None = None,
    *,
    domain: Domain | None = None,
    wrt: Wrt = "params",
    budget: float | None = None,
    starts: int | None = None,
    seed: int = 0,
) -> Estimate:
    r"""Lower bounds on the constants that :func:`surefoot.certify` bounds from above, by ascent in the domain.

    Every number is attained in the domain, in double precision: a value of :math:`\|f\|`, of :math:`\|Df^\top w\|`
    with a unit :math:`w`, of :math:`\|D^2\langle w, f\rangle v\|` with unit :math:`v, w`, or a difference quotient
    of :math:`Df^\top w`, which shows kinks. The model is not changed.

    Args:
        model: any module that can be captured; its weights must have values (not on ``meta``).
        x: a batch.
        objective: a map from the model's outputs to a number; then the constants are those of the objective.
        domain: where the variables may be; by default within 1 of the origin, every block or the input. To compare
            with a certificate, pass its domain.
        wrt: what varies: the parameters, or the input.
        budget: the work allowed, in gradients of the model; a search that exceeds it finishes its current step and
            returns the best so far. By default 200, and no limit if starts are given.
        starts: number of points from which the ascent starts: the centre, then random ones. By default 4.
        seed: seed of the random points and directions.

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
        budget = _BUDGET if starts is None else math.inf
    starts = _STARTS if starts is None else starts
    if starts < 1:
        raise DomainError(f"a search needs at least one start, got {starts}")
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
    values: list[list[float]] = [[0.0], [0.0], [0.0]]
    for k in range(starts):
        before = function.spent
        if before >= budget:
            break
        point = space.center if k == 0 else space.random(generator, 1.0 if k % 2 else 0.5)
        for which, score in enumerate((_size, _slope, _curvature)):
            # random directions, so that no symmetry of the model hides a larger value
            left, right = (_random(n, generator).to(point) for n in (outputs, point.numel()))
            until = before + _SHARES[which] * (budget - before)
            for highest in _climb(function, space, score, point, left, right, until):
                values[which].append(highest.value)
            point = highest.point
        if not space.is_point:
            # three chords: two along the direction of the curvature, one at random
            ends = [space.ascend(point, direction, 1.0) for direction in (highest.right, -highest.right)]
            for end in (*ends, space.random(generator)):
                if function.spent < budget:
                    values[2].append(_steepest_part(function, point, end, highest.left, budget))
    # an overflow is not attained
    bound, slope, bend = (LowerBound(max(filter(math.isfinite, each))) for each in values)
    return Estimate(bound, slope, bend, str(domain), wrt)


def curvature_at_weights(model: nn.Module, x: Any, objective: nn.Module, products: int) -> LowerBound | None:
    r"""The largest :math:`|\lambda|` of some Lanczos steps from the gradient: at most :math:`\|\nabla^2F(u)\|`.

    Ritz values are eigenvalues of :math:`Q^\top\nabla^2F(u)Q` with orthonormal :math:`Q`, so none is larger in
    size than the norm (Cauchy's interlacing); in double precision up to a relative 1e-12 or so. A product with the
    Hessian costs about two gradients, and a handful of them is accurate to a few per cent; three vectors are held.
    ``None`` if the Hessian is zero, as where a function is affine.

    >>> curvature_at_weights(nn.Linear(1, 1, bias=False), torch.ones(4, 1), sf.Square(torch.ones(4, 1)), 3)
    LowerBound(1.000e+00)
    """
    function, space = _function(Analysis.of(model, x, objective), Ball(0.0), "params", None)
    at_weights = function.at(space.center)
    one = torch.ones_like(at_weights.value)
    slope = at_weights.along(one)
    if not 0 < float(torch.linalg.vector_norm(slope)) < math.inf:
        return None
    low, high, _ = lowest_ritz(lambda v: at_weights.along(one, v), _unit(slope), space=Flat(), most=products)
    largest = max(-low, high)
    return LowerBound(largest) if 0 < largest < math.inf else None


def _function(analysis: Analysis, domain: Domain, wrt: Wrt, objective: Objective | None) -> tuple[Function, Space]:
    """The model as a function on the domain, and the domain as a space."""
    leaves, region = analysis.enclosed(domain, wrt)
    values: dict[str, Tensor] = {name: enclosure.value for name, enclosure in leaves.items()}
    space = Space(region, values)
    fixed = {name: value for name, value in values.items() if name not in space.names}
    return Function(analysis.reading.graph, fixed, space, objective), space


def _climb(
    function: Function, space: Space, score: _Score, point: Tensor, left: Tensor, right: Tensor, until: float
) -> Iterator[Attained]:
    """Projected ascent: the starting point and every improvement, until so many gradients are spent."""
    best, length = score(function.at(point), point, left, right), _LONGEST
    yield best
    for _ in range(_STEPS):
        if function.spent >= until or length < _SHORTEST:
            return
        point = space.ascend(best.point, best.uphill, length)
        trial = score(function.at(point), point, best.left, best.right)
        if best.value < trial.value < math.inf:
            best, length = trial, min(_LONGEST, length * _GROWTH)
            yield best
        else:
            length *= _SHRINKAGE


def _size(f: Derivatives, point: Tensor, left: Tensor, right: Tensor) -> Attained:
    r""":math:`\|f(u)\|`, which grows along :math:`Df^\top f/\|f\|`."""
    outward = _unit(f.value)
    return Attained(float(torch.linalg.vector_norm(f.value)), point, f.along(outward), outward, right)


def _slope(f: Derivatives, point: Tensor, left: Tensor, right: Tensor) -> Attained:
    r""":math:`\|Df(u)^\top w\|` after some power iterations; it grows along :math:`D^2\langle w, f\rangle v`."""
    pulled = f.along(left)
    for _ in range(_POWER_ITERATIONS):
        pushed = _unit(f.along(None, _unit(pulled)))
        if not bool(pushed.any()):
            break
        left, pulled = pushed, f.along(pushed)
    right = _unit(pulled)
    return Attained(float(torch.linalg.vector_norm(pulled)), point, f.along(left, right), left, right)


def _curvature(f: Derivatives, point: Tensor, left: Tensor, right: Tensor) -> Attained:
    r""":math:`\|D^2\langle w, f\rangle(u)v\|` after some alternating steps; it grows along a third derivative."""
    bent = f.along(left, right)
    for _ in range(_POWER_ITERATIONS):
        if not bool(bent.any()):
            break
        right = _unit(bent)
        turned = f.along(None, right, right)
        left = _unit(turned) if bool(turned.any()) else left
        bent = f.along(left, right)
    sign = 1.0 if float(bent @ right) >= 0 else -1.0
    uphill = sign * f.along(left, right, right)
    return Attained(float(torch.linalg.vector_norm(bent)), point, uphill, left, right)


def _steepest_part(function: Function, a: Tensor, b: Tensor, w: Tensor, until: float) -> float:
    r"""A lower bound on the smoothness from differences of gradients, which see kinks.

    Where :math:`Df` jumps, the second derivative at a point shows nothing, but for any two points
    :math:`L \ge \|(Df(u) - Df(u'))^\top w\|_2 / \|u - u'\|_2` with :math:`\|w\|_2 = 1`. By the triangle
    inequality one half of the segment has at least the ratio of the whole, so halving never loses: the ratio tends
    to the curvature where there is one, and doubles with every halving at a kink. The largest one is returned.
    """

    def ratio(a: Tensor, b: Tensor, at_a: Tensor, at_b: Tensor) -> float:
        distance, change = (float(torch.linalg.vector_norm(v)) for v in (a - b, at_a - at_b))
        error = _GRADIENT_ERROR * float(torch.linalg.vector_norm(at_a) + torch.linalg.vector_norm(at_b))
        return max(0.0, change - error) / distance if distance > 0 else 0.0

    at_a, at_b = function.at(a).along(w), function.at(b).along(w)
    best = ratio(a, b, at_a, at_b)
    for _ in range(_HALVINGS):
        if function.spent >= until:
            break
        middle = (a + b) / 2
        at_middle = function.at(middle).along(w)
        left, right = ratio(a, middle, at_a, at_middle), ratio(middle, b, at_middle, at_b)
        if left >= right:
            b, at_b = middle, at_middle
        else:
            a, at_a = middle, at_middle
        best = max(best, left, right)
    return best


def _unit(vector: Tensor) -> Tensor:
    """The vector divided by its norm; zero stays zero."""
    size = torch.linalg.vector_norm(vector)
    return vector / size if bool(size > 0) else vector


def _random(count: int, generator: torch.Generator) -> Tensor:
    return _unit(torch.randn(count, dtype=torch.float64, generator=generator))
