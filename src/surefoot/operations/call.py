r"""One operation where it stands, and what can be claimed of it.

The bounds of an operation :math:`z = f(x_1, …, x_k)` are claims over all arguments within their enclosures,

* ``jacobian[i]`` :math:`\ge \sup\|\partial f/\partial x_i\|_{2,2}`,
* ``curvature[i, j]`` :math:`\ge \sup\|\partial^2 f/\partial x_i\partial x_j\|_{2,2,2}` (the Lipschitz constant of
  the derivative where the second one does not exist),
* ``bound`` :math:`\ge \sup\|z\|_2` and ``peak`` :math:`\ge \sup\|z\|_\infty` where it knows better than the
  calculus,
* ``curvature_along(λ)[i, j]`` :math:`\ge \sup\|\sum_k\lambda_k\,\partial^2 f_k/\partial x_i\partial x_j\|_{2,2}`
  for costates :math:`\lambda` within an enclosure, where that is less than :math:`\|\lambda\|` times the
  curvature.

This is the paper's Lemma smooth_gen for any number of arguments.

Along a segment the operation has Taylor models of its arguments (:class:`Moving`), and norms that are kept
from one segment to the next (:class:`Norms`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, Spec
from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph.structure import Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.taylor import TaylorModel

Slot = str
Pair = tuple[Slot, Slot]
Along = Callable[[Enclosure], Mapping[Pair, Magnitude]]


@dataclass(frozen=True)
class Bounds:
    r"""What a rule claims about one operation.

    Attributes:
        jacobian: by slot; a slot is an argument's name, with ``.k`` behind it for the k-th of a list.
        curvature: by unordered pair of slots; missing pairs are zero.
        curvature_change: by pair of slots, how far the second derivative may be from that at the centre; a pair
            that is missing may change by twice its curvature.
        offset: on the norm of the result at zero arguments; with it, an operation whose arguments have no known
            centre is bounded by :math:`\|f(0)\| + \sum_i J_i m_i` (mean-value inequality on the ball
            :math:`\|x_i\| \le m_i`, which contains zero).
        bound: on the norm of the result, where the rule knows better.
        peak: on its largest entry.
        spread: on the distance to the centre, where sharper than what follows from the Jacobians.
        rows: the same per row.
        orthogonal: the arguments end up in orthogonal parts of the result (concatenation).
        reduction: how many numbers are added up for one entry of the result, for the round-off of the centre
            (:func:`surefoot.operations.evaluation.roundoff` says why that is all it takes).
        curvature_along: the curvature contracted with a costate, by pair of slots.
        rows_along: the same for one row of the first slot, as an array over the rows: row n of the product of the
            contracted second derivative with a change of the second slot is at most entry n times the change of
            that slot, or of its row n if it is among the ``row_slots``.
        change_along: the same for how far the contracted second derivative over the enclosures of costate and
            arguments may be from that at their centres.
        entries_along: of an element-wise function, bounds of the entries of the diagonal contracted curvature.
        jacobian_change: how far each row of the Jacobian in a slot may be from that at the centre, where that is
            less than curvature times spread.
        lipschitz: on the norm of the derivative in each variable, where that is less than what follows.
        instead: slopes and curvatures as a function of other slots, in place of these where derivatives are
            followed by norms alone.
        reason: why something is infinite, and what to do about it.
    """

    jacobian: Mapping[Slot, Magnitude]
    curvature: Mapping[tuple[Slot, Slot], Magnitude] = field(default_factory=dict)
    curvature_change: Mapping[tuple[Slot, Slot], Magnitude] = field(default_factory=dict)
    offset: Magnitude | None = None
    bound: Magnitude | None = None
    peak: Magnitude | None = None
    spread: Magnitude | None = None
    rows: Magnitude | None = None
    orthogonal: bool = False
    reduction: int = 1
    curvature_along: Along | None = None
    rows_along: Along | None = None
    change_along: Along | None = None
    entries_along: Callable[[Enclosure], Tensor] | None = None
    jacobian_change: Callable[[], Mapping[Slot, Magnitude]] | None = None
    lipschitz: Magnitude | None = None
    instead: Bounds | None = None
    reason: str = ""


class Use:
    """One operation in a graph: its arguments by name and the shapes of its tensors, without numbers.

    Args:
        node: the operation.
        spec: shape and type of a tensor by its name, such as :meth:`Graph.spec`.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> sf.operations.Use(graph.nodes[0], graph.spec).shapes["weight"]
    (3, 4)
    """

    def __init__(self, node: Node, spec: Callable[[str], Spec | tuple[Spec, ...]]) -> None:
        self.node = node
        self._spec = spec

    def __getitem__(self, key: str) -> Any:
        """An argument by the name that the operation's signature gives it; ``None`` if absent."""
        return self.node.arguments.get(key)

    @cached_property
    def names(self) -> dict[Slot, str]:
        """The slots that hold tensors, with the names of the tensors."""
        slots: dict[Slot, str] = {}
        for key, argument in self.node.arguments.items():
            if isinstance(argument, Ref):
                slots[key] = argument.name
            elif isinstance(argument, list | tuple):
                slots.update({f"{key}.{k}": item.name for k, item in enumerate(argument) if isinstance(item, Ref)})
        return slots

    @cached_property
    def shapes(self) -> dict[Slot, tuple[int, ...]]:
        """The shapes of the tensors, by slot; of several results of one operation, that of the first."""
        specs = {slot: self._spec(name) for slot, name in self.names.items()}
        return {slot: (spec[0] if isinstance(spec, tuple) else spec).shape for slot, spec in specs.items()}

    @property
    def op(self) -> str:
        """The name of the operation."""
        return self.node.op

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) result."""
        return self.node.specs[0].shape

    @property
    def numel(self) -> int:
        """How many numbers the result holds."""
        return self.node.numel

    @property
    def label(self) -> str:
        """What to call the operation."""
        return label(self.node)

    def refuse(self, why: str) -> UnsupportedOperation:
        """The error for a use of the operation that is not covered."""
        return UnsupportedOperation(f"'{self.node.op}' in {describe(self.node.module)}: {why}")


class Call(Use):
    """One operation in a graph, with an enclosure of each of its tensors.

    ``call["weight"]`` is an :class:`Enclosure` for a tensor, a list of them for a list of tensors, otherwise the
    plain value (``None`` if absent).

    >>> from surefoot.enclosure import constant
    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> tensors = {name: constant(torch.ones(leaf.spec.shape), 1) for name, leaf in graph.leaves.items()}
    >>> print(sf.operations.Call(graph.nodes[0], tensors)["weight"].bound)
    3.465e+00
    """

    def __init__(self, node: Node, enclosures: Mapping[str, Enclosure]) -> None:
        super().__init__(node, lambda name: enclosures[name].spec)
        self._enclosures = enclosures

    def __getitem__(self, key: str) -> Any:
        return self._resolve(self.node.arguments.get(key))

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self._enclosures[argument.name]
        if isinstance(argument, list | tuple):
            return [self._resolve(item) for item in argument]
        return argument

    @cached_property
    def tensors(self) -> dict[Slot, Enclosure]:
        """The slots that hold tensors of any type, with their enclosures: ids, masks and whole numbers too."""
        return {slot: self._enclosures[name] for slot, name in self.names.items()}

    @cached_property
    def slots(self) -> dict[Slot, Enclosure]:
        """The slots that hold real-valued tensors, with their enclosures."""
        return {slot: e for slot, e in self.tensors.items() if _is_real(e)}

    @cached_property
    def varying(self) -> dict[Slot, Enclosure]:
        """The slots whose tensors vary over the domain."""
        return {slot: e for slot, e in self.slots.items() if not e.is_constant}

    @cached_property
    def inexact(self) -> dict[Slot, Enclosure]:
        """The slots whose tensors do not vary, but are off by an error."""
        return {slot: e for slot, e in self.slots.items() if e.is_inexact}


def label(node: Node) -> str:
    """What to call an operation: its own name, or for a fused scalar function that of what it computes."""
    if node.op == "surefoot.scalar":
        return node.name.rstrip("0123456789").rstrip("_")
    return node.op.rpartition(".")[2]


def _is_real(enclosure: Enclosure) -> bool:
    """Whether it holds real numbers; of several results, such as a maximum and its place, one is enough."""
    specs = enclosure.spec if isinstance(enclosure.spec, tuple) else (enclosure.spec,)
    return any(spec.dtype.is_floating_point for spec in specs)


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
