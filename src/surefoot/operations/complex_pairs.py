r"""Complex tensors inside a model as pairs of real numbers, in a last dimension of size 2.

Bounds speak of real numbers, and a complex number is two of them: its absolute value is the length of the pair.
Fourier transforms are products with fixed matrices, of norm :math:`\sqrt n` in both directions before scaling:

.. math:: X_k = \sum_jx_je^{\mp2\pi\mathrm{i}jk/n}, \qquad
    \begin{pmatrix}\Re X\\ \Im X\end{pmatrix} = \begin{pmatrix}C & \pm S\\ \mp S & C\end{pmatrix}
    \begin{pmatrix}\Re x\\ \Im x\end{pmatrix}, \qquad C_{kj} = \cos(2\pi jk/n),\ S_{kj} = \sin(2\pi jk/n)

and a real signal of n numbers is :math:`x_j = \frac1n\sum_{k\le n/2}w_k(\Re X_k\cos(2\pi jk/n) - \Im X_k\sin(2\pi
jk/n))` with :math:`w_k = 1` for k = 0 and k = n/2, and 2 for the others, which stand for a conjugate pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph.nodes import Node, Ref, Spec
from surefoot.graph.structure import Graph
from surefoot.operations.record import Form, record_of
from surefoot.operations.written_out import traced

_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def in_pairs(graph: Graph) -> Graph:
    """The same graph with pairs in place of complex tensors, those among its leaves too."""
    leaves = {name: leaf.spec for name, leaf in graph.leaves.items() if leaf.spec.dtype in _REAL_OF}
    names = {name: f"{name}_pair" for name in leaves}
    nodes = [_split(name, names[name], spec) for name, spec in leaves.items()]
    paired = set(names.values())
    specs: dict[str, Any] = {name: leaf.spec for name, leaf in graph.leaves.items()}
    specs |= {node.name: node.spec for node in nodes}
    for original in graph.nodes:
        node = original.renamed(names)
        is_complex = any(spec.dtype in _REAL_OF for spec in node.specs)
        if not is_complex and not paired.intersection(node.inputs):
            nodes.append(node)
            specs[node.name] = node.spec
            continue
        formula = _formula(node, frozenset(key for key, a in node.arguments.items() if _is_pair(a, paired)))
        found = None if formula is None else traced(_Specs(specs), node, formula)  # type: ignore[arg-type]
        if found is None:
            raise UnsupportedOperation(
                f"'{node.op}' in {describe(node.module)} has no bounds for complex numbers: write it with real "
                "and imaginary parts."
            )
        nodes += found.nodes
        specs |= {part.name: part.spec for part in found.nodes}
        if is_complex:
            paired.add(node.name)
    return replace(graph, nodes=tuple(nodes))


def _split(name: str, pair: str, spec: Spec) -> Node:
    """The pairs of a complex leaf."""
    numbers = Spec((*spec.shape, 2), _REAL_OF[spec.dtype])
    return Node(pair, "aten.view_as_real", torch.ops.aten.view_as_real.default, (Ref(name),), {}, "", numbers)


def _is_pair(argument: Any, paired: set[str]) -> bool:
    parts = argument if isinstance(argument, list | tuple) else (argument,)
    return any(isinstance(part, Ref) and part.name in paired for part in parts)


class _Specs:
    """Shapes and types of the tensors so far."""

    def __init__(self, specs: dict[str, Any]) -> None:
        self.spec, self.by_name = specs.__getitem__, specs


def _formula(node: Node, pairs: frozenset[str]) -> Callable[..., Any] | None:
    """An operation on pairs, by the names of the arguments that are some; ``None`` if it is not covered."""
    name = node.op.removeprefix("aten.")
    known = _FORMULAS.get(name)
    if known is not None:
        return lambda **arguments: known(pairs, **arguments)
    linear = record_of(node).form_of(node) in (Form.LAYOUT, Form.LINEAR)
    if not linear or not pairs or name.startswith("fft_"):
        return None

    def by_parts(**arguments: Any) -> Any:
        """The same on real and on imaginary parts, if all tensors that it moves or adds up are complex."""
        if any(_is_real(value) for key, value in arguments.items() if key not in pairs):
            return NotImplemented
        halves = ({key: a.select(-1, k) if key in pairs else a for key, a in arguments.items()} for k in (0, 1))
        return torch.stack([node.target(**half) for half in halves], -1)

    return by_parts


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _pair(value: Any, is_pair: bool, like: Tensor) -> Tensor:
    """A factor or a summand as pairs: such as it is, a tensor of real numbers, or one number."""
    if is_pair:
        return value
    if isinstance(value, Tensor):
        return torch.stack([value, torch.zeros_like(value)], -1)
    return torch.stack([torch.full_like(like.flatten()[0], part) for part in (value.real, value.imag)])


def _sum(pairs: frozenset[str], self: Any, other: Any, alpha: float = 1, sign: float = 1.0) -> Tensor:
    like = self if "self" in pairs or not isinstance(other, Tensor) else other
    return _pair(self, "self" in pairs, like) + (sign * alpha) * _pair(other, "other" in pairs, like)


def _product(pairs: frozenset[str], self: Any, other: Any) -> Tensor:
    like = self if "self" in pairs or not isinstance(other, Tensor) else other
    for pair, factor, slot in ((self, other, "self"), (other, self, "other")):
        if pairs == {slot} and not isinstance(factor, complex):
            return pair * (factor.unsqueeze(-1) if isinstance(factor, Tensor) else factor)
    (a, b), (c, d) = (
        _pair(value, slot in pairs, like).unbind(-1) for value, slot in ((self, "self"), (other, "other"))
    )
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def _quotient(pairs: frozenset[str], self: Any, other: Any) -> Any:
    """Times the conjugate, over the square of the length."""
    if isinstance(other, complex):
        return _product(pairs, self, 1 / other)
    if "other" not in pairs:
        return self / (other.unsqueeze(-1) if isinstance(other, Tensor) else other)
    return _product(pairs, self, _conjugate(other)) / other.square().sum(-1, keepdim=True)


def _conjugate(pair: Tensor) -> Tensor:
    return torch.stack([pair.select(-1, 0), -pair.select(-1, 1)], -1)


def _matrices(pairs: frozenset[str], **factors: Tensor) -> Tensor:
    """A product of matrices: four of the parts."""
    first, second = (
        value.unbind(-1) if slot in pairs else (value, torch.zeros_like(value)) for slot, value in factors.items()
    )
    (a, b), (c, d) = first, second
    return torch.stack([a @ c - b @ d, a @ d + b @ c], -1)


def _power(pairs: frozenset[str], self: Tensor, exponent: Any) -> Any:
    if not isinstance(exponent, int) or not 1 <= exponent <= 8:
        return NotImplemented
    result = self
    for _ in range(exponent - 1):
        result = _product(frozenset({"self", "other"}), result, self)
    return result


def _exponential(pairs: frozenset[str], self: Tensor) -> Tensor:
    real, angle = self.unbind(-1)
    return torch.exp(real).unsqueeze(-1) * torch.stack([torch.cos(angle), torch.sin(angle)], -1)


def _joined(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tensors next to each other, all of them complex; the last dimension is that of the pairs."""

    def formula(pairs: frozenset[str], tensors: list[Tensor], dim: int = 0) -> Tensor:
        halves = [function([pair.select(-1, k) for pair in tensors], dim) for k in (0, 1)]
        return torch.stack(halves, -1)

    return formula


def _einsum(pairs: frozenset[str], equation: str, tensors: list[Tensor], path: Any = None) -> Any:
    """A sum of products of one or two factors, all of them complex."""
    if len(tensors) > 2:
        return NotImplemented
    if len(tensors) == 1:
        return torch.stack([torch.einsum(equation, part) for part in tensors[0].unbind(-1)], -1)
    (a, b), (c, d) = (pair.unbind(-1) for pair in tensors)
    real = torch.einsum(equation, a, c) - torch.einsum(equation, b, d)
    return torch.stack([real, torch.einsum(equation, a, d) + torch.einsum(equation, b, c)], -1)


def _filled(pairs: frozenset[str], size: list[int], fill_value: complex, dtype: torch.dtype, **_: Any) -> Tensor:
    parts = fill_value.real, fill_value.imag
    return torch.stack([torch.full(size, part, dtype=_REAL_OF[dtype]) for part in parts], -1)


def _cast(pairs: frozenset[str], self: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return self if "self" in pairs else torch.stack([self, torch.zeros_like(self)], -1)


_PI_BEYOND = 1.2246467991473532e-16  # what the double nearest to π leaves of it


def _angles(n: int, m: int, x: Tensor) -> Tensor:
    """Multiples 2πjk/n, reduced to one turn before they are rounded, for n places j and m frequencies k.

    Numbers in a formula count as exact. Those here are whole, or two doubles whose sum is 2π up to 2⁻¹⁰⁵.
    """
    turns = (torch.outer(torch.arange(n, device=x.device), torch.arange(m, device=x.device)) % n).to(x.dtype)
    return turns * (2 * math.pi) / n + turns * (2 * _PI_BEYOND) / n


def _scaled(matrix: Tensor, n: int, norm: str | None, inverse: bool) -> Tensor:
    """A matrix divided by n, by its root, or by nothing."""
    if norm == "ortho":
        return matrix / torch.full((), float(n), dtype=matrix.dtype, device=matrix.device).sqrt()
    return matrix / n if inverse is (norm in (None, "backward")) else matrix


def _along(x: Tensor, dim: int, pair: bool, n: int, m: int, matrix: Tensor, real: bool = False) -> Tensor:
    """The product with a matrix along one dimension, from n numbers or pairs to m."""
    rank = x.dim() - pair
    place = dim % rank
    line = x.movedim(place, -2).flatten(-2) if pair else x.movedim(place, -1)
    result = line @ matrix
    return result.movedim(-1, place) if real else result.unflatten(-1, (m, 2)).movedim(-2, place)


def _sized(x: Tensor, dim: int, pair: bool, n: int | None) -> Tensor:
    """Cut, or padded with zeros, to n numbers."""
    place = dim % (x.dim() - pair)
    if n is None or n == x.shape[place]:
        return x
    if n < x.shape[place]:
        return x.narrow(place, 0, n)
    shape = list(x.shape)
    shape[place] = n - x.shape[place]
    return torch.cat([x, x.new_zeros(shape)], place)


def _transform(
    x: Tensor, pair: bool, n: int | None, dim: int, norm: str | None, inverse: bool, half: bool
) -> Tensor:
    x = _sized(x, dim, pair, n)
    n = x.shape[dim % (x.dim() - pair)]
    m = n // 2 + 1 if half else n
    angles = _angles(n, m, x)
    turn = 1.0 if inverse else -1.0
    c, s = torch.cos(angles), turn * torch.sin(angles)
    matrix = torch.stack([c, s], -1).flatten(-2)  # n × 2m
    if pair:
        matrix = torch.stack([matrix, torch.stack([-s, c], -1).flatten(-2)], 1).flatten(0, 1)  # 2n × 2m
    return _along(x, dim, pair, n, m, _scaled(matrix, n, norm, inverse))


def _real_inverse(x: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
    size = 2 * (x.shape[dim % (x.dim() - 1)] - 1) if n is None else n
    m = size // 2 + 1
    x = _sized(x, dim, True, m)
    angles = _angles(size, m, x)
    twice = torch.full((m,), 2.0, dtype=x.dtype, device=x.device)
    ends = [0, m - 1] if size % 2 == 0 else [0]
    weights = twice - sum((torch.arange(m, device=x.device) == k).to(x.dtype) for k in dict.fromkeys(ends))
    matrix = torch.stack([torch.cos(angles), -torch.sin(angles)], -1) * weights[:, None]  # size × m × 2
    return _along(x, dim, True, m, size, _scaled(matrix.flatten(1).T, size, norm, True), real=True)


def _fourier(inverse: bool, half: bool = False, real: bool = False) -> Callable[..., Tensor]:
    """Along one dimension or several; half of the frequencies are left out, or taken as those of real numbers,
    along the last.
    """

    def formula(
        pairs: frozenset[str], self: Tensor, dim: Any = None, norm: Any = None, n: Any = None, s: Any = None
    ) -> Tensor:
        x, pair = self, "self" in pairs
        rank = x.dim() - pair
        dims = list(range(rank)) if dim is None else [d % rank for d in ([dim] if isinstance(dim, int) else dim)]
        sizes = [n] * len(dims) if s is None else list(s)
        last = len(dims) - 1
        for k in range(last + 1) if real else reversed(range(last + 1)):
            if real and k == last:
                return _real_inverse(x, sizes[k], dims[k], norm)
            x, pair = _transform(x, pair, sizes[k], dims[k], norm, inverse, half and k == last), True
        return x

    return formula


_FORMULAS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("fft_fft", "fft_fft2", "fft_fftn"), _fourier(False)),
    **dict.fromkeys(("fft_ifft", "fft_ifft2", "fft_ifftn"), _fourier(True)),
    **dict.fromkeys(("fft_rfft", "fft_rfft2", "fft_rfftn"), _fourier(False, half=True)),
    **dict.fromkeys(("fft_irfft", "fft_irfft2", "fft_irfftn"), _fourier(True, real=True)),
    "view_as_real": lambda pairs, self: self, "view_as_complex": lambda pairs, self: self,
    "real": lambda pairs, self: self.select(-1, 0) if "self" in pairs else self,
    "imag": lambda pairs, self: self.select(-1, 1),
    "complex": lambda pairs, real, imag: torch.stack(torch.broadcast_tensors(real, imag), -1),
    "polar": lambda pairs, abs, angle: torch.stack([abs * torch.cos(angle), abs * torch.sin(angle)], -1),
    "abs": lambda pairs, self: torch.linalg.vector_norm(self, dim=-1),
    "angle": lambda pairs, self: torch.atan2(self.select(-1, 1), self.select(-1, 0)),
    **dict.fromkeys(("conj", "_conj", "_conj_physical"), lambda pairs, self: _conjugate(self)),
    "resolve_conj": lambda pairs, self: self, "add": _sum, "mul": _product, "div": _quotient, "pow": _power,
    "full": _filled, "einsum": _einsum, "exp": _exponential,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matrices),
    "square": lambda pairs, self: _power(pairs, self, 2),
    "reciprocal": lambda pairs, self: _quotient(frozenset({"other"}), torch.ones_like(self[..., 0]), self),
    "cat": _joined(torch.cat), "stack": _joined(torch.stack),
    "sub": lambda pairs, **a: _sum(pairs, **a, sign=-1.0), "_to_copy": _cast, "to": _cast,
}  # fmt: skip
