r"""What the costates say about a scalar function: its gradient, and a matrix of bounds of its second derivative.

.. math:: H = \sum_z\sum_{ij} C_{ij}(\lambda_z)\,\ell_{x_i}\ell_{x_j}^\top, \qquad
    |D^2F[v, w]| \le \sum_{ss'} H_{ss'}\|v_s\|\|w_{s'}\| .

Entry by entry both this and the matrix of the forward pass bound the second derivative between two variables,
:math:`\|D^2_{ss'}F\| \le H_{ss'}`, so the smaller entries make a valid matrix too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot.calculus.adjoint.backward import Backward, backward
from surefoot.calculus.adjoint.centre import at_the_centre
from surefoot.calculus.adjoint.costates import contracted, costates
from surefoot.calculus.adjoint.cotangents import Cotangents, cotangents
from surefoot.calculus.adjoint.samples import samples
from surefoot.calculus.adjoint.tangents import tangents
from surefoot.calculus.assemble import Term, assemble, terms
from surefoot.calculus.forward import Pass
from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, minimum, stack


@dataclass(frozen=True)
class ScalarBounds:
    """Bounds of a scalar function over the domain.

    Attributes:
        gradient: on the norm of the gradient, per variable.
        centre: the norm of the gradient at the centre, per variable, rounded up.
        summands: of the matrix, by operation.
        matrix: of bounds of the second derivative.
        variation: of bounds of how far it may be from that at the centre; ``None`` if they are not known.
    """

    gradient: Magnitude
    centre: Magnitude
    summands: list[Term]
    matrix: Magnitude
    variation: Magnitude | None = None

    def by_block(self, blocks: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """The norm of the gradient at the centre, per block of variables."""
        return {path: float(self.centre[list(members)].norm()) for path, members in blocks.items()}


def scalar_bounds(result: Pass) -> ScalarBounds | None:
    """The adjoint pass; ``None`` if the output is not one number or the centre is not known."""
    at = backward(result)
    if at is None:
        return None
    result, found, back = _costates(result, at)
    reached = [step for step in result.steps if step.node.name in found]
    summands = terms(result, {step.node.name: contracted(step, found[step.node.name]) for step in reached})
    variables = [found.get(name) for name in result.region.variables]
    whole, zero = assemble(summands, len(variables)), Magnitude.zero()
    return ScalarBounds(
        gradient=stack([zero if e is None else e.bound for e in variables]),
        centre=stack([zero if e is None else e.centre_norm for e in variables]),
        summands=[replace(term, step=term.step.light) for term in summands],
        matrix=whole if back is None else minimum(whole, back.matrix),
        variation=None if back is None else back.variation,
    )


def _costates(result: Pass, at: Backward) -> tuple[Pass, Mapping[str, Enclosure], Cotangents | None]:
    """The forward pass and the costates; where samples are separate, sharper, and with bounds of the second
    derivative.
    """
    try:
        separate = samples(result)
        if separate is None:
            return result, costates(result, at), None
        centre = at_the_centre(separate, len(result.region.variables), round_off(result))
    except (RuntimeError, NotImplementedError, OverflowError, IndexError):  # no second derivative, or out of range
        return result, costates(result, at), None
    forward = tangents(result, separate, centre)
    back = cotangents(forward, centre, at)
    return forward.result, back.costates, back


def round_off(result: Pass) -> float:
    """The relative round-off at the centre; see :mod:`surefoot.calculus.adjoint.cotangents`.

    Raises:
        OverflowError: if so much is added up that nothing is left.
    """
    rows = max((step.node.specs[0].shape or (0,))[0] for step in result.steps)
    total = sum((step.bounds.reduction + 16.0) ** 2 for step in result.steps)
    part = 8.0 * (total + rows) * 2.0**-53
    if part > 1.0:
        raise OverflowError(f"{total:g} roundings leave nothing to be proved at the centre")
    return part
