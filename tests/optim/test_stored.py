"""Promises are about the weights as they are stored: models in narrow types, judged in double precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.calculus.adjoint.gradient import proved_gradient, push
from surefoot.calculus.analysis import Analysis
from surefoot.operations.captured import capture
from surefoot.optim import CertifiedDescent, GaussNewton, GuaranteedOptimizer, Newton, ProjectedGradient
from surefoot.optim.stored import InDouble, promised, stored

TYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {
    "segment": lambda model: CertifiedDescent(model, sf.CrossEntropy(), proof="segment"),
    "gradient": lambda model: CertifiedDescent(
        model, sf.CrossEntropy(), direction="gradient", order=2, proof="segment"
    ),
    "ball": lambda model: CertifiedDescent(model, sf.CrossEntropy(), proof="ball"),
    "blocks": lambda model: CertifiedDescent(model, sf.CrossEntropy(), proof="blocks"),
    "projected": lambda model: ProjectedGradient(model, sf.CrossEntropy(), domain=sf.Ball(0.1)),
}


def network(dtype: torch.dtype, factor: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Softplus(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model.to(dtype)


def data(dtype: torch.dtype, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    x = size * torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    return x.to(dtype), torch.arange(20) % 3


def exact(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The function of the stored weights, in double precision."""
    return float(nn.functional.cross_entropy(copy.deepcopy(model).double()(x.double()), y).detach())


def assert_promises_kept(optimizer: GuaranteedOptimizer, x: torch.Tensor, y: torch.Tensor, steps: int) -> int:
    """Every promise is kept, and where none is made the weights stay; returns how many steps were taken."""
    taken = 0
    for _ in range(steps):
        before, weights = exact(optimizer.model, x, y), copy.deepcopy(optimizer.model.state_dict())
        optimizer.step(x, y)
        record, after = optimizer.history[-1], exact(optimizer.model, x, y)
        assert before - after >= record.promised_decrease * (1 - 1e-9) - 1e-15, record
        if record.promised_decrease > 0:
            taken += 1
        else:
            assert "resolution" in record.note
            assert all(torch.equal(value, weights[name]) for name, value in optimizer.model.state_dict().items())
    return taken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1e-3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_promises_are_kept_by_stored_weights(kind: str, dtype: torch.dtype, size: float) -> None:
    x, y = data(dtype, size)
    optimizer = KINDS[kind](network(dtype))
    taken = assert_promises_kept(optimizer, x, y, 15 if kind in ("segment", "gradient") else 4)
    assert taken or dtype != torch.float32


@pytest.mark.parametrize("kind", [GaussNewton, Newton])
@pytest.mark.parametrize("regularizer", [None, sf.objectives.Ridge(0.1)])
def test_certified_second_order_steps_in_single_precision(kind, regularizer) -> None:
    x, y = data(torch.float32)
    model = network(torch.float32)
    optimizer = kind(model, sf.CrossEntropy(), damping="certified", regularizer=regularizer)

    def ridge() -> float:
        return (
            0.0
            if regularizer is None
            else float(regularizer({n: p.detach().double() for n, p in model.named_parameters()}))
        )

    for _ in range(4):
        before = exact(model, x, y) + ridge()
        optimizer.step(x, y)
        record = optimizer.history[-1]
        assert record.promised_decrease > 0
        assert before - exact(model, x, y) - ridge() >= record.promised_decrease * (1 - 1e-9)


def test_steps_that_rounding_undoes_are_not_taken() -> None:
    """A gradient of 1e-7 at weights of order one: in bfloat16 no weight moves, or those that do move too far."""
    x, y = data(torch.bfloat16, 1e-6)
    model = network(torch.bfloat16)
    with torch.no_grad():
        model[4].bias.zero_()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    assert_promises_kept(optimizer, x, y, 20)


def test_the_stored_move_is_the_difference_of_stored_weights() -> None:
    weights = {"w": torch.tensor([1.0, 1e-3, 300.0]).bfloat16()}
    after, move = stored(weights, {"w": torch.tensor([1e-3, 1e-3, 1.5]).double()})
    assert after["w"].dtype == torch.bfloat16
    assert torch.equal(after["w"].double() - weights["w"].double(), move["w"])
    assert move["w"][0] == 0  # below the spacing at 1
    assert move["w"][2] == 2  # which is 2 at 300
    assert promised({"w": torch.ones(3).double()}, move, 1.0) == pytest.approx(
        -float(move["w"].sum()) - 0.5 * float(move["w"].square().sum())
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, at its first jvp
def test_the_objective_in_double_precision_against_automatic_differentiation() -> None:
    x, y = data(torch.float32)
    model, loss = network(torch.float32), sf.CrossEntropy(y)
    found = InDouble(model, x, loss, capture(model, x))
    wide = copy.deepcopy(model).double()
    names = [name for name, _ in wide.named_parameters()]

    def outputs(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(wide, dict(zip(names, values, strict=True)), (x.double(),))

    point = tuple(value.detach() for value in wide.parameters())
    assert found.value == pytest.approx(float(loss(outputs(*point))), rel=1e-14)
    slopes = torch.autograd.functional.jacobian(lambda *v: loss(outputs(*v)), point)
    for name, slope in zip(names, slopes, strict=True):
        assert torch.allclose(found.gradient[name], slope, rtol=1e-12, atol=1e-14)
    move = tuple(torch.randn_like(value) for value in point)
    _, along = torch.func.jvp(outputs, point, move)
    by_name = dict(zip(names, move, strict=True))
    for objective in (loss, sf.Square(torch.zeros_like(outputs(*point)))):
        curved = torch.autograd.functional.hvp(objective, outputs(*point), along)[1]
        proved = proved_gradient(Analysis.of(model, x, objective))
        bent, true = proved.bent(by_name), float((along * curved).sum())
        assert bent >= true * (1 - 1e-15)
    assert bent == pytest.approx(true, rel=1e-10)  # round-off included
    tangent = push(proved.result, {f"p_model_{n.replace('.', '_')}": m for n, m in by_name.items()},
                   proved.result.steps[-1].names["outputs"])  # fmt: skip
    assert tangent is not None
    assert float(tangent.value.square().sum()) / len(x) == pytest.approx(true, rel=1e-12)


def test_tied_and_unused_weights_in_double_precision() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight, self.spare = self.first.weight, nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model, (x, _) = Tied(), data(torch.float32)
    optimizer = CertifiedDescent(model, sf.Square(), proof="ball")
    before = float(sf.Square(0 * x)(model(x)).detach())
    optimizer.step(x, 0 * x)
    assert optimizer.history[-1].promised_decrease > 0
    assert before - float(sf.Square(0 * x)(model(x)).detach()) >= optimizer.history[-1].promised_decrease - 1e-5
