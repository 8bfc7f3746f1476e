"""Gauss-Newton and Newton as optimizers: they descend, keep promises, resume, and leave the rest alone."""

from __future__ import annotations

import copy
import io
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.objectives import CrossEntropy, Square
from surefoot.optim import GaussNewton, Newton, OptimizerError
from surefoot.oracles import OracleError
from surefoot.oracles.search import armijo

F64 = torch.float64
X = torch.randn(24, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def network(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


ADAPTED: list[tuple[type[Any], dict[str, Any]]] = [
    (GaussNewton, {}),
    (GaussNewton, {"method": "dual"}),
    (GaussNewton, {"method": "dynamic"}),
    (GaussNewton, {"line_search": "armijo", "kappa": 1e-3}),
    (GaussNewton, {"damping": 1e-3, "line_search": "armijo"}),
    (Newton, {}),
    (Newton, {"method": "dynamic"}),
]


def test_losses_fall() -> None:
    for kind, options in ADAPTED:
        model = network()
        optimizer = kind(model, CrossEntropy(), **options)
        losses = [optimizer.step(X, Y) for _ in range(10)]
        losses.append(optimizer.value(X, Y))
        assert all(after < before for before, after in pairwise(losses)), (
            kind,
            options,
            losses,
        )
        assert losses[-1] < 0.5 * losses[0], (kind, options, losses)
        assert len(optimizer.history) == 10
        assert all(record.promised_decrease is None for record in optimizer.history)


def test_methods_take_the_same_steps() -> None:
    ends = []
    for method in ("dual", "dual_gram", "dynamic"):
        model = network()
        optimizer = GaussNewton(model, CrossEntropy(), method=method)  # type: ignore[arg-type]
        for _ in range(4):
            optimizer.step(X, Y)
        ends.append(torch.cat([value.detach().reshape(-1) for value in model.parameters()]))
    assert torch.allclose(ends[0], ends[1], rtol=1e-6)
    assert torch.allclose(ends[0], ends[2], rtol=1e-6)


def test_a_fixed_damping_takes_the_step_of_the_oracle() -> None:
    model = network()
    expected = sf.oracles.gauss_newton(sf.Chain(model, X), CrossEntropy(Y), kappa=5.0)
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = GaussNewton(model, CrossEntropy(), damping=5.0)
    optimizer.step(X, Y)
    for name, value in model.named_parameters():
        assert torch.allclose(value, before[name] + expected.direction[name], rtol=1e-10)
    assert optimizer.history[0].step_size == pytest.approx(0.2)


@pytest.mark.parametrize("kind", [GaussNewton, Newton])
@pytest.mark.parametrize("objective", ["square", "cross-entropy"])
def test_certified_steps_keep_their_promise(kind: type[Any], objective: str) -> None:
    model = network()
    target = torch.randn(24, 3, dtype=F64, generator=torch.Generator().manual_seed(5))
    loss, y = (Square(), target) if objective == "square" else (CrossEntropy(), Y)
    optimizer = kind(model, loss, damping="certified")
    for _ in range(5):
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        before = optimizer.step(X, y)
        record = optimizer.history[-1]
        decrease = before - optimizer.value(X, y)
        moved = math.sqrt(sum(float((v.detach() - start[n]).square().sum()) for n, v in model.named_parameters()))
        assert record.promised_decrease > 0
        assert decrease >= record.promised_decrease * (1 - 1e-9)
        assert moved <= record.radius
        certificate = sf.certify(_at(model, start), X, objective=type(loss)(y), domain=sf.Ball(record.radius))
        least = certificate.damping if kind is GaussNewton else 2 * float(certificate.smoothness)
        assert optimizer.kappa >= least * (1 - 1e-12)
    bound = optimizer.stationarity()
    assert bound.bound is not None
    assert bound.smallest <= bound.bound
    assert "promised" in optimizer.guarantee


def _at(model: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(parameters)
    return other


def test_a_network_with_kinks_has_no_certified_step() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sf.errors.SurefootError, match="smooth"):
        GaussNewton(model, CrossEntropy(), damping="certified").step(X, Y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GaussNewton, {}),
        (GaussNewton, {"method": "dual"}),
        (GaussNewton, {"damping": "certified"}),
        (Newton, {"method": "dynamic"}),
    ],
)
def test_a_run_can_be_resumed(kind: type[Any], options: dict[str, Any]) -> None:
    model = network()
    optimizer = kind(model, CrossEntropy(), **options)
    for _ in range(3):
        optimizer.step(X, Y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    rest = [optimizer.step(X, Y) for _ in range(3)]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network()
    other.load_state_dict(saved["model"])
    resumed = kind(other, CrossEntropy(), **options)
    resumed.load_state_dict(saved["optimizer"])
    assert [resumed.step(X, Y) for _ in range(3)] == rest
    assert [r.loss for r in resumed.history] == [r.loss for r in optimizer.history]
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_frozen_parameters_stay() -> None:
    for kind in (GaussNewton, Newton):
        model = network()
        model[0].weight.requires_grad_(False)
        before = model[0].weight.detach().clone()
        optimizer = kind(model, CrossEntropy())
        losses = [optimizer.step(X, Y) for _ in range(4)]
        assert losses[-1] < losses[0]
        assert torch.equal(model[0].weight, before)
        model[0].weight.requires_grad_(True)  # the optimizer does not hold it
        optimizer.step(X, Y)
        assert torch.equal(model[0].weight, before)
        assert model[0].weight.requires_grad
        optimizer.add_param_group({"params": [model[0].weight]})
        optimizer.step(X, Y)
        assert not torch.equal(model[0].weight, before)


def test_mini_batches_and_closures() -> None:
    for method in ("dual", "dual_gram"):
        model = network(torch.float32)
        optimizer = GaussNewton(model, CrossEntropy(), method=method)  # type: ignore[arg-type]
        for epoch in range(6):
            for part in range(2):
                x, y = X[part::2].float(), Y[part::2]
                before = optimizer.step(x, y)
                assert optimizer.value(x, y) < before, (method, epoch)
        assert len({record.data for record in optimizer.history}) == 2

    def closure() -> tuple[Tensor, Tensor]:
        outputs = model(X.float())
        return outputs, nn.functional.cross_entropy(outputs, Y)

    loss = optimizer.step(X.float(), Y, closure)
    assert loss == pytest.approx(optimizer.history[-1].loss)
    wrong = lambda: (model(X.float()), torch.tensor(7.0))  # noqa: E731
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OptimizerError, match="the closure returns the loss 7"):
        optimizer.step(X.float(), Y, wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_at_a_minimum_no_step_is_taken() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(20, 3, dtype=F64)
    y = torch.randn(20, 2, dtype=F64)
    optimizer = GaussNewton(model, Square(), kappa=1e-6)
    for _ in range(12):
        optimizer.step(x, y)
    design = torch.cat([x, torch.ones(20, 1, dtype=F64)], dim=1)
    best = torch.linalg.lstsq(design, y).solution.T
    found = torch.cat([model.weight, model.bias[:, None]], dim=1)
    assert torch.allclose(found, best, rtol=1e-7, atol=1e-8)
    assert optimizer.history[-1].note.startswith("no step: descent cannot be told from round-off")
    assert optimizer.history[-1].step_size == 0


def test_bad_data_leave_everything_as_it_was() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = GaussNewton(model, CrossEntropy())
    spoiled = X.clone()
    spoiled[0, 0] = float("nan")
    with pytest.raises(OptimizerError, match="the loss is nan"):
        optimizer.step(spoiled, Y)
    half = nn.Linear(4, 3).bfloat16()
    with pytest.raises(OptimizerError, match="single or double precision"):
        GaussNewton(half, CrossEntropy()).step(X.bfloat16(), Y)
    assert optimizer.history == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_options_are_checked() -> None:
    model = network()
    for options, message in [
        ({"damping": "strong"}, "damping is"),
        ({"damping": 0.0}, "damping is"),
        ({"damping": True}, "damping is"),
        ({"kappa": -1.0}, "kappa is"),
        ({"line_search": "wolfe"}, "line_search is"),
        ({"damping": "certified", "line_search": "armijo"}, "needs no line search"),
        ({"method": "exact"}, "method is"),
    ]:
        for kind in (GaussNewton, Newton):
            with pytest.raises(ValueError, match=message):
                kind(model, CrossEntropy(), **options)  # type: ignore[arg-type]


def test_armijo() -> None:
    assert armijo(lambda t: -t, 0.0, -1.0) == (1.0, -1.0)
    assert armijo(lambda t: math.nan if t > 0.3 else -t, 0.0, -1.0) == (0.25, -0.25)
    assert armijo(lambda t: t, 0.0, -1.0) is None
    with pytest.raises(OracleError, match="direction of descent"):
        armijo(lambda t: -t, 0.0, 0.0)


def test_passes_at_the_new_weights_serve_the_next_step_on_the_same_data() -> None:
    """They are kept from the second step on, and are those of weights and data as these are."""
    x, y = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)), torch.arange(2000) % 3
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    other = copy.deepcopy(model)
    kept, fresh = GaussNewton(model, CrossEntropy()), GaussNewton(other, CrossEntropy())
    for number in range(5):
        assert kept.step(x, y) == pytest.approx(fresh.step(x.clone(), y), rel=1e-5)
        assert (kept._ahead is not None) == (number >= 1)
        assert fresh._ahead is None
    with torch.no_grad():
        model[0].weight.mul_(1.1)
        other.load_state_dict(model.state_dict())
    assert kept.step(x, y) == pytest.approx(CrossEntropy()(other(x), y).item(), rel=1e-5)
    other.load_state_dict(model.state_dict())
    x.mul_(0.9)
    assert kept.step(x, y) == pytest.approx(CrossEntropy()(other(x), y).item(), rel=1e-5)
    for _ in range(3):
        kept.step(x, y)
    other.load_state_dict(model.state_dict())
    x.numpy()[:] *= 0.8  # behind PyTorch's back
    assert kept.step(x, y) == pytest.approx(CrossEntropy()(other(x), y).item(), rel=1e-5)
    assert kept._ahead is not None
    assert copy.deepcopy(kept)._ahead is None
    other.load_state_dict(model.state_dict())
    classes = y.flip(0)
    assert kept.step(x, classes) == pytest.approx(CrossEntropy()(other(x), classes).item(), rel=1e-5)
