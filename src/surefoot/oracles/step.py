"""What a solver returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Step:
    r"""The minimiser v of a model of the objective around u, plus :math:`\frac\kappa2\|v\|^2`.

    Attributes:
        direction: v, by parameter path; u + v is the new point.
        kappa: the weight of the proximal term that was used.
        model_decrease: the value of the model (with the proximal term) at 0 minus that at v, never negative.
        status: a sentence: solved, or what stood in the way.
        solved: whether v is the minimiser, up to the residual.
        calls: of the automatic-differentiation oracle.
        iterations: of the inner solver, 0 if it is direct.
        residual: norm of the gradient of the model at v relative to that at 0, as measured.
        doubled: how often kappa was doubled until the model was bounded below.
        unbounded_at: the computation at which the last infeasible kappa failed, counted from 1.
        output_change: Jv, the change of the output that the linear model predicts, where the solver knows it.
    """

    direction: Mapping[str, Tensor]
    kappa: float
    model_decrease: float
    status: str
    solved: bool = True
    calls: int = 0
    iterations: int = 0
    residual: float = 0.0
    doubled: int = 0
    unbounded_at: int | None = field(default=None)
    output_change: Tensor | None = field(default=None, repr=False)
