r"""An objective read as a loss of a network's outputs, :math:`F = h\circ\psi`: what Gauss-Newton steps need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.forward import Pass, Step
from surefoot.magnitude import Magnitude
from surefoot.operations.record import LossFacts, record_of


def objective_of(result: Pass) -> tuple[Step, LossFacts] | None:
    """The operation that computes the output and what is known about it, if it is an objective."""
    step = result.steps[-1] if result.steps else None
    facts = None if step is None else record_of(step.node).loss
    return None if step is None or facts is None or result.outputs != (step.node.name,) else (step, facts)


def is_nonnegative(result: Pass) -> bool:
    """Whether the output is an objective that is never below zero."""
    found = objective_of(result)
    return found is not None and found[1].nonnegative


def damping_of(result: Pass) -> Callable[[], tuple[Magnitude, bool]] | None:
    r"""Computes :math:`\ell_hL_\psi` and says whether the loss is quadratic; ``None`` if there is no convex loss.

    :math:`\ell_h` bounds the gradient of the loss at the outputs that occur over the domain, :math:`L_\psi` is the
    smoothness of the outputs, from the same forward pass.
    """
    found = objective_of(result)
    if found is None or not found[1].convex:
        return None
    step, facts = found

    def compute() -> tuple[Magnitude, bool]:
        network = replace(result, outputs=(step.names["outputs"],))
        matrix = assemble(terms(network, weighted_curvature(network)), len(result.region.variables))
        return step.bounds.jacobian["outputs"] * smoothness(matrix), facts.quadratic

    return compute


__all__ = ["damping_of", "is_nonnegative", "objective_of"]
