"""From a model and a domain to lower bounds of its constants."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.attained import Estimate, LowerBound
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.leaves import Wrt
from surefoot.domains import Domain, DomainError, ProductBall
from surefoot.lower.ascent import Found, climb, curvature, size, slope, steepest_part
from surefoot.lower.function import Function, Objective
from surefoot.lower.space import Space, unit

_POWER_ITERATIONS = 4


def estimate(
    model: nn.Module,
    x: Any,
    *,
    domain: Domain | None = None,
    objective: Objective | None = None,
    wrt: Wrt = "params",
    starts: int = 4,
    steps: int = 12,
    seed: int = 0,
) -> Estimate:
    r"""Lower bounds of the constants that :func:`surefoot.certify` bounds from above, by ascent in the domain.

    Every number is attained in the domain, in double precision: a value of :math:`\|f\|`, of
    :math:`\|Df^\top w\|` with a unit :math:`w`, of :math:`\|D^2\langle w, f\rangle v\|` with unit :math:`v, w`, or
    a difference quotient of :math:`Df^\top w`, which shows kinks. The model is not touched.

    Args:
        model: any module that can be captured; its weights must have values (not on ``meta``).
        x: a batch.
        domain: where the variables may be; by default within 1 of the origin, every block or the input. To compare
            with a certificate, pass the domain of that.
        objective: a map from the model's outputs to a number; then the constants are those of the objective.
        wrt: what varies: the parameters, or the input.
        starts: from how many points the ascent starts: the centre, then random ones.
        steps: how many steps each ascent takes at most.
        seed: of the random points and directions.

    Raises:
        CaptureError: if the model cannot be read.
        DomainError: if the domain does not fit, or the model has no values.
    """
    domain = ProductBall(1.0) if domain is None else domain
    if starts < 1 or steps < 0:
        raise DomainError(f"an ascent needs at least one start and no negative steps, got {starts} and {steps}")
    function, space = _function(model, x, domain, wrt, objective)
    generator = torch.Generator().manual_seed(seed)
    outputs = function(space.center).numel()
    m, ell, smooth = [0.0], [0.0], [0.0]
    for k in range(starts):
        point = space.center if k == 0 else space.random(generator, 1.0 if k % 2 else 0.5)
        for score, values in ((size, m), (slope(_POWER_ITERATIONS), ell), (curvature(_POWER_ITERATIONS), smooth)):
            found = [_start(point, outputs, generator)]
            found += climb(function, space, score, found[0], steps)
            values += [each.value for each in found]
            point = found[-1].point
        smooth += _differences(function, space, found[-1], generator)
    return Estimate(_largest(m), _largest(ell), _largest(smooth), str(domain), wrt)


def _function(
    model: nn.Module, x: Any, domain: Domain, wrt: Wrt, objective: Objective | None
) -> tuple[Function, Space]:
    if isinstance(objective, nn.Module):
        objective = copy.deepcopy(objective).double()
    analysis = Analysis.of(model, x)
    if any(value.device.type == "meta" for value in analysis.values.values()):
        raise DomainError(
            "a search needs values, and the meta device has none: move the model and the input to one"
        )
    leaves, region = analysis.enclosed(domain, wrt)
    values: dict[str, Tensor] = {name: enclosure.value for name, enclosure in leaves.items()}
    space = Space.of(region, values)
    fixed = {name: value for name, value in values.items() if name not in space.names}
    return Function(analysis.reading.graph, fixed, space, objective), space


def _start(point: Tensor, outputs: int, generator: torch.Generator) -> Found:
    """A point with random directions, so that no symmetry of the model hides what there is to find."""
    left, right = (
        unit(torch.randn(n, dtype=torch.float64, generator=generator).to(point.device))
        for n in (outputs, point.numel())
    )
    return Found(0.0, point, torch.zeros_like(point), left, right)


def _differences(function: Function, space: Space, found: Found, generator: torch.Generator) -> list[float]:
    """Ratios on three chords through the point: along the direction of the curvature, both ways, and at random."""
    if space.radius == 0:
        return []
    ends = [space.ascend(found.point, direction, 1.0) for direction in (found.right, -found.right)]
    ends.append(space.random(generator))
    return [steepest_part(function, found.point, end, found.left) for end in ends]


def _largest(values: list[float]) -> LowerBound:
    """The largest finite value; what overflowed was not attained."""
    return LowerBound(max(value for value in values if math.isfinite(value)))
