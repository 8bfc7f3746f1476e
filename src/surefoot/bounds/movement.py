r"""How far every tensor, and its derivative, may move on the ball :math:`|u - u_0| \le r` of all weights together.

Of a tensor z = z(u) with the value v and the Jacobian X at the centre (:mod:`surefoot.bounds.centre`) a `Motion`
states, for all u in the ball,

* ``d``, ``f``, ``D``: bounds of the norms of rows, of fibres and of the whole of :math:`Dz(u) - X`;
* ``e``, ``fe``, ``s``: bounds of :math:`|z(u) - v|`, entry by entry, of fibres, and as a whole.

By the mean-value inequality :math:`|z_i(u) - v_i| \le \epsilon_i + r(\|X_i\| + d_i)`, ε the error of v, and so for
fibres and the whole. **Shells**: if the same is known of the ball of radius r' < r inside, only the way from there
to u is longer, :math:`e_i \le e_i' + (r - r')(\|X_i\| + d_i)`: so d counts as it is where it is met.

*Linear maps.* Coefficients are non-negative up to signs, so d is the operation run on d; D, with the norms of the
maps from each argument.

*Products.* :math:`Dz = B(Da, b) + B(a, Db)`. With :math:`B(Da, b) - B(X_a, \hat b) = B(Da - X_a, b) + B(X_a, b -
\hat b)`, a row is at most :math:`B(d_a, |b| + e_b) + B(\|X_a\|, e_b)`; for matrices the norm is at most
:math:`(\|\hat b\| + s_b)D_a + \min(\|X_a\|s_b, \|B(\mathrm{rows}, e_b)\|_F)`, and so with a and b exchanged.

*Scalar functions.* :math:`Dz = f'(x)Dx`: a row moves by :math:`\sup|f'|\,d_x + t\,\|X_x\|`, where t bounds
:math:`|f'(x) - f'(v)|`: the smaller of :math:`\sup|f''|\,e_x` and what the range of f' allows.

*Selections* take the entries that are largest at the centre, if no other one can become larger.

*Round-off.* Added to all these is ``slack``. Everything here is sums, products, roots, minima and maxima of
non-negative numbers, each off by a relative :math:`(n + 8)2^{-52}` for n summands: for a thousand operations in a
row with a million summands less than :math:`2^{-20}`. So e, fe and s, which decide where functions are looked at,
are made larger by :math:`2^{-20}`, and so is what is read off the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.bounds.centre import Centre, Point, Weighted, additive, fibre
from surefoot.bounds.scalars import bounds, enclose
from surefoot.program import Node, Scalar

MARGIN = 1 + 2.0**-20


@dataclass(eq=False)
class Motion:
    """Of one tensor on one ball; see above."""

    d: Tensor
    f: Tensor
    D: float
    e: Tensor
    fe: Tensor
    s: float


def still(point: Point) -> Motion:
    """What does not move is off by its error."""
    zeros = torch.zeros_like(point.local)
    size = fibre(point.error)
    return Motion(zeros, torch.zeros_like(size), 0.0, point.error, size, float(torch.linalg.vector_norm(size)))


def _lifted(fibres: Tensor, like: Tensor) -> Tensor:
    """One number for each fibre, next to entries."""
    return fibres[..., None] if like.dim() else fibres


def _whole(x: float) -> float:
    return math.inf if math.isnan(x) else x


def filled(weights: Tensor, squares: Tensor, total: float) -> float:
    """The largest Σ w_i t_i with 0 ≤ t_i ≤ squares_i and Σ t_i ≤ total: a linear program, whose solution fills up
    the largest weights first. So it bounds Σ w_i x_i² for numbers whose squares and sum of squares are bounded.
    """
    if not weights.numel():
        return 0.0
    if not math.isfinite(total):
        return math.inf
    order = weights.flatten().nan_to_num(math.inf).sort(descending=True)
    sizes = squares.flatten().nan_to_num(math.inf).clamp(max=total)[order.indices]
    before = sizes.cumsum(0) - sizes
    taken = torch.minimum((total - before).clamp(min=0.0), sizes)
    return float(torch.where(taken > 0, order.values * taken, 0.0).sum())


def scaled(factors: Tensor, rows: Tensor, whole: float) -> float:
    """A bound of the norm of a vector times these factors, of which entries and the whole are bounded."""
    return math.sqrt(filled(factors.square(), rows.square(), whole * whole))


def with_factors(factors: Tensor, weighted: Weighted | None, point: Point) -> float:
    """A bound of the norm of a Jacobian at the centre with rows times factors.

    The part of the factors that is a multiple of those for which the norm is known, and the rest.
    """
    best = scaled(factors, point.rows, point.norm)
    if weighted is None:
        return best
    usual = weighted.factors
    total = float(usual.square().sum())
    ratios = torch.where(usual > 0, factors / usual, 0.0)
    for part in (float((factors * usual).sum()) / total, float(ratios.max())):
        if math.isfinite(part):
            rest = (factors - part * usual).clamp(min=0.0)
            best = min(best, part * weighted.norm + scaled(rest, point.rows, point.norm))
    return best


class Ball:
    """Motions of all tensors on a ball.

    Args:
        centre: of the ball.
        radius: of the ball.
        inner: the motions on a smaller ball, if they are known.

    Attributes:
        motions: of each node that a second derivative depends on, otherwise None.
    """

    def __init__(self, centre: Centre, radius: float, inner: Ball | None = None) -> None:
        self.centre, self.radius, self.inner = centre, radius, inner
        self.motions: list[Motion | None] = []
        self._ranges: dict[tuple[int, Scalar, int], Tensor] = {}
        self._bent: dict[int, tuple[Tensor, Tensor]] = {}  # of scalar functions, what their slopes are and move
        for node, point in zip(centre.program.nodes, centre.points, strict=True):
            if node.index not in centre.needed:
                self.motions.append(None)
            elif not point.moves:
                self.motions.append(still(point) if inner is None else inner.motions[node.index])
            else:
                self.motions.append(self._finished(node, point, *self._change(node, point)))
        self.inner = None  # its motions are not needed any more

    def of(self, k: int) -> Motion:
        motion = self.motions[k]
        assert motion is not None
        return motion

    def sup(self, k: int) -> Tensor:
        """Bounds of absolute values."""
        return self.centre.points[k].value.abs() + self.of(k).e

    def largest(self, k: int, function: Scalar, order: int) -> Tensor:
        """Bounds of a derivative of a scalar function over where a tensor may be."""
        key = (k, Scalar(function.name, function.parameters), function.order + order)
        if key not in self._ranges:
            x, e = self.centre.points[k].value, self.of(k).e
            self._ranges[key] = bounds(function, order, x - e, x + e)
        return self._ranges[key]

    def _finished(
        self, node: Node, point: Point, reach: Tensor | None, d: Tensor, whole: float, fibres: Tensor | None
    ) -> Motion:
        """Each bound limits the others; then the mean-value inequality."""
        d = (d + point.slack).nan_to_num(math.inf)
        slack = fibre(point.slack)
        f = fibre(d)
        if fibres is not None:
            f = torch.minimum(f, (fibres + slack).nan_to_num(math.inf))
        D = min(_whole(whole) + float(torch.linalg.vector_norm(slack)), float(torch.linalg.vector_norm(f)))
        f = f.clamp(max=D)
        d = torch.minimum(d, _lifted(f, d))
        inner = still(point) if self.inner is None else self.inner.of(node.index)
        way = self.radius if self.inner is None else self.radius - self.inner.radius
        e = inner.e + way * (point.rows + d) * MARGIN
        fe = inner.fe + way * (point.fibres + f) * MARGIN
        s = inner.s + way * (point.norm + D) * MARGIN
        if reach is not None:
            e = torch.minimum(e, reach.nan_to_num(math.inf) * MARGIN)
        fe = torch.minimum(fe, fibre(e)).clamp(max=s)
        e = torch.minimum(e, _lifted(fe, e))
        return Motion(d, f, D, e, fe, min(s, float(torch.linalg.vector_norm(fe))))

    def _change(self, node: Node, point: Point) -> tuple[Tensor | None, Tensor, float, Tensor | None]:
        """How far a result may be, and how far rows, the whole and fibres of its derivative move."""
        kind = node.primitive.kind
        if kind == "input":
            zeros = torch.zeros_like(point.rows)
            return torch.full_like(zeros, self.radius), zeros, 0.0, None
        if kind == "linear":
            return self._linear(node, point)
        if kind == "scalar":
            return self._scalar(node, point)
        if kind == "fused":
            change = self.centre.rules[node.index].move([self._motion(k) for k in node.inputs])
            return change.reach, change.entries, change.whole, change.fibres
        if kind == "selection":
            return self._selection(node)
        return self._product(node, point)

    def _motion(self, k: int) -> Motion:
        """Also of what is not needed elsewhere, such as masks."""
        return self.motions[k] or still(self.centre.points[k])

    def _selection(self, node: Node) -> tuple[Tensor | None, Tensor, float, Tensor | None]:
        """As long as no other entry may become the largest, what is selected are always the same entries."""
        motions = [self._motion(k) for k in node.inputs]
        lead, mask = self.centre.rivals(node)
        if node.primitive.name == "maximum":
            safe = bool((lead >= motions[0].e + motions[1].e).all())
        else:
            e = motions[-1].e
            rival = (lead >= e + (e * mask).sum(list(node.options["dims"]), keepdim=True)) | (mask > 0)
            safe = bool(rival.all())
        reach, d = (
            self.centre.select(node, numbers) for numbers in ([m.e for m in motions], [m.d for m in motions])
        )
        if not safe:
            return None, torch.full_like(d, math.inf), math.inf, None
        wholes = [m.D for m in motions[: 2 if node.primitive.name == "maximum" else 1]]
        return reach, d, sum(wholes), None

    def _linear(self, node: Node, point: Point) -> tuple[Tensor | None, Tensor, float, Tensor | None]:
        points, terms, name = [self.centre.points[k] for k in node.inputs], additive(node), node.primitive.name
        motions = {k: self._motion(node.inputs[k]) for k in range(len(points))}
        d = self.centre.positive(node, [m.d for m in motions.values()])
        reach = self.centre.positive(node, [m.e for m in motions.values()]) + point.local
        whole = sum(gain * motions[k].D for k, gain in zip(terms, point.gains, strict=True))
        first, fibres = motions[0], None
        if name == "add":
            fibres = sum((motions[k].f for k in terms), torch.zeros_like(first.f))
        elif name == "scale":
            fibres = abs(node.options["factor"]) * first.f
        elif name == "reshape" and node.shape[-1:] == points[0].value.shape[-1:]:
            fibres = first.f.reshape(node.shape[:-1])
        elif name == "permute" and node.shape and node.options["dims"][-1] == len(node.shape) - 1:
            fibres = first.f.permute(node.options["dims"][:-1])
        elif name == "expand" and node.shape[-1:] == points[0].value.shape[-1:]:
            fibres = first.f.expand(node.shape[:-1])
        return reach, d, whole, fibres

    def _scalar(self, node: Node, point: Point) -> tuple[Tensor | None, Tensor, float, Tensor | None]:
        (k,), function = node.inputs, node.options["function"]
        x, at = self.of(k), self.centre.points[k]
        steep, bend = self.largest(k, function, 1), self.largest(k, function, 2)
        low, high = enclose(function, 0, at.value - x.e, at.value + x.e)
        lowest, highest = enclose(function, 1, at.value - x.e, at.value + x.e)
        first, last = enclose(function, 1, at.value, at.value)
        moves = (at.rows > 0) | (x.d > 0) | (x.e > 0)
        turn = torch.minimum((bend * x.e).nan_to_num(math.inf), torch.maximum(highest - first, last - lowest))
        turn, steep = torch.where(moves, turn, 0.0), torch.where(moves, steep, 0.0)
        self._bent[node.index] = steep, turn
        reach = torch.minimum(
            (steep * x.e).nan_to_num(math.inf), torch.maximum(high - point.value, point.value - low)
        )
        bent = (turn * at.rows).nan_to_num(math.inf)
        d = (steep * x.d).nan_to_num(math.inf) + bent
        whole = scaled(steep, x.d, x.D) + with_factors(turn, self.centre.weighted.get(("turn", node.index, k)), at)
        fibres = None
        if node.shape:
            fibres = steep.amax(-1) * x.f + torch.minimum(fibre(bent), turn.amax(-1) * at.fibres)
        return reach + point.local, d, whole, fibres

    def _product(self, node: Node, point: Point) -> tuple[Tensor | None, Tensor, float, Tensor | None]:
        name, (j, k) = node.primitive.name, node.inputs

        def run(x: Tensor, y: Tensor, first: bool) -> Tensor:
            return node.primitive.run([x, y] if first else [y, x], **node.options)

        d, whole, parts = torch.zeros_like(point.rows), 0.0, []
        for mine, other, first in ((j, k, True), (k, j, False)):
            at, x, y = self.centre.points[mine], self._motion(mine), self._motion(other)
            if not at.moves:
                continue
            top = self.centre.points[other].value.abs() + y.e
            far, own = run(at.rows, y.e, first), run(x.d, top, first)
            if name == "matmul" and first:  # a row of the result: one of x times y
                widths = torch.linalg.vector_norm(top, dim=-2)[..., None, :]
                own = torch.minimum(own, x.f[..., None] * widths)
                widths = torch.linalg.vector_norm(y.e, dim=-2)[..., None, :]
                far = torch.minimum(far, at.fibres[..., None] * widths)
            d, before = d + own + far, whole
            gain, swing = self._gains(node, mine, other, 1 if first else 0)
            moved = min(swing * at.norm, float(torch.linalg.vector_norm(far)))
            whole += min(gain * x.D, float(torch.linalg.vector_norm(own))) + moved
            if name == "mul":
                turn = with_factors(y.e, self.centre.weighted.get(("mul", node.index, mine)), at)
                whole = min(whole, before + self._steep(node, mine, top) + turn)
            parts.append(self._fibres(node, at, x, y, other, first, own, far))
        reach = run(self._motion(j).e, self.centre.points[k].value.abs() + self._motion(k).e, True)
        reach = reach + run(self.centre.points[j].value.abs(), self._motion(k).e, True) + point.local
        fibres = sum(parts, torch.zeros_like(fibre(d))) if point.rows.dim() else None
        return reach, d, whole, fibres

    def _steep(self, node: Node, k: int, factors: Tensor) -> float:
        """How far a factor's derivative moves, times what it meets; of a function of x, by that of x."""
        best = scaled(factors, self.of(k).d, self.of(k).D)
        if k in self._bent:
            (x,), (steep, turn) = self.centre.program.nodes[k].inputs, self._bent[k]
            weighted = self.centre.weighted.get(("bent", node.index, x))
            bent = with_factors(factors * turn, weighted, self.centre.points[x])
            slack = float(torch.linalg.vector_norm(factors * self.centre.points[k].slack))
            best = min(best, scaled(factors * steep, self.of(x).d, self.of(x).D) + bent + slack)
        return best

    def _fibres(
        self, node: Node, at: Point, x: Motion, y: Motion, other: int, first: bool, own: Tensor, far: Tensor
    ) -> Tensor:
        """What one factor adds to how far fibres of a product move."""
        point = self.centre.points[other]
        if node.primitive.name == "matmul" and first:
            steep = point.spectral[..., None] + y.s
            return torch.minimum(x.f * steep, fibre(own)) + torch.minimum(at.fibres * y.s, fibre(far))
        if node.primitive.name == "matmul":  # a combination of rows of x, as a row of y says
            rows = torch.linalg.vector_norm(point.value, dim=-1) + y.fe
            return torch.minimum(rows * x.D, fibre(own)) + torch.minimum(y.fe * at.norm, fibre(far))
        if node.primitive.name == "mul" and own.dim():
            top = (point.value.abs() + y.e).amax(-1)
            return torch.minimum(x.f * top, fibre(own)) + torch.minimum(y.e.amax(-1) * at.fibres, fibre(far))
        return fibre(own) + fibre(far)

    def _gains(self, node: Node, mine: int, other: int, slot: int) -> tuple[float, float]:
        """The norm of the map from one factor over where the other may be, and of what that may be off by."""
        name, y = node.primitive.name, self._motion(other)
        point = self.centre.points[other]
        if not point.value.numel():
            return 0.0, 0.0
        if name == "mul":
            return self._meeting(mine, point.value.abs() + y.e), self._meeting(mine, y.e)
        if name == "matmul":
            return float(point.spectral.max()) + y.s, y.s
        norm, swing = self.centre.convolved(node, slot), self.centre.overlap(node)
        return norm + swing * y.s, swing * y.s

    def _meeting(self, mine: int, top: Tensor) -> float:
        """Of a factor that is spread over many entries, the root of the sum of squares that one number of it
        meets, over the root of how many they are, which the norm of what is spread counts already.
        """
        node = self.centre.program.nodes[mine]
        if node.primitive.name != "expand":
            return float(top.max())
        shape = self.centre.program.nodes[node.inputs[0]].shape
        count = top.numel() / max(1, shape.numel())
        return math.sqrt(float(top.square().sum_to_size(shape).max()) / count)
