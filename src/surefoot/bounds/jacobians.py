r"""Exact derivatives at the centre, by pushing unit vectors of the weights through the program.

The Jacobian X of a tensor has a row of as many numbers as there are weights for each entry. On the program of a
gradient the last ones are the second derivative. Kept are norms: of each row, of each *fibre* (the entries along
the last dimension), of the whole. So a part of the unit vectors is pushed at a time, and of a Jacobian its part is
dropped as soon as all that read it are done: squares of rows and Gram matrices add up over the parts.

Tensors that are bent or multiplied meet rows with factors that are known but for what moves, such as
:math:`|f''(v)|\,\|X_i\|`. The norms of the Jacobians with these factors are far below the largest factor times the
norm, so they are computed in a second pass.

The norm of the whole is that of the Gram matrix of the smaller side if that is affordable; if only a part of the
unit vectors is at hand and there are many entries, the root of the sum of the squares of the norms of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from surefoot.bounds.centre import SAME_NORM, UNIT, Centre, Unbounded, Weighted, additive, fibre
from surefoot.bounds.scalars import bounds
from surefoot.norms import frobenius_norm, spectral_norm
from surefoot.norms.hermitian import eigenvalue_bounds, gamma, product_error
from surefoot.program import Node

_ONCE = 3e7  # numbers that are held at a time
_SIDE = 1500  # entries up to which Gram matrices are added up
_COSTLY = 4e9  # multiplications for the norm of a part


class Jacobians:
    """The pass; it writes norms into the points of a centre.

    Attributes:
        hessian: the derivative of the gradient as computed, rows and columns in the order of the variables.

    Raises:
        Unbounded: if a derivative does not exist or is not finite.
    """

    def __init__(self, centre: Centre) -> None:
        self.centre, self.program = centre, centre.program
        nodes = self.program.nodes
        self.starts, self.size = dict[int, int](), 0
        for name in centre.variables:
            k = self.program.inputs[name]
            self.starts[k], self.size = self.size, self.size + nodes[k].shape.numel()
        self.order = [nodes[k] for k in sorted(centre.needed) if centre.moves[k]]
        self.wanted = self._norms_wanted()
        self.squares: dict[int, Tensor] = {}
        self.grams: dict[int, Tensor] = {}
        self.totals: dict[int, float] = {}
        self.fibre_grams: dict[int, Tensor] = {}
        self.weighted_grams: dict[tuple[str, int, int], Tensor] = {}
        self.weighted_totals: dict[tuple[str, int, int], float] = {}
        width = max(1, min(self.size, int(_ONCE / max(1, self._live()))))
        parts = -(-self.size // width)
        width = -(-self.size // parts)
        starts = range(0, self.size, width)
        self.hessian = torch.cat([self._push(start, width, self._gather) for start in starts])
        if not bool(torch.isfinite(self.hessian).all()):
            raise Unbounded("the second derivative at the weights is not finite")
        for node in self.order:
            self._finish(node)
        self.requests = self._all_requests()
        if self.requests:
            for start in starts:
                self._push(start, width, self._weigh)
            self._finish_weighted()

    def _all_requests(self) -> dict[int, list[tuple[tuple[str, int, int], Tensor]]]:
        """The factors for each tensor, and what for: how the derivatives of scalar functions and of products entry
        by entry turn, and the terms of the third derivative.
        """
        requests: dict[int, list[tuple[tuple[str, int, int], Tensor]]] = {}
        points, costates = self.centre.points, self.program.costates

        def ask(k: int, name: str, z: int, factors: Tensor) -> None:
            if bool(torch.isfinite(factors).all()) and bool(factors.any()) and k not in self.starts:
                requests.setdefault(k, []).append(((name, z, k), factors))

        for node in self.order:
            if node.primitive.kind == "scalar":
                (k,), function = node.inputs, node.options["function"]
                x = points[k]
                second, third = (bounds(function, order, x.value, x.value) for order in (2, 3))
                ask(k, "turn", node.index, second * x.rows)
                if node.index in costates and node.index in self.centre.curved:
                    costate = points[costates[node.index]]
                    ask(k, "cubic", node.index, (costate.value.abs() * third * x.rows).sqrt())
                    ask(k, "mixed", node.index, (second * costate.rows).sqrt())
            elif node.primitive.name == "mul":
                for k, other in (node.inputs, node.inputs[::-1]):
                    if self.centre.moves[k]:
                        ask(k, "mul", node.index, points[other].rows)
                    factor = self.program.nodes[k]
                    if factor.primitive.kind == "scalar" and self.centre.moves[k]:
                        inner = points[factor.inputs[0]]
                        turn = bounds(factor.options["function"], 2, inner.value, inner.value) * inner.rows
                        ask(factor.inputs[0], "bent", node.index, points[other].value.abs() * turn)
        return requests

    def _weigh(self, node: Node, tangent: Tensor) -> None:
        for key, factors in self.requests.get(node.index, ()):
            flat = tangent.reshape(len(tangent), -1) * factors.reshape(-1)
            if flat.shape[1] <= min(_SIDE, self.size):
                self.weighted_grams[key] = self.weighted_grams.get(key, 0.0) + flat.mT @ flat
                continue
            small = min(flat.shape) ** 2 * max(flat.shape) <= _COSTLY
            norm = spectral_norm(flat) if small else frobenius_norm(flat)
            self.weighted_totals[key] = self.weighted_totals.get(key, 0.0) + norm**2 * (1 + 2.0**-50)

    def _finish_weighted(self) -> None:
        for asked in self.requests.values():
            for key, factors in asked:
                if key in self.weighted_grams:
                    norm = float(self._root(self.weighted_grams.pop(key)))
                else:
                    norm = math.sqrt(self.weighted_totals.pop(key))
                self.centre.weighted[key] = Weighted(factors, norm * (1 + 2.0**-30))

    def _live(self) -> int:
        """The largest number of entries of tensors that are held at once."""
        last = {k: node.index for node in self.order for k in node.inputs}
        live = most = 0
        for node in self.order:
            live += node.shape.numel()
            most = max(most, live)
            live -= sum(
                self.program.nodes[k].shape.numel()
                for k in set(node.inputs)
                if self.centre.moves[k] and last[k] == node.index
            )
        return most

    def _norms_wanted(self) -> set[int]:
        """Of which tensors norms of the whole and of fibres are read: what is multiplied, bent or normalised, and
        the costates of that; of a tensor whose entries change places only, those of the original.
        """
        nodes, moves = self.program.nodes, self.centre.moves
        wanted = {self.program.costates[k] for k in self.centre.curved}
        for node in self.order:
            if node.primitive.kind in ("product", "scalar", "fused"):
                wanted |= {*node.inputs}
        for node in reversed(self.order):
            if node.index in wanted and node.primitive.name in SAME_NORM:
                wanted.add(node.inputs[0])
        return {k for k in wanted if moves[k] and nodes[k].primitive.kind != "input"}

    def _push(self, start: int, width: int, gather: Callable[[Node, Tensor], None]) -> Tensor:
        """A part of the unit vectors; returns these rows of the second derivative."""
        stop = min(self.size, start + width)
        tangents: dict[int, Tensor] = {}
        outputs = self.program.outputs[1:]
        last = {k: node.index for node in self.order for k in node.inputs}
        for node in self.order:
            tangent = self._unit(node, start, stop) if node.index in self.starts else self._pushed(node, tangents)
            tangents[node.index] = tangent
            gather(node, tangent)
            for k in set(node.inputs):
                if last[k] == node.index and k not in outputs:
                    tangents.pop(k, None)
        parts = []
        for k in outputs:
            zeros = self.centre.points[k].value.new_zeros(stop - start, self.program.nodes[k].shape.numel())
            parts.append(tangents[k].reshape(zeros.shape) if k in tangents else zeros)
        return torch.cat(parts, 1)

    def _unit(self, node: Node, start: int, stop: int) -> Tensor:
        first, size = self.starts[node.index], node.shape.numel()
        unit = self.centre.points[node.index].value.new_zeros(stop - start, size)
        begin, end = max(start, first), min(stop, first + size)
        if begin < end:
            at = torch.arange(begin, end)
            unit[at - start, at - first] = 1.0
        return unit.reshape(stop - start, *node.shape)

    def _pushed(self, node: Node, tangents: dict[int, Tensor]) -> Tensor:
        kind, points = node.primitive.kind, [self.centre.points[k] for k in node.inputs]
        given = [tangents.get(k) for k in node.inputs]
        if kind == "scalar":
            (tangent,), slope = given, self.centre.points[node.index].slope
            assert tangent is not None
            assert slope is not None
            return slope * tangent
        if kind == "fused":
            return self.centre.rules[node.index].push(given)
        if kind == "product":
            (a, b), total = (p.value for p in points), None
            if given[0] is not None:
                total = vmap(lambda t: node.primitive.run([t, b], **node.options))(given[0])
            if given[1] is not None:
                right = vmap(lambda t: node.primitive.run([a, t], **node.options))(given[1])
                total = right if total is None else total + right
            assert total is not None
            return total
        if kind == "selection":
            zeros = [torch.zeros_like(p.value) for p in points]
            count = 2 if node.primitive.name == "maximum" else 1
            parts = [t for t in given[:count] if t is not None]
            which = [k for k in range(count) if given[k] is not None]

            def select(*numbers: Tensor) -> Tensor:
                chosen = dict(zip(which, numbers, strict=True))
                return self.centre.select(node, [chosen.get(k, zero) for k, zero in enumerate(zeros)])

            if not parts:  # only what is compared moves
                count = next(len(t) for t in given if t is not None)
                return zeros[0].new_zeros(count, *node.shape)
            return vmap(select)(*parts)
        terms = additive(node)
        moving = [k for k in terms if given[k] is not None]
        fixed = [torch.zeros_like(p.value) if k in terms else p.value for k, p in enumerate(points)]

        def run(*parts: Tensor) -> Tensor:
            numbers = dict(zip(moving, parts, strict=True))
            return node.primitive.run([numbers.get(k, t) for k, t in enumerate(fixed)], **node.options)

        return vmap(run)(*(t for k in moving if (t := given[k]) is not None))

    def _gather(self, node: Node, tangent: Tensor) -> None:
        """Add the norms of a part to those of the others."""
        k, flat = node.index, tangent.reshape(len(tangent), -1)
        squares = torch.linalg.vector_norm(flat, dim=0).square()
        self.squares[k] = self.squares.get(k, 0.0) + squares
        if k not in self.wanted or not flat.numel():
            return
        if node.primitive.name in SAME_NORM:
            pass
        elif flat.shape[1] <= min(_SIDE, 2 * self.size):
            self.grams[k] = self.grams.get(k, 0.0) + flat.mT @ flat
        elif min(flat.shape) ** 2 * max(flat.shape) <= _COSTLY:
            self.totals[k] = self.totals.get(k, 0.0) + spectral_norm(flat) ** 2 * (1 + 2.0**-50)
        else:
            self.totals[k] = self.totals.get(k, 0.0) + frobenius_norm(flat) ** 2 * (1 + 2.0**-50)
        same = node.primitive.name == "reshape"
        same = same and node.shape[-1:] == self.program.nodes[node.inputs[0]].shape[-1:]
        if tangent.dim() > 2 and tangent.shape[-1] * tangent.numel() <= _COSTLY and not same:
            fibres = tangent.flatten(1, -2).permute(1, 0, 2)
            self.fibre_grams[k] = self.fibre_grams.get(k, 0.0) + fibres.mT @ fibres

    def _finish(self, node: Node) -> None:
        """Norms from sums of squares, and the round-off of the Jacobian."""
        k, point = node.index, self.centre.points[node.index]
        point.rows = self.squares.pop(k).sqrt().reshape(node.shape) * (1 + (self.size + 8) * UNIT)
        if not bool(torch.isfinite(point.rows).all()):
            raise Unbounded(f"the derivative of '{node.path or 'the objective'}' is not finite at the weights")
        point.slack = self._slack(node)
        point.fibres, point.norm = fibre(point.rows), frobenius_norm(point.rows)
        if k in self.starts:  # part of a unit matrix
            point.norm, point.fibres = 1.0, torch.ones_like(point.fibres)
        if k not in self.wanted or not point.rows.numel():
            return
        source = self.centre.points[node.inputs[0]] if node.primitive.name in SAME_NORM else None
        if source is not None:
            point.norm = source.norm
            if node.primitive.name == "reshape" and node.shape[-1:] == source.value.shape[-1:]:
                point.fibres = source.fibres.reshape(point.fibres.shape)
        elif k in self.grams:
            point.norm = min(point.norm, float(self._root(self.grams.pop(k))))
        else:
            point.norm = min(point.norm, math.sqrt(self.totals.pop(k)) * (1 + 2.0**-40))
        if k in self.fibre_grams:
            top = self._root(self.fibre_grams.pop(k)).reshape(point.fibres.shape)
            point.fibres = torch.minimum(point.fibres, top)
        point.fibres = point.fibres.clamp(max=point.norm)

    def _root(self, grams: Tensor) -> Tensor:
        """Bounds of norms from Gram matrices, which are off by at most γ times their traces."""
        trace = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
        error = product_error(self.size) + gamma(grams.shape[-1])
        top = (eigenvalue_bounds(grams) + 2 * error * trace).sqrt() * (1 + 2.0**-40)
        return torch.where((trace > 1e-100) & (trace < 1e100), top, math.inf)

    def _slack(self, node: Node) -> Tensor:
        """How far rows are from what exact arithmetic makes of those of the arguments."""
        point, inputs = self.centre.points[node.index], [self.centre.points[k] for k in node.inputs]
        kind, units = node.primitive.kind, point.units + UNIT
        if kind in ("input", "selection"):
            return torch.zeros_like(point.rows)
        if kind == "fused":
            return self.centre.rules[node.index].slack()
        if kind == "product":
            (a, b), run = inputs, node.primitive.run
            left, right = [a.rows, b.value.abs()], [a.value.abs(), b.rows]
            return units * (run(left, **node.options) + run(right, **node.options))
        if kind == "scalar":
            assert point.off is not None
            assert point.slope is not None
            rows = inputs[0].rows
            if bool((torch.isinf(point.off) & (rows > 0)).any()):
                raise Unbounded(f"'{node.path or 'the objective'}' has a kink or a pole at the weights")
            return torch.where(rows > 0, (point.off + 4 * UNIT * point.slope.abs()) * rows, 0.0)
        if not point.units:
            return torch.zeros_like(point.rows)
        slack = units * self.centre.positive(node, [p.rows for p in inputs])
        return slack + inputs[0].rows * inputs[1].error if node.primitive.name == "weigh" else slack
