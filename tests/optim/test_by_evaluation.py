"""Steps proved by their value: any direction, any model that can be evaluated, judged in exact arithmetic."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise

import flint
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from judges.exact import run, stored, value_of
from surefoot.optim import CertifiedDescent, OptimizerError, StalledWarning


def data(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    x = torch.randn(count, 4).double()
    return x, ((x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long())


def network(activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)).double()


def pooled() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), *layers).double()


def normalised() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def attending() -> nn.Module:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, 3)).double()


MODELS = {
    "tanh": network,
    "relu": lambda: network(nn.ReLU),
    "gelu": lambda: network(nn.GELU),
    "pooled": pooled,
    "normalised": normalised,
    "attending": attending,
}
DIRECTIONS = {
    "lbfgs": "lbfgs",
    "conjugate": "conjugate",
    "gradient": "gradient",
    "gauss_newton": "gauss_newton",
    "Adam": torch.optim.Adam,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "function": lambda weights, gradient: {name: -slope for name, slope in gradient.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_step_is_proved_and_descends(name):
    model, (x, y) = MODELS[name](), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    losses = [optimizer.step(x, y) for _ in range(25)]
    assert all(after < before for before, after in pairwise(losses))
    assert losses[-1] < 0.3 * losses[0]
    assert all(0 < r.promised_decrease <= r.actual_decrease * (1 + 1e-12) for r in optimizer.history)
    assert "decreases the objective of these data" in optimizer.guarantee


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_along_every_direction_promises_hold_in_exact_arithmetic(direction, dtype):
    model, (x, y) = network(nn.Tanh).to(dtype), data(6)
    x, chosen = x.to(dtype), DIRECTIONS[direction]
    chosen = chosen(model) if direction == "SGD" else chosen
    optimizer, objective = CertifiedDescent(model, sf.CrossEntropy(), direction=chosen), sf.CrossEntropy(y)
    taken = 0
    for _ in range(6):
        before = {parameter: stored(parameter) for parameter in model.parameters()}
        optimizer.step(x, y)
        after = {parameter: stored(parameter) for parameter in model.parameters()}
        with flint.ctx.workprec(200):
            here, there = (value_of(run(lambda: objective(model(x)), model, p)[0]) for p in (before, after))
            assert here - there >= optimizer.history[-1].promised_decrease
        taken += optimizer.history[-1].step_size > 0
    assert taken >= 5


def test_near_the_end_the_loss_is_known_to_its_last_digits():
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StalledWarning)
        for _ in range(120):
            optimizer.step(x, y)
    assert optimizer.history[-1].loss < 1e-12


class _Recurrent(nn.Module):
    def __init__(self, layer: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.layer, self.head = layer(4, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_recurrent_networks_train(layer: type[nn.GRU] | type[nn.LSTM]) -> None:
    """Products of gates and states multiply errors at every step, by no more than their largest entries."""
    torch.manual_seed(0)
    model, x, y = _Recurrent(layer).double(), torch.randn(60, 4, 4).double(), torch.arange(60) % 3
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    losses = [optimizer.step(x, y) for _ in range(20)]
    assert losses[-1] < 1e-3 * losses[0]
    assert all(record.promised_decrease > 0 for record in optimizer.history)


def test_steps_that_are_not_taken_speak():
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    optimizer = CertifiedDescent(model, sf.Square())
    with pytest.warns(StalledWarning, match="round-off") as warned:
        _ = [optimizer.step(x, y) for _ in range(60)]
    assert {warning.filename for warning in warned} == {__file__}  # the line that called
    weights = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StalledWarning)
        optimizer.step(x, y)
    assert optimizer.history[-1].note
    assert optimizer.history[-1].step_size == 0.0
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_proposing_optimizer_goes_on_only_with_what_was_taken():
    model, (x, y) = network(), data()
    adam = torch.optim.Adam(model.parameters(), lr=1e3)  # its step ascends: shortened, or not taken
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), direction=adam)
    losses = [optimizer.step(x, y) for _ in range(5)]
    assert all(after < before for before, after in pairwise(losses))
    moves = {int(state["step"]) for state in adam.state.values()}
    own = sum("gradient" not in record.note and record.step_size > 0 for record in optimizer.history)
    assert moves <= {own}
    assert adam.param_groups[0]["lr"] == 1e3


@pytest.mark.parametrize("direction", ["lbfgs", torch.optim.Adam])
def test_a_copy_optimises_its_own_model(direction):
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), direction=direction)
    optimizer.step(x, y)
    twin = copy.deepcopy(optimizer)
    weights = copy.deepcopy(model.state_dict())
    losses = [twin.step(x, y) for _ in range(3)]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert losses == [optimizer.step(x, y) for _ in range(3)]


def test_running_statistics_move_once_per_step_that_is_taken():
    model, (x, y) = normalised(), data()
    optimizer, twin = CertifiedDescent(model, sf.CrossEntropy()), copy.deepcopy(model)
    for k in range(1, 4):
        twin(x)
        optimizer.step(x, y)
        assert torch.allclose(model[1].running_mean, twin[1].running_mean, rtol=1e-12)
        assert int(model[1].num_batches_tracked) == k
        twin.load_state_dict(model.state_dict())


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_are_those_of_a_pass_of_the_model(momentum: float | None) -> None:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU()) for _ in range(2)]
    for first in (nn.Identity(), nn.BatchNorm1d(4)):  # one that normalises the data is not a part of each pass
        model = nn.Sequential(first, nn.Linear(4, 8), nn.Sequential(*inner), nn.Linear(8, 3)).double()
        optimizer, (x, y) = CertifiedDescent(model, sf.CrossEntropy()), data()
        for _ in range(3):
            twin = copy.deepcopy(model)
            twin(x)
            optimizer.step(x, y)
            for (name, value), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
                assert torch.allclose(value, expected, rtol=1e-12, atol=1e-15), name


def test_errors_by_forward_mode_decide_first() -> None:
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    for _ in range(4):
        optimizer.step(x, y)
    point = optimizer._method._point
    assert not optimizer._method._function[1].at(point.weights)._pass.run.watching
    record = optimizer.history[-1]
    before, after = (sf.evaluate(model, x, sf.CrossEntropy(y)) for _ in range(2))
    assert record.actual_decrease is not None
    assert 0 < record.promised_decrease <= record.actual_decrease
    assert before.lower <= point.enclosed().value <= after.upper


def test_layers_that_are_unfrozen_take_part() -> None:
    model, (x, y) = network(), data()
    model[0].requires_grad_(False)
    optimizer, frozen = CertifiedDescent(model, sf.CrossEntropy()), model[0].weight.clone()
    losses = [optimizer.step(x, y) for _ in range(4)]
    assert torch.equal(model[0].weight, frozen)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    losses += [optimizer.step(x, y) for _ in range(3)]
    assert not torch.equal(model[0].weight, frozen)
    assert all(after < before for before, after in pairwise(losses))
    assert "the function changed" in optimizer.history[4].note


def test_a_change_before_a_step_that_failed_is_noticed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = normalised(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    for _ in range(4):
        optimizer.step(x, y)
    model.eval()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "advance", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(x, y)
    loss = float(sf.CrossEntropy(y)(model(x)).detach())
    assert optimizer.step(x, y) == pytest.approx(loss, rel=1e-9)
    assert "the function changed" in optimizer.history[-1].note


def test_groups_that_are_added_take_part_at_the_next_step() -> None:
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), params=model[-1].parameters())
    for _ in range(4):
        optimizer.step(x, y)
    before = model[0].weight.clone()
    optimizer.add_param_group({"params": model[0].parameters()})
    optimizer.step(x, y)
    assert not torch.equal(model[0].weight, before)


def test_without_an_objective_an_error_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"write CertifiedDescent\(model, surefoot.CrossEntropy\(\)\)"):
        CertifiedDescent(network().parameters())
    with pytest.raises(TypeError, match=r"surefoot.CrossEntropy\(\)"):
        CertifiedDescent(network())


def test_a_ridge_is_part_of_what_is_proved():
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), weight_decay=0.1)
    while not optimizer.history or optimizer.history[-1].gradient_norm >= 1e-6:
        loss = optimizer.step(x, y)
        assert len(optimizer.history) < 55
    ridge = 0.05 * sum(float(value.detach().square().sum()) for value in model.parameters())
    plain = float(sf.CrossEntropy(y)(model(x)).detach())
    assert optimizer.value(x, y) == pytest.approx(plain + ridge, rel=1e-13)
    assert loss == pytest.approx(plain + ridge, rel=1e-6)
    with pytest.raises(ValueError, match="not both"):
        CertifiedDescent(model, sf.CrossEntropy(), weight_decay=0.1, regularizer=sf.Ridge(0.1))


def test_part_of_the_parameters():
    model, (x, y) = network(), data()
    first = model[0].weight.detach().clone()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), params=model[2].parameters())
    losses = [optimizer.step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert torch.equal(model[0].weight, first)
    model[2].bias.requires_grad_(False)
    bias = model[2].bias.detach().clone()
    optimizer.step(x, y)
    assert torch.equal(model[2].bias, bias)
    assert "changed" in optimizer.history[-1].note


@pytest.mark.parametrize("direction", ["lbfgs", "conjugate", "gradient", torch.optim.Adam])
def test_a_resumed_run_takes_the_same_steps(direction, tmp_path):
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), direction=direction)
    for _ in range(5):
        optimizer.step(x, y)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    twin = network(seed=5)
    twin.load_state_dict(saved["model"])
    resumed = CertifiedDescent(twin, sf.CrossEntropy(), direction=direction)
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(4):
        assert optimizer.step(x, y) == resumed.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_all_data_in_pieces_are_one_objective():
    x, y = data(50)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    whole, pieces = network(nn.ReLU), network(nn.ReLU)
    first, second = (CertifiedDescent(model, sf.CrossEntropy()) for model in (whole, pieces))
    for _ in range(8):
        assert first.step(x, y) == pytest.approx(second.step(loader), rel=1e-9)
    assert all(r.promised_decrease > 0 for r in second.history)
    assert second.value(loader) == pytest.approx(first.value(x, y), rel=1e-9)
    with pytest.raises(OptimizerError, match="brings its targets"):
        second.step(loader, y)
    with pytest.raises(OptimizerError, match="one batch"):
        CertifiedDescent(pieces, sf.CrossEntropy(), proof="ball").step(loader)


def test_loaders_of_other_data_are_other_objectives():
    x, y = data(32)
    first, second = ([(x[k : k + 8], y[k : k + 8]) for k in starts] for starts in ((0, 8), (16, 24)))
    optimizer = CertifiedDescent(network(), sf.CrossEntropy())
    for loader in (first, list(reversed(first)), second):
        optimizer.step(loader)
    names = [record.data for record in optimizer.history]
    assert names[0] == names[1] != names[2]
    assert "of its own mini-batch" in optimizer.guarantee
    with pytest.raises(OptimizerError, match="one batch"):
        CertifiedDescent(network(), sf.Square(), until="proved").step(first)


def test_a_closure_has_to_compute_the_same_function():
    model, (x, y) = network(), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())

    def closure() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(x)
        return outputs, nn.functional.cross_entropy(outputs, y)

    assert optimizer.step(x, y, closure) > optimizer.step(x, y, closure)

    def other() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(2 * x)
        return outputs, nn.functional.cross_entropy(outputs, y)

    with pytest.raises(OptimizerError, match="computes the loss"):
        optimizer.step(x, y, other)


def test_what_people_write_by_mistake_is_answered():
    model, (x, y) = network(), data()
    with pytest.raises(TypeError, match=r"CertifiedDescent\(model, surefoot.CrossEntropy\(\)\)"):
        CertifiedDescent(model.parameters(), sf.CrossEntropy())
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    with pytest.raises(OptimizerError, match="no learning rate to schedule"):
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ValueError, match=r"does not hold '0\.weight'"):
        CertifiedDescent(model, sf.CrossEntropy(), direction=torch.optim.SGD(model[2].parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no entry of the right shape"):
        CertifiedDescent(model, sf.CrossEntropy(), direction=lambda w, g: {}).step(x, y)
    bad = x.clone()
    bad[0, 0] = torch.nan
    with pytest.raises(sf.errors.SurefootError, match="NaN"):
        optimizer.step(bad, y)
    dropout = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).double()
    with pytest.raises(sf.errors.SurefootError):
        CertifiedDescent(dropout, sf.CrossEntropy()).step(x, y)


def test_the_anytime_bound_holds():
    model, (x, y) = network(nn.ReLU), data()
    optimizer = CertifiedDescent(model, sf.CrossEntropy())
    for _ in range(15):
        optimizer.step(x, y)
    found = optimizer.stationarity()
    assert found.smallest <= found.bound
