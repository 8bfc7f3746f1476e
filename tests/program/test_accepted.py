"""What looks strange and is a function all the same is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from program.test_refusals import Both, Inner, Pair, X, at_top, old_fashioned
from surefoot.program import capture, values_of
from surefoot.program.checks import select_outputs

ACCEPTED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "dropout in eval mode": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval(), X),
    "dropout with p = 0": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), X),
    "functional dropout with p = 0": (lambda: at_top(lambda s, x: functional.dropout(s.layer(x), 0.0)), X),
    "recurrent dropout in eval mode": (lambda: nn.GRU(3, 3, 2, dropout=0.3).eval(), torch.ones(2, 1, 3)),
    "rrelu in eval mode": (lambda: nn.RReLU().eval(), X),
    "rrelu without choice": (lambda: nn.RReLU(0.2, 0.2), X),
    "no_grad on the data": (lambda: at_top(lambda s, x: s.layer(torch.no_grad()(torch.sin)(x))), X),
    "detached data": (lambda: at_top(lambda s, x: s.layer(x.detach())), X),
    "detached frozen layer": (
        lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), Inner(lambda s, x: s.layer(x.detach()))), X,
    ),
    "a decision without gradient": (
        lambda: at_top(lambda s, x: torch.where(torch.no_grad()(lambda: s.layer(x) > 0)(), x, -x)), X,
    ),
    "unused counter": (lambda: at_top(lambda s, x: s.average.add_(1) is None or s.layer(x)), X),
    "checkpoint": (lambda: at_top(lambda s, x: checkpoint(s.layer, x, use_reentrant=False)), X),
    "vmap": (lambda: at_top(lambda s, x: torch.func.vmap(s.layer)(x)), X),
    "momentum None": (lambda: nn.BatchNorm1d(3, momentum=None), X),
    "boolean mask": (lambda: at_top(lambda s, x: torch.where(x, s.layer(x.float()), 0.0)), X > 0),
    "dict with one tensor": (lambda: at_top(lambda s, x: {"a": s.layer(x), "n": 3, "ids": x.argmax(1)}), X),
    "dict with logits": (lambda: at_top(lambda s, x: {"hidden": x, "logits": s.layer(x)}), X),
    "dataclass with one tensor": (lambda: at_top(lambda s, x: Both(s.layer(x), None)), X),
    "named tuple with one tensor": (lambda: at_top(lambda s, x: Pair(s.layer(x), None)), X),
    "tuple with nothing": (lambda: at_top(lambda s, x: (s.layer(x), None)), X),
    "list": (lambda: at_top(lambda s, x: [s.layer(x), x]), X),
    "compiled": (lambda: old_fashioned(torch.compile), X),
    "bigger than a sum can hold": (lambda: nn.Linear(3, 3), torch.full((2, 3), 3e38)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    make, x = ACCEPTED[name]
    model = make()
    program = capture(model, x)
    outputs = select_outputs(model(x))
    for ours, theirs in zip(program.results(values_of(program, model, x)), outputs, strict=True):
        torch.testing.assert_close(ours, theirs.detach())
