"""The operations of an objective, run in double precision, with the sizes of values and costates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surefoot.calculus.prepare import as_scalar, expanded, without_casts
from surefoot.enclosure import Spec, measure
from surefoot.graph import Graph, Node, Role, Source
from surefoot.graph.nodes import Ref, double_by_default, in_double, widened
from surefoot.graph.structure import needed
from surefoot.operations.record import Form, record_of
from surefoot.torch_private import differences_together, norms_together
from surefoot.valuation.entropy import entropy
from surefoot.valuation.kernels import formula_of
from surefoot.valuation.kinks import pieces, steepness
from surefoot.valuation.normalising import Normalised, normalised

Values = dict[str, Any]

PULL = 2.0**-30
NEAR = 2.0**-20  # to a kink, so that costates are kept entry by entry
_SAME = frozenset(
    f"aten.{name}"
    for name in ("view", "reshape", "_unsafe_view", "transpose", "t", "permute", "unsqueeze", "squeeze", "flatten",
                 "unflatten", "alias", "clone", "contiguous", "movedim", "detach")
)  # fmt: skip

_GENTLE = 1.3  # slopes up to which norms are not measured on both sides
_ENTROPY = "surefoot.cross_entropy"
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
        self._wide = {node.name: _prepared(widened(node, formula_of(node))) for node in self.graph.nodes}
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
        value = self._wide[node.name](values)
        if isinstance(value, Tensor):
            return value if value.dtype is torch.float64 else in_double(value)
        return tuple(map(in_double, value))

    @cached_property
    def _last(self) -> dict[str, list[str]]:
        """What varies and is read for the last time, by node."""
        last = {name: node.name for node in self.varying for name in node.inputs}
        finished: dict[str, list[str]] = {}
        names = {node.name for node in self.varying} - set(self.graph.outputs)
        for name, reader in last.items():
            if name in names:
                finished.setdefault(reader, []).append(name)
        return finished

    def run(
        self,
        parameters: Mapping[str, Tensor],
        constants: Constants,
        *,
        derivatives: bool,
        plan: Plan | None = None,
    ) -> Run:
        """The operations at these parameters, by name of the leaf.

        Args:
            parameters: their values.
            constants: see :meth:`constants`.
            derivatives: whether the gradient is wanted too.
            plan: what to note and to keep; everything without one.
        """
        values = dict(constants.values)
        watch = self.rounding if plan is None else plan.watch
        run = Run(self, values, {}, constants, derivatives, plan is None)
        keep = set() if plan is None else set(plan.keep)
        default = nullcontext() if self._is_real else double_by_default()
        with torch.set_grad_enabled(derivatives), default:
            for name, given in parameters.items():
                values[name] = run.parameters[name] = in_double(given.detach()).requires_grad_(derivatives)
            run.measure_parameters({} if plan is None else plan.weights)
            for name in self.boundary if derivatives else ():
                values[name] = run.watched(name, constants.values[name].detach().requires_grad_())
            for node in self.varying:
                value: Any = run.by_formula(node) if node.name in self.special else None
                if value is None:
                    value = self._compute(node, values)
                    keep.update((node.name, *node.inputs) if node.name in self.special else ())
                if node.op in _SAME:
                    run.aliases[node.name] = node.inputs[0], 1.0
                elif node.name in self.derived:
                    run.aliases[node.name] = self.derived[node.name]
                else:
                    run.measure(node.name, value)
                if node.name in self.matched:
                    run.measure_matrices(self.matched[node.name])
                if derivatives and node.name in self.kinks:
                    run.note_kinks(node.name, node.inputs[0], self.kinks[node.name])
                if derivatives and node.name in watch and isinstance(value, Tensor):
                    value = run.watched(node.name, value)
                values[node.name] = value
                for name in self._last.get(node.name, ()) if plan is not None else ():
                    if name not in keep:
                        del values[name]
        return run

    @cached_property
    def asked(self) -> dict[str, Node]:
        """All operations, those that are scalar functions of one tensor as such."""
        return {node.name: as_scalar(self.graph, node) for node in self.graph.nodes}

    @cached_property
    def kinks(self) -> dict[str, tuple[float, ...]]:
        """Where scalar functions have kinks, by name."""
        scalars = {name: node.args[1] for name, node in self.asked.items() if node.op == "surefoot.scalar"}
        return {name: pieces(function)[0] for name, function in scalars.items() if pieces(function)[0]}

    @cached_property
    def _is_real(self) -> bool:
        """Whether all that varies is computed from real tensors: then the type of plain numbers is no matter."""
        specs = (self.graph.spec(name) for node in self.varying if node.op != _ENTROPY for name in node.inputs)
        return all(isinstance(spec, Spec) and spec.dtype.is_floating_point for spec in specs)

    @cached_property
    def pulls(self) -> dict[str, float]:
        """The round-off of pulling back, relative to the slope and the costate: see the propagation of errors."""
        return {node.name: max(PULL, 8 * 2.0**-53 * (node.numel + 16)) for node in self.varying}

    @cached_property
    def reached(self) -> frozenset[str]:
        """The names of what has a costate that matters."""
        return frozenset(node.name for node in self.varying) | frozenset(self.boundary)

    @cached_property
    def derived(self) -> dict[str, tuple[str, float]]:
        """Scalar functions that vanish at zero and have a moderate slope, with their argument and that slope: the
        norm of the result is at most the slope times that of the argument, and is not measured.
        """
        found = {}
        for node in self.varying:
            asked = self.asked[node.name]
            if asked.op == "surefoot.scalar":
                steepest, at_zero = steepness(asked.args[1])
                if at_zero == 0 and steepest <= _GENTLE:
                    found[node.name] = node.inputs[0], steepest
        return found

    @cached_property
    def matched(self) -> dict[str, tuple[str, str]]:
        """The factors of products that both vary and meet matrix by matrix."""
        found = {}
        for node in self.varying:
            pair = tuple(node.inputs)
            if node.op in ("aten.matmul", "aten.bmm") and len(pair) == 2 and self.moving.issuperset(pair):
                first, second = (self.graph.spec(name) for name in pair)
                assert isinstance(first, Spec)
                assert isinstance(second, Spec)
                if len(first.shape) > 2 and first.shape[:-2] == second.shape[:-2]:
                    found[node.name] = pair
        return found

    @cached_property
    def special(self) -> frozenset[str]:
        """The normalisations and losses that may have formulas of their own."""
        chosen = (node for node in self.varying if record_of(node).epsilon is not None or node.op == _ENTROPY)
        return frozenset(node.name for node in chosen)


@dataclass(frozen=True)
class Plan:
    """What a pass is asked to note and to keep.

    Attributes:
        keep: the names of what is read after the pass; other values are freed after their last reader.
        watch: the names of tensors whose costates are measured.
        weights: parameters whose norms are known, by name of the leaf, with these.
    """

    keep: frozenset[str]
    watch: frozenset[str]
    weights: Mapping[str, tuple[Tensor, float]]


@dataclass(frozen=True)
class Constants:
    """What no parameter enters: values and sizes, by name."""

    values: Values
    sizes: dict[str, float]


@dataclass(frozen=True)
class Near:
    """The entries of an argument that are very near to a kink.

    Attributes:
        nearest: the distance of the nearest of all.
        places: their positions, flat.
        distances: of each of them.
        costates: at these places in the result, once they are computed.
    """

    nearest: float
    places: Tensor | None = None
    distances: Tensor | None = None
    costates: list[Tensor] = field(default_factory=list)


@dataclass
class Run:
    """One pass over a tape.

    Attributes:
        tape: the operations.
        values: of the tensors that were kept, by name.
        parameters: those that ask for gradients, by name of the leaf.
        constants: what no parameter enters.
        derivatives: whether costates can be computed.
        whole: whether all values were kept.
        near: how near a scalar function's argument comes to a kink, by name of the function.
        facts: of normalisations.
        stated: the errors of losses.
        watching: the names of tensors whose costates are measured; none comes back where that is zero.
        aliases: where the norm of a tensor is at most a factor times that of another, its name and the factor.
    """

    tape: Tape
    values: Values
    parameters: dict[str, Tensor]
    constants: Constants
    derivatives: bool
    whole: bool
    near: dict[str, Near] = field(default_factory=dict)
    facts: dict[str, Normalised] = field(default_factory=dict)
    stated: dict[str, float] = field(default_factory=dict)
    watching: set[str] = field(default_factory=set)
    aliases: dict[str, tuple[str, float]] = field(default_factory=dict)
    _sizes: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _distances: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _known: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    _matrices: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _norms: dict[str, tuple[int, Tensor]] = field(default_factory=dict)  # held by hooks, which the run must not be

    @cached_property
    def value(self) -> float:
        """Of the output, which is one number."""
        return float(self.values[self.tape.output].detach())

    def by_formula(self, node: Node) -> Tensor | None:
        """The value of an operation by a formula whose error is proved and noted; ``None`` without one."""
        if node.op == _ENTROPY:
            loss = entropy(node, self.values)
            if loss is None:
                return None
            self.stated[node.name] = loss[1]
            return loss[0]
        special = normalised(node, self.values)
        if special is None:
            return None
        self.facts[node.name] = special[1]
        return special[0]

    def measure_parameters(self, known: Mapping[str, tuple[Tensor, float]]) -> None:
        """Note the norms of the parameters, or how far they are from tensors of which that is known."""
        here = [value.detach() for value in self.parameters.values()]
        names = list(self.parameters)
        if known:
            apart = norms_together(differences_together(here, [known[name][0] for name in names]))
            self._distances = {n: (t.numel(), d) for n, t, d in zip(names, here, apart, strict=True)}
            self._known = known
        else:
            sizes = norms_together(here)
            self._sizes |= {n: (t.numel(), size) for n, t, size in zip(names, here, sizes, strict=True)}

    def measure(self, name: str, value: Any) -> None:
        """Note the norm of a tensor, or of several together."""
        real = _detached(value)
        if real:
            sizes = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in real]
            size = sizes[0] if len(sizes) == 1 else torch.linalg.vector_norm(torch.stack(sizes))
            self._sizes[name] = sum(part.numel() for part in real), size

    def measure_matrices(self, names: tuple[str, str]) -> None:
        """Note the largest norm of the matrices that the last two dimensions of a tensor make."""
        for name in names:
            value = self.values[name].detach()
            if name not in self._matrices and value.numel():
                sizes = torch.linalg.vector_norm(value, dim=(-2, -1))
                self._matrices[name] = value.shape[-2] * value.shape[-1], sizes.amax()

    def note_kinks(self, name: str, argument: str, breaks: tuple[float, ...]) -> None:
        """How near the argument of a scalar function comes to its kinks."""
        x = self.values[argument].detach().reshape(-1)
        if not x.numel():
            self.near[name] = Near(math.inf)
            return
        distances = [x.abs() if point == 0 else (x - point).abs() for point in breaks]
        away = distances[0] if len(distances) == 1 else torch.stack(distances).amin(dim=0)
        nearest = float(away.amin())
        if nearest < NEAR:
            places = (away < NEAR).nonzero().reshape(-1)
            self.near[name] = Near(nearest, places, away[places])
        else:
            self.near[name] = Near(nearest)

    def watched(self, name: str, value: Tensor) -> Tensor:
        """The tensor itself; the norm of its costate is kept when that is computed."""
        self.watching.add(name)
        if value.requires_grad:
            value.register_hook(partial(_seen, self._norms, self.near.get(name), name))
        return value

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """In each parameter, by name of the leaf."""
        output, wanted = self.values[self.tape.output], list(self.parameters.values())
        if not output.requires_grad:
            return {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        slopes = torch.autograd.grad(
            output if output.dim() == 0 else output.sum(), wanted, allow_unused=True, materialize_grads=True
        )
        return dict(zip(self.parameters, slopes, strict=True))

    def is_from(self, plan: Plan) -> bool:
        """Whether distances are measured from the weights of a plan."""
        return bool(plan.weights) and self._known is plan.weights

    @cached_property
    def distances(self) -> dict[str, float]:
        """Bounds on how far parameters are from those that are known."""
        return dict(zip(self._distances, _bounds(list(self._distances.values())), strict=True))

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bounds on the norms of values, parameters and constants."""
        found = self.constants.sizes | dict(zip(self._sizes, _bounds(list(self._sizes.values())), strict=True))
        for name, distance in self.distances.items():
            found[name] = (self._known[name][1] + distance) * (1 + 2.0**-50)
        for name, size in found.items():
            if size == math.inf and name in self.values:  # squares overflow, or it is not finite
                found[name] = float(measure(_detached(self.values[name]))[0])
        for name, (other, factor) in self.aliases.items():
            found[name] = found[other] * factor
        return found

    @cached_property
    def matrices(self) -> dict[str, float]:
        """Bounds on the norms of all matrices of a tensor, of factors that meet matrix by matrix."""
        return dict(zip(self._matrices, _bounds(list(self._matrices.values())), strict=True))

    @cached_property
    def costate_sizes(self) -> dict[str, float]:
        """Bounds on the norms of the costates as computed, where they were measured and did come back."""
        _ = self.gradient
        return dict(zip(self._norms, _bounds(list(self._norms.values())), strict=True))


def _seen(sizes: dict[str, tuple[int, Tensor]], near: Near | None, name: str, costate: Tensor) -> None:
    sizes[name] = costate.numel(), torch.linalg.vector_norm(costate)
    if near is not None and near.places is not None:
        near.costates.append(costate.reshape(-1)[near.places])


def norms(tensors: Iterable[Tensor]) -> list[float]:
    r"""Upper bounds on the Euclidean norms of real tensors.

    A sum of n squares and its root have a relative error of at most (n + 8) 2⁻⁵³; squares that underflow take at
    most :math:`\sqrt n\,2^{-500}` from the norm. Infinite where a square overflows or an entry is not a number.
    """
    given = [tensor.detach() for tensor in tensors]
    return _bounds([(t.numel(), size) for t, size in zip(given, norms_together(given), strict=True)])


def _bounds(found: list[tuple[int, Tensor]]) -> list[float]:
    if not found:
        return []
    sizes = torch.stack([size for _, size in found]).tolist()
    return [
        size * (1 + (count + 8) * 2.0**-52) + count**0.5 * 2.0**-500 if size < math.inf else math.inf
        for size, (count, _) in zip(sizes, found, strict=True)
    ]


def _prepared(node: Node) -> Callable[[Values], Any]:
    """What computes a node from values by name, without a look at its arguments each time."""
    if node.kwargs or any(isinstance(argument, list | tuple) for argument in node.args):
        return node.run
    names = [(k, argument.name) for k, argument in enumerate(node.args) if isinstance(argument, Ref)]
    template, target = list(node.args), node.target

    def run(values: Values) -> Any:
        args = template.copy()
        for k, name in names:
            args[k] = values[name]
        return target(*args)

    return run


def _detached(value: Any) -> list[Tensor]:
    parts = [value] if isinstance(value, Tensor) else value
    return [part.detach() for part in parts if part.is_floating_point()]


def _is_measured(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_real(node: Node) -> bool:
    return all(spec.dtype.is_floating_point for spec in node.specs)


__all__ = ["NEAR", "PULL", "Constants", "Plan", "Run", "Tape", "norms", "tape_of"]
