"""Smooth counterparts of modules with kinks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot import zoo
from surefoot.certifying import certify
from surefoot.smoothing import LeakySoftplus, NotSmooth, SoftClamp, smooth

GRID = torch.linspace(-12.0, 12.0, 4801, dtype=torch.float64)


class TestVGG:
    """The paper's smooth VGG."""

    @pytest.mark.parametrize("device", ["meta", "cpu"])
    def test_it_is_the_one_of_the_zoo(self, device):
        options = {} if device == "meta" else zoo.small_options("vgg16")
        with torch.device(device):
            made = smooth(zoo.build("vgg16", **options))
            expected = zoo.build("vgg16-smooth", **options)
        assert repr(made) == repr(expected)
        kinds = [(path, type(module)) for path, module in made.named_modules()]
        assert kinds == [(path, type(module)) for path, module in expected.named_modules()]
        shapes = {path: (value.shape, value.device) for path, value in made.named_parameters()}
        assert shapes == {path: (value.shape, value.device) for path, value in expected.named_parameters()}

    def test_it_computes_the_same(self):
        options = zoo.small_options("vgg16")
        torch.manual_seed(0)
        made = smooth(zoo.build("vgg16", **options).double())
        torch.manual_seed(0)
        expected = zoo.build("vgg16-smooth", **options).double()
        x = zoo.example_input("vgg16", dtype=torch.float64, **options)
        torch.testing.assert_close(made(x), expected(x), rtol=0, atol=0)

    def test_nothing_with_a_kink_is_left(self):
        options = zoo.small_options("vgg16")
        smooth(zoo.build("vgg16", **options), zoo.example_input("vgg16", **options))


class TestCopy:
    """The original is untouched, sharing survives."""

    def test_original_is_untouched(self):
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.MaxPool1d(3)))
        before, weight = repr(model), model[0].weight
        made = smooth(model)
        assert repr(model) == before
        assert model[0].weight is weight
        assert made[0].weight is not weight
        torch.testing.assert_close(made[0].weight, weight, rtol=0, atol=0)

    def test_shared_modules_stay_shared(self):
        shared = nn.ReLU()
        model = nn.Sequential(nn.Linear(2, 2), shared, nn.Sequential(nn.Linear(2, 2), shared), shared)
        made = smooth(model)
        assert isinstance(made[1], nn.Softplus)
        assert made[1] is made[2][1] is made[3]

    def test_tied_weights_stay_tied(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        model[2].weight = model[0].weight
        made = smooth(model)
        assert made[2].weight is made[0].weight

    def test_training_mode_is_kept(self):
        model = nn.Sequential(nn.ReLU(), nn.PReLU()).eval()
        assert not any(module.training for module in smooth(model).modules())
        assert all(module.training for module in smooth(model.train()).modules())

    def test_the_model_itself_may_be_replaced(self):
        assert isinstance(smooth(nn.ReLU()), nn.Softplus)

    def test_containers_keep_their_names(self):
        model = nn.ModuleDict({"act": nn.ReLU(), "pool": nn.MaxPool2d(2)})
        assert {name: type(module) for name, module in smooth(model).items()} == {
            "act": nn.Softplus,
            "pool": nn.AvgPool2d,
        }

    def test_smooth_modules_stay_the_same_kind(self):
        model = nn.Sequential(
            nn.ELU(), nn.CELU(0.5), nn.GELU(), nn.Softsign(), nn.Softplus(3.0), nn.BatchNorm1d(2), nn.Dropout(0.2)
        )
        assert repr(smooth(model)) == repr(model)


class TestCounterparts:
    """Each counterpart: close to the original, with the slopes and limits that are claimed."""

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
    def test_distance_and_smoothness(self, module, distance):
        made = smooth(module.double())
        with torch.no_grad():
            gap = (made(GRID) - module.double()(GRID)).abs()
        assert 0.5 * distance < float(gap.max()) <= distance
        slopes = torch.func.vmap(torch.func.grad(made))(GRID).detach()
        step = float(GRID[1] - GRID[0])
        assert float(slopes.diff().abs().max()) < 0.6 * step  # a kink would jump by a multiple of one

    @pytest.mark.parametrize(
        "module",
        [nn.ReLU(), nn.LeakyReLU(), nn.PReLU(4), nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid()],
    )
    def test_smoothness_is_certified(self, module):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 2)), torch.randn(5, 3)
        assert certify(smooth(model), x).smoothness.is_finite

    def test_leaky_slopes(self):
        made = smooth(nn.LeakyReLU(0.25))
        assert isinstance(made, LeakySoftplus)
        slope = torch.func.grad(made)
        assert float(slope(torch.tensor(-60.0))) == pytest.approx(0.25)
        assert float(slope(torch.tensor(60.0))) == pytest.approx(1.0)

    def test_clamp_limits(self):
        made = smooth(nn.ReLU6())
        assert isinstance(made, SoftClamp)
        assert float(made(torch.tensor(-50.0))) == pytest.approx(0.0, abs=1e-6)
        assert float(made(torch.tensor(50.0))) == pytest.approx(6.0)

    @pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 5), (2, 3, 4, 4)])
    def test_parametric_slopes_follow_the_channels(self, shape):
        channels = shape[1] if len(shape) > 1 else 1
        original = nn.PReLU(channels)
        original.weight.data = torch.linspace(0.1, 0.9, channels)
        made = smooth(original)
        assert isinstance(made, LeakySoftplus)
        x = torch.full(shape, 40.0)
        for far in (x, -x):  # far from the kink the two agree
            torch.testing.assert_close(made(far), original(far), rtol=0, atol=1e-5)
        made(x).sum().backward()
        assert made.weight.grad is not None
        assert original.weight.grad is None

    @pytest.mark.parametrize(
        ("module", "expected", "shape"),
        [
            (nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(3, 2, 1), (2, 3, 9)),
            (nn.MaxPool2d(2), nn.AvgPool2d(2), (2, 3, 7, 7)),
            (nn.MaxPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True), None, (2, 3, 8, 7)),
            (nn.MaxPool3d(2, ceil_mode=True), nn.AvgPool3d(2, ceil_mode=True), (1, 2, 5, 5, 5)),
            (nn.AdaptiveMaxPool1d(3), nn.AdaptiveAvgPool1d(3), (2, 3, 9)),
            (nn.AdaptiveMaxPool2d((2, None)), nn.AdaptiveAvgPool2d((2, None)), (2, 3, 8, 7)),
            (nn.AdaptiveMaxPool3d(1), nn.AdaptiveAvgPool3d(1), (1, 2, 5, 5, 5)),
        ],
    )
    def test_pooling_over_the_same_patches(self, module, expected, shape):
        made = smooth(module)
        expected = expected or nn.AvgPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True)
        assert repr(made) == repr(expected)
        x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        assert made(x).shape == module(x).shape
        torch.testing.assert_close(made(x), expected(x), rtol=0, atol=0)

    def test_a_subclass_counts_as_its_parent_unless_it_has_its_own_forward(self):
        class Renamed(nn.ReLU):
            pass

        class Squared(nn.ReLU):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) ** 2

        made = smooth(nn.Sequential(Renamed(), Squared()))
        assert [type(module) for module in made] == [nn.Softplus, Squared]


class Functional(nn.Module):
    """Calls a function with a kink inside a submodule."""

    def __init__(self, function=F.relu) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = _Calls(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class _Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TestRefusals:
    """What cannot be replaced is named."""

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
    def test_modules_without_a_counterpart(self, module, message):
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))
        with pytest.raises(NotSmooth, match=rf"module '1\.0': {message}"):
            smooth(model)

    def test_all_of_them_are_named(self):
        with pytest.raises(NotSmooth, match=r"module '0': SELU.*\n.*module '2': RReLU"):
            smooth(nn.Sequential(nn.SELU(), nn.ReLU(), nn.RReLU()))

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (F.relu, "relu"),
            (F.hardtanh, "hardtanh"),
            (torch.abs, "abs"),
            (lambda x: x.clamp(min=0.1), "clamp"),
            (lambda x: x.amax(dim=1), "amax"),
            (lambda x: torch.maximum(x, 2 * x), "maximum"),
            (lambda x: F.max_pool1d(x, 3), "max_pool1d"),
            (lambda x: F.elu(x, 0.5), "elu"),
            (F.normalize, "linalg_vector_norm"),
            (F.hardswish, "hardswish"),
            (F.hardsigmoid, "hardsigmoid"),
            (F.relu6, "(relu6|hardtanh)"),
            (F.selu, "(selu|elu)"),
            (F.leaky_relu, "leaky_relu"),
            (F.softshrink, "softshrink"),
            (F.hardshrink, "hardshrink"),
            (lambda x: F.threshold(x, 0.1, 0.0), "threshold"),
            (torch.sign, "sign"),
            (torch.floor, "floor"),
        ],
    )
    def test_functions_are_found_with_an_example_input(self, function, name):
        model = Functional(function)
        assert repr(smooth(model)) == repr(model)  # not seen without an input
        with pytest.raises(NotSmooth, match=rf"called as functions(.|\n)*module 'second': {name}"):
            smooth(model, torch.ones(2, 3))

    @pytest.mark.parametrize(
        "function",
        [F.softplus, F.elu, lambda x: F.celu(x, 0.3), F.gelu, F.silu, torch.tanh, lambda x: x.softmax(dim=1)],
    )
    def test_smooth_functions_are_accepted(self, function):
        smooth(Functional(function), torch.ones(2, 3))

    def test_on_meta(self):
        with torch.device("meta"), pytest.raises(NotSmooth, match="module 'second': relu"):
            smooth(Functional(), torch.empty(2, 3))

    def test_the_original_stays_after_a_refusal(self):
        model = nn.Sequential(nn.ReLU(), nn.SELU())
        before = copy.deepcopy(model)
        with pytest.raises(NotSmooth):
            smooth(model)
        assert repr(model) == repr(before)
