"""Everything a forward pass may read besides the values of parameters and buffers.

A capture may be used again only if all of that is the same, and it must be put back if tracing changes it. So
one walk over a model finds both: a description that two equal models share, and the mutable objects on the way.

The walk goes through attributes, containers and plain objects, and through the code that a user wrote: methods,
closures, default arguments, and the global names they mention. Installed packages are taken as they are: a
function of theirs counts by its identity, and their own global variables are not followed. Tensors of more than a
million entries that are neither parameters nor buffers count by PyTorch's own counter of writes.
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
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.torch_private import STANDARD_TABLES, TABLES, OpOverload, OpOverloadPacket, global_hooks, writes_of

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_LIMIT = 200_000  # objects; beyond, describing the model costs more than capturing it again
_LARGEST_COMPARED = 1_000_000  # entries of a tensor that is compared by value
_VALUES = {int, bool, str, bytes, complex, type(None), type(...)}
_IMMUTABLE = (
    slice | range | int | str | bytes | complex | torch.dtype | torch.device | torch.layout | torch.memory_format
)
_CONTAINERS = {dict, OrderedDict, list, set}
_MAPPINGS = dict | types.MappingProxyType
_BUILT_IN = (dict, list, tuple, set, frozenset, deque, functools.partial, random.Random, np.ndarray, bytearray)
_FIXED = tuple | frozenset | types.MappingProxyType
OPAQUE = (
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


class Holder(NamedTuple):
    """A mutable object found on the way."""

    label: str  # where it was found, in the user's terms: ``encoder.history``
    value: Any  # the object; for one with attributes, the table of its attributes
    of_model: bool  # whether it belongs to the model, and not only to a closure


class Survey:
    """One walk over a model.

    Args:
        model: the model.
        record: whether to list what was found, besides describing it.

    Attributes:
        holders: every mutable container that the model or its code refers to, in order of discovery.
        generators: the generators of random numbers on the way, each with where it was found.
        tensors: the tensors on the way that are not only parameters or buffers, likewise.
        description: a hashable description of all that was found; ``None`` if something cannot be described.
        met: the objects on the way, other than plain values and empty containers; they are kept alive.
    """

    def __init__(self, model: nn.Module, record: bool = True) -> None:
        self.holders: list[Holder] = []
        self.generators: list[tuple[str, Generator]] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.description: Hashable | None = None
        self._registered = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._numbers: dict[int, int] = {}
        self.met: list[Any] = []  # alive, so that no identity is used twice
        self._later: list[tuple[types.FunctionType | type, str, bool]] = []
        self._of_model, self._recorded, self._comparable = True, record, True
        with suppress(RecursionError):
            environment = str(torch.get_default_dtype()), str(torch.get_default_device())
            own = [self._walk(model, ""), self._walk(global_hooks(), "global hooks"), environment]
            # Code comes last, so that what is the model's own is known as such wherever code refers to it too.
            while self._later:
                own.append(self._code(*self._later.pop()))
            self.description = tuple(own) if self._comparable else None

    def _walk(self, value: Any, label: str) -> Hashable:
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if kind in _CONTAINERS and not value:
            self._hold(label, value)
            return (kind,)
        if isinstance(value, float):
            return kind, float(value).hex()
        if isinstance(value, _IMMUTABLE):
            return kind, repr(value)
        if isinstance(value, enum.Enum):
            return self._same(kind), value.name
        number = self._numbers.get(id(value))
        if number is not None:
            if isinstance(value, Tensor):
                self.tensors.append((label, value))  # a parameter that is kept elsewhere may be written to there
            return "again", number
        self._numbers[id(value)] = len(self._numbers)
        self.met.append(value)
        return self._describe(value, label) if len(self.met) < _LIMIT else self._incomparable()

    def _describe(self, value: Any, label: str) -> Hashable:
        if type(value) in _CONTAINERS:
            return self._container(value, label)
        if isinstance(value, nn.Module) and not isinstance(value, _BUILT_IN):
            return self._object(value, label)
        match value:
            case Tensor():
                return self._tensor(value, label)
            case random.Random() | np.random.Generator() | np.random.RandomState() | torch.Generator():
                self.generators.append((label, value))
                return self._same(value), digest(repr(state_of(value)).encode())
            case types.FunctionType() if is_library(value.__globals__.get("__name__", "")):
                return self._same(value)
            case type() | types.FunctionType():
                self._later.append((value, label, self._recorded))
                return "code"
            case types.MethodType():
                return "method", self._walk(value.__func__, label), self._walk(value.__self__, label)
            case functools.partial():
                return "partial", *(self._walk(v, label) for v in (value.func, value.args, value.keywords))
            case staticmethod() | classmethod():
                return type(value), self._walk(value.__func__, label)
            case property():
                return "property", self._walk(value.fget, label)
            case functools.cached_property():
                return "property", self._walk(value.func, label)
            case np.ndarray() | np.generic() if not value.dtype.hasobject:
                return "array", value.shape, str(value.dtype), digest(value.tobytes())
            case bytearray() | array.array():
                self._hold(label, value)
                return type(value), bytes(value)
            case weakref.ref():
                return "weak reference", self._walk(value(), label)
            case dict() | types.MappingProxyType() | list() | tuple() | set() | frozenset() | deque():
                return self._container(value, label)
            case _:
                return self._same(value) if isinstance(value, OPAQUE) else self._object(value, label)

    def _container(self, value: Any, label: str) -> Hashable:
        if not isinstance(value, _FIXED):
            self._hold(label, value)
        attributes = self._attributes(vars(value), label) if hasattr(value, "__dict__") else ()
        items: tuple[Hashable, ...]
        if isinstance(value, _MAPPINGS):
            items = tuple((self._walk(k, label), self._walk(v, _join(label, k))) for k, v in value.items())
        else:
            items = tuple(self._walk(item, f"{label}[{k}]") for k, item in enumerate(value))
        return self._same(type(value)), items, attributes

    def _object(self, value: Any, label: str) -> Hashable:
        """An object is its class and its attributes."""
        table, slots = getattr(value, "__dict__", None), slots_of(value)
        if not isinstance(table, dict) and not slots:
            return self._incomparable()
        if isinstance(table, dict):
            self._hold(label, table)
        described = self._attributes({**(table or {}), **slots}, label)
        return self._walk(type(value), label), described

    def _attributes(self, table: Mapping[str, Any], label: str) -> Hashable:
        described: list[Hashable] = []
        for key, item in table.items():
            if type(item) in _VALUES:
                described.append((key, type(item), item))
            elif key not in STANDARD_TABLES or item:
                # The tables of a module hold its children and tensors under their own names.
                inner = label if key in TABLES else _join(label, key)
                described.append((key, self._walk(item, inner)))
            else:
                self._hold(_join(label, key), item)
        return tuple(described)

    def _tensor(self, value: Tensor, label: str) -> Hashable:
        """Parameters and buffers by kind, since a graph refers to them; others with their values."""
        kind = (tuple(value.shape), value.dtype, value.device, value.layout, value.requires_grad)
        if id(value) in self._registered:
            return kind
        self.tensors.append((label, value))
        if value.device.type == "meta":
            return self._same(value), kind
        if value.is_inference() or type(value) not in (Tensor, nn.Parameter):
            return self._incomparable()
        small = value.numel() <= _LARGEST_COMPARED and value.layout is torch.strided
        return self._same(value), writes_of(value), kind, tensor_digest(value) if small else None

    def _code(self, value: types.FunctionType | type, label: str, recorded: bool) -> Hashable:
        with self._outside(recorded=recorded):
            return self._class(value) if isinstance(value, type) else self._function(value, label)

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
            with self._outside():
                own.append((self._same(base), self._attributes(table, base.__name__)))
        return tuple(own)

    def _function(self, value: types.FunctionType, label: str) -> Hashable:
        """A function is its code and what the code refers to."""
        bound = tuple(self._walk(v, label) for v in (value.__defaults__, value.__kwdefaults__, vars(value)))
        closure = tuple((k, self._walk(v, f"{k} of {value.__name__}")) for k, v in closure_of(value).items())
        with self._outside():
            used = tuple((key, self._walk(item, key)) for key, item in globals_read(value))
        return self._same(value.__code__), bound, closure, used

    def _same(self, value: Any) -> Hashable:
        try:
            return Same(value)
        except TypeError:  # it cannot be referred to without keeping it alive
            return self._incomparable()

    def _incomparable(self) -> Hashable:
        """Something was met that cannot be compared with its later self: there will be no description."""
        self._comparable = False
        return None

    def _hold(self, label: str, value: Any) -> None:
        if self._recorded:
            self.holders.append(Holder(label, value, self._of_model))

    @contextmanager
    def _outside(self, recorded: bool = False) -> Iterator[None]:
        """What is met from here on is not the model's own; what is global is not even put back."""
        before = self._of_model, self._recorded
        self._of_model, self._recorded = False, self._recorded and recorded
        try:
            yield
        finally:
            self._of_model, self._recorded = before


_libraries: weakref.WeakKeyDictionary[type, tuple[tuple[Any, ...], object]] = weakref.WeakKeyDictionary()


def _library_class(value: type) -> Hashable:
    """A class of an installed package is itself, and another one once a method or attribute of it is replaced."""
    items = tuple(vars(value).values())
    known = _libraries.get(value)
    if known is None or len(known[0]) != len(items) or not all(map(operator.is_, known[0], items)):
        known = _libraries[value] = items, object()
    return Same(value), known[1]


def _join(label: str, key: Any) -> str:
    return f"{label}.{key}" if label else str(key)
