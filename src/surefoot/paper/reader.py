r"""The paper's algorithm on a PyTorch model: printed constants, flagged where they are no upper bounds.

*Layers.* A fully connected layer or a convolution begins a layer, everything else is one of its functions
:math:`a_{t,j}`; before the first one :math:`b_t` is the identity (:math:`L_b = l^u = 0`, :math:`l^x = 1`). Every
layer reads the last state alone; the constants of residual networks are in :func:`~surefoot.paper.residual`.

*Readings*, where the paper leaves something open. A fully connected layer on r rows (samples, or samples ×
positions) has :math:`l^u = \sqrt r`: its intercept is copied to every row; without intercept :math:`l^u = 0`.
Batch-normalisation counts channels × positions as δ and the batch as m. A mean over dimensions is an average
pooling whose patches are as large as those dimensions.

*Domains*

* ``ProductBall(R)``: Algorithm 4 (Prop. smoothdeep), :math:`\|u_t\|_2 \le R_t`.
* ``ProductBall(R, center=...)``: the same after the corollary at the end of section 4,
  :math:`\|u_t - u_t^*\|_2 \le R_t`.
* ``Ball(r)``: it lies in the product of balls of radius :math:`r`, and that is what is read.
* ``wrt="input"``: Corollary smooth_state with the present parameters on :math:`\|x\|_2 \le R`; a ball of radius
  :math:`r` around :math:`x^*` lies in that of radius :math:`\|x^*\| + r` around zero.

Parameters that ask for no gradients do not vary: a frozen weight :math:`w` makes :math:`\beta(\cdot, w)` part of
:math:`\beta^x`, so :math:`l^x = L_b\|w\|_2` and :math:`L_b = 0`; a frozen intercept :math:`c` makes
:math:`\beta^u(c)` part of :math:`\beta^0`, so :math:`\|b(0,0)\| = l^u\|c\|_2` and :math:`l^u = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from surefoot.certificate import Certificate, Row
from surefoot.chain import Chain
from surefoot.domains import Ball, Domain, DomainError, ProductBall, Region
from surefoot.enclosure import norm
from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph.structure import Graph, Leaf, Node, Role, Source, Spec
from surefoot.magnitude import Magnitude, stack
from surefoot.operations.common import spatial
from surefoot.operations.forms import Form, form_of
from surefoot.paper import layers as printed
from surefoot.paper.algorithm import VALUE_AT_ZERO_DROPPED, LayerTrace, algorithm_4, around_point
from surefoot.paper.chains import compositions, fix_parameters, smooth_state
from surefoot.paper.constants import ZERO, Biaffine, Computation, Result, Smooth, merge_flags

_IDENTITY = Biaffine.of(0.0, lipschitz_state=1.0)
_THRESHOLD = 20.0  # torch's soft-plus is the identity above, where it differs from it by less than 2.1e-9
_REMARKS = {
    "surefoot.scale_shift": "normalisations have no scale and shift of their own (affine=False)",
    "aten.embedding": "inputs are vectors",
    "aten.tanh": "activations are ReLU, soft-plus, sigmoid and soft-max",
    "aten.mul": "layers are matrix products and convolutions",
    "aten.add": "layers act on the last state alone; for residual networks see surefoot.paper.residual",
    "surefoot.argmin": "minimisers have constants of their own: see surefoot.paper.implicit_function",
}
# arguments by which an operation may drop, fill or repeat numbers though it returns as many as it reads
_NOT_ONE_TO_ONE = {"pad", "padding", "value", "kernel_size", "step", "diagonal", "offset"}


def _refuse(node: Node, why: str = "") -> NoReturn:
    """Say that the paper has nothing about an operation."""
    because = f": in the paper {why}" if why else ""
    raise UnsupportedOperation(
        f"the paper gives no constant for '{node.op}' as used in {describe(node.module)}{because}. "
        'Use constants="certified", which covers more operations, or change the model.'
    )


def _shape_of(graph: Graph, name: str) -> tuple[int, ...]:
    spec = graph.spec(name)
    assert isinstance(spec, Spec)
    return spec.shape


def _linear(graph: Graph, node: Node) -> Biaffine:
    return printed.fully_connected(math.prod(_shape_of(graph, node.name)[:-1]))


def _convolution(graph: Graph, node: Node) -> Biaffine:
    shape, kernel = _shape_of(graph, node.name), _shape_of(graph, node.arguments["weight"].name)[-2:]
    stride, dilation = (spatial(node.arguments[key], 2) for key in ("stride", "dilation"))
    if len({*zip(kernel, stride, strict=True)}) > 1 or set(dilation) != {1}:
        _refuse(node, "a convolution has k × k patches of neighbouring entries and one stride")
    batch = shape[0] if len(shape) == 4 else 1
    return printed.convolution(kernel[0], stride[0], batch, math.prod(shape[-2:]))


def _softplus(graph: Graph, node: Node) -> Smooth:
    if node.arguments["beta"] != 1:
        _refuse(node, f"soft-plus has β = 1, here it has β = {node.arguments['beta']:g}")
    if node.arguments["threshold"] < _THRESHOLD:
        _refuse(node, f"soft-plus is curved, here it is linear above {node.arguments['threshold']:g}")
    return printed.softplus(node.numel)


def _softmax(graph: Graph, node: Node) -> Smooth:
    shape = _shape_of(graph, node.name)
    classes = shape[node.arguments["dim"]] if shape else 1
    return printed.softmax(classes, node.numel // classes)


def _batch_norm(graph: Graph, node: Node) -> Smooth:
    if node.arguments["running_mean"] is not None:
        _refuse(node, "batch-normalisation uses the statistics of the batch, as after model.train()")
    batch = _shape_of(graph, node.name)[0]
    return printed.batch_norm(node.numel // batch, batch, node.arguments["eps"])


def _overlaps(graph: Graph, node: Node) -> bool:
    """Whether the patches of a pooling have entries in common; where there is one patch, there is no other."""
    kernel = spatial(node.arguments["kernel_size"], 2)
    stride = spatial(node.arguments["stride"] or kernel, 2)
    patches = _shape_of(graph, node.name)[-2:]
    return any(s < k and m > 1 for s, k, m in zip(stride, kernel, patches, strict=True))


def _max_pool(graph: Graph, node: Node) -> Smooth:
    if set(spatial(node.arguments["dilation"], 2)) != {1}:
        _refuse(node, "patches are made of neighbouring entries")
    return printed.max_pool(2, 1 if _overlaps(graph, node) else 2)


def _average_pool(graph: Graph, node: Node) -> Smooth:
    """ℓ = 1 holds if every patch is divided by its size, or if no two patches overlap."""
    padded = any(spatial(node.arguments["padding"], 2)) and not node.arguments["count_include_pad"]
    uneven = _overlaps(graph, node) and (padded or node.arguments["ceil_mode"])
    if uneven or node.arguments.get("divisor_override") is not None:
        _refuse(node, "an average divides by the size of its patch, here by another number at the border")
    return printed.average_pool()


def _adaptive_average_pool(graph: Graph, node: Node) -> Smooth:
    sizes = _shape_of(graph, node.arguments["self"].name)[-2:], _shape_of(graph, node.name)[-2:]
    if any(n % m for n, m in zip(*sizes, strict=True)):
        _refuse(node, "the patches of a pooling are of one size")
    return printed.average_pool()


_PRODUCTS: dict[str, Callable[[Graph, Node], Biaffine]] = {"aten.linear": _linear, "aten.conv2d": _convolution}
_FUNCTIONS: dict[str, Callable[[Graph, Node], Smooth]] = {
    "aten.relu": lambda graph, node: printed.relu(),
    "aten.sigmoid": lambda graph, node: printed.sigmoid(node.numel),
    "aten.mean": lambda graph, node: printed.average_pool(),
    "aten.softplus": _softplus,
    "aten.softmax": _softmax,
    "aten.batch_norm": _batch_norm,
    "aten.max_pool2d": _max_pool,
    "aten.avg_pool2d": _average_pool,
    "aten.adaptive_avg_pool2d": _adaptive_average_pool,
}


def _is_rearrangement(graph: Graph, node: Node) -> bool:
    """Whether an operation only moves the numbers of one tensor: the paper passes over such operations.

    It has the form of a layout, reads one real tensor, returns one of as many numbers, and takes no argument by
    which some of them could be left out and others repeated. A cast to integers rounds, and a view as another type
    reads other numbers.
    """
    if form_of(node) is not Form.LAYOUT or len(node.inputs) != 1:
        return False
    specs = (graph.spec(node.inputs[0]), node.spec)
    if not all(isinstance(spec, Spec) and spec.dtype.is_floating_point for spec in specs):
        return False
    reinterprets = node.op == "aten.view" and "dtype" in node.arguments
    one_to_one = _NOT_ONE_TO_ONE.isdisjoint(node.arguments) and graph.numel(node.inputs[0]) == node.numel
    return one_to_one and not reinterprets


@dataclass
class _Layer:
    """One layer of the paper, read off a graph."""

    biaffine: Biaffine = _IDENTITY  # its constants, all its own tensors being parameters
    weight: str | None = None  # the leaf that holds its weights; none for the identity
    bias: str | None = None
    functions: list[tuple[Node, Smooth]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # its operations without rearrangements
    shape: tuple[int, ...] = ()  # of its result

    @property
    def leaves(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]

    @property
    def computation(self) -> Computation:
        return Computation(self.biaffine, tuple(f for _, f in self.functions), self.nodes[0].module)


def _layers_of(graph: Graph) -> list[_Layer]:
    """The layers of a graph, in order; refuses what the paper prints no constants for."""
    for names in (graph.live[0], graph.outputs):
        if len(list(names)) != 1:
            raise UnsupportedOperation(
                f"the paper's networks have one input and one output, this model {len(list(names))}. Use "
                'constants="certified", or join them in one tensor.'
            )
    state = {*graph.live[0]}  # the names of the last state, and of its rearrangements
    layers: list[_Layer] = []
    taken: set[str] = set()
    for node in graph.nodes:
        if Role.INPUT not in graph.roles[node.name]:
            continue
        rearranged = _is_rearrangement(graph, node)
        if any(Role.INPUT in graph.roles[name] and name not in state for name in node.inputs):
            _refuse(node, "a layer acts on the last state alone, here on an earlier one or on several")
        if rearranged:
            state.add(node.name)
        elif node.op in _PRODUCTS:
            biaffine, bias = _PRODUCTS[node.op](graph, node), node.arguments["bias"]
            layers.append(_Layer(biaffine, _own_leaf(graph, node, node.arguments["weight"].name, taken)))
            if bias is None:  # a layer without intercept has no linear part
                layers[-1].biaffine = replace(biaffine, lipschitz_parameters=ZERO, unsound=())
            else:
                layers[-1].bias = _own_leaf(graph, node, bias.name, taken)
            state = {node.name}
        elif node.op in _FUNCTIONS:
            layers = layers or [_Layer()]
            layers[-1].functions.append((node, _FUNCTIONS[node.op](graph, node)))
            state = {node.name}
        else:
            _refuse(node, _REMARKS.get(node.op, ""))
        if layers:
            layers[-1].shape = node.specs[0].shape
            layers[-1].nodes += [] if rearranged else [node]
    if graph.outputs[0] not in state:
        raise UnsupportedOperation(
            "the paper's networks return their last state, this model another tensor. Return the last one, or use "
            'constants="certified".'
        )
    return layers


def _own_leaf(graph: Graph, node: Node, name: str, taken: set[str]) -> str:
    """The leaf that a tensor of weights is, possibly with its numbers moved; each belongs to one layer."""
    while name not in graph.leaves:
        source = graph.by_name[name]
        if not _is_rearrangement(graph, source):
            _refuse(node, f"weights are parameters, here they are computed by '{source.op}'")
        name = source.inputs[0]
    if Role.INPUT in graph.roles[name]:
        _refuse(node, "weights are parameters, here they depend on the input")
    if name in taken:
        _refuse(node, "every layer has parameters of its own, here they are shared with an earlier layer")
    taken.add(name)
    return name


def read(chain: Chain) -> tuple[Computation, ...]:
    """The layers of a chain with the constants the paper prints for them, to give to ``algorithm_4``.

    Raises:
        UnsupportedOperation: where the paper prints none, naming operation and module.

    >>> chain = Chain(nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)), torch.ones(5, 3))
    >>> print(algorithm_4(read(chain), radii=1.0, input_norm=1.0))
    layer    m_{t,0}        m_t        ℓ_t        L_t
        0  4.237e+00  7.336e+00  3.237e+00  2.619e+00
        2  1.691e+01  1.691e+01  1.281e+01  9.091e+00
    """
    return tuple(layer.computation for layer in _layers_of(chain.graph))


def certify_as_printed(
    model: nn.Module,
    x: Any,
    *,
    domain: Domain,
    wrt: Literal["params", "input"] = "params",
    input_norm: float | None = None,
    keep_value_at_zero: bool = True,
    corrected: bool = False,
) -> Certificate:
    r"""Bound, Lipschitz constant and smoothness by the paper's algorithm and constants, as printed.

    Args:
        model: a network made of the layers the paper lists; on the ``meta`` device nothing is allocated.
        x: the batch.
        domain: where the variables may be; see the module for how each domain is read.
        wrt: what varies: the parameters, or the input for the present parameters.
        input_norm: use this for the norm of the stacked batch; required on ``meta``.
        keep_value_at_zero: whether :math:`\|a(0)\|` enters, as printed; without it the numbers of the paper's
            application come out, which are no bounds and are flagged (ERRATA 4).
        corrected: apply ERRATA 5 and 7 to Algorithm 4. Corollary smooth_state has no such lines.

    Returns:
        A certificate without numbers for single blocks: the algorithm has one number for all of them. Its
        ``flags`` name every constant used that is not an upper bound.

    Raises:
        UnsupportedOperation: if the paper has no constants for an operation.
        DomainError: if the domain does not fit.
    """
    if not isinstance(domain, ProductBall | Ball):
        raise DomainError(
            f"the paper's algorithm is for balls, not for {type(domain).__name__}: use ProductBall, Ball, or "
            'constants="certified"'
        )
    chain = Chain(model, x)
    values = _Values(chain, dict(model.named_parameters()))
    layers = _layers_of(chain.graph)
    if wrt == "input":
        return _in_the_input(layers, values, domain, input_norm, keep_value_at_zero)
    return _in_the_parameters(layers, values, domain, input_norm, keep_value_at_zero, corrected)


class _Values:
    """The present values of a chain's leaves, and their norms."""

    def __init__(self, chain: Chain, parameters: Mapping[str, Tensor]) -> None:
        self.graph: Graph = chain.graph
        self.parameters = parameters
        by_name = dict(zip((leaf.name for leaf in self.graph.inputs), chain.inputs, strict=True))
        self.inputs = {name: by_name[name] for name in self.graph.live[0]}  # those that are read

    def present(self, leaf: Leaf) -> Tensor:
        if leaf.source is Source.INPUT:
            return self.inputs[leaf.name]
        return self.graph.held[leaf.name] if leaf.name in self.graph.held else self.parameters[leaf.path]

    def norm(self, names: Iterable[str], center: Mapping[str, Tensor] | str = "present") -> Magnitude:
        """The norm of several leaves together at a centre."""
        if center == "origin":
            return ZERO
        values = []
        for leaf in map(self.graph.leaves.__getitem__, names):
            value = self.present(leaf) if isinstance(center, str) else center.get(leaf.path)
            if value is None:
                raise DomainError(f"the centre has no entry for '{leaf.path}'")
            if (shape := tuple(value.shape)) != leaf.spec.shape:
                raise DomainError(f"the centre of '{leaf.path}' has shape {shape}, not {leaf.spec.shape}")
            if value.device.type == "meta":
                raise DomainError(
                    f"'{leaf.path}' is on the meta device and has no value: use ProductBall(radius), whose centre "
                    'is the origin, and wrt="params"'
                )
            values.append(value.detach())
        return norm(values)

    def input_norm(self, bound: float | None) -> Magnitude:
        """The norm of the stacked batch, or the given bound on it."""
        if bound is not None:
            return Magnitude.of(float(bound))
        if any(value.device.type == "meta" for value in self.inputs.values()):
            raise DomainError(
                "the input is on the meta device and has no norm: pass input_norm, a bound on the norm of the "
                "stacked batch"
            )
        return norm([value.detach() for value in self.inputs.values()])


def _in_the_parameters(
    layers: Sequence[_Layer],
    values: _Values,
    domain: Domain,
    input_norm: float | None,
    keep_value_at_zero: bool,
    corrected: bool,
) -> Certificate:
    graph = values.graph
    if not graph.blocks:
        raise DomainError("no parameter asks for gradients: nothing varies. Call model.requires_grad_(True)")
    region = Region.of(domain, {path: block.parameters for path, block in graph.blocks.items()})
    computations, radii, centres = [], [], []
    for layer in layers:
        varying = [name for name in layer.leaves if name in region.variables]
        computations.append(_frozen(layer, values, varying))
        # parameters of one block move together, by at most its radius
        blocks = {graph.owners[name]: Magnitude.of(region.radii[name]) for name in varying}
        radii.append(stack(list(blocks.values())).norm() if len(blocks) > 1 else next(iter(blocks.values()), ZERO))
        centres.append(values.norm(varying, domain.center))
    if domain.center != "origin":
        computations = list(around_point(computations, centres))
    trace = algorithm_4(computations, radii, values.input_norm(input_norm), keep_value_at_zero, corrected)
    text = str(domain)
    if isinstance(domain, Ball):
        text += ", read as each layer within that distance"
    return _certificate(trace.result, layers, trace.layers, text, "params")


def _frozen(layer: _Layer, values: _Values, varying: Sequence[str]) -> Computation:
    """The constants of a layer when only some of its tensors vary; see the module."""
    biaffine = layer.computation.biaffine
    if layer.weight is not None and layer.weight not in varying:
        added = biaffine.lipschitz_state + biaffine.smoothness * values.norm([layer.weight])
        biaffine = replace(biaffine, smoothness=ZERO, lipschitz_state=added)
    if layer.bias is not None and layer.bias not in varying:
        added = biaffine.value_at_zero + biaffine.lipschitz_parameters * values.norm([layer.bias])
        biaffine = replace(biaffine, lipschitz_parameters=ZERO, value_at_zero=added)
    return replace(layer.computation, biaffine=biaffine)


def _in_the_input(
    layers: Sequence[_Layer], values: _Values, domain: Domain, input_norm: float | None, keep_value_at_zero: bool
) -> Certificate:
    names = tuple(values.inputs)
    radius = Magnitude.of(Region.of(domain, {"input": names}).radii[names[0]])
    text = str(domain)
    if domain.center != "origin":
        present = domain.center == "present" and input_norm is not None
        radius = radius + (values.input_norm(input_norm) if present else values.norm(names, domain.center))
        text += f", read as within {radius} of the origin"
    parts: list[Smooth] = []
    ends = []  # how many functions there are up to the end of each layer
    for layer in layers:
        affine, *functions = fix_parameters(layer.computation, values.norm(layer.leaves))
        parts += [affine, *(functions if keep_value_at_zero else map(_without_value, functions))]
        ends.append(len(parts))
    after = list(compositions(parts, radius))
    return _certificate(smooth_state(parts, radius), layers, [after[end] for end in ends], text, "input")


def _without_value(function: Smooth) -> Smooth:
    if function.value_at_zero.is_zero:
        return function
    return replace(function, value_at_zero=ZERO, unsound=merge_flags(function.unsound, (VALUE_AT_ZERO_DROPPED,)))


def _certificate(
    result: Result, layers: Sequence[_Layer], after: Sequence[Result | LayerTrace], domain: str, wrt: str
) -> Certificate:
    """The certificate, with one row for what holds after each layer."""
    rows = [
        Row(layer.nodes[0].module, " → ".join(node.op.rpartition(".")[2] for node in layer.nodes), layer.shape,
            one.bound, one.lipschitz, one.smoothness, share=0.0)
        for layer, one in zip(layers, after, strict=True)
    ]  # fmt: skip
    return Certificate(
        bound=result.bound,
        lipschitz=result.lipschitz,
        smoothness=result.smoothness,
        block_lipschitz={},
        block_smoothness=Magnitude.zero((0, 0)),
        make_rows=lambda: rows,
        reasons=() if result.smoothness.is_finite else tuple(_reasons(layers)),
        domain=domain,
        wrt=wrt,
        constants="paper",
        flags=result.flags,
        scalar=math.prod(layers[-1].shape) == 1,
    )


def _reasons(layers: Sequence[_Layer]) -> Iterable[str]:
    """The functions for which the paper defines no smoothness."""
    for layer in layers:
        for node, function in layer.functions:
            if not function.smoothness.is_finite:
                place = f"{node.module or 'model'} ({node.op.rpartition('.')[2]})"
                yield f"{place}: the paper defines no smoothness for it, since it has kinks: use surefoot.smooth"
