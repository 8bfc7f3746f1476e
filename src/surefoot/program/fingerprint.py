"""All that a forward pass may read besides the values of parameters and buffers, to be compared later.

A walk over a model goes through attributes, containers and plain objects, and through the code that a user wrote:
methods, closures, default arguments, and the global names that they mention. Installed packages are taken as they
are: a function of theirs counts by its identity, and their own global variables are not followed. Tensors of more
than a million entries that are neither parameters nor buffers count by PyTorch's own counter of writes.
"""

from __future__ import annotations

import array
import contextlib
import dis
import enum
import functools
import hashlib
import logging
import operator
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.torch_private import STANDARD_TABLES, OpOverload, OpOverloadPacket, global_hooks, writes_of

_LIMIT = 200_000  # objects; beyond, describing a model costs more than tracing it again
_LARGEST_COMPARED = 1_000_000  # entries of a tensor that is compared by value
_VALUES = {int, bool, str, bytes, complex, type(None), type(...)}
_IMMUTABLE = (
    slice | range | int | str | bytes | complex | torch.dtype | torch.device | torch.layout | torch.memory_format
)
_PLAIN = {dict, OrderedDict, list, set}
_BUILT_IN = (dict, list, tuple, set, frozenset, deque, functools.partial, random.Random, np.ndarray, bytearray)
_OPAQUE = (
    types.ModuleType, types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.CodeType, OpOverload, OpOverloadPacket,
    logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip


class Same:
    """Equal to another one if both stand for one object that is still alive.

    An identity alone would not do: it may be given to a new object once the old one is gone. And a strong
    reference would keep models alive.
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


def fingerprint(model: nn.Module, *others: Any) -> Hashable:
    """Something that is equal to what it was if the model computes the same function of its parameters and
    buffers, and other functions and objects what they did; ``None`` if they refer to what cannot be compared.

    >>> model = nn.ReLU()
    >>> before = fingerprint(model)
    >>> fingerprint(model) == before, fingerprint(model.eval()) == before
    (True, False)
    """
    walk = _Walk(model)
    try:
        environment = str(torch.get_default_dtype()), str(torch.get_default_device())
        own = [*map(walk.describe, (model, *others, global_hooks())), environment]
    except (RecursionError, _IncomparableError):
        return None
    return tuple(own)


class _IncomparableError(Exception):
    """Something was met that cannot be compared with its later self."""


class _Walk:
    """One walk over a model; what was met before counts by its number."""

    def __init__(self, model: nn.Module) -> None:
        self._registered = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # alive, so that no identity is used twice

    def describe(self, value: Any) -> Any:
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if kind in _PLAIN and not value:
            return (kind,)
        if isinstance(value, float):
            return kind, float(value).hex()
        if isinstance(value, _IMMUTABLE):
            return kind, repr(value)
        if isinstance(value, enum.Enum):
            return _same(kind), value.name
        number = self._numbers.get(id(value))
        if number is not None:
            return "again", number
        self._numbers[id(value)] = len(self._numbers)
        self._met.append(value)
        if len(self._met) > _LIMIT:
            raise _IncomparableError
        return self._described(value)

    def _described(self, value: Any) -> Hashable:
        if isinstance(value, nn.Module) and not isinstance(value, _BUILT_IN):
            return self._object(value)
        match value:
            case Tensor():
                return self._tensor(value)
            case random.Random():
                return _same(value), value.getstate()
            case np.random.Generator():
                return _same(value), repr(value.bit_generator.state)
            case np.random.RandomState():
                return _same(value), repr(value.get_state())
            case torch.Generator():
                return _same(value), value.get_state().numpy().tobytes()
            case types.FunctionType() if is_library(value.__globals__.get("__name__", "")):
                return _same(value)
            case types.FunctionType():
                return self._function(value)
            case type():
                return self._class(value)
            case types.MethodType():
                return "method", self.describe(value.__func__), self.describe(value.__self__)
            case functools.partial():
                return "partial", *map(self.describe, (value.func, value.args, value.keywords))
            case staticmethod() | classmethod():
                return type(value), self.describe(value.__func__)
            case property():
                return "property", self.describe(value.fget)
            case functools.cached_property():
                return "property", self.describe(value.func)
            case np.ndarray() | np.generic() if not value.dtype.hasobject:
                return "array", value.shape, str(value.dtype), _digest(value.tobytes())
            case bytearray() | array.array():
                return type(value), bytes(value)
            case weakref.ref():
                return "weak reference", self.describe(value())
            case dict() | types.MappingProxyType():
                items = tuple((self.describe(k), self.describe(v)) for k, v in value.items())
                return _same(type(value)), items, self._attributes(getattr(value, "__dict__", {}))
            case list() | tuple() | set() | frozenset() | deque():
                items = tuple(map(self.describe, value))
                return _same(type(value)), items, self._attributes(getattr(value, "__dict__", {}))
            case _:
                return _same(value) if isinstance(value, _OPAQUE) else self._object(value)

    def _object(self, value: Any) -> Hashable:
        """An object is its class and its attributes."""
        table, slots = getattr(value, "__dict__", None), _slots_of(value)
        if not isinstance(table, dict) and not slots:
            raise _IncomparableError
        return self.describe(type(value)), self._attributes({**(table or {}), **slots})

    def _attributes(self, table: Mapping[str, Any]) -> Hashable:
        return tuple(
            (key, type(item), item) if type(item) in _VALUES else (key, self.describe(item))
            for key, item in table.items()
            if key not in STANDARD_TABLES or item
        )

    def _tensor(self, value: Tensor) -> Hashable:
        """Parameters and buffers by kind, since their values are looked at elsewhere; others with their values."""
        kind = (tuple(value.shape), value.dtype, value.device, value.layout, value.requires_grad)
        if id(value) in self._registered:
            return kind
        if value.device.type == "meta":
            return _same(value), kind
        if value.is_inference() or type(value) not in (Tensor, nn.Parameter):
            raise _IncomparableError
        small = value.numel() <= _LARGEST_COMPARED and value.layout is torch.strided
        return _same(value), writes_of(value), kind, tensor_digest(value) if small else None

    def _class(self, value: type) -> Hashable:
        """A class is itself with its methods and numbers and, if a user wrote it, all its attributes."""
        own: list[Hashable] = []
        for base in value.__mro__[:-1]:
            if is_library(base.__module__):
                own.append(_library_class(base))
                continue
            table = {
                key: item
                for key, item in vars(base).items()
                if isinstance(item, types.FunctionType) or not key.startswith(("__", "_abc_"))
            }
            own.append((_same(base), self._attributes(table)))
        return tuple(own)

    def _function(self, value: types.FunctionType) -> Hashable:
        """A function is its code and what the code refers to."""
        bound = tuple(map(self.describe, (value.__defaults__, value.__kwdefaults__, vars(value))))
        closure = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the cell is empty
                closure.append((name, self.describe(cell.cell_contents)))
        used = tuple((key, self.describe(item)) for key, item in _globals_read(value))
        return _same(value.__code__), bound, tuple(closure), used


def tensor_digest(value: Tensor) -> bytes:
    """A number that differs when the entries of a tensor do."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return _digest(flat.view(torch.uint8).numpy().tobytes())


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


def _globals_read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The global names that a function reads, with their values; in modules, the names it may look up there."""
    table = function.__globals__
    read, names = _names(function.__code__)
    for name in read:
        if name in table:
            yield name, table[name]
            if isinstance(table[name], types.ModuleType):
                members = vars(table[name])
                yield from ((f"{name}.{member}", members[member]) for member in names if member in members)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that code reads from its globals, and all names in it, those of attributes too."""
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    names = list(code.co_names)
    for inner in (_names(item) for item in code.co_consts if isinstance(item, types.CodeType)):
        read += inner[0]
        names += inner[1]
    return tuple(dict.fromkeys(read)), tuple(dict.fromkeys(names))


def _slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that its classes keep in slots."""
    attributes = {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _same(value: Any) -> Same:
    try:
        return Same(value)
    except TypeError as error:  # it cannot be referred to without keeping it alive
        raise _IncomparableError from error


_libraries: weakref.WeakKeyDictionary[type, tuple[tuple[Any, ...], object]] = weakref.WeakKeyDictionary()


def _library_class(value: type) -> Hashable:
    """A class of an installed package is itself, and another one once a method or attribute of it is replaced."""
    items = tuple(vars(value).values())
    known = _libraries.get(value)
    if known is None or len(known[0]) != len(items) or not all(map(operator.is_, known[0], items)):
        known = _libraries[value] = items, object()
    return Same(value), known[1]
