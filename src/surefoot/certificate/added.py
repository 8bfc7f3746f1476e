r"""Bounds that are added up over batches before norms are taken of them.

Let :math:`F = \sum_bw_bF_b`, :math:`\hat H_b` the second derivative of :math:`F_b` at the centre, off by at most
:math:`e_b`, of which :math:`\nabla^2F_b` on the domain is at most :math:`v_b` away. Let :math:`|D^2F_b[v, w]| \le
\sum_{ss'}M^b_{ss'}\|v_s\|\|w_{s'}\|` and likewise :math:`V^b` for the distance from :math:`\hat H_b`. Then

.. math:: \|\nabla^2F\| \le \min\Big(\Big\|\sum_bw_bM^b\Big\|,\ \Big\|\sum_bw_b\hat H_b\Big\| + \sum_bw_be_b
    + \min\Big(\sum_bw_bv_b,\ \Big\|\sum_bw_bV^b\Big\|\Big)\Big),

which counts what cancels between batches, as one batch counts what cancels between samples. A batch whose
:math:`\hat H_b` is not known adds its own bound to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from surefoot.calculus.assemble import Curvature, by_block, smoothness
from surefoot.certificate.record import Certificate
from surefoot.errors import EvaluationError
from surefoot.magnitude import Magnitude, minimum, stack


@dataclass(frozen=True)
class Bounds:
    """What a pass over a domain proves of a function, or of a sum."""

    certificate: Certificate
    variables: tuple[str, ...]  # the names of what varies
    members: tuple[Sequence[int], ...] | None  # those of each block; ``None`` if the matrix is one between blocks
    value: Magnitude  # a bound on the norm of the value at the centre
    curvature: Curvature

    def summand(self, known: bool) -> Bounds:
        """As a summand whose second derivative at the centre is added up with others, or is not known."""
        given, zero = self.curvature, Magnitude.zero()
        moved = minimum(given.moved, smoothness(given.variation)) if known else zero
        variation, rest = (given.variation, zero) if known else (given.matrix * zero, self.certificate.smoothness)
        return replace(self, curvature=Curvature(given.matrix, moved, variation, rest))

    def certified(self, hessian: Magnitude) -> Certificate:
        """The certificate, given a bound on the norm of the second derivative at the centre."""
        smooth, matrix = self.curvature.bounded(hessian)
        blocks = matrix if self.members is None else by_block(matrix, list(self.members))
        return replace(self.certificate, smoothness=smooth, block_smoothness=blocks)


def summed(parts: Sequence[tuple[Magnitude, Bounds]], *, stacked: bool = False) -> Bounds:
    """The bounds of a weighted sum; of outputs below each other only the certificate is one.

    Raises:
        EvaluationError: if not all are about the same variables.
    """
    first = parts[0][1]
    if any(one.variables != first.variables for _, one in parts):
        raise EvaluationError("the model reads other parameters than on the batches before: give them one shape")

    def total(values: list[Magnitude]) -> Magnitude:
        return stack([weight * value for (weight, _), value in zip(parts, values, strict=True)]).sum(axis=0)

    bends = {n.name: total([getattr(one.curvature, n.name) for _, one in parts]) for n in fields(Curvature)}
    certificate = added([(weight, one.certificate) for weight, one in parts], stacked=stacked)
    value = total([one.value for _, one in parts])
    return replace(first, certificate=certificate, value=value, curvature=Curvature(**bends))


def added(parts: Sequence[tuple[Magnitude, Certificate]], *, stacked: bool = False) -> Certificate:
    """The certificate of a weighted sum, or of outputs below each other; without a table.

    Its cost is that of the dearest, as a gradient of the sum is one of every summand.
    """
    first = parts[0][1]

    def total(read: Callable[[Certificate], Magnitude]) -> Magnitude:
        together = stack([weight * read(one) for weight, one in parts])
        return together.norm(axis=0) if stacked else together.sum(axis=0)

    costs = [one.gradients for _, one in parts]
    damping: Callable[[], Any] | None = None
    if not stacked and all(one.make_damping is not None for _, one in parts):
        pairs = [(weight, one.make_damping()) for weight, one in parts if one.make_damping is not None]
        composite = stack([weight * value for weight, (value, _) in pairs]).sum()
        damping = partial(tuple, (composite, all(quadratic for _, (_, quadratic) in pairs)))
    by_path = {p: total(lambda one: one.block_lipschitz[p]) for p in first.block_lipschitz}  # noqa: B023
    lipschitz = total(lambda one: one.lipschitz)
    if by_path and not stacked:
        lipschitz = minimum(lipschitz, stack(list(by_path.values())).norm())
    return replace(
        first,
        one_step=total(_of_one_step) if not stacked and any(one.one_step for _, one in parts) else None,
        gradient_step=None,
        bound=total(lambda one: one.bound),
        lipschitz=lipschitz,
        smoothness=total(lambda one: one.smoothness),
        block_lipschitz=by_path,
        block_smoothness=total(lambda one: one.block_smoothness),
        reasons=tuple(dict.fromkeys(reason for _, one in parts for reason in one.reasons)),
        remarks=tuple(dict.fromkeys(remark for _, one in parts for remark in one.remarks)),
        scalar=first.scalar and not stacked,
        nonnegative=all(one.nonnegative for _, one in parts),
        block_gradients=None,
        curvature=None,
        gradients=None if any(cost is None for cost in costs) else max(cost or 0 for cost in costs),
        make_rows=tuple,
        make_damping=damping,
    )


def _of_one_step(certificate: Certificate) -> Magnitude:
    return certificate.smoothness if certificate.one_step is None else certificate.one_step
