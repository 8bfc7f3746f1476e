"""When two things that a model refers to are the same, now and later; generators can be put back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Same:
    """Equal to another one if both stand for one object that is still alive.

    An identity alone would not do: it may be given to a new object once the old one is gone. And a strong
    reference would keep models alive.

    Raises:
        TypeError: if the object cannot be referred to weakly.
    """

    def __init__(self, value: Any) -> None:
        self._reference = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        value = self._reference()
        return value is not None and value is other._reference()


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether a module is part of Python or of an installed package.

    >>> is_library("torch.nn.functional"), is_library("__main__")
    (True, False)
    """
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root in ("torch", "numpy", "surefoot"):
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != "__main__" and any(file.startswith(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))


def globals_read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The global names that a function mentions, with their values; in modules, the names it may look up there."""
    names, table = _names(function.__code__), function.__globals__
    for name in names:
        if name in table:
            yield name, table[name]
            if isinstance(table[name], types.ModuleType):
                members = vars(table[name])
                yield from ((f"{name}.{member}", members[member]) for member in names if member in members)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = (name for item in code.co_consts if isinstance(item, types.CodeType) for name in _names(item))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """The variables of an enclosing function that a function reads; those without a value are left out."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            found[name] = cell.cell_contents
    return found


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that its classes keep in slots."""
    found = {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def digest(data: bytes) -> bytes:
    """A number that differs when the bytes do."""
    return hashlib.blake2b(data, digest_size=16).digest()


def tensor_digest(value: Tensor) -> bytes:
    """A number that differs when the entries of a tensor do."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().tobytes())


Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


def state_of(generator: Generator) -> Any:
    """The state of a generator, to compare with :func:`same_state` or to give to :func:`set_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state(legacy=False)
        if isinstance(generator, np.random.RandomState)
        else generator.get_state()
    )


def set_state(generator: Generator, state: Any) -> None:
    """Put a generator into a state it was in.

    >>> generator = random.Random(0)
    >>> state = state_of(generator)
    >>> first = generator.random()
    >>> set_state(generator, state)
    >>> generator.random() == first
    True
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def global_generators() -> dict[str, Generator]:
    """The generators behind the functions of the modules, by the name of the module."""
    python: Any = random.random
    numpy: Any = np.random.rand
    return {"random": python.__self__, "numpy.random": numpy.__self__, "torch": torch.default_generator}
