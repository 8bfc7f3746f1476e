"""Formulas of operations that are made of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.graph.structure import Graph, Node, Ref, Role
from surefoot.operations.common import aligned, normalized_dim, unless_along
from surefoot.operations.record import Expansion, declare, expansion
from surefoot.operations.sparsity import every_entry
from surefoot.operations.written_out import Formula, traced, written_out

_LONGEST = 4096  # factors of a product that is written out
_MOST_ROWS = 256  # between which distances are written out
_HIGHEST = 64  # degree of a polynomial that is written out


def _is_number(graph: Graph, argument: Any) -> bool:
    """Whether an argument is one fixed number: then the operation is a scalar function of the other."""
    if not isinstance(argument, Ref):
        return True
    return graph.roles[argument.name] == Role.CONSTANT and graph.numel(argument.name) == 1


def _two_tensors(graph: Graph, node: Node) -> bool:
    return not any(_is_number(graph, node.arguments[key]) for key in ("self", "other"))


def _limited_by_tensors(graph: Graph, node: Node) -> bool:
    return not all(_is_number(graph, node.arguments.get(key)) for key in ("min", "max"))


def _stacked(self: Tensor, other: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(self, other))


written_out("aten.maximum", "aten.fmax", when=_two_tensors)(lambda self, other: _stacked(self, other).amax(0))
written_out("aten.minimum", "aten.fmin", when=_two_tensors)(lambda self, other: _stacked(self, other).amin(0))
written_out("aten.max", when=lambda graph, node: "other" in node.arguments)(
    lambda self, other: torch.maximum(self, other)
)
written_out("aten.min", when=lambda graph, node: "other" in node.arguments)(
    lambda self, other: torch.minimum(self, other)
)


@written_out("aten.clamp", "aten.clamp_min", "aten.clamp_max", when=_limited_by_tensors)
def _limited(self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Limits that are tensors; numbers are a scalar function."""
    above = self if min is None else torch.maximum(self, min) if isinstance(min, Tensor) else self.clamp(min)
    return above if max is None else torch.minimum(above, max) if isinstance(max, Tensor) else above.clamp(max=max)


@written_out("aten.masked_fill", when=lambda graph, node: _varies(graph, node.arguments["value"]))
def _filled(self: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value, self)


def _varies(graph: Graph, argument: Any) -> bool:
    """Whether it is computed from parameters. Then it is finite: what is not is refused."""
    return isinstance(argument, Ref) and Role.PARAMETERS in graph.roles[argument.name]


def _is_finite(graph: Graph, node: Node) -> bool:
    return _varies(graph, node.arguments["self"])


@written_out("aten.isnan", "aten.isinf", when=_is_finite)
def _never(self: Tensor) -> Tensor:
    return torch.zeros_like(self, dtype=torch.bool)


@written_out("aten.nansum", when=_is_finite)
def _sum(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return self.sum(list(range(self.dim())) if dim is None else dim, keepdim)


@written_out("aten.nanmean", when=_is_finite)
def _mean(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return self.mean(list(range(self.dim())) if dim is None else dim, keepdim)


written_out("aten.nanmedian", when=_is_finite)(lambda self, **options: torch.median(self, **options))
written_out("aten.nan_to_num", when=_is_finite)(lambda self, **_: self)


@written_out("aten.aminmax")
def _both_ends(self: Tensor, dim: int | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = list(range(self.dim())) if dim is None else [dim]
    return self.amin(dims, keepdim), self.amax(dims, keepdim)


def _with_mean(statistic: Formula) -> Formula:
    def both(self: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        correction, unbiased = options.get("correction"), options.get("unbiased")
        count = float(correction) if correction is not None else float(unbiased if unbiased is not None else 1)
        dims = list(range(self.dim())) if dim in (None, []) else dim
        return statistic(self, dims, keepdim=keepdim, correction=count), self.mean(dims, keepdim)

    return both


@written_out("aten.prod")
def _product(self: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Halves are multiplied until one entry is left."""
    x, place = (self.reshape(-1), 0) if dim is None else (self, normalized_dim(dim, self.dim()))
    if not 1 <= x.shape[place] <= _LONGEST:
        return NotImplemented
    while x.shape[place] > 1:
        half = x.shape[place] // 2
        rest = [x.narrow(place, 2 * half, 1)] if x.shape[place] % 2 else []
        x = torch.cat([x.narrow(place, 0, half) * x.narrow(place, half, half), *rest], place)
    return x.reshape(()) if dim is None else x if keepdim else x.squeeze(place)


@written_out("aten.cumprod")
def _products(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Products of the last 1, 2, 4, … entries, of which each doubles the one before."""
    place, done = normalized_dim(dim, self.dim()), 1
    if self.dim() == 0 or not 1 <= self.shape[place] <= _LONGEST:
        return NotImplemented
    x, size = self, self.shape[place]
    while done < size:
        longer = x.narrow(place, done, size - done) * x.narrow(place, 0, size - done)
        x, done = torch.cat([x.narrow(place, 0, done), longer], place), 2 * done
    return x


@written_out("aten.logcumsumexp")
def _logs_of_sums(self: Tensor, dim: int) -> Tensor:
    if self.dim() == 0 or not 1 <= self.shape[dim] <= 256:
        return NotImplemented
    parts = [torch.logsumexp(self.narrow(dim, 0, k + 1), dim, True) for k in range(self.shape[dim])]
    return torch.cat(parts, dim)


@expansion("aten.pow", "aten.square", "aten.mul")
def _squared_norm(graph: Graph, node: Node) -> Expansion | None:
    """The square of a length is a sum of squares, without the kink of the length at zero."""
    a = node.arguments
    length = graph.by_name.get(getattr(a["self"], "name", ""))
    if length is None or length.op != "aten.linalg_vector_norm" or length.arguments["ord"] != 2:
        return None
    squared = a["self"] == a["other"] if "other" in a else a.get("exponent", 2) == 2
    whole = replace(node, target=length.target, args=length.args, kwargs=length.kwargs)
    return traced(graph, whole, _sum_of_squares) if squared else None


def _sum_of_squares(self: Tensor, ord: float, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    return self.square().sum(list(range(self.dim())) if dim is None else dim, keepdim)


@written_out("aten.linalg_vector_norm", when=lambda graph, node: node.arguments["ord"] != 2)
def _other_norm(self: Tensor, ord: float, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    """Sums of absolute values, the largest, the smallest, sums of powers; the Euclidean norm has a record."""
    dims, sizes = list(range(self.dim())) if dim is None else dim, self.abs()
    if math.isinf(ord):
        return sizes.amax(dims, keepdim) if ord > 0 else sizes.amin(dims, keepdim)
    if ord <= 1:
        return sizes.sum(dims, keepdim) if ord == 1 else NotImplemented
    return sizes.pow(ord).sum(dims, keepdim).pow(1 / ord)


@written_out("aten._pdist_forward")
def _distances(self: Tensor, p: float = 2) -> Tensor:
    """From each row to all that follow."""
    if not 2 <= len(self) <= _MOST_ROWS:
        return NotImplemented
    pairs = [self[k] - self[k + 1 :] for k in range(len(self) - 1)]
    return torch.linalg.vector_norm(torch.cat(pairs), p, -1)


@written_out("aten.linalg_cross", "aten.cross")
def _cross(self: Tensor, other: Tensor, dim: int | None = -1) -> Tensor:
    if dim is None:
        return NotImplemented
    turned = [(x.roll(-1, dim), x.roll(1, dim)) for x in torch.broadcast_tensors(self, other)]
    return turned[0][0] * turned[1][1] - turned[0][1] * turned[1][0]


def _determinant(self: Tensor) -> Tensor:
    """Small ones, by minors of the first row; the logarithm of a determinant has a record."""
    size = self.shape[-1]
    if not 1 <= size <= 4:
        return NotImplemented
    if size == 1:
        return self[..., 0, 0]
    rows = self[..., 1:, :]
    minors = [_determinant(torch.cat([rows[..., :k], rows[..., k + 1 :]], -1)) for k in range(size)]
    terms = [self[..., 0, k] * minor for k, minor in enumerate(minors)]
    return torch.stack(terms[::2]).sum(0) - torch.stack(terms[1::2]).sum(0)


@written_out("aten.pow", when=lambda graph, node: _two_powers(graph, node))
def _power(self: Tensor, exponent: Tensor) -> Tensor:
    """Exponents that vary, of what is positive; a number in either place makes it a scalar function."""
    return torch.exp(exponent * torch.log(self))


def _two_powers(graph: Graph, node: Node) -> bool:
    return not any(_is_number(graph, node.arguments[key]) for key in ("self", "exponent"))


@written_out("aten.cosine_similarity")
def _cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The inner product of two directions; a vector of length one spread along the dimension has no bounds."""
    rank = max(x1.dim(), x2.dim())
    letters, back = "abcdefghijklmnopqrstuvwxyz"[:rank], normalized_dim(dim, rank) - rank
    if x1.dim() < -back or x2.dim() < -back or x1.shape[back] != x2.shape[back]:
        return NotImplemented
    terms = ",".join(letters[rank - x.dim() :] for x in (x1, x2))
    units = [x / torch.linalg.vector_norm(x, 2, back, True).clamp_min(eps) for x in (x1, x2)]
    return torch.einsum(f"{terms}->{letters.replace(letters[back], '')}", *units)


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    widths = [block.shape[1] for block in blocks]
    before = [sum(widths[:k]) for k in range(len(blocks))]
    rows = [
        functional.pad(x, (left, sum(widths) - left - x.shape[1])) for x, left in zip(blocks, before, strict=True)
    ]
    return torch.cat(rows)


def _orthogonal(first: Callable[[Tensor], Tensor], following: Callable[..., Tensor]) -> Formula:
    """The n-th of a family of polynomials, for a fixed n: the second of them, and each from the two before."""

    def formula(x: Any, n: Any) -> Tensor:
        if isinstance(n, Tensor) or not isinstance(x, Tensor) or not 0 <= n <= _HIGHEST or n != int(n):
            return NotImplemented
        before, last = torch.ones_like(x), first(x)
        for k in range(1, int(n)):
            before, last = last, following(k, x, last, before)
        return last if n else before

    return formula


_FORMULAS: dict[str, Formula] = {
    "addcmul": lambda self, tensor1, tensor2, value=1: self + _times(value, tensor1 * tensor2),
    "addcdiv": lambda self, tensor1, tensor2, value=1: self + _times(value, tensor1 / tensor2),
    "addmv": lambda self, mat, vec, beta=1, alpha=1: torch.addmm(
        self.unsqueeze(-1), mat, vec.unsqueeze(-1), beta=beta, alpha=alpha
    ).squeeze(-1),
    "baddbmm": lambda self, batch1, batch2, beta=1, alpha=1: (
        _times(beta, self) + _times(alpha, torch.bmm(batch1, batch2))
    ),
    "addbmm": lambda self, batch1, batch2, beta=1, alpha=1: (
        _times(beta, self) + _times(alpha, torch.bmm(batch1, batch2).sum(0))
    ),
    "addr": lambda self, vec1, vec2, beta=1, alpha=1: beta * self + alpha * (vec1.unsqueeze(-1) * vec2),
    "lerp": lambda self, end, weight: (
        self + weight * (end - self) if isinstance(weight, Tensor) else (1 - weight) * self + weight * end
    ),
    "glu": lambda self, dim=-1: (
        self.narrow(dim, 0, self.shape[dim] // 2)
        * torch.sigmoid(self.narrow(dim, self.shape[dim] // 2, self.shape[dim] // 2))
    ),
    "logaddexp": lambda self, other: torch.logsumexp(_stacked(self, other), 0),
    "logaddexp2": lambda self, other: torch.log2(torch.exp2(self) + torch.exp2(other)),
    "hypot": lambda self, other: torch.linalg.vector_norm(_stacked(self, other), dim=0),
    # half the angle is that to the point (|z| + x, y), which stays away from zero unless z is on the cut
    "atan2": lambda self, other: 2 * torch.atan(self / (torch.hypot(self, other) + other)),
    "xlogy": lambda self, other: self * (torch.log(other) if isinstance(other, Tensor) else math.log(other)),
    "cdist": lambda x1, x2, p=2, **_: torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1),
    "dist": lambda self, other, p=2: torch.linalg.vector_norm(self - other, p),
    "norm": lambda self, p=2, dim=None, keepdim=False, **_: torch.linalg.vector_norm(
        self, 2 if p is None else p, dim or None, keepdim
    ),
    "det": _determinant,
    "linalg_det": lambda A: _determinant(A),
    "linalg_slogdet": lambda A: (torch.sign(torch.linalg.det(A)), torch.logdet(A @ A.mT) / 2),
    "var_mean": _with_mean(torch.var),
    "std_mean": _with_mean(torch.std),
    "trace": lambda self: self.diagonal().sum(),
    "take": lambda self, index: self.reshape(-1)[index],
    "ldexp": lambda self, other: self * torch.pow(2.0, other),
    "special_xlog1py": lambda self, other: (
        self * (torch.log1p(other) if isinstance(other, Tensor) else math.log1p(other))
    ),
    "block_diag": lambda tensors: _block_diagonal([torch.atleast_2d(x) for x in tensors]),
    "special_chebyshev_polynomial_t": _orthogonal(lambda x: x, lambda k, x, p, q: 2 * x * p - q),
    "special_chebyshev_polynomial_u": _orthogonal(lambda x: 2 * x, lambda k, x, p, q: 2 * x * p - q),
    "special_hermite_polynomial_h": _orthogonal(lambda x: 2 * x, lambda k, x, p, q: 2 * x * p - 2 * k * q),
    "special_hermite_polynomial_he": _orthogonal(lambda x: x, lambda k, x, p, q: x * p - k * q),
    "special_legendre_polynomial_p": _orthogonal(
        lambda x: x, lambda k, x, p, q: (2 * k + 1) / (k + 1) * x * p - k / (k + 1) * q
    ),
    "special_laguerre_polynomial_l": _orthogonal(
        lambda x: 1 - x, lambda k, x, p, q: ((2 * k + 1) - x) * p / (k + 1) - k / (k + 1) * q
    ),
}
_FORMULAS |= {"_cdist_forward": _FORMULAS["cdist"], "slogdet": lambda self: torch.linalg.slogdet(self)}
for _name, _formula in _FORMULAS.items():
    written_out(f"aten.{_name}")(_formula)


def _times(value: float, x: Tensor) -> Tensor:
    return x if value == 1 else value * x


declare("aten.addcmul", "aten.addcdiv", "aten.lerp", "aten.logaddexp", "aten.maximum", "aten.minimum", "aten.fmax",
        "aten.fmin", "aten.hypot", "aten.atan2", "aten.xlogy", rows=aligned)  # fmt: skip
declare("aten.prod", "aten.cumprod", "aten.logcumsumexp", rows=unless_along())
declare("aten.glu", rows=unless_along(), cost=lambda use: every_entry(2 * use.numel))
