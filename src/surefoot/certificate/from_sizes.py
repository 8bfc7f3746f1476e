"""What norms of the tensors of an objective's gradient program prove of the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from surefoot.bounds.size import Sizes, Term, assemble, by_block, objective, smoothness, terms
from surefoot.calculus.assemble import Curvature
from surefoot.certificate.added import Bounds
from surefoot.certificate.record import Certificate
from surefoot.certificate.rows import Row
from surefoot.domains import Domain
from surefoot.magnitude import Magnitude


def bounds_from_sizes(function: Function, domain: Domain, effort: str) -> Bounds:
    """What norms prove of an objective over a domain around its weights.

    Raises:
        DomainError: if the domain does not fit.
        UnsupportedOperation: if a primitive has no rule.
    """
    result = function.over(domain)
    region, blocks = result.region, result.region.blocks
    proved, value = objective(result), result.outputs[0]
    members, smooth = tuple(blocks.values()), smoothness(proved.matrix)
    certificate = Certificate(
        bound=proved.bound,
        lipschitz=proved.gradients.norm(),
        smoothness=smooth,
        block_lipschitz={path: proved.gradients[list(where)].norm() for path, where in blocks.items()},
        block_smoothness=by_block(proved.matrix, members),
        reasons=() if smooth.is_finite else tuple(reasons(proved.summands)),
        remarks=tuple(remarks(result)),
        domain=str(domain),
        scalar=True,
        nonnegative=function.nonnegative,
        block_gradients=_by_block(proved.at_centre, blocks),
        radius=domain.extent(blocks),
        weights_inside=function.holds_present(domain),
        effort=effort,
        make_rows=lambda: _rows(result, proved.gradients.norm(), proved.summands, smooth),
        make_damping=_damping(function, domain),
    )
    size = proved.bound if value.value is None else Magnitude.of(abs(float(value.value))) + value.error
    matrix = Curvature(proved.matrix, Magnitude.infinity(), proved.matrix * 0.0 + Magnitude.infinity())
    return Bounds(certificate, region.variables, members, size, matrix)


def _by_block(norms: Magnitude | None, blocks: Mapping[str, tuple[int, ...]]) -> dict[str, float] | None:
    if norms is None:
        return None
    return {path: float(norms[list(where)].norm()) for path, where in blocks.items()}


def _rows(result: Sizes, lipschitz: Magnitude, summands: Sequence[Term], smooth: Magnitude) -> list[Row]:
    """One row per group of operations, with the constants of its result as a function of the variables."""
    by_tensor, share, end = smoothness_by_tensor(result), shares(summands), result.program.outputs[0]
    return [
        Row(
            module=group.last.path,
            operation=group.label,
            shape=tuple(group.last.shape),
            bound=result.sizes[group.last.index].bound,
            lipschitz=lipschitz if group.last.index == end else result.sizes[group.last.index].lipschitz.norm(),
            smoothness=smooth if group.last.index == end else by_tensor[group.last.index],
            share=by_group(share, group),
            slope=largest_slope(result, group),
            curvature=largest_curvature(result, group),
        )
        for group in groups(result)
    ]


def _damping(function: Function, domain: Domain) -> Callable[[], tuple[Magnitude, bool]] | None:
    r"""Computes :math:`\ell_hL_\psi` and says whether the loss is quadratic; ``None`` if there is no convex loss.

    :math:`\ell_h` bounds the gradient of the loss at the outputs that occur over the domain: a pass through the
    loss alone, from the size of the outputs.
    """
    if function.parts is None:
        return None
    parts = function.parts

    def compute() -> tuple[Magnitude, bool]:
        network, loss = parts()
        result = network.over(domain)
        variables = len(result.region.variables)
        matrix = objective(result).matrix if network.is_scalar else assemble(terms(result), variables)
        sizes = loss.from_size(result.outputs[0])
        return sizes.outputs[1].bound * smoothness(matrix), function.quadratic

    return compute
