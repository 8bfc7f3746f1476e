r"""Layers that minimise: :math:`\beta(\alpha) = \operatorname{argmin}_\beta\zeta(\alpha, \beta)`.

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
costate, row i counts with the norm of its costate. Derived constants are those of the stacked problem already.

*The centre* is a solution, not a value: it is off by the residual over :math:`\mu`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, norm
from surefoot.errors import SurefootError, UnsupportedOperation
from surefoot.graph.nodes import Spec
from surefoot.implicit.constants import BETA, Constants
from surefoot.implicit.derived import Derived, derived, in_graph
from surefoot.implicit.operation import Minimiser, minimiser, rewrite
from surefoot.implicit.problem import Tensors
from surefoot.implicit.proved import Minimum
from surefoot.implicit.solvers import solved
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Pair, Slot, Use
from surefoot.operations.common import ZERO, root
from surefoot.operations.record import operation
from surefoot.scalar import Rounded


def _samples(use: Use) -> list[str]:
    """The inputs that hold one problem per row."""
    assert isinstance(use.node.target, Minimiser)
    batched = use.node.target.problem.batched
    return [slot for slot in use.names if slot.startswith("inputs.")] if batched else []


def _minimum(layout: _Layout) -> Minimum:
    """The minimisers at a centre that has values, with their errors."""
    minimum = layout.minimum()
    assert minimum is not None
    return minimum


def _pull(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    layout = _Layout(call)
    pulled = _minimum(layout).pulled(costate)
    if pulled is None:  # beyond the range of doubles
        return {slot: _nothing(call.slots[slot].value) for slot in call.varying}
    return {slot: pulled[in_graph(name)] for name, slot in layout.slots.items()}


def _push(call: Call, tangents: Mapping[Slot, Tensor]) -> Rounded:
    layout = _Layout(call)
    names, minimum = {slot: name for name, slot in layout.slots.items()}, _minimum(layout)
    pushed = minimum.pushed({names[slot]: t for slot, t in tangents.items()})
    if pushed is None:
        return _nothing(minimum.beta.reshape(call.shape))
    value = pushed.value.reshape(call.shape)
    return Rounded(value, torch.full_like(value, float(pushed.error)))


def _nothing(like: Tensor) -> Rounded:
    """Numbers with infinite errors."""
    zero = torch.zeros_like(like, dtype=torch.float64)
    return Rounded(zero, torch.full_like(zero, math.inf))


def _distance(call: Call, value: Tensor) -> Magnitude:
    """A bound on the distance of the computed minimisers at the centre from the exact ones."""
    return _minimum(_Layout(call)).error


@operation("surefoot.argmin", rows=_samples, canonical=rewrite, pullback=_pull, push=_push, error=_distance)
def argmin(call: Call) -> Bounds:
    """A layer that minimises, from the constants of its inner problem."""
    layout = _Layout(call)
    constants = layout.constants
    if constants.complete:
        return _declared(layout)
    minimum = layout.minimum()
    centre, least = (None, -math.inf) if minimum is None else (minimum.beta, minimum.least_curvature())
    try:
        tensors = list(layout.tensors.values())
        stacked = derived(layout.problem, tensors, constants.strong_convexity, centre, least)
    except UnsupportedOperation as error:
        raise call.refuse(
            f"its constants cannot be derived from the operations of ζ: {error} Or declare them: "
            "sf.implicit.Constants(strong_convexity, smoothness, hessian_lipschitz)"
        ) from error
    return _from_derived(layout, stacked)


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

    def size(self, name: str) -> Magnitude:
        """A bound on the norm of a tensor; of one sample, if it has samples."""
        e = self.tensors[name]
        return e.row_norms(self.count).max() if name in self.per_sample else e.bound

    @cached_property
    def centre(self) -> tuple[Tensors, Tensor] | None:
        """The tensors at the centre and the minimisers there; ``None`` if the centre has no values."""
        values = tuple(e.value for e in self.tensors.values())
        if any(value is None for value in values):
            return None
        with torch.no_grad():
            return values, minimiser(self.problem, values)

    @cached_property
    def constants(self) -> Constants:
        """The declared constants of the problem."""
        constants = self.problem.constants
        if constants is None:
            raise self.call.refuse(
                "how smooth a minimiser is depends on how convex its problem is. Pass "
                "constants=sf.implicit.Constants(strong_convexity=mu) to ArgMin, with mu such that ζ − (mu/2)‖β‖² "
                "is convex in β"
            )
        if isinstance(constants, Constants):
            return constants
        return constants({name: float(self.size(name)) for name in self.problem.names})

    def minimum(self) -> Minimum | None:
        """The minimisers at the centre with their errors; ``None`` if the centre has no values."""
        return None if self.centre is None else self.proved(*self.centre)

    def proved(self, values: Tensors, beta: Tensor) -> Minimum:
        """Computed minimisers with their errors."""
        try:
            return Minimum.of(self.problem, values, beta, self.constants.strong_convexity)
        except SurefootError as error:
            raise self.call.refuse(
                f"how accurate its minimisers are cannot be proved: {error} Or write ζ in operations with rules"
            ) from error

    def bounds(
        self,
        jacobian: Mapping[str, Magnitude],
        curvature: Mapping[Pair, Magnitude],
        rows: Magnitude | None,
        shared: Mapping[Pair, Magnitude],
    ) -> Bounds:
        """Bounds from those of the stacked minimisers, by name.

        ``rows`` bounds the distance of each minimiser from its centre; ``shared`` are curvatures of single
        minimisers between arguments that all samples share.
        """
        slots, count = self.slots, self.count
        both = [pair for pair in curvature if self.per_sample.issuperset(pair)]

        def along(costate: Enclosure) -> dict[Pair, Magnitude]:
            norms = costate.row_norms(count)
            amounts = {pair: norms.max() * curvature[pair] for pair in both}
            amounts |= {pair: norms.sum() * amount for pair, amount in shared.items()}
            return {(slots[a], slots[b]): amount for (a, b), amount in amounts.items()}

        return Bounds(
            jacobian={slots[name]: amount for name, amount in jacobian.items()},
            curvature={(slots[a], slots[b]): amount for (a, b), amount in curvature.items()},
            rows=rows,
            curvature_along=along if self.problem.batched else None,
        )


def _declared(layout: _Layout) -> Bounds:
    """The bounds from declared constants, which are those of single samples."""
    constants = layout.constants
    mu, count, names = constants.strong_convexity, layout.count, list(layout.slots)
    slopes = {name: Magnitude.of(constants.slope(name)) / mu for name in names}
    pairs = list(combinations_with_replacement([*names, BETA], 2))
    single = _curvature(names, slopes, {pair: Magnitude.of(constants.bend(*pair)) for pair in pairs}, mu)
    many = root(count)
    shared = {pair: amount for pair, amount in single.items() if not layout.per_sample.intersection(pair)}
    rows = None
    if layout.problem.batched:
        rows = Magnitude.zero((count,))
        for name in names:
            e = layout.tensors[name]
            if not e.is_constant or e.is_inexact:
                rows = rows + (e.row_spread(count) if name in layout.per_sample else e.spread) * slopes[name]
    if layout.centre is not None:
        values, beta = layout.centre
        layout.problem.refuse_overstated(beta, values, mu)
        layout.minimum()  # refuses what cannot be proved
    bounds = layout.bounds(
        {name: slope if name in layout.per_sample else slope * many for name, slope in slopes.items()},
        {pair: amount * many if pair in shared else amount for pair, amount in single.items()},
        rows,
        shared if layout.problem.batched else {},
    )
    return replace(bounds, offset=_at_zero(layout) if layout.centre is None else None)


def _at_zero(layout: _Layout) -> Magnitude | None:
    """A bound on the norm of the minimisers where all arguments are zero.

    ``None`` if some arguments are not real or do not vary, or if no bound is proved.
    """
    problem, specs = layout.problem, [e.spec for e in layout.tensors.values()]
    if len(layout.slots) < len(specs) or problem.buffers:
        return None
    zeros = tuple(torch.zeros(spec.shape, dtype=torch.float64) for spec in specs if isinstance(spec, Spec))
    with torch.no_grad():
        beta = solved(problem, zeros).beta
    try:
        return norm(beta) + layout.proved(zeros, beta).error
    except UnsupportedOperation:
        return None


def _from_derived(layout: _Layout, constants: Derived) -> Bounds:
    """The bounds from derived constants, which are those of the stacked problem."""
    mu, names = constants.strong_convexity, list(layout.slots)
    slopes = {name: constants.slopes.get(name, ZERO) / mu for name in names}
    bends = {pair: constants.bends.get(pair, ZERO) for pair in combinations_with_replacement([*names, BETA], 2)}
    rows = constants.rows if layout.problem.batched else None
    bounds = layout.bounds(slopes, _curvature(names, slopes, bends, mu), rows, {})
    return replace(bounds, spread=constants.reach, bound=constants.bound)


def _curvature(
    names: list[str], slopes: Mapping[str, Magnitude], bends: Mapping[Pair, Magnitude], mu: float
) -> dict[Pair, Magnitude]:
    """The second derivatives of a minimiser, by pair of arguments."""
    both = bends[BETA, BETA]
    return {
        (a, b): (
            bends[a, b] + bends[a, BETA] * slopes[b] + bends[b, BETA] * slopes[a] + both * slopes[a] * slopes[b]
        )
        / mu
        for a, b in combinations_with_replacement(names, 2)
    }
