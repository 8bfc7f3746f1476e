r"""Newton, Gauss-Newton and gradient steps by dynamic programming (Algorithm "Newton oracle", Prop. newton_step).

The steps minimise the linear-quadratic problem of :mod:`surefoot.oracles.quadratic`. With the cost-to-go
:math:`\frac12y_t^\top C_ty_t + c_t^\top y_t` of the state after computation t, its parameters solve

.. math:: \min_v\ \tfrac12v^\top Mv + v^\top(Hy_{t-1} + h), \quad
          M = \kappa I + Q_t + B_t^\top C_tB_t,\ H = B_t^\top C_tA_t + R_t^\top,\ h = q_t + B_t^\top c_t,

which is bounded below if and only if M is positive definite (or semi-definite, which is refused as well). So
:math:`v = K_ty_{t-1} + k_t` with the gains :math:`K_t = -M^{-1}H`, :math:`k_t = -M^{-1}h`, and

.. math:: C_{t-1} = P_{t-1} + A_t^\top C_tA_t - H^\top M^{-1}H, \qquad c_{t-1} = A_t^\top c_t - H^\top M^{-1}h.

A backward pass eliminates one computation after the other, and a roll-out reads off the step: the cost is linear
in the depth. If the problem is unbounded below, only the backward pass is made again with :math:`2\kappa`.

All of this is in double precision, whatever the model's. The residual that is returned is that of the step as it
is returned, rounded to the type of the parameters: where the model is ill-conditioned that is most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.oracles.problem import OracleError, Problem, Step, check_kappa, refused, solved_status
from surefoot.oracles.quadratic import LinearQuadratic, Name, block_diagonal, expanded

_MOST_DOUBLINGS = 200
_FINE = 1e-13  # a relative residual that is as small as round-off lets it be
_ROUNDS = 3  # of refinement
Parts = list[Tensor]  # a vector for each computation


@dataclass(frozen=True)
class Elimination:
    """A computation eliminated for one κ: the curvature C before it, the gain K, and L with LLᵀ = M, L⁻¹H."""

    C: Tensor
    K: Tensor
    factor: Tensor
    half: Tensor


def solve_dynamic(problem: Problem, kappa: float, model: Name, double: bool = True) -> Step:
    r"""Minimise a model of the objective plus :math:`\frac\kappa2\|v\|^2` by dynamic programming.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term, positive.
        model: "newton", "gauss_newton" or "gradient" (Prop. lin_quad).
        double: whether kappa is doubled until the model is bounded below; if not, the step is zero and not solved.

    Raises:
        OracleError: if an argument is unknown, or derivatives are not finite.
    """
    kappa = check_kappa(kappa)
    quadratic = expanded(problem, model)
    doubled, unbounded, where = 0, None, ""
    while isinstance(eliminations := _eliminated(quadratic, kappa), int):
        unbounded, where = eliminations, f"at computation {eliminations}"
        if not double or doubled == _MOST_DOUBLINGS:
            return refused(problem, model, kappa, where, doubled=doubled, unbounded_at=unbounded)
        kappa, doubled = 2 * kappa, doubled + 1
    start, rounds = quadratic.gradient, 0
    v, gains = _solution(quadratic, eliminations, quadratic.c, [layer.q for layer in quadratic])
    slope, scale = _gradient(quadratic, kappa, v), _norm(start)
    problem.autodiff.calls += 4  # the gradient, the roll-out, and a pass each way to measure it
    while _norm(slope) > _FINE * scale and rounds < _ROUNDS:
        # the same problem around v: its linear terms are the gradient there
        change, _ = _solution(quadratic, eliminations, torch.zeros_like(quadratic.c), slope)
        trial = [a + b for a, b in zip(v, change, strict=True)]
        after = _gradient(quadratic, kappa, trial)
        problem.autodiff.calls += 3
        if not _norm(after) < 0.5 * _norm(slope):
            break
        v, slope, rounds = trial, after, rounds + 1
    decrease = -0.5 * sum(float((a + b).dot(w)) for a, b, w in zip(start, slope, v, strict=True))
    direction: dict[str, Tensor] = {}
    for layer, part in zip(quadratic, v, strict=True):
        direction |= layer.split(part)
    for path in problem.parameters.keys() - direction.keys():  # which no computation reads
        weight, u = problem.weight(path), problem.parameters[path].double()
        direction[path] = -weight / (kappa + weight) * u
        decrease += 0.5 * weight**2 / (kappa + weight) * float(u.square().sum())
    direction = {path: direction[path].to(u.dtype).contiguous() for path, u in problem.parameters.items()}
    rounded = [layer.join(direction) for layer in quadratic]
    if any(not torch.equal(a, b) for a, b in zip(v, rounded, strict=True)):
        slope = _gradient(quadratic, kappa, rounded)
    return Step(
        direction=direction,
        kappa=kappa,
        model_decrease=max(decrease, 0.0),
        status=solved_status(model, kappa, doubled, where, "dynamic programming"),
        calls=problem.autodiff.calls,
        iterations=rounds,
        residual=_norm(slope) / scale if scale else 0.0,
        doubled=doubled,
        unbounded_at=unbounded,
        gains=gains,
    )


def _eliminated(quadratic: LinearQuadratic, kappa: float) -> list[Elimination] | int:
    """The eliminations, first computation first.

    If the problem is unbounded below, the number of the computation where that shows, counted from 1.
    """
    C, eliminations = quadratic.C, []
    for layer in reversed(quadratic.layers):
        CB = C @ layer.B
        M = layer.Q + layer.B.T @ CB
        M.diagonal().add_(kappa)
        factor, failed = torch.linalg.cholesky_ex(M)
        if int(failed):
            if not bool(torch.isfinite(C).all() and torch.isfinite(M).all()):
                raise OracleError(f"second derivatives are not finite behind computation {layer.number}")
            return layer.number
        H = times(CB.T, layer.slopes) + layer.R.T
        half = torch.linalg.solve_triangular(factor, H, upper=False)
        C = block_diagonal(layer.bend) + times(times(C, layer.slopes).T, layer.slopes) - half.T @ half
        K = -torch.linalg.solve_triangular(factor.mT, half, upper=True)
        eliminations.append(Elimination(C, K, factor, half))
    return eliminations[::-1]


def _solution(
    quadratic: LinearQuadratic, eliminations: Sequence[Elimination], c: Tensor, q: Parts
) -> tuple[Parts, list[tuple[Tensor, Tensor]]]:
    """The minimiser for these linear terms, and the gains: the costs-to-go backward, then the roll-out."""
    offsets: Parts = []
    for layer, done, slope in zip(quadratic.layers[::-1], eliminations[::-1], q[::-1], strict=True):
        offset = torch.linalg.solve_triangular(done.factor, (slope + layer.B.T @ c)[:, None], upper=False)
        c = layer.pull(c) - (done.half.T @ offset)[:, 0]
        offsets.append(-torch.linalg.solve_triangular(done.factor.mT, offset, upper=True)[:, 0])
    gains = [(done.K, offset) for done, offset in zip(eliminations, offsets[::-1], strict=True)]
    y, parts = quadratic.start, []
    for layer, (K, k) in zip(quadratic, gains, strict=True):
        parts.append(K @ y + k)
        y = layer.push(y, parts[-1])
    return parts, gains


def _gradient(quadratic: LinearQuadratic, kappa: float, parts: Parts) -> Parts:
    """The gradient of the model: a pass forward for the states, a pass backward for their slopes."""
    y, states = quadratic.start, []
    for layer, v in zip(quadratic, parts, strict=True):
        states.append(y)
        y = layer.push(y, v)
    slope, found = quadratic.C @ y + quadratic.c, []
    for layer, v, y in zip(quadratic.layers[::-1], parts[::-1], states[::-1], strict=True):
        found.append(layer.B.T @ slope + layer.Q @ v + layer.R.T @ y + layer.q + kappa * v)
        slope = layer.pull(slope) + _applied(layer.bend, y) + layer.R @ v
    return found[::-1]


def _norm(parts: Parts) -> float:
    return float(sum(part.square().sum() for part in parts)) ** 0.5


def times(matrix: Tensor, blocks: Tensor) -> Tensor:
    """A matrix times a block-diagonal one, given as blocks × rows × columns."""
    count, rows, columns = blocks.shape
    split = matrix.reshape(matrix.shape[0], count, rows).transpose(0, 1)
    return (split @ blocks).transpose(0, 1).reshape(matrix.shape[0], count * columns)


def _applied(blocks: Tensor, vector: Tensor) -> Tensor:
    return (blocks @ vector.reshape(blocks.shape[0], blocks.shape[2], 1)).flatten()
