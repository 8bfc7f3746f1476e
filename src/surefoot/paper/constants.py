r"""Records of the constants the paper attaches to functions, bi-affine maps, layers and results.

Section 4 writes :math:`\mathcal{C}_{m,\ell,L}` for functions with :math:`\sup\|f\| = m`, Lipschitz constant
:math:`\ell` and smoothness :math:`L`, any of which may be infinite, and
:math:`\mathcal{B}_{L,l^u,l^x}` for bi-affine maps
:math:`b(x,u) = \beta(x,u) + \beta^u(u) + \beta^x(x) + \beta^0`. The records below hold those constants as
magnitudes, next to the two values at the origin that the paper's restricted constants need.

``unsound`` has one sentence for every constant that the paper prints but that is not an upper bound. Statements
hand these sentences on to the ``flags`` of their result, so a number built on an invalid constant cannot be shown
without saying so. ``ERRATA n`` in a sentence is the number in the list of errata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from surefoot.magnitude import Magnitude, Number

INFINITY, ZERO, ONE = Magnitude.infinity(), Magnitude.zero(), Magnitude.of(1.0)


def merge_flags(*groups: Iterable[str]) -> tuple[str, ...]:
    """Several groups of flags as one, in order of first appearance, each sentence once."""
    return tuple(dict.fromkeys(flag for group in groups for flag in group))


class _OfNumbers:
    @classmethod
    def of(cls, *numbers: Number, unsound: tuple[str, ...] = (), **named: Number) -> Self:
        """The record of plain numbers; what is left out has the default of its field."""
        record: Any = cls
        by_name = {name: Magnitude.of(number) for name, number in named.items()}
        result: Self = record(*map(Magnitude.of, numbers), **by_name, unsound=unsound)
        return result


@dataclass(frozen=True)
class Smooth(_OfNumbers):
    r"""A function :math:`a \in \mathcal{C}_{m,\ell,L}` with its values at zero.

    What is left out is infinite, which is always a valid bound.
    """

    bound: Magnitude = INFINITY  # :math:`m_a \ge \sup\|a\|`; infinite if unbounded or not printed
    lipschitz: Magnitude = INFINITY  # :math:`\ell_a`
    smoothness: Magnitude = INFINITY  # :math:`L_a`; infinite where the paper says "not defined"
    value_at_zero: Magnitude = INFINITY  # :math:`\|a(0)\|_2`
    jacobian_at_zero: Magnitude = INFINITY  # :math:`\|\nabla a(0)\|_{2,2}`
    unsound: tuple[str, ...] = ()  # see the module


@dataclass(frozen=True)
class Biaffine(_OfNumbers):
    r"""A bi-affine map :math:`b \in \mathcal{B}_{L,l^u,l^x}`; a part that is left out is absent from the map."""

    smoothness: Magnitude  # :math:`L_b = \sup\|\beta(x,u)\| / (\|x\|\|u\|)`, of the bilinear part
    lipschitz_parameters: Magnitude = ZERO  # :math:`l^u = \|\nabla_u b(0,0)\|`, the norm of :math:`\beta^u`
    lipschitz_state: Magnitude = ZERO  # :math:`l^x = \|\nabla_x b(0,0)\|`, the norm of :math:`\beta^x`
    value_at_zero: Magnitude = ZERO  # :math:`\|b(0,0)\|_2`, the norm of :math:`\beta^0`
    unsound: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bivariate:
    r"""A function :math:`\varphi(x,u)` with one constant per argument, as in Lemma smooth_gen."""

    bound: Magnitude  # :math:`m_\varphi`
    lipschitz_parameters: Magnitude  # :math:`\ell^u_\varphi \ge \sup\|\nabla_u\varphi\|`
    lipschitz_state: Magnitude  # :math:`\ell^x_\varphi \ge \sup\|\nabla_x\varphi\|`
    smoothness_parameters: Magnitude  # :math:`L^{uu}_\varphi`
    smoothness_mixed: Magnitude  # :math:`L^{xu}_\varphi = L^{ux}_\varphi`: second derivatives commute
    smoothness_state: Magnitude  # :math:`L^{xx}_\varphi`
    value_at_zero: Magnitude  # :math:`\|\varphi(0,0)\|`
    jacobian_parameters_at_zero: Magnitude  # :math:`\|\nabla_u\varphi(0,0)\|`
    jacobian_state_at_zero: Magnitude  # :math:`\|\nabla_x\varphi(0,0)\|`
    unsound: tuple[str, ...] = ()


@dataclass(frozen=True)
class Computation:
    r"""A layer :math:`\varphi_t(x,u) = a_{t,k}\circ\dots\circ a_{t,1}(b_t(x,u))`."""

    biaffine: Biaffine  # :math:`b_t`
    nonlinear: tuple[Smooth, ...] = ()  # :math:`a_{t,1}, \dots, a_{t,k}`, first applied first
    name: str = ""  # what a table calls the layer

    @property
    def unsound(self) -> tuple[str, ...]:
        """The flags of the bi-affine map and of every non-linear function."""
        return merge_flags(self.biaffine.unsound, *(part.unsound for part in self.nonlinear))


@dataclass(frozen=True)
class Result:
    """What a statement of the paper gives."""

    bound: Magnitude  # m; infinite where the statement gives none
    lipschitz: Magnitude  # ℓ
    smoothness: Magnitude  # L
    flags: tuple[str, ...] = ()  # why the numbers are not proved upper bounds; empty if they are


def radii_of(radii: Number | Sequence[Number], count: int) -> tuple[Magnitude, ...]:
    """One radius R_t per computation, from one number for all, or a sequence or array of them."""
    if isinstance(radii, Sequence):
        values = [Magnitude.of(radius) for radius in radii]
    else:
        array = Magnitude.of(radii)
        if not array.shape:
            return (array,) * count
        values = [array[index] for index in range(len(array))]
    if len(values) != count:
        raise ValueError(
            f"got {len(values)} radii for a chain of {count} computations; "
            "give one radius per computation, or a single number for all of them"
        )
    return tuple(values)
