"""Rows divided by their root-mean-square, as an operation of its own."""

from surefoot.operations import Bounds, Call, operation
from surefoot.operations.common import batch
from surefoot.operations.normalisation import normalise


@operation("example.unit_rms", rows=batch("input"), epsilon="eps")
def unit_rms(call: Call) -> Bounds:
    """Groups are the last dimension; see :mod:`surefoot.operations.normalised_groups`."""
    x = call["input"]
    return normalise(call, x, lambda t: t.reshape(-1, x.shape[-1]), x.shape[-1], centre=False)
