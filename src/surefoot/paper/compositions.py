r"""Appendix "Compositions": Fact refined_smooth, Lemma nonlin_comp_bounds, Corollary smooth_state."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.magnitude import Magnitude, Number, minimum
from surefoot.paper.constants import Computation, Result, Smooth, merge_flags


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

    (The lemma prints :math:`m_{a_j}(m_{t-1})` and :math:`m_\tau`; the index j-1 and the last one, k, are
    meant.)

    Args:
        functions: the constants of :math:`a_1, \dots, a_k`, first applied first.
        radius: R.
    """
    bound, lipschitz, smoothness = Magnitude.of(radius), Magnitude.of(1.0), Magnitude.zero()
    for function in functions:
        slope = restricted_lipschitz(function, bound)
        smoothness = function.smoothness * lipschitz**2 + smoothness * slope
        lipschitz = lipschitz * slope
        bound = restricted_bound(function, bound)
    flags = merge_flags(*(function.unsound for function in functions))
    return Result(bound, lipschitz, smoothness, flags)


def fix_parameters(computation: Computation, parameter_norm: Number) -> tuple[Smooth, ...]:
    r"""The functions :math:`b(\cdot, u), a_1, \dots, a_k` whose composition is :math:`\varphi(\cdot, u)`.

    :math:`b(\cdot, u)` is affine with :math:`\ell \le L_b\|u\| + l^x`, :math:`L = 0` and
    :math:`\|b(0,u)\| \le l^u\|u\| + \|b(0,0)\|`.

    Args:
        computation: the layer.
        parameter_norm: :math:`\|u\|_2`.
    """
    biaffine = computation.biaffine
    slope = biaffine.smoothness * parameter_norm + biaffine.lipschitz_state
    value = biaffine.lipschitz_parameters * parameter_norm + biaffine.value_at_zero
    affine = Smooth(Magnitude.infinity(), slope, Magnitude.zero(), value, slope, biaffine.unsound)
    return (affine, *computation.nonlinear)


def smooth_state(functions: Sequence[Smooth], radius: Number) -> Result:
    r"""Corollary smooth_state: a chain with fixed parameters as a function of its input, on a ball.

    It is Lemma nonlin_comp_bounds for :math:`a_t = \varphi_t(\cdot, u_t)`; a deep layer may be given by its
    pieces, see :func:`fix_parameters`.

    Args:
        functions: the constants of :math:`\varphi_1(\cdot,u_1), \dots, \varphi_\tau(\cdot,u_\tau)`.
        radius: R, with :math:`\|x_0\| \le R`.
    """
    return composition(functions, radius)
