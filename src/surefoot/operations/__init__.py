"""What is known about each operation: one record per operation, one file per family.

* ``record``: the record, and how to register one.
* ``call``: one operation where it stands, over a domain or along a segment, and what can be claimed of it.
* ``captured``: from a model to a graph in these operations; loads every family below.
* ``forms``: degrees of polynomials.
* ``pushing``: derivatives along moves of the arguments, with their errors.
* ``sparsity``: the cost of one operation. ``gram``: rows of Jacobians.
* ``composed_series``: products, soft-max and normalisations along a segment.
* ``evaluation``: values in double precision, and their round-off.
* ``written_out``: formulas and compositions in place of records.
* ``common``: what several families share; dimensions, and how rows of results and arguments relate. ``groups``:
  groups of numbers, scaled and centred.

Families:

* ``layout``: operations that move numbers around. ``choices``: what fixed indices, masks and conditions choose.
  ``conditions``: comparisons, and what jumps.
* ``inverses``: inverses and determinants of matrices, and matrices with their errors.
* ``writing``: tensors written into others.
* ``formulas``: operations that are made of others. ``without_bounds``: those whose form alone is known.
* ``arithmetic``: sums, means, products and quotients, entry by entry.
* ``products``: fully-connected layers, scale and shift, forms of three tensors. ``matmul``: batches of matrix
  products, sums over shared indices. ``convolution``: convolutions, plain and transposed. ``bilinear``: all of
  them along a segment.
* ``activations``: scalar functions by name. ``scalar_functions``, ``scalar_taylor``: one scalar function on every
  entry, its bounds and its Taylor rule.
* ``normalisation``: batch, layer, group, instance and root-mean-square. ``normalised_groups``: their mathematics.
  ``scaled``: their scale and shift, and what frameworks write out, recognised.
* ``statistics``: variances, lengths and directions. ``group_slopes``: their costates pulled back.
* ``softmax``: soft-max, its logarithm, and the logarithm of sums of exponentials. ``attention``: scaled dot
  products.
* ``pooling``: averages over patches, and interpolation. ``maxima``: largest entries of patches.
* ``recurrent``: recurrent layers and cells, unrolled.
* ``losses``: functions of the outputs and the targets.
"""

from surefoot.operations import captured  # noqa: F401  all families, so that rules of others come later
from surefoot.operations.activations import elementwise
from surefoot.operations.call import Bounds, Call, Use
from surefoot.operations.record import (
    Form,
    Operation,
    declare,
    expansion,
    operation,
    records,
    register_rule,
    rules,
)

__all__ = [
    "Bounds", "Call", "Form", "Operation", "Use", "declare", "elementwise", "expansion", "operation", "records",
    "register_rule", "rules",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
