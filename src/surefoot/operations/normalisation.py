r"""Normalisations: batch, layer, group, instance and root-mean-square.

All divide groups of numbers by their root-mean-square, most after subtracting their mean, and differ in which
numbers form a group; the mathematics of groups is in :mod:`surefoot.operations.normalised_groups`. With running
statistics a batch normalisation is affine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import Enclosure, measure, row_norms
from surefoot.graph.structure import Node
from surefoot.magnitude import Magnitude, minimum
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import ONE, affine, batch, root, rows_of
from surefoot.operations.composed_series import normalised_along
from surefoot.operations.normalised_groups import constants, evaluation_error, near, normalised, pulled
from surefoot.operations.record import Form, Near, declare, operation
from surefoot.operations.sparsity import Sparsity, grouped, linear_terms
from surefoot.scalar import Rounded
from surefoot.torch_private import schema_of

Arrange = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Which numbers of a tensor form a group."""

    shape: tuple[int, ...]  # of the tensor
    count: int  # how many groups there are; each is a block of consecutive numbers
    # whether that is so after the first two dimensions were exchanged: channels over the whole batch
    turned: bool = False
    centre: bool = True  # whether the mean of a group is subtracted

    @property
    def size(self) -> int:
        """How many numbers are in a group."""
        return math.prod(self.shape) // max(1, self.count)

    def groups(self, x: Tensor) -> Tensor:
        """The groups of a tensor of this shape, one per row."""
        return (x.transpose(0, 1) if self.turned else x).reshape(self.count, self.size)

    def tensor(self, groups: Tensor) -> Tensor:
        """The tensor with these groups."""
        if not self.turned:
            return groups.reshape(self.shape)
        return groups.reshape(self.shape[1], self.shape[0], *self.shape[2:]).transpose(0, 1)

    def normalised(self, x: Tensor, eps: float) -> Tensor:
        """Every group divided by its root-mean-square."""
        return self.tensor(normalised(self.groups(x), eps, centre=self.centre))


def layout_of(node: Node) -> Layout | None:
    """The groups of a normalisation; ``None`` for other operations, and for running statistics."""
    arguments, shape = node.arguments, node.specs[0].shape
    if node.op not in _LAYOUTS or arguments.get("running_mean") is not None:
        return None
    return _LAYOUTS[node.op](shape, arguments)


BATCH = "aten.batch_norm"
_LAYOUTS: dict[str, Callable[[tuple[int, ...], Mapping[str, Any]], Layout]] = {
    BATCH: lambda shape, _: Layout(shape, shape[1], turned=True),
    "aten.instance_norm": lambda shape, _: Layout(shape, shape[0] * shape[1]),
    "aten.layer_norm": lambda shape, a: Layout(shape, _outer(shape, a)),
    "aten.rms_norm": lambda shape, a: Layout(shape, _outer(shape, a), centre=False),
    "aten.group_norm": lambda shape, a: Layout(shape, shape[0] * a["num_groups"]),
}


def _outer(shape: tuple[int, ...], arguments: Mapping[str, Any]) -> int:
    return math.prod(shape) // max(1, math.prod(arguments["normalized_shape"]))


def _form(node: Node) -> Form:
    """With running statistics affine."""
    return Form.LINEAR if node.arguments["running_mean"] is not None else Form.OTHER


def _cost(use: Use) -> Sparsity:
    layout = layout_of(use.node)
    if layout is None:
        return Sparsity(terms=linear_terms(use, use.numel, "input"))
    return grouped(use.numel, layout.size)


def _error(call: Call, value: Any) -> Magnitude | None:
    """The error of evaluation; with running statistics it is some units of the result."""
    layout = layout_of(call.node)
    if layout is None:
        return None
    return evaluation_error(layout.groups(call["input"].value), float(call["eps"]), centre=layout.centre)


def _pull(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    layout = layout_of(call.node)
    if layout is None:
        return {"input": _pull_fixed(call, costate)}
    groups = layout.groups(call["input"].value)
    found = pulled(groups, layout.groups(costate), float(call["eps"]), centre=layout.centre)
    return {"input": Rounded(layout.tensor(found.value), layout.tensor(found.error.expand(found.value.shape)))}


def _pull_fixed(call: Call, costate: Tensor) -> Rounded:
    """With running statistics: divided by the deviation of the channel."""
    variance = call["running_var"].value.double().reshape(-1, *[1] * (costate.dim() - 2))
    shifted: Any = Rounded.exact(variance) + float(call["eps"])
    return Rounded.exact(costate) / torch.sqrt(shifted)


def _near(call: Call, move: Tensor) -> Near | None:
    layout, x = layout_of(call.node), call["input"].value
    if layout is None:
        one = _pull_fixed(call, torch.ones_like(x))
        return Near(one.value * move, float(one.error.max()) if x.numel() else 0.0, 0.0)
    if not x.numel():
        return None
    found = near(layout.groups(x), layout.groups(move), float(call["eps"]), centre=layout.centre)
    return Near(layout.tensor(found.change), found.first, found.second)


def _evaluated(op: str) -> Callable[..., Tensor]:
    """The value of a normalisation; its scale and shift are another operation.

    With running statistics, three roundings of the result and one of the difference.
    """
    schema = schema_of(getattr(torch.ops.aten, op.removeprefix("aten.")).default)
    usual = {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments}

    def evaluate(*args: Any, **kwargs: Any) -> Tensor:
        a = {**usual, **dict(zip(usual, args, strict=False)), **kwargs}
        x, eps, laid = a["input"], a["eps"], (-1, *[1] * (a["input"].dim() - 2))
        if a.get("running_mean") is None:
            return _LAYOUTS[op](tuple(x.shape), a).normalised(x, eps)
        return (x - a["running_mean"].reshape(laid)) / (a["running_var"] + eps).sqrt().reshape(laid)

    return evaluate


_CHANNELS: dict[str, Any] = {"form": _form, "fixed": ("running_mean", "running_var")}


@operation(BATCH, rows=lambda use: ["input"] if use["running_mean"] is not None and not use["training"] else [],
           **_CHANNELS)  # fmt: skip
@operation("aten.instance_norm", rows=batch("input", 3), **_CHANNELS)
@operation("aten.layer_norm", "aten.rms_norm",
           rows=lambda use: ["input"] if len(use["normalized_shape"]) < len(use.shape) else [])  # fmt: skip
@operation("aten.group_norm", rows=batch("input"))
def groups_normalised(call: Call) -> Bounds:
    """With running statistics an affine map, x ↦ (x - μ)/√(σ² + ε) per channel, of norm the largest 1/√(σ² + ε);
    otherwise groups are divided by their root-mean-square (:mod:`surefoot.operations.normalised_groups`).
    """
    x, layout = call["input"], layout_of(call.node)
    if layout is None:
        return _fixed_statistics(call, x)
    return normalise(call, x, layout.groups, layout.size, centre=layout.centre)


for _op in _LAYOUTS:
    declare(_op, cost=_cost, epsilon="eps", errata=(3,), error=_error, pullback=_pull, symmetric=True, near=_near,
            taylor=normalised_along(layout_of), evaluate=_evaluated(_op))  # fmt: skip


def _fixed_statistics(call: Call, x: Enclosure) -> Bounds:
    mean, var, eps = call["running_mean"], call["running_var"], float(call["eps"])
    if mean.value is None or var.value is None:  # on meta only the signs of the statistics are known
        scale = Magnitude.infinity() if eps <= 0 else (ONE / eps).sqrt()
        return affine(call, {"input": scale}, offset=Magnitude.infinity())
    variances = var.value.double() + eps
    if not bool((variances > 0).all()):
        raise call.refuse("a running variance plus eps is not positive; use a positive eps")
    factors = variances.rsqrt()
    per_channel = x.numel // max(1, x.shape[1])
    offset = measure(mean.value.double() * factors)[0] * root(per_channel) * (1 + 1e-9) + 2.0**-1000
    return affine(call, {"input": measure(factors)[1] * (1 + 1e-12)}, offset=offset)


def normalise(call: Call, x: Enclosure, arrange: Arrange, size: int, *, centre: bool) -> Bounds:
    """The bounds all normalisations share; sharper where the centre keeps the groups away from zero.

    ``arrange`` lays a tensor of the shape of x out as a matrix with one group of ``size`` numbers per row; with
    ``centre`` the mean is subtracted.

    Where rows of the result are those of the argument, groups lie within rows, in consecutive blocks.
    """
    rowwise = "input" in rows_of(call)
    eps = float(call["eps"])
    if eps <= 0:
        raise call.refuse("a normalisation with eps = 0 has no bounded slope; use a positive eps")
    groups = arrange(x.value) if isinstance(x.value, Tensor) and x.numel else None
    moves = None if groups is None else group_spreads(x, arrange, len(groups), rowwise)
    slope, curvature = constants(groups, moves, eps, size, centre)
    rows = None
    known = groups is not None

    def along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        norms = row_norms(arrange(costate.value))
        largest = (curvature * (norms + costate.longest_move(rowwise))).max()
        return {("input", "input"): minimum(largest, costate.bound * curvature.max())}

    def by_row(groups: Magnitude) -> Magnitude:
        return Magnitude(groups.log2.reshape(call.shape[0], -1)).max(axis=1) if rowwise else groups.max()

    def rows_along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        norms = row_norms(arrange(costate.value)) + group_spreads(costate, arrange, len(curvature), rowwise)
        return {("input", "input"): by_row(curvature * norms)}

    def change_along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        third = slope * slope * slope * (3.0 / size * (1 + 1e-15))
        moved = minimum(third * group_spreads(x, arrange, len(slope), rowwise), curvature * 2.0)
        moved = moved * row_norms(arrange(costate.value))
        moved = moved + curvature * group_spreads(costate, arrange, len(curvature), rowwise)
        return {("input", "input"): by_row(moved)}

    if rowwise and known:
        steepest = Magnitude(slope.log2.reshape(call.shape[0], -1)).max(axis=1)
        rows = x.row_spread(call.shape[0]) * steepest
    return Bounds(
        jacobian={"input": slope.max()},
        curvature={("input", "input"): curvature.max()},
        offset=Magnitude.zero(),
        bound=root(call.numel),
        peak=root(max(1, size - 1)) if centre else root(size),
        rows=rows,
        reduction=size,
        curvature_along=along if known else None,
        rows_along=rows_along if known and rowwise else None,
        change_along=change_along if known else None,
    )


def group_spreads(e: Enclosure, arrange: Arrange, count: int, rowwise: bool) -> Magnitude:
    """How far every group may be from the centre: as far as its row if it lies in one, or its entries together."""
    moves, radius = Magnitude(np.full(count, e.spread.log2)), e.entry_radius()
    if rowwise and e.rows is not None and count % len(e.rows) == 0:
        moves = minimum(Magnitude(e.rows.log2.repeat(count // len(e.rows))), moves)
    if radius is None or radius.shape != e.value.shape:
        return moves
    return minimum(moves, row_norms(arrange(radius)))
