r"""Newton, Gauss-Newton and gradient steps by dynamic programming (Algorithm "Newton oracle").

A forward pass stores what the derivatives need, a first backward pass gives the costates and with them the second
derivatives of each computation, a second one eliminates one computation after the other from the
linear-quadratic problem, and a roll-out reads off the step. The cost is linear in the depth. If the problem is
unbounded below, only the second backward pass is made again with :math:`2\kappa`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.oracles.factored import MODELS, Factored, Form, Model
from surefoot.oracles.problem import OracleError, Problem, check_kappa
from surefoot.oracles.riccati import Policy
from surefoot.oracles.status import refused, solved_status
from surefoot.oracles.step import Step

_MOST_DOUBLINGS = 200


def solve_dynamic(problem: Problem, kappa: float, model: Model, double: bool = True, form: Form = "auto") -> Step:
    r"""Minimise a model of the objective plus :math:`\frac\kappa2\|v\|^2` by dynamic programming.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term, positive.
        model: "newton", "gauss_newton" or "gradient" (Prop. lin_quad).
        double: whether kappa is doubled until the model is bounded below; if not, the step is zero and not solved.
        form: how parameters are eliminated: "direct", by a matrix of their size; "woodbury", by matrices of the
            size of the pre-activations; "auto", the first unless a computation has more than twice as many
            parameters as pre-activations.

    Raises:
        OracleError: if an argument is unknown, or derivatives are not finite.
    """
    kappa = check_kappa(kappa)
    if model not in MODELS:
        raise OracleError(f"the model is one of {', '.join(MODELS)}, got {model!r}")
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        factored = Factored(problem, model, form)
        doubled, unbounded = 0, None
        while isinstance(found := _eliminate(factored, kappa), int):
            unbounded = found
            if not double or doubled == _MOST_DOUBLINGS:
                return refused(problem, model, kappa, doubled, f"at computation {found}", found)
            kappa, doubled = 2 * kappa, doubled + 1
        policies, decrease = found
        moves = _roll_out(factored, policies)
        residual = _residual(factored, kappa, moves)
        direction, gained = _direction(factored, kappa, moves)
    return Step(
        direction=direction,
        kappa=kappa,
        model_decrease=decrease + gained,
        status=solved_status(model, kappa, doubled, None if unbounded is None else f"at computation {unbounded}"),
        calls=problem.autodiff.calls,
        residual=residual,
        doubled=doubled,
        unbounded_at=unbounded,
    )


def _eliminate(factored: Factored, kappa: float) -> tuple[list[Policy], float] | int:
    """The second backward pass: the policies, first computation first, and the decrease of the model.

    If the problem is unbounded below, the number of the computation where that shows, counted from 1.
    """
    C, c = factored.C, factored.c
    policies: list[Policy] = []
    decrease = torch.zeros((), dtype=torch.float64, device=c.device)
    for layer in reversed(factored.layers):
        S, s = layer.outer.congruence(C), layer.outer.pull(c)
        found = layer.solver.eliminate(S, s, layer.ridge + kappa, layer.q)
        if found is None:
            if not bool(torch.isfinite(S).all()):
                raise OracleError(f"second derivatives are not finite behind computation {layer.number}")
            return layer.number
        cost, policy = found
        C, c = cost.C, cost.c
        decrease += cost.decrease
        policies.append(policy)
    return policies[::-1], float(decrease)


@dataclass(frozen=True)
class Move:
    """The parameters of a computation on the solution, with the states before and at its interface."""

    v: Tensor
    y: Tensor
    w: Tensor


def _roll_out(factored: Factored, policies: list[Policy]) -> list[Move]:
    y = factored.c[:0]
    moves = []
    for layer, policy in zip(factored.layers, policies, strict=True):
        v = policy(y)
        w = layer.inner.push(y, v)
        moves.append(Move(v, y, w))
        y = layer.outer.push(w)
    return moves


def _residual(factored: Factored, kappa: float, moves: list[Move]) -> float:
    """The gradient of the model at the solution relative to that at zero, by one backward pass with each."""
    if not moves:
        return 0.0
    end = factored.layers[-1].outer.push(moves[-1].w)
    there, here = factored.C @ end + factored.c, factored.c
    at_solution, at_zero = there.new_zeros(()), there.new_zeros(())
    for layer, move in zip(reversed(factored.layers), reversed(moves), strict=True):
        inner = layer.inner
        slope, slope_here = layer.outer.pull(there) + layer.outer.curved(move.w), layer.outer.pull(here)
        pulled = inner.pull_parameters(slope) + inner.mixed_transposed(move.y) + layer.q
        at_solution += (pulled + (kappa + layer.ridge) * move.v).square().sum()
        at_zero += (inner.pull_parameters(slope_here) + layer.q).square().sum()
        there, here = inner.pull(slope) + inner.mixed(move.v), inner.pull(slope_here)
    return float((at_solution / at_zero).sqrt()) if at_zero > 0 else 0.0


def _direction(factored: Factored, kappa: float, moves: list[Move]) -> tuple[dict[str, Tensor], float]:
    """The step by path in the order of the parameters, and what those that no computation reads contribute."""
    problem = factored.problem
    found: dict[str, Tensor] = {}
    for layer, move in zip(factored.layers, moves, strict=True):
        found |= {layer.paths[name]: part for name, part in layer.inner.split(move.v).items()}
    gained = 0.0
    for path in factored.loose:
        weight, u = problem.weight(path), problem.parameters[path].double()
        found[path] = -weight / (kappa + weight) * u
        gained += 0.5 * weight**2 / (kappa + weight) * float(u.square().sum())
    return {path: found[path].to(u.dtype).contiguous() for path, u in problem.parameters.items()}, gained
