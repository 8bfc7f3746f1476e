r"""Chains of computations: Lemma smooth, its corollary, Lemma smooth_gen, and the objective (section 4).

A chain is :math:`x_t = \varphi_t(x_{t-1}, u_t)`; its constants are those of :math:`u \mapsto x_\tau` for a
given :math:`x_0`, on the parameters :math:`\|u_t\|_2 \le R_t` where radii appear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.magnitude import Magnitude, Number, minimum, stack
from surefoot.objectives.constants import PrintedLoss
from surefoot.paper.constants import INFINITY, ZERO, Bivariate, Result, Smooth, merge_flags, radii_of
from surefoot.paper.functions import restricted_lipschitz

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
    records = [
        entry if isinstance(entry, Smooth) else Smooth.of(lipschitz=entry[0], smoothness=entry[1])
        for entry in computations
    ]
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

    Args:
        computations: the constants of each :math:`\varphi_t` in both arguments jointly.
        radii: :math:`R_t`, one for all or one per computation.
        input_norm: :math:`m_0 = \|x_0\|`.
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
    r"""What Proposition smoothobj gives for :math:`F = h\circ\psi + r`.

    Attributes:
        restricted_lipschitz: :math:`\tilde\ell_h`.
        smoothness: :math:`L_F`.
        flags: why the numbers are not proved upper bounds; empty if they are.
    """

    restricted_lipschitz: Magnitude
    smoothness: Magnitude
    flags: tuple[str, ...] = ()


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
    r"""The diameter :math:`D = 2(\sum_t R_t^2)^{1/2}` of a product of balls.

    >>> print(diameter_of_balls([3.0, 4.0]))
    1.000e+01
    """
    return stack([Magnitude.of(radius) for radius in radii]).norm() * 2.0
