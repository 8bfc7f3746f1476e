r"""All derivatives at the centre, one direction of the variables after the other.

For a unit vector v of all variables together, one forward and one backward pass give :math:`X_zv`, :math:`X_z =
Dz`, for every tensor z, :math:`\Lambda_zv`, :math:`\Lambda_z = D\lambda_z`, for every costate, and
:math:`\nabla^2F\,v`. With as many directions as there are numbers among the variables these are the whole
matrices, whether samples interact or not, and whatever the width of the layers. Kept are the second derivative
and, of the others, norms (:mod:`surefoot.calculus.adjoint.gathered`).

Operations are replaced by what has the same first two derivatives at the centre, with errors that their records
state, as in :mod:`surefoot.calculus.adjoint.samples`; an operation without such a record is refused. The round-off
is bounded in :mod:`surefoot.calculus.adjoint.running`.

Where samples do not interact, :func:`sample_labels` says which one every entry of a tensor belongs to.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.calculus.adjoint.gathered import Gathered, Sizes
from surefoot.calculus.adjoint.running import running_errors
from surefoot.calculus.adjoint.samples import PLAIN, Hessian, require_moderate
from surefoot.calculus.forward import Pass, Step
from surefoot.enclosure import Spec, norm
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude
from surefoot.norms import frobenius_norm
from surefoot.norms.verified import symmetric_norm
from surefoot.operations.call import Call
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.products import is_linear
from surefoot.operations.record import Form, record_of
from surefoot.scalar import Rounded, rounded_derivatives

_ONCE = 256  # directions at a time
_ENTRIES = 8.0e6  # numbers held at a time for one tensor


@dataclass(frozen=True)
class Dense:
    """Derivatives at the centre."""

    norm: Magnitude  # of the second derivative; infinite where it is kept
    first: Mapping[str, Sizes]  # of :math:`X_z`, for the tensors that curved operations read
    second: Mapping[str, Sizes]  # of :math:`\Lambda_z`, for the results of curved operations
    # for tensors whose entries belong to samples that do not interact, which sample that is
    labels: Mapping[str, Tensor]
    count: int  # the number of samples
    directions: int  # how many were followed
    # how far the second derivative may be from that at the weights, as the centre is known as computed; infinite
    # until :func:`surefoot.calculus.adjoint.bounds.dense_centre` has found it
    offset: Magnitude
    hessian: Hessian | None = None  # the symmetric part of the second derivative; ``None`` if it is not kept


def _plain(result: Pass, step: Step) -> bool:
    """Whether an operation reads and makes single tensors."""
    names = (step.node.name, *step.names.values())
    return all(isinstance(result.enclosures[name].value, Tensor) for name in names)


Local = Callable[[Mapping[str, Any]], Any]


def curved(step: Step) -> bool:
    """Whether an operation has a second derivative in what varies."""
    return any(
        set(pair) <= step.names.keys() and not amount.is_zero for pair, amount in step.bounds.curvature.items()
    )


def derivatives_at_centre(result: Pass, keep: bool = False) -> Dense | None:
    """All of it, from a forward pass over the centre alone; ``None`` if an operation has no proved derivatives.

    With ``keep`` the second derivative is kept, instead of its norm.

    Raises:
        OverflowError: if entries are too large.
        RuntimeError: if torch does not know how to differentiate an operation.
    """
    locals_: dict[str, Local] = {}
    off_by: dict[str, tuple[float, float]] = {}
    for step in result.steps:
        found = local(result, step)
        if found is None or (curved(step) and not _plain(result, step)):
            return None
        locals_[step.node.name], off_by[step.node.name] = found
    last = result.enclosures[next(iter(result.steps[-1].names.values()))].spec
    if not isinstance(last, Spec):  # one of several results is the output
        return None
    count = (last.shape or (1,))[0]
    labels = sample_labels(result, count)
    variables = set(result.region.variables)
    bent = [step for step in result.steps if curved(step)]
    read = dict.fromkeys(n for s in bent for n in s.names.values() if n not in variables)
    written = dict.fromkeys(s.node.name for s in bent if s.node.name != result.outputs[0])
    held = Gathered(result, labels, count, list(read), list(written))
    hessian, slopes = _follow(result, locals_, held)
    off = running_errors(result, off_by, held, slopes)
    size = len(hessian)
    first = {name: held.sizes("first", name, off.first[name], size) for name in read}
    second = {name: held.sizes("second", name, off.second[name], size) for name in written}
    infinite = Magnitude.infinity()
    if keep:
        error = off.hessian + 2.0**-52 * frobenius_norm(hessian)
        hessian = 0.5 * (hessian + hessian.mT)
        return Dense(infinite, first, second, labels, count, size, infinite, Hessian(hessian, error))
    whole = Magnitude.of(symmetric_norm(hessian)) + off.hessian
    return Dense(whole, first, second, labels, count, size, infinite)


def local(result: Pass, step: Step) -> tuple[Local, tuple[float, float]] | None:
    """An operation as a function of what it reads, with two derivatives at the centre, and their errors."""
    record, node = record_of(step.node), step.node
    centre = result.enclosures[node.name].value
    name = next(iter(step.names.values()))
    if node.op == "surefoot.scalar":
        x = result.enclosures[name].value
        _, slope, bend = rounded_derivatives(node.arguments["function"], Rounded.exact(x), 2)
        errors = (float(slope.error.max()), 2 * float(bend.error.max())) if x.numel() else (0.0, 0.0)
        require_moderate(slope.value, bend.value)

        def scalar(reads: Mapping[str, Any]) -> Any:
            move = reads[name] - x
            return centre + slope.value * move + bend.value * move.square()

        return scalar, errors
    if record.near is not None and len(step.names) == 1:
        x, call = result.enclosures[name].value, Call(node, result.enclosures)
        near = record.near(call, torch.zeros_like(x))
        if near is None or not math.isfinite(near.first + near.second):
            return None

        def quadratic(reads: Mapping[str, Any]) -> Any:
            model = record.near(call, reads[name] - x)  # type: ignore[misc]
            return centre + model.change  # type: ignore[union-attr]

        return quadratic, (near.first, near.second)
    if record.form_of(node) not in PLAIN and record.rounds_at(node):
        return None
    return (lambda reads: run_in_double(node, reads)), (0.0, 0.0)


def _follow(result: Pass, locals_: Mapping[str, Local], held: Gathered) -> tuple[Tensor, dict[str, float]]:
    """The second derivative and the norms of all costates, while what is met on the way is taken in."""
    names = result.region.variables
    centre = {name: result.enclosures[name].value.double() for name in names}
    lengths = [centre[name].numel() for name in names]
    total = sum(lengths)
    device = next(iter(centre.values())).device
    injected = {name: torch.zeros_like(result.enclosures[name].value) for name in held.written}

    def value(
        variables: Mapping[str, Tensor], injections: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        live: dict[str, Any] = dict(variables)
        for step in result.steps:
            node = step.node
            reads = {name: live.get(name, result.enclosures[name].value) for name in node.inputs}
            live[node.name] = locals_[node.name](reads)
            if node.name in injections:
                live[node.name] = live[node.name] + injections[node.name]
        return live[result.outputs[0]].sum(), {name: live[name] for name in held.read}

    slopes = torch.func.grad(value, argnums=(0, 1), has_aux=True)

    def moved(tangent: Mapping[str, Tensor]) -> Any:
        return torch.func.jvp(lambda variables: slopes(variables, injected), (centre,), (tangent,))[1]

    largest = max((result.enclosures[n].value.numel() for n in (*held.read, *held.written)), default=1)
    once = max(1, min(_ONCE, int(_ENTRIES / largest)))
    hessian = torch.empty(total, total, dtype=torch.float64, device=device)
    for start in range(0, total, once):
        stop = min(start + once, total)
        units = torch.zeros(stop - start, total, dtype=torch.float64, device=device)
        units[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
        parts = dict(zip(names, units.split(lengths, 1), strict=True))
        tangents = {name: part.reshape(-1, *centre[name].shape) for name, part in parts.items()}
        with warnings.catch_warnings():  # forward derivatives load what torch itself calls outdated
            warnings.simplefilter("ignore", DeprecationWarning)
            (rows, second), first = torch.func.vmap(moved)(tangents)
        hessian[start:stop] = torch.cat([rows[name].unsqueeze(-1).flatten(1) for name in names], 1)
        for name, part in first.items():
            held.add("first", name, part)
        for name, part in second.items():
            held.add("second", name, part)
    require_moderate(hessian)
    everywhere = {
        step.node.name: torch.zeros_like(held_value)
        for step in result.steps
        if isinstance(held_value := result.enclosures[step.node.name].value, Tensor)
    }
    costates = slopes(centre, everywhere)[0][1]
    return hessian, {name: float(norm(costate)) for name, costate in costates.items()}


def sample_labels(result: Pass, count: int) -> dict[str, Tensor]:
    """The sample that each entry of a tensor belongs to, for tensors of which the entries of a sample depend on
    the variables and on the entries of the same sample only.

    Layout operations move the labels as they move numbers. Element by element nothing changes. A linear layer
    mixes the last dimension, other operations whatever is in a row: these must have one label each. What reads
    variables only may be labelled at will, and so may entries that do not vary.
    """
    labels: dict[str, Tensor] = {}
    variables = set(result.region.variables)
    for step in result.steps:
        node, shape = step.node, step.node.specs[0].shape
        read = {slot: name for slot, name in step.names.items() if name not in variables}
        value = result.enclosures[node.name].value
        if any(name not in labels for name in read.values()):
            continue
        form = record_of(node).form_of(node)
        if not isinstance(value, Tensor):
            if form is Form.LAYOUT and len(read) == len(step.names):
                labels[node.name] = run_in_double(node, _labelled(result, node, labels))
            continue
        line = torch.arange(count, dtype=torch.float64, device=value.device)
        if not read:
            if shape[:1] == (count,):
                labels[node.name] = line.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        elif form is Form.LAYOUT and len(read) == len(step.names):
            found = run_in_double(node, _labelled(result, node, labels))
            free, own = found.isnan(), line.reshape(-1, *[1] * (len(shape) - 1))
            if shape[:1] == (count,) or not bool(free.any()):
                labels[node.name] = torch.where(free, own, found) if bool(free.any()) else found
        elif form is Form.ELEMENTWISE and len(read) == 1:
            labels[node.name] = labels[next(iter(read.values()))]
        else:
            kept = len(shape) - 1 if is_linear(node) else 1
            if not is_linear(node) and not read.keys() <= step.row_slots:
                continue
            lines = [labels[name].unsqueeze(-1) for name in read.values()]
            if any(part.dim() <= kept for part in lines):
                continue
            lines = [part.flatten(kept) for part in lines]
            if any(part.shape[:kept] != shape[:kept] or not part.shape[kept] for part in lines) or not shape:
                continue
            first = lines[0][..., 0]
            if all(bool((part == first[..., None]).all()) for part in lines):
                labels[node.name] = first.reshape(*first.shape, *[1] * (len(shape) - kept)).expand(shape)
    return labels


def _labelled(result: Pass, node: Node, labels: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a layout operation reads: labels, none of numbers that do not vary, and what chooses entries."""
    values = {name: result.enclosures[name].value for name in node.inputs}
    none = {
        n: torch.full_like(v, math.nan)
        for n, v in values.items()
        if isinstance(v, Tensor) and v.is_floating_point()
    }
    return values | none | {name: labels[name] for name in node.inputs if name in labels}
