r"""Conjugate gradients for :math:`Ax = b` with a symmetric positive definite A that is known by its products.

One iteration goes from the point x with residual :math:`r = b - Ax` along the direction p by the length
:math:`\alpha = \langle r, z\rangle/\langle p, Ap\rangle`, where z is the preconditioned residual, and turns to
:math:`p' = z' + \beta p`, :math:`\beta = \langle r', z'\rangle/\langle r, z\rangle`. In exact arithmetic the
directions are conjugate, so the solution is met after as many iterations as there are dimensions at the latest
(Hestenes and Stiefel, 1952). A direction with :math:`\langle p, Ap\rangle \le 0` shows that A is not positive
definite.

:func:`conjugate_gradients` is the usual loop; :class:`Conjugate` is one iteration at a time, for those who stop
by a rule of their own or know the residual by other means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Vector = TypeVar("Vector")
Scalar = Any  # a float; for several systems at once a tensor with one number for each of them


_PIECE = 1 << 16  # numbers that are added up in the precision of a vector
_SAFE = (1e-24, 1e24)  # squared norms to which what underflows adds nothing, and in which nothing overflows


def inner(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ of two tensors of one shape: piece by piece in their precision, and the pieces in double.

    A sum of a hundred million numbers in single precision is wrong by several per cent, one of a piece by 1e-5.
    Converting the vectors first would take five times as long.
    """
    a, b = a.reshape(-1), b.reshape(-1)
    if a.numel() <= _PIECE:
        return float(torch.dot(a, b))
    parts = [torch.dot(x, y) for x, y in zip(a.split(_PIECE), b.split(_PIECE), strict=True)]
    return float(torch.stack(parts).sum(dtype=torch.float64))


def norm(a: Tensor, square: float | None = None) -> float:
    """‖a‖ as the root of :func:`inner`, which may be known; in double where squares could under- or overflow."""
    square = inner(a, a) if square is None else square
    if _SAFE[0] < square < _SAFE[1]:
        return square**0.5
    return float(torch.linalg.vector_norm(a, dtype=torch.float64))


class Space(Protocol[Vector]):
    """What conjugate gradients do with vectors."""

    def zero(self, like: Vector) -> Vector:
        """The zero vector."""

    def dot(self, a: Vector, b: Vector) -> Scalar:
        """⟨a, b⟩."""

    def plus(self, a: Vector, b: Vector, factor: Scalar) -> Vector:
        """a + factor·b."""

    def ratio(self, over: Scalar, under: Scalar, active: Any) -> Scalar:
        """The quotient for systems that are not solved yet, 0 for the others."""


class Flat:
    """One tensor is one vector, whatever its shape; products may be those of another space."""

    def __init__(self, dot: Callable[[Any, Any], float] | None = None) -> None:
        self._dot = dot

    def zero(self, like: Tensor) -> Tensor:
        """The zero vector."""
        return torch.zeros_like(like)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """⟨a, b⟩, see :func:`inner`."""
        return inner(a, b) if self._dot is None else self._dot(a, b)

    def plus(self, a: Tensor, b: Tensor, factor: float) -> Tensor:
        """a + factor·b."""
        return torch.add(a, b, alpha=factor)

    def ratio(self, over: float, under: float, active: bool) -> float:
        """The quotient; 0 where nothing is left to solve."""
        return over / under if active else 0.0


class InPlace(Flat):
    """The same, written over: point, residual and direction are all that is held.

    The system gives the residual memory of its own, where it was also the first direction.
    """

    def plus(self, a: Tensor, b: Tensor, factor: float) -> Tensor:
        """a + factor·b, in place of a."""
        return a.add_(b, alpha=factor)


class Parts(Flat):
    """Several tensors side by side are one vector; sums are in double precision."""

    def zero(self, like: Sequence[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """The zero vector."""
        return [torch.zeros_like(part) for part in like]

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> float:  # type: ignore[override]
        """⟨a, b⟩."""
        if self._dot is not None:
            return self._dot(a, b)
        return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))

    def plus(self, a: Sequence[Tensor], b: Sequence[Tensor], factor: float) -> list[Tensor]:  # type: ignore[override]
        """a + factor·b."""
        return [x + factor * y for x, y in zip(a, b, strict=True)]


class Rows:
    """Every row (last dimension) is a vector of a system of its own; all systems are solved at once."""

    def zero(self, like: Tensor) -> Tensor:
        """The zero vector of every system."""
        return torch.zeros_like(like)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩, row by row."""
        return (a * b).sum(dim=-1)

    def plus(self, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
        """a + factor·b, row by row."""
        return a + factor[..., None] * b

    def ratio(self, over: Tensor, under: Tensor, active: Tensor) -> Tensor:
        """The quotient in rows that are not solved yet, 0 in the others."""
        return torch.where(active, over / torch.where(active, under, 1.0), 0.0)


class Columns(Rows):
    """Systems side by side: dimension 1 counts them, the others hold their vectors."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩, system by system."""
        return torch.einsum("ikj,ikj->k", a, b)

    def plus(self, a: Tensor, b: Tensor, factor: Tensor) -> Tensor:
        """a + factor·b, system by system."""
        return torch.addcmul(a, factor[:, None], b)


class System(Protocol[Vector]):
    """A, as an iteration needs it: first the curvature of a direction, then, if it goes on, the new residual."""

    def curvature(self, direction: Vector) -> Scalar:
        """⟨p, Ap⟩."""

    def residual(self, before: Vector, direction: Vector, length: Scalar) -> Vector:
        """The residual at x + αp, given that at x; called after :meth:`curvature` of the same direction."""


class Products(Generic[Vector]):
    """The system of an operator that is given by its products: r' = r − αAp.

    Attributes:
        image: Ap for the last direction p.
    """

    def __init__(self, multiply: Callable[[Vector], Vector], space: Space[Vector]) -> None:
        self._multiply, self._space = multiply, space
        self.image: Any = None

    def curvature(self, direction: Vector) -> Scalar:
        """⟨p, Ap⟩: one product."""
        self.image = self._multiply(direction)
        return self._space.dot(direction, self.image)

    def residual(self, before: Vector, direction: Vector, length: Scalar) -> Vector:
        """r − αAp."""
        return self._space.plus(before, self.image, -length)


class Conjugate(Generic[Vector]):
    """Conjugate gradients, one iteration at a time.

    Attributes:
        x: the point.
        residual: b − Ax, as the system says.
        direction: along which the next step goes.
        square: ⟨r, z⟩ with the preconditioned residual z, the residual itself where there is no preconditioner.
        beta: the weight of the direction before in this one.
        curvature: ⟨p, Ap⟩ of this direction; ``None`` until :meth:`look`.
        before: that of the direction before.
        iterations: how many steps were made.
    """

    def __init__(
        self,
        system: System[Vector],
        x: Vector,
        residual: Vector,
        space: Space[Vector],
        precondition: Callable[[Vector], Vector] | None = None,
    ) -> None:
        self._system, self._space, self._precondition = system, space, precondition
        self.x, self.residual, self.iterations = x, residual, 0
        self.direction = residual if precondition is None else precondition(residual)
        self.square, self.beta = space.dot(residual, self.direction), 0.0
        self.curvature: Scalar = None
        self.before: Scalar = 0.0

    def look(self) -> Scalar:
        """The curvature of the direction."""
        if self.curvature is None:
            self.curvature = self._system.curvature(self.direction)
        return self.curvature

    def step(self, active: Any = True) -> None:
        """Go to the lowest point along the direction, and turn.

        Where several systems are solved at once, those that are not ``active`` are solved and stay.
        """
        space: Any = self._space
        p: Any = self.direction
        curvature, square = self.look(), self.square
        length = space.ratio(square, curvature, active)
        self.x = space.plus(self.x, self.direction, length)
        self.residual = self._system.residual(self.residual, self.direction, length)
        fresh = self.residual if self._precondition is None else self._precondition(self.residual)
        after = space.dot(self.residual, fresh)
        self.beta = space.ratio(after, square, active)
        self.square = after if isinstance(active, bool) else torch.where(active, after, square)
        over = isinstance(space, InPlace)
        self.direction = p.mul_(self.beta).add_(fresh) if over else space.plus(fresh, p, self.beta)
        self.curvature, self.before, self.iterations = None, curvature, self.iterations + 1


class Orthogonal:
    """Keeps residuals orthogonal to those before them, as far as there is room.

    In exact arithmetic they are; without it, round-off lets the last iterations miss the solution.
    """

    def __init__(self, first: Tensor, room: int) -> None:
        self._basis = first.new_empty(min(first.numel(), room), first.numel())
        self._count = 0
        self.add(first)

    @property
    def full(self) -> bool:
        """Whether nothing but zero is orthogonal to all of them."""
        return self._count == self._basis.shape[1]

    def add(self, vector: Tensor) -> Tensor:
        """The part of the vector that is orthogonal to those before; it is kept for those to come."""
        if self._count == len(self._basis):
            return vector
        flat, basis = vector.reshape(-1), self._basis[: self._count]
        for _ in range(2):  # the second time removes what round-off of the first one left
            flat = flat - basis.T @ (basis @ flat)
        length = float(flat.norm())
        if length > 0:
            self._basis[self._count] = flat / length
            self._count += 1
        return flat.reshape(vector.shape)


@dataclass(frozen=True)
class Solution(Generic[Vector]):
    """How a linear system was solved.

    Attributes:
        x: the solution, or the last point.
        residual: ⟨r, z⟩ at the end relative to that at 0, the square root of it: the norm of the residual where
            there is no preconditioner. The largest where there are several systems.
        iterations: how many products were made.
        solved: whether the residual met the tolerance.
        direction: one with curvature that is not positive, at which the method stopped; ``None`` if none was met.
        curvature: ⟨p, Ap⟩ of that direction, for each of the systems.
    """

    x: Vector
    residual: float
    iterations: int
    solved: bool
    direction: Vector | None = None
    curvature: Scalar = None

    @property
    def finite(self) -> bool:
        """Whether no product was infinite or NaN."""
        return self.curvature is None or bool(torch.isfinite(torch.as_tensor(self.curvature)).all())


def conjugate_gradients(
    multiply: Callable[[Vector], Vector],
    right: Vector,
    *,
    space: Space[Vector],
    tolerance: float,
    most: int,
    precondition: Callable[[Vector], Vector] | None = None,
) -> Solution[Vector]:
    """Solve Ax = b from x = 0.

    Args:
        multiply: x ↦ Ax.
        right: b.
        space: what a vector is: :class:`Flat`, :class:`Parts` or :class:`Rows`.
        tolerance: on the residual relative to that at 0; see :class:`Solution`.
        most: how many iterations are made at most.
        precondition: r ↦ z, a symmetric positive definite approximation of the inverse of A.

    >>> A, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]).double(), torch.tensor([3.0, 4.0]).double()
    >>> found = conjugate_gradients(lambda v: A @ v, b, space=Flat(), tolerance=1e-12, most=9)
    >>> bool(torch.allclose(A @ found.x, b)), found.iterations, found.solved
    (True, 2, True)
    >>> conjugate_gradients(lambda v: -A @ v, b, space=Flat(), tolerance=1e-12, most=9).curvature < 0
    True
    """
    run = Conjugate(Products(multiply, space), space.zero(right), right, space, precondition)
    first = run.square
    goal = tolerance**2 * first
    while True:
        active = _not(run.square <= goal)  # what is not a number is not solved
        unsolved, relative = bool(torch.as_tensor(active).any()), _relative(run.square, first)
        if not unsolved or run.iterations == most:
            return Solution(run.x, relative, run.iterations, not unsolved)
        curvature = run.look()
        if bool(torch.as_tensor(_not(curvature > 0) & active).any()):
            return Solution(run.x, relative, run.iterations + 1, False, run.direction, curvature)
        run.step(active)


def lowest_ritz(
    multiply: Callable[[Vector], Vector], start: Vector, *, space: Space[Vector], most: int
) -> tuple[float, float, int]:
    r"""The lowest and the largest Ritz value of A after some steps of the method of Lanczos, and their number.

    Ritz values lie between the extreme eigenvalues. From a start that is uniform on the sphere in n dimensions,
    the lowest is above :math:`\lambda_{\min} + \epsilon(\lambda_{\max} - \lambda_{\min})` after k steps with a
    probability of at most :math:`1.648\sqrt n\,e^{-\sqrt\epsilon(2k - 1)}` (Kuczyński and Woźniakowski, Estimating
    the largest eigenvalue by the power and Lanczos algorithms with a random start, SIAM J. Matrix Anal. Appl. 13,
    1992, Theorem 4.2, for −A). Lost orthogonality repeats Ritz values and adds none outside.

    >>> A = torch.diag(torch.tensor([-1.0, 2.0, 5.0]))
    >>> low, high, _ = lowest_ritz(lambda v: A @ v, torch.ones(3), space=Flat(), most=3)
    >>> round(low, 5), round(high, 5)
    (-1.0, 5.0)
    """
    vector = space.plus(space.zero(start), start, 1 / space.dot(start, start) ** 0.5)
    before, beta = space.zero(start), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(most):
        image = multiply(vector)
        alpha = space.dot(vector, image)
        image = space.plus(space.plus(image, vector, -alpha), before, -beta)
        diagonal.append(alpha)
        beta = max(space.dot(image, image), 0.0) ** 0.5
        if not beta > 1e-12 * max(map(abs, diagonal)):
            break
        beside.append(beta)
        before, vector = vector, space.plus(space.zero(image), image, 1 / beta)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for k, entry in enumerate(beside[: len(diagonal) - 1]):
        small[k, k + 1] = small[k + 1, k] = entry
    values = torch.linalg.eigvalsh(small)
    return float(values[0]), float(values[-1]), len(diagonal)


def _not(what: Any) -> Any:
    return ~what if isinstance(what, Tensor) else not what


def _relative(square: Scalar, first: Scalar) -> float:
    now, then = torch.as_tensor(square).double(), torch.as_tensor(first).double()
    return float(torch.where(then > 0, now / then, 0.0).max().clamp(min=0).sqrt())
