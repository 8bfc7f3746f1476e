"""Gauss-Newton and Newton optimizers with parameter groups, a regulariser, and a warm start."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from judges.steps import DenseModel, flat
from surefoot.objectives import CrossEntropy, Ridge
from surefoot.optim import GaussNewton, Newton

F64 = torch.float64
X = torch.randn(12, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("kind", [GaussNewton, Newton])
@pytest.mark.parametrize("damping", [0.5, "certified"])
def test_only_the_parameters_of_the_groups_move(kind: type[Any], damping: Any) -> None:
    """The step is that of a model in which the others are frozen, whichever way the groups are made."""
    ends = []
    for way in ("frozen", "params", "groups", "added"):
        model = network()
        chosen = [model[0].bias, *model[2].parameters()]
        if way == "frozen":
            model[0].weight.requires_grad_(False)
        given = {
            "params": chosen,
            "groups": [{"params": chosen[:1]}, {"params": chosen[1:]}],
            "added": chosen[:1],
        }.get(way)
        optimizer = kind(model, CrossEntropy(), damping=damping, params=given)
        if way == "added":
            optimizer.add_param_group({"params": chosen[1:]})
        before = model[0].weight.detach().clone()
        for _ in range(2):
            optimizer.step(X, Y)
        assert torch.equal(model[0].weight, before)
        assert model[0].weight.grad is None
        assert model[0].weight.requires_grad == (way != "frozen")
        ends.append(torch.cat([value.detach().reshape(-1) for value in model.parameters()]))
        state = optimizer.state_dict()
        assert len(state["param_groups"]) == (2 if way in ("groups", "added") else 1)
        optimizer.load_state_dict(state)
    assert all(torch.equal(end, ends[0]) for end in ends)


RIDGES = [Ridge(0.3), Ridge({"0": 0.5})]


@pytest.mark.parametrize("ridge", RIDGES, ids=["all", "first layer"])
@pytest.mark.parametrize("kind", [GaussNewton, Newton])
def test_a_regulariser_is_part_of_everything(kind: type[Any], ridge: Ridge) -> None:
    model = network()
    judge = DenseModel(copy.deepcopy(model), X, CrossEntropy(Y), ridge)
    curvature = "newton" if kind is Newton else "gauss_newton"
    kappa = 0.2 - min(judge.lowest(curvature), 0.0)
    optimizer = kind(model, CrossEntropy(), damping=kappa, regularizer=ridge)
    expected = float(judge.value(judge.point))
    assert optimizer.value(X, Y) == pytest.approx(expected, rel=1e-12)

    def closure() -> tuple[Tensor, Tensor]:
        outputs = model(X)
        return outputs, nn.functional.cross_entropy(outputs, Y)

    assert optimizer.step(X, Y, closure) == pytest.approx(expected, rel=1e-12)
    assert optimizer.history[0].gradient_norm == pytest.approx(float(judge.gradient.norm()), rel=1e-12)
    end = flat(dict(model.named_parameters()))
    step = judge.step(kappa, curvature)
    assert float((end - judge.point - step).norm()) < 1e-8 * float(step.norm())


@pytest.mark.parametrize("ridge", RIDGES, ids=["all", "first layer"])
@pytest.mark.parametrize("kind", [GaussNewton, Newton])
def test_certified_steps_keep_their_promise_with_a_regulariser(kind: type[Any], ridge: Ridge) -> None:
    model = network()
    optimizer = kind(model, CrossEntropy(), damping="certified", regularizer=ridge)
    for _ in range(4):
        judge = DenseModel(copy.deepcopy(model), X, CrossEntropy(Y), ridge)
        before = optimizer.step(X, Y)
        record = optimizer.history[-1]
        assert record.promised_decrease > 0
        assert before - optimizer.value(X, Y) >= record.promised_decrease * (1 - 1e-9)
        assert float(torch.linalg.eigvalsh(judge.hessian).abs().max()) <= record.smoothness
    assert optimizer.stationarity().bound is not None


def test_adapted_steps_descend_with_a_regulariser_to_the_minimum() -> None:
    for kind in (GaussNewton, Newton):
        model = network()
        optimizer = kind(model, CrossEntropy(), regularizer=Ridge(0.1))
        losses = [optimizer.step(X, Y) for _ in range(25)]
        assert all(after <= before for before, after in pairwise(losses))
        first, last = optimizer.history[0].gradient_norm, optimizer.history[-1].gradient_norm
        assert last < (1e-6 if kind is Newton else 0.1 * first)  # the model of Gauss-Newton is not that of F
    with pytest.raises(TypeError, match=r"takes a surefoot\.objectives\.Ridge"):
        GaussNewton(model, CrossEntropy(), regularizer=0.1)  # type: ignore[arg-type]
