r"""An objective read as a loss of a network's outputs, :math:`F = h\circ\psi`: what Gauss-Newton steps need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surefoot.calculus.assemble import assemble, smoothness, terms, weighted_curvature
from surefoot.calculus.forward import Pass
from surefoot.magnitude import Magnitude
from surefoot.operations.record import LossFacts, record_of


def loss_facts(result: Pass) -> LossFacts | None:
    """What is known of the operation that computes the output; ``None`` if it is no loss."""
    if not result.steps or result.outputs != (result.steps[-1].node.name,):
        return None
    return record_of(result.steps[-1].node).loss


def is_nonnegative(result: Pass) -> bool:
    """Whether the output is a loss that is never below zero."""
    facts = loss_facts(result)
    return facts is not None and facts.nonnegative


def damping_of(result: Pass) -> Callable[[], tuple[Magnitude, bool]] | None:
    r"""Computes :math:`\ell_hL_\psi` and says whether the loss is quadratic; ``None`` if there is no convex loss.

    :math:`\ell_h` bounds the gradient of the loss at the outputs that occur over the domain, :math:`L_\psi` is the
    smoothness of the outputs, from the same forward pass.
    """
    facts = loss_facts(result)
    if facts is None or not facts.convex:
        return None
    step, quadratic = result.steps[-1], facts.quadratic

    def compute() -> tuple[Magnitude, bool]:
        network = replace(result, outputs=(step.names["outputs"],))
        matrix = assemble(terms(network, weighted_curvature(network)), len(result.region.variables))
        return step.bounds.jacobian["outputs"] * smoothness(matrix), quadratic

    return compute
