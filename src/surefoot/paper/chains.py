r"""Chains of computations: Lemma smooth, its corollary, Lemma smooth_gen, and the objective (section 4).

A chain is :math:`x_t = \varphi_t(x_{t-1}, u_t)`; its constants are those of :math:`u \mapsto x_\tau` for a
given :math:`x_0`, on the parameters :math:`\|u_t\|_2 \le R_t` where radii appear.

Functions built from others: on a ball, composed, stacked and summed.

Appendix "Compositions": Fact refined_smooth, Lemma nonlin_comp_bounds, Corollary smooth_state.

Lemma smooth_elt_wise prints four rules for :math:`\alpha_i \in \mathcal{C}_{\ell_i, L_i}`; below,
:math:`\ell = (\ell_i)_i` and :math:`L = (L_i)_i`. The bound and the values at zero are not printed; they
follow from the same block structure and are carried along.

=====  ====================================  ==================  ==================
item   function                              Lipschitz constant  smoothness
=====  ====================================  ==================  ==================
1      :math:`(\alpha_i(x_i))_i`             :math:`\|\ell\|_2`   :math:`\|L\|_\infty`
2      :math:`\sum_i \alpha_i(x_i)`          :math:`\|\ell\|_2`   :math:`\|L\|_\infty`
3      :math:`(\alpha_i(x))_i`               :math:`\|\ell\|_2`   :math:`\|L\|_2`
4      :math:`\sum_i \alpha_i(x)`            :math:`\|\ell\|_1`   :math:`\|L\|_1`
=====  ====================================  ==================  ==================

All are valid. Item 1 is loose: the Jacobian is block diagonal, so :math:`\|\ell\|_\infty` holds (ERRATA 1);
the section on VGG uses that one silently when it says that a batch does not change the constants of
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from surefoot.magnitude import Magnitude, Number, minimum, stack
from surefoot.paper.constants import (
    INFINITY,
    ONE,
    ZERO,
    Bivariate,
    Computation,
    Result,
    Smooth,
    merge_flags,
    radii_of,
)
from surefoot.paper.losses import PrintedLoss

_Total = Callable[[Magnitude], Magnitude]
_sum, _norm, _max = Magnitude.sum, Magnitude.norm, Magnitude.max


def restricted_lipschitz(function: Smooth, radius: Number) -> Magnitude:
    r"""Fact refined_smooth: :math:`\ell_f(R) = \min\{\ell_f, \|\nabla f(0)\| + R L_f\}`.

    An upper bound of the Lipschitz constant on the ball of radius R, by the mean value theorem.
    """
    return minimum(function.lipschitz, function.jacobian_at_zero + function.smoothness * radius)


def restricted_bound(function: Smooth, radius: Number) -> Magnitude:
    r"""Fact refined_smooth: :math:`m_f(R) = \min\{m_f, \|f(0)\| + R\,\ell_f(R)\}`."""
    return minimum(function.bound, function.value_at_zero + restricted_lipschitz(function, radius) * radius)


def composition(functions: Sequence[Smooth], radius: Number) -> Result:
    r"""Lemma nonlin_comp_bounds: the constants of :math:`a_k \circ \dots \circ a_1` on the ball of radius R.

    .. math::
        m_j = m_{a_j}(m_{j-1}), \quad \ell_j = \ell_{j-1}\,\ell_{a_j}(m_{j-1}), \quad
        L_j = L_{a_j}\ell_{j-1}^2 + L_{j-1}\,\ell_{a_j}(m_{j-1}), \qquad m_0 = R,\ \ell_0 = 1,\ L_0 = 0.

    The functions are given first applied first. (The lemma prints :math:`m_{a_j}(m_{t-1})` and :math:`m_\tau`; the
    index j-1 and the last one, k, are meant.)
    """
    *_, last = compositions(functions, radius)
    return replace(last, flags=merge_flags(*(function.unsound for function in functions)))


def compositions(
    functions: Sequence[Smooth], radius: Number, keep_value_at_zero: bool = True, corrected: bool = True
) -> Iterator[Result]:
    """The constants of the identity, the first function, the first two, and so on, without flags.

    For the two ways in which Algorithm 4 differs see :func:`~surefoot.paper.algorithm.algorithm_4`.
    """
    bound, lipschitz, smoothness = Magnitude.of(radius), ONE, ZERO
    yield Result(bound, lipschitz, smoothness)
    for function in functions:
        slope = restricted_lipschitz(function, bound)
        through = (function.value_at_zero if keep_value_at_zero else ZERO) + slope * bound
        smoothness = smoothness * (slope if corrected else function.lipschitz) + function.smoothness * lipschitz**2
        lipschitz = slope * lipschitz
        bound = minimum(function.bound, through)
        yield Result(bound, lipschitz, smoothness)


def fix_parameters(computation: Computation, parameter_norm: Number) -> tuple[Smooth, ...]:
    r"""The functions :math:`b(\cdot, u), a_1, \dots, a_k` whose composition is :math:`\varphi(\cdot, u)`.

    :math:`b(\cdot, u)` is affine with :math:`\ell \le L_b\|u\| + l^x`, :math:`L = 0` and
    :math:`\|b(0,u)\| \le l^u\|u\| + \|b(0,0)\|`.
    """
    biaffine = computation.biaffine
    slope = biaffine.smoothness * parameter_norm + biaffine.lipschitz_state
    value = biaffine.lipschitz_parameters * parameter_norm + biaffine.value_at_zero
    return (Smooth(INFINITY, slope, ZERO, value, slope, biaffine.unsound), *computation.nonlinear)


def smooth_state(functions: Sequence[Smooth], radius: Number) -> Result:
    r"""Corollary smooth_state: a chain with fixed parameters as a function of its input, on a ball.

    It is Lemma nonlin_comp_bounds for :math:`a_t = \varphi_t(\cdot, u_t)`; a deep layer may be given by its
    pieces, see :func:`fix_parameters`.
    """
    return composition(functions, radius)


def stack_separate(functions: Sequence[Smooth], as_printed: bool = True) -> Smooth:
    """Item 1; with :math:`\\|\\ell\\|_2` as in the lemma, otherwise :math:`\\|\\ell\\|_\\infty` (ERRATA 1)."""
    return _combined(functions, _norm, _norm if as_printed else _max, _max, _norm, _max)


def sum_separate(functions: Sequence[Smooth]) -> Smooth:
    r"""Item 2: :math:`\sum_i \alpha_i(x_i)`."""
    return _combined(functions, _sum, _norm, _max, _sum, _norm)


def stack_shared(functions: Sequence[Smooth]) -> Smooth:
    r"""Item 3: :math:`(\alpha_1(x); \dots; \alpha_n(x))`."""
    return _combined(functions, _norm, _norm, _norm, _norm, _norm)


def sum_shared(functions: Sequence[Smooth]) -> Smooth:
    r"""Item 4: :math:`\sum_i \alpha_i(x)`."""
    return _combined(functions, _sum, _sum, _sum, _sum, _sum)


def _combined(
    functions: Sequence[Smooth], bound: _Total, slope: _Total, curvature: _Total, value: _Total, jacobian: _Total
) -> Smooth:
    """The constants of several functions, each kind put together in its own way."""
    if not functions:
        raise ValueError("cannot combine an empty list of functions; give the constants of at least one")
    return Smooth(
        bound(stack([part.bound for part in functions])),
        slope(stack([part.lipschitz for part in functions])),
        curvature(stack([part.smoothness for part in functions])),
        value(stack([part.value_at_zero for part in functions])),
        jacobian(stack([part.jacobian_at_zero for part in functions])),
        merge_flags(*(part.unsound for part in functions)),
    )


def concatenate_bilinear(smoothness: Sequence[Magnitude]) -> Magnitude:
    r"""Lemma bilin_smooth_elt_wise: the smoothness of :math:`(\beta_{ij}(x_i, u_j))_{ij}`, their maximum.

    Valid: :math:`\sum_{ij} L_{ij}^2\|x_i\|^2\|u_j\|^2 \le \max L_{ij}^2\,\|x\|^2\|u\|^2` (the squares on
    :math:`L` are missing in the paper's proof, ERRATA 11). With one :math:`u` and m samples :math:`x_i` it is
    the batch; with one :math:`x` and several :math:`u_j`, the filters of a convolution.
    """
    if not smoothness:
        raise ValueError("cannot concatenate an empty list of bilinear maps; give the smoothness of at least one")
    return stack(list(smoothness)).max()


SWAPPED_RADII = (
    "ERRATA 6: eq. (smooth_refined_dyn) swaps the radii in ℓ^x(R_x, R_u); the bound is "
    "‖∇_xφ(0,0)‖ + L^xx R_x + L^ux R_u, which is larger here."
)

# two equal sums rounded in another order differ by less than this factor, and that is no reason for a flag
_NOTICEABLE = 1.0 + 1e-12


def lemma_smooth(computations: Sequence[Smooth | tuple[Number, Number]]) -> Result:
    r"""Lemma smooth: a chain of Lipschitz-continuous and smooth computations.

    .. math::
        \ell_t = \ell_{\varphi_t} + \ell_{t-1}\ell_{\varphi_t}, \qquad
        L_t = L_{t-1}\ell_{\varphi_t} + L_{\varphi_t}(1 + \ell_{t-1})^2, \qquad \ell_0 = L_0 = 0.

    Args:
        computations: the constants of each :math:`\varphi_t` in both arguments jointly, as records or pairs
            :math:`(\ell_{\varphi_t}, L_{\varphi_t})`.

    Returns:
        ℓ and L of the chain; the lemma gives no bound, so m is infinite.
    """
    lipschitz, smoothness = ZERO, ZERO
    records = [each if isinstance(each, Smooth) else Smooth.of(INFINITY, *each) for each in computations]
    for computation in records:
        smoothness = smoothness * computation.lipschitz + computation.smoothness * (1.0 + lipschitz) ** 2
        lipschitz = computation.lipschitz + lipschitz * computation.lipschitz
    return Result(INFINITY, lipschitz, smoothness, merge_flags(*(record.unsound for record in records)))


def corollary_restricted(
    computations: Sequence[Smooth], radii: Number | Sequence[Number], input_norm: Number
) -> Result:
    r"""The corollary of Lemma smooth: each :math:`\ell_{\varphi_t}` restricted to bounded arguments.

    .. math::
        \tilde\ell_{\varphi_t} =
            \min\{\ell_{\varphi_t}, L_{\varphi_t}(m_{t-1} + R_t) + \|\nabla\varphi_t(0,0)\|\}, \qquad
        m_t = \min\{m_{\varphi_t}, \tilde\ell_{\varphi_t}(m_{t-1} + R_t) + \|\varphi_t(0,0)\|\}.

    The radii are one for all or one per computation, the constants those in both arguments jointly, and
    :math:`m_0` is the norm of the input.
    """
    bound = Magnitude.of(input_norm)
    restricted = []
    for computation, radius in zip(computations, radii_of(radii, len(computations)), strict=True):
        slope = restricted_lipschitz(computation, bound + radius)
        bound = minimum(computation.bound, slope * (bound + radius) + computation.value_at_zero)
        restricted.append(replace(computation, lipschitz=slope))
    return replace(lemma_smooth(restricted), bound=bound)


def lemma_smooth_gen(
    computations: Sequence[Bivariate],
    radii: Number | Sequence[Number],
    input_norm: Number,
    as_printed: bool = True,
) -> Result:
    r"""Lemma smooth_gen: the chain with one constant per argument.

    With :math:`\ell^u = \ell^u_{\varphi_t}(m_{t-1}, R_t)` and
    :math:`\ell^x = \ell^x_{\varphi_t}(m_{t-1}, R_t)`:

    .. math::
        m_t = \min\{m_{\varphi_t}, \|\varphi_t(0,0)\| + \ell^u R_t + \ell^x m_{t-1}\}, \qquad
        \ell_t = \ell^u + \ell_{t-1}\ell^x, \\
        L_t = L_{t-1}\ell^x + L^{xx}\ell_{t-1}^2 + (L^{xu} + L^{ux})\ell_{t-1} + L^{uu},

    where by eq. (smooth_refined_dyn)
    :math:`\ell^u(R_x,R_u) = \min\{\ell^u, \|\nabla_u\varphi(0,0)\| + L^{uu}R_u + L^{xu}R_x\}` and
    :math:`\ell^x(R_x,R_u) = \min\{\ell^x, \|\nabla_x\varphi(0,0)\| + L^{xx}R_x + L^{ux}R_u\}`.

    Args:
        computations: the constants of each :math:`\varphi_t`.
        radii: :math:`R_t`, one for all or one per computation.
        input_norm: :math:`m_0 \ge \|x_0\|`.
        as_printed: the equation prints the last minimum with the radii swapped,
            :math:`L^{xx}R_u + L^{ux}R_x`, which is no upper bound (ERRATA 6). True repeats that, and flags
            the result if it makes a constant smaller than it may be; False takes the radii as above.
    """
    bound, lipschitz, smoothness = Magnitude.of(input_norm), ZERO, ZERO
    flags = [computation.unsound for computation in computations]
    for part, radius in zip(computations, radii_of(radii, len(computations)), strict=True):
        mixed, at_zero = part.smoothness_mixed, part.jacobian_state_at_zero
        around = part.jacobian_parameters_at_zero + part.smoothness_parameters * radius + mixed * bound
        parameters = minimum(part.lipschitz_parameters, around)
        proved = minimum(part.lipschitz_state, at_zero + part.smoothness_state * bound + mixed * radius)
        swapped = minimum(part.lipschitz_state, at_zero + part.smoothness_state * radius + mixed * bound)
        state = swapped if as_printed else proved
        if state * _NOTICEABLE < proved:
            flags.append((SWAPPED_RADII,))
        smoothness = (
            smoothness * state
            + part.smoothness_state * lipschitz**2
            + (mixed + mixed) * lipschitz
            + part.smoothness_parameters
        )
        lipschitz = parameters + lipschitz * state
        bound = minimum(part.bound, part.value_at_zero + parameters * radius + state * bound)
    return Result(bound, lipschitz, smoothness, merge_flags(*flags))


@dataclass(frozen=True)
class ObjectiveResult:
    r"""The constants of :math:`F = h\circ\psi + r` by Proposition smoothobj."""

    restricted_lipschitz: Magnitude  # :math:`\tilde\ell_h`
    smoothness: Magnitude  # :math:`L_F`
    flags: tuple[str, ...] = ()  # why the numbers are not proved upper bounds; empty if they are


def objective(
    chain: Result,
    loss: Smooth | PrintedLoss,
    regularizer_smoothness: Number = 0.0,
    gradient_norm: Number = float("inf"),
    diameter: Number = float("inf"),
) -> ObjectiveResult:
    r"""Proposition smoothobj: :math:`L_F \le L_\psi\tilde\ell_h + \ell_\psi^2 L_h + L_r` on a convex set C.

    .. math::
        \tilde\ell_h = \min\{\ell_h, \min_{z\in\psi(C)}\|\nabla h(z)\| + L_h\,\ell_\psi\,D\}, \qquad
        D = \sup_{x,y\in C}\|x - y\|.

    Args:
        chain: the constants of :math:`\psi` on C.
        loss: the constants of h; ``lipschitz`` infinite if h is not Lipschitz-continuous.
        regularizer_smoothness: :math:`L_r`.
        gradient_norm: :math:`\|\nabla h(z)\|` at any :math:`z \in \psi(C)`; the smallest is the best.
        diameter: D, see :func:`diameter_of_balls`.
    """
    around = Magnitude.of(gradient_norm) + loss.smoothness * chain.lipschitz * diameter
    slope = minimum(loss.lipschitz, around)
    smoothness = chain.smoothness * slope + chain.lipschitz**2 * loss.smoothness + regularizer_smoothness
    return ObjectiveResult(slope, smoothness, merge_flags(chain.flags, loss.unsound))


def diameter_of_balls(radii: Sequence[Number]) -> Magnitude:
    r"""The diameter :math:`D = 2(\sum_t R_t^2)^{1/2}` of a product of balls."""
    return stack([Magnitude.of(radius) for radius in radii]).norm() * 2.0
