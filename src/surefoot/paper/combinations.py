r"""Rules that build one function from several: Lemma smooth_elt_wise and Lemma bilin_smooth_elt_wise.

The lemma prints four rules for :math:`\alpha_i \in \mathcal{C}_{\ell_i, L_i}`; below,
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

from collections.abc import Sequence

from surefoot.magnitude import Magnitude, stack
from surefoot.paper.constants import Smooth, merge_flags


def _columns(functions: Sequence[Smooth]) -> tuple[Magnitude, Magnitude, Magnitude, Magnitude, Magnitude]:
    """The constants of several functions, each kind as one array."""
    if not functions:
        raise ValueError("cannot combine an empty list of functions; give the constants of at least one")
    return (
        stack([part.bound for part in functions]),
        stack([part.lipschitz for part in functions]),
        stack([part.smoothness for part in functions]),
        stack([part.value_at_zero for part in functions]),
        stack([part.jacobian_at_zero for part in functions]),
    )


def _flags(functions: Sequence[Smooth]) -> tuple[str, ...]:
    return merge_flags(*(part.unsound for part in functions))


def stack_separate(functions: Sequence[Smooth], as_printed: bool = True) -> Smooth:
    r"""Item 1: :math:`(\alpha_1(x_1); \dots; \alpha_n(x_n))`.

    Args:
        functions: the constants of the :math:`\alpha_i`.
        as_printed: :math:`\|\ell\|_2` as in the lemma; otherwise :math:`\|\ell\|_\infty` (ERRATA 1).
    """
    bound, lipschitz, smoothness, value, jacobian = _columns(functions)
    slope = lipschitz.norm() if as_printed else lipschitz.max()
    return Smooth(bound.norm(), slope, smoothness.max(), value.norm(), jacobian.max(), _flags(functions))


def sum_separate(functions: Sequence[Smooth]) -> Smooth:
    r"""Item 2: :math:`\sum_i \alpha_i(x_i)`."""
    bound, lipschitz, smoothness, value, jacobian = _columns(functions)
    return Smooth(bound.sum(), lipschitz.norm(), smoothness.max(), value.sum(), jacobian.norm(), _flags(functions))


def stack_shared(functions: Sequence[Smooth]) -> Smooth:
    r"""Item 3: :math:`(\alpha_1(x); \dots; \alpha_n(x))`."""
    bound, lipschitz, smoothness, value, jacobian = _columns(functions)
    return Smooth(
        bound.norm(), lipschitz.norm(), smoothness.norm(), value.norm(), jacobian.norm(), _flags(functions)
    )


def sum_shared(functions: Sequence[Smooth]) -> Smooth:
    r"""Item 4: :math:`\sum_i \alpha_i(x)`."""
    bound, lipschitz, smoothness, value, jacobian = _columns(functions)
    return Smooth(bound.sum(), lipschitz.sum(), smoothness.sum(), value.sum(), jacobian.sum(), _flags(functions))


def concatenate_bilinear(smoothness: Sequence[Magnitude]) -> Magnitude:
    r"""Lemma bilin_smooth_elt_wise: the smoothness of :math:`(\beta_{ij}(x_i, u_j))_{ij}`, their maximum.

    Valid: :math:`\sum_{ij} L_{ij}^2\|x_i\|^2\|u_j\|^2 \le \max L_{ij}^2\,\|x\|^2\|u\|^2` (the squares on
    :math:`L` are missing in the paper's proof, ERRATA 11). With one :math:`u` and m samples :math:`x_i` it is
    the batch; with one :math:`x` and several :math:`u_j`, the filters of a convolution.
    """
    if not smoothness:
        raise ValueError("cannot concatenate an empty list of bilinear maps; give the smoothness of at least one")
    return stack(list(smoothness)).max()
