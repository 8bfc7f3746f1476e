r"""Bounds of a layer that minimises: :math:`\beta(\alpha) = \operatorname{argmin}_\beta\zeta(\alpha, \beta)`.

With :math:`g = \nabla_\beta\zeta`, differentiating :math:`g(\alpha, \beta(\alpha)) = 0` once and twice in the
arguments :math:`\alpha_s` gives, as :math:`\nabla_\beta g \succeq \mu I`,

.. math:: \|\partial_s\beta\| \le J_s = \frac{C_s}\mu, \qquad
    \|\partial_s\partial_{s'}\beta\| \le \frac1\mu\big(T_{ss'} + T_{s\beta}J_{s'} + T_{s'\beta}J_s +
    T_{\beta\beta}J_sJ_{s'}\big)

for :math:`C_s \ge \|\partial_sg\|` and :math:`T_{ss'} \ge \|\partial_s\partial_{s'}g\|`: the second derivative is
:math:`-(\nabla_\beta g)^{-1}` times :math:`\partial_{ss'}g + \partial_{s\beta}g[\cdot, \partial_{s'}\beta] +
\partial_{s'\beta}g[\cdot, \partial_s\beta] + \partial_{\beta\beta}g[\partial_s\beta, \partial_{s'}\beta]`. With
one L for all C and one H for all T these are the paper's :math:`L\mu^{-1}` and :math:`H\mu^{-1}(1 + L\mu^{-1})^2`
(appendix "Implicit functions"; the sign of erratum 16 does not matter for norms).

*Batches.* Constants are declared for one sample, :math:`\alpha = (x_i, u)`. Stacked over n samples the parameters
u enter every row: :math:`\|D\beta[\dot u]\|^2 = \sum_i\|D\beta_i[\dot u]\|^2 \le n\,J_u^2\|\dot u\|^2`, and
likewise for two directions in parameters. In the inputs the derivatives are block diagonal: the largest block
counts, and :math:`\sum_i\|\dot x_i\|^2\|\dot u\|^2 = \|\dot X\|^2\|\dot u\|^2` for one of each. Contracted with a
costate, row i counts with the norm of its costate.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, norm
from surefoot.errors import SurefootError
from surefoot.implicit.constants import BETA, Constants
from surefoot.implicit.operation import Minimiser, minimiser, rewrite
from surefoot.implicit.problem import Tensors
from surefoot.implicit.proved import Minimum, in_graph
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Pair, Slot, Use
from surefoot.operations.common import root
from surefoot.operations.record import operation
from surefoot.scalar import Rounded


class _Layout:
    """The tensors of a call by the names ζ has for them."""

    def __init__(self, call: Call) -> None:
        assert isinstance(call.node.target, Minimiser)
        problem = self.problem = call.node.target.problem
        self.call = call
        lists = ("inputs", "parameters", "buffers")
        slots = [f"{key}.{k}" for key in lists for k in range(len(call.node.arguments[key]))]
        self.tensors = {name: call.tensors[slot] for name, slot in zip(problem.names, slots, strict=True)}
        self.slots = {name: slot for name, slot in zip(problem.names, slots, strict=True) if slot in call.slots}
        self.count = call.shape[0] if problem.batched else 1
        self.per_sample = frozenset(problem.inputs if problem.batched else ())

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bounds on the norms of the tensors; of one sample, where there are samples."""
        return {
            name: float(e.row_norms(self.count).max() if name in self.per_sample else e.bound)
            for name, e in self.tensors.items()
        }

    @cached_property
    def constants(self) -> Constants:
        """The declared constants where the tensors are."""
        constants = self.problem.constants_at(self.sizes)
        if constants is None or not constants.complete:
            raise self.call.refuse(
                "how smooth a minimiser is depends on its problem: how convex it is in β and how fast its "
                "derivatives change. Pass constants=sf.implicit.Constants(strong_convexity, smoothness, "
                "hessian_lipschitz) to ArgMin, or a function of the norms of its arguments that returns them"
            )
        return constants

    @cached_property
    def centre(self) -> tuple[Tensors, Tensor] | None:
        """The tensors at the centre and the minimisers there; ``None`` if the centre has no values."""
        values = tuple(e.value for e in self.tensors.values())
        if any(value is None for value in values):
            return None
        with torch.no_grad():
            return values, minimiser(self.problem, values)

    def minimum(self) -> Minimum:
        """The minimisers at a centre that has values, with their errors."""
        assert self.centre is not None
        try:
            return Minimum.of(self.problem, *self.centre, self.constants.strong_convexity)
        except SurefootError as error:
            raise self.call.refuse(
                f"how accurate its minimisers are cannot be proved: {error} Or write ζ in operations with rules"
            ) from error


def _samples(use: Use) -> list[str]:
    """The inputs that hold one problem per row."""
    assert isinstance(use.node.target, Minimiser)
    batched = use.node.target.problem.batched
    return [slot for slot in use.names if slot.startswith("inputs.")] if batched else []


def _pull(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    layout = _Layout(call)
    pulled = layout.minimum().pulled(costate)
    if pulled is None:  # beyond the range of doubles
        zeros = {slot: torch.zeros_like(e.value, dtype=torch.float64) for slot, e in call.varying.items()}
        return {slot: Rounded(zero, torch.full_like(zero, math.inf)) for slot, zero in zeros.items()}
    return {slot: pulled[in_graph(name)] for name, slot in layout.slots.items()}


def _distance(call: Call, value: Tensor) -> Magnitude:
    """A bound on the distance of the computed minimisers at the centre from the exact ones."""
    return _Layout(call).minimum().error


@operation("surefoot.argmin", rows=_samples, canonical=rewrite, pullback=_pull, error=_distance)
def argmin(call: Call) -> Bounds:
    """A layer that minimises, from the declared constants of its inner problem; the module has the proof."""
    layout = _Layout(call)
    constants, count, slots = layout.constants, layout.count, layout.slots
    mu, many = constants.strong_convexity, root(layout.count)
    if layout.centre is not None:
        values, beta = layout.centre
        layout.problem.refuse_overstated(beta, values, mu)
        # the minimisers are not farther from these than their arguments move them: constants need hold there only
        move = _rows(layout, constants).max() + layout.minimum().error
        layout.sizes[BETA] = float(move + max(map(norm, beta), key=float))
        constants = layout.problem.constants_at(layout.sizes) or constants
    slopes = {name: Magnitude.of(constants.slope(name)) / mu for name in slots}
    single = {}  # the second derivatives of one minimiser
    for a, b in combinations_with_replacement(slots, 2):
        whole = constants.bend(a, b) + constants.bend(a, BETA) * slopes[b] + constants.bend(b, BETA) * slopes[a]
        single[a, b] = (whole + constants.bend(BETA, BETA) * slopes[a] * slopes[b]) / mu
    shared = {pair for pair in single if not layout.per_sample.intersection(pair)}

    def along(costate: Enclosure) -> dict[Pair, Magnitude]:
        norms = costate.row_norms(count)
        most = {True: norms.sum(), False: norms.max()}
        return {
            (slots[a], slots[b]): most[(a, b) in shared] * amount
            for (a, b), amount in single.items()
            if (a, b) in shared or layout.per_sample.issuperset((a, b))
        }

    return Bounds(
        jacobian={slots[s]: slope if s in layout.per_sample else slope * many for s, slope in slopes.items()},
        curvature={
            (slots[a], slots[b]): amount * many if (a, b) in shared else amount
            for (a, b), amount in single.items()
        },
        rows=_rows(layout, constants) if layout.problem.batched else None,
        curvature_along=along if layout.problem.batched else None,
    )


def _rows(layout: _Layout, constants: Constants) -> Magnitude:
    """A bound on the distance of each minimiser from its centre."""
    rows = Magnitude.zero((layout.count,))
    for name in layout.slots:
        e, slope = layout.tensors[name], Magnitude.of(constants.slope(name)) / constants.strong_convexity
        if not e.is_constant or e.is_inexact:
            rows = rows + (e.row_spread(layout.count) if name in layout.per_sample else e.spread) * slope
    return rows
