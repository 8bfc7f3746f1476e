"""The tensors a model owns, by path, each under the first path it goes by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.errors import CaptureError
from surefoot.graph.checks import span
from surefoot.graph.nodes import Source
from surefoot.torch_private import storage_of


class Owned:
    """Parameters and buffers of a model.

    Attributes:
        aliases: for a tensor with several paths, every further path to the first one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, tuple[Source, Tensor]] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self._tensors[path] = Source.PARAMETER if parameter.requires_grad else Source.FROZEN, parameter
        for path, buffer in model.named_buffers(remove_duplicate=False):
            self._tensors[path] = Source.BUFFER, buffer
        first: dict[int, str] = {}
        self._first = {path: first.setdefault(id(value), path) for path, (_, value) in self._tensors.items()}
        self.aliases = {path: first for path, first in self._first.items() if path != first}

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
        for name, (source, owned) in self._tensors.items():
            overlaps = _overlap(owned, value)
            same = overlaps and span(owned) == span(value) and owned.shape == value.shape
            if owned is value or (same and owned.stride() == value.stride()):
                return self.find(name)
            if source is Source.PARAMETER and overlaps:
                what = f"the forward pass reads a view of the parameter '{name}' that was made outside of it"
                remedy = "Make the view inside forward, so that its gradient reaches the parameter."
                raise CaptureError(what, where=name.rpartition(".")[0], remedy=remedy)
        return Source.CONSTANT, path, value


def _overlap(a: Tensor, b: Tensor) -> bool:
    if any(value.layout is not torch.strided or not value.numel() for value in (a, b)):
        return False
    if storage_of(a) != storage_of(b):
        return False
    (start, stop), (other, end) = span(a), span(b)
    return start < end and other < stop
