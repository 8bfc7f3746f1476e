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
        calls: of the automatic-differentiation oracle: pull-backs and push-forwards through the whole chain.
            Dynamic programming makes such passes itself, and they count; the matrices of single computations,
            which it differentiates one by one, do not.
        iterations: of the inner solver; where it is direct, how often its result was refined.
        residual: norm of the gradient of the model at v relative to that at 0, as measured; ``None`` where the
            calls that are allowed were spent before it could be measured.
        length: t, where a line search made tv of the minimiser v; then the direction is tv.
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
    residual: float | None = 0.0
    length: float = 1.0
    doubled: int = 0
    unbounded_at: int | None = field(default=None)
    output_change: Tensor | None = field(default=None, repr=False)
