"""What an optimizer remembers of its steps, and what follows from the records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    r"""What is recorded about one step.

    Attributes:
        step: its number, from 0.
        loss: :math:`F(u_k)`, before the step.
        gradient_norm: :math:`\|\nabla F(u_k)\|`.
        step_size: :math:`\gamma_k`.
        smoothness: the certified :math:`L` the step rests on; ``None`` if it rests on none.
        radius: how far from :math:`u_k` it holds; ``None`` if the set does not move with the iterates.
        promised_decrease: what was proved before the step: :math:`F(u_k) - F(u_{k+1})` is at least this; ``None``
            if nothing was promised for this step alone.
        actual_decrease: what came out; ``None`` until the loss is evaluated again on the same data.
        stationarity: what tends to zero: the gradient norm, on a set the norm of the gradient mapping.
        data: a fingerprint of the batch; losses with different fingerprints are different functions.
        note: what else happened, in words.
        run: which run the step belongs to. A new one begins where the weights were changed between two steps, or
            the function was: promises add up within a run only.
    """

    step: int
    loss: float
    gradient_norm: float
    step_size: float
    smoothness: float | None = None
    promised_decrease: float | None = None
    actual_decrease: float | None = None
    stationarity: float = math.nan
    data: str = ""
    note: str = ""
    radius: float | None = None
    run: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.stationarity):
            object.__setattr__(self, "stationarity", self.gradient_norm)


@dataclass(frozen=True)
class Stationarity:
    """How close to stationary the best of the iterates is.

    Attributes:
        steps: how many were taken, in the last run if there are several.
        smallest: the smallest stationarity measure that was seen.
        bound: what the promises prove about it, without looking; ``None`` where they prove nothing.
        why: where the bound comes from, or why there is none.

    >>> sf.optim.Stationarity(3, 0.5, 0.75, "3 promised decreases").smallest
    0.5
    """

    steps: int
    smallest: float
    bound: float | None
    why: str


def best_stationarity(history: Sequence[StepRecord], lower: float = 0.0) -> Stationarity:
    r"""The smallest stationarity measure so far, and the anytime bound on it.

    Let :math:`g_k` be the measure and :math:`c_k = p_k / g_k^2` with :math:`p_k` the promised decrease. The
    promises add up along the run, so for every number of steps

    .. math:: F_0 - F_{\mathrm{low}} \ge F_0 - F_N \ge \sum_k p_k = \sum_k c_k g_k^2 \ge \min_k g_k^2 \sum_k c_k,
        \qquad \min_k g_k \le \sqrt{\frac{F_0 - F_{\mathrm{low}}}{\sum_k c_k}}.

    If the weights or the function were changed between steps, the sum begins anew: what is said is about the last
    run alone, of which the function is one and every point the result of the step before.

    With the step 1/L it is :math:`c_k \ge 1/(2L)`: the theorem, known while running. The bound is computed in
    double precision from recorded losses; their round-off is not in it.

    Args:
        history: the records.
        lower: :math:`F_{\mathrm{low}}`; losses are not negative.

    >>> steps = [StepRecord(k, 1.0, 0.5, 1.0, promised_decrease=0.125) for k in range(4)]
    >>> best_stationarity(steps)
    Stationarity(steps=4, smallest=0.5, bound=0.7071067811865476, why='4 promised decreases')
    """
    steps = last_run(history)
    if not steps:
        return Stationarity(0, math.inf, None, "no step was taken")
    smallest = min(record.stationarity for record in steps)

    def result(bound: float | None, why: str) -> Stationarity:
        since = (
            f", since step {steps[0].step}, before which weights or function were changed" if steps[0].run else ""
        )
        return Stationarity(len(steps), smallest, bound, why + since)

    if len({record.data for record in history}) > 1:
        return result(None, "the steps were taken on different data")
    if lower == -math.inf:
        return result(None, "no number is known below the objective")
    if any(record.promised_decrease is None for record in steps):
        return result(None, "not every step promised a decrease")
    if smallest == 0:
        return result(0.0, "a stationary point was met")
    total = sum((record.promised_decrease or 0.0) / record.stationarity**2 for record in steps)
    if total <= 0:
        return result(None, "the promised decreases are zero")
    gap = max(steps[0].loss - lower, 0.0)
    return result(math.sqrt(gap / total), f"{len(steps)} promised decreases")


def last_run(history: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps since weights or function were changed last."""
    return [record for record in history if record.run == history[-1].run]


def to_columns(history: Sequence[StepRecord]) -> dict[str, list[Any]]:
    """The records as lists of plain numbers and texts, one per field."""
    rows = [asdict(record) for record in history]
    return {field.name: [row[field.name] for row in rows] for field in fields(StepRecord)}


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[StepRecord]:
    """The inverse of :func:`to_columns`."""
    names = list(columns)
    return [StepRecord(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]
