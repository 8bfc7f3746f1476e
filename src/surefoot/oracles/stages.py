r"""A computation as two stages: biaffine first, the rest after.

.. math:: \phi_t(x, u) = g_t(w), \qquad w = b_t(x, u)

The first stage is biaffine in the state and the parameters, so its second derivative is the mixed one alone. The
interface :math:`w` holds what the second stage reads or what is passed on: pre-activations, and states or
parameters that are read beyond the first stage. With :math:`N = \partial_xb`, :math:`E = \partial_ub`,
:math:`G = \nabla g^\top`, :math:`K = \nabla^2g[\cdot,\cdot,\lambda]`, :math:`\mu = G^\top\lambda` and
:math:`\Gamma = \nabla^2_{xu}b[\cdot,\cdot,\mu]`, the objects of Prop. lin_quad are

.. math:: A = GN, \quad B = GE, \quad P_{t-1} = N^\top KN, \quad Q = E^\top KE, \quad R = N^\top KE + \Gamma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from surefoot.chain import Computation
from surefoot.graph import Graph, Node, Role, Spec
from surefoot.graph.nodes import Ref, run_widened
from surefoot.operations.common import separate
from surefoot.operations.forms import Degree, Form, degree_of, form_of
from surefoot.operations.products import is_linear
from surefoot.operations.record import record_of

LARGEST = 1 << 15  # numbers in a state: its cost-to-go takes 8 gigabytes


@dataclass(frozen=True)
class Stages:
    """The two stages of a computation, by names of tensors.

    Attributes:
        needed: all that it reads or passes on and does not compute.
        state: what of the state before varies with the parameters of earlier computations.
        parameters: leaves of the parameters it reads.
        first: the operations of the biaffine stage.
        interface: what the second stage reads or passes on, and varies.
        second: the other operations.
        after: what of the state after varies.
        samples: how many samples there are if they stay apart, else 1.
        linear: the operation of the first stage, if it is one linear layer on the only state tensor.
        entrywise: whether the second stage is one scalar function on every entry of one tensor.
    """

    needed: tuple[str, ...]
    state: tuple[str, ...]
    parameters: tuple[str, ...]
    first: tuple[Node, ...]
    interface: tuple[str, ...]
    second: tuple[Node, ...]
    after: tuple[str, ...]
    samples: int
    linear: Node | None
    entrywise: bool


_FOUND: WeakKeyDictionary[Computation, Stages] = WeakKeyDictionary()


def stages(computation: Computation, batch: int) -> Stages:
    """The stages of a computation of a chain with so many rows in its output; found once."""
    if computation not in _FOUND:
        _FOUND[computation] = _stages(computation, batch)
    return _FOUND[computation]


def _stages(computation: Computation, batch: int) -> Stages:
    graph = computation.graph
    state = tuple(name for name in computation.before if _varies(graph, name))
    parameters = tuple(name for path in computation.blocks for name in graph.blocks[path].parameters)
    degrees = {name: Degree(state=1) for name in state} | {name: Degree(parameters=1) for name in parameters}
    late: set[str] = set()
    first, second = [], []
    for node in computation.nodes:
        degrees[node.name] = degree_of(node, degrees)
        if late.isdisjoint(node.inputs) and degrees[node.name].is_biaffine:
            first.append(node)
        else:
            second.append(node)
            late.add(node.name)
    after = tuple(name for name in computation.after if _varies(graph, name))
    read = dict.fromkeys([*(name for node in second for name in node.inputs), *after])
    interface = tuple(name for name in read if name not in late and _varies(graph, name))
    made = {node.name for node in computation.nodes}
    needed = dict.fromkeys([*(n for node in computation.nodes for n in node.inputs), *computation.after, *state])
    return Stages(
        needed=tuple(name for name in (*needed, *parameters) if name not in made),
        state=state,
        parameters=parameters,
        first=tuple(first),
        interface=interface,
        second=tuple(second),
        after=after,
        samples=_samples(graph, state, first, interface, second, after, batch),
        linear=_linear(graph, state, parameters, first, interface),
        entrywise=_is_entrywise(graph, interface, second, after),
    )


def _varies(graph: Graph, name: str) -> bool:
    return Role.PARAMETERS in graph.roles[name] and _is_real(graph, name)


def _is_real(graph: Graph, name: str) -> bool:
    spec = graph.spec(name)
    return any(item.dtype.is_floating_point for item in ((spec,) if isinstance(spec, Spec) else spec))


def _samples(
    graph: Graph,
    state: Sequence[str],
    first: Sequence[Node],
    interface: Sequence[str],
    second: Sequence[Node],
    after: Sequence[str],
    batch: int,
) -> int:
    """How many samples there are if they stay apart in both stages, else 1.

    The vector of a state of several tensors goes by the rows of the batch, so only these count there.
    """
    specs = [graph.spec(name) for name in (*state, *interface, *after)]
    shapes = [spec.shape for spec in specs if isinstance(spec, Spec)]
    count = shapes[0][0] if shapes and shapes[0] else 1
    if len(shapes) < len(specs) or any(shape[:1] != (count,) for shape in shapes):
        return 1
    if count != batch and max(len(state), len(after)) > 1:
        return 1
    return count if separate(graph, first, state, count) and separate(graph, second, interface, count) else 1


def _linear(
    graph: Graph, state: Sequence[str], parameters: Sequence[str], first: Sequence[Node], interface: Sequence[str]
) -> Node | None:
    """The linear layer that the first stage consists of, apart from what does not vary and from reshaping."""
    if len(interface) != 1 or len(state) > 1:
        return None
    node = graph.by_name.get(interface[0])
    if node is None or not is_linear(node):
        return None
    source, weight, bias = (node.arguments[key] for key in ("input", "weight", "bias"))
    reshaped, rest = {*state}, {*parameters}
    for other in first:
        if other is node or {*reshaped, *rest}.isdisjoint(other.inputs):
            continue
        if not record_of(other).in_order or rest.intersection(other.inputs):
            return None
        reshaped.add(other.name)
    fits = isinstance(source, Ref) and (source.name in reshaped or not state)
    names = {ref.name for ref in (weight, bias) if isinstance(ref, Ref)}
    return node if fits and source.name not in rest and rest <= names else None


def _is_entrywise(graph: Graph, interface: Sequence[str], second: Sequence[Node], after: Sequence[str]) -> bool:
    if len(interface) != 1 or len(after) != 1 or not isinstance(graph.spec(interface[0]), Spec):
        return False
    last = interface[0]
    for node in second:
        reshapes = record_of(node).in_order
        if node.inputs != (last,) or not (reshapes or form_of(node) is Form.ELEMENTWISE):
            return False
        last = node.name
    return after[0] == last


def run(nodes: Sequence[Node], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values after some operations, in double precision."""
    result = dict(values)
    for node in nodes:
        result[node.name] = run_widened(node, result)
    return result
