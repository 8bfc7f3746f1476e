"""Data are what a loader gives, models are what they are now, and what cannot be proved is refused in words."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import surefoot as sf
from surefoot.errors import SurefootError


def _data(rows: int = 60) -> TensorDataset:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _epochs(model: nn.Module, loader: Any, **options: Any) -> sf.ProvedEpochs:
    return sf.ProvedEpochs(torch.optim.Adam, sf.CrossEntropy(), loader, model=model, **options)


CALLS: dict[str, Callable[[nn.Module, Any], float]] = {
    "evaluate": lambda model, loader: sf.evaluate(model, loader, sf.CrossEntropy()).value,
    "certify": lambda model, loader: float(
        sf.certify(model, loader, objective=sf.CrossEntropy(), domain=sf.Ball(0.0)).bound
    ),
    "ProvedEpochs": lambda model, loader: (_epochs(model, loader).run(2), float("nan"))[1],
    "CertifiedDescent": lambda model, loader: float(sf.CertifiedDescent(model, sf.CrossEntropy()).step(loader)),
}


class Scaled(DataLoader[Any]):
    """A loader that does something to its batches."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x / 255, y


class Sometimes:
    """Gives samples of zeros in every second pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        yield _data().tensors
        self.passes += 1
        if self.passes % 2 == 0:
            yield torch.zeros(40, 4), torch.zeros(40, dtype=torch.long)


GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "subset": (
        lambda: DataLoader(_data(), 8, sampler=SubsetRandomSampler(range(7, 47))), lambda x, y: (x[7:47], y[7:47]),
    ),
    "some, shuffled": (
        lambda: DataLoader(_data(), 8, sampler=RandomSampler(range(40))), lambda x, y: (x[:40], y[:40]),
    ),
    "dropped": (lambda: DataLoader(_data(), 25, drop_last=True), lambda x, y: (x[:50], y[:50])),
    "own loader": (lambda: Scaled(_data(), 10), lambda x, y: (x / 255, y)),
}  # fmt: skip


@pytest.mark.parametrize("call", ["evaluate", "certify", "CertifiedDescent"])
@pytest.mark.parametrize("name", GIVEN)
def test_data_are_what_the_loader_gives(name: str, call: str) -> None:
    make, chosen = GIVEN[name]
    model = _model().double()
    batches = [(chosen(*_data().tensors)[0].double(), chosen(*_data().tensors)[1])]
    loader = [(x.double(), y) for x, y in make()] if call == "CertifiedDescent" else make()
    model = _model()
    expected = CALLS["evaluate"](model, [(x.float(), y) for x, y in batches])
    assert CALLS[call](model, loader if call != "CertifiedDescent" else make()) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize("name", GIVEN)
def test_epochs_know_nothing_of_other_samples(name: str) -> None:
    make, chosen = GIVEN[name]
    model, data = _model(), [chosen(*_data().tensors)]
    training = _epochs(model, make())
    training.run(2)
    near = training.value.error + 1e-12
    assert training.value.value == pytest.approx(CALLS["evaluate"](model.eval(), data), abs=near)


RANDOM: dict[str, Callable[[], Any]] = {
    "weighted": lambda: DataLoader(_data(), 10, sampler=WeightedRandomSampler(torch.ones(60), 60)),
    "replaced": lambda: DataLoader(_data(), 10, sampler=RandomSampler(_data(), replacement=True)),
    "some": lambda: DataLoader(_data(), 10, sampler=RandomSampler(_data(), num_samples=30)),
    "dropped": lambda: DataLoader(_data(), 25, shuffle=True, drop_last=True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", RANDOM)
def test_samples_that_are_drawn_anew_in_each_pass_are_refused(name: str, call: str) -> None:
    with pytest.raises(SurefootError, match="each pass of the loader is of other samples"):
        CALLS[call](_model(), RANDOM[name]())


def test_a_pass_with_samples_of_zeros_is_another_one() -> None:
    optimizer, loader = sf.CertifiedDescent(_model(), sf.CrossEntropy()), Sometimes()
    with pytest.raises(SurefootError, match="other numbers than in the first pass"):
        [optimizer.step(loader) for _ in range(3)]


class Meeting(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.last = kind, nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.kind == "centred":
            h = h - h.mean(0, keepdim=True)
        elif self.kind == "soft-max":
            h = h.softmax(0)
        elif self.kind == "attention":
            h = F.scaled_dot_product_attention(h[None], h[None], h[None])[0]
        elif self.kind == "products":
            h = (h @ h.T) @ h
        elif self.kind == "places":
            h = h * torch.arange(len(h))[:, None]
        return self.last(h)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["centred", "soft-max", "attention", "products", "places"])
def test_samples_that_meet_are_refused_where_batches_are_cut(kind: str, call: str) -> None:
    loader = DataLoader(_data(), batch_size=10, shuffle=True)
    with pytest.raises(SurefootError, match="samples of a batch meet"):
        CALLS[call](Meeting(kind), loader)
    assert CALLS["evaluate"](Meeting(kind), [_data().tensors]) > 0  # one batch, which nobody cuts


@pytest.mark.parametrize(
    "model",
    [
        _model(),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.TransformerEncoderLayer(2, 1, 8, 0.0, batch_first=True),
                      nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Flatten()),
    ],
)  # fmt: skip
def test_samples_that_stay_apart_are_not_refused(model: nn.Module) -> None:
    loader = DataLoader(_data(), batch_size=7, shuffle=True)
    found, whole = (sf.evaluate(model, data, sf.CrossEntropy()) for data in (loader, [_data().tensors]))
    assert abs(found.value - whole.value) <= found.error + whole.error


class Changing(nn.Module):
    def __init__(self, anneal: bool = False) -> None:
        super().__init__()
        self.layer, self.scale, self.shift, self.anneal = nn.Linear(3, 1), 1.0, torch.zeros(1), anneal

    def forward(self, x: Tensor) -> Tensor:
        if self.anneal and self.training and torch.is_grad_enabled():
            self.scale *= 1.1
        return self.layer(x) * self.scale + self.shift


def _hook(model: Changing) -> None:
    model.layer.register_forward_hook(lambda module, args, result: -2 * result)


def _number(model: Changing) -> None:
    model.scale = -3.0


def _attribute(model: Changing) -> None:
    model.shift = torch.ones(1)


def _in_place(model: Changing) -> None:
    model.shift += 2.0


@pytest.mark.parametrize("change", [_hook, _number, _attribute, _in_place])
def test_epochs_notice_that_the_model_was_changed(change: Callable[[Changing], None]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    model, batches = Changing(), list(zip(x.split(10), y.split(10), strict=True))
    training = sf.ProvedEpochs(torch.optim.Adam, nn.MSELoss(), batches, model=model)
    training.run(3)
    change(model)
    training.run(3)
    true = sf.evaluate(model, x, nn.MSELoss(), y)
    assert abs(training.value.value - true.value) <= training.value.error + true.error
    assert any("another function" in record.note for record in training.history)


def test_epochs_refuse_targets_that_change() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    model, batches = Changing(), list(zip(x.split(10), y.split(10), strict=True))
    training = sf.ProvedEpochs(torch.optim.Adam, nn.MSELoss(), batches, model=model)
    training.run(2)
    y.mul_(30)
    with pytest.raises(SurefootError, match="other numbers than in the first pass"):
        training.run(2)


class Sharing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if kind == "buffer":
            self.register_buffer("copy", self.layer.weight.data)
        elif kind == "row of a buffer":
            self.register_buffer("copy", torch.zeros(9, 4))
            self.layer.weight = nn.Parameter(self.copy[2:6])
        elif kind == "attribute":
            self.copy = self.layer.weight.detach()
        elif kind == "list":
            self.copies = [self.layer.weight.detach()[1:3]]
        else:
            self.layer.weight = nn.Parameter(torch.ones(1, 4).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("kind", ["buffer", "row of a buffer", "attribute", "list", "expanded"])
def test_memory_that_is_shared_with_a_weight_is_refused(kind: str) -> None:
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    with pytest.raises(SurefootError, match="memory"):
        sf.CertifiedDescent(Sharing(kind), nn.MSELoss()).step(x, y)


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Embedded(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, **options)  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).tanh().sum(1)


class OneClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2) * 1e20)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).square()[:, :1]


IDS = torch.tensor([[0, 1, 1], [2, 0, 3]])
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "sparse": ("sparse=False", lambda: sf.certify(
        Embedded(sparse=True), IDS, objective=nn.MSELoss(), y=torch.zeros(2, 3))),
    "no derivative": ("derivative of no function", lambda: sf.CertifiedDescent(
        Embedded(scale_grad_by_freq=True), nn.MSELoss()).step(IDS, torch.zeros(2, 3))),
    "linear loss": ("no curvature", lambda: sf.GaussNewton(
        Of(lambda h: h.square().sum()), sf.objectives.ModelLoss()).step(torch.randn(4, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_sentences(name: str) -> None:
    words, call = REFUSED[name]
    with pytest.raises(SurefootError, match=words):
        call()


def test_the_larger_of_equals_has_a_certificate() -> None:
    x, objective = torch.randn(4, 3), sf.Square(torch.zeros(4, 3))
    certificate = sf.certify(Of(lambda h: torch.maximum(h, h).tanh()), x, objective=objective, domain=sf.Ball(0.1))
    assert certificate.lipschitz.is_finite


def test_a_gradient_that_is_zero_but_for_round_off_has_no_step() -> None:
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0**-30, -1.0]]))
    optimizer = sf.CertifiedDescent(model, sf.Square(), proof="segment")
    optimizer.step(
        torch.ones(1, 3), torch.tensor([[2.0**-30]])
    )  # what the model computes is 0, in exact terms 2⁻³⁰
    assert optimizer.done


class Stubborn(nn.Linear):
    """Is interrupted while it goes back to training mode."""

    stops = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and value and self.stops:
            self.__dict__["stops"] = False
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_an_interrupt_leaves_no_module_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stubborn(4, 2), nn.Tanh())
    training = _epochs(model, [_data().tensors])
    model[1].__dict__["stops"] = True
    with pytest.raises(KeyboardInterrupt):
        training.run(2)
    assert all(module.training for module in model.modules())


def test_random_numbers_of_a_loader_are_its_own() -> None:
    """Nothing that looks at a loader draws from the generators of Python."""
    state = random.getstate()
    CALLS["evaluate"](_model(), DataLoader(_data(), 10, shuffle=True))
    assert random.getstate() == state


def test_one_class_with_huge_weights_has_a_value() -> None:
    value = sf.evaluate(OneClass(), torch.ones(3, 2), sf.CrossEntropy(torch.zeros(3, dtype=torch.long)))
    assert value.value == 0
    assert value.error < float("inf")
