r"""How fast the second derivative of a function may change: bounds of the norm of the third one.

:math:`D^3F` is symmetric, so it attains its norm along one unit vector h (Banach), and how far the second
derivative moves is the integral of that norm on the way. With x' = Dx h and λ' = Dλ h, differentiating
:math:`F''[h, h] = \sum_z\langle\lambda_z, f_z''[x', x']\rangle` once more along h gives

.. math:: F'''[h, h, h] = \sum_z\langle\lambda_z, f_z'''[x', x', x']\rangle +
    3\langle\lambda_z', f_z''[x', x']\rangle ,

the sum over all operations z = f(x) of the value. (Take the operations one by one: F as a function of what may be
added to z has the derivative λ_z; terms with second derivatives of x are those of operations before z.) Of x' and
λ' are known the norms: entry by entry (ρ), on fibres, as a whole (a, b), from :mod:`surefoot.bounds.movement`. A
sum :math:`\sum_iw_ix_i'^2` is at most what is got by filling up the largest w first, each to :math:`\rho_i^2`,
until :math:`a^2` is used up: the value of a linear program.

For a product B(x, y) the second derivative is 2B(x', y'), so its term is 6⟨λ', B(x', y')⟩. If y is a weight, then
:math:`\|y'\|` is the length of its part of h, and as these parts are orthogonal, the terms of all weights together
are at most the root of the sum of the squares of their factors. A weight is the same for all samples: that norm
may not be replaced by the largest row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.bounds.movement import Ball, filled, scaled, with_factors
from surefoot.program import Node


class Speed:
    """The terms of one ball, added up."""

    def __init__(self, ball: Ball) -> None:
        self.ball, self.program = ball, ball.centre.program
        self.others = 0.0
        self.by_weight: dict[int, float] = {}
        for k in ball.centre.curved:
            node = self.program.nodes[k]
            if node.primitive.kind == "scalar":
                self.others += self._scalar(node)
            elif node.primitive.kind == "product":
                self._product(node)
            else:
                self.others += self._fused(node)

    @property
    def bound(self) -> float:
        """Of the norm of the third derivative on the ball."""
        total = self.others + math.hypot(*self.by_weight.values())
        return math.inf if math.isnan(total) else total

    def _whole(self, k: int) -> float:
        point = self.ball.centre.points[k]
        return point.norm + self.ball.of(k).D if point.moves else 0.0

    def _rows(self, k: int) -> Tensor:
        return self.ball.centre.points[k].rows + self.ball.of(k).d

    def _fibres(self, k: int) -> Tensor:
        return self.ball.centre.points[k].fibres + self.ball.of(k).f

    def _scalar(self, node: Node) -> float:
        (k,), costate, function = node.inputs, self.program.costates[node.index], node.options["function"]
        second, third = (self.ball.largest(k, function, order) for order in (2, 3))
        rows, size = self._rows(k), self.ball.sup(costate)
        still = rows == 0
        second, third = torch.where(still, 0.0, second), torch.where(still | (size == 0), 0.0, third)
        along = self._rows(costate)
        cubic = self._quadratic((size * third * rows).sqrt(), k, node.index, "cubic")
        mixed = self._quadratic((second * along).sqrt(), k, node.index, "mixed")
        return min(self._bent(size * third, second, rows, along, k, costate), cubic + 3 * mixed)

    def _quadratic(self, factors: Tensor, k: int, z: int, name: str) -> float:
        """Σ factors²·|x'|², x' being the part at the centre and what it moves."""
        point, motion = self.ball.centre.points[k], self.ball.of(k)
        weighted = self.ball.centre.weighted.get((name, z, k))
        return (with_factors(factors, weighted, point) + scaled(factors, motion.d, motion.D)) ** 2

    def _bent(self, third: Tensor, second: Tensor, rows: Tensor, along: Tensor, k: int, costate: int) -> float:
        """Σ third·|x'|³ + 3 Σ second·|λ'||x'|², of numbers or of groups."""
        squares, a, b = rows.square(), self._whole(k), self._whole(costate)
        cubic = filled(third * rows, squares, a * a)
        mixed = filled(second * along, squares, a * a)
        return cubic + 3 * min(mixed, b * math.sqrt(filled((second * rows).square(), squares, a * a)))

    def _fused(self, node: Node) -> float:
        k, costate, rule = node.inputs[0], self.program.costates[node.index], self.ball.centre.rules[node.index]
        if not hasattr(rule, "bends"):
            return math.inf
        second, third = rule.bends([self.ball.of(k)])

        def groups(entries: Tensor, j: int) -> Tensor:
            if entries.numel() == second.numel():
                return entries.reshape(second.shape)
            length = rule.length(entries)
            same = rule.last and entries.dim() == len(self.program.nodes[k].shape)
            return torch.minimum(length, self._fibres(j)[..., None]) if same else length

        size = self.ball.sup(costate)
        size = size.reshape(second.shape) if size.numel() == second.numel() else rule.length(size)
        rows, along = groups(self._rows(k), k), groups(self._rows(costate), costate)
        return self._bent(third * size, second, rows, along, k, costate)

    def _product(self, node: Node) -> None:
        costate, (j, k) = self.program.costates[node.index], node.inputs
        b = self._whole(costate)
        for weight, other in ((k, j), (j, k)):
            root = self._weight(node, weight)
            if root is not None:
                self.by_weight[root] = self.by_weight.get(root, 0.0) + 6 * self._with_weight(node, other, costate)
                return
        swing = self.ball.centre.overlap(node) if node.primitive.name.startswith("conv") else 1.0
        best = b * self._whole(j) * self._whole(k) * swing
        if node.primitive.name == "mul":
            for one, x, y in ((costate, j, k), (j, costate, k), (k, costate, j)):
                rows = self._rows(one)
                size = float(rows.max()) if rows.numel() else 0.0
                best = min(best, size * self._whole(x) * self._whole(y))
        elif node.primitive.name == "matmul":
            # row by row: |λ'_i||x'_i||y'|, y' being all of a matrix; of a batch of them, the sum of |λ'||y'|
            rows = self._fibres(j)
            if node.shape[:-2] and rows.numel():
                best = min(best, float(torch.linalg.vector_norm(rows, dim=-1).max()) * b * self._whole(k))
        self.others += 6 * best

    def _with_weight(self, node: Node, other: int, costate: int) -> float:
        """|Σ_n λ'_n x'_n|, what a unit vector of weights is multiplied by."""
        swing = self.ball.centre.overlap(node) if node.primitive.name.startswith("conv") else 1.0
        best = self._whole(costate) * self._whole(other) * swing
        if node.primitive.name == "matmul" and other == node.inputs[0] and len(node.shape) == 2:
            best = min(best, float((self._fibres(costate) * self._fibres(other)).sum()))
        return best

    def _weight(self, node: Node, k: int) -> int | None:
        """The weight whose entries, moved or repeated, a factor consists of. If they are repeated, what they are
        multiplied by is added up, which is at most as long as |λ'||x'| for entries, and for a batch of matrices.
        """
        while self.program.nodes[k].primitive.name in ("permute", "reshape", "expand"):
            factor = self.program.nodes[k]
            (k,) = factor.inputs
            whole = self.program.nodes[k].shape.numel()
            repeats = factor.primitive.name == "expand" and node.primitive.name != "mul"
            if repeats and (node.primitive.name != "matmul" or factor.shape[-2:].numel() != whole):
                return None
        return k if k in {self.program.inputs[name] for name in self.program.parameters} else None
