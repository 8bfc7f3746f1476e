"""A proof belongs to the function and the weights it was made for: what is changed between steps is noticed."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.optim import (
    CertifiedDescent,
    GaussNewton,
    GuaranteedOptimizer,
    Newton,
    ProjectedGradient,
    ProjectedSGD,
)
from surefoot.optim.record import last_run

X = torch.randn(16, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Network(nn.Module):
    """A function of its weights that depends on all that a model may carry besides them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(2, 8).double(), nn.Linear(8, 2).double()
        self.register_buffer("wide", torch.ones(8, 1000, dtype=torch.float64) / 1000)
        self.scale, self.sign = 1.0, torch.ones(2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.tanh(self.scale * self.first(x)) * self.wide.sum(1)) * self.sign
        return y if self.training else -y


def attribute(model: Network) -> None:
    model.scale = 10.0


def mode(model: Network) -> None:
    model.eval()


def tensor(model: Network) -> None:
    model.sign = -model.sign


def large_buffer(model: Network) -> None:
    model.wide.data.mul_(5.0)  # PyTorch does not count this


def replaced_buffer(model: Network) -> None:
    model.wide = 5 * model.wide


def frozen(model: Network) -> None:
    model.last.requires_grad_(False)


CHANGES = [attribute, mode, tensor, large_buffer, replaced_buffer, frozen]
KINDS = {
    "segment": lambda model: CertifiedDescent(model, sf.CrossEntropy(), proof="segment"),
    "ball": lambda model: CertifiedDescent(model, sf.CrossEntropy(), proof="ball"),
    "blocks": lambda model: CertifiedDescent(model, sf.CrossEntropy(), proof="blocks"),
    "projected": lambda model: ProjectedGradient(model, sf.CrossEntropy(), domain=sf.Ball(0.05)),
    "Gauss-Newton": lambda model: GaussNewton(model, sf.CrossEntropy(), damping="certified"),
    "Newton": lambda model: Newton(model, sf.CrossEntropy(), damping="certified"),
}


def assert_step_keeps_its_promise(optimizer: GuaranteedOptimizer) -> None:
    before = optimizer.value(X, Y)
    assert optimizer.step(X, Y) == pytest.approx(before)
    promised = optimizer.history[-1].promised_decrease
    assert promised > 0
    assert before - optimizer.value(X, Y) >= promised - 1e-12


def each_with_each() -> list[object]:
    """Every change with one optimizer and every optimizer with one change are quick; the other pairs are slow."""
    return [
        pytest.param(kind, change, marks=[pytest.mark.slow] * (kind != "segment" and change is not attribute))
        for kind in KINDS
        for change in CHANGES
    ]


@pytest.mark.parametrize(("kind", "change"), each_with_each())
def test_the_next_step_is_about_the_model_as_it_is(kind: str, change) -> None:
    model = Network()
    optimizer = KINDS[kind](model)
    for _ in range(2):
        assert_step_keeps_its_promise(optimizer)
    assert [record.run for record in optimizer.history] == [0, 0]
    change(model)
    assert_step_keeps_its_promise(optimizer)
    assert_step_keeps_its_promise(optimizer)
    assert [record.run for record in optimizer.history] == [0, 0, 1, 1]
    assert optimizer.history[1].actual_decrease is None  # the loss after it is that of another function
    assert "the function changed" in optimizer.history[2].note
    assert optimizer.history[3].note == ""
    found = optimizer.stationarity()
    assert (found.steps, found.smallest) == (2, min(r.stationarity for r in optimizer.history[2:]))
    assert found.smallest <= found.bound
    assert "since step 2" in found.why


@pytest.mark.parametrize("scale", [5.0, 10.0, 40.0, -0.5, 0.2])
@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
def test_a_plain_attribute_changed_between_steps(scale: float, seed: int) -> None:
    model = Network(seed)
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    for _ in range(3):
        optimizer.step(X, Y)
    model.scale = scale
    assert_step_keeps_its_promise(optimizer)


def test_what_is_proved_begins_anew_when_the_mode_or_the_weights_change() -> None:
    model = Network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    for k in range(60):
        model.train(k % 2 == 0)
        optimizer.step(X, Y)
        assert optimizer.stationarity().smallest <= optimizer.stationarity().bound
    assert optimizer.stationarity().steps == 1
    assert "60 runs" in optimizer.guarantee

    linear = nn.Linear(2, 2).double()
    optimizer, start = (
        CertifiedDescent(linear, sf.CrossEntropy(), proof="segment"),
        copy.deepcopy(linear.state_dict()),
    )
    for k in range(60):
        optimizer.step(X, Y)
        assert optimizer.stationarity().smallest <= optimizer.stationarity().bound
        if k % 2:
            for name, value in linear.named_parameters():
                value.data.copy_(start[name])
    assert optimizer.stationarity().steps == 2
    assert "the weights changed" in optimizer.history[-2].note
    assert optimizer.history[1].actual_decrease is None


def test_weights_that_are_put_back_bit_by_bit_are_no_change() -> None:
    model = Network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    for _ in range(3):
        optimizer.step(X, Y)
        kept = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.first.weight.zero_()
        model.eval()
        optimizer.value(X, Y)
        model.train()
        model.load_state_dict(kept)
    assert {record.run for record in optimizer.history} == {0}
    assert optimizer.stationarity().steps == 3


class Classifier(Network):
    """Returns an object with several tensors, of which the logits are meant."""

    def forward(self, x: Tensor) -> Any:
        outputs = pytest.importorskip("transformers.modeling_outputs")
        logits = super().forward(x)
        return outputs.SequenceClassifierOutput(logits=logits, hidden_states=(x, 2 * logits))


@pytest.mark.parametrize("mode", ["segment", "ball", "blocks", "evaluation"])
def test_a_model_that_returns_an_object(mode: str) -> None:
    plain, model = Network(), Classifier()
    model.load_state_dict(plain.state_dict())
    records = []
    for network in (plain, model):
        optimizer = CertifiedDescent(network, sf.CrossEntropy(), proof=mode)
        for _ in range(2):
            optimizer.step(X, Y)
        records.append([(record.loss, record.promised_decrease) for record in optimizer.history])
    assert records[0] == records[1]
    assert all(promised > 0 for _, promised in records[1])


@pytest.mark.parametrize("mode", ["segment", "ball", "blocks", "evaluation"])
def test_freezing_and_unfreezing_a_layer(mode: str) -> None:
    model = Network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof=mode)
    model.first.requires_grad_(False)
    before = model.first.weight.detach().clone()
    assert_step_keeps_its_promise(optimizer)
    assert torch.equal(before, model.first.weight)
    model.first.requires_grad_(True)
    assert_step_keeps_its_promise(optimizer)
    assert not torch.equal(before, model.first.weight)
    assert optimizer.history[1].run == 1


def test_a_resumed_run_goes_on_only_if_nothing_was_changed() -> None:
    model = Network()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    for _ in range(2):
        optimizer.step(X, Y)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for change, run in ((None, 0), (attribute, 1), (mode, 1), (tensor, 1), (large_buffer, 1)):
        twin = copy.deepcopy(model)
        resumed = CertifiedDescent(twin, sf.CrossEntropy(), proof="segment")
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        if change is not None:
            change(twin)
        resumed.step(X, Y)
        assert resumed.history[-1].run == run, change
    other = CertifiedDescent(Network(1), sf.CrossEntropy(), proof="segment")
    other.load_state_dict(optimizer.state_dict())
    other.step(X, Y)
    assert other.history[-1].run == 1
    assert len(last_run(other.history)) == 1


def test_batch_statistics_in_training_mode_are_no_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    for _ in range(3):
        assert_step_keeps_its_promise(optimizer)  # every evaluation moves the running statistics
    assert {record.run for record in optimizer.history} == {0}


def test_a_function_that_hides_what_it_reads_is_refused() -> None:
    """Whatever escapes the survey of the model shows in its loss."""
    optimizer = CertifiedDescent(Network(), sf.CrossEntropy(), proof="segment")
    optimizer.step(X, Y)
    with pytest.raises(sf.optim.OptimizerError, match="a function of value"):
        optimizer.check_value(0.5, 0.6)


def test_the_theorem_of_stochastic_steps_begins_where_the_constant_is_known() -> None:
    batches = [(X[:4], Y[:4]), (3 * X[4:8], Y[4:8]), (X[8:12], Y[8:12])]
    optimizer = ProjectedSGD(Network(), sf.CrossEntropy(), domain=sf.Ball(0.05))
    for batch in batches * 2:
        optimizer.step(*batch)
    sizes = [record.step_size for record in optimizer.history]
    assert sizes[0] > sizes[1]
    assert set(sizes[optimizer.since :]) == {sizes[-1]}
    assert 0 < optimizer.since <= 2
    assert f"counted from step {optimizer.since}" in optimizer.guarantee

    ready = ProjectedSGD(Network(), sf.CrossEntropy(), domain=sf.Ball(0.05))
    assert ready.prepare(batches) == optimizer.smoothness
    for batch in batches:
        ready.step(*batch)
    assert ready.since == 0
    assert len({record.step_size for record in ready.history}) == 1
    ready.model.scale = 3.0
    ready.step(*batches[0])  # the constants of the other batches were those of another function
    assert ready.since == 3
    assert len(ready.batches) == 1
    expected = sf.certify(ready.model, X[:4], objective=sf.CrossEntropy(Y[:4]), domain=ready.domain)
    assert float(ready.smoothness) == float(expected.smoothness)
    ready.step(*batches[0])
    assert ready.since == 3
    with torch.no_grad():
        ready.model.first.bias.zero_()
    ready.step(*batches[0])
    assert ready.since == 5  # the run that the theorem speaks of begins with other weights
    assert len(ready.batches) == 1  # on the set the constants are the same


class Masked(nn.Module):
    """Sparse sums of neighbours, some of their entries, and some more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("keep", torch.tensor([True, False, True, True, False, False]))
        self.register_buffer("neighbours", torch.eye(4).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return torch.sparse.mm(self.neighbours, z) * self.keep + z[:, self.keep].sum(1, keepdim=True)


def test_masks_and_sparse_buffers_that_change_are_noticed() -> None:
    torch.manual_seed(0)
    model, (x, y) = Masked().double(), torch.randn(2, 4, 6, dtype=torch.float64)
    optimizer = sf.CertifiedDescent(model, sf.Square())
    for change in (None, lambda: model.keep.fill_(True), lambda: model.neighbours.values().mul_(2), None):
        if change is not None:
            change()
        before = float(sf.Square(y)(model(x)).detach())
        assert float(optimizer.step(x, y)) == pytest.approx(before, rel=1e-9)
        assert float(sf.Square(y)(model(x)).detach()) < before
