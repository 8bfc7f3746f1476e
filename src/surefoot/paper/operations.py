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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch.nn import functional as F

from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph.structure import Graph, Node, Ref, Spec
from surefoot.magnitude import Magnitude
from surefoot.norms import patch_overlap
from surefoot.operations.dimensions import spatial
from surefoot.paper.constants import Biaffine, Smooth
from surefoot.paper.layers import (
    CONVOLUTION_BIAS,
    OVERLAPPING_MAX_POOL,
    average_pool,
    batch_norm,
    convolution,
    fully_connected,
    max_pool,
    relu,
    sigmoid,
    softmax,
    softplus,
)

UNEVEN_AVERAGE = (
    "Also wrong in the paper: an average pooling with overlapping patches whose divisor is smaller at the border "
    "(padding or partial patches left out of the count), or with more patches than entries, has ℓ > 1."
)

# torch's soft-plus is the identity above this number, where it differs from it by less than 2.1e-9
_SOFTPLUS_THRESHOLD = 20.0
# a norm of one as computed
_EXPANSIVE = 1.0 + 1e-10


@dataclass(frozen=True)
class Product:
    """A bi-affine operation of the state and a layer's own tensors.

    Attributes:
        biaffine: its constants, all its tensors being parameters.
        state: the tensor that is the state.
        weight: the tensor of weights.
        bias: the tensor of intercepts, if it has any.
    """

    biaffine: Biaffine
    state: str
    weight: str
    bias: str | None


def refuse(node: Node, why: str = "") -> NoReturn:
    """Say that the paper has nothing about an operation.

    Raises:
        UnsupportedOperation: always.
    """
    because = f": in the paper {why}" if why else ""
    raise UnsupportedOperation(
        f"the paper gives no constant for '{node.op}' as used in {describe(node.module)}{because}. "
        'Use constants="certified", which covers more operations, or change the model.'
    )


def is_rearrangement(node: Node) -> bool:
    """Whether an operation only moves the numbers of one tensor: the paper passes over such operations.

    A cast to integers rounds, and a view as another type reads other numbers.
    """
    real = all(spec.dtype.is_floating_point for spec in node.specs)
    reinterprets = node.op == "aten.view" and "dtype" in node.arguments
    return node.op in _REARRANGEMENTS and real and not reinterprets


def product_of(graph: Graph, node: Node) -> Product | None:
    """A fully connected layer or a convolution with its constants; ``None`` for any other operation."""
    if node.op == "aten.linear":
        biaffine = fully_connected(math.prod(_shape(node)[:-1]))
    elif node.op in _CONVOLUTIONS:
        biaffine = _convolution(graph, node, _CONVOLUTIONS[node.op])
    else:
        return None
    bias: Ref | None = node.arguments["bias"]
    if bias is None:
        biaffine = replace(biaffine, lipschitz_parameters=Magnitude.zero(), unsound=())
    state, weight = node.arguments["input"].name, node.arguments["weight"].name
    return Product(biaffine, state, weight, None if bias is None else bias.name)


def function_of(graph: Graph, node: Node) -> Smooth:
    """The constants of a non-linear function, a pooling or a normalisation.

    Raises:
        UnsupportedOperation: if the paper does not list it.
    """
    read = _FUNCTIONS.get(node.op)
    if read is None:
        refuse(node, _REMARKS.get(node.op, ""))
    return read(graph, node)


def _shape(node: Node) -> tuple[int, ...]:
    assert isinstance(node.spec, Spec)
    return node.spec.shape


def _argument_shape(graph: Graph, node: Node, key: str) -> tuple[int, ...]:
    spec = graph.spec(node.arguments[key].name)
    assert isinstance(spec, Spec)
    return spec.shape


def _convolution(graph: Graph, node: Node, dims: int) -> Biaffine:
    shape = _shape(node)
    batch = shape[0] if len(shape) == dims + 2 else 1
    positions = math.prod(shape[-dims:])
    kernel = _argument_shape(graph, node, "weight")[-dims:]
    stride, dilation = (spatial(node.arguments[key], dims) for key in ("stride", "dilation"))
    if dims == 2 and len({*zip(kernel, stride, strict=True)}) == 1 and set(dilation) == {1}:
        return convolution(kernel[0], stride[0], batch, positions)
    sides = zip(kernel, stride, dilation, strict=True)
    patches = math.prod(math.ceil(k * math.gcd(s, d) / s) for k, s, d in sides)
    overlap = Magnitude.of(patches).sqrt()
    return Biaffine(
        overlap,
        Magnitude.of(batch).sqrt() * overlap,
        Magnitude.zero(),
        Magnitude.zero(),
        () if positions <= patches else (CONVOLUTION_BIAS,),
    )


def _softplus(graph: Graph, node: Node) -> Smooth:
    if node.arguments["beta"] != 1:
        refuse(node, f"soft-plus has β = 1, here it has β = {node.arguments['beta']:g}")
    if node.arguments["threshold"] < _SOFTPLUS_THRESHOLD:
        refuse(node, f"soft-plus is curved, here it is linear above {node.arguments['threshold']:g}")
    return softplus(node.numel)


def _softmax(graph: Graph, node: Node) -> Smooth:
    shape = _shape(node)
    classes = shape[node.arguments["dim"]] if shape else 1
    return softmax(classes, node.numel // classes)


def _max_pool(graph: Graph, node: Node) -> Smooth:
    dims = int(node.op[-2])
    size = _argument_shape(graph, node, "self")[-dims:]
    kernel = spatial(node.arguments["kernel_size"], dims)
    stride = spatial(node.arguments["stride"] or kernel, dims)
    padding, dilation = (spatial(node.arguments[key], dims) for key in ("padding", "dilation"))
    overlap = patch_overlap(size, kernel, stride, padding, dilation, _shape(node)[-dims:])
    return replace(max_pool(), unsound=(OVERLAPPING_MAX_POOL,) if overlap > 1 else ())


def _average_pool(graph: Graph, node: Node) -> Smooth:
    dims = int(node.op[-2])
    if node.arguments["divisor_override"] is not None:
        refuse(node, "an average divides by the size of its patch, here by another number")
    size = _argument_shape(graph, node, "self")[-dims:]
    kernel = spatial(node.arguments["kernel_size"], dims)
    stride = spatial(node.arguments["stride"] or kernel, dims)
    padding = spatial(node.arguments["padding"], dims)
    options = {key: node.arguments[key] for key in ("ceil_mode", "count_include_pad")}
    sides = zip(size, kernel, stride, padding, strict=True)
    return _averaging(partial(F.avg_pool1d, **options), [(n, k, s, p) for n, k, s, p in sides if s < k])


def _adaptive_average_pool(graph: Graph, node: Node) -> Smooth:
    dims = int(node.op[-2])
    sides = zip(_argument_shape(graph, node, "self")[-dims:], _shape(node)[-dims:], strict=True)
    return _averaging(F.adaptive_avg_pool1d, [(n, m) for n, m in sides if n % m])


def _averaging(average: Callable[..., torch.Tensor], overlapping: list[tuple[int, ...]]) -> Smooth:
    """Average pooling, flagged if it is expansive.

    It is a Kronecker product of averages along single dimensions, so its norm is the product of theirs; those
    whose patches are disjoint have a norm of at most one.
    """
    norm = 1.0
    for size, *options in overlapping:
        matrix = average(torch.eye(size, dtype=torch.float64).unsqueeze(1), *options)[:, 0]
        norm *= float(torch.linalg.matrix_norm(matrix, ord=2))
    return replace(average_pool(), unsound=(UNEVEN_AVERAGE,) if norm > _EXPANSIVE else ())


def _batch_norm(graph: Graph, node: Node) -> Smooth:
    if node.arguments["running_mean"] is not None:
        refuse(node, "batch-normalisation uses the statistics of the batch, as after model.train()")
    batch = _shape(node)[0]
    return batch_norm(node.numel // batch, batch, node.arguments["eps"])


_CONVOLUTIONS = {"aten.conv1d": 1, "aten.conv2d": 2, "aten.conv3d": 3}
_FUNCTIONS: dict[str, Callable[[Graph, Node], Smooth]] = {
    "aten.relu": lambda graph, node: relu(),
    "aten.softplus": _softplus,
    "aten.sigmoid": lambda graph, node: sigmoid(node.numel),
    "aten.softmax": _softmax,
    "aten.batch_norm": _batch_norm,
    "aten.mean": lambda graph, node: average_pool(),
    **{f"aten.max_pool{dims}d": _max_pool for dims in (1, 2, 3)},
    **{f"aten.avg_pool{dims}d": _average_pool for dims in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{dims}d": _adaptive_average_pool for dims in (1, 2, 3)},
}
_REMARKS = {
    "surefoot.scale_shift": "normalisations have no scale and shift of their own (affine=False)",
    "aten.embedding": "inputs are vectors",
    "aten.tanh": "activations are ReLU, soft-plus, sigmoid and soft-max",
    "aten.mul": "layers are matrix products and convolutions",
}
_REARRANGEMENTS = {
    "aten.alias", "aten.clone", "aten.contiguous", "aten.view", "aten.reshape", "aten._unsafe_view",
    "aten.flatten", "aten.unflatten", "aten.squeeze", "aten.unsqueeze", "aten.permute", "aten.transpose", "aten.t",
    "aten.numpy_T", "aten.mT", "aten.swapaxes", "aten.movedim", "aten.flip", "aten.roll", "aten.pixel_shuffle",
    "aten.pixel_unshuffle", "aten.channel_shuffle", "aten.to", "aten._to_copy", "aten.dropout",
    "aten.feature_dropout", "aten.alpha_dropout",
}  # fmt: skip
