"""Epoch checks: what is accepted is proved to be lower, what is not is rolled back bit by bit."""

from __future__ import annotations

import copy
import io
import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import surefoot as sf
from surefoot.errors import SurefootError
from surefoot.optim import EpochRecord, OptimizerError


def data(count: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()


X, Y = data()


def network(*, normalised: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(16)] if normalised else []
    return nn.Sequential(nn.Linear(4, 16), *norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=16, **({"shuffle": True} | options))


def exact(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> float:
    """The mean loss in evaluation mode and double precision, by torch alone."""
    twin = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(twin(x.double()), y))


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for part in torch.arange(len(X)).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[part]), Y[part]).backward()
        optimizer.step()


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("given", ["pair", "loader", "list"])
def test_the_accepted_values_go_down_whatever_trains(given: str, normalised: bool) -> None:
    model = network(normalised=normalised)
    adam = torch.optim.Adam(model.parameters(), lr=0.3)  # far too long: some epochs go up
    data: Any = {"pair": (X, Y), "loader": loader(), "list": [(X[:50], Y[:50]), (X[50:], Y[50:])]}[given]
    keep = sf.KeepIfLower(model, adam, nn.CrossEntropyLoss(), data)
    for _ in range(20):
        state, before = copy.deepcopy((model.state_dict(), adam.state_dict())), keep.value
        epoch(model, adam)
        reached, rate = exact(model), adam.param_groups[0]["lr"]
        accepted, record = keep(), keep.history[-1]
        assert record.accepted == accepted == record.proved == (reached < before.value)
        assert abs(record.value - reached) <= record.error + 1e-12
        assert record.rate == rate
        assert model.training
        if accepted:
            assert exact(model) == reached
            assert keep.value.upper < before.lower
        else:
            assert all(torch.equal(value, state[0][name]) for name, value in model.state_dict().items())
            moments = zip(adam.state_dict()["state"].values(), state[1]["state"].values(), strict=True)
            assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in moments) or keep.history[-2].accepted
    assert 2 < sum(record.accepted for record in keep.history) < len(keep.history)
    assert adam.param_groups[0]["lr"] < 0.3


def test_rates_fall_with_what_is_rolled_back_and_rise_again() -> None:
    model = network().eval()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    keep = sf.KeepIfLower(model, [adam], sf.CrossEntropy(), (X, Y), slower=0.25)
    weights = [value.clone() for value in model.parameters()]
    for power in (1, 2):
        epoch(model, adam)
        with torch.no_grad():
            next(iter(model.parameters())).fill_(torch.inf)
        assert not keep()
        assert keep.history[-1].value == math.inf
        assert adam.param_groups[0]["lr"] == pytest.approx(0.01 / 4**power)
        assert all(torch.equal(value, before) for value, before in zip(model.parameters(), weights, strict=True))
    rates = []
    for _ in range(9):
        epoch(model, adam)
        assert keep()
        rates.append(adam.param_groups[0]["lr"])
    assert all(after >= before for before, after in pairwise(rates))
    assert rates[0] == pytest.approx(0.01 / 16 * 1.5)
    assert rates[-1] == pytest.approx(0.01)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = network(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


def test_another_function_is_compared_with_itself() -> None:
    model = Scaled()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = sf.KeepIfLower(model, sgd, sf.CrossEntropy(), (X, Y))
    epoch(model, sgd)
    assert keep()
    before = keep.value
    model.scale = 0.0  # the loss is log 2 everywhere
    assert not keep()
    assert "another function" in keep.history[-1].note
    assert keep.value.value == pytest.approx(math.log(2))
    model.scale = 1.0
    epoch(model, sgd)
    keep()
    assert keep.value.value < before.upper or not keep.history[-1].accepted


def test_data_that_change_are_refused() -> None:
    model, x = network(), X.clone()
    keep = sf.KeepIfLower(model, torch.optim.SGD(model.parameters(), lr=0.1), sf.CrossEntropy(), (x, Y))
    x.data.mul_(0.5)
    with pytest.raises(SurefootError, match="other numbers"):
        keep()


@pytest.mark.parametrize("kind", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9)])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_run_lowers_the_objective_from_any_rate(kind: Any, normalised: bool) -> None:
    model, seen = network(normalised=normalised), list[EpochRecord]()
    optimizer = kind if kind is torch.optim.Adam else kind(model.parameters())
    training = sf.ProvedEpochs(optimizer, sf.CrossEntropy(), loader(), model=model, progress=seen.append)
    start = exact(model)
    value = training.run(epochs=25)
    assert value == training.value.value == pytest.approx(exact(model), rel=1e-12, abs=training.value.error)
    assert value < 0.7 * start
    assert seen == training.history[1:]
    values = [record for record in training.history if record.accepted]
    assert all(a.value - a.error > b.value + b.error for a, b in pairwise(values))
    assert 18 <= sum(record.epochs for record in training.history) <= 25
    assert model.training
    again = training.run(epochs=5)
    assert again <= value


def test_short_runs_do_no_harm() -> None:
    model = network()
    training = sf.ProvedEpochs(torch.optim.SGD, sf.CrossEntropy(), loader(), model=model)
    values = [training.run(epochs=0.5) for _ in range(3)]
    assert values[0] >= values[1] >= values[2]
    assert 0 < training.optimizer.param_groups[0]["lr"] < math.inf


def test_a_run_by_the_clock() -> None:
    model = network()
    training = sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), loader(), model=model)
    start = time.monotonic()
    training.run(seconds=1.0)
    assert time.monotonic() - start < 2.0
    assert training.value.value < training.history[0].value


def test_the_same_seed_gives_the_same_run_and_a_resumed_run_goes_on() -> None:
    runs = []
    for _ in range(2):
        model = network()
        torch.manual_seed(1)
        training = sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), loader(), model=model)
        runs.append(training.run(epochs=12))
    assert runs[0] == runs[1]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "training": training.state_dict()}, file)
    file.seek(0)
    saved, twin = torch.load(file, weights_only=True), network()
    twin.load_state_dict(saved["model"])
    resumed = sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), loader(), model=twin)
    resumed.load_state_dict(saved["training"])
    assert (resumed.rate, resumed.history) == (training.rate, training.history)
    assert resumed.value.value == pytest.approx(runs[0], abs=training.value.error)
    assert resumed.run(epochs=6) <= runs[0] + training.value.error
    with pytest.raises(ValueError, match="not of ProvedEpochs"):
        resumed.load_state_dict(torch.optim.Adam(twin.parameters()).state_dict())


def test_held_out_data_decide() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.randint(2, (40,))  # nothing to learn but noise
    model = network()
    batches = [(x[:10], y[:10]), (x[10:20], y[10:20])]
    training = sf.ProvedEpochs(
        torch.optim.Adam, sf.CrossEntropy(), batches, model=model, held_out=[(x[20:], y[20:])]
    )
    value = training.run(epochs=200)
    assert value == pytest.approx(exact(model, x[20:], y[20:]), abs=training.value.error + 1e-12)
    assert value == min(record.value for record in training.history if record.accepted)
    assert sum(record.epochs for record in training.history) < 100  # it ends early
    assert not any(record.accepted for record in training.history[-5:])


def test_data_are_what_the_loader_gives() -> None:
    chosen = list(range(0, 96, 3))
    sampler = SubsetRandomSampler(chosen)
    for given in (loader(shuffle=False, sampler=sampler), DataLoader(Subset(TensorDataset(X, Y), chosen), 16)):
        model = network()
        keep = sf.KeepIfLower(model, torch.optim.SGD(model.parameters(), lr=0.1), sf.CrossEntropy(), given)
        assert keep.value.value == pytest.approx(exact(model, X[chosen], Y[chosen]), rel=1e-9)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({"shuffle": False, "sampler": WeightedRandomSampler([1.0] * 96, 96)}, {"drop_last": True}):
        given = DataLoader(TensorDataset(X[:90], Y[:90]), 16, **({"shuffle": True} | options))
        with pytest.raises(SurefootError, match="other samples"):
            sf.ProvedEpochs(optimizer, sf.CrossEntropy(), given, model=model)
        sf.ProvedEpochs(optimizer, sf.CrossEntropy(), given, model=model, data=[(X, Y)])


def made(**options: Any) -> Any:
    model = network()
    chosen: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam, "loss": sf.CrossEntropy()} | options
    return sf.ProvedEpochs(chosen.pop("optimizer"), chosen.pop("loss"), chosen.pop("loader", loader()), **chosen)


def steep() -> nn.Module:
    model = network()
    nn.init.constant_(model[0].weight, torch.nan)
    return model


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (lambda: made(optimizer=3), TypeError, "write ProvedEpochs"),
    "no model": (lambda: made(model=None), TypeError, "write ProvedEpochs"),
    "iterator": (lambda: made(loader=iter([(X, Y)])), TypeError, "many times"),
    "strangers": (lambda: made(optimizer=torch.optim.Adam(network().parameters())), ValueError, "not parameters"),
    "targets": (lambda: made(loss=sf.CrossEntropy(Y)), ValueError, "without targets"),
    "no rate": (lambda: made(model=(m := network()), optimizer=torch.optim.SGD(m.parameters(), lr=0.0)),
                OptimizerError, "positive"),
    "budget": (lambda: made().run(), ValueError, "positive number"),
    "two budgets": (lambda: made().run(epochs=3, seconds=1.0), ValueError, "positive number"),
    "nan": (lambda: made(model=steep()), SurefootError, "NaN"),
    "roll back": (lambda: sf.KeepIfLower(network(), [], sf.CrossEntropy(), (X, Y)), TypeError, "rolls back"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what: str) -> None:
    call, kind, word = REFUSALS[what]
    with pytest.raises(kind, match=word):
        call()
