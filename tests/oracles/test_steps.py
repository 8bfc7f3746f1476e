"""Every method of every oracle, on every case and with every damping, beside dense matrices and a dense solve."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import surefoot as sf
from judges.layered import MODELS, build, objectives
from judges.networks import CLASSES, MAKERS, make
from judges.steps import DenseModel
from surefoot.objectives import Objective, Ridge

F64 = torch.float64
GAUSS_NEWTON = ("primal", "primal_gram", "dual", "dual_gram", "dynamic", "auto")
NEWTON = ("cg", "dynamic", "auto")
DAMPINGS = (1e-3, 0.1, 10.0)

Case = tuple[str, str, str]  # a family of networks, one of them, and a loss
CASES: list[Case] = [("layered", name, loss) for name in MODELS for loss in ("labels", "soft", "square")]
CASES += [("structures", name, loss) for name in MAKERS for loss in ("labels", "square")]


@cache
def judge(case: Case, ridge: float | None = None) -> DenseModel:
    family, name, loss = case
    if family == "layered":
        model, x = build(name)
        objective: Objective = objectives(len(x))[loss]
    else:
        model, x = make(name)
        torch.manual_seed(1)
        targets = torch.randn(len(x), CLASSES, dtype=F64)
        objective = sf.Square(targets) if loss == "square" else sf.CrossEntropy(torch.arange(len(x)) % CLASSES)
    return DenseModel(model, x, objective, None if ridge is None else Ridge(ridge))


def taken(oracle: str, dense: DenseModel, damping: float, solver: str | None = None, **options: Any) -> Any:
    """The step of an oracle, through its public name."""
    chain = sf.Chain(dense.model, dense.x)
    given = {"kappa": damping, "regularizer": dense.ridge, **options}
    if solver is not None:
        given["method"] = solver
    return getattr(sf.oracles, oracle)(chain, dense.objective, **given)


def assert_solves(step: Any, dense: DenseModel, model: str) -> None:
    assert step.solved or step.residual is None, step.status  # the calls that are allowed may end before a check
    assert dense.error(step, model) < 1e-9, step.status
    assert dense.residual(step, model) < 1e-9, step.status
    assert step.model_decrease == pytest.approx(dense.decrease(step, model), rel=1e-8)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_gradient_step_is_the_gradient(case: Case) -> None:
    for ridge in (None, 0.2):
        dense = judge(case, ridge)
        assert_solves(taken("gradient", dense, 2.0), dense, "gradient")


@pytest.mark.parametrize("solver", GAUSS_NEWTON)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gauss_newton_steps_are_those_of_dense_matrices(case: Case, solver: str) -> None:
    for damping, ridge in zip(DAMPINGS, (None, 0.2, None), strict=True):
        dense = judge(case, ridge)
        assert_solves(taken("gauss_newton", dense, damping, solver), dense, "gauss_newton")


@pytest.mark.parametrize("solver", NEWTON)
@pytest.mark.parametrize("case", [case for case in CASES if case[1] != "weight-norm"], ids="-".join)
def test_newton_steps_are_those_of_dense_matrices(case: Case, solver: str) -> None:
    for above, ridge in zip((0.05, 1.0), (None, 0.2), strict=True):
        dense = judge(case, ridge)
        damping = max(0.0, -dense.lowest("newton")) + above
        options = {} if solver == "dynamic" else {"tolerance": 1e-12}
        assert_solves(taken("newton", dense, damping, solver, **options), dense, "newton")
