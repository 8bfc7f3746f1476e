"""The leaves of a graph, their values and their enclosures over a domain; an objective as the last operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.domains import Domain, DomainError, Region
from surefoot.enclosure import Enclosure, constant, measure, unknown_constant
from surefoot.errors import ObjectiveError
from surefoot.graph import Graph, Leaf, Source
from surefoot.graph.compose import Naming, compose
from surefoot.graph.nodes import Node, Ref, Spec, fresh
from surefoot.graph.structure import assemble
from surefoot.magnitude import Magnitude
from surefoot.operations.captured import capture
from surefoot.operations.written_out import steps
from surefoot.program.checks import as_inputs


@runtime_checkable
class Attachable(Protocol):
    """An objective that is one operation of outputs, targets if it takes any, and options, and refuses misfits."""

    operation: str
    function: Any
    options: Any
    takes_targets: bool
    check: Callable[[Spec, Spec | None], None]
    fit: Callable[[Spec, Tensor], None]
    chosen: Callable[[], Tensor]
    arranged: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# The graphs of a model with each loss that was attached to it, and the names of their targets: an optimizer
# composes once.
_composed_with: WeakKeyDictionary[Graph, dict[Hashable, tuple[Graph, str]]] = WeakKeyDictionary()


def attach(graph: Graph, objective: nn.Module) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of the objective of a model, and the values of its targets by leaf name.

    The objective is a loss bound to targets, or any module that maps the outputs to one number.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> whole, targets = attach(graph, sf.Square(torch.zeros(5, 3)))
    >>> [node.op for node in whole.nodes], list(targets)
    (['aten.linear', 'surefoot.square'], ['targets'])
    """
    outputs = graph.spec(graph.outputs[0])
    if len(graph.outputs) != 1 or not isinstance(outputs, Spec):
        raise ObjectiveError(
            f"an objective reads one tensor, the model returns {len(graph.outputs)}: return only what is compared"
        )
    if not getattr(objective, "operation", "") or not isinstance(objective, Attachable):
        return _composed_with_module(graph, outputs, objective), {}
    if not objective.takes_targets:
        objective.check(outputs, None)
        return _composed(graph, outputs, objective, None)[0], {}
    targets = objective.chosen()
    objective.fit(outputs, targets)
    composed, name = _composed(graph, outputs, objective, Spec(tuple(targets.shape), targets.dtype))
    return composed, {name: targets}


def _composed(graph: Graph, outputs: Spec, objective: Attachable, targets: Spec | None) -> tuple[Graph, str]:
    """The loss as one more node."""
    kept = _composed_with.setdefault(graph, {})
    key = objective.operation, targets, tuple(objective.options.items())
    if key not in kept:
        taken = {*graph.leaves, *graph.by_name}
        leaves, read = dict(graph.leaves), [graph.outputs[0]]
        if targets is not None:
            leaf = Leaf(fresh("targets", taken), "targets", Source.TARGET, targets)
            leaves[leaf.name] = leaf
            read.append(leaf.name)
        name, args = fresh("loss", taken), tuple(map(Ref, read))
        before: tuple[Node, ...] = ()
        if targets is not None and _is_arranged(objective, outputs, targets):
            before, args = steps(
                objective.arranged, dict(zip(read, (outputs, targets), strict=True)), name, "objective"
            )
        node = Node(
            name=name,
            op=objective.operation,
            target=type(objective).function,
            args=args,
            kwargs=objective.options,
            module="objective",
            spec=Spec((), outputs.dtype),
        )
        composed = assemble(leaves, [*graph.nodes, *before, node], (node.name,), graph.held, graph.aliases)
        kept[key] = composed, read[-1]
    return kept[key]


def _is_arranged(objective: Attachable, outputs: Spec, targets: Spec) -> bool:
    """Whether the loss reads outputs and targets in other shapes."""
    given = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in (outputs, targets)]
    return any(after is not before for after, before in zip(objective.arranged(*given), given, strict=True))


def _composed_with_module(graph: Graph, outputs: Spec, objective: nn.Module) -> Graph:
    """Any module after the model; its own parameters and buffers do not vary."""
    device = next((value.device for value in graph.held.values()), torch.device("cpu"))
    second = capture(objective, torch.zeros(outputs.shape, dtype=outputs.dtype, device=device))
    if len(second.outputs) != 1 or second.numel(second.outputs[0]) != 1:
        raise ObjectiveError("an objective returns one number")
    values = {name: value.detach() for name, value in objective.named_parameters()}
    kept = _composed_with.setdefault(graph, {})
    key = second, tuple(value.data_ptr() for value in values.values())  # held below, so no address is used again
    if key not in kept:
        leaves = {
            name: replace(leaf, source=Source.CONSTANT) if leaf.source is Source.PARAMETER else leaf
            for name, leaf in second.leaves.items()
        }
        held = {**second.held, **{leaf.name: values[leaf.path] for leaf in second.parameters}}
        fixed = assemble(leaves, second.nodes, second.outputs, held, second.aliases)
        plain = Naming(lambda path: path, lambda path: path)
        inner = Naming(lambda path: f"objective.{path}", lambda path: f"objective.{path}".rstrip("."))
        kept[key] = compose(graph, fixed, plain, inner), ""
    return kept[key][0]


Wrt = Literal["params", "input"]


def ordinary_device() -> AbstractContextManager[object]:
    """Where a model was built ``with torch.device("meta")``, bounds are computed on the CPU all the same."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def captured(model: nn.Module, x: Any, objective: nn.Module | None = None) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a model, or of an objective of it, and the present values of its leaves by name.

    It is the same graph as long as nothing that it depends on has changed.
    """
    graph = capture(model, x)
    args, kwargs = as_inputs(x)
    values = dict(zip((leaf.name for leaf in graph.inputs), (*args, *kwargs.values()), strict=True))
    if objective is not None:
        graph, targets = attach(graph, objective)
        values |= targets
    parameters = dict(model.named_parameters())
    values |= {leaf.name: parameters[leaf.path] for leaf in graph.parameters}
    return graph, {**values, **graph.held}


def enclose_leaves(
    graph: Graph,
    values: Mapping[str, Tensor],
    domain: Domain,
    wrt: Wrt = "params",
    input_norm: float | None = None,
) -> tuple[dict[str, Enclosure], Region]:
    """Enclosures of inputs, parameters, buffers and constants over the domain."""
    region = Region.of(domain, variable_blocks(graph, wrt))
    count = len(region.variables)
    enclosures: dict[str, Enclosure] = {}
    for leaf in graph.leaves.values():
        value = values[leaf.name]
        if leaf.name in region.radii:
            enclosures[leaf.name] = _variable(leaf, value, domain, region)
        elif leaf.source is Source.INPUT and value.is_floating_point():
            enclosures[leaf.name] = _fixed_input(leaf, value, count, input_norm)
        elif value.device.type == "meta":
            enclosures[leaf.name] = _given(leaf, domain, Magnitude.zero(), Magnitude.zero((count,))) or (
                unknown_constant(leaf.spec, count)
            )
        else:
            enclosures[leaf.name] = constant(value.detach(), count)
    return enclosures, region


def holds_present(graph: Graph, values: Mapping[str, Tensor], domain: Domain, wrt: Wrt) -> bool | None:
    """Whether the present values of the variables lie in the domain; ``None`` on the meta device.

    Distances are rounded by a few units, and so is the answer.
    """
    region, leaves = Region.of(domain, variable_blocks(graph, wrt)), graph.leaves
    if any(values[name].device.type == "meta" for name in region.variables):
        return None
    if domain.center == "present":
        return True

    def distance(leaf: Leaf, present: Tensor) -> float:
        return float(torch.linalg.vector_norm(present.detach().double() - _centre(leaf, present, domain.center)))

    away = [distance(leaves[name], values[name]) for name in region.variables]
    return all(
        math.hypot(*(away[k] for k in members)) <= radius * (1 + 1e-12) for members, radius in region.groups
    )


def variable_blocks(graph: Graph, wrt: Wrt) -> dict[str, tuple[str, ...]]:
    """The names of the leaves that vary, by block."""
    if wrt == "input":
        names = tuple(leaf.name for leaf in graph.inputs if leaf.spec.dtype.is_floating_point)
        if not names:
            raise DomainError("the input is made of integers: there is no derivative with respect to it")
        return {"input": names}
    trainable = {leaf.name for leaf in graph.parameters if leaf.trainable}
    blocks = {path: tuple(n for n in block.parameters if n in trainable) for path, block in graph.blocks.items()}
    blocks = {path: names for path, names in blocks.items() if names}
    if not blocks:
        raise DomainError("no parameter asks for gradients: nothing varies. Call model.requires_grad_(True)")
    return blocks


def _variable(leaf: Leaf, present: Tensor, domain: Domain, region: Region) -> Enclosure:
    """A variable: within its radius of its centre, with derivative one with respect to itself."""
    radius = Magnitude.of(region.radii[leaf.name])
    unit = Magnitude.of(np.arange(len(region.variables)) == region.variables.index(leaf.name))
    if present.device.type == "meta":
        found = _given(leaf, domain, radius, unit)
        if found is not None:
            return found
        if domain.center != "origin":
            raise DomainError(
                f"'{leaf.path}' is on the meta device and has no value to be the centre: use "
                "ProductBall(radius), whose centre is the origin"
            )
        infinite = Magnitude.infinity()
        return Enclosure(leaf.spec, None, radius, radius, infinite, None, infinite, unit)
    value = _centre(leaf, present, domain.center)
    size, peak = measure(value)
    return Enclosure(leaf.spec, value, size + radius, peak + radius, radius, None, Magnitude.zero(), unit)


def _given(leaf: Leaf, domain: Domain, radius: Magnitude, lipschitz: Magnitude) -> Enclosure | None:
    """A parameter on the meta device whose centre is given."""
    known = domain.center.get(leaf.path) if isinstance(domain.center, Mapping) else None
    if known is None:
        return None
    value = known.detach().to(torch.float64)
    size, peak = measure(value)
    size, peak, exact, fixed = size + radius, peak + radius, Magnitude.zero(), lipschitz.is_zero
    return Enclosure(leaf.spec, value, size, peak, radius, None, exact, lipschitz, is_constant=fixed)


def _centre(leaf: Leaf, present: Tensor, center: Any) -> Tensor:
    if center == "origin":
        return torch.zeros_like(present, dtype=torch.float64)
    if center == "present":
        return present.detach().to(torch.float64)
    if leaf.path not in center:
        raise DomainError(f"the centre has no entry for '{leaf.path}'")
    value = center[leaf.path]
    if tuple(value.shape) != leaf.spec.shape:
        raise DomainError(f"the centre of '{leaf.path}' has shape {tuple(value.shape)}, not {leaf.spec.shape}")
    return value.detach().to(present.device, torch.float64)


def _fixed_input(leaf: Leaf, value: Tensor, count: int, input_norm: float | None) -> Enclosure:
    if input_norm is not None:
        return unknown_constant(leaf.spec, count, Magnitude.of(float(input_norm)))
    if value.device.type == "meta":
        raise DomainError(
            "the input is on the meta device and has no norm: pass input_norm, a bound on the norm of the "
            "stacked batch"
        )
    return constant(value.detach(), count)
