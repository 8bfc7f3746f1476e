"""The program of a value and its gradient, apart from what the data alone determine.
 What no weight enters is computed once, in double precision, and becomes an input of the program that is run at
many weights. Where that rounds, the input has an error, and a costate by which it counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.program import Builder, Node, Program, Scalar, differentiate
from surefoot.value.entries import Entries
from surefoot.value.rounding import EXACT, rounds
from surefoot.value.running import Runner

_HEAVY = frozenset(["matmul", "conv", "conv_input", "conv_weight"])
_GROWING = frozenset(
    [
        "relu",
        "tanh",
        "sigmoid",
        "softplus",
        "exp",
        "erf",
        "atan",
        "softsign",
        "hardtanh",
        "relu6",
        "hardsigmoid",
        "selu",
    ]
)


@dataclass(frozen=True)
class Bound:
    """What data determine: the tensors of inputs, by node, and the errors of those that are not exact."""

    tensors: dict[int, Tensor]
    errors: dict[int, Tensor]


class Joint:
    """A program of value and gradient.

    Args:
        program: of the value.
        data: the tensors of its inputs that are no weights, by name.

    Attributes:
        program: of value and gradient; its inputs are weights and tensors that the data determine.
        parameters: the names of the weights.
        bound: what these data determine: the tensors of its other inputs.
        given: those of them that may not be exact.
        linked: the nodes of the value that round, or are not exact.
    """

    def __init__(self, program: Program, data: Mapping[str, Tensor]) -> None:
        self.value_program = program
        self.parameters = program.parameters
        moving = program.depends(program.parameters)
        self._moving = moving
        read = {k for node in program.nodes if moving[node.index] for k in node.inputs if not moving[k]}
        out = program.outputs[0]
        self.boundary = sorted(read | ({out} if not moving[out] else set()))
        tensors, errors = self._evaluated(data)
        inexact = self._rounded()
        builder, place, users = Builder(), {}, program.users()
        for node in program.nodes:
            k, name = node.index, node.primitive.name
            builder.path, builder.dtype = node.path, node.dtype
            if moving[k] and not node.inputs:
                label = next(label for label, index in program.inputs.items() if index == k)
                place[k] = builder.input(label, node.shape, node.dtype, parameter=True)
            elif k in self.boundary:
                if k in program.constants and k not in inexact:
                    place[k] = builder.constant(tensors[k])
                else:
                    place[k] = builder.input(f"#{k}", node.shape, node.dtype)
            elif moving[k] and name == "amax" and (first := self._monotone_before(node, users)) is not None:
                place[k] = self._exchanged(builder, place, node, first)
            elif moving[k] and name == "gather" and (row := self._entropies(builder, place, node)) is not None:
                place[k] = row
            elif moving[k]:
                inputs = [place[i] for i in node.inputs]
                if name == "weigh" and inputs[1] not in builder.constants:
                    wide = builder.emit("expand", inputs[1], shape=tuple(node.shape))
                    place[k] = builder.emit("mul", inputs[0], wide)
                else:
                    place[k] = builder.emit(name, *inputs, **node.options)
        value = builder.finish([place[out]])
        names = {f"#{k}" for k in self.boundary if k in inexact and f"#{k}" in value.inputs}
        self.program = differentiate(value, [*value.parameters, *sorted(names)])
        self.bound = self._bound(tensors, errors)
        self.given = {self.program.inputs[name] for name in names}
        costates = self.program.costates
        nodes, constants = self.program.nodes, self.program.constants
        self.linked = [k for k in costates if k in self.given or (nodes[k].inputs and rounds(nodes[k], constants))]

    def _monotone_before(self, node: Node, users: list[list[int]]) -> int | None:
        """A function that grows, before entries are moved and the largest of them taken."""
        nodes = self.value_program.nodes
        k = node.inputs[0]
        while nodes[k].primitive.name in ("gather", "reshape", "permute") and len(users[k]) == 1:
            k = nodes[k].inputs[0]
        function = nodes[k].options.get("function")
        grows = function is not None and function.order == 0 and function.name in _GROWING
        return k if grows and len(users[k]) == 1 and self._moving[k] else None

    def _exchanged(self, builder: Builder, place: dict[int, int], node: Node, first: int) -> int:
        """The same with the function last: it has fewer entries, and where it is constant nothing is tied."""
        nodes, moves, k = self.value_program.nodes, [], node.inputs[0]
        while k != first:
            moves.append(nodes[k])
            k = nodes[k].inputs[0]
        x = place[nodes[first].inputs[0]]
        for move in reversed(moves):
            x = builder.emit(move.primitive.name, x, *(place[i] for i in move.inputs[1:]), **move.options)
        return builder.emit("scalar", builder.emit("amax", x, **node.options), **nodes[first].options)

    def _entropies(self, builder: Builder, place: dict[int, int], node: Node) -> int | None:
        r"""The logarithms of the shares of one class in each row, if a node is these: without cancellation.

        :math:`\log\sum_ke^{x_k} - x_y = \log(1 + e^m)` with the log-sum-exp m of all :math:`x_k - x_y`,
        :math:`k \ne y`, is as good as m relative to itself, however small.
        """
        program, nodes, moves = self.value_program, self.value_program.nodes, []
        k = node.inputs[0]
        while nodes[k].primitive.name in ("permute", "reshape"):
            moves.append(nodes[k])
            k = nodes[k].inputs[0]
        found = self._log_softmax(nodes[k])
        if found is None:
            return None
        x, dim = found
        shape = tuple(nodes[x].shape)
        rows = (*shape[:dim], 1, *shape[dim + 1 :])
        at = torch.arange(nodes[x].shape.numel()).reshape(shape)
        for move in reversed(moves):
            at = move.primitive.run([at], **move.options)
        chosen = at.reshape(-1)[program.constants[node.inputs[1]].cpu()]
        row = torch.arange(math.prod(rows)).reshape(rows).expand(shape).reshape(-1)[chosen]
        if shape[dim] < 2 or not torch.equal(row.reshape(-1).sort().values, torch.arange(math.prod(rows))):
            return None
        mask = torch.ones(shape, dtype=torch.float64)
        mask.reshape(-1)[chosen.reshape(-1)] = 0.0
        first = builder.constant(chosen.reshape(-1)[row.reshape(-1).argsort()].reshape(rows))
        right = builder.emit("expand", builder.emit("gather", place[x], first), shape=shape)
        apart = builder.emit("add", place[x], builder.emit("scale", right, factor=-1.0))
        rest = builder.emit("logsumexp", apart, builder.constant(mask), dim=dim, keepdim=True)
        loss = builder.emit("scalar", rest, function=Scalar("softplus", (1.0,)))
        return builder.emit("scale", builder.emit("gather", loss, builder.constant(row)), factor=-1.0)

    def _log_softmax(self, node: Node) -> tuple[int, int] | None:
        """The argument and the dimension of x less its log-sum-exp."""
        nodes = self.value_program.nodes
        for x, k in (
            (node.inputs, node.inputs[::-1]) if node.primitive.name == "add" and len(node.inputs) == 2 else ()
        ):
            wide = nodes[k]
            negative = nodes[wide.inputs[0]] if wide.primitive.name == "expand" else wide
            if negative.primitive.name != "scale" or negative.options["factor"] != -1.0:
                continue
            total = nodes[negative.inputs[0]]
            if total.primitive.name == "logsumexp" and total.inputs == (x,) and total.options["keepdim"]:
                return x, total.options["dim"]
        return None

    def bind(self, data: Mapping[str, Tensor]) -> Bound:
        """What other data of the same shapes determine."""
        return self._bound(*self._evaluated(data))

    def _bound(self, tensors: Mapping[int, Tensor], errors: Mapping[int, Tensor]) -> Bound:
        inputs = {k: self.program.inputs.get(f"#{k}") for k in self.boundary}
        places = {k: place for k, place in inputs.items() if place is not None}
        return Bound(
            {place: tensors[k] for k, place in places.items()},
            {place: errors[k] for k, place in places.items() if k in errors},
        )

    def _evaluated(self, data: Mapping[str, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What the data determine, in double precision, and how far it is off, at the boundary."""
        program = self.value_program
        tensors: list[Any] = [None] * len(program.nodes)
        for name, k in program.inputs.items():
            if name not in program.parameters:
                tensors[k] = data[name].detach()
                tensors[k] = tensors[k].double() if tensors[k].is_floating_point() else tensors[k]
        for k, constant in program.constants.items():
            tensors[k] = constant
        given = {node.index for node in program.nodes if not node.inputs}
        runner = Runner(program, self.boundary, given, range(len(tensors)), plain=True)
        runner.run(tensors)
        found = Entries(program, tensors.__getitem__, sorted(runner.live), {}, range(len(tensors)))
        return {k: tensors[k] for k in self.boundary}, {k: e for k, e in found.error.items() if k in self.boundary}

    def _rounded(self) -> set[int]:
        """The nodes that no weight enters and that may round."""
        rounded: set[int] = set()
        for node in self.value_program.nodes:
            if not self._moving[node.index] and node.inputs:
                own = node.primitive.name not in EXACT
                if own or any(k in rounded for k in node.inputs):
                    rounded.add(node.index)
        return rounded

    def dtypes(self, single: bool) -> list[torch.dtype]:
        """The element type that each node is run in: in single precision what products of matrices and
        convolutions are computed from, on the way to the value, and what is computed from them on the way back.
        """
        nodes = self.program.nodes
        if not single:
            return [torch.float64] * len(nodes)
        values = self.program.costates
        narrow = [False] * len(nodes)
        for node in reversed(nodes):
            if node.index in values and node.primitive.name in _HEAVY:
                narrow[node.index] = True
            if narrow[node.index]:
                for k in node.inputs:
                    narrow[k] = True
        for node in nodes:
            if node.index not in values and node.inputs:
                from_back = any(narrow[k] and k not in values and nodes[k].inputs for k in node.inputs)
                narrow[node.index] = node.primitive.name in _HEAVY or from_back
        return [torch.float32 if low else torch.float64 for low in narrow]

    @property
    def fits_single(self) -> bool:
        """Whether what is run in single precision is given numbers of single precision."""
        dtypes, nodes = self.dtypes(True), self.program.nodes
        read = {k for node in nodes if node.primitive.name != "weigh" for k in node.inputs}
        fixed = {**self.program.constants, **self.bound.tensors}
        narrow = [k for k in fixed if dtypes[k] == torch.float32 and (k in read or k in self.given)]
        real = [fixed[k] for k in narrow if fixed[k].is_floating_point()]
        return not any(k in self.given for k in narrow) and all(
            bool((t.float().double() == t).all()) for t in real
        )
