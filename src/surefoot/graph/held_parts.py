"""What an optimizer holds of a model whose weights lie with several processes: the parts of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph.outline import Outline
from surefoot.graph.sharded import Sharded
from surefoot.torch_private import lies_elsewhere


class HeldParts(Sharded):
    """A model whose weights lie with several processes, and a copy whose parameters are the parts of this process,
    in the same memory: what is written there is written into the model.

    Args:
        outline: of the model.

    Attributes:
        outline: as the model was at the last :meth:`gather`.
    """

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        super().__init__(outline.model)

    def _whole(self, value: Tensor) -> Tensor:
        if not (lies_elsewhere(value) and isinstance(value, nn.Parameter)):
            return super()._whole(value)
        if id(value) not in self._pairs:
            here: Any = value.detach()
            self._pairs[id(value)] = value, nn.Parameter(here.to_local(), requires_grad=value.requires_grad)
        return self._pairs[id(value)][1]

    @property
    def part(self) -> list[int]:
        """Which parts these are: the number of this process, and how many there are."""
        return [self.outline.processes.rank, self.outline.processes.size]

    @property
    def readable(self) -> nn.Module:
        """The copy that has the shapes of the model, so that its operations can be read."""
        return self.outline.plain

    def gather(self) -> None:
        """The copies get the present modes and flags; nothing is gathered but what is frozen."""
        self._follow()
        self.outline = self.outline.refreshed()
        with torch.no_grad():
            for value, part in self._pairs.values():
                if isinstance(part, nn.Parameter):
                    part.data = value.detach().to_local()  # which others may have replaced
                    part.requires_grad_(value.requires_grad)

    def write(self) -> None:
        """Nothing: the parts are those of the model."""
