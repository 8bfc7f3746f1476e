"""The exact value lies in the interval, on networks that nobody tuned; in real arithmetic, not against doubles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from flint import arb
from torch import nn

import surefoot as sf
from attack.exact_subject import Subject
from judges.exact import exactly, run, settled, stored, value_of
from surefoot.errors import SurefootError
from surefoot.valuation.valuer import Evaluation, EvaluationError, Valuer
from valuation.families import FAMILIES

SUBJECTS = 16  # of each family, four cases each: 1,216 together
FURTHER = 40  # of each family and part: 12,160 together
REFUSED = {"custom_backward": 0.9, "edges": 0.5, "scales": 0.5, "semantics": 0.4}  # at most, of the cases


def evaluations(subject: Subject) -> Iterator[Evaluation]:
    """By reverse mode, by forward mode with what was learned from it, what was learned elsewhere, in short."""
    valuer = Valuer.of(subject.model, subject.x, subject.loss.bound_to(subject.y))
    weights = dict(subject.model.named_parameters())
    for derivatives in (True, False):
        yield valuer.enclosed(valuer.run(weights, derivatives=derivatives))
    elsewhere = Valuer.of(subject.model, subject.x, subject.loss.bound_to(subject.y))
    for factor in (0.5, 1.01):
        with suppress(EvaluationError):
            elsewhere.enclosed(elsewhere.run({path: value.detach() * factor for path, value in weights.items()}))
    yield elsewhere.enclosed(elsewhere.run(weights))
    elsewhere._forward_decides = len(weights) % 2 == 0
    yield elsewhere.enclosed(elsewhere.run(weights, light=True), math.inf)


def is_within(subject: Subject, found: Evaluation) -> bool | None:
    """Whether the exact value is in the interval; ``None`` if 3000 bits do not tell."""
    leaves = {p: stored(p) for p in subject.model.parameters()}
    leaves[subject.x] = stored(subject.x)

    def asked() -> bool | None:
        fact: arb = value_of(run(subject.objective, subject.model, leaves)[0])
        lower, upper = exactly(found.lower), exactly(found.upper)
        if lower <= fact <= upper:
            return True
        return False if fact < lower or fact > upper else None

    return settled(asked)


def judged(family: str, seeds: range) -> None:
    count: Counter[str] = Counter()
    for seed in seeds:
        subject = FAMILIES[family](seed)
        count["cases"] += 4
        try:
            several = list(evaluations(subject))
        except SurefootError:
            count["refused"] += 4
            continue
        for found in several:
            if not math.isfinite(found.error):
                count["refused"] += 1
                continue
            answer = is_within(subject, found)
            assert answer is not False, f"{family}({seed}) [{subject.name}]: {found}"
            count["undecided"] += answer is None
    most = REFUSED.get(family, 0.2)
    assert count["refused"] + count["undecided"] <= most * count["cases"], count


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_value_is_inside(family: str) -> None:
    judged(family, range(SUBJECTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 5))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_value_is_inside_in_nine_thousand_more_cases(family: str, part: int) -> None:
    judged(family, range(part * 10_000, part * 10_000 + FURTHER))


def test_an_interval_that_is_too_small_by_the_last_digits_is_caught() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 2, dtype=torch.float64), torch.tensor([0, 1, 0])
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    subject = Subject("", model, x, sf.CrossEntropy(), y)
    found = sf.evaluate(model, x, sf.CrossEntropy(y))
    assert is_within(subject, found)
    assert is_within(subject, replace(found, value=found.value + 2.1 * found.error)) is False
