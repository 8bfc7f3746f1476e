r"""An objective read as a loss of a network's outputs, :math:`F = h\circ\psi`: what Gauss-Newton steps need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.forward import Pass, Step
from surefoot.magnitude import Magnitude

# Convex losses that are not negative, and whether they are quadratic in the outputs.
_LOSSES = {"surefoot.square": True, "surefoot.cross_entropy": False}


def last_loss(result: Pass) -> Step | None:
    """The operation that computes the output, if it is one of the losses."""
    step = result.steps[-1] if result.steps else None
    if step is None or step.node.op not in _LOSSES or result.outputs != (step.node.name,):
        return None
    return step


def damping_of(result: Pass) -> Callable[[], tuple[Magnitude, bool]] | None:
    r"""Computes :math:`\ell_hL_\psi` and says whether the loss is quadratic; ``None`` if there is no loss.

    :math:`\ell_h` bounds the gradient of the loss at the outputs that occur over the domain, :math:`L_\psi` is the
    smoothness of the outputs, from the same forward pass.
    """
    step = last_loss(result)
    if step is None:
        return None

    def compute() -> tuple[Magnitude, bool]:
        network = replace(result, outputs=(step.names["outputs"],))
        matrix = assemble(terms(network, weighted_curvature(network)), len(result.region.variables))
        return step.bounds.jacobian["outputs"] * smoothness(matrix), _LOSSES[step.node.op]

    return compute


__all__ = ["damping_of", "last_loss"]
