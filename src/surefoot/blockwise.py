r"""A proved step size for each block of parameters.

:math:`H` is the matrix of a certificate, :math:`|D^2F[v, v]| \le \sum_{ss'}H_{ss'}\|v_s\|\|v_{s'}\|` on its
domain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from surefoot.guarantees import gradient_sizes, inverse_of_one_step, require_bounds, step_from, until
from surefoot.magnitude import Magnitude, maximum

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

_ROUNDS = 100
_MOST_ENTRIES = 10_000_000  # of all rounds together
_FAINTEST = 2.0**-40  # relative to the largest gradient; smaller ones count as this
_SLOWEST = 100.0  # no block has a step size of less than 1/L over this


def block_step_sizes(certificate: Certificate) -> dict[str, float]:
    r"""A step size for each block: from the weights, all of them together are proved to descend.

    Those of :func:`block_inverse_smoothness`, and on a ball or a product of balls around the weights not longer
    than it reaches: any :math:`\gamma_s \le 1/D_s` promise :math:`\frac12\sum_s\gamma_s\|\nabla_sF\|^2`. On a ball
    all are shortened by the same factor, on a product each by its own. The same is done to 1/L, or what is known
    of one step, and what promises more is chosen; it is the latter wherever a ball shortens it, by Cauchy-Schwarz.
    A longer step that is proved against the gradient, ``Certificate.gradient_step``, is the same for all blocks.

    Raises:
        GuaranteeError: if the function is not real-valued or the constants are not bounds.
    """
    steps = block_inverse_smoothness(certificate)
    if certificate.radius is None:
        return steps
    sizes = gradient_sizes(certificate)
    same = dict.fromkeys(steps, inverse_of_one_step(certificate))
    choices = [_within(certificate.radius, each, sizes) for each in (steps, same)]
    choices.append(dict.fromkeys(steps, certificate.gradient_step or 0.0))
    return max(choices, key=lambda each: sum(each[s] * sizes[s] * sizes[s] for s in each if each[s] and sizes[s]))


def _within(
    radius: float | Mapping[str, float], steps: Mapping[str, float], sizes: Mapping[str, float]
) -> dict[str, float]:
    """Steps that stay within the radius, for gradients of these sizes."""
    if isinstance(radius, Mapping):
        return {path: min(step, until(radius[path], sizes[path])) for path, step in steps.items()}
    finite = {path: until(radius, sizes[path]) if step == math.inf else step for path, step in steps.items()}
    length = math.hypot(*(step * sizes[path] for path, step in finite.items() if step and sizes[path]))
    return {path: step * min(1.0, until(radius, length)) for path, step in finite.items()}


def block_inverse_smoothness(certificate: Certificate) -> dict[str, float]:
    r"""What 1/L is for one step size, for each block: :math:`\gamma_s = 1/D_s`, proved within the domain.

    For any weights :math:`w > 0` put :math:`D_s = \sum_{s'} H_{ss'} w_{s'}/w_s`. If :math:`u` and :math:`u + v`
    are in the domain,

    .. math:: F(u + v) \le F(u) + \langle\nabla F(u), v\rangle + \tfrac12\sum_s D_s\|v_s\|^2 .

    Proof: by Taylor's formula the quadratic term is at most :math:`\frac12\sum_{ss'} H_{ss'}\|v_s\|\|v_{s'}\|`,
    and :math:`2\|v_s\|\|v_{s'}\| \le \|v_s\|^2 w_{s'}/w_s + \|v_{s'}\|^2 w_s/w_{s'}`; H is symmetric, so both
    halves of the sum give :math:`\frac12\sum_s\|v_s\|^2\sum_{s'}H_{ss'}w_{s'}/w_s`. With :math:`v_s =
    -\gamma_s\nabla_sF` it promises the decrease :math:`\sum_s\|\nabla_s F\|^2/(2D_s)`.

    The same curvature for all blocks, :math:`D_s = L`, is valid too, and is what the Perron vector of H gives. The
    weights are chosen to promise the most, for the gradients at the centre where the certificate knows them and
    for their bounds otherwise; never less than with 1/L. The very most may be promised by moving one block alone,
    so every block keeps at least about a hundredth of the Perron vector's step, which costs the others little.

    A block whose curvature is infinite has step size 0: the others may move, it may not.

    Raises:
        GuaranteeError: as :func:`block_step_sizes`.
    """
    require_bounds(certificate)
    names = list(certificate.block_lipschitz)
    matrix = maximum(certificate.block_smoothness, Magnitude(np.asarray(certificate.block_smoothness.log2).T))
    movable = np.flatnonzero((matrix.log2 < np.inf).all(axis=1))
    if not len(movable):
        return dict.fromkeys(names, 0.0)
    sizes = gradient_sizes(certificate)
    curvature = block_curvature(
        matrix[np.ix_(movable, movable)],
        np.array([sizes[names[k]] for k in movable]),
        certificate.smoothness if certificate.smoothness.is_finite else None,
    )
    steps = {names[k]: step_from(d) for k, d in zip(movable, curvature, strict=True)}
    return dict.fromkeys(names, 0.0) | steps


def block_curvature(matrix: Magnitude, gradient: np.ndarray, smoothness: Magnitude | None = None) -> Magnitude:
    r"""The :math:`D_s` that promise the most descent for gradients of these norms; see :func:`block_step_sizes`.

    The decrease promised along :math:`-a_s\nabla_sF/\|\nabla_sF\|` is :math:`\langle g, a\rangle - \frac12 a^\top
    Ha`, whose best :math:`a \ge 0` solves :math:`Ha = g` where it is positive; with :math:`w = a` the weighted
    bound promises exactly that. It is approached from the Perron vector by :math:`w_s \leftarrow w_s g_s/(Hw)_s`,
    the step the present weights propose, which never promises less. Then small weights are raised to
    :math:`(Hw)_s/(100\rho)`, :math:`\rho` the Perron value, if that still promises more than the Perron vector.
    The search needs no proof; the curvatures of the weights it ends with are rounded upwards.
    """
    log_matrix = np.asarray(matrix.log2)
    largest = float(np.max(gradient, initial=0.0))
    if not (math.isfinite(largest) and largest > 0):
        gradient, largest = np.ones(len(gradient)), 1.0
    log_gradient = np.log2(np.maximum(gradient / largest, _FAINTEST))
    curved = np.flatnonzero((log_matrix > -np.inf).any(axis=1))
    best = np.zeros(len(log_matrix))
    if len(curved):
        inner = log_matrix[np.ix_(curved, curved)]
        best[curved] = _weights(inner, log_gradient[curved])
    curvature = (matrix * Magnitude(best[None, :])).sum(axis=1) * Magnitude(-best)
    if smoothness is not None and not smoothness.is_zero:
        same = Magnitude(np.full(len(log_matrix), smoothness.log2))
        if _promise(log_gradient, np.asarray(same.log2)) >= _promise(log_gradient, np.asarray(curvature.log2)):
            return same
    return curvature


def _weights(log_matrix: np.ndarray, log_gradient: np.ndarray) -> np.ndarray:
    """Logarithms of the best weights found, among those that leave no block behind."""
    rounds = max(10, min(_ROUNDS, _MOST_ENTRIES // log_matrix.size))
    perron = np.zeros(len(log_matrix))
    for _ in range(rounds):  # the damping keeps bipartite matrices from oscillating
        perron = 0.5 * (perron + _product(log_matrix, perron))
        perron = perron - perron.max()
    image = _product(log_matrix, perron)
    same, least = _promise(log_gradient, image - perron), np.max(image - perron) + math.log2(_SLOWEST)
    weight = perron
    for _ in range(rounds):
        weight = weight + log_gradient - _product(log_matrix, weight)
    for _ in range(rounds):
        weight = np.maximum(weight, _product(log_matrix, weight) - least)
    return weight if _promise(log_gradient, _product(log_matrix, weight) - weight) > same else perron


def _product(log_matrix: np.ndarray, log_vector: np.ndarray) -> np.ndarray:
    return np.logaddexp2.reduce(log_matrix + log_vector[None, :], axis=1)


def _promise(log_gradient: np.ndarray, log_curvature: np.ndarray) -> float:
    """The logarithm of Σ g²/D."""
    return float(np.logaddexp2.reduce(2 * log_gradient - log_curvature))
