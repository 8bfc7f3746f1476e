r"""The curvature of a loss as a product: :math:`\nabla^2h(\hat y) = RR^\top`.

A loss is a sum over the rows of the outputs, so R has one block :math:`R_i` (outputs × columns) per row i. The
record of a loss gives it by ``factor(outputs, targets, slope, **options)``, with the gradient as samples ×
outputs, in whose precision the result is; ``None`` if it does not apply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 1e4  # entries of w̄: a target of probability 1e-8 among them


@dataclass(frozen=True)
class Factor:
    """R, block by block.

    Attributes:
        blocks: samples × outputs × columns; or one number c, if every block is c times the identity.
        shape: of the outputs.
        slope: a vector w̄ with Rw̄ = ∇h, samples × columns; ``None`` where there is none that is not huge.
    """

    blocks: Tensor | float
    shape: torch.Size
    slope: Tensor | None = None

    @property
    def samples(self) -> int:
        """How many rows the outputs have."""
        return self.shape[0]

    @property
    def outputs(self) -> int:
        """How many numbers a row of the outputs has."""
        return self.shape.numel() // max(self.shape[0], 1)

    @property
    def columns(self) -> int:
        """How many columns a block has: at least the rank of the curvature of one row."""
        return self.blocks.shape[2] if isinstance(self.blocks, Tensor) else self.outputs

    def gathered(self, places: Tensor, shape: torch.Size) -> Factor:
        """The same for outputs of another shape, from the places that the entries of each row have in it.

        A sample of those outputs holds several of these rows, one behind the other, each with its own columns.
        """
        samples, size, each = shape[0], shape.numel() // max(shape[0], 1), self.samples // max(shape[0], 1)
        rows = self.blocks
        assert isinstance(rows, Tensor)
        blocks = rows.new_zeros(samples, size, each, self.columns)
        sample = torch.arange(samples, device=rows.device)[:, None, None]
        row = torch.arange(each, device=rows.device)[None, :, None]
        blocks[sample, places.reshape(samples, each, -1) % size, row] = rows.reshape(
            samples, each, -1, self.columns
        )
        slope = None if self.slope is None else self.slope.reshape(samples, -1)
        return Factor(blocks.flatten(2), shape, slope)

    def forth(self, z: Tensor) -> Tensor:
        """Rz, of the shape of the outputs, for z of samples × columns."""
        if not isinstance(self.blocks, Tensor):
            return (self.blocks * z).reshape(self.shape)
        return torch.bmm(self.blocks, z.unsqueeze(2)).reshape(self.shape)

    def back(self, output: Tensor) -> Tensor:
        """Rᵀ of something of the shape of the outputs: samples × columns."""
        rows = output.reshape(self.samples, self.outputs)
        if not isinstance(self.blocks, Tensor):
            return self.blocks * rows
        return torch.bmm(rows.unsqueeze(1), self.blocks).squeeze(1)

    def slopes(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Column j of every block, of the shape of the outputs, for all j."""
        blocks = self.blocks
        if not isinstance(blocks, Tensor):
            eye = torch.eye(self.outputs, dtype=dtype, device=device) * blocks
            blocks = eye.expand(self.samples, self.outputs, self.outputs)
        return [blocks[:, :, j].to(dtype).reshape(self.shape) for j in range(self.columns)]


def modest(slope: Tensor) -> bool:
    """Whether no entry of w̄ is huge, or NaN, as where a probability is zero."""
    return bool(slope.abs().max() < LARGEST)
