"""The value of an objective in exact arithmetic, as an interval: what :func:`surefoot.evaluate` is made of.

* ``rounding``: how far one primitive is off by itself, its *local error*; ``running``: the kernels it is run by.
* ``joint``: the program of value and gradient, apart from what the data alone determine.
* ``entries``: how far all tensors are off, entry by entry and row by row; ``norms``: the same by one number each.
* ``valuer``: one function at many weights, as value, gradient and error.
* ``loader``: the objective of a whole set of data, batch by batch. ``interaction``: a refusal where samples meet.
"""

from surefoot.value.valuer import Evaluation, InfiniteValue, Valuer

__all__ = ["Evaluation", "InfiniteValue", "Valuer"]
