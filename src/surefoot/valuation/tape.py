"""The operations of an objective, run in double or single precision, with the sizes of values and costates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from surefoot.calculus.prepare import as_scalar, expanded, with_choices, without_casts
from surefoot.enclosure import Spec
from surefoot.graph import Graph, Node, Role, Source
from surefoot.graph.nodes import Ref, double_by_default, in_double, widened
from surefoot.graph.structure import needed
from surefoot.operations.call import Use
from surefoot.operations.normalisation import BATCH
from surefoot.operations.record import Form, record_of
from surefoot.torch_private import FORMULAS
from surefoot.valuation.entropy import ENTROPY
from surefoot.valuation.joints import Joints, Links
from surefoot.valuation.kernels import formula_of
from surefoot.valuation.kinks import bends_by_pieces, pieces, steepness
from surefoot.valuation.normalising import Recipe, recipe_of
from surefoot.valuation.passes import (
    Constants,
    Plan,
    Run,
    Values,
    exact_call,
    is_measured,
    norms,
    norms_of_samples,
)
from surefoot.valuation.samples import samples_of, shifts_of
from surefoot.valuation.single import fits, in_single, is_narrow, is_permuted, lost_behind, pull_of

PULL = 2.0**-30
_GENTLE = 1.3  # slopes up to which norms are not measured on both sides
_LARGE = 2.0**10  # norms of fixed tensors from which on sums with them are looked at entry by entry
_tapes: WeakKeyDictionary[Graph, dict[bool, Tape]] = WeakKeyDictionary()


def tape_of(graph: Graph, *, single: bool = False) -> Tape:
    """The tape of a graph; made once per graph and precision."""
    known = _tapes.setdefault(graph, {})
    if single not in known:
        known[single] = Tape(graph, single=single)
    return known[single]


class Tape:
    """The operations of a graph in the order in which they are run, those that no parameter enters apart.

    Operations stay as the model calls them: chains of scalar functions are not joined, since each of them rounds,
    but for what a comparison chooses.

    Args:
        graph: of an objective.
        single: whether to run in single precision what can be (:mod:`surefoot.valuation.single`).
    """

    def __init__(self, graph: Graph, *, single: bool = False) -> None:
        plain = with_choices(expanded(without_casts(graph)))
        self.graph = replace(plain, nodes=tuple(needed(plain.nodes, plain.outputs)))
        varies = {name for name, role in self.graph.roles.items() if Role.PARAMETERS in role}
        self.varying = tuple(node for node in self.graph.nodes if node.name in varies)
        self.fixed = tuple(node for node in self.graph.nodes if node.name not in varies)
        self.output, self.single = self.graph.outputs[0], single
        inner = [node for node in self.varying if single and node.name != self.output]
        self.narrow = frozenset(node.name for node in inner if is_narrow(node, self.graph))
        self._kernels = {node.name: _prepared(widened(node, formula_of(node))) for node in self.graph.nodes}

    @cached_property
    def _convolves(self) -> bool:
        return any("conv" in node.op and node.name in self.narrow for node in self.varying)

    @cached_property
    def fits(self) -> bool:
        """Whether a pass in single precision may say something: numbers are of it, and no products of tensors that
        vary multiply errors.
        """
        return self.output in self.moving and not self.matched and fits(self.graph)

    @cached_property
    def rounding(self) -> frozenset[str]:
        """The tensors that are computed from others, not only moved.

        What is made of numbers alone (``arange``, ``linspace``) is what it is computed as, in certificates too.
        """
        found = ((node.name, record_of(node), node) for node in self.graph.nodes if node.inputs)
        return frozenset(
            name for name, record, n in found if record.form_of(n) is not Form.LAYOUT or record.rounds_at(n)
        )

    @cached_property
    def real(self) -> frozenset[str]:
        """The tensors of real numbers, or tuples with one, among what is computed."""
        nodes = (node for node in self.graph.nodes if any(spec.dtype.is_floating_point for spec in node.specs))
        return frozenset(node.name for node in nodes)

    @cached_property
    def added(self) -> frozenset[str]:
        """The parameters on whose size no slope depends: their readers only add them to what they compute."""
        bound: set[str] = set()
        for node in self.graph.nodes:
            record = record_of(node)
            form = record.form_of(node)
            if form in (Form.PRODUCT, Form.LINEAR):
                names = Use(node, self.graph.spec).names
                bound.update(names[slot] for slot in (*record.factors, *record.fixed) if slot in names)
            elif form is not Form.LAYOUT:
                bound.update(node.inputs)
        return frozenset(leaf.name for leaf in self.graph.parameters) - bound

    @cached_property
    def boundary(self) -> tuple[str, ...]:
        """What no parameter enters, is computed with round-off, and is read by what varies."""
        read = {name for node in self.varying for name in node.inputs}
        rounded: set[str] = set()
        for node in self.fixed:
            if node.name in self.rounding or rounded.intersection(node.inputs):
                rounded.add(node.name)
        return tuple(n.name for n in self.fixed if n.name in read & rounded and n.is_real)

    @cached_property
    def of_batch(self) -> frozenset[str]:
        """The names of inputs and targets, and of what is computed from them and from no parameter."""
        names = {leaf.name for leaf in self.graph.leaves.values() if leaf.source in (Source.INPUT, Source.TARGET)}
        for node in self.fixed:
            if names.intersection(node.inputs):
                names.add(node.name)
        return frozenset(names)

    @cached_property
    def samples(self) -> int:
        """How many samples stay apart, where errors are carried along for each: in attention, whose products of
        tensors that vary multiply errors, and in single precision. 0 elsewhere.
        """
        return samples_of(self.graph, self.varying) if self.matched or self.single else 0

    @cached_property
    def shifts(self) -> frozenset[str]:
        """The parameters that are added to all samples alike, where these are looked at."""
        return shifts_of(self.graph) if self.samples else frozenset()

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
        real = {name: value for name, value in values.items() if is_measured(value)}
        inputs = [leaf.name for leaf in self.graph.inputs if leaf.name in real] if self.samples else []
        each = {name: norms_of_samples(real[name], self.samples) for name in inputs}
        for node in self.fixed:
            if record_of(node).in_order and node.inputs[0] in each:
                each[node.name] = each[node.inputs[0]]
        sizes = dict(zip(real, norms(real.values()), strict=True))
        if self.single:
            return Constants({name: in_single(value) for name, value in values.items()}, sizes, each)
        masked = any(sizes[name] > _LARGE for fixed in self.masks.values() for name in fixed)
        return Constants(values, sizes, each, self._exact(values) if masked else frozenset())

    def _exact(self, values: Values) -> frozenset[str]:
        """The names of what no parameter enters and is computed without any error, as masks of 0 and -10⁹ are."""
        found = values.keys() - {node.name for node in self.fixed}
        for node in self.fixed:
            if found.issuperset(node.inputs) and isinstance(values[node.name], Tensor):
                stated = record_of(node).entry_error
                if not record_of(node).rounds_at(node) or (
                    stated is not None and not stated(exact_call(node, values), values[node.name]).any()
                ):
                    found.add(node.name)
        return frozenset(found)

    def _compute(self, node: Node, values: Values) -> Any:
        kernel = self._kernels[node.name]
        if node.name in self.narrow:
            return kernel(values)
        value = kernel(self._in_double(node, values) if self.single else values)
        value = in_double(value) if isinstance(value, Tensor) else tuple(map(in_double, value))
        return self._stored(node, value) if self.single else value

    def _in_double(self, node: Node, values: Values) -> Values:
        """What an operation reads, for one that is run in double precision."""
        if not self.single:
            return values
        read = ((name, values[name]) for name in node.inputs)
        return {name: in_double(v) if isinstance(v, Tensor) else tuple(map(in_double, v)) for name, v in read}

    def _stored(self, node: Node, value: Any) -> Any:
        """The result of an operation, rounded where others read it in single precision."""
        return in_single(value) if self.single and node.name in self.moving and node.name != self.output else value

    def run(
        self,
        parameters: Mapping[str, Tensor],
        constants: Constants,
        *,
        derivatives: bool,
        plan: Plan | None = None,
        light: bool = False,
        rough: bool = False,
        joints: Joints | None = None,
    ) -> Run:
        """The operations at these parameters, by name of the leaf.

        Args:
            parameters: their values.
            constants: see :meth:`constants`.
            derivatives: whether the gradient is wanted too.
            plan: what to note and to keep; everything without one.
            light: whether costates and kinks are not looked at, which errors by forward mode do not need.
            rough: whether samples are not kept apart: sizes and errors are those of all of them together.
            joints: states whose derivatives in each other are computed too (:mod:`surefoot.valuation.joints`).
        """
        values = dict(constants.values)
        reverse = derivatives and not light
        watch = self.rounding if plan is None else plan.watch
        run = Run(self.output, self.moving, values, {}, constants, derivatives, plan is None, light)
        run.samples, run.rough = 0 if rough else self.samples, rough and self.samples > 0
        run.shifts, run.aliases, run.recipes = self.shifts, self.aliases, self.recipes
        if self._normalises_data:
            run.statistics = None
        if joints is not None:
            run.links, watch = Links(joints), watch.union(joints.names)
        links = run.links
        keep = set() if plan is None else set(plan.keep)
        default = nullcontext() if self._is_real else double_by_default()
        wide = in_single if self.single else in_double
        exactly: Any = torch.backends.nnpack.flags(enabled=False) if self._convolves else nullcontext()
        quietly: Any = np.errstate(all="ignore") if self._normalises else nullcontext()
        with torch.set_grad_enabled(derivatives), default, exactly, quietly:
            for name, given in parameters.items():
                values[name] = run.parameters[name] = wide(given.detach())
            run.measure_parameters({} if plan is None else plan.weights)
            for leaf in run.parameters.values() if derivatives else ():
                leaf.requires_grad_()
            for name in self.boundary if reverse else ():
                values[name] = run.watched(name, constants.values[name].detach().requires_grad_())
            value: Any
            for node, name, special, measured, finished in self._order:
                value = None
                if special:
                    value = run.by_formula(node, self._in_double(node, values))
                    value = None if value is None else self._stored(node, value)
                if value is None:
                    value = self._compute(node, values)
                    keep.update((name, *node.inputs) if special else ())
                if measured and name not in run.given:
                    run.measure(name, value)
                if name in self.matched:
                    run.measure_matrices(self.matched[name])
                if reverse:
                    if not self.single and name in self.kinks:
                        run.note_kinks(name, self.asked[name].inputs[0], self.kinks[name])
                    if name in watch and isinstance(value, Tensor):
                        value = run.watched(name, value)
                    if any(constants.sizes[mask] > _LARGE for mask in self.masks.get(name, ())):
                        run.weigh(node, values, value)
                if joints is not None and links is not None and name in joints.before:
                    value = links.join(name, value)
                values[name] = value
                for last in finished:
                    if last not in keep and (plan is not None or last in self.spare):
                        del values[last]
        return run

    @cached_property
    def _order(self) -> list[tuple[Node, str, bool, bool, tuple[str, ...]]]:
        """What varies, by name, whether it may have a formula, whether its norm is measured, and what else that
        varies nothing reads after it.
        """
        names = {node.name for node in self.varying}
        return [
            (n, n.name, n.name in self.special, n.name not in self.aliases,
             tuple(names.intersection(self.graph.finished[n.name])))
            for n in self.varying
        ]  # fmt: skip

    @cached_property
    def _normalises(self) -> bool:
        """Whether formulas are tried on numbers that may be out of their range, or none."""
        return any(recipe is not None for recipe in self.recipes.values())

    @cached_property
    def _normalises_data(self) -> bool:
        return any(node.op == BATCH for node in self.fixed)

    @cached_property
    def aliases(self) -> dict[str, tuple[str, float]]:
        """Where the norm of a result is at most a factor times that of an argument, its name and the factor: what
        only moves numbers, one of several results, and scalar functions (:attr:`derived`).
        """
        found: dict[str, tuple[str, float]] = {}
        for node in (n for n in self.varying if n.name in self.real):  # in order, as one may rest on another
            part = node.op == "getitem" and isinstance(self.graph.spec(node.inputs[0]), tuple)
            if is_permuted(node) or part:
                found[node.name] = node.inputs[0], 1.0
            elif node.name in self.derived:
                found[node.name] = self.derived[node.name]
        return found

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
    def masks(self) -> dict[str, tuple[str, ...]]:
        """Of sums that vary, in double precision, the tensors of real numbers among the arguments that do not."""
        sums = [
            node for node in self.varying
            if record_of(node).entry_error is not None and record_of(node).form_of(node) is Form.LINEAR
        ]  # fmt: skip
        found = {node.name: tuple(name for name in node.inputs if name not in self.moving) for node in sums}
        return {name: fixed for name, fixed in found.items() if fixed and not self.single}

    @cached_property
    def _is_real(self) -> bool:
        """Whether all that varies is computed from real tensors: then the type of plain numbers is no matter."""
        specs = (self.graph.spec(name) for node in self.varying if node.op != ENTROPY for name in node.inputs)
        return all(isinstance(spec, Spec) and spec.dtype.is_floating_point for spec in specs)

    @cached_property
    def pulls(self) -> dict[str, float]:
        """The round-off of pulling back, relative to the slope and the costate: see the propagation of errors."""
        if self.single:
            return {node.name: pull_of(node, self.graph) for node in self.varying}
        return {node.name: max(PULL, 8 * 2.0**-53 * (node.numel + 16)) for node in self.varying}

    @cached_property
    def lost(self) -> dict[str, float]:
        """What underflows in pulling back, per argument."""
        if not self.single:
            return dict.fromkeys((node.name for node in self.varying), 0.0)
        return {node.name: lost_behind(node, self.graph) for node in self.varying}

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
                    found[node.name] = (
                        asked.inputs[0],
                        steepest * (1 + (2.0**-18 if self.single else 2.0**-40)),
                    )  # and the round-off of the kernel
        return found

    @cached_property
    def spare(self) -> frozenset[str]:
        """The results of products of which no rule needs more than the norm, even where nothing is known yet: they
        have no stated error, and only such functions read them.
        """
        readers: dict[str, set[str]] = {}
        for node in self.graph.nodes:
            for name in node.inputs:
                readers.setdefault(name, set()).add(node.name)
        products = {
            node.name for node in self.varying
            if record_of(node).form_of(node) is Form.PRODUCT and record_of(node).error is None
        }  # fmt: skip
        plain = {name for name in self.derived if bends_by_pieces(self.asked[name].args[1])}
        return frozenset(name for name in products if plain >= readers.get(name, {""}))

    @cached_property
    def matched(self) -> dict[str, tuple[str, str]]:
        """The factors of products that both vary and meet matrix by matrix."""
        found = {}
        for node in self.varying:
            pair = tuple(node.inputs)
            if record_of(node).matched and len(pair) == 2 and self.moving.issuperset(pair):
                first, second = (self.graph.spec(name) for name in pair)
                assert isinstance(first, Spec)
                assert isinstance(second, Spec)
                if len(first.shape) > 2 and first.shape[:-2] == second.shape[:-2]:
                    found[node.name] = pair
        return found

    def between(self, arguments: frozenset[str], name: str) -> tuple[Node, ...]:
        """The operations by which a tensor is computed from these alone, in order; none if it needs others."""
        wanted, found = {name}, []
        for node in reversed(self.varying):
            if node.name in wanted:
                found.append(node)
                wanted.remove(node.name)
                wanted.update(set(node.inputs) - arguments)
        return tuple(reversed(found)) if not wanted else ()

    @cached_property
    def special(self) -> frozenset[str]:
        """The normalisations and losses that may have formulas of their own."""
        return frozenset(self.recipes)

    @cached_property
    def recipes(self) -> dict[str, Recipe | None]:
        """How these normalisations are computed, if they have formulas."""
        chosen = (node for node in self.varying if record_of(node).epsilon is not None or node.op == ENTROPY)
        return {node.name: recipe_of(node) for node in chosen}


def _is_plain(argument: Any) -> bool:
    """Whether an argument is no tensor and holds none."""
    if isinstance(argument, list | tuple):
        return all(isinstance(part, int | float) for part in argument)
    return not isinstance(argument, Ref | dict | slice)


def _prepared(node: Node) -> Callable[[Values], Any]:
    """What computes a node from values by name, without a look at its arguments each time."""
    names = [(k, argument.name) for k, argument in enumerate(node.args) if isinstance(argument, Ref)]
    rest = (*(argument for argument in node.args if not isinstance(argument, Ref)), *node.kwargs.values())
    if not all(map(_is_plain, rest)) or (node.kwargs and node.op in FORMULAS):
        return node.run
    template, target, options = list(node.args), node.target, node.kwargs

    def run(values: Values) -> Any:
        args = template.copy()
        for k, name in names:
            args[k] = values[name]
        return target(*args, **options)

    return run
