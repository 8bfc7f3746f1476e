r"""The centre of a ball: every tensor of a program at the weights u₀, and its exact derivative there.

Of a tensor z = z(u) are computed its value v and its Jacobian X, with one row of as many numbers as there are
weights for each entry, by pushing all unit vectors of the weights through the program at once. On the program of a
gradient the last Jacobians are the second derivative. Kept are norms: of each row, of each *fibre* (the entries
along the last dimension), of the whole. A Jacobian itself is dropped as soon as all that read it are done.

**Round-off.** Exact are :math:`z(u_0)` and :math:`Dz(u_0)`. Of a tensor are stated

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

import torch
from torch import Tensor
from torch.func import vmap

from surefoot.bounds import fused
from surefoot.bounds.scalars import bounds, enclose
from surefoot.norms import batched_spectral_norm, frobenius_norm, spectral_norm
from surefoot.program import Node, Program

UNIT = 2.0**-53
MOVES = {"reshape", "permute", "flip", "slice", "embed", "pad", "cat", "expand", "gather", "rows"}  # round nothing
SAME_NORM = {"reshape", "permute", "flip"}  # entries change places
_COSTLY = 4e9  # multiplications for the norm of one Jacobian


class Unbounded(ArithmeticError):
    """There is no bound: a kink, a pole or an overflow at the centre."""


@dataclass(eq=False)
class Point:
    """A tensor at the centre. Norms of Jacobians are upper bounds, of X as computed."""

    value: Tensor
    error: Tensor
    local: Tensor
    slack: Tensor
    rows: Tensor
    moves: bool
    gains: tuple[float, ...] = ()  # of a linear operation: norms of the maps from each argument
    norm: float = math.inf
    fibres: Tensor | None = None
    _spectral: Tensor | None = field(default=None, repr=False)

    @property
    def spectral(self) -> Tensor:
        """The norms of the matrices in the last two dimensions."""
        if self._spectral is None:
            self._spectral = batched_spectral_norm(self.value)
        return self._spectral


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
        program: with the value and the gradient in all weights as outputs.
        values: the weights and the data, by name.

    Attributes:
        points: the tensors.
        rules: those of fused primitives, by node.
        curved: the nodes of the value with a second derivative.
        needed: the nodes that have points.
        hessian: the second derivative as computed, rows in the order of the weights.

    Raises:
        NotImplementedError: for a primitive without rules.
        Unbounded: if the second derivative does not exist at the centre or overflows.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor]) -> None:
        self.program, self.points, self.rules = program, list[Point](), dict[int, fused.Rule]()
        self._moves = program.depends(program.parameters)
        self._tangents: dict[int, Tensor] = {}
        self._convolved: dict[tuple[int, int], float] = {}
        self._size = sum(program.nodes[program.inputs[name]].shape.numel() for name in program.parameters)
        self.curved = [k for k in program.costates if self._is_curved(program.nodes[k])]
        self.needed = self._all_needed()
        self._wanted = self._norms_wanted()
        last = {k: node.index for node in program.nodes for k in node.inputs}
        gradients = program.outputs[1:]
        names = {index: name for name, index in program.inputs.items()}
        for node in program.nodes:
            kind = node.primitive.kind
            if node.index not in self.needed:
                self.points.append(constant(torch.zeros((), dtype=torch.float64)))
                continue
            if kind == "input":
                point, tangent = self._input(names[node.index], values[names[node.index]])
            elif kind == "constant":
                point, tangent = constant(program.constants[node.index]), None
            else:
                point, tangent = getattr(self, "_" + kind)(node)
            self._add(node, point, tangent)
            for k in set(node.inputs):
                if last[k] == node.index and k not in gradients:
                    self._tangents.pop(k, None)
        parts = [self._tangents[k].flatten(1) if k in self._tangents else self._zeros(k) for k in gradients]
        self.hessian = torch.cat(parts, 1)
        self._tangents.clear()
        if not bool(torch.isfinite(self.hessian).all()):
            raise Unbounded("the second derivative at the centre overflows")

    def _zeros(self, k: int) -> Tensor:
        value = self.points[k].value
        return value.new_zeros(self._size, value.numel())

    def _is_curved(self, node: Node) -> bool:
        """Whether a node of the value has a second derivative in the weights."""
        both = sum(self._moves[k] for k in node.inputs) > 1
        kind = node.primitive.kind
        return self._moves[node.index] and (kind in ("scalar", "fused") or (kind == "product" and both))

    def _all_needed(self) -> set[int]:
        """What the gradient depends on, and the costates of curved operations and what these read."""
        nodes, needed = self.program.nodes, {*self.program.outputs[1:], *self.program.inputs.values()}
        for k in self.curved:
            needed |= {self.program.costates[k], *nodes[k].inputs}
            if nodes[k].primitive.kind == "fused":
                needed.add(k)
        for node in reversed(nodes):
            if node.index in needed:
                needed.update(node.inputs)
        return needed

    def _norms_wanted(self) -> set[int]:
        """Of which tensors norms of Jacobians are read: what is multiplied, bent or normalised, and the costates
        of that; of a tensor whose entries change places only, those of the original.
        """
        nodes, wanted = self.program.nodes, set(self.program.outputs)
        for node in nodes:
            if node.primitive.kind in ("product", "scalar", "fused"):
                wanted |= {*node.inputs}
        wanted |= {self.program.costates[k] for k in self.curved}
        for node in reversed(nodes):
            if node.index in wanted and node.primitive.name in SAME_NORM:
                wanted.add(node.inputs[0])
        return {k for k in wanted if self._moves[k]}

    def _add(self, node: Node, point: Point, tangent: Tensor | None) -> None:
        """Take the norms of a Jacobian."""
        self.points.append(point)
        if tangent is None:
            point.norm, point.fibres = 0.0, torch.zeros_like(fibre(point.value))
            return
        self._tangents[node.index] = tangent
        point.rows = torch.linalg.vector_norm(tangent, dim=0) * (1 + (self._size + 8) * UNIT)
        if not bool(torch.isfinite(point.rows).all()):
            raise Unbounded(f"the derivative of '{node.path or 'the objective'}' is not finite at the weights")
        point.fibres, whole = fibre(point.rows), frobenius_norm(point.rows)
        point.norm = whole
        if node.index not in self._wanted:
            return
        source = self.points[node.inputs[0]] if node.primitive.name in SAME_NORM else None
        flat = tangent.reshape(self._size, -1)
        if source is not None:
            point.norm = source.norm
        elif min(flat.shape) ** 2 * max(flat.shape) <= _COSTLY:
            point.norm = min(whole, spectral_norm(flat))
        if node.primitive.name == "reshape" and source is not None and node.shape[-1:] == source.value.shape[-1:]:
            assert source.fibres is not None
            point.fibres = source.fibres.reshape(point.fibres.shape)
            return
        if tangent.dim() > 2 and tangent.shape[-1] ** 2 * tangent.numel() <= _COSTLY:
            exact = batched_spectral_norm(tangent.flatten(1, -2).permute(1, 2, 0)).reshape(point.fibres.shape)
            point.fibres = torch.minimum(point.fibres, exact)
        point.fibres = point.fibres.clamp(max=point.norm)

    def _input(self, name: str, value: Tensor) -> tuple[Point, Tensor | None]:
        value = value.detach().double() if value.is_floating_point() else value
        point = constant(value)
        if name not in self.program.parameters:
            return point, None
        start = 0
        for other in self.program.parameters:
            if other == name:
                break
            start += self.program.nodes[self.program.inputs[other]].shape.numel()
        point.moves = True
        unit = value.new_zeros(self._size, value.numel())
        unit[start : start + value.numel()] = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
        return point, unit.reshape(self._size, *value.shape)

    def _linear(self, node: Node) -> tuple[Point, Tensor | None]:
        inputs = [self.points[k] for k in node.inputs]
        terms, fixed = additive(node), [p.value for p in inputs]
        weighed = node.primitive.name == "weigh"
        if weighed:
            fixed[1] = fixed[1].abs() + inputs[1].error

        def on(numbers: Sequence[Tensor]) -> Tensor:
            return absolute(node, [numbers[k] if k in terms else fixed[k] for k in range(len(inputs))])

        value = node.primitive.run([p.value for p in inputs], **node.options)
        units = 0.0
        if node.primitive.name not in MOVES:
            ones = [torch.ones_like(p.value) for p in inputs]
            count = absolute(node, [ones[k] if k in terms or weighed else fixed[k] for k in range(len(inputs))])
            scaled = node.primitive.name == "scale"
            units = ((1.0 if scaled or not count.numel() else float(count.max())) + 3) * UNIT
        zeros = [torch.zeros_like(p.value) for p in inputs]
        local = units * on([p.value.abs() for p in inputs]) if units else torch.zeros_like(value)
        if weighed:
            local = local + inputs[0].value.abs() * inputs[1].error
        error = on([p.error for p in inputs]) + local
        point = Point(value, error, local, torch.zeros_like(value), torch.zeros_like(value), False)
        moving = [k for k in terms if inputs[k].moves]
        if not moving:
            return point, None
        point.moves, point.gains = True, tuple(self._gain(node, k, on, inputs) for k in terms)

        def push(*tangents: Tensor) -> Tensor:
            numbers = [p.value if k not in terms else zeros[k] for k, p in enumerate(inputs)]
            for k, tangent in zip(moving, tangents, strict=True):
                numbers[k] = tangent
            return node.primitive.run(numbers, **node.options)

        tangent = vmap(push)(*(self._tangents[node.inputs[k]] for k in moving))
        rows = on([p.rows for p in inputs])
        point.slack = (units + UNIT) * rows if units else torch.zeros_like(rows)
        if weighed:
            point.slack = point.slack + inputs[0].rows * inputs[1].error
        return point, tangent

    def _gain(self, node: Node, slot: int, on: object, inputs: Sequence[Point]) -> float:
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

    def _product(self, node: Node) -> tuple[Point, Tensor | None]:
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
        point = Point(value, error, local, torch.zeros_like(value), torch.zeros_like(value), a.moves or b.moves)
        tangent = None
        if a.moves:
            tangent = vmap(lambda t: run(t, b.value))(self._tangents[node.inputs[0]])
            point.slack = point.slack + (units + UNIT) * run(a.rows, b.value.abs())
        if b.moves:
            right = vmap(lambda t: run(a.value, t))(self._tangents[node.inputs[1]])
            point.slack = point.slack + (units + UNIT) * run(a.value.abs(), b.rows)
            tangent = right if tangent is None else tangent + right
        return point, tangent

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

    def _scalar(self, node: Node) -> tuple[Point, Tensor | None]:
        x, function = self.points[node.inputs[0]], node.options["function"]
        low, high = enclose(function, 0, x.value, x.value)
        value, local = (low + high) / 2, (high - low) * (0.5 + 2.0**-40)
        local = local + UNIT * value.abs() if bool(local.any()) else local
        steep = bounds(function, 1, x.value - x.error, x.value + x.error)
        error = local + torch.where(x.error > 0, steep * x.error, 0.0)
        point = Point(value, error, local, torch.zeros_like(value), torch.zeros_like(value), x.moves)
        if not bool(torch.isfinite(value).all()):
            raise Unbounded(f"'{node.path or 'the objective'}' is not finite at the weights")
        if not x.moves:
            return point, None
        low, high = enclose(function, 1, x.value, x.value)
        slope, off = (low + high) / 2, (high - low) * (0.5 + 2.0**-40)
        slope, off = (torch.where(x.rows > 0, t, 0.0) for t in (slope, off))
        if not bool(torch.isfinite(off).all()):
            raise Unbounded(f"'{node.path or 'the objective'}' has a kink or a pole at the weights")
        point.slack = (off + 4 * UNIT * slope.abs()) * x.rows
        return point, slope * self._tangents[node.inputs[0]]

    def _fused(self, node: Node) -> tuple[Point, Tensor | None]:
        inputs = [self.points[k] for k in node.inputs]
        rule = fused.rule_of(node, inputs, [self.program.nodes[k] for k in node.inputs])
        self.rules[node.index] = rule
        zeros = torch.zeros_like(rule.value)
        point = Point(rule.value, rule.error(), rule.local, zeros, zeros, any(p.moves for p in inputs))
        if not point.moves:
            return point, None
        tangents = [self._tangents.get(k) for k in node.inputs]
        point.slack = rule.slack()
        return point, rule.push(tangents)

    def _selection(self, node: Node) -> tuple[Point, Tensor | None]:
        raise NotImplementedError(f"no rule for '{node.primitive.name}'")


def constant(value: Tensor) -> Point:
    """A tensor that is known exactly."""
    value = value.double() if value.is_floating_point() else value
    zeros = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
    return Point(value, zeros, zeros, zeros, zeros, False)
