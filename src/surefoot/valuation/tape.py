"""The operations of an objective, run in double precision, with the sizes of values and costates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surefoot.calculus.prepare import expanded, without_casts
from surefoot.graph import Graph, Node, Role, Source
from surefoot.graph.nodes import double_by_default, in_double, widened
from surefoot.graph.structure import needed
from surefoot.operations.record import Form, record_of

Values = dict[str, Any]

_NEAR = 2.0**-20

_tapes: WeakKeyDictionary[Graph, Tape] = WeakKeyDictionary()


def tape_of(graph: Graph) -> Tape:
    """The tape of a graph; made once per graph."""
    if graph not in _tapes:
        _tapes[graph] = Tape(graph)
    return _tapes[graph]


class Tape:
    """The operations of a graph in the order in which they are run, those that no parameter enters apart.

    Operations stay as the model calls them: chains of scalar functions are not joined, since each of them rounds.

    Args:
        graph: of an objective.
    """

    def __init__(self, graph: Graph) -> None:
        plain = expanded(without_casts(graph))
        self.graph = replace(plain, nodes=tuple(needed(plain.nodes, plain.outputs)))
        varies = {name for name, role in self.graph.roles.items() if Role.PARAMETERS in role}
        self.varying = tuple(node for node in self.graph.nodes if node.name in varies)
        self.fixed = tuple(node for node in self.graph.nodes if node.name not in varies)
        self._wide = {node.name: widened(node, record_of(node).evaluate) for node in self.graph.nodes}
        self.output = self.graph.outputs[0]

    @cached_property
    def rounding(self) -> frozenset[str]:
        """The tensors that are computed, not only moved."""
        return frozenset(n.name for n in self.graph.nodes if record_of(n).form_of(n) is not Form.LAYOUT)

    @cached_property
    def boundary(self) -> tuple[str, ...]:
        """What no parameter enters, is computed with round-off, and is read by what varies."""
        read = {name for node in self.varying for name in node.inputs}
        rounded: set[str] = set()
        for node in self.fixed:
            if node.name in self.rounding or rounded.intersection(node.inputs):
                rounded.add(node.name)
        return tuple(n.name for n in self.fixed if n.name in read & rounded and _is_real(n))

    @cached_property
    def of_batch(self) -> frozenset[str]:
        """The names of inputs and targets, and of what is computed from them and from no parameter."""
        names = {leaf.name for leaf in self.graph.leaves.values() if leaf.source in (Source.INPUT, Source.TARGET)}
        for node in self.fixed:
            if names.intersection(node.inputs):
                names.add(node.name)
        return frozenset(names)

    @cached_property
    def moving(self) -> frozenset[str]:
        """The names of what a parameter enters."""
        return frozenset(node.name for node in self.varying) | {leaf.name for leaf in self.graph.parameters}

    def constants(self, leaves: Mapping[str, Tensor]) -> Constants:
        """The leaves that are not parameters, and what is computed from them alone."""
        names = {leaf.name for leaf in self.graph.parameters}
        values = {name: in_double(value.detach()) for name, value in leaves.items() if name not in names}
        with torch.no_grad(), double_by_default():
            for node in self.fixed:
                values[node.name] = self._compute(node, values)
        real = {name: value for name, value in values.items() if _is_measured(value)}
        return Constants(values, dict(zip(real, norms(real.values()), strict=True)))

    def _compute(self, node: Node, values: Values) -> Any:
        value = self._wide[node.name].run(values)
        return in_double(value) if isinstance(value, Tensor) else tuple(map(in_double, value))

    def run(
        self,
        parameters: Mapping[str, Tensor],
        constants: Constants,
        *,
        derivatives: bool,
        kinks: Mapping[str, tuple[str, tuple[float, ...]]] | None = None,
    ) -> Run:
        """The operations at these parameters, by name of the leaf.

        Args:
            parameters: their values.
            constants: see :meth:`constants`.
            derivatives: whether the gradient is wanted too.
            kinks: for scalar functions, their argument and where they have kinks: how near to one the argument
                comes is noted, and where that is very near the costate is kept.
        """
        values = dict(constants.values)
        run = Run(self, values, {}, constants.sizes, derivatives)
        kinks = kinks or {}
        with torch.set_grad_enabled(derivatives), double_by_default():
            for name, value in parameters.items():
                values[name] = run.parameters[name] = in_double(value.detach()).requires_grad_(derivatives)
            for name in self.boundary if derivatives else ():
                values[name] = run.watched(name, constants.values[name].detach().requires_grad_())
            for node in self.varying:
                value = self._compute(node, values)
                if derivatives and node.name in kinks:
                    run.note_kinks(node.name, *kinks[node.name])
                if derivatives and node.name in self.rounding and isinstance(value, Tensor):
                    value = run.watched(node.name, value)
                values[node.name] = value
        return run


@dataclass(frozen=True)
class Constants:
    """What no parameter enters: values and sizes, by name."""

    values: Values
    sizes: dict[str, float]


@dataclass
class Run:
    """One pass over a tape.

    Attributes:
        tape: the operations.
        values: of all tensors, by name.
        parameters: those that ask for gradients, by name of the leaf.
        constants: bounds on the norms of what no parameter enters.
        derivatives: whether costates can be computed.
        nearest: how near a scalar function's argument comes to a kink, by name of the function.
        costates: of functions whose argument is very near to a kink, once they are computed.
    """

    tape: Tape
    values: Values
    parameters: dict[str, Tensor]
    constants: dict[str, float]
    derivatives: bool
    nearest: dict[str, float] = field(default_factory=dict)
    costates: dict[str, Tensor] = field(default_factory=dict)
    _norms: dict[str, tuple[int, Tensor]] = field(default_factory=dict)  # held by hooks, which the run must not be

    @cached_property
    def value(self) -> float:
        """Of the output, which is one number."""
        return float(self.values[self.tape.output].detach())

    def note_kinks(self, name: str, argument: str, breaks: tuple[float, ...]) -> None:
        """How near the argument of a scalar function comes to its kinks."""
        x = self.values[argument].detach()
        self.nearest[name] = min(
            (float((x - point).abs().amin()) for point in breaks if x.numel()), default=math.inf
        )

    def watched(self, name: str, value: Tensor) -> Tensor:
        """The tensor itself; the norm of its costate is kept when that is computed."""
        if value.requires_grad:
            kept = self.costates if self.nearest.get(name, math.inf) < _NEAR else None
            value.register_hook(partial(_seen, self._norms, kept, name))
        return value

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """In each parameter, by name of the leaf."""
        output, wanted = self.values[self.tape.output], list(self.parameters.values())
        if not output.requires_grad:
            return {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        slopes = torch.autograd.grad(output.sum(), wanted, allow_unused=True, materialize_grads=True)
        return dict(zip(self.parameters, slopes, strict=True))

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bounds on the norms of values, parameters and constants."""
        tensors = {n: v for n, v in self.values.items() if n not in self.constants and _is_measured(v)}
        return self.constants | dict(zip(tensors, norms(tensors.values()), strict=True))

    @cached_property
    def costate_sizes(self) -> dict[str, float]:
        """Bounds on the norms of the costates as computed; those that did not come back are zero."""
        _ = self.gradient
        return dict(zip(self._norms, _bounds(list(self._norms.values())), strict=True))


def _seen(
    sizes: dict[str, tuple[int, Tensor]], kept: dict[str, Tensor] | None, name: str, costate: Tensor
) -> None:
    sizes[name] = costate.numel(), torch.linalg.vector_norm(costate)
    if kept is not None:
        kept[name] = costate


def norms(tensors: Iterable[Tensor]) -> list[float]:
    r"""Upper bounds on the Euclidean norms of real tensors.

    A sum of n squares and its root have a relative error of at most (n + 8) 2⁻⁵³; squares that underflow take at
    most :math:`\sqrt n\,2^{-500}` from the norm. Infinite where a square overflows or an entry is not a number.
    """
    return _bounds([(tensor.numel(), torch.linalg.vector_norm(tensor.detach())) for tensor in tensors])


def _bounds(found: list[tuple[int, Tensor]]) -> list[float]:
    if not found:
        return []
    sizes = torch.stack([size for _, size in found]).tolist()
    return [
        size * (1 + (count + 8) * 2.0**-52) + count**0.5 * 2.0**-500 if size < math.inf else math.inf
        for size, (count, _) in zip(sizes, found, strict=True)
    ]


def _is_measured(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_real(node: Node) -> bool:
    return all(spec.dtype.is_floating_point for spec in node.specs)


__all__ = ["Constants", "Run", "Tape", "norms", "tape_of"]
