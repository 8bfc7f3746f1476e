r"""The printed constants of one operation of a graph: what the paper's lists say about it, or a refusal.

Readings, where the paper leaves something open:

* A fully connected layer on :math:`r` rows (samples, or samples × positions) has :math:`l^u = \sqrt r`: its
  intercept is copied to every row. A layer without intercept has :math:`\beta^u = 0`, hence :math:`l^u = 0`.
* The paper prints :math:`\lceil k/s\rceil` for a :math:`k \times k` kernel with stride :math:`s`, from the lemma
  :math:`L = (\max_i |V_i|)^{1/2}` with :math:`V_i` the patches that contain entry :math:`i`. For other shapes the
  lemma gives :math:`L = (\prod_d c_d)^{1/2}` with :math:`c_d = \lceil k_d/s_d\rceil` along dimension :math:`d`;
  with dilation :math:`h`, :math:`c_d = \lceil k_d \gcd(s_d, h_d)/s_d\rceil`, the number of taps :math:`j < k_d`
  for which :math:`j h_d` leaves a given remainder modulo :math:`s_d`. The printed
  :math:`l^u = \sqrt m\lceil k/s\rceil` is :math:`\sqrt m\,L`.
* Batch-normalisation counts channels × positions as δ and the batch as m, as in
  :class:`~surefoot.paper.vgg.Reading`.
* A mean over dimensions is an average pooling whose patches are as large as those dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
from torch.nn import functional as F

from surefoot.enclosure import norm
from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph.structure import Graph, Node, Spec
from surefoot.implicit.constants import BETA, Constants
from surefoot.implicit.operation import Minimiser
from surefoot.implicit.solver import solved
from surefoot.magnitude import Magnitude
from surefoot.norms import patch_overlap
from surefoot.operations import captured  # noqa: F401  registers the operations
from surefoot.operations.common import spatial
from surefoot.operations.forms import Form, form_of
from surefoot.paper import layers
from surefoot.paper.constants import ZERO, Biaffine, Smooth
from surefoot.paper.layers import CONVOLUTION_BIAS, OVERLAPPING_MAX_POOL

UNEVEN_AVERAGE = (
    "Also wrong in the paper: an average pooling with overlapping patches whose divisor is smaller at the border "
    "(padding or partial patches left out of the count), or with more patches than entries, has ℓ > 1."
)

# torch's soft-plus is the identity above this number, where it differs from it by less than 2.1e-9
_SOFTPLUS_THRESHOLD = 20.0
# a norm of one as computed
_EXPANSIVE = 1.0 + 1e-10


_Sides = tuple[int, ...]
_Reader = Callable[[Graph, Node], Smooth | Biaffine]
_PRINTED: dict[str, _Reader] = {
    "aten.relu": lambda graph, node: layers.relu(),
    "aten.sigmoid": lambda graph, node: layers.sigmoid(node.numel),
    "aten.mean": lambda graph, node: layers.average_pool(),
}
_REMARKS = {
    "surefoot.scale_shift": "normalisations have no scale and shift of their own (affine=False)",
    "aten.embedding": "inputs are vectors",
    "aten.tanh": "activations are ReLU, soft-plus, sigmoid and soft-max",
    "aten.mul": "layers are matrix products and convolutions",
}
# arguments by which an operation may drop, fill or repeat numbers though it returns as many as it reads
_NOT_ONE_TO_ONE = {"pad", "padding", "value", "kernel_size", "step", "diagonal", "offset"}


def printed(*operations: str) -> Callable[[_Reader], _Reader]:
    """Register what the paper prints about operations: a function, or a bi-affine map of state and parameters."""

    def register(reader: _Reader) -> _Reader:
        _PRINTED.update(dict.fromkeys(operations, reader))
        return reader

    return register


def constants_of(graph: Graph, node: Node) -> Smooth | Biaffine:
    """The printed constants of an operation; of a bi-affine one, all its tensors being parameters."""
    reader = _PRINTED.get(node.op)
    if reader is None:
        refuse(node, _REMARKS.get(node.op, ""))
    return reader(graph, node)


def refuse(node: Node, why: str = "") -> NoReturn:
    """Say that the paper has nothing about an operation."""
    because = f": in the paper {why}" if why else ""
    raise UnsupportedOperation(
        f"the paper gives no constant for '{node.op}' as used in {describe(node.module)}{because}. "
        'Use constants="certified", which covers more operations, or change the model.'
    )


def is_rearrangement(graph: Graph, node: Node) -> bool:
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


def _shape(node: Node) -> tuple[int, ...]:
    assert isinstance(node.spec, Spec)
    return node.spec.shape


def _argument_shape(graph: Graph, node: Node, key: str) -> tuple[int, ...]:
    spec = graph.spec(node.arguments[key].name)
    assert isinstance(spec, Spec)
    return spec.shape


def _with_intercept(node: Node, biaffine: Biaffine) -> Biaffine:
    """A layer without intercept has no linear part."""
    if node.arguments["bias"] is not None:
        return biaffine
    return replace(biaffine, lipschitz_parameters=ZERO, unsound=())


PRODUCTS = ("aten.linear", "aten.conv1d", "aten.conv2d", "aten.conv3d")


@printed("aten.linear")
def _linear(graph: Graph, node: Node) -> Biaffine:
    return _with_intercept(node, layers.fully_connected(math.prod(_shape(node)[:-1])))


@printed(*PRODUCTS[1:])
def _convolution(graph: Graph, node: Node) -> Biaffine:
    dims, shape = int(node.op[-2]), _shape(node)
    batch = shape[0] if len(shape) == dims + 2 else 1
    positions = math.prod(shape[-dims:])
    kernel = _argument_shape(graph, node, "weight")[-dims:]
    stride, dilation = (spatial(node.arguments[key], dims) for key in ("stride", "dilation"))
    if dims == 2 and len({*zip(kernel, stride, strict=True)}) == 1 and set(dilation) == {1}:
        return _with_intercept(node, layers.convolution(kernel[0], stride[0], batch, positions))
    sides = zip(kernel, stride, dilation, strict=True)
    patches = math.prod(math.ceil(k * math.gcd(s, d) / s) for k, s, d in sides)
    overlap = Magnitude.of(patches).sqrt()
    flags = () if positions <= patches else (CONVOLUTION_BIAS,)
    return _with_intercept(node, Biaffine(overlap, Magnitude.of(batch).sqrt() * overlap, unsound=flags))


@printed("aten.softplus")
def _softplus(graph: Graph, node: Node) -> Smooth:
    if node.arguments["beta"] != 1:
        refuse(node, f"soft-plus has β = 1, here it has β = {node.arguments['beta']:g}")
    if node.arguments["threshold"] < _SOFTPLUS_THRESHOLD:
        refuse(node, f"soft-plus is curved, here it is linear above {node.arguments['threshold']:g}")
    return layers.softplus(node.numel)


@printed("aten.softmax")
def _softmax(graph: Graph, node: Node) -> Smooth:
    shape = _shape(node)
    classes = shape[node.arguments["dim"]] if shape else 1
    return layers.softmax(classes, node.numel // classes)


@printed("aten.batch_norm")
def _batch_norm(graph: Graph, node: Node) -> Smooth:
    if node.arguments["running_mean"] is not None:
        refuse(node, "batch-normalisation uses the statistics of the batch, as after model.train()")
    batch = _shape(node)[0]
    return layers.batch_norm(node.numel // batch, batch, node.arguments["eps"])


@printed("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def _max_pool(graph: Graph, node: Node) -> Smooth:
    dims = int(node.op[-2])
    dilation = spatial(node.arguments["dilation"], dims)
    overlap = patch_overlap(*_patches(graph, node), dilation, _shape(node)[-dims:])
    return replace(layers.max_pool(), unsound=(OVERLAPPING_MAX_POOL,) if overlap > 1 else ())


@printed("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
def _average_pool(graph: Graph, node: Node) -> Smooth:
    if node.arguments.get("divisor_override") is not None:
        refuse(node, "an average divides by the size of its patch, here by another number")
    options = {key: node.arguments[key] for key in ("ceil_mode", "count_include_pad")}
    overlapping = [(n, k, s, p) for n, k, s, p in zip(*_patches(graph, node), strict=True) if s < k]
    return _averaging(partial(F.avg_pool1d, **options), overlapping)


@printed("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d")
def _adaptive_average_pool(graph: Graph, node: Node) -> Smooth:
    dims = int(node.op[-2])
    sides = zip(_argument_shape(graph, node, "self")[-dims:], _shape(node)[-dims:], strict=True)
    return _averaging(F.adaptive_avg_pool1d, [(n, m) for n, m in sides if n % m])


@printed("surefoot.argmin")
def _implicit(graph: Graph, node: Node) -> Smooth:
    r"""An implicit function of the state, with the constants its problem was declared with.

    Samples have problems of their own, so the derivatives are block diagonal and one sample's constants hold. The
    value at zero is solved for, and off by the residual over :math:`\mu` at most.
    """
    assert isinstance(node.target, Minimiser)
    problem = node.target.problem
    constants = problem.constants
    if len(node.inputs) != 1:
        refuse(node, "an implicit function depends on the state alone, here on further tensors")
    if not isinstance(constants, Constants) or not isinstance(constants.smoothness, float | int):
        refuse(node, "an implicit function has constants μ, L and H: surefoot.implicit.Constants(mu, L, H)")
    spec = graph.spec(node.inputs[0])
    assert isinstance(spec, Spec)
    with torch.no_grad():
        outcome = solved(problem, (torch.zeros(spec.shape, dtype=torch.float64),))
    value = norm(outcome.beta) + norm(outcome.residual) / constants.strong_convexity
    bend = constants.bend(BETA, BETA)
    return layers.implicit_function(constants.smoothness, constants.strong_convexity, bend, value)


def _patches(graph: Graph, node: Node) -> tuple[_Sides, _Sides, _Sides, _Sides]:
    """Along each dimension of a pooling the size of its argument, kernel, stride and padding."""
    dims = int(node.op[-2])
    kernel = spatial(node.arguments["kernel_size"], dims)
    stride = spatial(node.arguments["stride"] or kernel, dims)
    return _argument_shape(graph, node, "self")[-dims:], kernel, stride, spatial(node.arguments["padding"], dims)


def _averaging(average: Callable[..., torch.Tensor], overlapping: Sequence[_Sides]) -> Smooth:
    """Average pooling, flagged if it is expansive.

    It is a Kronecker product of averages along single dimensions, so its norm is the product of theirs; those
    whose patches are disjoint have a norm of at most one.
    """
    norm = 1.0
    for size, *options in overlapping:
        matrix = average(torch.eye(size, dtype=torch.float64).unsqueeze(1), *options)[:, 0]
        norm *= float(torch.linalg.matrix_norm(matrix, ord=2))
    return replace(layers.average_pool(), unsound=(UNEVEN_AVERAGE,) if norm > _EXPANSIVE else ())
