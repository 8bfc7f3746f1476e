"""Noticing that a buffer or a constant was written to.

PyTorch counts the writes to a tensor, but not those through ``.data`` or through a NumPy array that shares its
memory. What was computed from a buffer would then silently be out of date, so values are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from surefoot.torch_private import FakeTensor


class HeldCopies:
    """Copies of some tensors, to compare with later.

    Args:
        held: tensors by name.
        names: which of them to copy; names of other tensors are ignored.

    >>> held = {"scale": torch.ones(2)}
    >>> copies = HeldCopies(held, ["scale"])
    >>> held["scale"].data[0] = 3.0
    >>> copies.outdated(held)
    True
    """

    def __init__(self, held: Mapping[str, Tensor], names: Collection[str]) -> None:
        self._tensors = {name: held[name] for name in names if name in held}
        self._copies = {
            name: value.detach().clone() for name, value in self._tensors.items() if _has_values(value)
        }

    def outdated(self, held: Mapping[str, Tensor]) -> bool:
        """Whether one of the tensors is another one now or has other entries."""
        if any(held[name] is not value for name, value in self._tensors.items()):
            return True
        return not all(_equal(held[name], copy) for name, copy in self._copies.items())


def _equal(present: Tensor, copy: Tensor) -> bool:
    same_kind = present.dtype == copy.dtype and present.device == copy.device
    return same_kind and torch.equal(present.detach(), copy)


def _has_values(value: Tensor) -> bool:
    """Whether there are entries to compare: on the meta device and in fake tensors there are none."""
    return not isinstance(value, FakeTensor) and value.device.type != "meta"
