r"""Functions built from others: on a ball, composed, stacked and summed.

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
from dataclasses import replace

from surefoot.magnitude import Magnitude, Number, minimum, stack
from surefoot.paper.constants import INFINITY, ONE, ZERO, Computation, Result, Smooth, merge_flags

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

    (The lemma prints :math:`m_{a_j}(m_{t-1})` and :math:`m_\tau`; the index j-1 and the last one, k, are
    meant.)

    Args:
        functions: the constants of :math:`a_1, \dots, a_k`, first applied first.
        radius: R.
    """
    *_, last = compositions(functions, radius)
    return replace(last, flags=merge_flags(*(function.unsound for function in functions)))


def compositions(functions: Sequence[Smooth], radius: Number) -> Iterator[Result]:
    """The constants of the identity, the first function, the first two, and so on, without flags."""
    bound, lipschitz, smoothness = Magnitude.of(radius), ONE, ZERO
    yield Result(bound, lipschitz, smoothness)
    for function in functions:
        slope = restricted_lipschitz(function, bound)
        smoothness = function.smoothness * lipschitz**2 + smoothness * slope
        lipschitz = lipschitz * slope
        bound = restricted_bound(function, bound)
        yield Result(bound, lipschitz, smoothness)


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
    return (Smooth(INFINITY, slope, ZERO, value, slope, biaffine.unsound), *computation.nonlinear)


def smooth_state(functions: Sequence[Smooth], radius: Number) -> Result:
    r"""Corollary smooth_state: a chain with fixed parameters as a function of its input, on a ball.

    It is Lemma nonlin_comp_bounds for :math:`a_t = \varphi_t(\cdot, u_t)`; a deep layer may be given by its
    pieces, see :func:`fix_parameters`.

    Args:
        functions: the constants of :math:`\varphi_1(\cdot,u_1), \dots, \varphi_\tau(\cdot,u_\tau)`.
        radius: R, with :math:`\|x_0\| \le R`.
    """
    return composition(functions, radius)


def stack_separate(functions: Sequence[Smooth], as_printed: bool = True) -> Smooth:
    r"""Item 1: :math:`(\alpha_1(x_1); \dots; \alpha_n(x_n))`.

    Args:
        functions: the constants of the :math:`\alpha_i`.
        as_printed: :math:`\|\ell\|_2` as in the lemma; otherwise :math:`\|\ell\|_\infty` (ERRATA 1).
    """
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
