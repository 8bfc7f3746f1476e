"""The objective of all data, batch by batch, is that of the joined batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot as sf
from surefoot.batches import digest
from surefoot.errors import CaptureError, EvaluationError, ObjectiveError
from surefoot.objectives import BinaryCrossEntropy, Huber, Poisson
from surefoot.value.loader import StreamedValuer


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(50, 4), torch.arange(50) % 3


LOSSES: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (sf.CrossEntropy, True),
    "weighted": (lambda: sf.CrossEntropy(weight=[1.0, 2.0, 0.3]), True),
    "smoothed": (lambda: sf.CrossEntropy(weight=[0.1, 2.0, 0.3], label_smoothing=0.1), True),
    "ignored": (lambda: sf.CrossEntropy(ignore_index=1), True),
    "both": (lambda: sf.CrossEntropy(ignore_index=1, weight=[0.1, 0.2, 0.3], scale=3.0), True),
    "sum": (lambda: sf.CrossEntropy(reduction="sum"), True),
    "square": (sf.Square, False),
    "entries": (lambda: sf.Square(reduction="entries"), False),
    "row": (lambda: Huber(reduction="row"), False),
    "logistic": (lambda: BinaryCrossEntropy(pos_weight=[1.0, 2.0, 3.0]), False),
    "poisson": (lambda: Poisson(scale=0.5), False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_give_what_all_data_give(name: str, shuffle: bool) -> None:
    build, classes = LOSSES[name]
    model, (x, y) = _model(), _data()
    targets = y if classes else torch.rand(50, 3)
    loader = DataLoader(TensorDataset(x, targets), batch_size=16, shuffle=shuffle)
    whole = sf.evaluate(model, x, build().bound_to(targets))
    parts = sf.evaluate(model, loader, build())
    assert abs(whole.value - parts.value) <= whole.error + parts.error
    assert parts.error < 3 * whole.error
    valuer = StreamedValuer(model, loader, build())
    wide = {path: value.detach().double().requires_grad_() for path, value in model.named_parameters()}
    outputs = torch.func.functional_call(model, wide, x.double())
    slopes = torch.autograd.grad(build()(outputs, targets), list(wide.values()))
    for _ in range(2):
        found = valuer.evaluate(derivatives=True)
        assert (found.batches, found.samples) == (4, 50)
        assert found.gradient is not None
        for path, slope in zip(wide, slopes, strict=True):
            assert torch.allclose(found.gradient[path], slope, rtol=1e-11, atol=1e-14)
        forward = valuer.evaluate({path: value.detach() for path, value in wide.items()})
        assert forward.gradient is None
        assert abs(forward.evaluation.value - whole.value) <= forward.evaluation.error + whole.error


def test_batches_of_one_shape_share_their_operations() -> None:
    model, (x, y) = _model(), _data()
    batches = [(x[:10] * scale, y[:10]) for scale in (1e-3, 1.0, 30.0, 0.0)] + [(x[10:], y[10:])]
    valuer = StreamedValuer(model, batches, sf.CrossEntropy())
    for _ in range(2):
        found = valuer.evaluate(derivatives=True).evaluation
    whole = sf.evaluate(
        model, torch.cat([b[0] for b in batches]), sf.CrossEntropy(torch.cat([b[1] for b in batches]))
    )
    assert abs(found.value - whole.value) <= found.error + whole.error
    assert len(valuer._valuers) == 2


def test_a_batch_of_ignored_samples_counts_for_nothing() -> None:
    model, (x, y) = _model(), _data()
    loss = sf.CrossEntropy(ignore_index=1)
    with_it = sf.evaluate(model, [(x, y), (x, torch.ones_like(y))], loss)
    without = sf.evaluate(model, x, loss.bound_to(y))
    assert abs(with_it.value - without.value) <= with_it.error + without.error
    with pytest.raises(ObjectiveError, match="no sample of the loader has a weight"):
        sf.evaluate(model, [(x, torch.ones_like(y))], loss)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.linear(first * second)


def test_inputs_may_be_several_or_have_names() -> None:
    model, (x, y) = _Two(), _data()
    whole = sf.evaluate(model, (x, x + 1), sf.CrossEntropy(y))
    pairs = [((x[k], x[k] + 1), y[k]) for k in (slice(0, 20), slice(20, 50))]
    named = [({"first": x[k], "second": x[k] + 1}, y[k]) for k in (slice(0, 20), slice(20, 40))]
    named += [({"second": x[40:] + 1, "first": x[40:]}, y[40:])]
    for batches in (pairs, named):
        found = sf.evaluate(model, batches, sf.CrossEntropy())
        assert abs(found.value - whole.value) <= found.error + whole.error


class _Noisy:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_pass_sees_samples_in_another_order_as_the_same_and_other_samples_as_others(dtype: torch.dtype) -> None:
    x, y = torch.randn(6, 4, dtype=dtype), torch.arange(6) % 3
    order = torch.tensor([5, 3, 1, 0, 2, 4])
    assert digest(x, y) == digest(x[order], y[order])
    assert (digest(x, y) - digest(x[:2], y[:2]) - digest(x[2:], y[2:])) % 2**64 == 0
    assert digest(x, y) == digest(torch.cat([x, torch.zeros_like(x)], dim=1), y)
    flipped, turned = x.clone(), x.clone()
    flipped[2] = x[2].flip(0)  # as images are at random
    turned[3] = -x[3]
    others = [(flipped, y), (turned, y), (-x, y), (x[order], y), (x, y.roll(1)), (x.roll(1, dims=1), y)]
    assert len({digest(*batch) % 2**64 for batch in [(x, y), *others]}) == 1 + len(others)


def test_a_loader_that_flips_its_samples_at_random_is_refused() -> None:
    class Flips:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            x, y = _data()
            self.passes = getattr(self, "passes", 0) + 1
            yield x if self.passes % 2 else x.flip(1), y

    valuer = StreamedValuer(_model(), Flips(), sf.CrossEntropy())
    valuer.evaluate()
    with pytest.raises(EvaluationError, match="other numbers than in the first pass"):
        valuer.evaluate()


def test_refusals() -> None:
    model, (x, y) = _model(), _data()
    plain, batches = sf.CrossEntropy(), [(x, y), (x, y)]
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (EvaluationError, "no batches", lambda: sf.evaluate(model, [], plain)),
        (CaptureError, "batch 1 of the loader", lambda: sf.evaluate(model, [(x, y), (x * torch.nan, y)], plain)),
        (ObjectiveError, "batch 1 of the loader: class", lambda: sf.evaluate(model, [(x, y), (x, y - 1)], plain)),
        (ObjectiveError, "batch 0 of the loader: .*3 classes", lambda: sf.evaluate(model, [(x, y + 1)], plain)),
        (ObjectiveError, "bring their own", lambda: sf.evaluate(model, batches, sf.CrossEntropy(y))),
        (ObjectiveError, "mean over samples", lambda: sf.evaluate(model, batches, nn.Flatten())),
        (EvaluationError, "only once", lambda: sf.evaluate(model, iter(batches), plain)),
        (EvaluationError, "batch 1 is a Tensor", lambda: sf.evaluate(model, [(x, y), x], plain)),
        (EvaluationError, "batch 0 is 3 things", lambda: sf.evaluate(model, [(x, y, "z")], plain)),
        (ObjectiveError, "a row for each sample", lambda: sf.evaluate(
            model, batches, BinaryCrossEntropy(weight=torch.ones(50, 3)))),
        (EvaluationError, "batch normalisation", lambda: sf.evaluate(
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), batches, plain)),
        (EvaluationError, "leaves some out", lambda: sf.evaluate(
            model, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True), plain)),
    ]  # fmt: skip
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    valuer = StreamedValuer(model, _Noisy(), plain)
    valuer.evaluate()
    with pytest.raises(EvaluationError, match="other numbers than in the first pass"):
        valuer.evaluate()


def test_batch_normalisation_with_running_statistics_is_fine() -> None:
    x, y = _data()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    found = sf.evaluate(model, [(x[:9], y[:9]), (x[9:], y[9:])], sf.CrossEntropy())
    whole = sf.evaluate(model, x, sf.CrossEntropy(y))
    assert abs(found.value - whole.value) <= found.error + whole.error


def test_nothing_is_warned_of() -> None:
    model, (x, y) = _model(), _data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.evaluate(model, [(x, y)], sf.CrossEntropy())
