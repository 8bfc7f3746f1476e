"""States and parameters as vectors, and products with block-diagonal matrices."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NEGLIGIBLE = 1e-13  # of the largest eigenvalue, times the size of the matrix


@dataclass(frozen=True)
class Layout:
    """How the real tensors of a dict become one vector, and back.

    Attributes:
        pieces: for each tensor its name and, if the value of that name is a tuple, its place there.
        shapes: their shapes.
        dtypes: their types.
        samples: if more than one, all tensors have that many rows, and the vector has the numbers of one sample
            (row) after those of the other; else the tensors stand one after the other.
    """

    pieces: tuple[tuple[str, int | None], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    samples: int = 1

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def tensors(self, values: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a dict."""
        return [values[name] if k is None else values[name][k] for name, k in self.pieces]

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors as a matrix, samples × numbers of one sample; differentiable."""
        if not tensors:
            return torch.zeros(self.samples, 0)
        rows = [tensor.reshape(self.samples, -1) for tensor in tensors]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def split(self, vector: Tensor) -> list[Tensor]:
        """The tensors of a vector, or of such a matrix; differentiable."""
        if len(self.shapes) == 1:
            return [vector.reshape(self.shapes[0]).to(self.dtypes[0])]
        sizes = [torch.Size(shape).numel() // self.samples for shape in self.shapes]
        parts = vector.reshape(self.samples, -1).split(sizes, dim=1)
        return [part.reshape(s).to(t) for part, s, t in zip(parts, self.shapes, self.dtypes, strict=True)]

    def filled(self, values: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The dict with its real tensors replaced."""
        result = dict(values)
        for (name, k), tensor in zip(self.pieces, tensors, strict=True):
            if k is None:
                result[name] = tensor
            else:
                several = list(result[name])
                several[k] = tensor
                result[name] = type(result[name])(several) if type(result[name]) in (list, tuple) else several
        return result


def layout(values: Mapping[str, Any], names: Sequence[str], samples: int = 1) -> Layout:
    """The layout of the real tensors among some values, by samples if all of them have that many rows."""
    found = [
        (name, k, value)
        for name in names
        for k, value in ([(None, values[name])] if isinstance(values[name], Tensor) else enumerate(values[name]))
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    shapes = tuple(tuple(value.shape) for _, _, value in found)
    by_rows = bool(shapes) and all(shape[:1] == (samples,) for shape in shapes)
    dtypes = tuple(value.dtype for _, _, value in found)
    return Layout(tuple((name, k) for name, k, _ in found), shapes, dtypes, samples if by_rows else 1)


def jacobian(output: Tensor, inputs: Sequence[Tensor], samples: int = 1) -> Tensor:
    """The derivative of a matrix in tensors, sample by sample, in double precision.

    Args:
        output: samples × numbers of one sample; each row depends on the same rows of the inputs only.
        inputs: the tensors, with one row per sample.
        samples: how many rows; one if nothing is known about what depends on what.

    Returns:
        samples × numbers of a sample of the output × numbers of a sample of the inputs.
    """
    columns = output.shape[1]
    widths = [tensor.numel() // samples for tensor in inputs]
    if not inputs or not output.requires_grad or not columns:
        return torch.zeros(samples, columns, sum(widths), dtype=torch.float64, device=output.device)
    units = torch.eye(columns, dtype=output.dtype, device=output.device)
    found = gradients(output, inputs, units[:, None, :].expand(columns, samples, columns))
    parts = [part.reshape(columns, samples, width) for part, width in zip(found, widths, strict=True)]
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return joined.transpose(0, 1).double()


def gradients(output: Tensor, inputs: Sequence[Tensor], slopes: Tensor) -> list[Tensor]:
    """The gradients for many slopes at once, the slopes along the first dimension; zeros where there are none."""
    found: tuple[Tensor | None, ...]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # one slope at a time, as below
            found = torch.autograd.grad(
                output, inputs, slopes, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except RuntimeError:  # an operation that cannot be batched
        each = [torch.autograd.grad(output, inputs, s, retain_graph=True, allow_unused=True) for s in slopes]
        found = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True))
    return [
        tensor.new_zeros(len(slopes), *tensor.shape) if part is None else part.detach()
        for part, tensor in zip(found, inputs, strict=True)
    ]


@dataclass(frozen=True)
class Spectrum:
    """The positive part VΛVᵀ of a symmetric positive semi-definite matrix, round-off left out; V is X ⊗ I.

    Attributes:
        values: the diagonal of Λ.
        vectors: X, with orthonormal columns.
        copies: the size of I.
    """

    values: Tensor
    vectors: Tensor
    copies: int = 1

    def coordinates(self, matrix: Tensor) -> Tensor:
        """VᵀM, for a matrix or a vector."""
        rows, columns = self.vectors.shape
        return (self.vectors.T @ matrix.reshape(rows, -1)).reshape(columns * self.copies, *matrix.shape[1:])

    def combined(self, vector: Tensor) -> Tensor:
        """Vx."""
        return (self.vectors @ vector.reshape(self.vectors.shape[1], -1)).flatten()

    def over(self, divisor: Tensor) -> Spectrum:
        """That of the matrix divided by a positive number."""
        return Spectrum(self.values / divisor, self.vectors, self.copies)


def spectrum(matrix: Tensor, copies: int = 1) -> Spectrum:
    """The positive part of M ⊗ I, with so many copies of M."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > _NEGLIGIBLE * len(values) * values[-1:].clamp(min=0)
    return Spectrum(values[kept].repeat_interleave(copies), vectors[:, kept], copies)


def times(matrix: Tensor, blocks: Tensor) -> Tensor:
    """A matrix times a block-diagonal one, given as blocks × rows × columns."""
    count, rows, columns = blocks.shape
    if count == 1:
        return matrix @ blocks[0]
    split = matrix.reshape(matrix.shape[0], count, rows).transpose(0, 1)
    return (split @ blocks).transpose(0, 1).reshape(matrix.shape[0], count * columns)


def congruence(matrix: Tensor, blocks: Tensor) -> Tensor:
    """BᵀMB for a symmetric M and a block-diagonal B."""
    return times(times(matrix, blocks).T, blocks)


def applied(blocks: Tensor, vector: Tensor) -> Tensor:
    """A block-diagonal matrix times a vector."""
    return (blocks @ vector.reshape(blocks.shape[0], blocks.shape[2], 1)).flatten()


def applied_transposed(blocks: Tensor, vector: Tensor) -> Tensor:
    """The transpose of a block-diagonal matrix times a vector."""
    return applied(blocks.transpose(1, 2), vector)


def block_diagonal(blocks: Tensor) -> Tensor:
    """The matrix with these blocks."""
    count, rows, columns = blocks.shape
    matrix = blocks.new_zeros(count, rows, count, columns)
    matrix.diagonal(dim1=0, dim2=2).copy_(blocks.permute(1, 2, 0))
    return matrix.reshape(count * rows, count * columns)
