"""Properties of every optimizer of steps: proved in exact arithmetic, resumed, about the live model, in pieces."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import flint
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from judges.exact import run, stored, value_of
from surefoot.errors import SurefootError
from surefoot.optim import CertifiedDescent, GaussNewton, Newton, OptimizerError, StepRecord


def data(count: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def network(activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)).double()


def pooled() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), *layers).double()


def normalised(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(2)
    inner = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), *inner, nn.Linear(6, 3)).double()


def attending() -> nn.Module:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, 3)).double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": network, "relu": lambda: network(nn.ReLU), "gelu": lambda: network(nn.GELU), "pooled": pooled,
    "normalised": normalised, "attending": attending,
}  # fmt: skip


def against_the_gradient(weights: dict[str, Tensor], gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: -slope for name, slope in gradient.items()}


OPTIMIZERS: dict[str, Callable[[nn.Module], CertifiedDescent]] = {
    "lbfgs": lambda m: CertifiedDescent(m, sf.CrossEntropy()),
    "gradient": lambda m: CertifiedDescent(m, sf.CrossEntropy(), direction="gradient"),
    "Adam": lambda m: CertifiedDescent(m, sf.CrossEntropy(), direction=torch.optim.Adam),
    "function": lambda m: CertifiedDescent(m, sf.CrossEntropy(), direction=against_the_gradient),
    "segment": lambda m: CertifiedDescent(m, sf.CrossEntropy(), proof="segment"),
    "GaussNewton": lambda m: GaussNewton(m, sf.CrossEntropy(), proof="evaluation"),
    "Newton": lambda m: Newton(m, sf.CrossEntropy(), proof="evaluation"),
}
MEASURED = {"GaussNewton": GaussNewton, "Newton": Newton}


@pytest.mark.parametrize("name", MODELS)
def test_every_step_descends(name: str) -> None:
    model, (x, y) = MODELS[name](), data()
    optimizer = CertifiedDescent(model, nn.CrossEntropyLoss())
    losses = [optimizer.step(x, y) for _ in range(25)]
    assert all(after < before for before, after in pairwise(losses))
    assert losses[-1] < 0.3 * losses[0]
    assert all(0 < r.proved_decrease <= r.decrease * (1 + 1e-12) for r in optimizer.history)
    assert [r.decrease for r in optimizer.history[:-1]] == pytest.approx([a - b for a, b in pairwise(losses)])
    found = optimizer.stationarity()
    assert 0 < found.smallest <= found.bound
    assert found.steps == 25
    assert "Every one of the 25 steps" in optimizer.guarantee


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_proved_holds_in_exact_arithmetic(name: str, dtype: torch.dtype) -> None:
    model, (x, y) = network().to(dtype), data(6, dtype)
    optimizer, objective, taken = OPTIMIZERS[name](model), sf.CrossEntropy(y), 0
    for _ in range(6):
        before = {parameter: stored(parameter) for parameter in model.parameters()}
        optimizer.step(x, y)
        after = {parameter: stored(parameter) for parameter in model.parameters()}
        with flint.ctx.workprec(200):
            high, low = (value_of(run(lambda: objective(model(x)), model, p)[0]) for p in (before, after))
            assert high - low >= optimizer.last.proved_decrease
        taken += optimizer.last.step_size > 0
    assert taken >= 5


@pytest.mark.parametrize("kind", MEASURED)
def test_measured_steps_descend_and_say_that_they_are_measured(kind: str) -> None:
    model, (x, y) = network(), data()
    optimizer = MEASURED[kind](model, sf.CrossEntropy())
    losses = [optimizer.step(x, y) for _ in range(12)]
    assert all(after < before for before, after in pairwise(losses))
    assert losses[-1] < 0.05
    assert not any(record.proved for record in optimizer.history)
    assert optimizer.stationarity().bound is None
    assert "0 of 12 steps are proved" in optimizer.guarantee


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_and_a_copy_take_the_same_steps(name: str) -> None:
    model, (x, y) = network(), data()
    optimizer = OPTIMIZERS[name](model)
    for _ in range(5):
        optimizer.step(x, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = OPTIMIZERS[name](network(seed=5))
    resumed.model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    others = [resumed, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert all(other.history == optimizer.history for other in others)
    # bounds along segments rest on norms that are computed anew
    close = 0.05 if name == "segment" else 0.0 if name != "Newton" else 1e-9
    losses = [optimizer.step(x, y) for _ in range(4)]
    for other in others:
        assert [other.step(x, y) for _ in range(4)] == pytest.approx(losses, rel=close, abs=0)
        assert other.last.run == 1  # what is proved of a run begins anew
        assert other.model is not model
    with pytest.raises(ValueError, match="state of"):
        OPTIMIZERS[name](model).load_state_dict({**saved["optimizer"], "surefoot": {"kind": "another"}})
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


@pytest.mark.parametrize("name", ["lbfgs", "gradient", "Adam", "GaussNewton", "Newton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_data_in_pieces_are_one_objective(name: str, dtype: torch.dtype) -> None:
    x, y = data(50, dtype)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    whole, pieces = (OPTIMIZERS[name](network(nn.Tanh).to(dtype)) for _ in range(2))
    close = 0.1 if name in MEASURED else 1e-9 if dtype is torch.float64 else 1e-4  # of solves that are inexact
    for _ in range(6):
        assert whole.step(x, y) == pytest.approx(pieces.step(loader), rel=close)
    assert all(record.proved_decrease > 0 for record in pieces.history)
    assert len({record.run for record in pieces.history}) == 1


class Carrying(nn.Module):
    """A function of its weights that depends on all that a model may carry besides them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.register_buffer("wide", torch.ones(8, 1000, dtype=torch.float64) / 1000)
        self.register_buffer("mask", torch.tensor([True, False, True, True, True, False, True, True]))
        self.register_buffer("sparse", torch.eye(8, dtype=torch.float64).to_sparse())
        self.scale, self.sign = 1.0, torch.ones(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.scale * self.first(x)) * self.wide.sum(1) * self.mask
        y = self.last(torch.sparse.mm(self.sparse, h.T).T) * self.sign
        return y if self.training else -y


def hook(model: Carrying) -> None:
    model.last.register_forward_hook(lambda module, args, output: 2 * output)


def weights(model: Carrying) -> None:
    with torch.no_grad():
        model.first.weight.mul_(0.5)


CHANGES: dict[str, Callable[[Carrying], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 10.0),
    "mode": lambda m: m.eval(),
    "tensor": lambda m: setattr(m, "sign", -m.sign),
    "tensor in place": lambda m: m.sign.mul_(3.0),
    "buffer": lambda m: m.wide.data.mul_(5.0),  # which torch does not count
    "replaced buffer": lambda m: setattr(m, "wide", 5 * m.wide),
    "mask": lambda m: m.mask.fill_(True),
    "sparse": lambda m: m.sparse.values().mul_(2.0),
    "frozen": lambda m: m.last.requires_grad_(False),
    "hook": hook,
    "weights": weights,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["lbfgs", "Adam", "GaussNewton"])
def test_the_next_step_is_about_the_model_as_it_is(name: str, change: str) -> None:
    model, (x, y) = Carrying(), data()
    optimizer = OPTIMIZERS[name](model)

    def step() -> None:
        before = float(sf.CrossEntropy(y)(model(x)).detach())
        assert optimizer.step(x, y) == pytest.approx(before, rel=1e-9)
        after = float(sf.CrossEntropy(y)(model(x)).detach())
        assert before - after >= optimizer.last.proved_decrease - 1e-13 > 0

    step(), step()
    CHANGES[change](model)
    step(), step()
    assert [record.run for record in optimizer.history] == [0, 0, 1, 1]
    assert "changed since the last step" in optimizer.history[2].note
    assert "changed" not in optimizer.history[3].note
    assert optimizer.stationarity().steps == 2
    assert "changed last" in optimizer.stationarity().why


def test_data_that_change_are_noticed_and_copies_of_them_are_the_same() -> None:
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    changes = [lambda: None, lambda: x.data.mul_(2.0), lambda: y.numpy().__setitem__(0, 1 - int(y[0]) % 2)]
    runs = []
    for change in changes:
        change()
        for given in ((x, y), (x.clone(), y.clone())):
            before = float(sf.CrossEntropy(y)(model(x)).detach())
            assert optimizer.step(*given) == pytest.approx(before, rel=1e-9)
        runs.append(optimizer.last.run)
    assert runs == [0, 1, 2]
    batches = [(x[:12], y[:12]), (x[12:], y[12:])]
    optimizer.step(batches)
    optimizer.step(batches)
    assert optimizer.last.run == 3
    batches[0][0].zero_()
    with pytest.raises(OptimizerError, match="other numbers than in the first pass"):
        optimizer.step(batches)


def test_weights_that_are_put_back_bit_by_bit_are_no_change() -> None:
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    for _ in range(3):
        optimizer.step(x, y)
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model[0].weight.zero_()
        model.eval().train().load_state_dict(before)
    assert {record.run for record in optimizer.history} == {0}


def test_the_end_is_said_and_nothing_moves_any_more() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(20, 3).double()
    y = torch.randn(20, 1).double()
    optimizer = CertifiedDescent(model, sf.Square())
    while not optimizer.done:
        optimizer.step(x, y)
        assert len(optimizer.history) < 100
    assert "round-off" in optimizer.done
    before = copy.deepcopy(model.state_dict())
    optimizer.step(x, y)
    assert optimizer.last.step_size == optimizer.last.proved_decrease == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    zero = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(zero.weight)
    optimizer = CertifiedDescent(zero, sf.Square())
    optimizer.step(x, 0 * y)
    assert optimizer.done == "the gradient is zero"
    assert optimizer.stationarity().bound == 0


@pytest.mark.parametrize("proof", ["evaluation", "segment"])
def test_single_precision_ends_with_a_sentence(proof: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(24, 4)
    optimizer = CertifiedDescent(model, sf.Square(), proof=proof)
    for _ in range(200):
        optimizer.step(x, x.sum(1, keepdim=True))
        if optimizer.done:
            break
    assert "below the resolution of float32" in optimizer.done
    assert optimizer.last.loss < 1e-10


def test_kinks_are_refused_by_promises_ahead_and_nothing_is_lost() -> None:
    x, y = data()
    model = network(nn.ReLU)
    nn.init.zeros_(model[0].bias)  # with inputs of zero, every unit is at its kink
    before = copy.deepcopy(model.state_dict())
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    with pytest.raises(SurefootError, match=r"surefoot\.smooth"):
        optimizer.step(x * 0, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.history == []


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_move_once_per_step_as_by_a_pass_of_the_model(momentum: float | None) -> None:
    model, (x, y) = normalised(momentum), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    for _ in range(3):
        twin = copy.deepcopy(model)
        twin(x)
        optimizer.step(x, y)
        for (name, value), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.allclose(value, expected, rtol=1e-12, atol=1e-15), name
    assert {record.run for record in optimizer.history} == {0}


def test_a_part_of_the_parameters() -> None:
    model, (x, y) = network(), data()
    first = model[0].weight.detach().clone()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), params=model[2].parameters())
    losses = [optimizer.step(x, y) for _ in range(4)]
    assert torch.equal(model[0].weight, first)
    with torch.no_grad():
        model[0].weight.mul_(0.5)  # a constant of the function
    optimizer.step(x, y)
    assert optimizer.last.run == 1
    optimizer.add_param_group({"params": model[0].parameters()})
    losses += [optimizer.step(x, y) for _ in range(3)]
    assert not torch.equal(model[0].weight, 0.5 * first)
    assert losses[-1] < losses[0]
    assert optimizer.last.run == 2
    model = network()
    bias = model[0].bias.detach().clone()
    second = GaussNewton(model, sf.CrossEntropy(), params=model[2].parameters())
    assert second.step(x, y) > second.step(x, y)
    assert torch.equal(model[0].bias, bias)
    assert model[0].bias.requires_grad


@pytest.mark.parametrize("kind", [CertifiedDescent, GaussNewton, Newton])
def test_a_ridge_is_part_of_what_is_lowered(kind: type[CertifiedDescent]) -> None:
    model, (x, y) = network(), data()
    optimizer = kind(model, sf.CrossEntropy(), weight_decay=0.1)
    for _ in range(60):
        loss = optimizer.step(x, y)
        if optimizer.last.gradient_norm < 1e-5:
            break
    ridge = 0.05 * sum(float(value.detach().square().sum()) for value in model.parameters())
    assert loss == pytest.approx(float(sf.CrossEntropy(y)(model(x)).detach()) + ridge, rel=1e-5)
    assert optimizer.last.gradient_norm < (1e-3 if kind is GaussNewton else 1e-5)


def test_another_optimizer_goes_on_only_with_what_was_taken() -> None:
    model, (x, y) = network(), data()
    adam = torch.optim.Adam(model.parameters(), lr=1e3)  # its step ascends: shortened, or not taken
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), direction=adam)
    losses = [optimizer.step(x, y) for _ in range(5)]
    assert all(after < before for before, after in pairwise(losses))
    own = sum("gradient" not in record.note for record in optimizer.history)
    assert {int(state["step"]) for state in adam.state.values()} <= {own}
    assert adam.param_groups[0]["lr"] == 1e3


def test_lbfgs_needs_far_fewer_steps_than_the_gradient() -> None:
    x, y = data(60)
    final = {}
    for direction in ("lbfgs", "gradient"):
        optimizer = CertifiedDescent(network(), sf.CrossEntropy(), direction=direction)
        final[direction] = [optimizer.step(x, y) for _ in range(60)][-1]
    assert final["lbfgs"] < 0.5 * final["gradient"]
    few = CertifiedDescent(network(), sf.CrossEntropy(), direction=sf.optim.lbfgs.LimitedMemory(pairs=3))
    assert [few.step(x, y) for _ in range(60)][-1] < final["gradient"]


def test_gauss_newton_damping() -> None:
    model, (x, y) = network(), data()
    fixed = GaussNewton(model, sf.CrossEntropy(), damping=0.5, adapt=False)
    fixed.step(x, y), fixed.step(x, y)
    assert fixed.direction.damping == 0.5
    affine = nn.Linear(4, 3).double()
    optimizer = GaussNewton(affine, sf.Square(), damping=1e-12, proof="evaluation")
    targets = torch.randn(24, 3, dtype=torch.float64)
    optimizer.step(x, targets)  # least squares: one step
    optimizer.step(x, targets)
    assert optimizer.history[1].gradient_norm < 1e-7 * optimizer.history[0].gradient_norm
    long = GaussNewton(network(), sf.CrossEntropy(), damping=1e-9)
    long.step(x, y)  # too long: shortened, and the damping grows
    assert long.direction.damping > 1e-9 or long.last.step_size == 1


def test_history_has_columns() -> None:
    model, (x, y), seen = network(), data(), []
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), progress=seen.append)
    optimizer.step(x, y), optimizer.step(x, y)
    assert seen == optimizer.history
    frame = optimizer.history.to_pandas()
    assert list(frame["loss"]) == [record.loss for record in optimizer.history]
    assert frame["proved"].all()
    records = sf.optim.History([StepRecord(1.0, 0.5, proved_decrease=0.125) for _ in range(4)])
    assert sf.optim.History.of(StepRecord, records.to_columns()) == records
    optimizer.history = records
    assert optimizer.stationarity().bound == pytest.approx(math.sqrt(1 / (4 * 0.125 / 0.25)))
    for record in optimizer.model.parameters():
        assert record.grad is not None


def test_hooks_of_torch_are_called() -> None:
    (x, y), calls = data(), []
    optimizer = CertifiedDescent(network(), sf.CrossEntropy())
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.register_step_post_hook(lambda owner, args, options: calls.append(owner))
    optimizer.step(x, y)
    assert calls == [optimizer]


X, Y = data()
KINKS = sf.objectives.ElasticNet(0.1, 0.1)
BAD = X.clone()
BAD[0, 0] = torch.nan


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sqrt()[:, None]


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "parameters": (lambda: CertifiedDescent(network().parameters(), sf.CrossEntropy()), TypeError, "the model"),
    "no loss": (lambda: CertifiedDescent(network()), TypeError, "CrossEntropy"),
    "bound": (lambda: CertifiedDescent(network(), sf.CrossEntropy(Y)), ValueError, "without targets"),
    "proof": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), proof="ball"), ValueError, "segment"),
    "direction": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), direction="up"), ValueError, "lbfgs"),
    "both": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), weight_decay=1.0, regularizer=sf.Ridge(1.0)),
             ValueError, "not both"),
    "kinks": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), regularizer=KINKS),
              ValueError, "kinks"),
    "frozen": (lambda: CertifiedDescent(network().requires_grad_(False), sf.CrossEntropy()), ValueError,
               "requires_grad_"),
    "strangers": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), params=network().parameters()),
                  ValueError, "not parameters of the model"),
    "half": (lambda: CertifiedDescent(m := network(), sf.CrossEntropy(),
             direction=torch.optim.SGD(m[2].parameters(), lr=0.1)), ValueError, "does not hold '0.weight'"),
    "shape": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), direction=lambda w, g: {}).step(X, Y),
              ValueError, "right shape"),
    "no batch": (lambda: CertifiedDescent(network(), sf.CrossEntropy()).step(), OptimizerError, r"step\(x, y\)"),
    "no targets": (lambda: CertifiedDescent(network(), sf.CrossEntropy()).step(X), OptimizerError, "targets"),
    "twice": (lambda: CertifiedDescent(network(), sf.CrossEntropy()).step([(X, Y)], Y), OptimizerError, "brings"),
    "pairs": (lambda: CertifiedDescent(network(), sf.CrossEntropy()).step([(X, Y, Y)]), OptimizerError, "pairs"),
    "segment": (lambda: CertifiedDescent(network(), sf.CrossEntropy(), proof="segment").step([(X, Y)]),
                OptimizerError, "one batch"),
    "nan": (lambda: CertifiedDescent(network(), sf.CrossEntropy()).step(BAD, Y), SurefootError, "NaN"),
    "slope": (lambda: CertifiedDescent(Root(), sf.Square()).step(X[:, :2].abs(), X[:, :1]), OptimizerError,
              "'weight'"),
    "dropout": (lambda: CertifiedDescent(nn.Sequential(network(), nn.Dropout()), sf.CrossEntropy()).step(X, Y),
                SurefootError, "random"),
    "lazy": (lambda: CertifiedDescent(nn.LazyLinear(3).double(), sf.CrossEntropy()).step(X, Y), SurefootError,
             "initialised"),
    "damping": (lambda: GaussNewton(network(), sf.CrossEntropy(), damping=0.0), ValueError, "positive"),
    "ridge": (lambda: GaussNewton(network(), sf.CrossEntropy(), regularizer=sf.objectives.PseudoHuber(1.0)),
              ValueError, "Ridge"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what: str) -> None:
    call, kind, word = REFUSALS[what]
    with pytest.raises(kind, match=word):
        call()
