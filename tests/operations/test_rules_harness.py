"""The harness itself: claims that are a little too small do not pass it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import surefoot.calculus.forward as calculus
from operations.catalogue import built
from operations.harness import study
from surefoot.enclosure import Enclosure
from surefoot.operations import Bounds


def _too_small(quantity: str, factor: float) -> Callable[..., Enclosure]:
    honest = calculus._around_centre

    def enclose(*args: Any) -> Enclosure:
        enclosure = honest(*args)
        claim = getattr(enclosure, quantity)
        return enclosure if claim is None else replace(enclosure, **{quantity: claim * factor})

    return enclose


@pytest.mark.parametrize("op", ["aten.linear", "aten.add", "aten.permute", "aten.bmm", "aten.avg_pool1d"])
@pytest.mark.parametrize(("quantity", "factor"), [("rows", 0.5), ("spread", 0.5), ("bound", 0.8), ("peak", 0.6)])
def test_enclosures_that_are_too_small_are_noticed(
    monkeypatch: pytest.MonkeyPatch, op: str, quantity: str, factor: float
) -> None:
    study(built(op, 0), "rows")
    monkeypatch.setattr(calculus, "_around_centre", _too_small(quantity, factor))
    with pytest.raises(AssertionError, match=f"{op} {quantity}"):
        study(built(op, 0), "rows")


@pytest.mark.parametrize(
    "op", ["aten.linear", "aten.mul", "aten.softmax", "aten.conv1d", "aten.layer_norm", "aten.cat"]
)
def test_jacobians_that_are_too_small_are_noticed(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    _scaled(monkeypatch, lambda b: replace(b, jacobian={slot: j * 0.9 for slot, j in b.jacobian.items()}))
    with pytest.raises(AssertionError, match="is attained"):
        study(built(op, 0), "point")


@pytest.mark.parametrize("op", ["aten.linear", "aten.mul", "aten.matmul", "aten.div", "aten.var"])
def test_curvatures_that_are_too_small_are_noticed(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    _scaled(monkeypatch, lambda b: replace(b, curvature={pair: c * 0.7 for pair, c in b.curvature.items()}))
    with pytest.raises(AssertionError, match="is attained"):
        study(built(op, 0), "point")


def _scaled(monkeypatch: pytest.MonkeyPatch, change: Callable[[Bounds], Bounds]) -> None:
    honest = calculus.rule_for
    monkeypatch.setattr(calculus, "rule_for", lambda node, graph: lambda call: change(honest(node, graph)(call)))
