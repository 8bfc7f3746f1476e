"""Boolean masks as indices while a model is traced: which entries a fixed mask picks is known, and how many.

A mask that is a buffer is the same for all data. One that is computed stays, and is refused because the shape of
what it picks depends on the data.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Places = list[list[int]]
_MOST = 2**16  # entries of a mask that is looked at


def _masks(model: nn.Module) -> dict[str, Tensor]:
    """The boolean buffers of a model whose values are known and not too many, by name."""
    buffers = {name: value for name, value in model.named_buffers() if value.dtype == torch.bool and value.dim()}
    return {n: mask for n, mask in buffers.items() if mask.device.type != "meta" and mask.numel() <= _MOST}


def masks_of(model: nn.Module) -> Hashable:
    """Something to compare masks by: a graph holds for these only."""
    return tuple((name, mask.cpu().contiguous().numpy().tobytes()) for name, mask in _masks(model).items())


def places_of(model: nn.Module) -> dict[str, Places]:
    """Where they are true: for each dimension, the index of every such entry."""
    return {
        name: [where.tolist() for where in mask.nonzero(as_tuple=True)] for name, mask in _masks(model).items()
    }


class MasksAsIndices(TorchFunctionMode):
    """Indexing by the places of a mask instead of the mask."""

    def __init__(self, model: nn.Module, places: Mapping[str, Places]) -> None:
        super().__init__()
        self._places = {id(traced): places[name] for name, traced in model.named_buffers() if name in places}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(id(part) in self._places for part in index):
                return args[0][tuple(item for part in index for item in self._indices(part))]
        picks = function in (torch.masked_select, torch.Tensor.masked_select) and len(args) == 2
        if picks and id(args[1]) in self._places and args[0].shape == args[1].shape:
            return args[0][self._indices(args[1])]
        return function(*args, **(kwargs or {}))

    def _indices(self, part: Any) -> tuple[Any, ...]:
        if id(part) not in self._places:
            return (part,)
        return tuple(torch.tensor(where, device=part.device) for where in self._places[id(part)])
