"""The layer as one operation of an exported program.

``torch.export`` cannot follow a solver, whose iterations depend on the data. It records one operation on all the
tensors of the inner problem instead, with a number that stands for the problem. When the program is read as a
graph the operation becomes a node whose function is the problem itself: ordinary, differentiable Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from surefoot.graph.nodes import Node
from surefoot.implicit.differentiate import Minimiser
from surefoot.implicit.errors import ImplicitError
from surefoot.implicit.problem import Problem


class Layer(Protocol):
    """What is asked of an ArgMin layer."""

    def problem(self, count: int) -> Problem:
        """The inner problem with so many tensors."""


_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_Item = TypeVar("_Item")


@torch.library.custom_op("surefoot::argmin", mutates_args=())
def _operation(tensors: list[Tensor], layer: int) -> Tensor:
    minimiser, arguments = read(tensors, layer)
    return minimiser(*arguments).detach().clone()


@_operation.register_fake
def _shape(tensors: list[Tensor], layer: int) -> Tensor:
    problem = read(tensors, layer)[0].problem
    return tensors[0].new_empty(problem.result_shape(tensors), dtype=problem.dtype(tensors))


def record(layer: Layer, tensors: Sequence[Tensor]) -> Tensor:
    """The operation, while a program is exported or on the ``meta`` device.

    Where modules are shared, ``torch.export`` calls passing stand-ins, which know the module they stand for: it is
    the one that lasts, and the one that is remembered.
    """
    stands_for = getattr(layer, "get_base", None)
    layer = layer if stands_for is None else stands_for()
    _layers[id(layer)] = layer
    result: Tensor = _operation(list(tensors), id(layer))
    return result


def read(tensors: Sequence[_Item], layer: int) -> tuple[Minimiser, tuple[list[_Item], list[_Item], list[_Item]]]:
    """The function that a recorded operation stands for, and its inputs, parameters and buffers.

    What reads a graph relies on second derivatives, so there they are always implicit and exact.

    Raises:
        ImplicitError: if its layer is gone.
    """
    source = _layers.get(layer)
    if source is None:
        raise ImplicitError(
            "an exported ArgMin layer runs only as long as the layer it was exported from exists",
            "Keep the model, or export it again.",
        )
    problem = source.problem(len(tensors))
    settings = replace(problem.settings, differentiate="implicit", order=max(2, problem.settings.order))
    first, second = len(problem.inputs), len(problem.inputs) + len(problem.parameters)
    arguments = list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])
    return Minimiser(replace(problem, settings=settings)), arguments


def rewrite(node: Node) -> Iterator[Node]:
    """The recorded operation as a node whose function is the minimiser itself, which is differentiable."""
    minimiser, arguments = read(*node.args)
    yield replace(node, target=minimiser, args=arguments)
