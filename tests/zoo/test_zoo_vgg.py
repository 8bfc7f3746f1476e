"""VGG-16 against the list of layers in the paper's appendix "Detailed network"."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot import zoo


class Convolutional(NamedTuple):
    """One item of the paper's list: positions and filters of the convolution, positions after pooling."""

    positions: int
    filters: int
    pooled: int | None


PAPER = [
    Convolutional(224, 64, None),
    Convolutional(224, 64, 112),
    Convolutional(112, 128, None),
    Convolutional(112, 128, 56),
    Convolutional(56, 256, None),
    Convolutional(56, 256, None),
    Convolutional(56, 256, 28),
    Convolutional(28, 512, None),
    Convolutional(28, 512, None),
    Convolutional(28, 512, 14),
    Convolutional(14, 512, None),
    Convolutional(14, 512, None),
    Convolutional(14, 512, 7),
]
FULLY_CONNECTED = [4096, 4096, 1000]


def layers(sequence: nn.Sequential) -> list[list[nn.Module]]:
    """The layers: each starts at a convolution or a matrix product."""
    found: list[list[nn.Module]] = []
    for module in sequence:
        if isinstance(module, nn.Conv2d | nn.Linear):
            found.append([])
        found[-1].append(module)
    return found


@pytest.mark.parametrize(
    ("name", "activation", "pooling", "normalized"),
    [
        ("vgg16", nn.ReLU, nn.MaxPool2d, False),
        ("vgg16-smooth", nn.Softplus, nn.AvgPool2d, False),
        ("vgg16-batchnorm", nn.Softplus, nn.AvgPool2d, True),
    ],
)
def test_layer_by_layer_as_the_paper_lists_them(
    name: str, activation: type, pooling: type, normalized: bool
) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
        x = zoo.example_input(name, batch=2)
    assert x.shape == (2, 3, 224, 224)
    convolutional, connected = layers(model.features), layers(model.classifier)
    assert len(convolutional) + len(connected) == 16

    for item, layer in zip(PAPER, convolutional, strict=True):
        # a_t = ν ∘ π ∘ α: activation, then pooling, then normalisation.
        expected = [nn.Conv2d, activation, pooling, nn.BatchNorm2d]
        present = [True, True, item.pooled is not None, normalized]
        assert [type(module) for module in layer] == list(compress(expected, present))
        assert layer[0].kernel_size == (3, 3)
        assert layer[0].stride == layer[0].padding == (1, 1)
        assert layer[0].bias is not None
        x = layer[0](x)
        assert x.shape == (2, item.filters, item.positions, item.positions)
        for module in layer[1:]:
            x = module(x)
        side = item.pooled or item.positions
        assert x.shape == (2, item.filters, side, side)

    x = x.flatten(1)
    kinds = [activation, activation, nn.Softmax]
    for size, kind, layer in zip(FULLY_CONNECTED, kinds, connected, strict=True):
        assert [type(module) for module in layer] == [nn.Linear, kind]
        assert layer[0].bias is not None
        x = layer[0](x)
        assert x.shape == (2, size)


@pytest.mark.parametrize(("smooth", "image_size"), [(False, 32), (True, 40), (False, 96)])
def test_values_are_those_of_the_formula(smooth: bool, image_size: int) -> None:
    torch.manual_seed(0)
    name = "vgg16-smooth" if smooth else "vgg16"
    model = zoo.build(name, width=1 / 16, image_size=image_size, num_classes=7, in_channels=2).double()
    x = torch.randn(3, 2, image_size, image_size, dtype=torch.float64)
    activation = F.softplus if smooth else F.relu
    pool = F.avg_pool2d if smooth else F.max_pool2d

    parameters = iter(model.parameters())
    state = x
    for item in PAPER:
        state = activation(F.conv2d(state, next(parameters), next(parameters), padding=1))
        state = state if item.pooled is None else pool(state, 2)
    state = state.flatten(1)
    state = activation(F.linear(state, next(parameters), next(parameters)))
    state = activation(F.linear(state, next(parameters), next(parameters)))
    state = F.linear(state, next(parameters), next(parameters)).softmax(dim=1)
    assert next(parameters, None) is None
    torch.testing.assert_close(model(x), state, rtol=1e-12, atol=1e-14)


def test_normalisation_has_no_parameters_unless_asked_and_its_own_epsilon() -> None:
    small = zoo.small_options("vgg16-batchnorm")
    for epsilon, affine in [(1e2, False), (1e-2, True)]:
        model = zoo.build("vgg16-batchnorm", **small, batch_norm=epsilon, batch_norm_affine=affine)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert len(norms) == 13
        assert {norm.eps for norm in norms} == {epsilon}
        assert {norm.affine for norm in norms} == {affine}
    default = zoo.build("vgg16-batchnorm", **small)
    assert {module.eps for module in default.modules() if isinstance(module, nn.BatchNorm2d)} == {1e-2}


def test_normalisation_last_makes_each_convolutional_layer_centred() -> None:
    torch.manual_seed(0)
    model = zoo.build("vgg16-batchnorm", **zoo.small_options("vgg16-batchnorm")).double()
    state = zoo.example_input("vgg16-batchnorm", batch=4, dtype=torch.float64, image_size=32)
    for layer in layers(model.features):
        state = nn.Sequential(*layer)(state)
        means = state.mean(dim=(0, 2, 3))
        torch.testing.assert_close(means, torch.zeros_like(means), rtol=0, atol=1e-10)


def test_normalisation_first_comes_right_after_the_convolution() -> None:
    model = zoo.vgg16(batch_norm=1e-5, batch_norm_position="first", width=1 / 16, image_size=32)
    for item, layer in zip(PAPER, layers(model.features), strict=True):
        kinds = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] + [nn.MaxPool2d] * (item.pooled is not None)
        assert [type(module) for module in layer] == kinds


def test_softmax_is_optional() -> None:
    options = zoo.small_options("vgg16") | {"softmax": False}
    torch.manual_seed(0)
    logits = zoo.build("vgg16", **options)
    torch.manual_seed(0)
    probabilities = zoo.build("vgg16", **zoo.small_options("vgg16"))
    x = zoo.example_input("vgg16", **options)
    torch.testing.assert_close(probabilities(x), logits(x).softmax(dim=1))
    assert not isinstance(logits.classifier[-1], nn.Softmax)


def test_width_multiplies_every_hidden_size() -> None:
    with torch.device("meta"):
        model = zoo.vgg16(width=0.5, num_classes=7)
    sizes = [layer[0].out_channels for layer in layers(model.features)]
    assert sizes == [item.filters // 2 for item in PAPER]
    assert [layer[0].out_features for layer in layers(model.classifier)] == [2048, 2048, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 31}, "at least 32, not 31"),
        ({"batch_norm": 0.0}, "must be positive, not 0.0"),
        ({"batch_norm": float("nan")}, "must be positive, not nan"),
        ({"batch_norm_position": "middle"}, "no batch_norm_position 'middle'"),
        ({"pooling": "mean"}, "no pooling 'mean'"),
        ({"activation": "softpuls"}, "did you mean 'softplus'"),
        ({"width": 0.0}, "must be positive, not 0.0"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(zoo.ZooError, match=message):
        zoo.build("vgg16", **options)


def test_images_of_another_size_are_refused_with_the_remedy() -> None:
    model = zoo.vgg16(width=1 / 16, image_size=32)
    with pytest.raises(zoo.ZooError, match=r"shape \(batch, 3, 32, 32\) and got \(2, 3, 64, 64\): build it with"):
        model(torch.zeros(2, 3, 64, 64))
