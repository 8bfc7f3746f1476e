"""The leaves of a graph: their values, and their enclosures over a domain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.calculus.attach import attach
from surefoot.domains import Domain, DomainError, Region
from surefoot.enclosure import Elsewhere, Enclosure, Measured, constant, measure, unknown_constant
from surefoot.graph import Graph, Leaf, Source
from surefoot.graph.checks import as_inputs
from surefoot.magnitude import Magnitude
from surefoot.operations.captured import capture

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
    """Enclosures of inputs, parameters, buffers and constants over the domain.

    Raises:
        DomainError: if the domain does not fit.
    """
    region = Region.of(domain, variable_blocks(graph, wrt))
    count = len(region.variables)
    enclosures: dict[str, Enclosure] = {}
    for leaf in graph.leaves.values():
        value = values[leaf.name]
        if leaf.name in region.variables:
            enclosures[leaf.name] = _variable(leaf, value, domain, region)
        elif leaf.source is Source.INPUT and value.is_floating_point():
            enclosures[leaf.name] = _fixed_input(leaf, value, count, input_norm)
        elif value.device.type == "meta":
            enclosures[leaf.name] = _elsewhere(leaf, domain, Magnitude.zero(), Magnitude.zero((count,))) or (
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
    apart = [values[n].detach().double() - _centre(leaves[n], values[n], domain.center) for n in region.variables]
    away = [float(torch.linalg.vector_norm(difference)) for difference in apart]
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
    radius = Magnitude.of(region.radius(leaf.name))
    unit = Magnitude.of(np.array([float(name == leaf.name) for name in region.variables]))
    if present.device.type == "meta":
        found = _elsewhere(leaf, domain, radius, unit)
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


def _elsewhere(leaf: Leaf, domain: Domain, radius: Magnitude, lipschitz: Magnitude) -> Enclosure | None:
    """A parameter on the meta device whose centre, or whose norms, are those of weights that lie elsewhere."""
    known = domain.center.get(leaf.path) if isinstance(domain.center, Mapping) else None
    if isinstance(known, Measured):
        return Elsewhere.of(known, radius, leaf.spec, lipschitz)
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
