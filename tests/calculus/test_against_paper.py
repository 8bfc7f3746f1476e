"""Where the paper's own constants are sound, the certified ones are never larger."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from surefoot.certifying import certify
from surefoot.domains import Ball, ProductBall
from surefoot.zoo import build, example_input

TOLERANCE = 1e-9  # the two are computed along different paths in rounded-up arithmetic


def mlp(activation: type[nn.Module], depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(6, 6), activation()]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def convolutional(activation: type[nn.Module], pooling: nn.Module) -> nn.Module:
    """Without intercepts: theirs is one of the paper's constants that is not a bound."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        activation(),
        pooling,
        nn.Conv2d(4, 3, 3, stride=2, bias=False),
        activation(),
        nn.Flatten(),
        nn.Linear(3, 4),
        nn.Softmax(-1),
    )


class Residual(nn.Module):
    """x_t = a(b(x_{t-1}) + x_{t-2}), without a bound on the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, now = x, nn.functional.softplus(self.layers[0](x))
        for layer in self.layers[1:]:
            before, now = now, nn.functional.softplus(layer(now) + before)
        return now


MODELS = {
    **{
        f"mlp-{activation.__name__}-{depth}": (lambda a=activation, d=depth: mlp(a, d), (4, 6))
        for activation, depth in itertools.product((nn.ReLU, nn.Softplus, nn.Sigmoid), (1, 3))
    },
    "conv-average": (lambda: convolutional(nn.Softplus, nn.AvgPool2d(2)), (3, 2, 8, 8)),
    "conv-max": (lambda: convolutional(nn.ReLU, nn.MaxPool2d(2)), (3, 2, 8, 8)),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.Softplus(), nn.BatchNorm1d(5, eps=0.1, affine=False), nn.Linear(5, 2)
        ),
        (7, 6),
    ),
}
DOMAINS = {
    "origin": {"domain": ProductBall(1.0)},
    "wide": {"domain": ProductBall(3.0)},
    "centred": {"domain": ProductBall(0.1, center="present")},
    "point": {"domain": ProductBall(0.0, center="present")},
    "ball": {"domain": Ball(0.5)},
    "input": {"domain": Ball(0.5, center="origin"), "wrt": "input"},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", DOMAINS)
def test_certified_is_at_most_the_paper(name: str, where: str) -> None:
    torch.manual_seed(0)
    build_model, shape = MODELS[name]
    model, x = build_model().double(), torch.randn(shape, dtype=torch.float64)
    printed = certify(model, x, constants="paper", **DOMAINS[where])
    assert not printed.flags
    certified = certify(model, x, **DOMAINS[where])
    for quantity in ("bound", "lipschitz", "smoothness"):
        ours, theirs = getattr(certified, quantity), getattr(printed, quantity)
        assert ours <= theirs * (1 + TOLERANCE), f"{quantity}: {ours} > {theirs}"


def test_certified_is_at_most_the_paper_without_data() -> None:
    with torch.device("meta"):
        model, x = mlp(nn.Softplus, 4), torch.empty(16, 6)
    printed = certify(model, x, input_norm=1.0, constants="paper")
    certified = certify(model, x, input_norm=1.0)
    assert certified.lipschitz <= printed.lipschitz
    assert certified.smoothness <= printed.smoothness
    assert certified.bound <= printed.bound * (1 + TOLERANCE)


@pytest.mark.parametrize("depth", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_layers_have_a_number(depth: int) -> None:
    layers = itertools.chain.from_iterable((nn.Linear(3, 3), nn.Softplus()) for _ in range(depth))
    with torch.device("meta"):
        model, x = nn.Sequential(*layers), torch.empty(2, 3)
    for constants in ("certified", "paper"):
        certificate = certify(model, x, domain=ProductBall(20.0), input_norm=1.0, constants=constants)
        assert certificate.lipschitz.is_finite
        assert certificate.smoothness.is_finite
        assert float(certificate.lipschitz) == float("inf")  # beyond the range of a double
        exponent = str(certificate.lipschitz).partition("e+")[2]
        assert int(exponent) > depth


@pytest.mark.parametrize("name", ["vgg16", "vgg16-smooth", "vgg16-batchnorm"])
def test_the_paper_flags_its_convolutions(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    printed = certify(model, example_input(name, device="meta"), input_norm=1.0, constants="paper")
    assert any("intercept" in flag or "bias" in flag for flag in printed.flags)
