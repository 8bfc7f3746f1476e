"""Objectives along a segment: every tensor as a polynomial in the step with a proved remainder.

* ``model``: :class:`TaylorModel`, a tensor along the segment.
* ``series``: composition of power series, entry by entry.
* ``affine``, ``bilinear``, ``scalar``, ``losses``, ``fallback``: how operations act on such models.
* ``walk``: the pass over a graph.
* ``majorant``: from the model of the objective to a curvature and a step that is proved to descend.
* ``certify``: the certificate.
"""
