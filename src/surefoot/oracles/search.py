r"""How far to go along a direction.

The paper's alternative to the proximal step: the minimiser of the model gives a direction of descent, and the next
point is :math:`u + tv` with a length t that is found by a line search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.problem import OracleError, Problem, Step
from surefoot.program.checks import with_gradients


@with_gradients()
def line_search(
    chain: Chain,
    objective: Objective,
    step: Step,
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    *,
    first: float = 1.0,
    fraction: float = 1e-4,
    shrink: float = 0.5,
    trials: int = 40,
) -> Step:
    r"""The step of an oracle, shortened until the objective falls enough (Armijo's condition).

    The result has the direction :math:`tv`, with ``length`` t. The decrease of the model is that at tv: the model
    m is quadratic with the minimiser v, so :math:`m(tv) = (2t - t^2)m(v)`.

    Args:
        chain: the network and its batch.
        objective: the loss that the step was computed for.
        step: what :func:`~surefoot.oracles.gradient`, :func:`~surefoot.oracles.gauss_newton` or
            :func:`~surefoot.oracles.newton` returned. A small κ makes it the minimiser of the bare model.
        params: the point that the step was computed at.
        regularizer: that of the step.
        first: the first t.
        fraction: c in :math:`F(u + tv) \le F(u) + c\,t\,\langle\nabla F, v\rangle`, between 0 and 1.
        shrink: the factor from one t to the next, between 0 and 1.
        trials: how many t are tried; if none descends enough, the direction of the result is zero, ``solved`` is
            false, and the status says so.

    Raises:
        OracleError: if an argument does not fit, or the direction does not descend.

    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])
    >>> chain, objective = sf.Chain(nn.Linear(1, 1), x), sf.Square(y)
    >>> step = sf.oracles.gradient(chain, objective, kappa=0.1)  # ten times too long
    >>> found = sf.oracles.line_search(chain, objective, step)
    >>> found.length < 1, found.status.endswith(f"shortened to {found.length:g} of it by a line search")
    (True, True)
    """
    for name, value in (("fraction", fraction), ("shrink", shrink)):
        if not 0 < value < 1:
            raise OracleError(f"{name} is a number between 0 and 1, got {value!r}")
    if not (0 < first < math.inf and trials > 0):
        raise OracleError(f"a line search starts at a positive length and tries it, got {first!r}, {trials!r}")
    if not any(bool(part.any()) for part in step.direction.values()):
        return step
    problem = Problem(chain, objective, params, regularizer)
    if step.direction.keys() != problem.parameters.keys():
        raise OracleError("the step is not one of this chain: it moves other parameters")
    slopes = ((problem.gradient[path] * part).double().sum() for path, part in step.direction.items())
    found = armijo(
        lambda t: problem.value_at(step.direction, t),
        problem.value,
        float(sum(slopes)),
        first=first,
        fraction=fraction,
        shrink=shrink,
        trials=trials,
    )
    calls = step.calls + problem.autodiff.calls
    if found is None:
        zero = {path: torch.zeros_like(part) for path, part in step.direction.items()}
        status = f"{step.status}; none of {trials} lengths along it was found to descend enough"
        return replace(
            step, direction=zero, length=0.0, model_decrease=0.0, status=status, solved=False, calls=calls
        )
    t, _ = found
    return replace(
        step,
        direction={path: t * part for path, part in step.direction.items()},
        length=t,
        model_decrease=max((2 * t - t * t) * step.model_decrease, 0.0),
        status=step.status if t == 1 else f"{step.status}; shortened to {t:g} of it by a line search",
        calls=calls,
    )


def armijo(
    value_at: Callable[[float], float],
    value: float,
    slope: float,
    *,
    first: float = 1.0,
    fraction: float = 1e-4,
    shrink: float = 0.5,
    trials: int = 40,
) -> tuple[float, float] | None:
    r"""The first t of :math:`t_0, \beta t_0, \beta^2t_0, …` that descends enough.

    That is :math:`F(u + tv) \le F(u) + c\,t\,\langle\nabla F, v\rangle`. A differentiable F has such a t if the
    slope is negative, because :math:`c < 1`; round-off may hide it.

    Args:
        value_at: t ↦ F(u + tv); a value that is not finite counts as too large.
        value: F(u).
        slope: ⟨∇F(u), v⟩, negative.
        first, fraction, shrink, trials: :math:`t_0`, c, β and how many t are tried; see :func:`line_search`.

    Returns:
        t and F(u + tv), or ``None`` if no trial is low enough.

    Raises:
        OracleError: if the direction does not descend.

    >>> armijo(lambda t: (1 - 4 * t) ** 2, value=1.0, slope=-8.0)
    (0.25, 0.0)
    """
    if not slope < 0:
        raise OracleError(f"a line search needs a direction of descent, this one has the slope {slope:.3g}")
    step = first
    for _ in range(trials):
        found = value_at(step)
        if math.isfinite(found) and found <= value + fraction * step * slope:
            return step, found
        step *= shrink
    return None
