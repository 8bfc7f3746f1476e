"""Bounds by interpreting a program on a domain.

A *range* is an interval that contains what a number may be; a *turning point* of a function is where its
derivative changes sign, so that between two of them it is monotone.

* ``scalars``: the ranges of all derivatives of all scalar functions, over intervals.
"""
