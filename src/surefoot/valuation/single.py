r"""A first pass in single precision: half the time, and a proof wherever its interval decides.

Most of the work of a network is in few operations. These are run in single precision, if a model has no number
that is more than that; all others in double, from numbers of single precision, and their results are rounded to it
again. So everything that is proved of double precision holds for them, and rounding adds a relative
:math:`u = 2^{-24}`. The loss stays as it is.

*What is run in single precision.* What moves numbers, or chooses between them and numbers of single precision,
rounds nothing. *Sums of products* (linear maps, convolutions, products and sums of two tensors) have the bounds of
:mod:`surefoot.valuation.rounding` with this u, whatever the order of summation: they are run on processors only,
where torch's default is to multiply numbers of single precision as they are; where a setting allows shorter ones,
or autocast is on, nothing is run here. Torch asks oneDNN for convolutions by the direct algorithm (the default of
``ideep::convolution_forward``), which adds up products; NNPACK, whose methods of Winograd and Fourier do not, is
off meanwhile. *Activations* are within 16 u of :math:`|a(x)| + |x|\sup|a'|`: part of the one assumption about
floating point. The tests compare kernels with those in double precision. A sweep of 44 million numbers of all
sizes gave no more than 5 u for each of them but relu6 and leaky_relu, which it left out.

*Pulling back* is good to a relative :math:`2^{-14}` of slope and costate for what works on entries. Where an entry
is copied up to t times, sums of t numbers are pulled back, off by :math:`\gamma_t\sum|\lambda_i| \le
\gamma_t\sqrt t\|\lambda\|`, and the slope is :math:`\sqrt t`; of n choices all may be the same entry. In a product
with a parameter W of p entries, and q of them per pair of channels, an entry is pulled back by a sum of t
products, so that it is off by at most :math:`\gamma_t|W|^\top|\lambda|`. For a linear map t is the number of
rows, and :math:`\||W|\|_2 \le \|W\|_F \le \sqrt{\min(\text{rows}, \text{columns})}\,\|W\|_2`: together at
most :math:`\gamma_p` of slope and costate. A convolution is a sum of q such maps, each of them a part of the
matrix of all, so that :math:`\gamma_{pq}` does.

*Range.* Results below :math:`2^{-126}` may be flushed to zero, forward and backward: one such loss per product and
sum is counted, besides what the other arguments make of it. What overflows has no finite norm, and nothing is
known then.

*Norms* of n numbers are computed in single precision, too: off by a relative :math:`(n + 8)u`, and by
:math:`\sqrt n\,2^{-63}` where squares underflow; where n is large, in double.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.graph import Graph, Node, Role, Spec
from surefoot.norms.hermitian import singles_are_exact
from surefoot.operations.record import InSingle, record_of

UNIT = 2.0**-24
KERNEL = 16 * UNIT  # of an activation
PULL = 2.0**-14
SMALL = 2.0**-126  # of the normal numbers, the smallest
_LARGE = 2**21  # entries from which on norms are computed in double

_MOVES = (InSingle.PERMUTED, InSingle.MOVED)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_narrow(node: Node, graph: Graph) -> bool:
    """Whether an operation is run in single precision; all numbers that it is given are numbers of that."""
    if not _fits((*node.args, *node.kwargs.values())):
        return False
    specs = [spec for spec in map(graph.spec, node.inputs) if isinstance(spec, Spec)]
    kinds, record = {spec.dtype.is_floating_point for spec in specs}, record_of(node)
    if record.single in _MOVES:  # whole numbers next to real ones become real, and may be too long for that
        return len(kinds) < 2 or bool(record.selects)
    return record.single is not None and kinds <= {True}


def is_permuted(node: Node) -> bool:
    """Whether the result is every number of the argument once, and no other."""
    return record_of(node).single is InSingle.PERMUTED


def _fits(option: Any) -> bool:
    """Whether an option is the same in single precision; a type asks for another."""
    if isinstance(option, list | tuple):
        return all(map(_fits, option))
    if isinstance(option, torch.dtype):
        return False
    return not isinstance(option, int | float) or float(torch.tensor(option, dtype=torch.float32)) == option


def fits(graph: Graph) -> bool:
    """Whether all numbers that a graph is given are of single precision or less, and what varies reads nothing
    but these, moved, and whole numbers.
    """
    exact = {name for name, leaf in graph.leaves.items() if leaf.spec.dtype in _TYPES}
    if any(leaf.spec.dtype.is_complex or leaf.spec.dtype is torch.float64 for leaf in graph.leaves.values()):
        return False
    varies = {name for name, role in graph.roles.items() if Role.PARAMETERS in role}
    fixed = {node.name: node for node in graph.nodes if node.name not in varies}
    for name, node in fixed.items():
        if record_of(node).single in _MOVES and exact.issuperset(node.inputs):
            exact.add(name)
    read = {name for node in graph.nodes if node.name in varies for name in node.inputs}
    return all(name in exact or not fixed[name].is_real for name in read & fixed.keys())


def is_exact_here(tensors: Mapping[str, Any]) -> bool:
    """Whether torch multiplies numbers of single precision as they are, where these tensors live."""
    return all(map(singles_are_exact, {t.device for t in tensors.values() if isinstance(t, Tensor)}))


def in_single(value: Any) -> Any:
    """Real numbers in single precision; integers and truth values as they are."""
    if isinstance(value, Tensor):
        return value.to(torch.float32) if value.is_floating_point() else value
    return tuple(map(in_single, value))


def pull_of(node: Node, graph: Graph) -> float:
    """The round-off of pulling back through an operation, relative to slope and costate."""
    sizes = [math.prod(spec.shape) for spec in map(graph.spec, node.inputs) if isinstance(spec, Spec)]
    if not is_narrow(node, graph) or is_permuted(node) or not sizes:
        return PULL
    record = record_of(node)
    terms = node.numel // max(min(sizes), 1)  # that what is broadcast is added up of
    if record.single is InSingle.MATRIX:
        parameters = {leaf.name: leaf.spec.shape for leaf in graph.parameters if len(leaf.spec.shape) > 1}
        shapes = [parameters[name] for name in node.inputs if name in parameters]
        terms = math.prod((*shapes[0], *shapes[0][2:])) if len(shapes) == 1 else node.numel
    elif "kernel_size" in node.arguments:
        terms = math.prod(node.arguments["kernel_size"]) ** 2  # windows that overlap
    for choices in (node.arguments[slot] for slot in record.selects):
        terms = max(terms, graph.numel(choices.name))  # all of which may choose the same
    return max(PULL, 8 * UNIT * (terms + 16))


def lost_behind(node: Node, graph: Graph) -> float:
    """What underflows take from what is pulled back through an operation: one product of each two entries."""
    sizes = [math.prod(spec.shape) for spec in map(graph.spec, node.inputs) if isinstance(spec, Spec)]
    return float(node.numel + sum(sizes) + 16) ** 2 * 2 * SMALL


def norm_of(value: Tensor, dim: int | None = None) -> Tensor:
    """The norm of a tensor, or of its rows, such that it is off by no more than :func:`noted` says."""
    wide = value.dtype is not torch.float64 and value.numel() > _LARGE
    return torch.linalg.vector_norm(value, dim=dim, dtype=torch.float64 if wide else None)


def noted(count: int, size: Tensor) -> tuple[int, Tensor]:
    """The norm of so many numbers in double, with as many as have its error there."""
    if size.dtype is torch.float64:
        return count, size
    return (count + 8) * 2**29, size.double() + math.sqrt(count) * 2.0**-60
