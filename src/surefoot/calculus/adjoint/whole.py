r"""The second derivative in all weights together, at the weights and on balls around them.

A view of :class:`surefoot.bounds.hessian.Hessian` for certificates. It is used wherever it is affordable: what it
costs is counted from the program before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from surefoot.bounds.centre import Unbounded
from surefoot.bounds.function import Function
from surefoot.bounds.hessian import Hessian
from surefoot.calculus.adjoint.samples import Hessian as Written
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.effort import Effort
from surefoot.errors import CaptureError, UnsupportedOperation
from surefoot.magnitude import Magnitude
from surefoot.norms import frobenius_norm, spectral_norm
from surefoot.program import Program, differentiate

_LARGEST = 12_000  # weights
_TURNS = 60


class Whole:
    """See above.

    Attributes:
        norm: of the second derivative at the weights; infinite where that is kept.
        hessian: the second derivative itself, with its error; None where it is not kept.
        directions: the number of weights.
        balls: how many were looked at since somebody counted them.
        parts: in how many shells a ball is taken apart.
        path: radii of the balls that were looked at on the way to the last one, with the bounds there.
    """

    def __init__(self, ball: Hessian, sizes: Sequence[int], keep: bool, parts: int) -> None:
        self._ball, self.parts, self._sizes = ball, parts, sizes
        self._before = ball.again()
        self.norm, self.hessian = Magnitude.of(ball.norm), None
        self.balls = 0
        self.directions, self.path = len(ball.matrix), list[tuple[float, Magnitude]]()
        if keep:
            matrix = 0.5 * (ball.matrix + ball.matrix.mT)
            error = ball.offset + 2.0**-50 * float(matrix.norm())
            self.norm, self.hessian = Magnitude.infinity(), Written(matrix, Magnitude.of(error))

    @classmethod
    def of(cls, function: Function, effort: Effort, names: Sequence[str] = (), keep: bool = False) -> Whole | None:
        """The second derivative of an objective; ``None`` if it is too costly or has no rules."""
        names = names or function.variables
        try:
            program = differentiate(function.program, names)
            sizes = [program.nodes[program.inputs[name]].shape.numel() for name in names]
            if sum(sizes) > _LARGEST or cost(program, names) > effort.whole:
                return None
            ball = Hessian(program, function.values, names)
        except (UnsupportedOperation, NotImplementedError, Unbounded, ArithmeticError):
            return None
        return cls(ball, sizes, keep, effort.parts)

    @classmethod
    def of_analysis(cls, analysis: Analysis, effort: Effort, keep: bool = False) -> Whole | None:
        """The same in the order of the variables of an analysis."""
        if not effort.directions:
            return None
        names = [leaf.path for block in analysis.variables().values() for leaf in block]
        try:
            function = Function.of(analysis.model, analysis.x, analysis.objective)
        except (CaptureError, UnsupportedOperation):
            return None
        return cls.of(function, effort, names, keep) if set(names) == set(function.variables) else None

    def moved(self, radius: float) -> Magnitude:
        """How far the second derivative moves on a ball."""
        if radius < self._ball.radius:  # from the ball before, or from the weights
            self._ball = self._before if self._before.radius <= radius else self._ball.again()
            self.path = [ball for ball in self.path if ball[0] <= self._ball.radius]
        self._before = copy(self._ball)
        start = self._ball.radius
        count = math.ceil(self.parts * (radius - start) / radius) if radius > start else 0
        for k in range(1, count + 1):
            at = radius if k == count else start + (radius - start) * k / count
            self.balls += 1
            self.path.append((at, Magnitude.of(self._ball.grow(at))))
        return Magnitude.of(self._ball.moved)

    def once(self, radius: float) -> float:
        """A bound of the norm on a ball in one piece."""
        self.balls += 1
        return self._ball.again().grow(radius)

    def gradients(self) -> list[float]:
        """Bounds of the norm of the gradient at the weights in each variable."""
        centre = self._ball.centre
        points = [centre.points[k] for k in centre.program.outputs[1:]]
        return [frobenius_norm(p.value.abs() + p.error) for p in points]

    def attained(self) -> float:
        """A number at most the norm at the weights, up to round-off: how much a vector is stretched that is turned
        towards the largest eigenvalue.
        """
        matrix = self._ball.matrix
        vector = torch.linspace(1.0, 2.0, len(matrix), dtype=matrix.dtype, device=matrix.device)
        for _ in range(_TURNS):
            vector = matrix @ vector
            length = float(torch.linalg.vector_norm(vector))
            if not 0 < length < math.inf:
                return 0.0
            vector = vector / length
        return max(float(torch.linalg.vector_norm(matrix @ vector)) * (1 - 1e-12) - self._ball.offset, 0.0)

    def between_variables(self) -> Magnitude:
        """Bounds of the second derivative at the weights between two variables each."""
        sizes = list(self._sizes)
        parts = [part.split(sizes, 1) for part in self._ball.matrix.split(sizes)]
        rows = [[spectral_norm(block) for block in part] for part in parts]
        table: Tensor = torch.tensor(rows, dtype=torch.float64)
        return Magnitude.of(torch.maximum(table, table.mT).numpy()) + Magnitude.of(self._ball.offset)


def cost(program: Program, names: Sequence[str]) -> float:
    """Multiplications for derivatives along all directions and for their norms."""
    moves, size, total = program.depends(names), 0, 0.0
    for name in names:
        size += program.nodes[program.inputs[name]].shape.numel()
    for node in program.nodes:
        if moves[node.index]:
            entries = node.shape.numel()
            total += 10.0 * size * entries
            if node.primitive.kind == "product":
                sizes = [program.nodes[k].shape.numel() for k in node.inputs]
                total += 2.0 * size * math.sqrt(float(entries) * sizes[0] * sizes[1])
            if node.primitive.kind in ("product", "scalar", "fused"):
                total += entries * size * min(entries, size)
    return total + 10.0 * size**3
