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
from surefoot.magnitude import Magnitude, maximum, minimum, stack
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import ONE, ZERO
from surefoot.operations.record import Expansion, Form, Rule, declare, expansion, operation
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

    def known(self, name: str, target: Any, a: Ref, *others: Ref) -> Ref:
        return self.add(name, target, a, *others, shape=self.shape(a), op=f"surefoot.{name}")

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


def gated(self: Tensor, gates: Tensor, cell: Tensor) -> Tensor:
    """The first argument: the next cell of an LSTM, or its next output."""
    return self


def state_of(self: Tensor, new: Tensor, state: Tensor, inputs: Tensor, recurrent: Tensor) -> Tensor:
    """The first argument: the next state of a GRU, between a new one and the one before."""
    return self


def _known(name: str, *lends: Slot) -> Callable[[Rule], Rule]:
    return operation(name, form=Form.LAYOUT, lends=lends, rounds=False,
                     rows=lambda use: ("self", *lends) if len(use.shape) > 1 else ())  # fmt: skip


_LOGISTIC, _TANH = 0.0963, 0.77  # second derivatives are at most 3^(-1/2)/6 and 4·3^(-3/2)


def _as_function(call: Call, instead: Bounds, lipschitz: Magnitude | None = None) -> Bounds:
    """The identity on the first argument, and the same as a function of others, if that says more."""
    if lipschitz is None:
        moving = [e.lipschitz * instead.jacobian[slot] for slot, e in call.varying.items() if slot != "self"]
        lipschitz = stack(moving).sum(axis=0)
    first, slopes = call["self"], {slot: ONE if slot == "self" else ZERO for slot in call.slots}
    says_more = instead if lipschitz.norm() <= first.lipschitz.norm() else None
    return Bounds(slopes, bound=first.bound, peak=first.peak, lipschitz=lipschitz, instead=says_more)


def _open(peak: Magnitude) -> Magnitude:
    """The largest value of a gate whose argument is at most so large."""
    return Magnitude.of(min(1.0, (1 + 2.0**-50) / (1 + math.exp(-min(float(peak), 700.0)))))


@_known("surefoot.gated_cell", "gates", "cell")
def next_cell(call: Call) -> Bounds:
    r"""The identity on the first argument, which is :math:`c' = f \circ c + i \circ g` of gates
    :math:`i = \sigma(\hat\imath)`, :math:`f = \sigma(\hat f)`, :math:`g = \tanh\hat g` of which no entry
    reaches beyond :math:`\bar f`, and a cell of entries up to C.

    Every entry is a function of one entry of each. Slope in c: :math:`f`. In the gates: the square is
    :math:`(cf(1-f))^2 + i^2((1-g^2)^2 + g^2(1-i)^2) \le C^2/16 + \bar f^2`, as the last part is convex in
    :math:`g^2` and at most :math:`i^2` at both ends. Second derivatives: :math:`f(1-f)` between the two; in the
    gates :math:`|c\sigma''| \le 0.0963\,C` for the second, and for the others the norm of
    :math:`\begin{pmatrix} 0.0963 & 1/4 \\ 1/4 & 0.77\end{pmatrix}`, below 0.86.
    """
    cell, size = call["cell"].peak, _open(call["gates"].peak)
    slopes = {"gates": (size**2 + cell**2 / 16).sqrt(), "cell": size}
    bends = {
        ("gates", "gates"): maximum(cell * _LOGISTIC, Magnitude.of(0.86)),
        ("gates", "cell"): Magnitude.of(0.25),
    }
    return _as_function(call, Bounds(slopes, bends))


@_known("surefoot.gated_output", "gates", "cell")
def next_output(call: Call) -> Bounds:
    r"""The identity on the first argument, which is :math:`h' = \sigma(\hat o) \circ \tanh c'` of the cell
    :math:`c'` of :func:`next_cell`, and so a function of the same gates and the cell before.

    A large cell is saturated: with :math:`u = f|c|` and :math:`v = (u - 1)_+` we have :math:`|c'| \ge v`, hence
    :math:`\tanh'c' \le 1/\cosh^2v \le 1/(1 + v^2)`. Let p be the slope of :math:`c'` in its gates,
    :math:`|p|^2 \le \min(1 + u^2, 1 + C^2/16)`. Then, with suprema over :math:`v \ge 0`,

    * :math:`\tanh'c'\,|p| \le \sup\sqrt{1 + (1+v)^2}/(1 + v^2) \le 1.507`, so the slope in all gates is at
      most :math:`\sqrt{1.507^2\bar f^2 + 1/16} \le 1.53`; that in c is at most :math:`\bar f^2`;
    * :math:`|\tanh''c'|\,|p|^k` is at most :math:`0.77\,(1 + 1.66^2)^{k/2}` for :math:`u \le 1.66`, and
      beyond, where :math:`|\tanh''|` falls, at most :math:`\sup 2\tanh v\,(1 + (1+v)^2)^{k/2}/\cosh^2v`:
      together at most 1.54 for k = 1 and 3.22 for k = 2;
    * :math:`\tanh'c'` times the second derivative of :math:`c'` in the gates is at most
      :math:`\max(0.86, \sup (1+v)/(1+v^2)) \le 1.21`.

    Second derivatives: :math:`|\tanh''c'|f^2 \le 0.77` in c; between c and the gates
    :math:`|\tanh''c'||p| + 1/4` in three of them and 1/4 in the fourth; in the gates the sum of the last two
    lines, and at most :math:`\tanh'c'\,|p|/4` between three of them and the fourth.
    """
    cell, size = call["cell"].peak, _open(call["gates"].peak)
    steep = (1 + cell**2 / 16).sqrt()
    most = minimum((size**2 + cell**2 / 16).sqrt(), 1.507)
    slopes = {"gates": ((most * size) ** 2 + 1 / 16).sqrt(), "cell": size**2}
    crossed = minimum(_TANH * steep, 1.54) + 0.25
    own = minimum(_TANH * steep**2, 3.22) + minimum(maximum(cell * _LOGISTIC, Magnitude.of(0.86)), 1.21)
    bends = {
        ("gates", "gates"): own + most / 4,
        ("gates", "cell"): (crossed**2 + 1 / 16).sqrt(),
        ("cell", "cell"): Magnitude.of(_TANH),
    }
    return _as_function(call, Bounds(slopes, bends))


@_known("surefoot.gated_state", "new", "state", "inputs", "recurrent")
def next_state(call: Call) -> Bounds:
    r"""The identity on the first argument, which is :math:`h' = (1 - z) \circ n + z \circ h` of a GRU.

    Its entries are between those of n and h, so at most the larger of the two peaks, and their squares at most the
    sum of the two squares. Let :math:`|b_n| \le B` and :math:`|h - n| \le D`. The slope in h is z, and that in the
    three gates of either a or b at most :math:`(1 - z)\kappa(z)`, :math:`\kappa(z)^2 = 1 + B^2/16 + D^2z^2`, entry
    by entry. Units have different z, so a move of h, a and b by p, q and r moves entry i by at most
    :math:`z_i|p_i| + (1 - z_i)\kappa(z_i)(|q_i| + |r_i|)`. If :math:`t^2 \ge (1-z)\kappa(z)^2/(1+z)` for all z,
    then :math:`z^2 + (1-z)^2\kappa(z)^2/t^2 \le 1`, so by Cauchy and Schwarz the square of that is at most
    :math:`p_i^2 + t^2(|q_i| + |r_i|)^2`, and :math:`\ell_{h'}^2 \le \ell_h^2 + t^2(\ell_a + \ell_b)^2`, t over
    small intervals of z. Second derivatives: :math:`z(1-z) \le 1/4` between h and the gates; in the gates
    :math:`D|\sigma''|` in that of z, :math:`|\tanh''|(1 + B^2/16) + B|\sigma''| + 1/4` in the other two, and
    :math:`z(1-z)\sqrt{1 + B^2/16}` between these.
    """
    new, state, parts = call["new"], call["state"], ("inputs", "recurrent")
    widest, apart = call["recurrent"].peak, state.peak + 1.0
    steep = 1 + widest**2 / 16
    ends = np.linspace(0.0, 1.0, 65)
    squares = steep + apart**2 * Magnitude.of(ends[1:] ** 2)
    rest = squares.sqrt() * Magnitude.of(1 - ends[:-1])
    turn = (squares * Magnitude.of((1 - ends[:-1]) / (1 + ends[:-1]))).max()
    gates = call["inputs"].lipschitz + call["recurrent"].lipschitz
    lipschitz = (state.lipschitz**2 + gates**2 * turn).sqrt() * (1 + 2.0**-50)
    own = maximum(apart * _LOGISTIC, _TANH * steep + widest * _LOGISTIC + 0.25) + steep.sqrt() / 4
    bends = {(one, other): own for one in parts for other in parts if one <= other}
    bends |= {("state", part): Magnitude.of(0.25) for part in parts}
    instead = Bounds({"new": ZERO, "state": ONE} | dict.fromkeys(parts, rest.max()), bends)
    size = Magnitude(np.array([new.bound.log2, state.bound.log2])).norm()
    found = _as_function(call, instead, lipschitz)
    return replace(found, bound=size, peak=maximum(new.peak, state.peak))


_Step = Callable[[_Builder, Ref, Ref, list[Ref]], list[Ref]]


def _plain(activation: str) -> _Step:
    return lambda b, a, g, state: [b.apply(activation, b.both("add", a, g))]


def _gru(b: _Builder, a: Ref, g: Ref, state: list[Ref]) -> list[Ref]:
    (ar, az, an), (gr, gz, gn) = b.gates(a, 3), b.gates(g, 3)
    reset, update = (b.apply("sigmoid", b.both("add", *pair)) for pair in ((ar, gr), (az, gz)))
    new = b.apply("tanh", b.both("add", an, b.both("mul", reset, gn)))
    mixed = b.both("add", new, b.both("mul", update, b.both("sub", state[0], new)))
    return [b.known("gated_state", state_of, mixed, new, state[0], a, g)]


def _lstm(b: _Builder, a: Ref, g: Ref, state: list[Ref]) -> list[Ref]:
    gates = b.both("add", a, g)
    i, f, c, o = b.gates(gates, 4)
    kept = b.both("mul", b.apply("sigmoid", f), state[1])
    cell = b.both("add", kept, b.both("mul", b.apply("sigmoid", i), b.apply("tanh", c)))
    output = b.both("mul", b.apply("sigmoid", o), b.apply("tanh", cell))
    return [
        b.known(f"gated_{name}", gated, x, gates, state[1]) for name, x in (("output", output), ("cell", cell))
    ]


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
