r"""The curvature of a loss as a product: :math:`\nabla^2h(\hat y) = RR^\top`.

A loss is a sum over the rows of the outputs, so R has one block :math:`R_i` (outputs × columns) per row i. The
record of a loss gives it by ``factor(outputs, targets, slope, **options)`` in the precision of the outputs, with
the gradient as samples × outputs, or ``None`` where w̄ is not asked for; ``None`` if it does not apply.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST = 1e4  # entries of w̄: a target of probability 1e-8 among them


@dataclass(frozen=True)
class Factor:
    r"""R, block by block: :math:`R_i = \mathrm{diag}(c_i)B_i`.

    :math:`B_i` is the identity; or :math:`\mathrm{diag}(s)` times all but the first column of the reflection
    :math:`I - uu^\top/u_1`, :math:`u = s + e_1` with :math:`\|s\| = 1`, which is applied and never formed; or a
    matrix.
    """

    scale: Tensor | float  # c, samples × outputs; or one number for each sample or for all of them
    shape: torch.Size  # of the outputs
    # a vector w̄ with Rw̄ = ∇h, samples × columns; ``None`` where there is none that is not huge
    slope: Tensor | None = None
    unit: Tensor | None = None  # s, samples × outputs, where B is of the second kind
    blocks: Tensor | None = None  # B, samples × outputs × columns, where it is of the third

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
        return self.outputs - (self.unit is not None) if self.blocks is None else self.blocks.shape[2]

    def gathered(self, places: Tensor, shape: torch.Size) -> Factor:
        """The same for outputs of another shape, from the places that the entries of each row have in it.

        A sample of those outputs holds several of these rows, one behind the other, each with its own columns.
        """
        slope = None if self.slope is None else self.slope.reshape(shape[0], -1)
        return _Gathered(self.scale, shape, slope, self.unit, self.blocks, rows=self, places=places.flatten())

    def forth(self, z: Tensor) -> Tensor:
        """Rz, of the shape of the outputs, for z of samples × columns."""
        if self.blocks is not None:
            z = torch.bmm(self.blocks, z.unsqueeze(2)).squeeze(2)
        elif self.unit is not None:
            s = self.unit
            along = (s[:, 1:] * z).sum(dim=1, keepdim=True)  # ⟨u, (0, z)⟩, and u₁ = 1 + s₁
            z = torch.nn.functional.pad(z, (1, 0)).addcmul_(s, along / (1 + s[:, :1]), value=-1)
            z[:, :1] -= along / (1 + s[:, :1])
            return z.mul_(s).mul_(self.scale).reshape(self.shape)
        return (self.scale * z).reshape(self.shape)

    def back(self, output: Tensor) -> Tensor:
        """Rᵀ of something of the shape of the outputs: samples × columns."""
        rows = self.scale * output.reshape(self.samples, self.outputs)
        if self.blocks is not None:
            return torch.bmm(rows.unsqueeze(1), self.blocks).squeeze(1)
        return rows if self.unit is None else self.reflected(rows.mul_(self.unit))

    def reflected(self, rows: Tensor) -> Tensor:
        """All but the first entry of (I − uuᵀ/u₁)x for each row x, where B is of the second kind."""
        s = self.unit
        assert s is not None
        along = ((s * rows).sum(dim=1, keepdim=True) + rows[:, :1]) / (1 + s[:, :1])
        return rows[:, 1:].addcmul(s[:, 1:], along, value=-1)

    def halved(self, output: Tensor) -> Tensor:
        r""":math:`P^\top z` for something of the shape of the outputs, with a root P that costs less than R.

        Where B is of the second kind, :math:`BB^\top = \mathrm{diag}(s)(I - ss^\top)\mathrm{diag}(s)`. As a
        projection is its own square, :math:`PP^\top = RR^\top` for :math:`P = \mathrm{diag}(c)\mathrm{diag}(s)(I -
        ss^\top)`. Elsewhere P is R.
        """
        if self.unit is None:
            return self.back(output)
        rows = (self.unit * output.reshape(self.unit.shape)).mul_(self.scale)
        return rows.addcmul_(self.unit, (self.unit * rows).sum(dim=1, keepdim=True), value=-1)

    def completed(self, half: Tensor) -> Tensor:
        """RRᵀz from Pᵀz, which is written over: the projection leaves it as it is."""
        return self.forth(half) if self.unit is None else half.mul_(self.unit).mul_(self.scale).reshape(self.shape)

    def curved(self, output: Tensor) -> Tensor:
        """RRᵀ of something of the shape of the outputs."""
        return self.completed(self.halved(output))

    def column(self, j: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Column j of every block, of the shape of the outputs."""
        like = next((part for part in (self.blocks, self.unit, self.scale) if isinstance(part, Tensor)), None)
        unit = torch.zeros(self.samples, self.columns, dtype=dtype if like is None else like.dtype, device=device)
        unit[:, j] = 1
        return self.forth(unit).to(dtype)

    def all_columns(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The columns of every block: columns × the shape of the outputs."""
        s = self.unit
        if s is None or type(self) is not Factor:
            return torch.stack([self.column(j, dtype, device) for j in range(self.columns)])
        u = s + torch.eye(1, s.shape[1], dtype=s.dtype, device=device)
        found = torch.einsum("ik,ij->jik", u, s[:, 1:] / -u[:, :1])
        found[:, :, 1:].diagonal(dim1=0, dim2=2).add_(1.0)
        return found.mul_(s * self.scale).reshape(-1, *self.shape).to(dtype)


@dataclass(frozen=True)
class _Gathered(Factor):
    """R for outputs whose samples hold several rows of another R: numbers are moved, and nothing is formed."""

    rows: Factor = field(kw_only=True)  # the other R
    # where the entries of its outputs stand among these, one row after the other
    places: Tensor = field(kw_only=True)

    @property
    def columns(self) -> int:
        """Those of all rows of a sample."""
        return self.rows.samples * self.rows.columns // max(self.shape[0], 1)

    def forth(self, z: Tensor) -> Tensor:
        """Rz, of the shape of the outputs, for z of samples × columns."""
        return self._scattered(self.rows.forth(z.reshape(self.rows.samples, -1)))

    def back(self, output: Tensor) -> Tensor:
        """Rᵀ of something of the shape of the outputs: samples × columns."""
        return self.rows.back(self._rows_of(output)).reshape(self.shape[0], -1)

    def halved(self, output: Tensor) -> Tensor:
        """Pᵀ of something of the shape of the outputs."""
        return self.rows.halved(self._rows_of(output))

    def completed(self, half: Tensor) -> Tensor:
        """RRᵀz from Pᵀz, which is written over."""
        return self._scattered(self.rows.completed(half))

    def _rows_of(self, output: Tensor) -> Tensor:
        return output.flatten()[self.places].reshape(self.rows.shape)

    def _scattered(self, rows: Tensor) -> Tensor:
        flat = rows.flatten()
        return torch.empty_like(flat).index_copy_(0, self.places, flat).reshape(self.shape)


def modest(slope: Tensor) -> bool:
    """Whether no entry of w̄ is huge, or NaN, as where a probability is zero."""
    return bool(slope.abs().max() < LARGEST)
