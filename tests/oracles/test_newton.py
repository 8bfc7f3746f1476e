"""Newton and Gauss-Newton steps against the dense Hessian and a dense solve."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from judges.networks import CLASSES, MAKERS, make
from judges.steps import DenseModel, flat, saturated
from surefoot.chain import Chain
from surefoot.objectives import CrossEntropy, Objective, Ridge, Square
from surefoot.oracles import Step, gauss_newton, newton, quadratic
from surefoot.oracles.dynamic import solve_dynamic
from surefoot.oracles.problem import OracleError, Problem


@cache
def case(name: str, loss: str, ridge: float = 0.0) -> tuple[Chain, DenseModel]:
    model, x = make(name)
    torch.manual_seed(1)
    targets = torch.arange(len(x)) % CLASSES
    objective: Objective = CrossEntropy(targets)
    if loss == "square":
        objective = Square(torch.randn(len(x), CLASSES, dtype=torch.float64))
    return Chain(model, x), DenseModel(model, x, objective, Ridge(ridge) if ridge else None)


def dynamic(chain: Chain, dense: DenseModel, kappa: float, model: Any, double: bool = False) -> Step:
    return solve_dynamic(Problem(chain, dense.objective, None, dense.ridge), kappa, model, double)


def in_order(step: Step, dense: DenseModel) -> Tensor:
    assert step.direction.keys() == dense.parameters.keys()
    return flat({path: step.direction[path] for path in dense.parameters})


def assert_solves(step: Step, dense: DenseModel, kappa: float, model: str, tolerance: float = 1e-8) -> None:
    expected = dense.step(kappa, model)
    assert step.solved
    assert step.kappa == kappa
    assert float((in_order(step, dense) - expected).norm()) <= tolerance * float(expected.norm())
    assert step.model_decrease == pytest.approx(-dense.predicted(expected, kappa, model), rel=1e-8)
    assert step.residual <= 1e-9


@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize("loss", ["square", "cross entropy"])
@pytest.mark.parametrize("name", MAKERS)
def test_newton_is_the_dense_solve(name: str, loss: str, ridge: float) -> None:
    chain, dense = case(name, loss, ridge)
    kappa = max(0.0, -dense.lowest("newton")) + 0.05
    assert_solves(dynamic(chain, dense, kappa, "newton"), dense, kappa, "newton")


@pytest.mark.parametrize("loss", ["square", "cross entropy"])
@pytest.mark.parametrize("name", MAKERS)
def test_gauss_newton_is_the_dense_solve(name: str, loss: str) -> None:
    chain, dense = case(name, loss, 0.2)
    assert_solves(dynamic(chain, dense, 0.03, "gauss_newton"), dense, 0.03, "gauss_newton")


@pytest.mark.parametrize("name", ["mlp", "dense", "attention"])
def test_the_gradient_model_gives_the_gradient(name: str) -> None:
    chain, dense = case(name, "square")
    assert_solves(dynamic(chain, dense, 4.0, "gradient"), dense, 4.0, "gradient")


@pytest.mark.parametrize("name", ["mlp", "wide", "convolutional", "layer_norm", "residual", "attention", "shared"])
def test_conjugate_gradients_agree(name: str) -> None:
    chain, dense = case(name, "cross entropy", 0.2)
    kappa = max(0.0, -dense.lowest("newton")) + 0.05
    step = newton(chain, dense.objective, kappa, method="cg", regularizer=dense.ridge, tolerance=1e-12)
    assert_solves(step, dense, kappa, "newton")
    assert step.iterations > 0
    assert step.calls == 1 + 2 * (step.iterations + 1)


@pytest.mark.parametrize("name", ["mlp", "wide", "residual", "attention", "group_norm"])
def test_an_infeasible_kappa_is_found_exactly(name: str) -> None:
    chain, dense = case(name, "square")
    edge = -dense.lowest("newton")
    assert edge > 0
    assert dynamic(chain, dense, edge * (1 + 1e-7), "newton").solved
    below = dynamic(chain, dense, edge * (1 - 1e-7), "newton")
    assert not below.solved
    assert below.unbounded_at in range(1, len(chain) + 1)
    assert f"unbounded below at computation {below.unbounded_at}" in below.status
    assert not flat(below.direction).any()
    assert below.model_decrease == 0.0


@pytest.mark.parametrize("method", ["dynamic", "cg"])
def test_kappa_is_doubled_until_feasible(method: Any) -> None:
    chain, dense = case("mlp", "square")
    edge = -dense.lowest("newton")
    step = newton(chain, dense.objective, edge * 0.3, method=method)
    assert step.doubled == 2
    assert_solves(step, dense, edge * 0.3 * 4, "newton")
    assert "doubled 2 times" in step.status
    assert (step.unbounded_at is not None) == (method == "dynamic")
    refused = newton(chain, dense.objective, edge * 0.3, method=method, double=False)
    assert not refused.solved
    assert "unbounded below" in refused.status
    assert not flat(refused.direction).any()


def test_the_place_is_where_the_cost_to_go_is_unbounded() -> None:
    """The last computations are eliminated by minimising over their parameters: their block of ∇²F decides."""
    chain, dense = case("mlp", "square")
    sizes = [computation.parameter_size for computation in chain]
    starts = [sum(sizes[:t]) for t in range(len(sizes))]
    lowest = [float(torch.linalg.eigvalsh(dense.hessian[start:, start:])[0]) for start in starts]
    for kappa in (0.01, -0.5 * (lowest[0] + lowest[1]), -0.5 * (lowest[1] + lowest[2])):
        if kappa <= 0:
            continue
        failing = [t + 1 for t in range(len(sizes)) if lowest[t] + kappa <= 0]
        step = dynamic(chain, dense, kappa, "newton")
        assert step.unbounded_at == (max(failing) if failing else None)


def test_newton_on_a_quadratic_converges_in_one_step() -> None:
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    step = newton(Chain(model, x), Square(y), kappa=1e-12)
    with torch.no_grad():
        for path, value in model.named_parameters():
            value.add_(step.direction[path])
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(9, 1).double()], dim=1), y).solution
    assert torch.allclose(torch.cat([model.weight.T, model.bias[None]]).detach(), solution, atol=1e-9)


def test_a_ridge_may_have_one_weight_per_block() -> None:
    for name, weights in (("attention", {"query": 0.7, "key": 0.1}), ("wide", {"0": 0.5, "4": 0.0})):
        chain, plain = case(name, "square")
        dense = DenseModel(plain.model, plain.x, plain.objective, Ridge(weights))
        kappa = max(0.0, -dense.lowest("newton")) + 0.05
        assert_solves(dynamic(chain, dense, kappa, "newton"), dense, kappa, "newton")


def test_the_point_may_be_given() -> None:
    chain, dense = case("frozen", "cross entropy")
    moved = {path: value.detach() + 0.1 for path, value in dense.model.named_parameters()}
    model, x = make("frozen")
    with torch.no_grad():
        for path, value in model.named_parameters():
            value.copy_(moved[path])
    expected = DenseModel(model, x, dense.objective)
    kappa = max(0.0, -expected.lowest("newton")) + 0.1
    for method in ("dynamic", "cg"):
        step = newton(chain, dense.objective, kappa, method=method, params=moved, tolerance=1e-12)  # type: ignore[arg-type]
        assert_solves(step, expected, kappa, "newton")


def test_states_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratic, "LARGEST", 40**2)
    chain, dense = case("mlp", "square")
    with pytest.raises(OracleError, match=r"42 × 42 for .* method='cg'"):
        newton(chain, dense.objective, kappa=1.0, method="dynamic")
    assert "conjugate" in newton(chain, dense.objective, kappa=1.0).status  # and is not chosen


def test_without_parameters_there_is_nothing_to_do() -> None:
    x = torch.randn(4, 3)
    for method in ("dynamic", "cg"):
        step = newton(Chain(nn.Tanh(), x), Square(torch.zeros(4, 3)), kappa=1.0, method=method)  # type: ignore[arg-type]
        assert step.solved
        assert step.direction == {}


def test_single_precision_stays() -> None:
    model, x = make("residual")
    model, x = model.float(), x.float()
    for method in ("dynamic", "cg"):
        step = newton(Chain(model, x), CrossEntropy(torch.arange(len(x)) % CLASSES), kappa=1.0, method=method)  # type: ignore[arg-type]
        dense = DenseModel(model.double(), x.double(), CrossEntropy(torch.arange(len(x)) % CLASSES))
        assert all(v.dtype == torch.float32 and not v.requires_grad for v in step.direction.values())
        expected = dense.step(step.kappa, "newton")
        assert float((flat(step.direction) - expected).norm()) <= 1e-4 * float(expected.norm())
        model = model.float()


def test_what_does_not_fit_is_refused() -> None:
    chain, dense = case("mlp", "square")
    with pytest.raises(OracleError, match="'dynamic' or 'cg'"):
        newton(chain, dense.objective, kappa=1.0, method="lu")  # type: ignore[arg-type]
    with pytest.raises(OracleError, match="kappa is a positive number"):
        newton(chain, dense.objective, kappa=0.0)
    with pytest.raises(OracleError, match="one of gradient, gauss_newton, newton"):
        dynamic(chain, dense, 1.0, "hessian")
    with pytest.raises(OracleError, match="tolerance is between 0 and 1"):
        newton(chain, dense.objective, kappa=1.0, method="cg", tolerance=2.0)


@pytest.mark.parametrize("method", ["dynamic", "cg"])
def test_bad_input_is_refused_and_nothing_is_touched(method: Any) -> None:
    model, x = make("mlp")
    before = copy.deepcopy(model.state_dict())
    chain, objective = Chain(model, x), CrossEntropy(torch.arange(7) % CLASSES)
    for kappa in (0.0, -1.0, float("nan"), None):
        with pytest.raises(OracleError, match="kappa is a positive number"):
            newton(chain, objective, kappa, method=method)  # type: ignore[arg-type]
    spoiled = x.clone()
    later = Chain(model, spoiled)
    spoiled[0, 0] = float("nan")
    with pytest.raises(OracleError, match="input has entries that are not finite"):
        newton(later, objective, 1.0, method=method)
    half = nn.Linear(4, 3).bfloat16()
    with pytest.raises(OracleError, match="single or double precision"):
        newton(Chain(half, x.bfloat16()), objective, 1.0, method=method)
    with pytest.raises(OracleError, match="CrossEntropy compares"):
        newton(chain, CrossEntropy(torch.zeros(4).long()), 1.0, method=method)
    wrong = {path: value.new_zeros(1) for path, value in chain.parameters.items()}
    with pytest.raises(OracleError, match="has shape"):
        newton(chain, objective, 1.0, method=method, params=wrong)
    with pytest.raises(OracleError, match="such as surefoot"):
        newton(chain, nn.MSELoss(), 1.0, method=method)  # type: ignore[arg-type]
    with pytest.raises(OracleError, match="Ridge"):
        newton(chain, objective, 1.0, method=method, regularizer=0.1)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("method", ["dynamic", "cg"])
def test_a_parameter_no_output_depends_on(method: Any) -> None:
    model, x = make("spare")
    chain, objective = Chain(model, x), CrossEntropy(torch.arange(5) % CLASSES)
    plain = newton(chain, objective, 1.0, method=method)
    assert not plain.direction["unused.weight"].any()
    ridge = newton(chain, objective, 1.0, method=method, regularizer=Ridge(0.4), tolerance=1e-12)
    expected = -0.4 / 1.4 * model.get_parameter("unused.weight").detach()
    assert torch.allclose(ridge.direction["unused.weight"], expected, rtol=1e-9)


def test_a_hidden_saddle_is_met_from_a_random_start() -> None:
    """The gradient is zero in the direction of negative curvature, so conjugate gradients alone never see it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for layer in model[:2]:
            layer.weight.zero_()  # a saddle of the product of the two
        model[2].weight.fill_(1.0)
    x, y = torch.randn(9, 1, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64) + 3
    y = y + 2 * x
    judge = DenseModel(model, x, Square(y))
    lowest = judge.lowest("newton")
    assert lowest < -0.1
    chain = Chain(model, x)
    refused = newton(chain, Square(y), kappa=-0.4 * lowest, method="cg", double=False)
    assert not refused.solved
    step = newton(chain, Square(y), kappa=-0.4 * lowest, method="cg")
    assert step.doubled > 0
    assert step.kappa > -lowest
    assert "confidence of 99%" in step.status
    assert judge.error(step, "newton") < 1e-8


def test_normalised_weights_have_the_second_derivative_of_their_formula() -> None:
    """The kernel's own is wrong in some releases of PyTorch; the judge writes the division out."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    parts = [value.detach() for value in layer.parameters()]

    def value(u: torch.Tensor) -> torch.Tensor:
        sizes = [part.numel() for part in parts]
        given = {n: p.view_as(q) for n, p, q in zip(names, u.split(sizes), parts, strict=True)}
        v = given["parametrizations.weight.original1"]
        weight = given["parametrizations.weight.original0"] * v / v.square().sum(1, keepdim=True).sqrt()
        return (x @ weight.T + given["bias"] - y).square().sum() / (2 * len(x))

    u = torch.cat([part.flatten() for part in parts])
    hessian = torch.autograd.functional.hessian(value, u)
    slope = torch.autograd.functional.jacobian(value, u)
    expected = -torch.linalg.solve(hessian + 5 * torch.eye(len(u), dtype=torch.float64), slope)
    for method in ("cg", "dynamic"):
        step = newton(Chain(layer, x), Square(y), kappa=5.0, method=method)  # type: ignore[arg-type]
        found = torch.cat([step.direction[name].flatten() for name in names])
        assert float((found - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.parametrize("model", ["gauss_newton", "newton"])
@pytest.mark.parametrize("kappa", [0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("size", [1.0, 60.0, 300.0])
def test_a_saturated_soft_max_in_single_precision(size: float, kappa: float, model: str) -> None:
    """The residual is that of the rounded step, which is large where the model is ill-conditioned."""
    network, x, y = saturated(size)
    oracle = gauss_newton if model == "gauss_newton" else newton
    step = oracle(Chain(network, x), CrossEntropy(y), kappa, method="dynamic")
    judge = DenseModel(copy.deepcopy(network).double(), x.double(), CrossEntropy(y))
    assert judge.error(step, model) < 1e-6
    assert step.residual == pytest.approx(judge.residual(step, model), rel=1e-2, abs=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(4, 0, 3), (4, 2, 0, 3), (4, 0, 2, 3)])
@pytest.mark.parametrize("ridge", [None, Ridge(0.3)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_entries(widths: tuple[int, ...], bias: bool, ridge: Ridge | None) -> None:
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b, bias=bias), nn.Tanh())]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    judge = DenseModel(model, x, Square(y), ridge)
    for method in ("dynamic", "cg"):
        step = newton(Chain(model, x), Square(y), 5.0, method=method, regularizer=ridge)  # type: ignore[arg-type]
        assert step.solved
        assert {path: v.shape for path, v in step.direction.items()} == {
            path: u.shape for path, u in model.named_parameters()
        }
        v = judge.direction(step)
        assert float((judge.gradient + judge.hessian @ v + step.kappa * v).norm()) < 1e-9
