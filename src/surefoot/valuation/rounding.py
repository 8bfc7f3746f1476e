r"""How far one operation, computed in double precision, is from its exact value at the same arguments.

With :math:`u = 2^{-53}`, norms of the computed result :math:`\hat z` and of the arguments, and slopes
:math:`J_i`:

* what only moves or selects numbers rounds nothing (``rounds`` of the record);
* a *product* sums k products of entries, so an entry is off by at most :math:`\gamma_{k+2}|a|^\top|b|`, whatever
  the order (Higham, Accuracy and Stability of Numerical Algorithms, sections 3.1, 3.5). Its bilinear part
  :math:`\beta` only adds products, so all entries together are off by
  :math:`\gamma_{k+2}\|\beta(|a|, |b|)\| \le \gamma_{k+2}\,C\|a\|\|b\|` with the bilinear norm C of the rule. A
  shift is one more term of each sum;
* a *sum* of k entries with fixed weights is a product with those: :math:`\gamma_{k+2}\sqrt k\,J\|x\|`
  (:mod:`surefoot.operations.evaluation`);
* a *scalar function* of an entry is computed by one kernel with a few roundings of quantities that are at most
  :math:`|\hat z| + J|x|`: 64 units cover them, which is part of the one assumption about floating point
  (:mod:`surefoot.scalar.rounded`). The tests measure all kernels against ball arithmetic;
* half the sum of k *squares* of differences adds non-negative terms, each of which is off by a relative 3u, and is
  scaled three times: :math:`\gamma_{k+8}F`;
* losses, normalisations and others state it themselves (``error`` of the record); for the rest
  :mod:`surefoot.operations.evaluation` proves a bound.

What underflows is at most :math:`2^{-1022}` per operation on entries, and is multiplied by the other arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from surefoot.operations.call import Call
from surefoot.operations.record import record_of
from surefoot.valuation.samples import Amount, least, some
from surefoot.valuation.single import KERNEL as single_kernel
from surefoot.valuation.single import UNIT as single_unit
from surefoot.valuation.slopes import Slope

_UNIT = 2.0**-53
_KERNEL = 64 * _UNIT


def rounding(
    slope: Slope,
    jacobian: Mapping[str, Amount],
    sizes: Mapping[str, Amount],
    in_all: Mapping[str, float],
    together: Amount = math.inf,
    *,
    single: bool = False,
    call: Call | None = None,
    value: Any = None,
) -> Amount:
    """The error of one operation.

    Args:
        slope: what is known of it.
        jacobian: its slopes at the point, by name of the argument.
        sizes: norms of its arguments and its result, by name; or of each sample.
        in_all: the same, of all samples together.
        together: a bound on the norm of all products of norms of matrices, where two factors meet matrix by
            matrix.
        single: whether it was run in single precision (:mod:`surefoot.valuation.single`).
        call: the operation with the values of its arguments, where its record states the error.
        value: its result, likewise.
    """
    kind, node, k = slope.kind, slope.node, slope.reduction
    if kind == "exact":
        return 0.0
    if call is not None and not single:
        stated = record_of(node)
        found = None if stated.error is None else stated.error(call, value)
        if found is not None:
            return float(found)
    unit, kernel = (single_unit, single_kernel) if single else (_UNIT, _KERNEL)
    lost = slope.underflow * (2.0**890 if single else 1.0)  # 2⁻¹¹⁰
    first, second, bilinear = slope.product or ("", "", 0.0)
    is_product = first in sizes and second in sizes  # not a mask
    moved: Amount = 0.0
    for name, amount in jacobian.items():
        whole = in_all[name]
        if not whole < math.inf and not some(amount):
            continue  # a mask may hold -∞, and only says which entries count
        if whole > 1:  # one by one, as sizes alone may overflow
            lost *= whole
        if not is_product or name not in (first, second):
            moved = moved + amount * sizes[name]
    if kind == "squares":
        return (k + 16) * 2 * unit * sizes[node.name] + lost
    if is_product:
        products = bilinear * least(sizes[first] * sizes[second], together)
        return (k + 8) * (1 + 1e-6) * unit * (products + moved) + lost
    if kind == "scalar":
        return kernel * (sizes[node.name] + moved) + lost
    if kind == "linear":
        return (k + 8) * math.sqrt(k) * 2 * unit * (sizes[node.name] + moved) + lost
    return (k + 16.0) ** 2 * unit * (sizes[node.name] + (0.0 if record_of(node).relative else moved)) + lost
