"""What an optimizer remembers of its steps, and what follows from the records alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class History(list[R], Generic[R]):
    """Records, the oldest first.

    >>> sf.optim.History([sf.optim.StepRecord(1.0, 0.5)]).to_columns()["loss"]
    [1.0]
    """

    def to_columns(self) -> dict[str, list[Any]]:
        """Lists of plain values, one per field, with whether each record is proved."""
        rows: list[dict[str, Any]] = [asdict(record) for record in self]  # type: ignore[call-overload]
        names = [field.name for field in fields(self[0])] if self else []  # type: ignore[arg-type]
        return {name: [row[name] for row in rows] for name in names}

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row per record."""
        import pandas

        columns = self.to_columns()
        if self and hasattr(self[0], "proved"):
            columns["proved"] = [record.proved for record in self]  # type: ignore[attr-defined]
        return pandas.DataFrame(columns)


@dataclass(frozen=True)
class StepRecord:
    r"""One step.

    Attributes:
        loss: :math:`F(u_k)`, before the step.
        gradient_norm: :math:`\|\nabla F(u_k)\|`.
        step_size: along the direction; 0 if no step was taken.
        decrease: :math:`F(u_k) - F(u_{k+1})` as computed; ``None`` where that was not computed.
        proved_decrease: in exact arithmetic the decrease is at least this; ``None`` if the step was only measured.
        stationarity: what tends to zero: the gradient norm, or with kinks the norm of the gradient mapping.
        smoothness: a second derivative bound that the proof rests on, if it does.
        note: what else happened, in words.
        run: a new run begins where data, weights or function are not those that the step before left.
    """

    loss: float
    gradient_norm: float
    step_size: float = 0.0
    decrease: float | None = None
    proved_decrease: float | None = None
    stationarity: float = math.nan
    smoothness: float | None = None
    note: str = ""
    run: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.stationarity):
            object.__setattr__(self, "stationarity", self.gradient_norm)

    @property
    def proved(self) -> bool:
        """Whether the decrease is proved, and not only measured."""
        return self.proved_decrease is not None


@dataclass(frozen=True)
class Stationarity:
    """How close to stationary the best of the iterates is.

    Attributes:
        steps: how many were taken, in the last run if there are several.
        smallest: the smallest stationarity measure that was seen.
        bound: what the proved decreases say about it, without looking; ``None`` where they say nothing.
        why: where the bound comes from, or why there is none.

    >>> sf.optim.Stationarity(3, 0.5, 0.75, "3 proved decreases").smallest
    0.5
    """

    steps: int
    smallest: float
    bound: float | None
    why: str


def best_stationarity(history: History[StepRecord], lower: float = 0.0) -> Stationarity:
    r"""The smallest stationarity measure so far, and the anytime bound on it.

    Let :math:`g_k` be the measure and :math:`c_k = p_k / g_k^2` with :math:`p_k` the proved decrease. These add up
    along the last run, of which the function is one and every point the result of the step before:

    .. math:: F_0 - F_{\mathrm{low}} \ge F_0 - F_N \ge \sum_k p_k = \sum_k c_k g_k^2 \ge \min_k g_k^2 \sum_k c_k,
        \qquad \min_k g_k \le \sqrt{\frac{F_0 - F_{\mathrm{low}}}{\sum_k c_k}}.

    With the step 1/L it is :math:`c_k \ge 1/(2L)`: the theorem, known while running. The bound is computed in
    double precision from recorded losses; their round-off is not in it.

    Args:
        history: the records.
        lower: :math:`F_{\mathrm{low}}`.
    """
    steps = [record for record in history if record.run == history[-1].run]
    smallest = min((record.stationarity for record in steps), default=math.inf)
    since = ", of the steps since data, weights or function were changed last" if steps and steps[0].run else ""
    bound, why = None, ""
    total = sum((record.proved_decrease or 0.0) / record.stationarity**2 for record in steps if record.stationarity)
    if not steps:
        why = "no step was taken"
    elif lower == -math.inf:
        why = "no number is known below the objective"
    elif not all(record.proved for record in steps):
        why = "not every step was proved"
    elif smallest == 0:
        bound, why = 0.0, "a stationary point was met"
    elif total <= 0:
        why = "the proved decreases are zero"
    else:
        bound = math.sqrt(max(steps[0].loss - lower, 0.0) / total)
        why = f"{len(steps)} proved decreases"
    return Stationarity(len(steps), smallest, bound, why + since)
