"""From a model and a domain to a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import surefoot.operations.families  # noqa: F401  registers the rules
from surefoot.calculus.adjoint.bounds import scalar_bounds
from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.breakdown import by_block, reasons, rows
from surefoot.calculus.composite import damping_of, is_nonnegative
from surefoot.calculus.forward import Pass, forward
from surefoot.calculus.prepare import prepared
from surefoot.certificate import Certificate
from surefoot.domains import Domain, DomainError, ProductBall, Region, Segment
from surefoot.enclosure import Enclosure, constant, measure, unknown_constant
from surefoot.graph import Graph, Leaf, Source
from surefoot.graph.checks import as_inputs
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.objectives import attach
from surefoot.operations.captured import capture

Wrt = Literal["params", "input"]


def certify(
    model: nn.Module,
    x: Any,
    *,
    objective: nn.Module | None = None,
    domain: Domain | Segment | None = None,
    wrt: Wrt = "params",
    input_norm: float | None = None,
) -> Certificate:
    r"""Bound, Lipschitz constant and smoothness of a model's output over a domain, proved.

    Args:
        model: any module that can be captured; on the ``meta`` device nothing is allocated.
        x: a batch; the certificate speaks of the stacked outputs of this batch.
        objective: certify this function of the outputs instead: a loss bound to its targets, such as
            ``surefoot.CrossEntropy(y)``, or any module that maps the outputs to one number.
        domain: where the variables may be; by default every parameter block within 1 of the origin, or with
            ``wrt="input"`` the input within 1 of the origin.
        wrt: what varies: the parameters, or the input for fixed parameters (Corollary smooth_state).
        input_norm: use this bound on the norm of the stacked batch instead of the data; required on ``meta``.

    Returns:
        The certificate; its smoothness may be infinite, and then it says which operation is to blame.

    Raises:
        CaptureError: if the model cannot be read.
        UnsupportedOperation: if an operation has no rule.
        DomainError: if the domain does not fit.
        ObjectiveError: if the objective does not fit the outputs.
    """
    domain = ProductBall(1.0) if domain is None else domain
    if wrt not in ("params", "input"):
        raise DomainError(f"wrt is 'params' or 'input', got {wrt!r}")
    if isinstance(domain, Segment):
        return _along(model, x, objective, domain, wrt)
    graph, inputs = captured(model, x, objective)
    with ordinary_device():
        leaves, region = enclose_leaves(graph, dict(model.named_parameters()), inputs, domain, wrt, input_norm)
        scalar = len(graph.outputs) == 1 and graph.numel(graph.outputs[0]) == 1
        return certificate_of(forward(prepared(graph), leaves, region, keep=scalar), domain, wrt)


def ordinary_device() -> AbstractContextManager[object]:
    """Where a model was built ``with torch.device("meta")``, bounds are computed on the CPU all the same."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def captured(model: nn.Module, x: Any, objective: nn.Module | None) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a model, or of an objective of it, and the values of inputs and targets by leaf name."""
    graph = capture(model, x)
    args, kwargs = as_inputs(x)
    inputs = dict(zip((leaf.name for leaf in graph.inputs), (*args, *kwargs.values()), strict=True))
    if objective is None:
        return graph, inputs
    graph, targets = attach(graph, objective)
    return graph, inputs | targets


def _along(model: nn.Module, x: Any, objective: nn.Module | None, domain: Segment, wrt: str) -> Certificate:
    from surefoot.calculus.segment.certify import certify_segment

    if wrt != "params":
        raise DomainError("along a segment the parameters vary, and the constants are certified ones")
    with ordinary_device():
        return certify_segment(model, x, objective, domain)


def certificate_of(result: Pass, domain: Domain, wrt: str) -> Certificate:
    """What a forward pass says about the outputs, stacked."""
    ends = [result.enclosures[name] for name in result.outputs]
    lipschitz = stack([e.lipschitz for e in ends]).norm(axis=0)
    adjoint, result = scalar_bounds(result), result.without_values()
    summands = terms(result, weighted_curvature(result))
    matrix = assemble(summands, len(result.region.variables))
    smooth = smoothness(matrix)
    blocks = result.region.blocks
    if adjoint is not None:
        lipschitz, matrix = minimum(lipschitz, adjoint.gradient), minimum(matrix, adjoint.matrix)
        summands = adjoint.summands if smoothness(adjoint.matrix) <= smooth else summands
        smooth = smoothness(matrix)
    return Certificate(
        bound=stack([e.bound for e in ends]).norm(),
        lipschitz=lipschitz.norm(),
        smoothness=smooth,
        block_lipschitz={path: lipschitz[list(members)].norm() for path, members in blocks.items()},
        block_smoothness=by_block(matrix, list(blocks.values())),
        reasons=tuple(reasons(summands)),
        domain=str(domain),
        wrt=wrt,
        scalar=sum(e.numel for e in ends) == 1,
        nonnegative=is_nonnegative(result),
        block_gradients=None if adjoint is None else adjoint.by_block(blocks),
        make_rows=lambda: rows(result, summands, smooth),
        make_damping=damping_of(result),
    )


def enclose_leaves(
    graph: Graph,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    domain: Domain,
    wrt: Wrt,
    input_norm: float | None,
) -> tuple[dict[str, Enclosure], Region]:
    """Enclosures of inputs, parameters, buffers and constants over the domain."""
    blocks = _variable_blocks(graph, wrt)
    region = Region.of(domain, blocks)
    count = len(region.variables)
    enclosures: dict[str, Enclosure] = {}
    for leaf in graph.leaves.values():
        value = present_value(graph, leaf, parameters, inputs)
        if leaf.name in region.variables:
            enclosures[leaf.name] = _variable(leaf, value, domain, region)
        elif leaf.source is Source.INPUT and value.is_floating_point():
            enclosures[leaf.name] = _fixed_input(leaf, value, count, input_norm)
        elif value.device.type == "meta":
            enclosures[leaf.name] = unknown_constant(leaf.spec, count)
        else:
            enclosures[leaf.name] = constant(value.detach(), count)
    return enclosures, region


def _variable_blocks(graph: Graph, wrt: Wrt) -> dict[str, tuple[str, ...]]:
    if wrt == "input":
        names = tuple(leaf.name for leaf in graph.inputs if leaf.spec.dtype.is_floating_point)
        if not names:
            raise DomainError("the input is made of integers: there is no derivative with respect to it")
        return {"input": names}
    trainable = {leaf.name for leaf in graph.parameters if leaf.trainable}
    blocks = {
        path: tuple(name for name in block.parameters if name in trainable) for path, block in graph.blocks.items()
    }
    blocks = {path: names for path, names in blocks.items() if names}
    if not blocks:
        raise DomainError("no parameter asks for gradients: nothing varies. Call model.requires_grad_(True)")
    return blocks


def present_value(
    graph: Graph, leaf: Leaf, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Tensor:
    """The value of a leaf: parameters by path, inputs and targets by leaf name."""
    match leaf.source:
        case Source.INPUT | Source.TARGET:
            return inputs[leaf.name]
        case Source.PARAMETER:
            return parameters[leaf.path]
        case _:
            return graph.held[leaf.name]


def _variable(leaf: Leaf, present: Tensor, domain: Domain, region: Region) -> Enclosure:
    """A variable: within its radius of its centre, with derivative one with respect to itself."""
    radius = Magnitude.of(region.radius(leaf.name))
    unit = Magnitude.of(np.array([float(name == leaf.name) for name in region.variables]))
    center = domain.center
    if present.device.type == "meta":
        if center != "origin":
            raise DomainError(
                f"'{leaf.path}' is on the meta device and has no value to be the centre: use "
                "ProductBall(radius), whose centre is the origin"
            )
        infinite = Magnitude.infinity()
        return Enclosure(leaf.spec, None, radius, radius, infinite, None, infinite, unit)
    value = _centre(leaf, present, center)
    zero = Magnitude.zero()
    size, peak = measure(value)
    return Enclosure(leaf.spec, value, size + radius, peak + radius, radius, None, zero, unit)


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
