r"""The certificate of an objective plus a function of the parameters: constants add up, block by block.

The smooth part of a regulariser has, on block t, a Hessian of at most :math:`c_t`, and value and gradient zero at
the origin. With :math:`\|u_s\| \le b_s` on the domain, its value is at most :math:`\sum_s\frac{c_s}2b_s^2`, its
gradient in :math:`u_s` at most :math:`c_sb_s` long, and its Hessian is block diagonal. So :math:`m`, :math:`\ell`,
:math:`L` and every entry of the matrix of blocks are at most the sums, :math:`L_{F+r} \le L_F + \max_tc_t` (Prop.
smoothobj).

*Absolute values* :math:`\lambda_s\|u_s\|_1` add at most :math:`\lambda_s\sqrt{p_s}\,b_s` to m and
:math:`\lambda_s\sqrt{p_s}` to :math:`\ell`, :math:`p_s` the number of entries. L and the matrix stay those of the
smooth part, for proximal steps :math:`p = \arg\min_p\langle g, p\rangle + \sum_s\frac1{2\gamma_s}\|p_s - u_s\|^2
+ \lambda_s\|p_s\|_1`, g the gradient of the smooth part at u: p is below u in a function that majorises the
objective where the smooth part is :math:`\frac1{\gamma_s}`-smooth. And :math:`p_s = u_s - \gamma_s(g_s + z_s)`
with :math:`|z_s| \le \lambda_s` entry by entry, so a gradient of the norm :math:`\|g_s\| +
\lambda_s\sqrt{p_s}` tells which steps stay in the domain. For one step size :math:`\gamma` and :math:`G = (u -
p)/\gamma` the model is :math:`\frac1\gamma`-strongly convex, so on the way to :math:`u + t(p - u)` the objective
falls by at least :math:`\frac t{2\gamma}\|p - u\|^2 = \frac12\|G\|\|t(p - u)\|`, as in
:func:`~surefoot.guarantees.require_room`: numbers of steps are those to :math:`\|G\| \le \varepsilon`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from surefoot.certificate.advice import PROXIMAL
from surefoot.certificate.record import Certificate
from surefoot.enclosure import Enclosure, measure
from surefoot.graph import Leaf
from surefoot.magnitude import Magnitude, maximum, stack


class Penalty(Protocol):
    """The interface of a regulariser."""

    smooth: bool

    def threshold_of(self, parameter: str) -> float:
        """The weight of the absolute values of a parameter, by path."""

    def curvature_of(self, parameter: str) -> float:
        """The curvature of the smooth part in a parameter, by path."""


def regularised(
    certificate: Certificate,
    penalty: Penalty,
    blocks: Mapping[str, Sequence[Leaf]],
    enclosures: Mapping[str, Enclosure],
) -> Certificate:
    """The certificate of the sum.

    Args:
        certificate: the certificate of the objective alone.
        penalty: the function that is added.
        blocks: the parameters of each block, in the order of the certificate.
        enclosures: the parameters over the domain, by name.
    """
    bends = {path: [penalty.curvature_of(leaf.path) for leaf in leaves] for path, leaves in blocks.items()}
    sizes = {path: [enclosures[leaf.name].bound for leaf in leaves] for path, leaves in blocks.items()}
    kinks = {path: [_kink(leaf, penalty) for leaf in leaves] for path, leaves in blocks.items()}
    steep = {path: stack(of_block).norm() for path, of_block in kinks.items()}
    slopes = {path: _length(bends[path], sizes[path]) + steep[path] for path in blocks}
    values = [
        b * b * c / 2.0 + b * k
        for path in blocks
        for c, b, k in zip(bends[path], sizes[path], kinks[path], strict=True)
    ]
    bend = [maximum(Magnitude.zero(), *of_block) for of_block in bends.values()]
    diagonal = np.full((len(bend), len(bend)), -np.inf)
    np.fill_diagonal(diagonal, [c.log2 for c in bend])
    gradients = certificate.block_gradients
    return replace(
        certificate,
        bound=certificate.bound + stack(values).sum(),
        lipschitz=certificate.lipschitz + stack(list(slopes.values())).norm(),
        smoothness=certificate.smoothness + maximum(*bend),
        block_lipschitz={path: size + slopes[path] for path, size in certificate.block_lipschitz.items()},
        block_smoothness=certificate.block_smoothness + Magnitude(diagonal),
        block_gradients=gradients
        and {p: g + _at_centre(bends[p], blocks[p], enclosures) + float(steep[p]) for p, g in gradients.items()},
        curvature=None,
        one_step=None,
        gradient_step=None,
        regularizer=repr(penalty),
        remarks=(*certificate.remarks, *(() if penalty.smooth else [PROXIMAL])),
    )


def _kink(leaf: Leaf, penalty: Penalty) -> Magnitude:
    r""":math:`\lambda_s\sqrt{p_s}`."""
    root = math.nextafter(math.sqrt(math.prod(leaf.spec.shape)), math.inf)
    return Magnitude.of(root) * penalty.threshold_of(leaf.path)


def _length(bends: Sequence[float], sizes: Sequence[Magnitude]) -> Magnitude:
    return stack([size * bend for bend, size in zip(bends, sizes, strict=True)]).norm()


def _at_centre(bends: Sequence[float], leaves: Sequence[Leaf], enclosures: Mapping[str, Enclosure]) -> float:
    """A bound on the gradient of the penalty at the centre, in the parameters of one block."""
    parameters = [enclosures[leaf.name] for leaf in leaves]
    return float(_length(bends, [e.bound if e.value is None else measure(e.value)[0] for e in parameters]))
