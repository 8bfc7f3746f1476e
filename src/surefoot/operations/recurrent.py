r"""Recurrent layers and cells, unrolled: the same matrices at every time.

With :math:`a = W_{ih}x + b_{ih}` and :math:`b = W_{hh}h + b_{hh}`, cut into gates where there are several:

* plain: :math:`h' = \tanh(a + b)`, or the positive part;
* GRU: :math:`r = \sigma(a_r + b_r)`, :math:`z = \sigma(a_z + b_z)`, :math:`n = \tanh(a_n + r \circ b_n)`,
  :math:`h' = n + z \circ (h - n)`, which is between n and h, so that states that begin at zero stay below 1;
* LSTM: :math:`c' = \sigma(a_f + b_f) \circ c + \sigma(a_i + b_i) \circ \tanh(a_g + b_g)`,
  :math:`h' = \sigma(a_o + b_o) \circ \tanh(c')`, and :math:`W_{hr}h'` in its place where states are projected.

The input of a layer is multiplied once for all times, so that its matrix is one use of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.graph.structure import Graph, Node, Ref, Spec
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.common import ONE, ZERO
from surefoot.operations.record import Expansion, Form, declare, expansion, operation
from surefoot.operations.sparsity import Contraction, Sparsity, tensors

_aten: Any = torch.ops.aten
Shape = tuple[int, ...]
_Weights = tuple[Ref, Ref, Ref | None, Ref | None, Ref | None]


@dataclass
class _Builder:
    """New nodes in place of one, with names derived from its name."""

    graph: Graph
    node: Node
    nodes: list[Node] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def add(self, name: str, target: Any, *args: Any, shape: Shape, op: str = "") -> Ref:
        """One more node, of torch's operation of that name; the element type is that of the whole."""
        op, name = op or f"aten.{name}", f"{self.node.name}_{name}_{len(self.nodes)}"
        spec = Spec(shape, self.node.specs[0].dtype)
        self.nodes.append(Node(name, op, target, args, {}, self.node.module, spec))
        self.shapes[name] = shape
        return Ref(name)

    def shape(self, ref: Ref) -> Shape:
        if ref.name in self.shapes:
            return self.shapes[ref.name]
        spec = self.graph.spec(ref.name)
        assert isinstance(spec, Spec)
        return spec.shape

    def linear(self, x: Ref, weight: Ref, bias: Ref | None) -> Ref:
        shape = (*self.shape(x)[:-1], self.shape(weight)[0])
        return self.add("linear", _aten.linear.default, x, weight, bias, shape=shape)

    def both(self, op: str, a: Ref, b: Ref) -> Ref:
        return self.add(op, getattr(_aten, op).Tensor, a, b, shape=self.shape(a))

    def apply(self, op: str, a: Ref) -> Ref:
        return self.add(op, getattr(_aten, op).default, a, shape=self.shape(a))

    def gates(self, a: Ref, count: int) -> list[Ref]:
        *outer, width = self.shape(a)
        size = width // count
        ends = [(k * size, (k + 1) * size) for k in range(count)]
        return [
            self.add("slice", _aten.slice.Tensor, a, -1, low, high, shape=(*outer, size)) for low, high in ends
        ]

    def select(self, a: Ref, dim: int, index: int) -> Ref:
        shape = self.shape(a)
        return self.add("select", _aten.select.int, a, dim, index, shape=shape[:dim] + shape[dim + 1 :])

    def stack(self, parts: list[Ref], dim: int) -> Ref:
        shape = self.shape(parts[0])
        return self.add("stack", _aten.stack.default, parts, dim, shape=(*shape[:dim], len(parts), *shape[dim:]))


def between(self: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The first argument, of which it is known that its entries are between those of the other two."""
    return self


@operation("surefoot.between", form=Form.LAYOUT, lends=("first", "second"), rounds=False,
           rows=lambda use: ("self",) if len(use.shape) > 1 else ())  # fmt: skip
def between_two(call: Call) -> Bounds:
    """The identity on the first argument. Its entries are between those of the other two, so at most the larger of
    the two peaks, and their squares at most the sum of the two squares.
    """
    first, second = call["first"], call["second"]
    size = Magnitude(np.array([first.bound.log2, second.bound.log2])).norm()
    nothing: dict[str, Magnitude] = {slot: ZERO for slot in ("first", "second") if slot in call.slots}
    return Bounds({"self": ONE, **nothing}, bound=size, peak=maximum(first.peak, second.peak))


_Step = Callable[[_Builder, Ref, Ref, list[Ref]], list[Ref]]


def _plain(activation: str) -> _Step:
    return lambda b, a, g, state: [b.apply(activation, b.both("add", a, g))]


def _gru(b: _Builder, a: Ref, g: Ref, state: list[Ref]) -> list[Ref]:
    (ar, az, an), (gr, gz, gn) = b.gates(a, 3), b.gates(g, 3)
    reset, update = (b.apply("sigmoid", b.both("add", *pair)) for pair in ((ar, gr), (az, gz)))
    new = b.apply("tanh", b.both("add", an, b.both("mul", reset, gn)))
    mixed = b.both("add", new, b.both("mul", update, b.both("sub", state[0], new)))
    return [b.add("between", between, mixed, new, state[0], shape=b.shape(mixed), op="surefoot.between")]


def _lstm(b: _Builder, a: Ref, g: Ref, state: list[Ref]) -> list[Ref]:
    i, f, c, o = b.gates(b.both("add", a, g), 4)
    kept = b.both("mul", b.apply("sigmoid", f), state[1])
    cell = b.both("add", kept, b.both("mul", b.apply("sigmoid", i), b.apply("tanh", c)))
    return [b.both("mul", b.apply("sigmoid", o), b.apply("tanh", cell)), cell]


_CELLS: dict[str, _Step] = {
    "aten.rnn_tanh_cell": _plain("tanh"),
    "aten.rnn_relu_cell": _plain("relu"),
    "aten.gru_cell": _gru,
    "aten.lstm_cell": _lstm,
}
_LAYERS = {f"aten.{name}": _CELLS[f"aten.{name}_cell"] for name in ("rnn_tanh", "rnn_relu", "gru", "lstm")}


@expansion(*_CELLS)
def unrolled_cell(graph: Graph, node: Node) -> Expansion:
    """One step of a recurrent network, by its formula."""
    a, b = node.arguments, _Builder(graph, node)
    state = list(a["hx"]) if isinstance(a["hx"], list | tuple) else [a["hx"]]
    before, after = b.linear(a["input"], a["w_ih"], a["b_ih"]), b.linear(state[0], a["w_hh"], a["b_hh"])
    results = _CELLS[node.op](b, before, after, state)
    if isinstance(node.spec, tuple):
        return Expansion(tuple(b.nodes), tuple(results))
    last = replace(node, op="aten.alias", target=_aten.alias.default, args=(results[0],), kwargs={})
    return Expansion((*b.nodes, last))


def _covered(node: Node) -> bool:
    """A tensor of sequences of one length, with two matrices per layer and direction, and perhaps a projection."""
    a = node.arguments
    if "input" not in a or "params" not in a:
        return False
    return len(a["params"]) in [_parts(a) * (_each(a) + projected) for projected in (0, 1)]


def _parts(a: Mapping[str, Any]) -> int:
    return int(a["num_layers"]) * (2 if a["bidirectional"] else 1)


def _each(a: Mapping[str, Any]) -> int:
    """How many matrices and biases a layer and direction has, its projection left out."""
    return 4 if a["has_biases"] else 2


@expansion(*_LAYERS)
def unrolled_layers(graph: Graph, node: Node) -> Expansion | None:
    """Output of all times, then the last states: those of all layers and directions stacked.

    What is not covered stays, and has no bounds.
    """
    if not _covered(node):
        return None
    a, b = node.arguments, _Builder(graph, node)
    given = list(a["hx"]) if isinstance(a["hx"], list | tuple) else [a["hx"]]
    time = 1 if a["batch_first"] else 0
    directions = 2 if a["bidirectional"] else 1
    weights = _weights(a["params"], _each(a), len(a["params"]) // _parts(a))
    x, last = a["input"], []
    for layer in range(a["num_layers"]):
        sides = []
        for direction in range(directions):
            part = layer * directions + direction
            state = [b.select(h, 0, part) for h in given]
            outputs, state = _run(b, _LAYERS[node.op], x, state, weights[part], time, backwards=direction == 1)
            sides.append(b.stack(outputs, time))
            last.append(state)
        x = sides[0]
        if directions == 2:
            shape = b.shape(x)
            x = b.add("cat", _aten.cat.default, sides, -1, shape=(*shape[:-1], 2 * shape[-1]))
    results = (x, *(b.stack(list(states), 0) for states in zip(*last, strict=True)))
    return Expansion(tuple(b.nodes), results)


def _weights(params: list[Ref], each: int, size: int) -> list[_Weights]:
    """Matrices of input and state, their biases, and the projection, for each layer and direction."""
    parts = [params[k : k + size] for k in range(0, len(params), size)]
    nothing: list[Ref | None] = [None, None]
    return [(p[0], p[1], *(p[2:4] if each == 4 else nothing), p[each] if size > each else None) for p in parts]


def _run(
    b: _Builder, step: _Step, x: Ref, state: list[Ref], weights: _Weights, time: int, backwards: bool
) -> tuple[list[Ref], list[Ref]]:
    """The states at all times, in the order of time, and the last one."""
    matrix, recurrent_matrix, bias, recurrent_bias, projection = weights
    inputs = b.linear(x, matrix, bias)
    times = range(b.shape(x)[time])
    outputs: dict[int, Ref] = {}
    for t in reversed(times) if backwards else times:
        state = step(b, b.select(inputs, time, t), b.linear(state[0], recurrent_matrix, recurrent_bias), state)
        if projection is not None:
            state = [b.linear(state[0], projection, None), *state[1:]]
        outputs[t] = state[0]
    return [outputs[t] for t in times], state


def _cost(use: Use) -> Sparsity:
    """Recurrent layers: every entry of every weight matrix is used once for each step of each sample.

    The derivative goes along both factors of each product, so it is applied with twice as many. An output may
    depend on all inputs of its sample and on all parameters, which bounds the entries of the derivative.
    """
    output, inputs = use.node.specs[0], use.shapes["input"]
    samples = inputs[0 if use["batch_first"] else 1] if len(inputs) == 3 else 1
    parameters = [slot for slot in use.names if slot.startswith("params.")]
    shapes = [use.shapes[slot] for slot in parameters]
    count = math.prod(inputs[:-1]) * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    reached = math.prod(inputs) // samples + sum(map(math.prod, shapes))
    sides = frozenset(tensors(use, "input")), frozenset(tensors(use, *parameters))
    return Sparsity(
        evaluation=count + use.numel,
        derivative=use.numel,
        jacobian=output.numel * reached,
        application=2 * count + use.numel,
        contractions=(Contraction(count, sides),),
    )


declare(*_LAYERS, cost=_cost)
