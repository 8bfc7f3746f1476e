"""Certificates from norms: of a model's outputs, in its input, on sets around any point, without values.

The same pass gives the constants of an objective on any set; around the weights there are sharper ones
(:mod:`surefoot.certificate.proving`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.bounds.breakdown import (
    by_group,
    groups,
    largest_curvature,
    largest_slope,
    reasons,
    remarks,
    shares,
    smoothness_by_tensor,
)
from surefoot.bounds.function import Function
from surefoot.bounds.input_gain import input_gain
from surefoot.bounds.size import (
    Sizes,
    Term,
    assemble,
    by_block,
    in_blocks,
    objective,
    smoothness,
    terms,
)
from surefoot.calculus.assemble import Curvature
from surefoot.certificate.added import Bounds
from surefoot.certificate.record import Certificate
from surefoot.certificate.rows import Row
from surefoot.domains import Box, Domain
from surefoot.magnitude import Magnitude, minimum, stack

_MANY = 4000  # with more variables than this, second derivatives are bounded between blocks
_PASSES = 2  # what a pass through a gradient program costs, in gradients


@dataclass(frozen=True)
class _Constants:
    """What one pass proves: m, ℓ in each variable, H with its summands; value and gradient at the centre."""

    bound: Magnitude
    lipschitz: Magnitude
    matrix: Magnitude
    summands: Sequence[Term]
    value: Magnitude
    at_centre: Magnitude | None = None
    gain: Magnitude = Magnitude.infinity()  # noqa: RUF009 - immutable


def bounds_from_sizes(
    function: Function, domain: Domain | Box, input_norm: float | None = None, effort: str = "quick"
) -> Bounds:
    """What norms prove of a function over a domain.

    Raises:
        DomainError: if the domain does not fit.
        UnsupportedOperation: if a primitive has no rule.
    """
    balls = function.balls_around(domain) if isinstance(domain, Box) else domain
    result = function.over(balls, input_norm)
    region, blocks = result.region, result.region.blocks
    many = not function.is_scalar and len(region.variables) > _MANY
    proved = _of_objective(result) if function.is_scalar else _of_outputs(function, result, many)
    members = None if many else tuple(blocks.values())
    smooth = smoothness(proved.matrix)
    present = balls.center == "present"
    around = present and proved.at_centre is not None and function.wrt == "params"
    certificate = Certificate(
        bound=proved.bound,
        lipschitz=minimum(proved.lipschitz.norm(), proved.gain),
        smoothness=smooth,
        block_lipschitz={
            path: minimum(proved.lipschitz[list(where)].norm(), proved.gain) for path, where in blocks.items()
        },
        block_smoothness=proved.matrix if members is None else by_block(proved.matrix, members),
        reasons=() if smooth.is_finite else tuple(reasons(proved.summands)),
        remarks=tuple(remarks(result)),
        domain=str(domain),
        wrt=function.wrt,
        scalar=function.is_scalar,
        nonnegative=function.nonnegative,
        block_gradients=_by_block(proved.at_centre, blocks) if around else None,
        radius=balls.extent(blocks) if present else None,
        weights_inside=function.holds_present(domain),
        effort=effort,
        gradients=_PASSES if around else None,
        make_rows=lambda: _rows(function, result, proved, smooth),
        make_damping=_damping(function, balls, input_norm),
    )
    matrix = Curvature(proved.matrix, Magnitude.infinity(), proved.matrix * 0.0 + Magnitude.infinity())
    return Bounds(certificate, region.variables, members, proved.value, matrix)


def _of_outputs(function: Function, result: Sizes, many: bool) -> _Constants:
    summands, ends, region = terms(result), result.outputs, result.region
    matrix = (
        assemble(in_blocks(summands, region), len(region.blocks))
        if many
        else assemble(summands, len(region.variables))
    )
    gain = Magnitude.of(input_gain(result)) if function.wrt == "input" else Magnitude.infinity()
    lipschitz = stack([end.lipschitz for end in ends]).norm(axis=0)
    bound = stack([end.bound for end in ends]).norm()
    return _Constants(bound, lipschitz, matrix, summands, bound, gain=gain)


def _of_objective(result: Sizes) -> _Constants:
    proved, value = objective(result), result.outputs[0]
    size = proved.bound if value.value is None else Magnitude.of(abs(float(value.value))) + value.error
    return _Constants(proved.bound, proved.gradients, proved.matrix, proved.summands, size, proved.at_centre)


def _by_block(norms: Magnitude | None, blocks: Mapping[str, tuple[int, ...]]) -> dict[str, float] | None:
    if norms is None:
        return None
    return {path: float(norms[list(where)].norm()) for path, where in blocks.items()}


def _rows(function: Function, result: Sizes, proved: _Constants, smooth: Magnitude) -> list[Row]:
    """One row per group of operations, with the constants of its result as a function of the variables."""
    by_tensor, share = smoothness_by_tensor(result), shares(proved.summands)
    ends = set(result.program.outputs[:1]) if function.is_scalar or len(result.program.outputs) == 1 else set()
    whole = minimum(proved.lipschitz.norm(), proved.gain)
    return [
        Row(
            module=group.last.path,
            operation=group.label,
            shape=tuple(group.last.shape),
            bound=result.sizes[group.last.index].bound,
            lipschitz=whole if group.last.index in ends else result.sizes[group.last.index].lipschitz.norm(),
            smoothness=smooth if group.last.index in ends else by_tensor[group.last.index],
            share=by_group(share, group),
            slope=largest_slope(result, group),
            curvature=largest_curvature(result, group),
        )
        for group in groups(result)
    ]


def _damping(
    function: Function, domain: Domain, input_norm: float | None
) -> Callable[[], tuple[Magnitude, bool]] | None:
    r"""Computes :math:`\ell_hL_\psi` and says whether the loss is quadratic; ``None`` if there is no convex loss.

    :math:`\ell_h` bounds the gradient of the loss at the outputs that occur over the domain: a pass through the
    loss alone, from the size of the outputs.
    """
    if function.parts is None:
        return None
    parts = function.parts

    def compute() -> tuple[Magnitude, bool]:
        network, loss = parts()
        result = network.over(domain, input_norm)
        variables = len(result.region.variables)
        matrix = objective(result).matrix if network.is_scalar else assemble(terms(result), variables)
        sizes = loss.from_size(result.outputs[0])
        return sizes.outputs[1].bound * smoothness(matrix), function.quadratic

    return compute
