r"""Networks of linear layers and element-wise functions, sample by sample.

With :math:`\omega_k = W_kx_{k-1} + b_k`, :math:`x_k = a_k(\omega_k)` and the outputs :math:`\psi = x_d`, the row
of the Jacobian that belongs to a sample and an output is, in layer k,

.. math:: \frac{\partial\psi_o}{\partial(W_k, b_k)} = B_{k,o}\otimes(x_{k-1}, 1), \qquad
    B_d = \mathrm{diag}(a_d'), \quad Q_k = B_{k+1}W_{k+1}, \quad B_k = Q_k\,\mathrm{diag}(a_k'),

so that the Gram matrix :math:`JJ^\top` is the sum over the layers of
:math:`(B_kB_k^\top)\circ(X_{k-1}X_{k-1}^\top + 1)`, and J itself, of as many columns as there are parameters, is
never formed. Everything at the weights is computed with a proved bound on its error
(:class:`~surefoot.scalar.Rounded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.calculus.analysis import Analysis
from surefoot.graph.nodes import Node, Ref
from surefoot.graph.structure import Graph
from surefoot.norms.verified import product
from surefoot.operations.products import is_linear
from surefoot.operations.record import Form, record_of
from surefoot.scalar import Rounded, ScalarFunction, rounded_derivatives


@dataclass(frozen=True)
class Layer:
    """A linear layer and the element-wise function that follows it."""

    reads: str  # the name of its input
    after: str  # the path of the module that calls the function; without one, its own path
    weight: Tensor  # the weight as stored, in double precision
    bias: Tensor | None  # the bias, if there is one
    trains_weight: bool  # whether the weight varies
    trains_bias: bool  # whether the bias varies
    paths: tuple[str, ...]  # the paths of the parameters that vary
    function: ScalarFunction | None  # ``None`` for the identity

    @property
    def trains(self) -> bool:
        """Whether the weight or the bias varies."""
        return self.trains_weight or self.trains_bias

    def features(self, reads: Tensor) -> Tensor:
        """The factors of the parameters for this input: the input itself, and ones for the bias."""
        value = reads.double() if self.trains_weight else reads[:, :0].double()
        return nn.functional.pad(value, (0, int(self.trains_bias)), value=1.0)


@dataclass(frozen=True, eq=False)
class Layered:
    """A network of such layers on a batch."""

    analysis: Analysis  # the network as it was read
    layers: tuple[Layer, ...]  # in order
    inputs: Tensor  # samples × features, exact

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.inputs)

    @cached_property
    def _run(self) -> list[tuple[Rounded, Rounded, Rounded, Rounded]]:
        """For each layer its input, the output of its linear map, and value and slope of its function."""
        steps, state = [], Rounded.exact(self.inputs)
        for layer in self.layers:
            before = product(state, Rounded.exact(layer.weight.mT))
            if layer.bias is not None:
                before = before + layer.bias
            one = Rounded.exact(torch.ones_like(before.value)).expand(before.value.shape)
            after = [before, one] if layer.function is None else rounded_derivatives(layer.function, before, 1)
            steps.append((state, before, after[0], after[1]))
            state = after[0]
        return steps

    @property
    def sums(self) -> list[Rounded]:
        """For each layer the output of its linear map, at the weights."""
        return [before for _, before, _, _ in self._run]

    @property
    def states(self) -> list[tuple[Rounded, Rounded, Rounded]]:
        """For each layer its input, and the value and the slope of its function, at the weights."""
        return [(state, after, slope) for state, _, after, slope in self._run]

    @property
    def outputs(self) -> Rounded:
        """The outputs, samples × outputs."""
        return self.states[-1][1]

    @cached_property
    def sensitivities(self) -> list[tuple[Rounded | None, Rounded]]:
        """For each layer :math:`Q_k` and :math:`B_k`, samples × outputs × width; the last layer has no Q."""
        slope = self.states[-1][2]
        unit = torch.eye(slope.value.shape[1], dtype=torch.float64)
        last = slope.rearranged(lambda t: t[:, None, :] * unit)
        both: list[tuple[Rounded | None, Rounded]] = [(None, last)]
        for k in range(len(self.layers) - 2, -1, -1):
            through = product(both[0][1], Rounded.exact(self.layers[k + 1].weight))
            both.insert(0, (through, through * self.states[k][2].rearranged(lambda t: t[:, None, :])))
        return both

    @cached_property
    def gram(self) -> Rounded:
        """The Gram matrix of the Jacobian, outputs of one sample next to each other."""
        times = self.outputs.value.shape[1]
        total: Rounded | None = None
        for layer, (state, _, _), (_, slopes) in zip(self.layers, self.states, self.sensitivities, strict=True):
            if not layer.trains:
                continue
            rows = slopes.rearranged(lambda t: t.flatten(0, 1))
            inner = Rounded.exact(torch.zeros(self.count, self.count, dtype=torch.float64))
            if layer.trains_weight:
                inner = product(state, state.rearranged(lambda t: t.mT))
            if layer.trains_bias:
                inner = inner + 1.0
            spread = inner.rearranged(lambda t: t.repeat_interleave(times, 0).repeat_interleave(times, 1))
            part = product(rows, rows.rearranged(lambda t: t.mT)) * spread
            total = part if total is None else total + part
        assert total is not None
        return total

    def rows(self, start: int, stop: int) -> Iterator[tuple[str, Rounded]]:
        """Rows of the Jacobian by path of the parameter, written out."""
        times = self.outputs.value.shape[1]
        for k, layer in enumerate(self.layers):
            state, slopes = self.states[k][0], self.sensitivities[k][1]
            turned = slopes.rearranged(lambda t: t.flatten(0, 1)[start:stop])
            paths = iter(layer.paths)
            if layer.trains_weight:
                reads = state.rearranged(lambda t: t.repeat_interleave(times, 0)[start:stop, None, :])
                both = turned.rearranged(lambda t: t[:, :, None]) * reads
                yield next(paths), both.rearranged(lambda t: t.flatten(1))
            if layer.trains_bias:
                yield next(paths), turned


def read_layers(analysis: Analysis) -> Layered | None:
    """The network layer by layer; ``None`` if it is anything else."""
    graph = analysis.reading.prepared
    if len(graph.outputs) != 1:
        return None
    centre = analysis.centre
    moving = _moving(graph)
    nodes = [node for node in graph.nodes if node.name in moving]
    layers: list[Layer] = []
    current: str | None = None  # the tensor that the next operation has to read
    used: set[str] = set()
    for position, node in enumerate(nodes):
        if is_linear(node) and (current is None or _reads(node, current)):
            names = [part.name for part in node.args if isinstance(part, Ref)]
            parameters = names[1:]
            if len(names) != len(node.args) or used & set(parameters) or names[0] in used:
                return None
            if any(name not in graph.leaves for name in parameters):
                return None
            used |= set(parameters)
            layers.append(_layer(node, names, moving, centre, {leaf.name: leaf.path for leaf in graph.parameters}))
        elif node.op == "surefoot.scalar" and layers and _reads(node, current):
            if layers[-1].function is not None:
                return None
            function: Any = node.args[1]
            layers[-1] = replace(layers[-1], function=function, after=node.module)
        elif not (layers and _reads(node, current) and all(record_of(rest).in_order for rest in nodes[position:])):
            return None
        current = node.name
    if not layers or current != graph.outputs[0] or layers[0].reads in moving:
        return None
    inputs = centre[layers[0].reads]
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not _stored(graph, layers[0].reads):
        return None
    return Layered(analysis, tuple(layers), inputs.double())


def _stored(graph: Graph, name: str) -> bool:
    """Whether a tensor holds stored numbers, at most moved around, and so has no error."""
    if name in graph.leaves:
        return True
    node = graph.by_name[name]
    return record_of(node).form_of(node) is Form.LAYOUT and all(_stored(graph, part) for part in node.inputs)


def _moving(graph: Graph) -> set[str]:
    """The tensors that depend on parameters that vary."""
    moving = {leaf.name for leaf in graph.parameters if leaf.trainable}
    for node in graph.nodes:
        if moving & set(node.inputs):
            moving.add(node.name)
    return moving


def _reads(node: Node, current: str | None) -> bool:
    first = node.args[0]
    return isinstance(first, Ref) and first.name == current


def _layer(
    node: Node, names: list[str], moving: set[str], centre: dict[str, Tensor], paths: dict[str, str]
) -> Layer:
    return Layer(
        reads=names[0],
        after=node.module,
        weight=centre[names[1]].detach().double(),
        bias=centre[names[2]].detach().double() if len(names) > 2 else None,
        trains_weight=names[1] in moving,
        trains_bias=len(names) > 2 and names[2] in moving,
        paths=tuple(paths[name] for name in names[1:] if name in moving),
        function=None,
    )
