r"""How far to go along a direction: the paper's alternative to the proximal step.

The minimiser of the model gives a direction of descent, and the next point is :math:`u + tv` with a length t that
is found by a line search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        step: what an oracle returned. A small κ makes it the minimiser of the bare model.
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
    v, value = step.direction, problem.value
    slope = float(sum((problem.gradient[path] * part).double().sum() for path, part in v.items()))
    if not slope < 0:
        raise OracleError(f"a line search needs a direction of descent, this one has the slope {slope:.3g}")
    # a differentiable F has such a length, because c < 1; round-off may hide it. What is not a number is not lower
    lengths = (first * shrink**k for k in range(trials))
    t = next((t for t in lengths if problem.value_at(v, t) <= value + fraction * t * slope), 0.0)
    status = step.status if t == 1 else f"{step.status}; shortened to {t:g} of it by a line search"
    if not t:
        status = f"{step.status}; none of {trials} lengths along it was found to descend enough"
    return replace(
        step,
        direction={path: t * part if t else torch.zeros_like(part) for path, part in v.items()},
        length=t,
        model_decrease=max((2 * t - t * t) * step.model_decrease, 0.0),
        status=status,
        solved=step.solved and t > 0,
        calls=step.calls + problem.autodiff.calls,
    )
