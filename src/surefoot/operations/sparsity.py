"""What one operation costs: the non-zero entries of its tensors, the paper's sparsities."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.operations.call import Use


@dataclass(frozen=True)
class Contraction:
    """A product of matrices or a convolution: what counters of floating-point operations see."""

    multiplications: int  # of the product itself. The derivative along each factor is a product of the same size.
    factors: tuple[frozenset[str], ...]  # for each factor, the tensors of the graph that it is computed from


@dataclass(frozen=True)
class Sparsity:
    r"""The sparsity of one operation (paper, Def. "Sparsity of the operations").

    An operation has a product of factors, arguments that enter linearly, or a part that is neither; most have
    only one of the three.
    """

    # non-zero entries :math:`s_\beta` of the multilinear tensor, so the multiplications needed for the product and
    # for its derivative along any one factor
    product: int = 0
    factors: tuple[str, ...] = ()  # names of the tensors that are multiplied; plain numbers are left out
    # arguments that enter linearly, each with the non-zero entries of its matrix
    terms: tuple[tuple[str, int], ...] = ()
    evaluation: int = 0  # operations to compute a part that is not affine
    # operations to compute the derivative of that part, beyond what its value needs. None where the derivative is
    # made of numbers that are there: the output of a soft-max, the place of a maximum.
    derivative: int = 0
    jacobian: int = 0  # non-zero entries :math:`s_a` of the derivative of that part
    # operations to multiply this derivative by a vector. Where the derivative is a sparse matrix plus one of low
    # rank (normalisations, soft-max, attention), this is far fewer than ``jacobian``.
    application: int = 0
    contractions: tuple[Contraction, ...] = ()  # the matrix products and convolutions inside


def tensors(use: Use, *slots: str) -> tuple[str, ...]:
    """Names of the tensors in those slots, in order; numbers and what is absent are left out."""
    return tuple(use.names[slot] for slot in slots if slot in use.names)


def product(use: Use, count: int, left: str, right: str, bias: str = "", counted: bool = True) -> Sparsity:
    """A product of two factors plus a bias, which is copied along the result: one entry per output."""
    factors = tensors(use, left, right)
    sides = tuple(frozenset([name]) for name in factors)
    return Sparsity(
        product=count,
        factors=factors,
        terms=linear_terms(use, use.numel, bias),
        contractions=(Contraction(count, sides),) if counted else (),
    )


def linear_terms(use: Use, count: int, *slots: str) -> tuple[tuple[str, int], ...]:
    """Arguments that enter linearly, with so many non-zero entries each."""
    return tuple((name, count) for name in tensors(use, *slots))


def entrywise_product(use: Use) -> Sparsity:
    """Product of entries, or of a tensor with a number: one multiplication per output."""
    return product(use, use.numel, "self", "other", counted=False)


def grouped(entries: int, group: int, evaluation: int = 2, application: int = 3) -> Sparsity:
    """Every entry of a group depends on every other; so many operations per entry when factored.

    For a normalisation the derivative on a group of M entries is :math:`\\sigma^{-1}(I - 11^\\top/M -
    yy^\\top/M)`, for a soft-max :math:`\\operatorname{diag}(p) - pp^\\top`: full matrices, all of whose entries
    :math:`s_a` counts as the paper's definition says, and which cost a few operations per entry when multiplied
    in factored form.
    """
    jacobian = entries * group
    return Sparsity(
        evaluation=evaluation * entries, jacobian=jacobian, application=min(application * entries, jacobian)
    )


def every_entry(count: int) -> Sparsity:
    """A part that is not affine and takes so many operations to evaluate, differentiate and apply."""
    return Sparsity(evaluation=count, derivative=count, jacobian=count, application=count)
