"""Bursts of mini-batches: what is kept is lower in exact arithmetic, everything else goes back bit by bit."""

from __future__ import annotations

import io
import math
import time
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import surefoot as sf
from judges.exact import exact_value
from surefoot.optim import BurstRecord, ProvedEpochs, StalledWarning
from surefoot.optim.all_data import AllData
from surefoot.optim.bursts import Average, EndlessBatches, Snapshot, built_up, fixed_data
from surefoot.optim.pace import Pace, Verdict, best_rate
from surefoot.optim.tail import WholeObjective
from surefoot.valuation.valuer import EvaluationError


def _data(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def _loader(size: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*_data()), size, shuffle=True)


def _model(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *between, nn.ReLU(), nn.Linear(6, 2))


def _epochs(model: nn.Module, rate: float = 1e-2, **options: Any) -> ProvedEpochs:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    options = {"burst": 2, **options}
    return ProvedEpochs(optimizer, sf.CrossEntropy(), options.pop("loader", _loader()), model=model, **options)


def _contents(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_kept_burst_descends_in_exact_arithmetic(dtype: torch.dtype) -> None:
    x, y = _data(12)
    x, model = x.to(dtype), _model().to(dtype)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    training = _epochs(model, loader=batches)
    last = None
    for _ in range(4):
        training.step()
        record = training.history[-1]
        exact = exact_value(lambda: nn.functional.cross_entropy(model(x), y), model)
        assert training.value is not None
        assert training.value.lower <= exact <= training.value.upper
        if last is not None:
            assert exact < last or not record.kept
        last = exact
    kept = [record for record in training.history if record.kept]
    assert len(kept) >= 2
    for one in kept:
        assert one.after + one.after_error < one.before - one.before_error


@pytest.mark.filterwarnings("ignore:2 bursts in a row")
@pytest.mark.parametrize("rate", [1e-5, 1e-2, 1.0])
def test_the_rate_finds_itself(rate: float) -> None:
    model = _model()
    training = _epochs(model, rate)
    losses = [training.step() for _ in range(12)]
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[-1] < 0.25
    assert 1e-3 < training.rate < 10.0
    assert "rates were tried" in training.history[0].note


class _Ascent(torch.optim.SGD):
    """Goes up: nothing of it can be kept."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=group["lr"])
        return loss


def test_what_is_not_lower_goes_back() -> None:
    model = _model()
    training = ProvedEpochs(
        _Ascent(model.parameters(), lr=1.0), sf.CrossEntropy(), _loader(), model=model, burst=1
    )
    before = _contents(model)
    training.step()
    assert not training.history[-1].kept
    assert _equal(before, _contents(model))
    assert not training.optimizer.state_dict()["state"]
    with pytest.warns(StalledWarning, match="2 bursts in a row were not kept") as warned:
        training.step()
    assert warned[0].filename == __file__
    assert "nothing yet" in training.guarantee
    assert model.training


def test_a_loss_that_is_not_finite_goes_back() -> None:
    model = _model(nn.BatchNorm1d(6))
    training = _epochs(model)
    training.step()
    before = _contents(model)
    training.rate = 1e30
    training.step()
    record = training.history[-1]
    assert not record.kept
    assert record.after > 1e3
    assert _equal(before, _contents(model))
    assert training.rate < 1e30


def test_an_interrupt_loses_nothing() -> None:
    class Interrupted(nn.Module):
        left = 10**9

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
            return x

    stop = Interrupted()
    model = _model(stop)
    training = _epochs(model, loader=_loader())
    training.step()
    before, history = _contents(model), list(training.history)
    state = training.optimizer.state_dict()["state"]
    moments = {key: value["exp_avg"].clone() for key, value in state.items()}
    stop.left = 5
    with pytest.raises(KeyboardInterrupt):
        training.step()
    assert _equal(before, _contents(model))
    assert training.history == history
    assert model.training
    state = training.optimizer.state_dict()["state"]
    assert all(torch.equal(state[key]["exp_avg"], value) for key, value in moments.items())
    stop.left = 10**9
    assert training.step() <= history[-1].after


def test_an_interrupt_leaves_weights_that_were_changed() -> None:
    class Interrupted(nn.Module):
        stop = False

        def forward(self, x: Tensor) -> Tensor:
            if self.stop:
                raise KeyboardInterrupt
            return x

    stop = Interrupted()
    model = _model(stop)
    training = _epochs(model)
    training.step()
    with torch.no_grad():
        model[0].weight.mul_(2)
    changed, stop.stop = _contents(model), True
    training._keeper.all_data._valuer = None
    with pytest.raises(KeyboardInterrupt):
        training.step()
    assert _equal(changed, _contents(model))


def test_the_objective_is_the_deterministic_one() -> None:
    model = _model(nn.BatchNorm1d(6), nn.Dropout(0.2))
    training = _epochs(model)
    value = [training.step() for _ in range(3)][-1]
    assert model.training
    x, y = _data()
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(model.eval()(x), y))
    assert value == pytest.approx(expected, rel=1e-5)
    assert "evaluation mode, without dropout" in training.guarantee


def test_a_resumed_run_goes_on() -> None:
    model = _model()
    training = _epochs(model)
    for _ in range(3):
        training.step()
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "training": training.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = _model()
    other.load_state_dict(loaded["model"])
    resumed = _epochs(other, rate=1.0)
    resumed.load_state_dict(loaded["training"])
    assert resumed.history == training.history
    assert resumed.rate == training.rate
    last = training.value
    assert last is not None
    assert resumed.step() <= last.value
    assert resumed.history[-1].before == pytest.approx(last.value, abs=last.error)
    assert "tried" not in resumed.history[-1].note
    again = _epochs(other)
    again.load_state_dict(resumed.state_dict())
    assert again.value is not None
    assert again.run(0.01) == again.value.value
    with pytest.raises(ValueError, match="not of ProvedEpochs"):
        resumed.load_state_dict(training.optimizer.state_dict())
    state, rates = resumed.state_dict(), [group["lr"] for group in resumed.optimizer.param_groups]
    with pytest.raises(ValueError, match="earlier version"):
        resumed.load_state_dict({**state, "pace": {"rate": 1.0, "ceiling": 2.0}})
    assert [group["lr"] for group in resumed.optimizer.param_groups] == rates


def test_weights_changed_between_bursts_are_noticed() -> None:
    model = _model()
    training = _epochs(model)
    training.step()
    with torch.no_grad():
        model[0].weight.mul_(3)
    training.step()
    assert "changed" in training.history[-1].note or "changed" in training.history[-2].note
    assert isinstance(training.history[-1], BurstRecord)


@pytest.mark.parametrize("between", [(), (nn.BatchNorm1d(6),)], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("size", [4, 12, 48])
def test_work_is_counted_and_kept_to(size: int, between: tuple[nn.Module, ...]) -> None:
    model = _model(*between)
    seen: list[BurstRecord] = []
    training = _epochs(model, burst=None, progress=seen.append, loader=_loader(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        value = training.run(30)
    assert seen == training.history
    assert training.value is not None
    assert value == training.value.value
    assert 26 < training.work < 30.000001
    assert all(record.work > 0 for record in training.history)


@pytest.mark.filterwarnings("ignore:2 bursts in a row")
@pytest.mark.parametrize(("tail", "budget"), [(0, 19.3), (0.6, 40.3)])
@pytest.mark.parametrize("size", [4, 48])
def test_a_budget_is_kept_to_where_the_last_burst_is_undone(size: int, tail: float, budget: float) -> None:
    class Late(torch.optim.SGD):
        wild = False

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups if self.wild else ():
                for parameter in group["params"]:
                    parameter.data.add_(0.3 * torch.randn_like(parameter))
            return loss

    model = _model(nn.BatchNorm1d(6))
    optimizer = Late(model.parameters(), lr=0.1)
    training = ProvedEpochs(
        optimizer,
        sf.CrossEntropy(),
        _loader(size),
        model=model,
        burst=4,
        tail=tail,
        progress=lambda _: setattr(optimizer, "wild", True),
    )
    training.run(budget)
    bursts = [record.kept for record in training.history if record.batches]
    assert bursts[0]
    assert not bursts[-1]
    assert training.work < budget + 1e-6


def test_the_same_bursts_again() -> None:
    losses = []
    for _ in range(2):
        model = _model()
        torch.manual_seed(7)
        training = _epochs(model, loader=_loader())
        losses.append([training.step() for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_same_seed_gives_the_same_run_bit_by_bit(make: Any) -> None:
    runs = []
    for pause in (0.0, 0.002):  # times have no say

        class Slow(nn.Module):
            def forward(self, x: Tensor, pause: float = pause) -> Tensor:
                end = time.process_time() + pause
                while time.process_time() < end:
                    pass
                return x

        model = _model(nn.BatchNorm1d(6), nn.Dropout(0.1), Slow())
        torch.manual_seed(7)
        optimizer = make(model.parameters(), lr=0.01)
        training = ProvedEpochs(optimizer, sf.CrossEntropy(), _loader(), model=model, tail=0.6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            training.run(25)
        runs.append((_contents(model), training.history))
    assert _equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert sum(record.kept for record in runs[0][1]) >= 2


def test_a_loss_of_torch_is_the_objective() -> None:
    values, weights = [], []
    for objective in (sf.CrossEntropy(), nn.CrossEntropyLoss()):
        model = _model()
        training = ProvedEpochs(torch.optim.Adam, objective, _loader(), model=model, burst=1)
        training.step()
        assert training.value is not None
        values.append(training.value)
        weights.append(_contents(model))
    assert _equal(*weights)
    assert abs(values[0].value - values[1].value) <= values[0].error + values[1].error


class TestData:
    def test_the_samples_come_in_a_fixed_order_and_one_size(self) -> None:
        x, y = _data()
        found = list(fixed_data(_loader(size=2)))
        assert {len(part) for part, _ in found} == {24}
        assert torch.equal(torch.cat([part for part, _ in found]), x)
        assert torch.equal(torch.cat([part for _, part in found]), y)

    @pytest.mark.parametrize(
        ("sample", "size"),
        [(torch.zeros(3000), 320), (torch.zeros(3, 100, 100), 40), (torch.zeros(3, 500, 500), 40),
         (torch.zeros(128, dtype=torch.long), 64)],
    )  # fmt: skip
    def test_large_samples_come_in_small_batches(self, sample: Tensor, size: int) -> None:
        """At most eight batches of training, and as many inputs as fit into four megabytes, or near that."""
        data = TensorDataset(sample.expand(640, *sample.shape), torch.zeros(640))
        state = torch.get_rng_state()
        for loader in (DataLoader(data, 40), DataLoader(data, 40, collate_fn=lambda rows: default_collate(rows))):
            found = fixed_data(loader)
            assert torch.equal(state, torch.get_rng_state())
            assert len(next(iter(found))[0]) == size
            state = torch.get_rng_state()

    def test_a_new_pass_is_begun_unless_one_has_just_ended(self) -> None:
        batches = EndlessBatches(range(3))
        assert list(batches.take(4)) == [0, 1, 2, 0]
        batches.begin()
        assert list(batches.take(3)) == [0, 1, 2]
        batches.begin()
        assert list(batches.take(1)) == [0]

    def test_random_samples_are_refused_and_plain_ones_take_their_place(self) -> None:
        class Noisy(Dataset[Any]):
            def __len__(self) -> int:
                return 48

            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                x, y = _data()
                return x[index] + 0.01 * torch.randn(4), y[index]

        loader = DataLoader(Noisy(), 12, shuffle=True)
        with pytest.raises(EvaluationError, match="augmentation"):
            _epochs(_model(), loader=loader).step()
        with pytest.raises(EvaluationError, match="augmentation"):
            _epochs(_model(nn.BatchNorm1d(6)), loader=loader).step()
        training = _epochs(_model(), loader=loader, data=[_data()])
        assert training.step() <= training.history[0].before


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": None}, "model=model"),
            ({"optimizer": "Adam"}, "first argument is a torch optimizer"),
            ({"objective": nn.functional.cross_entropy}, "such as surefoot.CrossEntropy"),
            ({"objective": sf.CrossEntropy(torch.tensor([0]))}, "without targets"),
            ({"loader": iter([])}, "read many times"),
            ({"loader": torch.ones(3)}, "read many times"),
            ({"burst": 0}, "positive number of epochs"),
            ({"average": 2}, "between 0 and 1"),
            ({"tail": 1}, "less than 1"),
            ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)}, "not parameters of the model"),
        ],
    )
    def test_what_does_not_fit(self, change: dict[str, Any], message: str) -> None:
        model = _model()
        given: dict[str, Any] = {
            "optimizer": torch.optim.Adam(model.parameters()),
            "objective": sf.CrossEntropy(),
            "loader": _loader(),
            "model": model,
            **change,
        }
        with pytest.raises((TypeError, ValueError), match=message):
            ProvedEpochs(**given)

    def test_rates_that_are_no_rates(self) -> None:
        with pytest.raises(ValueError, match="positive numbers"):
            _epochs(_model(), rate=0.0)


class TestPace:
    @pytest.mark.parametrize("best", [1e-4, 1e-2, 3.0])
    def test_the_search_ends_near_the_best_rate(self, best: float) -> None:
        for first in (best / 30, best, 30 * best):
            found, tried = best_rate(
                first, 9.0, lambda rate: min(abs(math.log(rate / best)), 9.01) if rate < 4 * best else math.inf
            )
            assert best / 4 < found < 4 * best
            assert tried <= 6

    def test_where_all_rates_do_harm_the_search_ends(self) -> None:
        found, tried = best_rate(1.0, 1.0, lambda rate: math.inf)
        assert tried == 10
        assert found < 1e-4

    def test_success_raises_the_rate_and_anything_else_lowers_it(self) -> None:
        pace = Pace(1.0, lowest=2.0)
        assert pace.judge(1.5) is Verdict.LOWER
        assert pace.rate == pytest.approx(1.25)
        assert pace.judge(1.6) is Verdict.HIGHER
        assert pace.rate == pytest.approx(1.25 * 0.7)
        assert pace.lowest == 1.5
        for level in (1.4, 1.6, 1.3, 1.6, 1.2):  # three of five
            pace.judge(level)
        assert pace.rate == pytest.approx(1.25 * 0.7, rel=0.05)

    def test_damage_is_undone_at_once(self) -> None:
        for level in (math.inf, 9.0):
            pace = Pace(1.0, lowest=2.0)
            assert pace.judge(level) is Verdict.BACK
            assert pace.rate == 0.5
            assert pace.lowest == 2.0

    def test_what_does_not_fall_for_three_epochs_is_undone(self) -> None:
        pace = Pace(1.0, lowest=2.0)
        assert [pace.judge(level) for level in (2.1, 2.2, 2.3)] == [Verdict.HIGHER, Verdict.HIGHER, Verdict.BACK]
        assert pace.judge(2.1) is Verdict.HIGHER

    def test_losses_below_zero_have_no_limit(self) -> None:
        pace = Pace(1.0, lowest=-5.0)
        assert pace.judge(-4.0) is Verdict.HIGHER
        assert pace.judge(-6.0) is Verdict.LOWER

    def test_a_burst_that_is_undone_leaves_half_the_rate(self) -> None:
        pace = Pace(1.0, lowest=2.0)
        pace.judge(1.0)
        pace.fail(1.0, 2.0)
        assert (pace.rate, pace.lowest, pace.misses) == (0.5, 2.0, 0)


@pytest.mark.parametrize(
    "objective",
    [sf.CrossEntropy(), sf.CrossEntropy(weight=(1.0, 3.0)), sf.CrossEntropy(reduction="sum"), sf.Square()],
    ids=["mean", "weighted", "sum", "square"],
)
def test_slopes_are_near_the_gradient_of_all_data(objective: Any) -> None:
    x, y = _data(11)
    y = nn.functional.one_hot(y, 2).float() if isinstance(objective, sf.Square) else y
    model = _model(nn.BatchNorm1d(6))
    data = AllData(model, objective, list(zip(x.split(4), y.split(4), strict=True)), None)
    value, work = data.evaluate().value, data.work
    found = data.slopes()
    assert found.evaluation.value == pytest.approx(value, rel=1e-5)
    assert found.gradient is not None
    assert data.work == work + 0.5
    assert model.training
    objective(model.eval()(x), y).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found.gradient[name].float(), parameter.grad, rtol=1e-3, atol=1e-5)


class TestStepsOnAllData:
    @pytest.mark.parametrize("passes", [1, 2, 3, 12])
    def test_passes_are_kept_to_and_what_is_not_trained_stays(self, passes: int) -> None:
        model = _model(nn.BatchNorm1d(6))
        model[0].bias.requires_grad_(False)
        data = AllData(
            model, sf.CrossEntropy(), list(zip(*(part.split(12) for part in _data()), strict=True)), None
        )
        before, start, work = data.evaluate(), _contents(model), data.work
        trained = [model[0].weight, model[0].bias, model[3].weight]
        taken = WholeObjective(data, trained).descend(passes)
        assert taken <= passes
        assert data.work - work == 0.5 * taken
        moved = {name for name, value in _contents(model).items() if not torch.equal(value, start[name])}
        after = data.evaluate()
        if passes < 3:  # too few may find nothing, and then nothing moves
            assert after.upper < before.lower or not moved
        else:
            assert after.upper < before.lower
            assert moved == {"0.weight", "3.weight"}

    def test_where_the_gradient_vanishes_there_is_one_pass(self) -> None:
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        data = AllData(model, sf.Square(), [(torch.eye(2), torch.zeros(2, 1))], None)
        assert WholeObjective(data, model.parameters()).descend(9) == 1

    def test_a_direction_that_leads_nowhere_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = _model()
        data = AllData(model, sf.CrossEntropy(), [_data()], None)
        start, slopes = _contents(model), data.slopes

        def upside_down() -> Any:
            found = slopes()
            assert found.gradient is not None
            for slope in found.gradient.values():
                slope.neg_()
            return found

        monkeypatch.setattr(data, "slopes", upside_down)
        assert WholeObjective(data, model.parameters()).descend(40) < 40
        assert _equal(start, _contents(model))


@pytest.mark.filterwarnings("ignore:2 bursts in a row")
def test_a_run_ends_with_steps_on_all_data_where_that_is_proved_lower() -> None:
    x, _ = _data(24)
    y, values = (x[:, 0] > 0).long(), []
    for tail in (0.0, 0.6):
        model = _model().double()
        batches = list(zip(x.double().split(6), y.split(6), strict=True))
        training = _epochs(model, 3e-2, loader=batches, tail=tail)
        values.append(training.run(30))
        exact = exact_value(lambda model=model: nn.functional.cross_entropy(model(x.double()), y), model)
        assert training.value is not None
        assert training.value.lower <= exact <= training.value.upper
        last = training.history[-1]
        assert ("all data" in last.note, last.batches == 0, last.epochs > 20) == (tail > 0,) * 3
        again = training.run(20)
        assert again <= values[-1]
        assert all(r.after + r.after_error < r.before - r.before_error for r in training.history if r.kept)
    assert values[1] < values[0]


def test_steps_on_all_data_that_end_higher_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(nn.BatchNorm1d(6))
    training = _epochs(model, tail=0)
    value = training.run(8)
    before, ahead = _contents(model), training._keeper._ahead

    def astray(self: WholeObjective, passes: int) -> int:
        with torch.no_grad():
            model[0].weight.mul_(-1)
        return passes

    monkeypatch.setattr(WholeObjective, "descend", astray)
    assert training._keeper.descend(3.0)
    assert training.value is not None
    assert training.value.value == value
    assert not training.history[-1].kept
    assert _equal(before, _contents(model))
    assert training._keeper._ahead is ahead


def test_an_interrupt_of_the_last_steps_leaves_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(nn.BatchNorm1d(6))
    training = _epochs(model, tail=0.6)
    slopes, kept, left = AllData.slopes, [], 4

    def interrupted(self: AllData) -> Any:
        nonlocal left
        if not kept:
            kept.append(_contents(model))
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return slopes(self)

    monkeypatch.setattr(AllData, "slopes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run(30)
    assert _equal(kept[0], _contents(model))
    assert training.history[-1].batches
    assert model.training
    monkeypatch.undo()
    assert training.run(10) < training.history[0].after


def test_no_epoch_counts_as_lower_than_what_was_proved_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _epochs(_model())
    trainer = training._keeper.training
    run = trainer.run

    def lucky(*given: Any) -> Any:  # as if hard samples were missed
        found = run(*given)
        trainer.pace.lowest = 1e-9
        return found

    monkeypatch.setattr(trainer, "run", lucky)
    training.step()
    assert training.history[-1].kept
    assert trainer.pace.lowest == training.history[-1].after


class _Noted(torch.optim.SGD):
    """Writes down the rates it is given."""

    def step(self, closure: Any = None) -> Any:
        rates: list[float] = self.__dict__.setdefault("rates", [])
        rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_near_the_end_of_a_run_rates_fall_to_zero() -> None:
    model = _model()
    optimizer = _Noted(model.parameters(), lr=0.1)
    ProvedEpochs(optimizer, sf.CrossEntropy(), _loader(), model=model, tail=0).run(20)
    rates = optimizer.rates
    assert rates[-1] < 0.1 * max(rates[-40:])
    assert rates[-4:] == sorted(rates[-4:], reverse=True)


@pytest.mark.filterwarnings("ignore:2 bursts in a row")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_rate_that_the_optimizer_begins_with_does_not_matter(make: Any) -> None:
    found = []
    for rate in (1e-5, 1e-3, 1.0):
        model = _model()
        torch.manual_seed(7)
        training = ProvedEpochs(make(model.parameters(), lr=rate), sf.CrossEntropy(), _loader(), model=model)
        training.run(15)
        found.append(_contents(model))
    assert _equal(found[0], found[1])
    assert _equal(found[0], found[2])


def test_weights_are_averaged_over_the_last_steps() -> None:
    point = nn.Parameter(torch.zeros(1))
    mean = Average([point], skipped=2)
    with mean.instead():
        assert point.item() == 0
    for value in (1.0, 2.0, 3.0, 5.0):
        point.data.fill_(value)
        mean.add()
    with mean.instead():
        assert point.item() == 4
    assert point.item() == 5


def test_the_first_steps_of_momentum_are_shorter() -> None:
    point = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([point], lr=1.0, momentum=0.8)
    for steps in range(1, 6):
        point.grad = torch.ones_like(point)
        optimizer.step()
        assert built_up(optimizer, steps) == pytest.approx(-point.item() / steps * (1 - 0.8))
    assert built_up(torch.optim.Adam([point]), 3) == 1


class _Moody(torch.optim.SGD):
    """Descends, but for one step that throws the weights far away."""

    def __init__(self, *args: Any, wild: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken, self.wild = 0, wild

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.taken += 1
        if self.taken == self.wild:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(-30)
        return loss


def test_an_epoch_that_ends_too_high_is_undone_and_the_others_are_kept() -> None:
    runs: list[ProvedEpochs] = []
    for wild in (False, True):
        model = _model()
        last = runs[0].optimizer.taken if wild else 0  # of all steps
        optimizer = _Moody(model.parameters(), lr=0.3, wild=last)
        training = ProvedEpochs(optimizer, sf.CrossEntropy(), _loader(), model=model, burst=4)
        training.step()
        runs.append(training)
    tame, moody = (run.history[-1] for run in runs)
    assert tame.kept
    assert moody.kept
    assert tame.after < moody.after < tame.before
    assert runs[1].rate < runs[0].rate


def test_training_that_goes_on_from_damage_falls_back_to_what_was_kept() -> None:
    model = _model()
    training = _epochs(model, burst=6)
    training.step()
    keeper, kept = training._keeper, Snapshot(model, training.optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-30)
    keeper._ahead = Snapshot(model, training.optimizer)
    kept.restore()
    rate = training.rate
    training.step()
    assert training.history[-1].kept
    assert training.rate > rate / 10


def test_groups_keep_the_ratio_of_their_rates() -> None:
    model = _model()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.03}]
    training = ProvedEpochs(torch.optim.SGD(groups), sf.CrossEntropy(), _loader(), model=model, burst=1)
    training.step()
    first, second = (group["lr"] for group in training.optimizer.param_groups)
    assert second == pytest.approx(3 * first)
    assert first == training.rate
