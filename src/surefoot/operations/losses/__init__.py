"""Losses: operations that end a graph in one number. Each owns its value, bounds, Taylor rule and Hessian factor.

* ``sums``: what all losses share: sums over the samples, their bounds and their Taylor models; the loss that a
  model returns.
* ``factor``: :class:`Factor`, the Hessian of a loss in the outputs as a product.
* ``square``: half the squared distance.
* ``cross_entropy``: the logistic loss of several classes.
* ``form``: :class:`Form`, a sum over the entries of a scalar function.
* ``separable_losses``: :func:`separable`, losses that are sums over the entries, from their scalar function.
* ``entrywise``: those of torch.nn. ``within``: those that a model computes itself.
"""

from surefoot.operations.losses import cross_entropy, entrywise, square, within  # noqa: F401  registers them
from surefoot.operations.losses.factor import Factor
from surefoot.operations.losses.form import Form
from surefoot.operations.losses.separable_losses import separable
from surefoot.operations.record import LossFacts

__all__ = ["Factor", "Form", "LossFacts", "separable"]
