"""What all tensors hold while something runs, at the most."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watched(TorchDispatchMode):
    """Counts the bytes of storages that were made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, Tensor):
                self._note(value)
        return found

    def _note(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.held += storage.nbytes()
            self.most = max(self.most, self.held)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.held -= self._known.pop(key, 0)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors made by a call hold at once; the first call of two reads the model."""
    call()
    with _Watched() as watched:
        call()
    return watched.most
