"""What is known about each operation: one rule per operation, one file per family.

* ``registry``: what a rule gets and what it claims; how to register one.
* ``families``: loads every family below.
* ``forms``: whether an operation is linear, a product, element-wise or none of these.
* ``layout``: operations that move numbers around.
* ``arithmetic``: sums, means, products and quotients, entry by entry.
* ``products``: fully-connected layers, matrix products, scale and shift.
* ``convolution``: convolutions, plain and transposed.
* ``elementwise``: one scalar function on every entry.
* ``normalisation``: batch, layer, group, instance and root-mean-square.
* ``softmax``: soft-max and its logarithm.
* ``pooling``: average, max and adaptive pooling, interpolation.
"""

from surefoot.rules.registry import Bounds, Call, register_rule, rules

__all__ = ["Bounds", "Call", "register_rule", "rules"]
