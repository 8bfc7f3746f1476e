"""Bounds by interpreting a program on a domain.

A *range* is an interval that contains what a number may be; a *turning point* of a function is where its
derivative changes sign, so that between two of them it is monotone.

* ``function``: a model, or an objective of it, as what is bounded.
* ``tensor_size``, ``claims``, ``size_linear``, ``size_products``, ``size_functions``, ``size_rules``, ``size``:
  norms alone, in the log domain, for sets of any size and without values; ``breakdown``: which operations they
  come from; ``input_gain``: sharper constants in the input, by ``multipliers``.
* ``hessian``: the second derivative of an objective on balls around its weights; ``centre``: all tensors at the
  weights, ``jacobians``: their exact derivatives there; ``movement``: how far they move on a ball; ``fused``: what
  soft-max and normalisation do there; ``speed``: how fast the second derivative may change.
* ``scalars``: the ranges of all derivatives of all scalar functions, over intervals.
"""
