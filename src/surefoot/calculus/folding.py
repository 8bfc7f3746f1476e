r"""What no variable enters: computed once in double precision (rotary tables, masks, frozen layers, normalised
inputs), with a proved bound of how far the computed numbers are from those that the model defines.

Such a tensor is a constant of which the centre is off: its spread and error are the bound, and operations that
read it treat it as any argument that may be elsewhere within its spread. The errors of the entries are kept apart
where that can be done, as a mask of 0 and -10⁹ has none at all, while its norm is large:

* what moves or selects numbers moves their errors. Such an operation f maps entries to entries or to fixed
  numbers, so the errors :math:`e` of the arguments arrive as :math:`|f(e) - f(0)|`;
* sums, products, quotients, linear layers and scalar functions state theirs (``entry_error`` of the record);
* of the others norms are known: :math:`\sum_iJ_i\|e_i\|` by the mean-value inequality and the round-off of the
  operation itself (:mod:`surefoot.operations.evaluation`).

*What counts as computed.* Truth values and whole numbers that computed numbers decide, and results of operations
that have no rule (these are refused where a variable enters). A certificate speaks of the function with these
results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surefoot.enclosure import Computed, Enclosure, constant, measure
from surefoot.errors import UnsupportedOperation
from surefoot.graph.structure import Graph, Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Call
from surefoot.operations.evaluation import roundoff, run_in_double, value_of
from surefoot.operations.record import Form, record_of, rule_for
from surefoot.operations.scalar_functions import entry_errors
from surefoot.scalar import ScalarFunction


def fold(
    graph: Graph, values: Mapping[str, Tensor], known: Mapping[str, Enclosure] | None = None
) -> dict[str, Enclosure]:
    """The given values, and all that can be computed from them, and from what is known already, each with its
    error.
    """
    enclosures = {**(known or {}), **{name: constant(value, 0) for name, value in values.items()}}
    for node in graph.nodes:
        if node.name not in enclosures and all(name in enclosures for name in node.inputs):
            value = value_of(node, {name: enclosures[name].value for name in node.inputs})
            enclosures[node.name] = folded(graph, node, value, enclosures, 0)
    return enclosures


def folded(graph: Graph, node: Node, value: Any, enclosures: Mapping[str, Enclosure], variables: int) -> Enclosure:
    """The result of an operation on constants of which the values are known."""
    errors = _errors(graph, node, value, {name: enclosures[name] for name in node.inputs})
    if errors is not None:
        return Computed.of(value, errors, node.spec, variables)
    if isinstance(value, Tensor):
        return constant(value, variables)
    size, peak = measure(value)
    return replace(constant(value[0], variables), spec=node.spec, value=value, bound=size, peak=peak)


def _errors(graph: Graph, node: Node, value: Any, arguments: Mapping[str, Enclosure]) -> Any:
    """How far the entries may be off, in the shape of the value; ``None`` if not at all."""
    record, exact = record_of(node), not any(e.is_inexact for e in arguments.values())
    if not any(spec.dtype.is_floating_point for spec in node.specs):
        return None
    if not record.rounds_at(node) and (exact or record.form_of(node) is Form.LAYOUT):
        return None if exact else _moved(node, arguments)
    call = Call(node, arguments)
    if isinstance(value, Tensor):
        errors = _scalar_errors(call, value) if record.entry_error is None else record.entry_error(call, value)
        if errors is not None:
            return errors if bool((errors != 0).any()) else None
    if record.bounds is None or not call.slots:
        return None
    try:
        bounds = rule_for(node, graph)(call)
    except UnsupportedOperation:
        return None
    error = roundoff(call, bounds, value, measure(value)[0])
    for slot, e in call.slots.items():
        if e.is_inexact:
            error = error + bounds.jacobian.get(slot, Magnitude.infinity()) * e.error
    return None if error.is_zero else _alike(value, float(error))


def _scalar_errors(call: Call, value: Tensor) -> Tensor | None:
    """The errors of a scalar function of one tensor that is not fused yet."""
    record, arguments = record_of(call.node), call.node.arguments
    if record.bounds is not None or record.scalar is None or len(call.names) != 1:
        return None
    (x,) = call.tensors.values()
    variable = ScalarFunction.variable()
    function = record.scalar({key: variable if isinstance(a, Ref) else a for key, a in arguments.items()})
    radius = x.entry_radius()
    if function is None or radius is None or x.shape != tuple(value.shape):
        return None
    return entry_errors(function, x.value.double(), value, radius)


def _moved(node: Node, arguments: Mapping[str, Enclosure]) -> Any:
    """The errors of the arguments at the places where their entries go."""

    def run(factor: float) -> tuple[Tensor, ...]:
        errors = {name: _radii(e, factor) for name, e in arguments.items()}
        with torch.no_grad():
            result = run_in_double(node, errors)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    pairs = zip(run(1.0), run(0.0), strict=True)
    found = tuple(torch.where(moved == fixed, 0.0, (moved - fixed).abs()) for moved, fixed in pairs)
    return found if isinstance(node.spec, tuple) else found[0]


def _radii(e: Enclosure, factor: float) -> Any:
    """The errors of an argument times a factor; whole numbers, which choose, stay what they are."""
    if isinstance(e.value, tuple):
        errors = e.entries if isinstance(e, Computed) else _alike(e.value, float(e.error))
        return tuple(_times(value, error, factor) for value, error in zip(e.value, errors, strict=True))
    radius = e.entry_radius()
    assert radius is not None
    return _times(e.value, radius, factor)


def _times(value: Tensor, errors: Tensor, factor: float) -> Tensor:
    return errors.expand(value.shape) * factor if value.is_floating_point() else value


def _alike(value: Any, error: float) -> Any:
    """One error for all entries."""
    if isinstance(value, tuple):
        return tuple(_alike(part, error) for part in value)
    return torch.full((), error, dtype=torch.float64, device=value.device).expand(value.shape)
