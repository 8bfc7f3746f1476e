"""Objectives along a segment: every tensor as a polynomial in the step with a proved remainder.

* ``fallback``: operations that have no Taylor rule of their own.
* ``walk``: the pass over a graph.
* ``along``: segments from the weights of a model, and the steps that are proved to descend on them.
"""
