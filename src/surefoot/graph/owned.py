"""The tensors a model owns, by path, each under the first path it goes by."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from surefoot.errors import CaptureError
from surefoot.graph.nodes import Source
from surefoot.torch_private import storage_of


class Owned:
    """Parameters and buffers of a model.

    Attributes:
        aliases: for a tensor with several paths, every further path to the first one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, tuple[Source, Tensor]] = {}
        self._first: dict[str, str] = {}
        known: dict[int, str] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._add(path, Source.PARAMETER if parameter.requires_grad else Source.FROZEN, parameter, known)
        for path, buffer in model.named_buffers(remove_duplicate=False):
            self._add(path, Source.BUFFER, buffer, known)
        self.aliases = {path: first for path, first in self._first.items() if path != first}

    def _add(self, path: str, source: Source, value: Tensor, known: dict[int, str]) -> None:
        self._first[path] = known.setdefault(id(value), path)
        self._tensors[path] = source, value

    def find(self, path: str) -> tuple[Source, str, Tensor | None]:
        """What goes by a path: its kind, its first path, and its value unless it varies."""
        first = self._first[path]
        source, value = self._tensors[first]
        return source, first, None if source is Source.PARAMETER else value

    def identify(self, path: str, value: Tensor) -> tuple[Source, str, Tensor | None]:
        """What a constant of a traced program is: a parameter that was reached by another way, or indeed constant.

        Raises:
            CaptureError: if it is a part of a parameter.
        """
        for known, (source, owned) in self._tensors.items():
            if owned is value or _same_memory(owned, value):
                return self.find(known)
            if source is Source.PARAMETER and _overlap(owned, value):
                raise CaptureError(
                    f"the forward pass reads a view of the parameter '{known}' that was made outside of it",
                    where=known.rpartition(".")[0],
                    remedy="Make the view inside forward, so that its gradient reaches the parameter.",
                )
        return Source.CONSTANT, path, value


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse different parameters in one place of memory: a step along one would move the other.

    Raises:
        CaptureError: naming both.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for path, value in model.named_parameters():
        if value.device.type != "meta" and value.numel() and value.layout is torch.strided:
            start, stop = _span(value)
            spans.setdefault(value.untyped_storage().data_ptr(), []).append((start, stop, path))
    for together in spans.values():
        together.sort()
        for (_, stop, first), (start, _, second) in pairwise(together):
            if start < stop:
                owner, _, name = second.rpartition(".")
                raise CaptureError(
                    f"the parameter '{name}' shares its memory with '{first}' and is another parameter",
                    where=owner,
                    remedy="Tie them by assigning one nn.Parameter to both, or give each its own memory.",
                )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return _overlap(a, b) and _span(a) == _span(b) and a.shape == b.shape and a.stride() == b.stride()


def _overlap(a: Tensor, b: Tensor) -> bool:
    if storage_of(a) != storage_of(b) or not (a.numel() and b.numel()):
        return False
    (start, stop), (other, end) = _span(a), _span(b)
    return start < end and other < stop


def _span(value: Tensor) -> tuple[int, int]:
    """First and last position of its entries in the storage."""
    start = int(value.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return start, start + reach + 1
