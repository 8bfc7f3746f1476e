"""Polynomials along a segment, with a bound of what they leave out.

* ``model``: :class:`~surefoot.taylor.model.TaylorModel`, a tensor along a segment.
* ``series``: sums, shifts and compositions of polynomials.
"""
