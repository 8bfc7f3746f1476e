r"""Newton, Gauss-Newton and gradient steps by dynamic programming (Algorithm "Newton oracle").

A forward pass stores what the derivatives need, a first backward pass gives the costates and with them the second
derivatives of each computation, a second one eliminates one computation after the other from the
linear-quadratic problem, and a roll-out reads off the step. The cost is linear in the depth. If the problem is
unbounded below, only the second backward pass is made again with :math:`2\kappa`.

All of this is in double precision, whatever the model's. The residual that is returned is that of the step as it
is returned, rounded to the type of the parameters: where the model is ill-conditioned that is most of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.oracles.factored import MODELS, Factored, Form, Layer, Model
from surefoot.oracles.problem import OracleError, Problem, Step, check_kappa, refused, solved_status
from surefoot.oracles.riccati import Elimination, Policy
from surefoot.program.checks import differentiable_attention

_MOST_DOUBLINGS = 200
_FINE = 1e-13  # a relative residual that is as small as round-off lets it be
_ROUNDS = 3  # of refinement


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
    with differentiable_attention():
        factored = Factored(problem, model, form)
        doubled, unbounded, where = 0, None, ""
        while isinstance(eliminations := _eliminate(factored, kappa), int):
            unbounded, where = eliminations, f"at computation {eliminations}"
            if not double or doubled == _MOST_DOUBLINGS:
                return refused(problem, model, kappa, doubled, where, unbounded)
            kappa, doubled = 2 * kappa, doubled + 1
        found, residual, decrease, rounds = _minimise(factored, kappa, eliminations)
        direction, gained = _direction(factored, kappa, found)
        rounded = [_joined(layer, direction) for layer in factored.layers]
        if residual and any(not torch.equal(a, b) for a, b in zip(found, rounded, strict=True)):
            residual = _norm(_gradient(factored, kappa, rounded)) / _norm(factored.gradient)
    return Step(
        direction=direction,
        kappa=kappa,
        model_decrease=decrease + gained,
        status=solved_status(model, kappa, doubled, where, "dynamic programming"),
        calls=problem.autodiff.calls,
        iterations=rounds,
        residual=residual,
        doubled=doubled,
        unbounded_at=unbounded,
    )


def _eliminate(factored: Factored, kappa: float) -> list[Elimination] | int:
    """The second backward pass: the eliminations, first computation first.

    If the problem is unbounded below, the number of the computation where that shows, counted from 1.
    """
    C, found = factored.C, []
    for layer in reversed(factored.layers):
        S = layer.outer.congruence(C)
        elimination = layer.solver.eliminate(S, layer.ridge + kappa)
        if elimination is None:
            if not bool(torch.isfinite(S).all()):
                raise OracleError(f"second derivatives are not finite behind computation {layer.number}")
            return layer.number
        C = elimination.C
        found.append(elimination)
    return found[::-1]


def _minimise(
    factored: Factored, kappa: float, eliminations: list[Elimination]
) -> tuple[list[Tensor], float, float, int]:
    r"""The minimiser by layer, the residual, the decrease of the model, and how often it was refined.

    Where samples are nearly the same, :class:`~surefoot.oracles.riccati.Woodbury` cannot tell small eigenvalues
    from round-off, and leaving them out shows in the minimiser. So the gradient of the model there is evaluated
    from its definition, and where it is not small, the same model is minimised around that point (iterative
    refinement): its linear terms are then :math:`c = 0` and that gradient, its quadratic ones are as before. The
    decrease is :math:`-\frac12\langle\nabla m(0) + \nabla m(v), v\rangle`.
    """
    if not factored.layers:
        return [], 0.0, 0.0, 0
    start, scale = factored.gradient, _norm(factored.gradient)
    if scale == 0:
        return [torch.zeros_like(part) for part in start], 0.0, 0.0, 0
    v = _solution(factored, eliminations, factored.c, [layer.q for layer in factored.layers])
    slope, rounds = _gradient(factored, kappa, v), 0
    while _norm(slope) > _FINE * scale and rounds < _ROUNDS:
        change = _solution(factored, eliminations, torch.zeros_like(factored.c), slope)
        refined = [a + b for a, b in zip(v, change, strict=True)]
        after = _gradient(factored, kappa, refined)
        if not _norm(after) < 0.5 * _norm(slope):
            break
        v, slope, rounds = refined, after, rounds + 1
    decrease = sum(float((a + b).dot(w)) for a, b, w in zip(start, slope, v, strict=True))
    return v, _norm(slope) / scale, max(-0.5 * decrease, 0.0), rounds


def _solution(factored: Factored, eliminations: list[Elimination], c: Tensor, q: list[Tensor]) -> list[Tensor]:
    """The minimiser for these linear terms: the costs-to-go backward, then the roll-out."""
    policies: list[Policy] = []
    for layer, elimination, slope in zip(factored.layers[::-1], eliminations[::-1], q[::-1], strict=True):
        c, policy = elimination.affine(layer.outer.pull(c), slope)
        policies.append(policy)
    y, found = factored.start, []
    for layer, policy in zip(factored.layers, policies[::-1], strict=True):
        v = policy(y)
        y = layer.outer.push(layer.inner.push(y, v))
        found.append(v)
    factored.problem.autodiff.calls += 1
    return found


def _gradient(factored: Factored, kappa: float, parameters: list[Tensor]) -> list[Tensor]:
    """The gradient of the model: a pass forward for the states, a pass backward for their slopes."""
    y, states = factored.start, []
    for layer, v in zip(factored.layers, parameters, strict=True):
        w = layer.inner.push(y, v)
        states.append((y, w))
        y = layer.outer.push(w)
    there, found = factored.C @ y + factored.c, []
    for layer, v, (y, w) in zip(factored.layers[::-1], parameters[::-1], states[::-1], strict=True):
        slope = layer.outer.pull(there) + layer.outer.curved(w)
        pulled = layer.inner.pull_parameters(slope) + layer.inner.mixed_transposed(y) + layer.q
        found.append(pulled + (kappa + layer.ridge) * v)
        there = layer.inner.pull(slope) + layer.inner.mixed(v)
    factored.problem.autodiff.calls += 2  # a push-forward and a pull-back
    return found[::-1]


def _joined(layer: Layer, direction: Mapping[str, Tensor]) -> Tensor:
    """The step of a computation as one vector, from the step as it is returned."""
    return layer.inner.flat({name: direction[path] for name, path in layer.paths.items()})


def _norm(parts: list[Tensor]) -> float:
    return float(sum(part.square().sum() for part in parts)) ** 0.5


def _direction(factored: Factored, kappa: float, parts: list[Tensor]) -> tuple[dict[str, Tensor], float]:
    """The step by path in the order of the parameters, and what those that no computation reads contribute."""
    problem = factored.problem
    found: dict[str, Tensor] = {}
    for layer, v in zip(factored.layers, parts, strict=True):
        found |= {layer.paths[name]: part for name, part in layer.inner.split(v).items()}
    gained = 0.0
    for path in factored.loose:
        weight, u = problem.weight(path), problem.parameters[path].double()
        found[path] = -weight / (kappa + weight) * u
        gained += 0.5 * weight**2 / (kappa + weight) * float(u.square().sum())
    return {path: found[path].to(u.dtype).contiguous() for path, u in problem.parameters.items()}, gained
