"""Objectives along a segment: every tensor as a polynomial in the step with a proved remainder.

* ``fallback``: operations that have no Taylor rule of their own.
* ``walk``: the pass over a graph.
* ``majorant``: from the model of the objective to a curvature and a step that is proved to descend.
* ``along``: segments from the weights of a model.
"""
