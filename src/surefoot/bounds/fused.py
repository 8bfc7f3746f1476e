r"""Soft-max, log-sum-exp, normalisation and their transposes: a proof for each of what they do on a ball.

Written out in exponentials, sums and quotients these are bounded 9 times worse or not at all, as what their parts
do cancels. Each class states, with h the tangent of a tensor, what a derivative is; entry by entry, how far it is
from that at the centre if the arguments move by at most e and their tangents, of norms ``rows``, by at most d; and
constants for norms. Sums over a *group* are over the dimensions of the operation.

**Soft-max** y, E the mean under y: :math:`Dy[h] = y(h - E h)`, :math:`D^2y[a, b] = y((a - Ea)(b - Eb) -
\mathrm{cov}(a, b))`. On a group :math:`\|Dy\| \le \min(\frac12, \max y)` (Gershgorin, and :math:`Dy \preceq
\mathrm{diag}(y)`); :math:`\|D^2y\| \le \sqrt2/(3\sqrt3) < 0.2723`: as a symmetric tensor it attains its norm on
the diagonal (Banach), the third central moment of numbers at most √2 apart, which is at most
:math:`\delta^3/(6\sqrt3)` on an interval of length δ; likewise :math:`\|D^2y\| \le \sqrt2\|Dy\|`; and
:math:`\|D^3y\| \le 2\|Dy\|`, the fourth cumulant being between :math:`-2\|Dy\|^2` and :math:`2\|Dy\|`.
**Log-sum-exp** has the gradient y, so second and third derivatives Dy and D²y. That y_i is at most :math:`1/(1 +
\sum_{j≠i} e^{l_j - u_i})` if entries are in [l, u].

**Normalisation** of n numbers: z = c/σ, c the numbers less their mean, σ² the mean of c² and ε, q = 1/σ, m the
mean: :math:`Dz[h] = q(h - m h - z\,m(zh))`, an orthogonal projection less a part of it, so :math:`\|Dz\| \le q`;
:math:`Dq[h] = -q^2m(zh)`, :math:`\|Dq\| \le q^2/\sqrt n`; and

.. math:: D^2z[a, b] = -q\,m(za)\,Dz[b] - q\,(Dz[a]\,m(zb) + z\,m(Dz[a]\,b)), \qquad
    D^2q[a, b] = 2q^3m(za)m(zb) - q^2m(Dz[a]\,b) .

With :math:`v = (c, \sqrt{n\epsilon})`, z is :math:`\sqrt n\,v/\|v\|` without the last number and q is
:math:`\sqrt n/\|v\|`; the direction of a vector has derivatives of norm 1, 2/√3, 3 (angles: :math:`\sin\varphi,
-\sin2\varphi, 2\sin3\varphi`) and 1/‖v‖ of norm 1, 2, 6 (Legendre polynomials times factorials), over powers of
‖v‖ = √n σ. So :math:`\|D^2z\| \le \frac{2}{\sqrt3}q^2/\sqrt n`, :math:`\|D^3z\| \le 3q^3/n`, :math:`\|D^2q\| \le
2q^3/n`, :math:`\|D^3q\| \le 6q^4/n^{3/2}`. As σ has slope at most :math:`1/\sqrt n`, it is at least
:math:`\max(\sigma_0 - \|e\|/\sqrt n, \sqrt\epsilon)`.

**Transposes.** :math:`t = y(g - \langle g, y\rangle)` is linear in g with the matrix Dy, and does not change if a
constant is added to the g of a group; :math:`t = q(g - m g - z\,m(gz))` is linear in g with a norm of at most q,
and does not change if g is replaced by g less a constant, as m(z) = 0. Both are differences of products, of which
every factor is changed in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from surefoot.bounds.centre import Point
    from surefoot.bounds.movement import Motion

_UNIT = 2.0**-53
_TINY = 1e-300
_BEND, _SKEW = math.sqrt(2) / (3 * math.sqrt(3)) * (1 + 1e-12), math.sqrt(0.5) * (1 + 1e-12)
_TURN = 2 / math.sqrt(3) * (1 + 1e-12)


class Change(NamedTuple):
    """How far a result is from that at the centre, and bounds of how far its derivative moves: of rows, of the
    whole, and of fibres where groups are fibres.
    """

    reach: Tensor
    entries: Tensor
    whole: float
    fibres: Tensor | None = None


class Rule:
    """What is common: groups, their sums, and the centre."""

    def __init__(self, node: Any, inputs: Sequence[Point], producers: Sequence[Any]) -> None:
        self.node, self.inputs, self.producers = node, inputs, producers
        options = node.options
        self.dims = list(options["dims"]) if "dims" in options else [options["dim"]]
        shape = inputs[0].value.shape
        self.count = math.prod(shape[d] for d in self.dims)
        self.last = self.dims == [len(shape) - 1]  # whether groups are fibres
        self.value = node.primitive.run([p.value for p in inputs], **options)
        self.prepare()

    local: Tensor

    def prepare(self) -> None:
        """What is needed of the centre; sets ``local``, the error of the operation itself."""

    def move(self, motions: Sequence[Motion]) -> Change:
        """What happens on a ball."""
        raise NotImplementedError

    def error(self) -> Tensor:
        """How far the value may be from the exact one."""
        raise NotImplementedError

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        """The derivative along tangents, with a leading dimension, of the inputs that have them."""
        raise NotImplementedError

    def slack(self) -> Tensor:
        """The round-off of rows of that."""
        raise NotImplementedError

    def total(self, x: Tensor) -> Tensor:
        return x.sum(self.dims, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.count

    def length(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=self.dims, keepdim=True)

    def groups(self, motion: Motion, entries: Tensor, fibres: Tensor | None, whole: float) -> Tensor:
        """Norms of groups, from bounds of entries, of fibres and of the whole."""
        length = self.length(entries).clamp(max=whole)
        return torch.minimum(length, fibres[..., None]) if self.last and fibres is not None else length

    def flat(self, x: Tensor) -> Tensor | None:
        """Numbers of groups as numbers of fibres, if they are the same."""
        return x[..., 0] if self.last else None


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _most(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


class Softmax(Rule):
    """Of scores, and a mask of those that count."""

    def prepare(self) -> None:
        x = self.inputs[0].value
        self.mask = None if len(self.inputs) == 1 else self.inputs[1].value != 0
        apart = (x.amax(self.dims, keepdim=True) - x).clamp(max=800.0)
        if self.mask is not None:
            apart = (x.masked_fill(~self.mask, -math.inf).amax(self.dims, keepdim=True) - x).clamp(0.0, 800.0)
        self.relative = (apart + self.count + 60) * (4 * _UNIT)
        self.local = self.value * self.relative + _TINY * (self.value > 0)

    def jacobian(self, h: Tensor, y: Tensor) -> Tensor:
        return y * (h + self.total(y * h))

    def error(self) -> Tensor:
        x = self.inputs[0].error
        # moving arguments by less than 1e-3 changes probabilities by less than 0.3 %
        small = torch.where(self.length(x) < 1e-3, 1.01, math.inf) if bool(x.any()) else 1.0
        return _safe(self.jacobian(x, self.value), small) + self.local

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        (h, *_), dims = tangents, [d + 1 for d in self.dims]
        assert h is not None
        return self.value * (h - (self.value * h).sum(dims, keepdim=True))

    def slack(self) -> Tensor:
        return self.jacobian(self.inputs[0].rows, self.value) * (4 * self.relative.amax(self.dims, keepdim=True))

    def upper(self, x: Motion) -> Tensor:
        """Upper bounds of probabilities: y_i ≤ 1/(1 + Σ_{j≠i} exp(l_j - u_i))."""
        low, high = self.inputs[0].value - x.e, self.inputs[0].value + x.e
        if self.mask is not None:
            low = low.masked_fill(~self.mask, -math.inf)
        top = low.amax(self.dims, keepdim=True).clamp(min=-1e300)
        parts = torch.exp(low - top)
        # what cancels in the sum without an entry is at most (n + 4) u times the sum
        others = (self.total(parts) * (1 - (self.count + 8) * 2 * _UNIT) - parts * (1 + 4 * _UNIT)).clamp(min=0.0)
        far = torch.exp((top - high).clamp(-700.0, 700.0))
        upper = (1 / (1 + others * far * (1 - 1e-12))) * (1 + 1e-12)
        upper = torch.where(torch.isfinite(high), upper, 1.0).clamp(max=1.0)
        return upper if self.mask is None else upper.masked_fill(~self.mask, 0.0)

    def move(self, motions: Sequence[Motion]) -> Change:
        x = motions[0]
        upper = self.upper(x)
        steep = upper.amax(self.dims, keepdim=True).clamp(max=0.5)
        reach = torch.minimum(
            self.jacobian(x.e, upper), torch.maximum(upper - self.value, self.value) + self.local
        )
        point, mean = self.inputs[0], self.total
        rows, e = point.rows, x.e
        mean_rows, mean_e = mean(upper * rows), mean(upper * e)
        turn = upper * ((rows + mean_rows) * (e + mean_e) + mean(upper * rows * e) + mean_rows * mean_e)
        far, bend = self.groups(x, e, x.fe, x.s), (math.sqrt(2) * steep).clamp(max=_BEND)
        whole = _most(steep) * x.D + min(_norm(turn), _most(bend * far) * point.norm)
        fibres = None
        if self.last:
            flat, bent = turn.square().sum(-1).sqrt(), (bend * far)[..., 0]
            fibres = steep[..., 0] * x.f + torch.minimum(flat, bent * point.fibres)
        return Change(reach, self.jacobian(x.d, upper) + turn, whole, fibres)

    def bends(self, motions: Sequence[Motion]) -> tuple[Tensor, Tensor]:
        """Norms of the second and third derivatives on groups."""
        steep = self.upper(motions[0]).amax(self.dims, keepdim=True).clamp(max=0.5)
        return (math.sqrt(2) * steep).clamp(max=_BEND), 2 * steep


class LogSumExp(Softmax):
    """Of the same."""

    def prepare(self) -> None:
        value, self.value = self.value, self.inputs[0].value.softmax(self.dims[0])
        if len(self.inputs) > 1:
            masked = self.inputs[0].value.masked_fill(self.inputs[1].value == 0, -math.inf)
            self.value = masked.softmax(self.dims[0]).nan_to_num(0.0)
        super().prepare()
        self.probabilities, self.value = self.value, value
        self.spread = self.local
        size = self.inputs[0].value.abs().amax(self.dims, keepdim=True)
        self.local = ((size + self.count + 60) * (4 * _UNIT)).reshape(value.shape)

    def error(self) -> Tensor:
        return self.inputs[0].error.amax(self.dims, keepdim=True).reshape(self.value.shape) + self.local

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        h, dims = tangents[0], [d + 1 for d in self.dims]
        assert h is not None
        return (self.probabilities * h).sum(dims, keepdim=True).reshape(len(h), *self.value.shape)

    def slack(self) -> Tensor:
        rows = self.inputs[0].rows
        lost = self.spread + self.probabilities * ((self.count + 8) * _UNIT)
        return self.total(lost * rows).reshape(self.value.shape)

    def move(self, motions: Sequence[Motion]) -> Change:
        x, upper = motions[0], self.upper(motions[0])
        rows, e = self.inputs[0].rows, x.e
        turn = self.total(upper * e * rows) + self.total(upper * e) * self.total(upper * rows)
        steep = upper.amax(self.dims, keepdim=True).clamp(max=0.5)
        far = self.groups(x, e, x.fe, x.s)
        entries = (self.total(upper * x.d) + turn).reshape(self.value.shape)
        reach = self.total(upper * e).reshape(self.value.shape) + self.local
        whole = x.D + min(_norm(turn), _most(steep * far) * self.inputs[0].norm)
        return Change(reach, entries, whole)

    def bends(self, motions: Sequence[Motion]) -> tuple[Tensor, Tensor]:
        steep = self.upper(motions[0]).amax(self.dims, keepdim=True).clamp(max=0.5)
        return steep, (math.sqrt(2) * steep).clamp(max=_SKEW)


class SoftmaxBack(Rule):
    """t = y(g - ⟨g, y⟩), from g and y."""

    def prepare(self) -> None:
        g, y = (p.value for p in self.inputs)
        producer = self.producers[1]
        self.is_softmax = producer.primitive.name == "softmax" and producer.options["dim"] == self.dims[0]
        self.centred = g - self.total(g * y) if self.is_softmax else g
        self.size = y.abs() * (g.abs() + self.total((g * y).abs()))
        self.local = (self.count + 6) * _UNIT * self.size

    def matrix(self, h: Tensor, y: Tensor) -> Tensor:
        return y * (h + self.total(y * h))

    def error(self) -> Tensor:
        (g, y) = self.inputs
        return self._reach(g.error, y.error) + self.local

    def _reach(self, e_g: Tensor, e_y: Tensor) -> Tensor:
        y, c = self.inputs[1].value.abs(), self.centred.abs()
        top = y + e_y
        return self.matrix(e_g, top) + e_y * (c + self.total(c * top)) + y * self.total(c * e_y)

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        (g, y), dims = (p.value for p in self.inputs), [d + 1 for d in self.dims]
        h_g, h_y = tangents
        out: Any = 0.0
        if h_g is not None:
            out = y * (h_g - (y * h_g).sum(dims, keepdim=True))
        if h_y is not None:
            out = out + h_y * (g - self.total(g * y)) - y * (g * h_y).sum(dims, keepdim=True)
        return out

    def slack(self) -> Tensor:
        (g, y), (rows_g, rows_y) = (p.value.abs() for p in self.inputs), (p.rows for p in self.inputs)
        size = self.matrix(rows_g, y) + rows_y * (g + self.total(g * y)) + y * self.total(g * rows_y)
        return (self.count + 12) * _UNIT * size

    def move(self, motions: Sequence[Motion]) -> Change:
        (p_g, p_y), (g, y) = self.inputs, motions
        low, c = p_y.value.abs(), self.centred.abs()
        top, high = low + y.e, c + g.e
        along = high + self.total(high * top)  # bounds |g - ⟨g, y⟩|
        by_y = y.d * along + top * self.total(high * y.d)
        moved = g.e + self.total(g.e * top) + self.total(c * y.e)
        turn = y.e * (p_g.rows + self.total(top * p_g.rows)) + low * self.total(y.e * p_g.rows)
        turn = turn + p_y.rows * moved + y.e * self.total(high * p_y.rows) + low * self.total(g.e * p_y.rows)
        steep = (
            top.amax(self.dims, keepdim=True).clamp(max=0.5) if self.is_softmax else 2 * self.length(top).square()
        )
        if not self.is_softmax:
            steep = top.amax(self.dims, keepdim=True) + self.length(top).square()
        weight = along.amax(self.dims, keepdim=True) + self.length(top) * self.length(high)
        whole = _most(steep) * g.D + min(_most(weight) * y.D, _norm(by_y)) + _norm(turn)
        fibres = None
        if self.last:
            part = torch.minimum(weight[..., 0] * y.f, by_y.square().sum(-1).sqrt())
            fibres = steep[..., 0] * g.f + part + turn.square().sum(-1).sqrt()
        entries = self.matrix(g.d, top) + by_y + turn
        return Change(self._reach(g.e, y.e) + self.local, entries, whole, fibres)


class Normalize(Rule):
    """z = (x - mean)/σ; with ``inverse`` 1/σ instead."""

    inverse = False

    def prepare(self) -> None:
        x, self.epsilon = self.inputs[0].value, self.node.options["eps"]
        centred = x - self.mean(x)
        self.sigma = (self.mean(centred.square()) + self.epsilon).sqrt()
        self.q = 1 / self.sigma
        self.z = centred * self.q
        unit = (self.count + 40) * (4 * _UNIT)
        lost = unit * (x.abs() + self.mean(x.abs()))  # what the centred numbers are off by
        if not bool((self.length(lost) < 1e-3 * self.sigma).all()):
            raise ArithmeticError("a normalised group is smaller than its round-off")
        self.off = self.steep(lost, self.z.abs(), self.q) * 1.01 + unit * self.z.abs()
        self.q_off = self.q * (self.length(lost) * self.q + unit)
        self.local = self.q_off if self.inverse else self.off

    def steep(self, h: Tensor, z: Tensor, q: Tensor) -> Tensor:
        """|Dz[h]| for |h| as given."""
        return q * (h + self.mean(h) + z * self.mean(z * h))

    def error(self) -> Tensor:
        x = self.inputs[0].error
        small = torch.where(self.length(x) < 1e-3 * self.sigma, 1.01, math.inf) if bool(x.any()) else 1.0
        z = self.z.abs()
        error = self.q**2 * self.mean(z * x) if self.inverse else self.steep(x, z, self.q)
        if self.inverse:
            error = error + self.q**3 * self.length(x).square() * (2 / self.count)
        else:
            error = error + (_TURN / math.sqrt(self.count)) * self.q**2 * self.length(x).square()
        return _safe(error, small) + self.local

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        h, dims = tangents[0], [d + 1 for d in self.dims]
        assert h is not None
        along = (self.z * h).sum(dims, keepdim=True) / self.count
        if self.inverse:
            return -self.q.square() * along
        return self.q * (h - h.sum(dims, keepdim=True) / self.count - self.z * along)

    def slack(self) -> Tensor:
        rows, z = self.inputs[0].rows, self.z.abs()
        off, unit = self.off, (self.count + 40) * (8 * _UNIT)
        lost = _most(self.q_off * self.sigma) + unit
        if self.inverse:
            return self.q**2 * (self.mean(z * rows) * (3 * lost) + self.mean(off * rows) * 1.01)
        part = off * self.mean(z * rows) + z * self.mean(off * rows)
        return self.steep(rows, z, self.q) * (3 * lost) + self.q * part * 1.01

    def over(self, x: Motion) -> tuple[Tensor, Tensor, Tensor]:
        """Upper bounds of q and |z|, and how far z moves."""
        far = self.groups(x, x.e, x.fe, x.s)
        least = self.sigma * (1 - 1e-12) - far / math.sqrt(self.count) * (1 + 1e-12)
        least = torch.maximum(least, torch.full_like(least, math.sqrt(self.epsilon) * (1 - 1e-12)))
        q = torch.where(least > 0, 1 / least, math.inf)
        z = self.z.abs()
        moved = (q * far).clamp(max=2 * math.sqrt(self.count)).nan_to_num(math.inf)
        top = (z + moved).clamp(max=math.sqrt(self.count))
        moved = torch.minimum(self.steep(x.e, top, q).nan_to_num(math.inf), moved.expand_as(z)) + self.off
        return q, (z + moved).clamp(max=math.sqrt(self.count) * (1 + 1e-9)), moved

    def move(self, motions: Sequence[Motion]) -> Change:
        x, point = motions[0], self.inputs[0]
        q, top, moved = self.over(x)
        rows, n = point.rows, self.count
        far = self.groups(x, x.e, x.fe, x.s)
        around, along, moves = self.mean(top * rows), self.mean(top * x.e), self.steep(x.e, top, q)
        inner = self.mean(moves * rows)
        if self.inverse:
            turn = 2 * q**3 * along * around + q**2 * inner
            gain, bend = q**2 / math.sqrt(n), 2 * q**3 / n
            entries = q**2 * self.mean(top * x.d) + turn
            reach = torch.minimum(q**2 * along, (q - self.q).clamp(min=0.0) + self.q) + self.local
        else:
            turn = q**2 * along * (rows + self.mean(rows) + top * around) + q * (moves * around + top * inner)
            gain, bend = q, _TURN * q**2 / math.sqrt(n)
            entries, reach = self.steep(x.d, top, q) + turn, moved
        whole = _most(gain) * x.D + min(_norm(turn), _most(bend * far) * point.norm)
        fibres = None
        if self.last:
            bent = torch.minimum(torch.linalg.vector_norm(turn, dim=-1), (bend * far)[..., 0] * point.fibres)
            fibres = gain[..., 0] * x.f + bent
        return Change(reach, entries, whole, fibres)

    def bends(self, motions: Sequence[Motion]) -> tuple[Tensor, Tensor]:
        q, n = self.over(motions[0])[0], self.count
        if self.inverse:
            return 2 * q**3 / n, 6 * q**4 / n**1.5
        return _TURN * q**2 / math.sqrt(n), 3 * q**3 / n


class Rstd(Normalize):
    """1/σ."""

    inverse = True


class NormalizeBack(Rule):
    """t = r(g - mean g - z mean(gz)), from g, z and r."""

    def prepare(self) -> None:
        g, z, r = (p.value for p in self.inputs)
        if self.producers[1].primitive.name != "normalize" or self.producers[2].primitive.name != "rstd":
            raise NotImplementedError("the transpose of a normalisation that is none")
        self.centred = g - self.mean(g)
        self.size = r.abs() * (g.abs() + self.mean(g.abs()) + z.abs() * self.mean((g * z).abs()))
        self.local = (self.count + 10) * _UNIT * self.size

    def project(self, h: Tensor, z: Tensor) -> Tensor:
        return h + self.mean(h) + z * self.mean(z * h)

    def _reach(self, e_g: Tensor, e_z: Tensor, e_r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How far the result, and g - mean g - z mean(gz), move; and a bound of the second."""
        z, r, c = self.inputs[1].value.abs(), self.inputs[2].value.abs(), self.centred.abs()
        top = z + e_z
        moved = self.project(e_g, top) + e_z * self.mean(top * c) + z * self.mean(e_z * c)
        at = (self.centred - self.inputs[1].value * self.mean(self.centred * self.inputs[1].value)).abs()
        return (r + e_r) * moved + e_r * at, moved, at + moved

    def error(self) -> Tensor:
        return self._reach(*(p.error for p in self.inputs))[0] + self.local

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        (g, z, r), dims = (p.value for p in self.inputs), [d + 1 for d in self.dims]
        h_g, h_z, h_r = tangents
        n, along = self.count, self.mean(g * z)
        out: Any = 0.0
        if h_g is not None:
            out = h_g - h_g.sum(dims, keepdim=True) / n - z * ((z * h_g).sum(dims, keepdim=True) / n)
        if h_z is not None:
            out = out - h_z * along - z * ((g * h_z).sum(dims, keepdim=True) / n)
        out = r * out
        if h_r is not None:
            out = out + h_r * (g - self.mean(g) - z * along)
        return out

    def slack(self) -> Tensor:
        (g, z, r), rows = (p.value.abs() for p in self.inputs), [p.rows for p in self.inputs]
        along = self.mean(g * z)
        size = r * (self.project(rows[0], z) + rows[1] * along + z * self.mean(g * rows[1]))
        size = size + rows[2] * (g + self.mean(g) + z * along)
        return (self.count + 16) * _UNIT * size

    def move(self, motions: Sequence[Motion]) -> Change:
        (p_g, p_z, p_r), (g, z, r) = self.inputs, motions
        low, c = p_z.value.abs(), self.centred.abs()
        top, high, R = low + z.e, c + g.e, p_r.value.abs() + r.e
        reach, e_h, h = self._reach(g.e, z.e, r.e)
        along = self.mean(high * top)
        # the tangents of g, of r and of z in turn: what they move themselves, and what they are multiplied by
        turn = r.e * self.project(p_g.rows, top)
        turn = turn + R * (z.e * self.mean(top * p_g.rows) + low * self.mean(z.e * p_g.rows))
        turn = turn + r.d * h + p_r.rows * e_h
        by_z = R * (z.d * along + top * self.mean(high * z.d))
        e_along = self.mean(g.e * top) + self.mean(c * z.e)
        turn = turn + p_z.rows * (r.e * along + R * e_along)
        inner = self.mean(high * p_z.rows)
        turn = turn + (r.e * top + R * z.e) * inner + R * low * self.mean(g.e * p_z.rows)
        weight = R * 2 * self.length(high) * self.length(top) / self.count
        whole = _most(R) * g.D + min(_most(weight) * z.D, _norm(by_z)) + _norm(turn)
        fibres = None
        if self.last:
            part = torch.minimum(weight[..., 0] * z.f, torch.linalg.vector_norm(by_z, dim=-1))
            fibres = R[..., 0] * g.f + part + torch.linalg.vector_norm(turn, dim=-1)
        entries = R * self.project(g.d, top) + by_z + turn
        return Change(reach + self.local, entries, whole, fibres)


def _safe(x: Tensor, factor: Tensor | float) -> Tensor:
    """A product in which zero times infinity is zero."""
    return (x * factor).nan_to_num(nan=0.0, posinf=math.inf)


RULES: dict[str, Callable[..., Rule]] = {
    "softmax": Softmax,
    "logsumexp": LogSumExp,
    "softmax_back": SoftmaxBack,
    "normalize": Normalize,
    "rstd": Rstd,
    "normalize_back": NormalizeBack,
}


def rule_of(node: Any, inputs: Sequence[Point], producers: Sequence[Any]) -> Rule:
    """The rule of a fused primitive at its centre.

    Raises:
        NotImplementedError: if there is none.
    """
    if node.primitive.name not in RULES:
        raise NotImplementedError(f"no rule for '{node.primitive.name}'")
    return RULES[node.primitive.name](node, inputs, producers)
