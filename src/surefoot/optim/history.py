"""What an optimizer remembers of its steps, and what follows from the records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

R = TypeVar("R")


class History(list[R]):
    """Records, the oldest first.

    >>> sf.optim.History([sf.optim.StepRecord(1.0, 0.5)]).to_columns()["loss"]
    [1.0]
    """

    def to_columns(self) -> dict[str, list[Any]]:
        """Lists of plain values, one per field."""
        rows: list[dict[str, Any]] = [asdict(record) for record in self]  # type: ignore[call-overload]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    @classmethod
    def of(cls, kind: type[R], columns: Mapping[str, Sequence[Any]]) -> Self:
        """The inverse of :meth:`to_columns`."""
        return cls(kind(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row per record, which also says whether it is proved."""
        import pandas

        proved = [record.proved for record in self]  # type: ignore[attr-defined]
        return pandas.DataFrame({**self.to_columns(), "proved": proved})


@dataclass(frozen=True)
class StepRecord:
    r"""One step.

    Attributes:
        loss: :math:`F(u_k)`, before the step.
        gradient_norm: :math:`\|\nabla F(u_k)\|`; on a set, that of the gradient mapping.
        step_size: along the direction; 0 if no step was taken.
        decrease: :math:`F(u_k) - F(u_{k+1})` as computed; ``None`` where that was not computed.
        proved_decrease: in exact arithmetic the decrease is at least this; ``None`` if the step was only measured.
        smoothness: a bound on second derivatives that the proof rests on, if it does.
        note: what else happened, in words.
        run: a new run begins where data, weights or function are not those that the step before left.
    """

    loss: float
    gradient_norm: float
    step_size: float = 0.0
    decrease: float | None = None
    proved_decrease: float | None = None
    smoothness: float | None = None
    note: str = ""
    run: int = 0

    @property
    def proved(self) -> bool:
        """Whether the decrease is proved, and not only measured."""
        return self.proved_decrease is not None


@dataclass(frozen=True)
class Stationarity:
    """How close to stationary the best of the iterates is.

    Attributes:
        steps: how many were taken, in the last run if there are several.
        smallest: the smallest gradient norm that was seen.
        bound: what the proved decreases say about it, without looking; ``None`` where they say nothing.
        why: where the bound comes from, or why there is none.

    >>> sf.optim.Stationarity(3, 0.5, 0.75, "3 proved decreases").smallest
    0.5
    """

    steps: int
    smallest: float
    bound: float | None
    why: str


def best_stationarity(history: Sequence[StepRecord], lower: float = 0.0) -> Stationarity:
    r"""The smallest gradient norm :math:`g_k` so far, and the anytime bound on it.

    With :math:`c_k = p_k / g_k^2` for the proved decreases :math:`p_k`, which add up along the last run,

    .. math:: F_0 - F_{\mathrm{low}} \ge \sum_k p_k = \sum_k c_k g_k^2 \ge \min_k g_k^2 \sum_k c_k,
        \qquad \min_k g_k \le \sqrt{\frac{F_0 - F_{\mathrm{low}}}{\sum_k c_k}}.

    With the step 1/L it is :math:`c_k \ge 1/(2L)`: the theorem, known while running. The bound is computed in
    double precision from recorded losses; their round-off is not in it.
    """
    steps = [record for record in history if record.run == history[-1].run]
    smallest = min((record.gradient_norm for record in steps), default=math.inf)
    since = ", since data, weights or function were changed last" if steps and steps[0].run else ""
    total = sum((r.proved_decrease or 0.0) / r.gradient_norm**2 for r in steps if r.gradient_norm**2)
    bound, why = None, f"{len(steps)} proved decreases"
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
    return Stationarity(len(steps), smallest, bound, why + since)
