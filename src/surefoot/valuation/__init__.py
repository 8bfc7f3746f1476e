"""The value of an objective in exact arithmetic, as an interval: what :func:`surefoot.evaluate` is made of.

* ``tape``: the operations of an objective, run in double precision, with the sizes of values and costates.
* ``single``: which of them are run in single precision where that may decide, and how good that is.
* ``passes``: one pass over them, what it notes and what it keeps.
* ``slopes``: how steep and how curved each operation is, from the sizes of its arguments alone.
* ``kernels``: formulas where kernels of torch are not good to double precision.
* ``kinks``: where scalar functions have kinks.
* ``normalising``: normalisations in few passes, with their error.
* ``entropy``: the logistic loss, likewise.
* ``samples``: where the samples of a batch stay apart, so that errors are known for each. ``interaction``: a
  refusal where they do not.
* ``rounding``: how far each operation is off by itself.
* ``joints``: states of long chains, between which derivatives are composed.
* ``propagation``: from these to the error of the value, by reverse mode.
* ``valuer``: one function at many weights, as value and error.
* ``streamed``: the objective of a whole set of data, batch by batch.
"""
