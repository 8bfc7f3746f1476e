r"""How far derivatives that were computed along every direction may be off, by running error bounds.

A local derivative of norm J that is computed and applied rounds by at most :math:`\delta J` and what its record
states, so errors obey the chain rule: that of :math:`X_z = \sum_iJ_iX_{x_i}` is at most :math:`\sum_iJ_ie_{x_i} +
(\delta J_i + c_i)(\|\hat X_{x_i}\| + e_{x_i})`, with the norms that were computed, and those of costates and of
their derivatives in the same way backwards. The second derivative of the output is what arrives at the variables.

A product with a Jacobian of k terms in a row rounds by :math:`\gamma_k|J||x|`, of norm at most :math:`k\gamma_k
\|J\|\|x\|`; with its transpose, whose rows have at most n terms, by
:math:`\gamma_n\sqrt k\|J\|\|\lambda\|` (:mod:`surefoot.calculus.adjoint.costates`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.calculus.adjoint.costates import summands
from surefoot.calculus.adjoint.gathered import Gathered
from surefoot.calculus.adjoint.samples import SLACK_UNIT
from surefoot.calculus.forward import Pass, Step
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.operations.call import Slot
from surefoot.operations.record import record_of


def roundings(result: Pass, step: Step, slot: Slot) -> float:
    """The relative error of applying a Jacobian or its transpose; see the module. Where the error of derivatives
    is stated, it contains that of the sums, and what is left are products of a few numbers.
    """
    if step.node.op == "surefoot.scalar" or record_of(step.node).near is not None:
        return SLACK_UNIT
    terms = step.bounds.reduction + 16.0
    entries = summands(step, slot, result.enclosures[step.names[slot]].numel) + 16.0
    return 2 * (terms**2 + entries * math.sqrt(terms)) * 2.0**-53


@dataclass(frozen=True)
class Errors:
    """How far computed derivatives may be off: of tensors, of costates, and of the second derivative."""

    first: Mapping[str, Magnitude]
    second: Mapping[str, Magnitude]
    hessian: Magnitude


def running_errors(
    result: Pass, stated: Mapping[str, tuple[float, float]], held: Gathered, sizes: Mapping[str, float]
) -> Errors:
    """The errors.

    ``stated`` are errors of the first and second derivative of every operation, ``held`` the derivatives as
    computed, ``sizes`` norms of costates as computed.
    """
    zero = Magnitude.zero()
    first, norms = {}, {}
    for name in result.region.variables:
        first[name], norms[name] = zero, Magnitude.of(1.0)
    for step in result.steps:
        name, (more, _) = step.node.name, stated[step.node.name]
        first[name] = norms[name] = zero
        for slot, other in step.names.items():
            slope, unit = step.bounds.jacobian[slot], roundings(result, step, slot)
            first[name] = (
                first[name] + slope * first[other] + (slope * unit + more) * (norms[other] + first[other])
            )
            norms[name] = norms[name] + (slope + slope * unit + more) * norms[other]
        if name in held.read:
            norms[name] = minimum(norms[name], held.whole("first", name))
    output = result.outputs[0]
    lengths = {output: Magnitude.of(1.0)}
    wrong, second, bends = (
        {output: zero},
        {output: zero},
        {output: zero},
    )  # of costates, of their derivatives, norms
    for step in reversed(result.steps):
        name = step.node.name
        if name not in wrong:
            continue
        more, most = stated[name]
        size = Magnitude.of(sizes[name]) if name in sizes else lengths[name]
        if name in held.written:
            bends[name] = minimum(bends[name], held.whole("second", name))
        forms = {pair: amount + most for pair, amount in step.bounds.curvature.items()}
        if most:
            (slot,) = step.names
            forms.setdefault((slot, slot), Magnitude.of(most))
        for slot, other in step.names.items():
            slope, unit = step.bounds.jacobian[slot], roundings(result, step, slot)
            rounded = slope * unit + more
            wrong[other] = wrong.get(other, zero) + slope * wrong[name] + rounded * (size + wrong[name])
            second[other] = second.get(other, zero) + slope * second[name] + rounded * (bends[name] + second[name])
            bends[other] = bends.get(other, zero) + (slope + rounded) * bends[name]
            lengths[other] = lengths.get(other, zero) + (slope + rounded) * size
            for pair, form in forms.items():
                if slot not in pair or not set(pair) <= step.names.keys():
                    continue
                partner = step.names[pair[pair[0] == slot]]
                rounding = step.bounds.curvature.get(pair, zero) * unit + most
                second[other] = (
                    second[other]
                    + rounding * size * norms[partner]
                    + form * (wrong[name] * (norms[partner] + first[partner]) + size * first[partner])
                )
                bends[other] = bends[other] + form * size * norms[partner]
    found = [second[name] for name in result.region.variables if name in second]
    return Errors(first, second, stack(found).norm() if found else zero)
