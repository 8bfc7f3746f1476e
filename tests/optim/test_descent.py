"""Certified descent: every step descends by what it promised, whatever network, mode and type."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.guarantees import GuaranteeError
from surefoot.optim import CertifiedDescent


def data(count: int = 40, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 5, generator=generator, dtype=dtype)
    return x, (x[:, 0] + 0.5 * x[:, 1].square() > 0.3).long() + (x[:, 2] > 1).long()


def perceptron(
    activation: type[nn.Module] = nn.Tanh, depth: int = 3, dtype: torch.dtype = torch.float64
) -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(5, 12), activation()]
    for _ in range(depth - 2):
        layers += [nn.Linear(12, 12), activation()]
    return nn.Sequential(*layers, nn.Linear(12, 3)).to(dtype)


def run(optimizer: CertifiedDescent, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[float]:
    return [optimizer.step(x, y) for _ in range(steps)] + [optimizer.value(x, y)]


def assert_kept(optimizer: CertifiedDescent, final: float, relative: float = 1e-12) -> None:
    """Every promise was kept, up to the round-off of two losses."""
    losses = [record.loss for record in optimizer.history] + [final]
    for record, after in zip(optimizer.history, losses[1:], strict=True):
        assert record.promised_decrease > 0
        assert record.radius > 0
        assert record.loss - after >= record.promised_decrease - relative * (1 + record.loss), record


@pytest.mark.parametrize("mode", ["segment", "ball", "blocks"])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU])
def test_every_promise_is_kept(mode, activation):
    x, y = data()
    optimizer = CertifiedDescent(perceptron(activation), sf.CrossEntropy(), proof=mode)
    losses = run(optimizer, x, y, 40 if mode == "segment" else 6)
    assert_kept(optimizer, losses[-1])
    assert losses[-1] < (0.3 if mode == "segment" else 1) * losses[0]


@pytest.mark.parametrize("direction", ["gradient", "conjugate"])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_orders_and_directions(direction, order):
    x, y = data()
    optimizer = CertifiedDescent(
        perceptron(depth=4), sf.CrossEntropy(), direction=direction, order=order, proof="segment"
    )
    losses = run(optimizer, x, y, 25)
    assert_kept(optimizer, losses[-1])
    assert losses[-1] < 0.9 * losses[0]


def test_conjugate_directions_need_fewer_steps():
    x, y = data()
    final = {
        direction: run(
            CertifiedDescent(perceptron(), sf.CrossEntropy(), direction=direction, proof="segment"), x, y, 60
        )[-1]
        for direction in ("gradient", "conjugate")
    }
    assert final["conjugate"] < final["gradient"]


def test_a_convolutional_network_with_shared_weights_and_a_residual():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm, self.last = nn.GroupNorm(2, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = nn.functional.softplus(self.first(x))
            h = h + torch.tanh(self.second(h))
            h = h + torch.tanh(self.second(h))
            return self.last(self.norm(h).mean((2, 3)))

    torch.manual_seed(0)
    model, x = Network().double(), torch.randn(12, 1, 6, 6, dtype=torch.float64)
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    losses = run(optimizer, x, torch.arange(12) % 3, 12)
    assert_kept(optimizer, losses[-1])


def test_single_precision_descends_up_to_its_round_off():
    x, y = data(dtype=torch.float32)
    model = perceptron(dtype=torch.float32)
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof="segment")
    losses = run(optimizer, x, y, 60)
    assert_kept(optimizer, losses[-1], relative=1e-5)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("mode", ["segment", "ball"])
def test_a_resumed_run_is_the_same_run(mode):
    x, y = data()
    model = perceptron()
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof=mode)
    run(optimizer, x, y, 3)
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    twin = perceptron()
    twin.load_state_dict(saved["model"])
    resumed = CertifiedDescent(twin, sf.CrossEntropy(), proof=mode)
    resumed.load_state_dict(saved["optimizer"])
    assert [record.loss for record in resumed.history] == [record.loss for record in optimizer.history]
    first, second = run(optimizer, x, y, 3), run(resumed, x, y, 3)
    # norms of layers are refreshed when they are loose, so the two may rest on slightly different constants
    assert first == pytest.approx(second, rel=0.02)


def test_mini_batches_descend_each_on_its_own_and_say_so():
    x, y = data(60)
    optimizer = CertifiedDescent(perceptron(), sf.CrossEntropy(), proof="segment")
    for k in range(6):
        batch = slice(20 * (k % 3), 20 * (k % 3) + 20)
        before = optimizer.step(x[batch], y[batch])
        assert optimizer.value(x[batch], y[batch]) <= before - optimizer.history[-1].promised_decrease + 1e-12
    assert "mini-batch" in optimizer.guarantee
    assert "nothing is proved" in optimizer.guarantee


def test_the_anytime_bound_holds():
    x, y = data()
    optimizer = CertifiedDescent(perceptron(), sf.CrossEntropy(), proof="segment")
    run(optimizer, x, y, 30)
    found = optimizer.stationarity()
    assert 0 < found.smallest <= found.bound


@pytest.mark.parametrize("mode", ["segment", "ball", "blocks"])
def test_kinks_are_refused_and_nothing_is_lost(mode):
    x, y = data()
    model = perceptron(nn.ReLU)
    with torch.no_grad():
        model[0].bias.zero_()  # with inputs of zero, every unit is at its kink
    before = copy.deepcopy(model.state_dict())
    optimizer = CertifiedDescent(model, sf.CrossEntropy(), proof=mode)
    with pytest.raises(GuaranteeError, match=r"surefoot\.smooth"):
        optimizer.step(x * 0, y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.history == []


def test_at_a_stationary_point_no_step_is_taken():
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    optimizer = CertifiedDescent(model, sf.Square(), proof="segment")
    assert optimizer.step(torch.ones(4, 3).double(), torch.zeros(4, 2).double()) == 0.0
    assert optimizer.history[0].step_size == 0.0
    assert "zero" in optimizer.history[0].note


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"proof": "line"}, "proof"),
        ({"direction": "up"}, "direction"),
        ({"proof": "ball", "direction": "conjugate"}, "ball"),
        ({"order": 7}, "coefficients"),
    ],
)
def test_unknown_options_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        CertifiedDescent(perceptron(), sf.CrossEntropy(), **options)
