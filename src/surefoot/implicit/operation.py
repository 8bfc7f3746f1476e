"""The layer as one operation of an exported program.

``torch.export`` cannot follow a solver, whose iterations depend on the data. It records one operation on all the
tensors of the inner problem instead, with a number that stands for the problem. When the program is read as a
graph the operation becomes a node whose function is the problem itself: ordinary, differentiable Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from surefoot.implicit.errors import ImplicitError
from surefoot.implicit.problem import Problem

if TYPE_CHECKING:
    from surefoot.implicit.layer import ArgMin

_known: weakref.WeakValueDictionary[int, ArgMin] = weakref.WeakValueDictionary()
_Item = TypeVar("_Item")


@torch.library.custom_op("surefoot::argmin", mutates_args=())
def _operation(tensors: list[Tensor], layer: int) -> Tensor:
    problem, arguments = read(tensors, layer)
    return problem(*arguments).detach().clone()


@_operation.register_fake
def _shape(tensors: list[Tensor], layer: int) -> Tensor:
    problem, _ = read(tensors, layer)
    return tensors[0].new_empty(problem.result_shape(tensors), dtype=problem.dtype(tensors))


def record(layer: ArgMin, tensors: Sequence[Tensor]) -> Tensor:
    """The operation, while a program is exported or on the ``meta`` device.

    Where modules are shared, ``torch.export`` calls passing stand-ins, which know the module they stand for: it is
    the one that lasts, and the one that is remembered.
    """
    stands_for = getattr(layer, "get_base", None)
    layer = layer if stands_for is None else stands_for()
    _known[id(layer)] = layer
    result: Tensor = _operation(list(tensors), id(layer))
    return result


def read(tensors: Sequence[_Item], layer: int) -> tuple[Problem, tuple[list[_Item], list[_Item], list[_Item]]]:
    """The problem that a recorded operation stands for, and its inputs, parameters and buffers.

    What reads a graph relies on second derivatives, so there they are always implicit and exact.

    Raises:
        ImplicitError: if its layer is gone.
    """
    found = _known.get(layer)
    if found is None:
        raise ImplicitError(
            "an exported ArgMin layer runs only as long as the layer it was exported from exists",
            "Keep the model, or export it again.",
        )
    problem = found.problem(len(tensors) - found.owned)
    settings = replace(problem.settings, differentiate="implicit", order=max(2, problem.settings.order))
    problem = replace(problem, settings=settings)
    first, second = len(problem.inputs), len(problem.inputs) + len(problem.parameters)
    return problem, (list(tensors[:first]), list(tensors[first:second]), list(tensors[second:]))
