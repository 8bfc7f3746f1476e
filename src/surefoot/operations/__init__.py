"""What is known about each operation: one rule per operation, one file per family.

* ``registry``: what a rule gets and what it claims; how to register one.
* ``families``: loads every family below.
* ``forms``: whether an operation is linear, a product, element-wise or none of these.
* ``common``: what several families share.
* ``layout``: operations that move numbers around.
* ``choices``: what fixed indices, masks and conditions choose.
* ``arithmetic``: sums, means, products and quotients, entry by entry.
* ``products``: fully-connected layers, scale and shift, forms of three tensors.
* ``matmul``: batches of matrix products, sums over shared indices.
* ``convolution``: convolutions, plain and transposed.
* ``elementwise``: one scalar function on every entry.
* ``implicit``: layers that minimise.
* ``rounding``: the round-off of computing such a function.
* ``normalisation``: batch, layer, group, instance and root-mean-square.
* ``statistics``: variances, lengths and directions.
* ``softmax``: soft-max, its logarithm, and the logarithm of sums of exponentials.
* ``pooling``: averages over patches, and interpolation.
* ``maxima``: largest entries of patches.
* ``clustering``: distances from clustered points.
"""

from surefoot.operations.call import Bounds, Call
from surefoot.operations.record import register_rule, rules

__all__ = ["Bounds", "Call", "register_rule", "rules"]
