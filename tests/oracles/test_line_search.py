"""The line search along the directions of the oracles."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from judges.layered import build, objectives
from judges.steps import DenseModel, flat
from surefoot.objectives import Objective, Ridge
from surefoot.oracles import OracleError, Step, gauss_newton, gradient, line_search, newton

ORACLES: dict[str, Any] = {
    "gradient": lambda *given, **options: gradient(*given, kappa=1e-3, **options),
    "gauss_newton": lambda *given, **options: gauss_newton(*given, kappa=1e-8, method="dual_gram", **options),
    "newton": lambda *given, **options: newton(*given, kappa=1e-3, method="dynamic", **options),
}


@pytest.mark.parametrize("ridge", [None, Ridge({"0": 0.3})], ids=["plain", "ridge"])
@pytest.mark.parametrize("name", ORACLES)
def test_the_length_is_the_first_that_satisfies_the_condition(name: str, ridge: Ridge | None) -> None:
    model, x = build("perceptron")
    before = copy.deepcopy(model.state_dict())
    chain, objective = sf.Chain(model, x), objectives(5)["labels"]
    step: Step = ORACLES[name](chain, objective, regularizer=ridge)
    found = line_search(chain, objective, step, regularizer=ridge)
    judge = DenseModel(model, x, objective, ridge)
    v, value = judge.direction(step), float(judge.value(judge.point))
    slope = float(judge.gradient @ v)

    def enough(t: float) -> bool:
        return float(judge.value(judge.point + t * v)) <= value + 1e-4 * t * slope

    t = found.length
    assert t in {0.5**k for k in range(40)}
    assert enough(t)
    assert t == 1 or not enough(2 * t)
    assert torch.allclose(judge.direction(found), t * v, rtol=1e-12)
    expected = -judge.predicted(t * v, step.kappa, name)
    assert found.model_decrease == pytest.approx(expected, rel=1e-6)
    assert found.calls == step.calls + 1
    assert ("shortened" in found.status) == (t < 1)
    assert found.solved
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())


def test_a_given_point_is_where_it_is_searched() -> None:
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), objectives(5)["square"]
    point = {path: value.detach() + 0.1 for path, value in model.named_parameters()}
    step = gradient(chain, objective, kappa=1e-2, params=point)
    here = line_search(chain, objective, step, params=point)
    with torch.no_grad():
        for path, value in model.named_parameters():
            value.copy_(point[path])
    there = line_search(chain, objective, step)
    assert here.length == there.length < 1


class Flat(Objective):
    """Its gradient is not that of its value: no length descends."""

    operation = "test.flat"
    function = staticmethod(lambda outputs, targets: (outputs - outputs.detach()).sum())

    def check(self, outputs: Any, targets: Any) -> None:
        pass


def test_where_no_length_is_found_the_step_is_zero_and_says_so() -> None:
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), Flat(torch.zeros(5, 3))
    found = line_search(chain, objective, gradient(chain, objective), trials=5)
    assert not found.solved
    assert (found.length, found.model_decrease) == (0.0, 0.0)
    assert not flat(found.direction).any()
    assert "none of 5 lengths" in found.status


def test_a_step_that_stays_is_returned_as_it_is() -> None:
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), objectives(5)["square"]
    refused = newton(chain, objective, kappa=1e-9, double=False)
    assert not refused.solved
    assert line_search(chain, objective, refused) is refused


def test_bad_input_is_refused() -> None:
    model, x = build("perceptron")
    chain, objective = sf.Chain(model, x), objectives(5)["labels"]
    step = gradient(chain, objective)
    uphill = replace(step, direction={path: -part for path, part in step.direction.items()})
    with pytest.raises(OracleError, match="direction of descent"):
        line_search(chain, objective, uphill)
    other = gradient(sf.Chain(nn.Linear(4, 3).double(), x), objective)
    with pytest.raises(OracleError, match="moves other parameters"):
        line_search(chain, objective, other)
    for options in ({"fraction": 1.0}, {"shrink": 0.0}, {"first": 0.0}, {"trials": 0}):
        with pytest.raises(OracleError, match=r"between 0 and 1|positive length"):
            line_search(chain, objective, step, **options)  # type: ignore[arg-type]
