"""Smooth counterparts of modules with kinks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot import zoo
from surefoot.certifying import certify
from surefoot.smoothing import LeakySoftplus, NotSmooth, SoftClamp, smooth

GRID = torch.linspace(-12.0, 12.0, 4801, dtype=torch.float64)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_smooth_vgg_is_the_one_of_the_zoo(device: str) -> None:
    options = {} if device == "meta" else zoo.small_options("vgg16")
    with torch.device(device):
        torch.manual_seed(0)
        made = smooth(zoo.build("vgg16", **options))
        torch.manual_seed(0)
        expected = zoo.build("vgg16-smooth", **options)
    assert repr(made) == repr(expected)
    shapes = {path: (value.shape, value.device) for path, value in made.named_parameters()}
    assert shapes == {path: (value.shape, value.device) for path, value in expected.named_parameters()}
    if device == "cpu":
        x = zoo.example_input("vgg16", **options)
        torch.testing.assert_close(made(x), expected(x), rtol=0, atol=0)
        smooth(zoo.build("vgg16", **options), x)  # nothing with a kink is left


def test_the_original_stays_and_sharing_survives() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(
        nn.Linear(2, 2), shared, nn.Sequential(nn.Linear(2, 2), shared), shared, nn.PReLU()
    ).eval()
    model[2][0].weight = model[0].weight
    before, weight = repr(model), model[0].weight
    made = smooth(model)
    assert repr(model) == before
    assert model[0].weight is weight
    assert made[0].weight is made[2][0].weight is not weight
    torch.testing.assert_close(made[0].weight, weight, rtol=0, atol=0)
    assert isinstance(made[1], nn.Softplus)
    assert made[1] is made[2][1] is made[3]
    assert not any(module.training for module in made.modules())
    assert all(module.training for module in smooth(model.train()).modules())
    assert isinstance(smooth(shared), nn.Softplus)
    named = nn.ModuleDict({"act": nn.ReLU(), "pool": nn.MaxPool2d(2)})
    kinds = {name: type(module) for name, module in smooth(named).items()}
    assert kinds == {"act": nn.Softplus, "pool": nn.AvgPool2d}
    plain = nn.Sequential(
        nn.ELU(), nn.CELU(0.5), nn.GELU(), nn.Softsign(), nn.Softplus(3.0), nn.BatchNorm1d(2), nn.Dropout(0.2)
    )
    assert repr(smooth(plain)) == repr(plain)


@pytest.mark.parametrize(
    ("module", "distance"),
    [
        (nn.ReLU(), math.log(2)),
        (nn.LeakyReLU(0.2), 0.8 * math.log(2)),
        (nn.LeakyReLU(-1.0), 2 * math.log(2)),
        (nn.PReLU(init=0.3), 0.7 * math.log(2)),
        (nn.ReLU6(), math.log(2)),
        (nn.Hardtanh(-1.0, 2.0), math.log(2)),
        (nn.Hardswish(), 0.15),
        (nn.Hardsigmoid(), 0.07),
    ],
)
def test_counterparts_are_near_and_smooth(module: nn.Module, distance: float) -> None:
    made = smooth(module.double())
    with torch.no_grad():
        gap = (made(GRID) - module(GRID)).abs()
    assert 0.5 * distance < float(gap.max()) <= distance
    slopes = torch.func.vmap(torch.func.grad(made))(GRID).detach()
    step = float(GRID[1] - GRID[0])
    assert float(slopes.diff().abs().max()) < 0.6 * step  # a kink would jump by a multiple of one
    x = torch.randn(5, 3, dtype=torch.float64)
    assert certify(nn.Sequential(nn.Linear(3, 4).double(), made), x).smoothness.is_finite


def test_slopes_and_limits_far_from_the_kinks() -> None:
    leaky, clamp = smooth(nn.LeakyReLU(0.25)), smooth(nn.ReLU6())
    assert isinstance(leaky, LeakySoftplus)
    assert isinstance(clamp, SoftClamp)
    for at, slope, value in ((-60.0, 0.25, 0.0), (60.0, 1.0, 6.0)):
        assert float(torch.func.grad(leaky)(torch.tensor(at))) == pytest.approx(slope)
        assert float(clamp(torch.tensor(at))) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 4, 4)])
def test_parametric_slopes_follow_the_channels(shape: tuple[int, ...]) -> None:
    channels = shape[1] if len(shape) > 1 else 1
    original = nn.PReLU(channels)
    original.weight.data = torch.linspace(0.1, 0.9, channels)
    made = smooth(original)
    assert isinstance(made, LeakySoftplus)
    x = torch.full(shape, 40.0)
    for far in (x, -x):
        torch.testing.assert_close(made(far), original(far), rtol=0, atol=1e-5)
    made(x).sum().backward()
    assert made.weight.grad is not None
    assert original.weight.grad is None
    model = nn.Sequential(nn.Linear(3, channels), original, nn.Linear(channels, 2))
    assert certify(smooth(model), torch.randn(5, 3)).smoothness.is_finite


@pytest.mark.parametrize(
    ("module", "expected", "shape"),
    [
        (nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(3, 2, 1), (2, 3, 9)),
        (nn.MaxPool2d(2), nn.AvgPool2d(2), (2, 3, 7, 7)),
        (
            nn.MaxPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True),
            nn.AvgPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True),
            (2, 3, 8, 7),
        ),
        (nn.MaxPool3d(2, ceil_mode=True), nn.AvgPool3d(2, ceil_mode=True), (1, 2, 5, 5, 5)),
        (nn.AdaptiveMaxPool1d(3), nn.AdaptiveAvgPool1d(3), (2, 3, 9)),
        (nn.AdaptiveMaxPool2d((2, None)), nn.AdaptiveAvgPool2d((2, None)), (2, 3, 8, 7)),
        (nn.AdaptiveMaxPool3d(1), nn.AdaptiveAvgPool3d(1), (1, 2, 5, 5, 5)),
    ],
)
def test_pooling_over_the_same_patches(module: nn.Module, expected: nn.Module, shape: tuple[int, ...]) -> None:
    made, x = smooth(module), torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    assert repr(made) == repr(expected)
    assert made(x).shape == module(x).shape
    torch.testing.assert_close(made(x), expected(x), rtol=0, atol=0)


def test_a_subclass_counts_as_its_parent_unless_it_has_its_own_forward() -> None:
    class Renamed(nn.ReLU):
        pass

    class Squared(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    assert [type(module) for module in smooth(nn.Sequential(Renamed(), Squared()))] == [nn.Softplus, Squared]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ELU(0.5), "ELU with α = 0.5 has a kink at zero: use CELU"),
        (nn.SELU(), "SELU has a kink at zero: use CELU"),
        (nn.RReLU(), "RReLU draws random slopes"),
        (nn.Hardshrink(), "Hardshrink jumps"),
        (nn.Softshrink(), "Softshrink has kinks"),
        (nn.Threshold(0.1, 0.0), "Threshold jumps"),
        (nn.LPPool2d(2, 2), "LPPool2d has no derivative at zero"),
        (nn.FractionalMaxPool2d(2, 3), "FractionalMaxPool2d draws random patches"),
        (nn.MaxUnpool2d(2), "MaxUnpool2d needs the indices of maxima"),
        (nn.MaxPool2d(2, return_indices=True), "the indices of maxima that it returns"),
        (nn.AdaptiveMaxPool2d(2, return_indices=True), "the indices of maxima that it returns"),
        (nn.MaxPool2d(2, dilation=2), "average pooling has no dilation, and here it is 2"),
        (nn.MaxPool2d(2, dilation=(1, 2)), "average pooling has no dilation"),
    ],
)
def test_modules_without_a_counterpart_are_named_and_nothing_changes(module: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module), nn.ReLU())
    before = repr(copy.deepcopy(model))
    with pytest.raises(NotSmooth, match=rf"module '1\.0': {message}"):
        smooth(model)
    assert repr(model) == before


def test_all_modules_without_a_counterpart_are_named() -> None:
    with pytest.raises(NotSmooth, match=r"module '0': SELU.*\n.*module '2': RReLU"):
        smooth(nn.Sequential(nn.SELU(), nn.ReLU(), nn.RReLU()))


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"), (F.hardtanh, "hardtanh"), (torch.abs, "abs"), (lambda x: x.clamp(min=0.1), "clamp"),
        (lambda x: x.amax(dim=1), "amax"), (lambda x: torch.maximum(x, 2 * x), "maximum"),
        (lambda x: F.max_pool1d(x, 3), "max_pool1d"), (lambda x: F.elu(x, 0.5), "elu"),
        (F.normalize, "linalg_vector_norm"), (F.hardswish, "hardswish"), (F.hardsigmoid, "hardsigmoid"),
        (F.relu6, "(relu6|hardtanh)"), (F.selu, "(selu|elu)"), (F.leaky_relu, "leaky_relu"),
        (F.softshrink, "softshrink"), (F.hardshrink, "hardshrink"),
        (lambda x: F.threshold(x, 0.1, 0.0), "threshold"), (torch.sign, "sign"), (torch.floor, "floor"),
    ],
)  # fmt: skip
def test_functions_with_kinks_are_seen_with_an_example_input(function: Callable[..., Any], name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Calls(function))
    assert repr(smooth(model)) == repr(model)  # not seen without an input
    for device in ("cpu", "meta") if function is F.relu else ("cpu",):
        with pytest.raises(NotSmooth, match=rf"called as functions(.|\n)*module '1': {name}"):
            smooth(model.to(device), torch.ones(2, 3, device=device))


@pytest.mark.parametrize(
    "function",
    [F.softplus, F.elu, lambda x: F.celu(x, 0.3), F.gelu, F.silu, torch.tanh, lambda x: x.softmax(dim=1)],
)
def test_smooth_functions_are_accepted(function: Callable[..., Any]) -> None:
    smooth(nn.Sequential(nn.Linear(3, 3), Calls(function)), torch.ones(2, 3))
