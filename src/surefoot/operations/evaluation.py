r"""Operations at the centre: their values in double precision, and how far these may be from the exact ones.

An operation with a formula of its own (``evaluate`` in its record) is computed by that, others by torch's kernels.

*Round-off.* Where the record states no error, the computed :math:`\hat z` is at most

.. math:: (k + 16)^2 \Big(u\,\big(\|\hat z\| + \sum_i J_i\|x_i\|\big) + \eta\sqrt n \prod_i\max(1, \|x_i\|)\Big)

from the exact value at the same arguments, with :math:`u = 2^{-53}`, :math:`\eta = 2^{-1022}`, n entries of the
result, and k numbers added up for each (``reduction``). Why this holds, by kind:

* *Sums of products* (linear, matmul, einsum, convolution, mean and sum, average pooling, interpolation): an entry
  is an inner product of k terms, so whatever the order, blocking and use of fused multiplications its error is at
  most :math:`\gamma_{k+2}|a|^\top|b|` (Higham, Accuracy and Stability of Numerical Algorithms, sections 3.1, 3.5),
  for all entries together :math:`\gamma_{k+2}\,\|A\|_F\,\|B\|_F`, where each column of B holds the k numbers that
  meet a row of A. With its k rows :math:`\|B\|_F \le \sqrt k\,\|B\|_2`; and :math:`\|B\|_2` is at most the slope
  in A. So the error is at most :math:`k^{1/2}(k + 3)\,u\,J_A\|A\|`. Products of f factors round f - 1 times. For
  this the kernels must sum products: the BLAS does, and torch convolves doubles by copying patches and multiplying
  matrices; Winograd's and Fourier's methods are for single precision only. A test compares them with exact
  arithmetic.
* *Layout, selections, maxima, rectifiers* round nothing; *sums, products and quotients of two entries* once.
* *Soft-max* divides :math:`e^{-t_i}`, :math:`t_i = \max x - x_i`, by their sum S, which is at least 1. Rounding
  :math:`t_i` changes :math:`e^{-t_i}` by :math:`ut_ie^{-t_i} \le u/2`, so S by a relative :math:`ku/2` and all
  quotients together by :math:`\sqrt k\,u/(2S)`, where the norm of the result is at least 1/S. Exponentials, sum
  and quotient have relative errors of 8, k and 16 units. So the error is *relative* to :math:`\|\hat z\|`, and the
  arguments, which a mask makes as small as -10⁹, do not count. *Its logarithm* rounds
  :math:`x_i`, :math:`\max x` and :math:`s = \log\sum e^{-t_i}`, which is off by :math:`(k + 2)u` and a relative
  error. It has the entry :math:`-s`, its Jacobian is at least 1, and if s is below 1/2, some :math:`t_i` exceeds
  0.4 and :math:`\|x\|` exceeds 0.3.
* *Underflow* takes at most :math:`\eta` from an intermediate result, also where subnormal results are flushed to
  zero; before it reaches the result that may be multiplied by other arguments.

Overflow gives infinity or NaN; the calculus then knows no centre, and every bound that needs one is infinite.

*What a certificate says besides* (:func:`remarks`). All this rests on one assumption about torch's elementary
functions (:mod:`surefoot.scalar.rounded`). How an operation that somebody else registered is evaluated nobody
knows here: that its value and its derivatives are as good as sums of products of as many numbers as its rule says
(``reduction``) is what that rule claims. And torch evaluates soft-plus, :math:`\log(1 + e^{\beta x})/\beta`, as x
itself where :math:`\beta x` exceeds a threshold t. From t = 20, the default, on constants and values are those of
the smooth function, without the jump, and a certificate says how far torch's is from it. That is proved: as
:math:`\log(1 + e^{\beta x}) = \beta x + \log(1 + e^{-\beta x})`, torch's entries differ from the function's by at
most :math:`\log(1 + e^{-t})/|\beta| \le e^{-t}/|\beta|` and are smaller in absolute value, so that m bounds both,
and its slopes differ by at most :math:`1 - \sigma(t) \le e^{-t}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import surefoot.operations.captured  # noqa: F401  registers the operations
from surefoot.enclosure import Enclosure
from surefoot.graph.nodes import run_widened
from surefoot.graph.structure import Graph, Node, Ref, fold, outputs_of
from surefoot.magnitude import Magnitude, maximum
from surefoot.operations.call import Bounds, Call
from surefoot.operations.common import ONE, ZERO, root
from surefoot.operations.record import record_of

_PACKAGE = __name__.partition(".")[0]
_USUAL = 20.0


def run_in_double(node: Node, values: Mapping[str, Any]) -> Any:
    """The operation on these values, in double precision, differentiable."""
    return run_widened(node, values, record_of(node).evaluate)


def value_of(node: Node, values: Mapping[str, Any]) -> Any:
    """The same without derivatives; ``None`` if one of the values is not known."""
    if any(value is None for value in values.values()):
        return None
    with torch.no_grad():
        return run_in_double(node, values)


def evaluate_in_double(graph: Graph, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of a graph from values of its leaves by name, in double precision, differentiable.

    Nodes that have a value already keep it; others are freed after their last reader.
    """
    return outputs_of(graph, values, run_in_double)


def fold_in_double(graph: Graph, values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, and in double precision all that can be computed from them alone."""
    return fold(graph, values, run_in_double)


def roundoff(call: Call, bounds: Bounds, value: Any, size: Magnitude) -> Magnitude:
    """How far a computed value of at most this norm may be from the exact one; the module has the proof."""
    record = record_of(call.node)
    stated = None if record.error is None else record.error(call, value)
    if not record.rounds_at(call.node):
        return ZERO
    return usual_roundoff(call, bounds, size) + underflow(call, bounds.reduction) if stated is None else stated


def usual_roundoff(call: Call, bounds: Bounds, size: Magnitude) -> Magnitude:
    """The part of the round-off that is relative to the arguments and the result."""
    total = size
    for slot, jacobian in {} if record_of(call.node).relative else bounds.jacobian.items():
        total = total + jacobian * call.slots[slot].centre_norm
    return total * ((bounds.reduction + 16.0) ** 2 * 2.0**-53)


def underflow(call: Call, reduction: int) -> Magnitude:
    """The part that is not: what underflow may take."""
    total = root(call.numel) * ((reduction + 16.0) ** 2 * 2.0**-1022)
    for e in call.slots.values():
        total = total * maximum(ONE, e.centre_norm)
    return total


def remarks(nodes: Iterable[Node], enclosures: Callable[[], Mapping[str, Enclosure]]) -> tuple[str, ...]:
    """One sentence for each operation of other packages, whose round-off is what its author claims, and one if
    soft-plus may get beyond its threshold, by the enclosures of tensors, which are asked for if there is one.
    """
    nodes = list(nodes)
    records = {node.op: record_of(node) for node in nodes}
    foreign = {
        name: record.family
        for name, record in records.items()
        if record.bounds is not None and record.rounds is not False
        if record.family.partition(".")[0] != _PACKAGE
    }
    found = [
        f"assumed: '{name}', a rule of {module}, and its derivatives are as accurate as sums of products"
        for name, module in foreign.items()
    ]
    jumps = [node for node in nodes if node.op == "aten.softplus"]
    reached = enclosures() if jumps else {}
    gaps = [_gap(node, reached) for node in jumps]
    if any(gaps):
        found.append(
            "soft-plus is certified without the jump of torch's, which returns the argument itself beyond a "
            f"threshold that may be within reach: its entries and slopes are off by up to {max(gaps):.1e}"
        )
    return tuple(found)


def softplus_gap(beta: float = 1.0, threshold: float = _USUAL) -> float:
    """On what torch's soft-plus differs from the smooth function, in its values and, times ``beta``, its slopes.

    A threshold below 20 is part of the function, and nothing is left out.
    """
    return math.exp(-threshold) / abs(beta) * (1 + 2.0**-50) if threshold >= _USUAL else 0.0


def _gap(node: Node, enclosures: Mapping[str, Enclosure]) -> float:
    """The same for values and slopes together; 0 if no argument gets beyond the threshold."""
    options = node.arguments
    beta, threshold = float(options.get("beta", 1.0)), float(options.get("threshold", _USUAL))
    x = options["self"]
    if isinstance(x, Ref) and x.name in enclosures:
        low, high = enclosures[x.name].interval()
        if not bool((low * beta > threshold).any() | (high * beta > threshold).any()):
            return 0.0
    return softplus_gap(beta, threshold) * max(1.0, abs(beta))
