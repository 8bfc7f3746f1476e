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
from surefoot.calculus.adjoint.centre import Centre as SampleCentre
from surefoot.calculus.adjoint.centre import at_the_centre
from surefoot.calculus.adjoint.composed import Composed
from surefoot.calculus.adjoint.costates import contracted, costates
from surefoot.calculus.adjoint.cotangents import Cotangents, cotangents
from surefoot.calculus.adjoint.samples import Samples, samples
from surefoot.calculus.adjoint.tangents import Ways, tangents
from surefoot.calculus.adjoint.whole import Whole
from surefoot.calculus.assemble import Term, assemble, terms
from surefoot.calculus.effort import AROUND_DIRECTIONS, AROUND_SAMPLES, NORMAL, ONE_BALL, Effort, in_gradients
from surefoot.calculus.forward import Pass
from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, minimum, stack

_BY_ENTRIES = replace(NORMAL, directions=0)  # of the matrix; its norm is not asked for


@dataclass(frozen=True)
class ScalarBounds:
    """Bounds of a scalar function over the domain."""

    gradient: Magnitude  # on the norm of the gradient, per variable
    centre: Magnitude  # the norm of the gradient at the centre, per variable, rounded up
    summands: list[Term]  # of the matrix, by operation
    matrix: Magnitude  # of bounds of the second derivative
    # of bounds of how far it may be from that at the centre; ``None`` if they are not known
    variation: Magnitude | None = None
    moved: Magnitude | None = None  # a bound on the norm of that, from derivatives along all directions

    def by_block(self, blocks: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """The norm of the gradient at the centre, per block of variables."""
        return {path: float(self.centre[list(members)].norm()) for path, members in blocks.items()}


class Centre:
    """What is found at the centre with some effort, once for all domains around it, and what all of them cost.

    Args:
        effort: what it may cost.
        whole: the second derivative in all weights together, if domains are balls of these.
        alone: whether there is no other domain than the centre.
        keep: whether second derivatives are kept, instead of their norms.
    """

    def __init__(
        self, effort: Effort = NORMAL, whole: Whole | None = None, alone: bool = False, keep: bool = False
    ) -> None:
        self.effort, self.whole, self._alone, self._keep = effort, whole, alone, keep
        self.cost = 0 if whole is None else in_gradients(directions=whole.directions)
        self.ways: list[Ways] = []
        self._by_sample: tuple[Samples, SampleCentre] | None = None
        self._asked = False

    @property
    def found(self) -> Whole | SampleCentre | None:
        """What has the norm of the second derivative, or the second derivative itself."""
        return self.whole or (None if self._by_sample is None else self._by_sample[1])

    def shells(self, result: Pass) -> int:
        """In how many shells a ball is best taken apart: what is known of one sharpens the next where derivatives
        at the centre are exact.
        """
        read = {name for step in result.steps for name in (step.node.name, *step.node.inputs)}
        known = all(result.enclosures[name].value is not None for name in read)
        exact = self.whole is not None or (known and self.by_sample(result) is not None)
        return self.effort.parts if exact else 1

    def inside(self, result: Pass) -> Ways | None:
        """How far rows move on the largest domain inside this one that was asked for just before."""
        self.ways = self.ways[-2:]
        smaller = [ways for ways in self.ways if ways.lies_in(result.region)]
        return max(smaller, key=lambda ways: sum(radius for _, radius in ways.region.groups), default=None)

    def by_sample(self, result: Pass) -> tuple[Samples, SampleCentre] | None:
        """Derivatives sample by sample; ``None`` if samples interact or it would cost too much."""
        if not self._asked:
            self._asked = True
            if self.whole is not None:
                return None
            try:
                self._by_sample = self._separated(result)
            except (RuntimeError, NotImplementedError, OverflowError, IndexError):  # none, or out of range
                self._by_sample = None
        return self._by_sample

    def slopes(
        self, result: Pass, costates: Mapping[str, Enclosure]
    ) -> tuple[dict[str, Magnitude] | None, dict[str, Magnitude]]:
        """Those of every tensor at the centre, through composed Jacobians where nothing else is sharp, and those
        that are weighted with curvature; ``None`` for those of the forward pass.
        """
        if not self._alone or not self.effort.composed or self.whole is not None or self._by_sample is not None:
            return None, {}
        try:
            composed = Composed(result, self.effort.composed, self.effort.multiplications)
            self.cost += round(composed.cost)
            return composed.slopes(costates)
        except (RuntimeError, NotImplementedError, OverflowError):  # no derivative is proved, or out of range
            return None, {}

    def _separated(self, result: Pass) -> tuple[Samples, SampleCentre] | None:
        found = samples(result, self.effort)
        if found is None:
            return None
        lengths = [result.enclosures[name].numel for name in result.region.variables]
        whole = self.effort.adds_up(sum(lengths), len(found.injected[0]))
        centre = at_the_centre(found, len(lengths), round_off(result), lengths if whole else (), self._keep)
        widths, weights = zip(*((source.width, source.matrix.numel()) for source in found.sources), strict=True)
        self.cost += in_gradients(widths, sum(weights), numbers=sum(lengths) if whole else 0)
        return found, centre


def scalar_bounds(result: Pass, centre: Centre | None = None) -> ScalarBounds | None:
    """The adjoint pass; ``None`` if the output is not one number or the centre is not known."""
    at = backward(result)
    if at is None:
        return None
    first, centre = result, Centre(_BY_ENTRIES) if centre is None else centre
    result, found, back = _costates(result, at, centre)
    moved, together = None, centre.whole
    centre.cost += ONE_BALL if back is None else ONE_BALL + AROUND_SAMPLES
    if together is not None:
        ((_, radius),) = first.region.groups
        moved = together.moved(radius)
        centre.cost += AROUND_DIRECTIONS * together.balls
        together.balls = 0
    reached = [step for step in result.steps if step.node.name in found]
    bends = {step.node.name: contracted(step, found[step.node.name]) for step in reached}
    slopes, weighted = centre.slopes(result, found)
    summands = [
        replace(term, weight=Magnitude.of(1.0), left=half, right=half)
        if (half := weighted.get(term.step.node.name)) is not None
        else term
        for term in terms(result, bends, slopes)
    ]
    variables = [found.get(name) for name in result.region.variables]
    whole, zero = assemble(summands, len(variables)), Magnitude.zero()
    if together is not None and together.hessian is None and moved is not None:
        whole = minimum(whole, together.between_variables() + moved)
    return ScalarBounds(
        gradient=stack([zero if e is None else e.bound for e in variables]),
        centre=stack([zero if e is None else e.centre_norm for e in variables]),
        summands=[replace(term, step=term.step.light) for term in summands],
        matrix=whole if back is None else minimum(whole, back.matrix),
        variation=None if back is None else back.variation,
        moved=moved,
    )


def _costates(
    result: Pass, at: Backward, centre: Centre
) -> tuple[Pass, Mapping[str, Enclosure], Cotangents | None]:
    """The forward pass and the costates; where samples are separate, sharper, and the second derivative."""
    known = centre.by_sample(result)
    if known is None:
        return result, costates(result, at), None
    forward = tangents(result, *known, centre.inside(result))
    back = cotangents(forward, known[1], at)
    centre.ways.append(forward.ways)
    return forward.result, back.costates, back


def round_off(result: Pass) -> float:
    """The relative round-off at the centre; see :mod:`surefoot.calculus.adjoint.cotangents`."""
    rows = max((step.node.specs[0].shape or (0,))[0] for step in result.steps)
    total = sum((step.bounds.reduction + 16.0) ** 2 for step in result.steps)
    part = 8.0 * (total + rows) * 2.0**-53
    if part > 1.0:
        raise OverflowError(f"{total:g} roundings leave nothing to be proved at the centre")
    return part
