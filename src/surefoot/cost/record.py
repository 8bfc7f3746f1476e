"""What one operation costs: the non-zero entries of its tensors, the paper's sparsities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contraction:
    """A product of matrices or a convolution: what counters of floating-point operations see.

    Attributes:
        multiplications: of the product itself. The derivative along each factor is a product of the same size.
        factors: for each factor, the tensors of the graph that it is computed from.
    """

    multiplications: int
    factors: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Sparsity:
    r"""The sparsity of one operation (paper, Def. "Sparsity of the operations").

    An operation has a product of factors, arguments that enter linearly, or a part that is neither; most have
    only one of the three.

    Attributes:
        product: non-zero entries :math:`s_\beta` of the multilinear tensor, so the multiplications needed for
            the product and for its derivative along any one factor.
        factors: names of the tensors that are multiplied; plain numbers are left out.
        terms: arguments that enter linearly, each with the non-zero entries of its matrix.
        evaluation: operations to compute a part that is not affine.
        derivative: operations to compute the derivative of that part, beyond what its value needs. None where the
            derivative is made of numbers that are there: the output of a soft-max, the place of a maximum.
        jacobian: non-zero entries :math:`s_a` of the derivative of that part.
        application: operations to multiply this derivative by a vector. Where the derivative is a sparse matrix
            plus one of low rank (normalisations, soft-max, attention), this is far fewer than ``jacobian``.
        contractions: the matrix products and convolutions inside.
    """

    product: int = 0
    factors: tuple[str, ...] = ()
    terms: tuple[tuple[str, int], ...] = ()
    evaluation: int = 0
    derivative: int = 0
    jacobian: int = 0
    application: int = 0
    contractions: tuple[Contraction, ...] = ()
