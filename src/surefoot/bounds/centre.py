r"""The centre of a ball: every tensor of a program at the weights u₀, with proved errors.

**Round-off.** Of a tensor z = z(u) with the computed value v and Jacobian X (:mod:`surefoot.bounds.jacobians`) are
stated

* ``error``: bounds of :math:`|z(u_0) - v|`, entry by entry: what the errors of the arguments become, and
  ``local``, that of the operation itself;
* ``slack``: how far each row of X is from what exact arithmetic makes *of the X of its arguments as computed*; how
  these add up is the business of :mod:`surefoot.bounds.movement`, for which round-off is one more way to move.

An entry of a linear map or a product is a sum of n products, which in any order of summation is off by at most
:math:`(n + 2)u\sum|\cdot|`, u = 2^-53 (Higham, section 3.1, :math:`nu < 10^{-3}`): the sum is the operation run on
absolute values, and n is the operation run on ones. For a column of X the same holds, so by the triangle
inequality for rows of columns, the row of X is off by at most :math:`(n + 3)u` times the operation run on norms of
rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.bounds import fused
from surefoot.bounds.scalars import bounds, enclose
from surefoot.norms import batched_spectral_norm, frobenius_norm
from surefoot.program import Node, Program
from surefoot.program.primitives import attaining

UNIT = 2.0**-53
SELECTIONS = {"amax", "select_like", "pick_like", "maximum"}
MOVES = {"reshape", "permute", "flip", "slice", "embed", "pad", "cat", "expand", "gather", "rows"}  # round nothing
SAME_NORM = {"reshape", "permute", "flip"}  # entries change places


class Unbounded(ArithmeticError):
    """There is no bound: a kink, a pole or an overflow at the centre."""


@dataclass(eq=False)
class Point:
    """A tensor at the centre: its value and errors, and upper bounds of the norms of its Jacobian as computed."""

    value: Tensor
    error: Tensor
    local: Tensor
    moves: bool = False
    units: float = 0.0  # the relative round-off of a sum
    gains: tuple[float, ...] = ()  # of a linear operation: norms of the maps from each argument
    slope: Tensor | None = None  # of a scalar function, and how far it may be from exact
    off: Tensor | None = None
    rows: Tensor = field(default_factory=lambda: torch.zeros(()))
    slack: Tensor = field(default_factory=lambda: torch.zeros(()))
    fibres: Tensor = field(default_factory=lambda: torch.zeros(()))
    norm: float = 0.0
    _spectral: Tensor | None = field(default=None, repr=False)

    @property
    def spectral(self) -> Tensor:
        """The norms of the matrices in the last two dimensions."""
        if self._spectral is None:
            self._spectral = batched_spectral_norm(self.value)
        return self._spectral


class Weighted(NamedTuple):
    """The norm of a Jacobian with rows times these factors."""

    factors: Tensor
    norm: float


def fibre(x: Tensor) -> Tensor:
    """Euclidean norms along the last dimension; of one number, its absolute value."""
    return torch.linalg.vector_norm(x, dim=-1) if x.dim() else x.abs()


def absolute(node: Node, tensors: Sequence[Tensor]) -> Tensor:
    """A linear operation without its signs, on non-negative numbers."""
    options = {**node.options}
    if node.primitive.name == "scale":
        options["factor"] = abs(options["factor"])
    return node.primitive.run(list(tensors), **options)


def additive(node: Node) -> list[int]:
    """Which inputs of a linear operation it is linear in: the others are indices, and the weights of ``weigh``."""
    name = node.primitive.name
    return list(range(len(node.inputs))) if name in ("add", "cat") else [0]


class Centre:
    """All tensors of a program at the centre.

    Args:
        program: with the value and the gradient in some inputs as outputs.
        values: of all inputs, by name.
        variables: the names of these inputs.

    Attributes:
        points: the tensors.
        rules: those of fused primitives, by node.
        masks: which entries are selected, by node.
        weighted: norms of Jacobians with weights, by what they are for; see :mod:`surefoot.bounds.jacobians`.
        curved: the nodes of the value with a second derivative.
        needed: the nodes that have points: what the gradient and the costates of curved operations depend on.

    Raises:
        NotImplementedError: for a primitive without rules.
        Unbounded: if a tensor is not finite at the centre.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor], variables: Sequence[str]) -> None:
        self.program, self.variables = program, tuple(variables)
        self.points, self.rules = list[Point](), dict[int, fused.Rule]()
        self.masks: dict[int, Tensor] = {}
        self.weighted: dict[tuple[str, int, int], Weighted] = {}
        self.moves = program.depends(self.variables)
        self._convolved: dict[tuple[int, int], float] = {}
        self.curved = [k for k in program.costates if self._is_curved(program.nodes[k])]
        self.needed = self._all_needed()
        names = {index: name for name, index in program.inputs.items()}
        for node in program.nodes:
            kind = node.primitive.kind
            if node.index not in self.needed:
                point = constant(torch.zeros((), dtype=torch.float64))
            elif kind == "input":
                point = constant(values[names[node.index]].detach())
            elif kind == "constant":
                point = constant(program.constants[node.index])
            else:
                point = getattr(self, "_" + kind)(node)
            point.moves = self.moves[node.index]
            zeros = torch.zeros_like(point.local)
            point.rows, point.slack, point.fibres = zeros, zeros, torch.zeros_like(fibre(zeros))
            self.points.append(point)

    def _is_curved(self, node: Node) -> bool:
        """Whether a node of the value has a second derivative in the weights."""
        both = sum(self.moves[k] for k in node.inputs) > 1
        kind = node.primitive.kind
        return self.moves[node.index] and (kind in ("scalar", "fused") or (kind == "product" and both))

    def _all_needed(self) -> set[int]:
        nodes, needed = self.program.nodes, {*self.program.outputs[1:], *self.program.inputs.values()}
        for k in self.curved:
            needed |= {self.program.costates[k], *nodes[k].inputs}
            if nodes[k].primitive.kind == "fused":
                needed.add(k)
        for node in reversed(nodes):
            if node.index in needed:
                needed.update(node.inputs)
        return needed

    def _linear(self, node: Node) -> Point:
        inputs, terms = [self.points[k] for k in node.inputs], additive(node)
        value = node.primitive.run([p.value for p in inputs], **node.options)
        units, weighed = 0.0, node.primitive.name == "weigh"
        if node.primitive.name not in MOVES:
            ones = [torch.ones_like(p.value) if k in terms or weighed else p.value for k, p in enumerate(inputs)]
            count = absolute(node, ones) if node.primitive.name != "scale" else torch.ones(())
            units = ((float(count.max()) if count.numel() else 0.0) + 3) * UNIT
        local = torch.zeros_like(value)
        if units:
            local = units * self.positive(node, [p.value.abs() for p in inputs])
        if weighed:
            local = local + inputs[0].value.abs() * inputs[1].error
        error = self.positive(node, [p.error for p in inputs]) + local
        gains = tuple(self._gain(node, k, inputs) for k in terms) if self.moves[node.index] else ()
        return Point(value, error, local, units=units, gains=gains)

    def positive(self, node: Node, numbers: Sequence[Tensor]) -> Tensor:
        """A linear operation without its signs, on non-negative numbers in place of those it is linear in."""
        terms, points = additive(node), [self.points[k] for k in node.inputs]
        fixed = [p.value for p in points]
        if node.primitive.name == "weigh":
            fixed[1] = fixed[1].abs() + points[1].error
        return absolute(node, [numbers[k] if k in terms else t for k, t in enumerate(fixed)])

    def _gain(self, node: Node, slot: int, inputs: Sequence[Point]) -> float:
        """The norm of a linear map from one argument: for non-negative coefficients the root of the largest sum of
        a row times the largest sum of a column (Schur's test).
        """
        source, name = inputs[slot].value, node.primitive.name
        if name in SAME_NORM or name in ("add", "slice", "embed", "pad", "cat"):
            return 1.0
        if name == "scale":
            return abs(node.options["factor"])
        if name == "weigh":
            weight = inputs[1].value.abs() + inputs[1].error
            return float(weight.max()) if weight.numel() else 0.0
        if name in ("sum", "expand"):
            return math.sqrt(
                max(1, source.numel(), node.shape.numel()) / max(1, min(source.numel(), node.shape.numel()))
            )
        with torch.enable_grad():
            ones = torch.ones_like(source, requires_grad=True)
            result = absolute(node, [ones if k == slot else p.value for k, p in enumerate(inputs)])
            (columns,) = torch.autograd.grad(result.sum(), ones)
        row = float(result.detach().max()) if result.numel() else 0.0
        return math.sqrt(row * float(columns.max())) if columns.numel() else 0.0

    def _product(self, node: Node) -> Point:
        a, b = (self.points[k] for k in node.inputs)

        def run(x: Tensor, y: Tensor) -> Tensor:
            return node.primitive.run([x, y], **node.options)

        value, size = run(a.value, b.value), run(a.value.abs(), b.value.abs())
        count = run(torch.ones_like(a.value), torch.ones_like(b.value))
        units = ((float(count.max()) if count.numel() else 0.0) + 3) * UNIT
        local = units * size
        error = local.clone()
        if bool(a.error.any()) or bool(b.error.any()):
            error = error + run(a.error, b.value.abs() + b.error) + run(a.value.abs(), b.error)
        return Point(value, error, local, units=units)

    def overlap(self, node: Node) -> float:
        """The root of the number of windows of a convolution that one entry is in."""
        options, weight = node.options, node.options.get("shape") if node.primitive.name == "conv_weight" else None
        shape = weight or self.program.nodes[node.inputs[1]].shape
        windows = 1
        for size, stride, dilation in zip(shape[2:], options["stride"], options["dilation"], strict=True):
            windows *= math.ceil(size / (stride // math.gcd(stride, dilation)))
        return math.sqrt(windows)

    def convolved(self, node: Node, slot: int) -> float:
        r"""A bound of the norm of the map from one factor of a convolution, the other one being at the centre.

        With P(x) the matrix of windows of x, one per row, W that of the kernels and G that of the costates,
        :math:`\langle g, w * x\rangle = \langle G, P(x)W^\top\rangle`. So the norms are those of P(x), of W and
        of G, the last two times that of P, which is at most the root of the number of windows an entry is in.
        """
        key = node.index, slot
        if key not in self._convolved:
            name, value, options = node.primitive.name, self.points[node.inputs[slot]].value, node.options
            kernels, groups = (name != "conv_weight" and slot == 1), options["groups"]
            if kernels:
                matrix = value.reshape(groups, value.shape[0] // groups, -1)
            elif (name, slot) in (("conv_weight", 1), ("conv", 0)):
                shape = options["shape"] if name == "conv_weight" else self.program.nodes[node.inputs[1]].shape
                if value.dim() != 4:
                    self._convolved[key] = self.overlap(node) * frobenius_norm(value)
                    return self._convolved[key]
                keys = ("dilation", "padding", "stride")
                windows = torch.nn.functional.unfold(value, shape[2:], *(tuple(options[k]) for k in keys))
                matrix = windows.reshape(len(value), groups, -1, windows.shape[-1]).permute(1, 2, 0, 3).flatten(2)
                self._convolved[key] = float(batched_spectral_norm(matrix).max())
                return self._convolved[key]
            else:
                matrix = (
                    value.reshape(len(value), groups, value.shape[1] // groups, -1).permute(1, 2, 0, 3).flatten(2)
                )
            self._convolved[key] = self.overlap(node) * float(batched_spectral_norm(matrix).max())
        return self._convolved[key]

    def _scalar(self, node: Node) -> Point:
        x, function = self.points[node.inputs[0]], node.options["function"]
        low, high = enclose(function, 0, x.value, x.value)
        value, local = (low + high) / 2, (high - low) * (0.5 + 2.0**-40)
        local = local + UNIT * value.abs() if bool(local.any()) else local
        steep = bounds(function, 1, x.value - x.error, x.value + x.error)
        error = local + torch.where(x.error > 0, steep * x.error, 0.0)
        if not bool(torch.isfinite(value).all()):
            raise Unbounded(f"'{node.path or 'the objective'}' is not finite at the weights")
        low, high = enclose(function, 1, x.value, x.value)
        kink = ~torch.isfinite(high - low)
        slope, off = torch.where(kink, 0.0, (low + high) / 2), (high - low) * (0.5 + 2.0**-40)
        return Point(value, error, local, slope=slope, off=torch.where(kink, math.inf, off))

    def _fused(self, node: Node) -> Point:
        inputs = [self.points[k] for k in node.inputs]
        rule = fused.rule_of(node, inputs, [self.program.nodes[k] for k in node.inputs])
        self.rules[node.index] = rule
        return Point(rule.value, rule.error(), rule.local)

    def _selection(self, node: Node) -> Point:
        if node.primitive.name not in SELECTIONS:
            raise NotImplementedError(f"no rule for '{node.primitive.name}'")
        points = [self.points[k] for k in node.inputs]
        if node.primitive.name == "maximum":
            self.masks[node.index] = (points[0].value > points[1].value).double()
        else:
            self.masks[node.index] = attaining(points[-1].value, node.options["dims"])
        value = node.primitive.run([p.value for p in points], **node.options)
        return Point(value, self.select(node, [p.error for p in points]), torch.zeros_like(value))

    def select(self, node: Node, numbers: Sequence[Tensor]) -> Tensor:
        """The numbers that are selected at the centre, in place of those that are selected from."""
        mask, name = self.masks[node.index], node.primitive.name
        if name == "maximum":
            return mask * numbers[0] + (1 - mask) * numbers[1]
        chosen = numbers[0] * mask
        if name == "select_like" or not node.options["dims"]:
            return chosen
        return chosen.sum(list(node.options["dims"]), keepdim=node.options.get("keepdim", True))

    def rivals(self, node: Node) -> tuple[Tensor, Tensor]:
        """What is compared: by how much the selected entry is the larger one, and the selected entries."""
        x = self.points[node.inputs[-1]].value
        if node.primitive.name == "maximum":
            return (self.points[node.inputs[0]].value - x).abs(), self.masks[node.index]
        mask = self.masks[node.index]
        return (x * mask).sum(list(node.options["dims"]), keepdim=True) - x, mask


def constant(value: Tensor) -> Point:
    """A tensor that is known exactly."""
    value = value.double() if value.is_floating_point() else value
    zeros = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
    return Point(value, zeros, zeros)
