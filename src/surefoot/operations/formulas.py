"""Formulas of operations that are made of others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Role
from surefoot.operations.common import aligned, normalized_dim, unless_along
from surefoot.operations.record import declare
from surefoot.operations.written_out import written_out

_LONGEST = 4096  # factors of a product that is written out


@written_out("aten.addcmul")
def _product_added(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: float = 1) -> Tensor:
    return self + (tensor1 * tensor2 if value == 1 else value * (tensor1 * tensor2))


@written_out("aten.addcdiv")
def _quotient_added(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: float = 1) -> Tensor:
    return self + (tensor1 / tensor2 if value == 1 else value * (tensor1 / tensor2))


@written_out("aten.lerp")
def _between(self: Tensor, end: Tensor, weight: Any) -> Tensor:
    return self + weight * (end - self) if isinstance(weight, Tensor) else (1 - weight) * self + weight * end


@written_out("aten.logaddexp")
def _log_of_two(self: Tensor, other: Tensor) -> Tensor:
    return torch.logsumexp(torch.stack(torch.broadcast_tensors(self, other)), 0)


def _is_number(graph: Graph, argument: Any) -> bool:
    """Whether an argument is one fixed number: then the operation is a scalar function of the other."""
    if not isinstance(argument, Ref):
        return True
    return graph.roles[argument.name] == Role.CONSTANT and graph.numel(argument.name) == 1


def _two_tensors(graph: Graph, node: Node) -> bool:
    return not any(_is_number(graph, node.arguments[key]) for key in ("self", "other"))


def _limited_by_tensors(graph: Graph, node: Node) -> bool:
    return not all(_is_number(graph, node.arguments.get(key)) for key in ("min", "max"))


@written_out("aten.maximum", "aten.fmax", when=_two_tensors)
def _larger(self: Tensor, other: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(self, other)).amax(0)


@written_out("aten.minimum", "aten.fmin", when=_two_tensors)
def _smaller(self: Tensor, other: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(self, other)).amin(0)


@written_out("aten.clamp", "aten.clamp_min", "aten.clamp_max", when=_limited_by_tensors)
def _limited(self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Limits that are tensors; numbers are a scalar function."""
    above = self if min is None else torch.maximum(self, min) if isinstance(min, Tensor) else self.clamp(min)
    return above if max is None else torch.minimum(above, max) if isinstance(max, Tensor) else above.clamp(max=max)


@written_out("aten.aminmax")
def _both_ends(self: Tensor, dim: int | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = list(range(self.dim())) if dim is None else [dim]
    return self.amin(dims, keepdim), self.amax(dims, keepdim)


@written_out("aten.hypot")
def _length_of_two(self: Tensor, other: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch.broadcast_tensors(self, other)), dim=0)


@written_out("aten.atan2")
def _angle(self: Tensor, other: Tensor) -> Tensor:
    """Half the angle is that to the point (|z| + x, y), which stays away from zero unless z is on the cut."""
    return 2 * torch.atan(self / (torch.hypot(self, other) + other))


@written_out("aten.xlogy")
def _times_log(self: Any, other: Any) -> Tensor:
    return self * torch.log(other) if isinstance(other, Tensor) else self * math.log(other)


@written_out("aten.var_mean")
def _variance_and_mean(
    self: Tensor, dim: Any = None, keepdim: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    dims = list(range(self.dim())) if dim in (None, []) else dim
    return torch.var(self, dims, keepdim=keepdim, correction=_correction(options)), self.mean(dims, keepdim)


@written_out("aten.std_mean")
def _deviation_and_mean(self: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    dims = list(range(self.dim())) if dim in (None, []) else dim
    return torch.std(self, dims, keepdim=keepdim, correction=_correction(options)), self.mean(dims, keepdim)


def _correction(options: dict[str, Any]) -> float:
    correction, unbiased = options.get("correction"), options.get("unbiased")
    return float(correction) if correction is not None else float(unbiased if unbiased is not None else 1)


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


@written_out("aten.cdist", "aten._cdist_forward")
def _distances(x1: Tensor, x2: Tensor, p: float = 2, compute_mode: Any = None) -> Tensor:
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


@written_out("aten.norm")
def _norm(self: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(self, 2 if p is None else p, dim if dim else None, keepdim)


@written_out("aten.linalg_vector_norm", when=lambda graph, node: node.arguments["ord"] in (1, math.inf))
def _other_norm(self: Tensor, ord: float, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    """Sums of absolute values and the largest of them; the Euclidean norm has a record."""
    dims = list(range(self.dim())) if dim is None else dim
    return self.abs().sum(dims, keepdim) if ord == 1 else self.abs().amax(dims, keepdim)


@written_out("aten.linalg_cross", "aten.cross")
def _cross(self: Tensor, other: Tensor, dim: int | None = -1) -> Tensor:
    if dim is None:
        return NotImplemented
    turned = [(x.roll(-1, dim), x.roll(1, dim)) for x in torch.broadcast_tensors(self, other)]
    return turned[0][0] * turned[1][1] - turned[0][1] * turned[1][0]


@written_out("aten.trace")
def _trace(self: Tensor) -> Tensor:
    return self.diagonal().sum()


@written_out("aten.addmv")
def _matrix_vector(self: Tensor, mat: Tensor, vec: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addmm(self.unsqueeze(-1), mat, vec.unsqueeze(-1), beta=beta, alpha=alpha).squeeze(-1)


@written_out("aten.addr")
def _outer_added(self: Tensor, vec1: Tensor, vec2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * self + alpha * (vec1.unsqueeze(-1) * vec2)


@written_out("aten.take")
def _taken(self: Tensor, index: Tensor) -> Tensor:
    return self.reshape(-1)[index]


written_out("aten.nan_to_num")(lambda self, **_: self)  # what is enclosed is finite


@written_out("aten.ldexp")
def _scaled_by_power(self: Tensor, other: Tensor) -> Tensor:
    return self * torch.pow(2.0, other)


@written_out("aten.pow", when=lambda graph, node: _two_powers(graph, node))
def _power(self: Tensor, exponent: Tensor) -> Tensor:
    """Exponents that vary, of what is positive; a number in either place makes it a scalar function."""
    return torch.exp(exponent * torch.log(self))


def _two_powers(graph: Graph, node: Node) -> bool:
    return not any(_is_number(graph, node.arguments[key]) for key in ("self", "exponent"))


@written_out("aten.einsum", when=lambda graph, node: len(node.arguments["tensors"]) > 2)
def _contraction(equation: str, tensors: list[Tensor], path: Any = None) -> Tensor:
    """Three tensors and more, two at a time, from the left."""
    if "." in equation:
        return NotImplemented
    left, _, right = equation.replace(" ", "").partition("->")
    first, second, *others = left.split(",")
    if "->" not in equation:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    kept = "".join(dict.fromkeys(c for c in first + second if c in right or any(c in o for o in others)))
    pair = torch.einsum(f"{first},{second}->{kept}", tensors[0], tensors[1])
    return torch.einsum(f"{','.join([kept, *others])}->{right}", pair, *tensors[2:])


declare("aten.addcmul", "aten.addcdiv", "aten.lerp", "aten.logaddexp", "aten.maximum", "aten.minimum", "aten.fmax",
        "aten.fmin", "aten.hypot", "aten.atan2", "aten.xlogy", rows=aligned)  # fmt: skip
declare("aten.prod", "aten.cumprod", "aten.logcumsumexp", rows=unless_along())
