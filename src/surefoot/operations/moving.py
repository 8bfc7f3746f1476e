r"""One operation along a segment: the Taylor models of its arguments, and norms that are kept between segments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.enclosure import Spec
from surefoot.graph.structure import Node, Ref
from surefoot.operations.call import Use
from surefoot.taylor import TaylorModel


@dataclass(frozen=True)
class Gain:
    r"""A norm of :math:`\beta(\cdot, w)` at some weights, and C with :math:`\|\beta(x, w)\| \le C\|x\|\|w\|`."""

    weights: Tensor  # the weights
    norm: float  # the norm there
    constant: float  # C
    reduction: int  # how many products are added up for one entry


class Norms:
    r"""Norms of operations in their data, kept from one segment to the next.

    :math:`\|\beta(\cdot, w)\| \le \|\beta(\cdot, w')\| + C\|w - w'\|`: a norm found at w' serves until the weights
    have moved so far that it is loose by more than ``slack``.
    """

    def __init__(self, slack: float = 0.05) -> None:
        self._slack = slack
        self._kept: dict[Hashable, Gain] = {}

    def at(self, node: Node, weights: Tensor, data: Spec, measure: Callable[[], Gain]) -> tuple[float, Gain]:
        """A bound on the norm at these weights, and what it rests on; measured where nothing kept is near."""
        # the norm of a convolution depends on the size of its images, its stride, its padding, …
        settings = tuple((key, repr(a)) for key, a in node.arguments.items() if not isinstance(a, Ref))
        key = node.name, node.op, settings, data.shape[1:]
        gain = self._kept.get(key)
        if gain is not None and gain.weights.shape == weights.shape:
            moved = gain.constant * float(torch.linalg.vector_norm(weights - gain.weights)) * (1 + 2.0**-26)
            if moved <= self._slack * gain.norm:
                return (gain.norm + moved) * (1 + 2.0**-50), gain
        gain = self._kept[key] = measure()
        return gain.norm, gain


@dataclass(frozen=True)
class Moving:
    """One operation along a segment."""

    node: Node  # the operation
    slots: Mapping[str, TaylorModel]  # the models of its tensors, by slot
    order: int  # how many coefficients the result shall have
    norms: Norms  # norms kept from earlier segments

    @property
    def use(self) -> Use:
        """The operation with the shapes of its tensors."""
        values = {self.node.arguments[slot].name: model.value for slot, model in self.slots.items()}
        return Use(self.node, lambda name: Spec(tuple(values[name].shape), values[name].dtype))
