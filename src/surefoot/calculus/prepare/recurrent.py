r"""Recurrent layers and cells, unrolled: the same matrices at every time.

With :math:`a = W_{ih}x + b_{ih}` and :math:`b = W_{hh}h + b_{hh}`, cut into gates where there are several:

* plain: :math:`h' = \tanh(a + b)`, or the positive part;
* GRU: :math:`r = \sigma(a_r + b_r)`, :math:`z = \sigma(a_z + b_z)`, :math:`n = \tanh(a_n + r \circ b_n)`,
  :math:`h' = n + z \circ (h - n)`;
* LSTM: :math:`c' = \sigma(a_f + b_f) \circ c + \sigma(a_i + b_i) \circ \tanh(a_g + b_g)`,
  :math:`h' = \sigma(a_o + b_o) \circ \tanh(c')`.

The input of a layer is multiplied once for all times, so that its matrix is one use of the weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from surefoot.graph.structure import Graph, Node, Ref, Spec

_aten: Any = torch.ops.aten
Shape = tuple[int, ...]


def recurrent(graph: Graph) -> Graph:
    """Every recurrent layer and cell replaced by its pieces; what is not covered stays, and has no rule."""
    nodes: list[Node] = []
    results: dict[str, list[Ref]] = {}
    for node in graph.nodes:
        builder = _Builder(graph, node)
        if node.op in _CELLS:
            results[node.name] = _cell(builder, node)
            nodes += builder.nodes
            if not isinstance(node.spec, tuple):
                nodes.append(_alias(node, results[node.name][0]))
        elif node.op in _LAYERS and _covered(node):
            results[node.name] = _layers(builder, node)
            nodes += builder.nodes
        elif node.target is operator.getitem and node.args[0].name in results:
            nodes.append(_alias(node, results[node.args[0].name][node.args[1]]))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _alias(node: Node, ref: Ref) -> Node:
    return replace(node, op="aten.alias", target=_aten.alias.default, args=(ref,), kwargs={})


@dataclass
class _Builder:
    """New nodes in place of one, with names derived from its name."""

    graph: Graph
    node: Node
    nodes: list[Node] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def add(self, op: str, target: Any, *args: Any, shape: Shape) -> Ref:
        """One more node; the element type is that of the whole."""
        name = f"{self.node.name}_{op}_{len(self.nodes)}"
        spec = Spec(shape, self.node.specs[0].dtype)
        self.nodes.append(Node(name, f"aten.{op}", target, args, {}, self.node.module, spec))
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


_Step = Callable[[_Builder, Ref, Ref, list[Ref]], list[Ref]]


def _plain(activation: str) -> _Step:
    return lambda b, a, g, state: [b.apply(activation, b.both("add", a, g))]


def _gru(b: _Builder, a: Ref, g: Ref, state: list[Ref]) -> list[Ref]:
    (ar, az, an), (gr, gz, gn) = b.gates(a, 3), b.gates(g, 3)
    reset, update = (b.apply("sigmoid", b.both("add", *pair)) for pair in ((ar, gr), (az, gz)))
    new = b.apply("tanh", b.both("add", an, b.both("mul", reset, gn)))
    return [b.both("add", new, b.both("mul", update, b.both("sub", state[0], new)))]


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


def _cell(b: _Builder, node: Node) -> list[Ref]:
    a = node.arguments
    state = list(a["hx"]) if isinstance(a["hx"], list | tuple) else [a["hx"]]
    before, after = b.linear(a["input"], a["w_ih"], a["b_ih"]), b.linear(state[0], a["w_hh"], a["b_hh"])
    return _CELLS[node.op](b, before, after, state)


def _covered(node: Node) -> bool:
    """A tensor of sequences of one length, with two matrices per layer and direction."""
    a = node.arguments
    if "input" not in a or "params" not in a:
        return False
    parts = a["num_layers"] * (2 if a["bidirectional"] else 1)
    return len(a["params"]) == parts * (4 if a["has_biases"] else 2)


def _layers(b: _Builder, node: Node) -> list[Ref]:
    """Output of all times, then the last states: those of all layers and directions stacked."""
    a = node.arguments
    given = list(a["hx"]) if isinstance(a["hx"], list | tuple) else [a["hx"]]
    time = 1 if a["batch_first"] else 0
    directions = 2 if a["bidirectional"] else 1
    weights = _weights(a["params"], a["has_biases"])
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
    return [x, *(b.stack(list(states), 0) for states in zip(*last, strict=True))]


def _weights(params: list[Ref], has_biases: bool) -> list[tuple[Ref, Ref, Ref | None, Ref | None]]:
    """Matrices of input and state and their biases, for each layer and direction."""
    if has_biases:
        return [(params[k], params[k + 1], params[k + 2], params[k + 3]) for k in range(0, len(params), 4)]
    return [(params[k], params[k + 1], None, None) for k in range(0, len(params), 2)]


def _run(
    b: _Builder,
    step: _Step,
    x: Ref,
    state: list[Ref],
    weights: tuple[Ref, Ref, Ref | None, Ref | None],
    time: int,
    backwards: bool,
) -> tuple[list[Ref], list[Ref]]:
    """The states at all times, in the order of time, and the last one."""
    matrix, recurrent_matrix, bias, recurrent_bias = weights
    inputs = b.linear(x, matrix, bias)
    times = range(b.shape(x)[time])
    outputs: dict[int, Ref] = {}
    for t in reversed(times) if backwards else times:
        state = step(b, b.select(inputs, time, t), b.linear(state[0], recurrent_matrix, recurrent_bias), state)
        outputs[t] = state[0]
    return [outputs[t] for t in times], state
