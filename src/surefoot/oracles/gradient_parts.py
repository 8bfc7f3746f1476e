"""The gradient step of a model whose weights lie with several processes: each has its part, none all of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.errors import EvaluationError
from surefoot.graph.fetched import Outline, counts_here
from surefoot.objectives import Objective, ObjectiveError, Ridge
from surefoot.oracles.problem import OracleError, Step
from surefoot.processes import Processes
from surefoot.valuation.streamed import StreamedValuer


def gradient_in_parts(
    chain: Chain, outline: Outline, objective: Objective, kappa: float, regularizer: Ridge | None, group: Any
) -> Step:
    r"""The step :math:`-\nabla F(u)/\kappa` as DTensors that lie as the weights do; one pass over all data.

    Computed in double precision, whatever the type of the weights, and rounded to it.

    Raises:
        OracleError: on all processes, if something is not finite or does not fit on one.
    """
    processes = Processes(group)
    try:
        valuer = processes.together(lambda: _valuer(chain, outline, objective, processes))
        weights = outline.weights()
        slopes = valuer.evaluate(weights, derivatives=True, proved=False).gradient or {}
    except (ObjectiveError, EvaluationError) as error:
        raise OracleError(str(error)) from error

    def here() -> tuple[dict[str, Tensor], float]:
        found, square = {}, 0.0
        for path, value in outline.parts.items():
            part = value.detach().to_local()
            slope = slopes.pop(path) if path in slopes else torch.zeros_like(part, dtype=torch.float64)
            if regularizer is not None:
                slope = slope + regularizer.weight_of(path) * part
            if not bool(torch.isfinite(slope).all()):
                raise OracleError(
                    f"the gradient with respect to '{path}' is not finite: look for divisions by zero and "
                    "overflow there"
                )
            found[path] = (-slope / kappa).to(part.dtype)
            square += float(slope.square().sum()) if counts_here(value) else 0.0
        return found, square

    parts, square = processes.together(here)
    total = math.fsum(processes.gathered(lambda: square))
    direction = {path: outline.like(path, part) for path, part in parts.items()}
    return Step(direction, kappa, 0.5 * total / kappa, "solved in closed form", calls=1)


def _valuer(chain: Chain, outline: Outline, objective: Objective, processes: Processes) -> StreamedValuer:
    if not objective.takes_targets:
        raise ObjectiveError(f"{type(objective).__name__} has no targets: data in pieces are pairs (x, y)")
    if chain.batches is None:
        return StreamedValuer(
            outline.plain, [(chain.given, objective.chosen())], objective.bound_to(None), processes
        )
    if objective.targets is not None and not len(objective.targets):
        objective = objective.bound_to(None)
    return StreamedValuer(outline.plain, chain.batches.loader, objective, processes)
