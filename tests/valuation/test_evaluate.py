"""``surefoot.evaluate``: how sharp it is, what it does at kinks, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.errors import CaptureError, ObjectiveError, UnsupportedOperation
from surefoot.valuation.valuer import Evaluation, EvaluationError, Valuer


def digits() -> tuple[Tensor, Tensor]:
    data = sf.data.digits()
    return data.x[:400].double().reshape(400, 64), data.y[:400]


def layers(depth: int, activation: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(depth - 1):
        parts += [nn.Linear(64, 64), activation()]
    return nn.Sequential(*parts, nn.Linear(64, 10)).double()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.ReLU, nn.Softplus])
def test_depth_does_not_multiply_the_error(activation: type[nn.Module]) -> None:
    x, y = digits()
    errors = {k: sf.evaluate(layers(k, activation), x, sf.CrossEntropy(y)).error for k in (2, 3, 8, 32)}
    assert errors[2] < 1e-11
    assert max(errors.values()) < 2 * errors[2]


def test_normalisations_and_attention_are_sharp() -> None:
    x, y = digits()
    encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True, activation="gelu")
    torch.manual_seed(0)
    models = {
        "encoder": nn.Sequential(
            nn.Unflatten(1, (8, 8)),
            nn.Linear(8, 16),
            nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            nn.Flatten(),
            nn.Linear(128, 10),
        ),
        "batch": nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 10),
        ),
        "layer": nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10)),
    }
    for name, model in models.items():
        found = sf.evaluate(model.double(), x, sf.CrossEntropy(y))
        assert found.error < 1e-10, name
        assert abs(found.value - float(sf.CrossEntropy(y)(model(x)).detach())) <= found.error + 1e-14


@pytest.mark.parametrize("kind", ["zeros", "ties", "pool"])
def test_kinks_that_are_met_exactly(kind: str) -> None:
    """The value is as good as elsewhere: a kink makes costates uncertain at these entries alone."""
    x = torch.ones(4, 1, 4, 4, dtype=torch.float64)
    if kind == "zeros":
        model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))
        nn.init.zeros_(model[1].weight)
    elif kind == "ties":
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.MaxPool1d(2), nn.Linear(4, 2))
        nn.init.ones_(model[1].weight)
        nn.init.ones_(model[1].bias)
    else:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2))
    found = sf.evaluate(model.double(), x, sf.CrossEntropy(torch.tensor([0, 1, 0, 1])))
    assert found.error < 1e-12 * max(1.0, found.value)


def test_losses_below_round_off_have_values() -> None:
    """Torch returns zero for log(1 + e^-40)."""
    model = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[20.0], [-20.0]]))
    found = sf.evaluate(model, torch.ones(1, 1).double(), sf.CrossEntropy(torch.tensor([0])))
    assert found.value == pytest.approx(math.exp(-40), rel=1e-12)
    assert 0 < found.lower < found.value < found.upper


def test_values_at_other_weights_use_what_is_known() -> None:
    x, y = digits()
    model = layers(3, nn.Tanh)
    valuer = Valuer.of(model, x, sf.CrossEntropy(y))
    weights = dict(model.named_parameters())
    first = valuer.enclosed(valuer.run(weights))
    for factor in (1.0, 1.01, 1.5, 3.0, 0.0):
        moved = {path: value.detach() * factor for path, value in weights.items()}
        run = valuer.run(moved)
        found, forward = valuer.enclosed(run), valuer.enclosed(valuer.run(moved, derivatives=False))
        assert found.error < 40 * first.error
        assert abs(found.value - forward.value) <= found.error + forward.error
        fresh = torch.func.functional_call(
            model, {path: value.requires_grad_() for path, value in moved.items()}, x
        )
        slopes = torch.autograd.grad(sf.CrossEntropy(y)(fresh), list(moved.values()))
        for path, slope in zip(moved, slopes, strict=True):
            assert torch.allclose(valuer.gradient(run)[path], slope, rtol=1e-10, atol=1e-14)


def test_an_evaluation_prints_and_rounds_outwards() -> None:
    found = Evaluation(1.0, 2.0**-60)
    assert found.lower < 1.0 < found.upper
    assert str(found) == "1 ± 8.8e-19"


def test_refusals_say_what_was_met() -> None:
    x, y = torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    huge = nn.Linear(3, 2).double()
    with torch.no_grad():
        huge.weight.fill_(1e308)
    with pytest.raises(EvaluationError, match="objective is"):
        sf.evaluate(huge, x, sf.Square(torch.zeros(2, 2).double()))
    jump = nn.Sequential(nn.Linear(3, 2), nn.Softplus(threshold=0.5)).double()
    with pytest.raises(EvaluationError, match=r"'aten\.softplus' in module '1' is too steep"):
        sf.evaluate(jump, x, sf.CrossEntropy(y))
    with pytest.raises(ObjectiveError, match="no targets"):
        sf.evaluate(nn.Linear(3, 2).double(), x, sf.CrossEntropy())
    with pytest.raises(CaptureError, match="dropout"):
        sf.evaluate(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), x.float(), sf.CrossEntropy(y))

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(self.linear(x))

    with pytest.raises(UnsupportedOperation, match="bessel_j0"):
        sf.evaluate(Unknown().double(), x, sf.CrossEntropy(y))


class Gated(nn.Linear):
    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__(3, 2)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate(super().forward(x))


@pytest.mark.parametrize(
    ("gate", "what"),
    [
        (lambda z: (10 * z).int()[None][0], "whole numbers"),
        (lambda z: (z > 0).int()[None][0], "jumps"),
        (lambda z: nn.functional.one_hot(z.argmax(dim=1), 2), "jumps"),
    ],
)
def test_whole_numbers_that_vary_and_are_moved_around_are_refused(
    gate: Callable[[Tensor], Tensor], what: str
) -> None:
    with pytest.raises(UnsupportedOperation, match=what):
        sf.evaluate(Gated(gate).double(), torch.randn(4, 3).double(), sf.CrossEntropy(torch.arange(4) % 2))


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sf.evaluate(model, torch.randn(5, 3), sf.CrossEntropy(torch.tensor([0, 1, 0, 1, 1])))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("function", [torch.exp, lambda z: torch.exp(z) * torch.cos(z), torch.cosh, torch.sinh])
def test_steep_functions_are_looked_at_where_they_are(function) -> None:
    torch.manual_seed(0)

    class Steep(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x))

    model, x = Steep(6, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    found = sf.evaluate(model, x, sf.Square(torch.zeros(4, 6, dtype=torch.float64)))
    assert found.value == pytest.approx(float((model(x).detach() ** 2).sum() / 8), rel=1e-12)
    assert found.error < 1e-10


@pytest.mark.parametrize("square", [lambda z: z * z, lambda z: z**2, torch.square])
def test_squares_are_as_steep_as_their_largest_entry(square) -> None:
    """Slopes of a network in its input, written out, on so many points that norms are far above entries."""
    torch.manual_seed(0)

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(1, 16), *(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 1)]
            )

        def forward(self, x: Tensor) -> Tensor:
            slope = torch.ones_like(x)
            for layer in self.layers[:-1]:
                x = torch.tanh(layer(x))
                slope = (1 - square(x)) * nn.functional.linear(slope, layer.weight)
            return nn.functional.linear(slope, self.layers[-1].weight)

    model, x = Slope().double(), torch.rand(300, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert sf.evaluate(model, x, sf.Square(torch.cos(x))).error < 1e-11


def test_a_first_pass_keeps_what_rules_ask_for_and_no_more() -> None:
    """The results of layers in front of gentle functions are dropped, and known by their norms."""
    torch.manual_seed(0)
    gentle = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    steep = nn.Sequential(nn.Linear(3, 8), nn.ELU(1e9), nn.Linear(8, 2)).double()
    x, objective = torch.randn(5, 3).double(), sf.CrossEntropy(torch.arange(5) % 2)
    for model, dropped in ((gentle, 2), (steep, 0)):
        valuer = Valuer.of(model, x, objective)
        run = valuer.run(dict(model.named_parameters()))
        gone = [node.name for node in valuer.tape.varying if node.name not in run.values]
        assert len(gone) == dropped
        assert all(run.sizes[name] > 0 for name in gone)
        assert valuer.enclosed(run).error < 1e-5
