"""A quick look whether anything was touched that a survey of a model met."""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph.survey import OPAQUE, Survey, closure_of, globals_read, is_library, slots_of
from surefoot.torch_private import global_hooks

_TABLES = (dict, OrderedDict)
_CONTAINERS = (*_TABLES, list, set)
_FIXED = (
    tuple, frozenset, torch.Size, types.MethodType, property, functools.cached_property, functools.partial,
    staticmethod, classmethod,
)  # fmt: skip


class Guard:
    """What every object that a survey met refers to, by identity.

    A survey walks through objects to describe them. If each of them refers to the same objects as then, the next
    walk would say the same, so that looking at them one by one, without a description, is enough. Of some kinds
    (arrays, generators, masks and sparse tensors, tensors that are neither parameters nor buffers, objects with
    slots) that cannot be told without reading them: the guard of a model that has one never holds. Values of
    parameters and buffers are not looked at, as in a survey.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> guard = Guard(model)
    >>> guard.holds(), model.eval() is model, guard.holds()
    (True, True, False)
    """

    def __init__(self, model: nn.Module) -> None:
        survey = Survey(model, record=False)
        self._tables: list[Mapping[Any, Any]] = []  # attributes, dictionaries, members of classes
        self._lists: list[list[Any]] = []
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._empty: list[Any] = []  # containers that have to stay so
        self._classes: set[type] = set()
        self._functions: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._tensors: list[tuple[Tensor, Hashable]] = []
        self._around = _environment()
        self._registered = {id(value) for value in (*model.parameters(), *model.buffers())}
        self.possible = survey.description is not None and all(map(self._take, survey.met))
        for table in global_hooks().values():
            if isinstance(table, _CONTAINERS):
                self.possible = self.possible and self._take(table)
        self._rows = (*self._tables, *(table.values() for table in self._tables), *self._lists)
        lengths, items = self._found()
        self._contents = lengths, tuple(items)

    def _found(self) -> tuple[list[int], Iterator[Any]]:
        """How much tables and lists hold, and what, all in one row."""
        return list(map(len, self._rows)), chain.from_iterable(self._rows)

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            self.possible
            and not any(self._empty)
            and self._holds_the_same()
            and all(items == kept for items, kept in self._sets)
            and all(_kind(value) == kind for value, kind in self._tensors)
            and all(_same(_parts(value), parts) for value, parts in self._functions)
            and _environment() == self._around
        )

    def _holds_the_same(self) -> bool:
        """Whether tables and lists refer to the same objects, under the same keys."""
        (lengths, items), (before, kept) = self._found(), self._contents
        return lengths == before and all(map(operator.is_, items, kept))

    def _take(self, value: Any) -> bool:
        """Note what an object refers to; whether that says all about it."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.dtype == torch.bool:  # what it holds shapes the graph
                return False
            self._tensors.append((value, _kind(value)))
            return id(value) in self._registered
        if isinstance(value, type):
            self._tables += [vars(base) for base in value.__mro__[:-1] if base not in self._classes]
            self._classes.update(value.__mro__)
            return True
        if isinstance(value, types.FunctionType):
            if not is_library(value.__globals__.get("__name__", "")):
                self._functions.append((value, _parts(value)))
                self._take_items(vars(value))
            return True
        if type(value) in _TABLES:
            self._take_items(value)
        elif type(value) is list:
            self._lists.append(value)
            self._note_empty(value)
        elif type(value) is set:
            self._sets.append((value, frozenset(value)))
        elif type(value) not in _FIXED and not isinstance(value, OPAQUE):
            table = getattr(value, "__dict__", None)
            if (
                not isinstance(table, dict)
                or slots_of(value)
                or isinstance(value, (*_CONTAINERS, tuple, frozenset))
            ):
                return False
            self._take_items(table)
        return True

    def _take_items(self, table: Mapping[Any, Any]) -> None:
        self._tables.append(table)
        self._note_empty(table.values())

    def _note_empty(self, values: Iterable[Any]) -> None:
        self._empty += [value for value in values if type(value) in _CONTAINERS and not value]


def _same(parts: tuple[Any, ...], kept: tuple[Any, ...]) -> bool:
    return len(parts) == len(kept) and all(map(operator.is_, parts, kept))


def _kind(value: Tensor) -> Hashable:
    """All of a registered tensor but its entries."""
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device, value.requires_grad


def _parts(value: types.FunctionType) -> tuple[Any, ...]:
    """What a function of a user refers to."""
    used = (item for _, item in globals_read(value))
    return value.__code__, value.__defaults__, value.__kwdefaults__, *closure_of(value).values(), *used


def _environment() -> tuple[Any, ...]:
    made = torch.empty(0)  # of the default type, on the default device
    return made.dtype, made.device, *global_hooks().values()
