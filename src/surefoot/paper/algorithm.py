r"""Algorithm "Automatic smoothness computations" (Algorithm 4) and the corollary around a point (section 4).

Proposition smoothdeep: for layers :math:`\varphi_t = a_{t,k_t}\circ\dots\circ a_{t,1}\circ b_t` the outputs
:math:`m_\tau, \ell_\tau, L_\tau` bound the chain, its Jacobian and its second derivative on the product of
balls :math:`\|u_t\|_2 \le R_t`. The loop is followed line by line, every intermediate number is kept, and two
of the printed lines are looser than the lemmas behind them:

* :math:`m_{t,0} = \ell^x_{t,0}m_{t-1} + \ell^u_{t,0}R_t + \|b_t(0,0)\|` counts the bilinear term twice;
  :math:`L m R + l^x m + l^u R + \|b(0,0)\|` holds (ERRATA 7).
* :math:`L_{t,j}` multiplies :math:`L_{t,j-1}` by the unrestricted :math:`\ell_{a_{t,j}}`; Lemma
  nonlin_comp_bounds gives :math:`\tilde\ell_{a_{t,j}}` (ERRATA 5). Followed literally, an :math:`a_{t,j}`
  that is not Lipschitz (:math:`\ell = \infty`) after a curved one makes :math:`L_t` infinite, though the
  lemma is finite. As first function of a layer it does not, since :math:`L_{t,0} = 0` and
  :math:`0\cdot\infty = 0`.

``corrected=True`` changes these two lines and nothing else. In the line for :math:`L_t` the paper prints
:math:`l_{b_t}` without a superscript in the factor of :math:`\ell_{t-1}^2`; :math:`l^x_{b_t}` is meant, as in
Lemma smooth_gen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from surefoot.complexity.report import table
from surefoot.magnitude import Magnitude, Number
from surefoot.paper.chains import compositions, restricted_lipschitz
from surefoot.paper.constants import ONE, ZERO, Computation, Result, Smooth, merge_flags, radii_of

VALUE_AT_ZERO_DROPPED = (
    "ERRATA 4: ‖a(0)‖ was left out of Algorithm 4 although it is not zero; the numbers bound the network "
    "only if it is kept (keep_value_at_zero=True)."
)


@dataclass(frozen=True)
class InnerTrace:
    """The numbers of the inner loop for one non-linear function."""

    restricted_lipschitz: Magnitude  # :math:`\tilde\ell_{a_{t,j}}`
    bound: Magnitude  # :math:`m_{t,j}`
    lipschitz: Magnitude  # :math:`\ell^0_{t,j}`
    smoothness: Magnitude  # :math:`L_{t,j}`
    bound_is_active: bool  # whether the minimum in :math:`m_{t,j}` is the function's own bound


@dataclass(frozen=True)
class LayerTrace:
    """The numbers of one turn of the outer loop."""

    name: str
    biaffine_lipschitz_state: Magnitude  # :math:`\ell^x_{t,0}`
    biaffine_lipschitz_parameters: Magnitude  # :math:`\ell^u_{t,0}`
    biaffine_bound: Magnitude  # :math:`m_{t,0}`
    inner: tuple[InnerTrace, ...]  # one entry per non-linear function
    bound: Magnitude  # :math:`m_t`
    lipschitz: Magnitude  # :math:`\ell_t`
    smoothness: Magnitude  # :math:`L_t`
    flags: tuple[str, ...]  # why the constants of this layer are not proved upper bounds


@dataclass(frozen=True)
class Trace:
    """Every number of a run of Algorithm 4; ``str()`` is a table with one row per layer."""

    layers: tuple[LayerTrace, ...]
    result: Result  # m, ℓ and L, and the flags of everything that went in

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """A heading and one row per layer; a star marks a flagged layer."""
        body: list[tuple[str, ...]] = [("layer", "m_{t,0}", "m_t", "ℓ_t", "L_t")]
        for index, layer in enumerate(self.layers, start=1):
            numbers = map(str, (layer.biaffine_bound, layer.bound, layer.lipschitz, layer.smoothness))
            body.append(((layer.name or str(index)) + (" *" if layer.flags else ""), *numbers))
        return tuple(body)

    def __str__(self) -> str:
        return "\n".join(table(list(self.rows()), left=0) + [f"* {flag}" for flag in self.result.flags])


def _inner_loop(
    functions: Sequence[Smooth], bound: Magnitude, keep_value_at_zero: bool, corrected: bool
) -> tuple[InnerTrace, ...]:
    """The loop over a_{t,1}, ..., a_{t,k} from m_{t,0}."""
    inner = []
    results = pairwise(compositions(functions, bound, keep_value_at_zero, corrected))
    for function, (before, after) in zip(functions, results, strict=True):
        slope = restricted_lipschitz(function, before.bound)
        active = function.bound.is_finite and after.bound == function.bound
        inner.append(InnerTrace(slope, after.bound, after.lipschitz, after.smoothness, active))
    return tuple(inner)


def algorithm_4(
    computations: Sequence[Computation],
    radii: Number | Sequence[Number],
    input_norm: Number,
    keep_value_at_zero: bool = True,
    corrected: bool = False,
) -> Trace:
    r"""Algorithm 4 as printed: :math:`m_\tau, \ell_\tau, L_\tau` of a deep network on a product of balls.

    The loop over the layers, from :math:`m_0 = \|x_0\|`, :math:`\ell_0 = L_0 = 0`, with
    :math:`\ell^x_{t,0} = L_b R_t + l^x`, :math:`\ell^u_{t,0} = L_b m_{t-1} + l^u`, and
    :math:`\ell^0_t, L^0_t` the Lipschitz constant and smoothness that the inner loop (Lemma
    nonlin_comp_bounds) ends with:

    .. math::
        \ell_t = \ell^x_{t,0}\ell^0_t\ell_{t-1} + \ell^u_{t,0}\ell^0_t, \\
        L_t = L_{t-1}\ell^x_{t,0}\ell^0_t + (\ell^x_{t,0})^2 L^0_t\ell_{t-1}^2
              + 2(\ell^u_{t,0}\ell^x_{t,0}L^0_t + L_b\ell^0_t)\ell_{t-1} + (\ell^u_{t,0})^2 L^0_t.

    Args:
        computations: the layers.
        radii: :math:`R_t`, one for all or one per layer.
        input_norm: :math:`\|x_0\|_2`, of the stacked batch.
        keep_value_at_zero: whether :math:`\|a_{t,j}(0)\|` enters :math:`m_{t,j}`, as printed. Without it the
            numbers of the section on VGG come out, but they are no bounds: flagged (ERRATA 4).
        corrected: apply ERRATA 5 and 7, and nothing else.

    Returns:
        Every intermediate number, and the result.

    >>> print(sf.paper.algorithm_4(sf.paper.vgg(), radii=1.0, input_norm=1.0).result.lipschitz)
    1.628e+12
    """
    bound, lipschitz, smoothness = Magnitude.of(input_norm), ZERO, ZERO
    layers = []
    for computation, radius in zip(computations, radii_of(radii, len(computations)), strict=True):
        biaffine = computation.biaffine
        state = biaffine.smoothness * radius + biaffine.lipschitz_state
        parameters = biaffine.smoothness * bound + biaffine.lipschitz_parameters
        once = biaffine.lipschitz_parameters if corrected else parameters
        start = state * bound + once * radius + biaffine.value_at_zero
        inner = _inner_loop(computation.nonlinear, start, keep_value_at_zero, corrected)
        slope, curvature = (inner[-1].lipschitz, inner[-1].smoothness) if inner else (ONE, ZERO)
        smoothness = (
            smoothness * state * slope
            + state**2 * curvature * lipschitz**2
            + 2.0 * (parameters * state * curvature + biaffine.smoothness * slope) * lipschitz
            + parameters**2 * curvature
        )
        lipschitz = state * slope * lipschitz + parameters * slope
        bound = inner[-1].bound if inner else start
        dropped = not keep_value_at_zero and not all(a.value_at_zero.is_zero for a in computation.nonlinear)
        flags = merge_flags(computation.unsound, (VALUE_AT_ZERO_DROPPED,) if dropped else ())
        numbers = (state, parameters, start, inner, bound, lipschitz, smoothness)
        layers.append(LayerTrace(computation.name, *numbers, flags))
    flags = merge_flags(*(layer.flags for layer in layers))
    return Trace(tuple(layers), Result(bound, lipschitz, smoothness, flags))


def around_point(
    computations: Sequence[Computation], centre_norms: Number | Sequence[Number]
) -> tuple[Computation, ...]:
    r"""The last corollary of section 4: the layers to give Algorithm 4 for :math:`\|u_t - u_t^*\| \le R_t'`.

    :math:`l^x + L_b\|u^*_t\|` takes the place of :math:`l^x` and :math:`\|b^0\| + l^u\|u^*_t\|` that of
    :math:`\|b^0\|`, because
    :math:`b(x, u^* + v) = \beta(x,v) + \beta^u(v) + [\beta^x(x) + \beta(x,u^*)] + [b^0 + \beta^u(u^*)]`.
    The radii of the algorithm are then :math:`R_t'`.
    """
    moved = []
    for computation, norm in zip(computations, radii_of(centre_norms, len(computations)), strict=True):
        biaffine = computation.biaffine
        shifted = replace(
            biaffine,
            lipschitz_state=biaffine.lipschitz_state + biaffine.smoothness * norm,
            value_at_zero=biaffine.value_at_zero + biaffine.lipschitz_parameters * norm,
        )
        moved.append(replace(computation, biaffine=shifted))
    return tuple(moved)
