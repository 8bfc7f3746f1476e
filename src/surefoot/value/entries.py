r"""How far the tensors of a program may be from exact: errors entry by entry, and errors of rows beside them.
 Let :math:`\hat z` be the tensors as computed and z those where any part :math:`s\delta`, :math:`s\in[0,1]`, of
every local error is made (:mod:`surefoot.value.rounding`). Of each tensor two bounds are carried along:

* :math:`e \ge |z - \hat z|`, entry by entry, since slopes differ from entry to entry (the largest ones of several
  operations in a row multiply to thousands where the product of the slopes is one);
* f, the norms of :math:`z - \hat z` along some dimensions (a row, a head), since entries alone grow with the root
  of the width at every matrix.

With local errors :math:`\delta`:

* linear primitives run on the errors themselves, with absolute factors;
* products: :math:`|ab - \hat a\hat b| \le |\hat a|e_b + e_a(|\hat b| + e_b)`; for matrices :math:`e_{ij} \le
  f^a_i(\|b^j\| + f^{b,j}) + \|a_i\|f^{b,j}` and, of rows, :math:`f_i \le \|b\|_2f^a_i` where b is exact;
* scalar functions: :math:`e\sup|f'|` over :math:`[\hat x - e, \hat x + e]`;
* *soft-max* p: on the way from :math:`\hat x` to x its entries stay below :math:`e^{2\max e}p_i`, and its
  derivative is :math:`\delta \mapsto p(\delta - \langle p, \delta\rangle)`, of norm at most 1/2; the derivative of
  *log-sum-exp* is p;
* *normalisation* :math:`z = c/\rho`, with c centred and :math:`\rho^2 = \mathrm{mean}\,c^2 + \epsilon`: if c moves
  by :math:`\gamma`, then :math:`z' - z = \gamma/\rho' - z(\rho' - \rho)/\rho'` where, as :math:`\rho'^2 - \rho^2 =
  2\rho\,\mathrm{mean}(z\gamma) + \mathrm{mean}\,\gamma^2` and :math:`|\rho' - \rho| \le \rho m` with :math:`m =
  \|\gamma\|r/\sqrt n`, :math:`|\rho' - \rho| \le (2\,\mathrm{mean}|z\gamma| + r\,\mathrm{mean}\,\gamma^2)/(2 -
  m)`. The map has slope at most :math:`r/(1 - m)` in norm;
* their transposes are sums of products of two or three tensors;
* *selections* may choose another entry where two are as near as their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.bounds.scalars import bounds, enclose
from surefoot.errors import UnsupportedOperation
from surefoot.norms.matrix import spectral_norm
from surefoot.program import Node, Program
from surefoot.value.rounding import UNIT, local_error, row_norms, solution_error

Rows = tuple[Tensor, tuple[int, ...]]
"""Norms along dimensions, which stay with size 1."""


class Entries:
    """The errors of one run of a program.

    Args:
        program: the program.
        tensors: its tensors as computed, in double precision, by node.
        needed: the nodes whose errors are asked for, in order.
        given: errors of inputs and of fixed nodes that are not exact.
        staged: the nodes whose sums were taken in stages.
        spectral: a bound of the norm of an exact matrix, by node.
    """

    def __init__(
        self, program: Program, tensors: Callable[[int], Tensor], needed: Iterable[int],
        given: Mapping[int, Tensor], staged: Container[int], spectral: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        self.t, self.nodes, self.staged = tensors, program.nodes, staged
        self.spectral = spectral or (lambda k: spectral_norm(tensors(k)))
        self.error: dict[int, Tensor] = dict(given)
        self.rows: dict[int, Rows] = {}
        self.local: dict[int, Tensor] = {}
        self._slope: Tensor | None = None
        for k in needed:
            node = self.nodes[k]
            if k not in given and node.inputs:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        """The error of a node: what its inputs make of theirs, and its own."""
        moved = [k in self.error for k in node.inputs]
        local = local_error(node, self.t, UNIT[torch.float64], node.index in self.staged)
        passed = self._passed(node) if any(moved) else None
        if local is not None:
            self.local[node.index] = local
        if passed is None and local is None:
            return
        total = passed if local is None else local if passed is None else passed + local
        assert total is not None
        total = total.expand(node.shape)
        self.error[node.index] = total.nan_to_num(math.inf, math.inf, math.inf)
        rows = self._passed_rows(node, local) if any(moved) else None
        if rows is not None and rows[1]:
            f = rows[0].nan_to_num(math.inf, math.inf, math.inf)
            self.rows[node.index] = f, rows[1]
            self.error[node.index] = torch.minimum(self.error[node.index], f)

    # Errors of entries.

    def _zero_or(self, k: int) -> Tensor:
        """The error of a tensor; zeros where it is exact."""
        return self.error[k] if k in self.error else self.t(k).new_zeros(()).double().expand(self.t(k).shape)

    def _reach(self, k: int) -> Tensor:
        """A bound of the absolute values."""
        size = self.t(k).abs()
        return size + self.error[k] if k in self.error else size

    def _passed(self, node: Node) -> Tensor | None:
        """What the errors of the inputs make of the result."""
        name, kind, options, inputs = node.primitive.name, node.primitive.kind, node.options, node.inputs
        run: Callable[..., Tensor] = node.primitive.run
        if kind == "linear":
            if name == "add":
                return sum(self.error[k] for k in inputs if k in self.error)  # type: ignore[return-value]
            if name == "scale":
                return self.error[inputs[0]] * abs(options["factor"])
            if name == "weigh":
                return self._product(node)
            if name == "cat":
                return run([self._zero_or(k) for k in inputs], **options)
            return run([self.error[inputs[0]], *map(self.t, inputs[1:])], **options)
        if kind == "product":
            return self._product(node)
        if kind == "scalar":
            x, e = self.t(inputs[0]), self.error[inputs[0]]
            self._slope = torch.where(e > 0, bounds(options["function"], 1, x - e, x + e), 0.0)
            low, high = enclose(options["function"], 0, x - e, x + e)  # where it jumps, or is bounded
            return torch.where(e > 0, torch.minimum(e * self._slope, high - low), 0.0)
        if kind == "selection":
            return self._selected(node)
        match name:
            case "softmax":
                return self._softmax(node)
            case "logsumexp":
                e, dim = self.error[inputs[0]], options["dim"]
                if len(inputs) > 1:
                    e = e.masked_fill(self.t(inputs[1]) == 0, 0.0)
                return e.amax(dim, keepdim=options["keepdim"])
            case "softmax_back":
                (g, y), (eg, ey) = map(self._reach, inputs), map(self._zero_or, inputs)
                add = lambda x: x.sum(options["dim"], keepdim=True)  # noqa: E731
                return ey * (g + add(g * y)) + y * (eg + add(y * eg + g * ey))
            case "solve":
                a, moved = self.t(inputs[0]), self.error.get(inputs[0])
                residual = self._zero_or(inputs[1])
                if moved is not None:
                    residual = residual + moved @ self.t(node.index).abs()
                return solution_error(a, residual, moved)
            case "normalize" | "rstd":
                return self._normalised(node)
            case "normalize_back":
                g, z, r = map(self._reach, inputs)
                eg, ez, er = map(self._zero_or, inputs)
                mean = lambda x: x.mean(options["dims"], keepdim=True)  # noqa: E731
                rest = mean(z * eg + g * ez)
                return er * (g + mean(g) + z * mean(g * z)) + r * (eg + mean(eg) + ez * mean(g * z) + z * rest)
        raise UnsupportedOperation(f"the error of '{name}' in {node.path or 'the objective'} is not known")

    def _product(self, node: Node) -> Tensor:
        a, b = node.inputs
        if node.primitive.name == "matmul":
            fa, fb = self.norms(a, (-1,)), self.norms(b, (-2,))
            columns = row_norms(self.t(b), -2)
            total = 0.0 if fb is None else row_norms(self.t(a), -1) * fb
            if fa is not None:
                total = total + fa * (columns if fb is None else columns + fb)
            return total  # type: ignore[return-value]
        run: Callable[..., Tensor] = node.primitive.run
        total = 0.0
        if b in self.error:
            total = run([self.t(a).abs(), self.error[b]], **node.options)
        if a in self.error:
            total = total + run([self.error[a], self._reach(b)], **node.options)
        return total  # type: ignore[return-value]

    def _softmax(self, node: Node) -> Tensor:
        e, p, dim = self.error[node.inputs[0]], self.t(node.index).abs(), node.options["dim"]
        e = torch.where(p > 0, e, 0.0)  # entries that are masked, or too small to come back
        top = e.amax(dim, keepdim=True)
        grown = torch.where(top < 10, (2 * top).exp() * (1 + 1e-6), math.inf)
        p = torch.minimum(p * grown, torch.ones_like(p)) + 1e-300
        return torch.minimum(p * (e + (p * e).sum(dim, keepdim=True)), torch.ones_like(p))

    def _normalised(self, node: Node) -> Tensor:
        a, e, dims = self.t(node.inputs[0]), self.error[node.inputs[0]], node.options["dims"]
        mean = lambda x: x.mean(dims, keepdim=True)  # noqa: E731
        centred = a - mean(a)
        r = (mean(centred.square()) + node.options["eps"]).rsqrt() * (1 + 1e-6)
        z, moved = centred.abs() * r, e + mean(e)
        shift = mean(moved.square()).sqrt() * r
        known = torch.where(shift < 0.5, 1 / (1 - shift), math.inf) * (1 + 1e-6)
        change = (2 * mean(z * moved) + r * mean(moved.square())) / (2 - shift.clamp(max=0.5))
        return (r * r * change if node.primitive.name == "rstd" else r * (moved + z * change)) * known

    def _selected(self, node: Node) -> Tensor:
        name, options, inputs = node.primitive.name, node.options, node.inputs
        if name == "amax":
            return self.error[inputs[0]].amax(list(options["dims"]), keepdim=options["keepdim"])
        if name == "maximum":
            return torch.maximum(*map(self._zero_or, inputs))
        if name == "sort":
            return self.error[inputs[0]].amax(options["dim"], keepdim=True).expand(node.shape)
        g, by = inputs
        e, run = self._zero_or(g), node.primitive.run
        same: Tensor = run([e, self.t(by)], **options)
        if by not in self.error:
            return same
        if name in ("select_like", "pick_like"):
            dims = list(options["dims"])
            high, low = self.t(by) + self.error[by], self.t(by) - self.error[by]
            chosen = high >= low.amax(dims, keepdim=True)
            open_ = chosen.sum(dims, keepdim=True) > 1
            reach = self._reach(g)
            if name == "select_like":
                return torch.where(open_ & chosen, reach, same)
            return torch.where(open_, 2 * torch.where(chosen, reach, 0.0).amax(dims, keepdim=True), same)
        dim = options["dim"]
        gap = self.t(by).sort(dim).values.diff(dim=dim).amin(dim, keepdim=True)
        safe = gap > 2 * self.error[by].amax(dim, keepdim=True)
        return torch.where(safe, same, 2 * self._reach(g).amax(dim, keepdim=True))

    # Errors of rows.

    def norms(self, k: int, dims: Sequence[int]) -> Tensor | None:
        """Norms of the error of a tensor along dimensions; None where it is exact."""
        if k not in self.error:
            return None
        e = self.error[k]
        dims = tuple(sorted(d % e.dim() for d in dims))
        norms = row_norms(e, dims)
        if k in self.rows:
            f, along = self.rows[k]
            if set(along) >= set(dims):  # of a part of the entries: at most that of all
                norms = torch.minimum(norms, f.expand([1 if d in dims else n for d, n in enumerate(e.shape)]))
            elif set(along) <= set(dims):
                norms = torch.minimum(norms, row_norms(f, dims))
        return norms

    def _passed_rows(self, node: Node, local: Tensor | None) -> Rows | None:
        """Norms of the error along rows, where they follow from those of the inputs."""
        name, options, inputs = node.primitive.name, node.options, node.inputs
        first, last = inputs[0], len(node.shape) - 1
        if last < 0:
            return None
        if name == "matmul":
            return self._matrix_rows(node, local)
        known = self.rows.get(first)
        if name in ("softmax", "softmax_back", "normalize", "normalize_back"):
            dims = (options["dim"],) if "dim" in options else tuple(options["dims"])
            return self._fused_rows(node, dims, local)
        if name == "add":
            parts = [k for k in inputs if k in self.error]
            known = next((self.rows[k] for k in parts if k in self.rows), None)
            if known is None:
                return None
            total = sum(self.norms(k, known[1]) for k in parts)  # type: ignore[misc]
            return self._with_local(total, known[1], local, node)
        if name == "mul":
            return self._scaled_rows(node, local)
        if known is None:
            return None
        f, dims = known
        shape = self.t(first).shape
        match name:
            case "scale":
                return self._with_local(f * abs(options["factor"]), dims, local, node)
            case "weigh":
                w = self.t(inputs[1]).abs().expand(node.shape)
                return self._with_local(f * w.amax(dims, keepdim=True), dims, local, node)
            case "scalar":
                assert self._slope is not None
                return self._with_local(f * self._slope.amax(dims, keepdim=True), dims, local, node)
            case "flip":
                return f.flip(options["dims"]), dims
            case "permute":
                order = options["dims"]
                return f.permute(order), tuple(sorted(order.index(d) for d in dims))
            case "expand" if len(shape) == len(node.shape) and all(shape[d] == node.shape[d] for d in dims):
                return f.expand([1 if d in dims else n for d, n in enumerate(node.shape)]), dims
            case "slice" if options["dim"] in dims:
                return f, dims
            case "reshape":
                return self._reshaped_rows(first, f, dims, node.shape)
        return None

    def _with_local(self, f: Any, dims: tuple[int, ...], local: Tensor | None, node: Node) -> Rows:
        return (f if local is None else f + row_norms(local.expand(node.shape), dims)), dims

    def _matrix_rows(self, node: Node, local: Tensor | None) -> Rows:
        a, b = node.inputs
        last = (len(node.shape) - 1,)
        fa, fb = self.norms(a, (-1,)), self.norms(b, (-1,))
        total: Any = 0.0
        if fa is not None:
            y = self.t(b)
            if b not in self.error and y.dim() == 2:
                gain: Any = self.spectral(b)
            else:
                gain = row_norms(y, (-2, -1)) + (0.0 if fb is None else row_norms(fb, (-2, -1)))
            total = fa * gain
        if fb is not None:
            total = total + self.t(a).abs() @ fb
        return self._with_local(total, last, local, node)

    def _scaled_rows(self, node: Node, local: Tensor | None) -> Rows | None:
        """Of a product of entries: the rows of one factor times the largest entries of the other."""
        known = next((self.rows[k] for k in node.inputs if k in self.rows), None)
        if known is None:
            return None
        dims, total = known[1], torch.zeros(())
        (a, b) = node.inputs
        fa, fb = self.norms(a, dims), self.norms(b, dims)
        if fb is not None:
            total = fb * self.t(a).abs().amax(dims, keepdim=True)
        if fa is not None:
            total = total + fa * self._reach(b).amax(dims, keepdim=True)
        return self._with_local(total, dims, local, node)

    def _fused_rows(self, node: Node, dims: tuple[int, ...], local: Tensor | None) -> Rows | None:
        """By the norms of the derivatives of soft-max and normalisation, which are symmetric."""
        name, inputs = node.primitive.name, node.inputs
        f = self.norms(inputs[0], dims)
        if name == "softmax":
            return None if f is None else self._with_local(0.5 * f, dims, local, node)
        if name == "normalize":
            assert f is not None
            a = self.t(inputs[0])
            count = math.prod(a.shape[d] for d in dims)
            r = (a.var(dims, correction=0, keepdim=True) + node.options["eps"]).rsqrt() * (1 + 1e-6)
            shift = f * r / math.sqrt(count)
            gain = torch.where(shift < 0.5, r / (1 - shift), math.inf)
            return self._with_local(f * gain, dims, local, node)
        g = self._reach(inputs[0])
        n = math.prod(node.shape[d] for d in dims)
        total: Any = 0.0
        size = row_norms(g, dims)
        if name == "softmax_back":
            if f is not None:
                total = (0.5 + 1e-6) * f
            fy = self.norms(inputs[1], dims)
            if fy is not None:  # Δy(g − ⟨g, y⟩) − y⟨g, Δy⟩, where |y| ≤ 1 and the sum of y is 1
                total = total + fy * (2 * g.amax(dims, keepdim=True) + size)
            return self._with_local(total, dims, local, node)
        r = self._reach(inputs[2])
        z = row_norms(self._reach(inputs[1]), dims)
        if f is not None:  # I − 11ᵀ/n − zzᵀ/n has norm 1 where |z|² ≤ n
            total = r * f * torch.maximum(torch.ones_like(z), z.square() / n - 1) * (1 + 1e-6)
        fz = self.norms(inputs[1], dims)
        if fz is not None:
            total = total + r * fz * size * z * (2 / n)
        if inputs[2] in self.error:
            total = total + self.error[inputs[2]] * size * (1 + z.square() / n)
        return self._with_local(total, dims, local, node)

    def _reshaped_rows(self, k: int, f: Tensor, dims: tuple[int, ...], shape: Sequence[int]) -> Rows | None:
        """Rows where the last dimensions are joined or split: the same rows, several in one, or a part of one."""
        old = self.t(k).shape
        if dims != tuple(range(len(old) - len(dims), len(old))):
            return None
        count = math.prod(old[d] for d in dims)
        size, j = 1, 0
        while j < len(shape) and size < count:
            j += 1
            size *= shape[-j]
        last = tuple(range(len(shape) - j, len(shape)))
        lead = list(shape[: len(shape) - j])
        if j and size == count:
            return f.reshape(lead + [1] * j), last
        if j == 1 and size % count == 0:
            whole = row_norms(f.reshape([*shape[:-1], size // count]), -1)
            return whole, last
        return None
