"""Shape and element type of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spec:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return int(torch.Size(self.shape).numel())

    @property
    def is_real(self) -> bool:
        """Whether its entries vary continuously: ids, masks and other integers do not."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) or "scalar"
