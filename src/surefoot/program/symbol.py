"""Arithmetic on nodes, as on tensors: operands are broadcast, numbers and fixed tensors become constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.program.builder import Builder
from surefoot.program.scalars import Scalar

Operand = "Symbol | Tensor | float"


class Symbol:
    """A tensor of a program under construction.

    >>> builder = Builder()
    >>> x = Symbol(builder, builder.input("x", (2, 3)))
    >>> y = (2 * x + 1).scalar("tanh").sum([0])
    >>> y.shape, builder.finish([y.index]).results({"x": torch.zeros(2, 3)})[0]
    (torch.Size([3]), tensor([1.5232, 1.5232, 1.5232]))
    """

    __array_ufunc__ = None
    __slots__ = ("builder", "index")

    def __init__(self, builder: Builder, index: int) -> None:
        self.builder, self.index = builder, index

    @property
    def shape(self) -> torch.Size:
        return self.builder.shape(self.index)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def emit(self, name: str, *others: Symbol | int, **options: Any) -> Symbol:
        """A primitive of this tensor and others."""
        indices = [k.index if isinstance(k, Symbol) else k for k in (self, *others)]
        return Symbol(self.builder, self.builder.emit(name, *indices, **options))

    def lift(self, other: Any) -> Symbol:
        """Another operand as a symbol: a fixed tensor or a number is a constant."""
        if isinstance(other, Symbol):
            return other
        if not isinstance(other, Tensor):
            return Symbol(self.builder, self.builder.constant(float(other)))
        return Symbol(self.builder, self.builder.constant(other if other.is_floating_point() else other.double()))

    def index_of(self, index: Tensor) -> int:
        """The constant of an index tensor."""
        return self.builder.constant(index.to(torch.int64))

    @property
    def is_constant(self) -> bool:
        return self.index in self.builder.constants

    @property
    def origin(self) -> tuple[str, dict[str, Any], list[Symbol]]:
        """The primitive that computes it, its options and its inputs."""
        node = self.builder.nodes[self.index]
        return node.primitive.name, node.options, [Symbol(self.builder, k) for k in node.inputs]

    # Layout.

    def reshape(self, shape: Sequence[int]) -> Symbol:
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.numel() // max(1, -math.prod(sizes))
        return self.emit("reshape", shape=tuple(sizes))

    def expand(self, shape: Sequence[int]) -> Symbol:
        lead = len(shape) - self.dim()
        sizes = tuple(self.shape[k - lead] if size == -1 else size for k, size in enumerate(shape))
        return self.emit("expand", shape=sizes)

    def permute(self, dims: Sequence[int]) -> Symbol:
        return self.emit("permute", dims=tuple(d % self.dim() for d in dims))

    def swapped(self, a: int, b: int) -> Symbol:
        """Two dimensions exchanged."""
        dims = list(range(self.dim()))
        dims[a], dims[b] = dims[b], dims[a]
        return self.permute(dims)

    def part(self, dim: int, start: int, stop: int, step: int = 1) -> Symbol:
        """A slice along a dimension, within its bounds."""
        return self.emit("slice", dim=dim, start=start, stop=stop, step=step)

    def gather(self, index: Tensor) -> Symbol:
        """The entries at these places of the flattened tensor."""
        return self.emit("gather", self.index_of(index))

    # Sums.

    def dims(self, dims: Sequence[int] | int | None) -> tuple[int, ...]:
        """Dimensions counted from 0, in order; None or none for all."""
        if isinstance(dims, int):
            dims = [dims]
        return (
            tuple(sorted(d % max(1, self.dim()) for d in dims))
            if dims and self.dim()
            else tuple(range(self.dim()))
        )

    def sum(self, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Symbol:
        return self.emit("sum", dims=self.dims(dims), keepdim=keepdim)

    def mean(self, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Symbol:
        count = math.prod(self.shape[d] for d in self.dims(dims))
        return self.sum(dims, keepdim).scale(1 / max(1, count))

    # Arithmetic.

    def scale(self, factor: float) -> Symbol:
        return self.emit("scale", factor=float(factor))

    def together(self, other: Any) -> tuple[Symbol, Symbol]:
        """Both operands in their common shape."""
        second = self.lift(other)
        shape = torch.broadcast_shapes(self.shape, second.shape)
        return self.expand(shape), second.expand(shape)

    def __add__(self, other: Any) -> Symbol:
        left, right = self.together(other)
        return left.emit("add", right)

    def __mul__(self, other: Any) -> Symbol:
        if not isinstance(other, Symbol | Tensor):
            return self.scale(other)
        second = self.lift(other)
        if self.is_constant and not second.is_constant:
            return second * self
        if not second.is_constant:
            left, right = self.together(second)
            return left.emit("mul", right)
        return self.expand(torch.broadcast_shapes(self.shape, second.shape)).emit("weigh", second)

    def __neg__(self) -> Symbol:
        return self.scale(-1.0)

    def __sub__(self, other: Any) -> Symbol:
        return self + -self.lift(other)

    def __rsub__(self, other: Any) -> Symbol:
        return -self + other

    def __truediv__(self, other: Any) -> Symbol:
        if not isinstance(other, Symbol | Tensor):
            return self.scale(1 / other)
        return self * self.lift(other).scalar("reciprocal")

    __radd__, __rmul__ = __add__, __mul__

    def scalar(self, name: str, *parameters: float, order: int = 0) -> Symbol:
        """A function of each entry, or a derivative of it."""
        return self.emit("scalar", function=Scalar(name, tuple(map(float, parameters)), order))

    def step(self) -> Symbol:
        """1 where it is positive, 0 elsewhere."""
        return self.scalar("relu", order=1)

    def matmul(self, other: Symbol) -> Symbol:
        return self.emit("matmul", other)
