"""The registry: names, variants, options, example inputs, and what it says when something is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot import zoo
from surefoot.errors import SurefootError

NAMES = zoo.names()
# What scripts, the command line and the documentation rely on.
PROMISED = {
    *("vgg16", "vgg16-smooth", "vgg16-batchnorm"),
    *("resnet18", "resnet18-smooth", "resnet50", "resnet50-smooth", "resnet152", "resnet152-smooth"),
    *("densenet121", "densenet121-smooth"),
    *("mlp", "dense", "highway", "residual"),
    *("autoencoder", "autoencoder-convolutional"),
    *("vit", "gpt", "gpt-tied"),
}


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


def test_names_that_were_promised_exist_and_are_in_order() -> None:
    assert set(NAMES) >= PROMISED
    assert list(NAMES) == sorted(NAMES)


def test_a_variant_is_its_builder_with_the_preset() -> None:
    with torch.device("meta"):
        plain, smooth, normalized = map(zoo.build, ("vgg16", "vgg16-smooth", "vgg16-batchnorm"))
    assert {nn.ReLU, nn.MaxPool2d} <= kinds(plain)
    assert not {nn.Softplus, nn.AvgPool2d, nn.BatchNorm2d} & kinds(plain)
    assert {nn.Softplus, nn.AvgPool2d} <= kinds(smooth)
    assert not {nn.ReLU, nn.MaxPool2d, nn.BatchNorm2d} & kinds(smooth)
    assert {nn.Softplus, nn.AvgPool2d, nn.BatchNorm2d} <= kinds(normalized)


def test_options_of_the_caller_win_over_the_variant() -> None:
    model = zoo.build("vgg16-smooth", **zoo.small_options("vgg16-smooth"), activation="tanh")
    assert nn.Tanh in kinds(model)
    assert not {nn.Softplus, nn.ReLU, nn.MaxPool2d} & kinds(model)


def test_unknown_name_gives_the_closest_and_the_list() -> None:
    with pytest.raises(zoo.ZooError, match="did you mean 'vgg16-smooth'") as caught:
        zoo.build("vgg16-smoth")
    assert all(name in str(caught.value) for name in NAMES)
    assert isinstance(caught.value, SurefootError)
    with pytest.raises(zoo.ZooError, match="did you mean 'resnet18'"):
        zoo.example_input("ResNet18")
    with pytest.raises(zoo.ZooError, match="there is no model 'zzzzzz'\\. There are: autoencoder"):
        zoo.build("zzzzzz")


def test_unknown_option_gives_the_closest_and_the_list() -> None:
    with pytest.raises(zoo.ZooError, match=r"vgg16: there is no option 'activations': did you mean 'activation'"):
        zoo.build("vgg16", activations="relu")
    with pytest.raises(zoo.ZooError, match=r"no option 'imagesize': did you mean 'image_size'"):
        zoo.example_input("resnet18", imagesize=32)


def test_options_of_the_example_alone_do_not_build() -> None:
    assert zoo.example_input("gpt", length=5).shape == (2, 5)
    with pytest.raises(zoo.ZooError, match="no option 'length'"):
        zoo.build("gpt", length=5)


@pytest.mark.parametrize("name", NAMES)
def test_example_input_has_the_batch_the_type_and_the_device_asked_for(name: str) -> None:
    options = zoo.small_options(name)
    x = zoo.example_input(name, batch=3, dtype=torch.float64, **options)
    shape_only = zoo.example_input(name, batch=3, dtype=torch.float64, device="meta", **options)
    with torch.device("meta"):
        by_context = zoo.example_input(name, batch=3, **options)
    assert x.shape[0] == 3
    assert x.dtype == (torch.int64 if name.startswith("gpt") else torch.float64)
    assert shape_only.device.type == by_context.device.type == "meta"
    assert shape_only.shape == by_context.shape == x.shape
    assert shape_only.dtype == x.dtype


def test_example_input_is_repeatable_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (zoo.example_input("mlp", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_ids_stay_below_the_vocabulary() -> None:
    ids = zoo.example_input("gpt", batch=50, vocabulary=3, context=10)
    assert ids.shape == (50, 10)
    assert set(ids.unique().tolist()) == {0, 1, 2}


def test_example_sizes_follow_the_options() -> None:
    def shape(name: str, **options: object) -> tuple[int, ...]:
        return tuple(zoo.example_input(name, batch=1, device="meta", **options).shape[1:])

    assert shape("vgg16") == (3, 224, 224)
    assert shape("vgg16", image_size=64, in_channels=1) == (1, 64, 64)
    assert shape("resnet50") == (3, 224, 224)
    assert shape("resnet50", small_input=True) == (3, 32, 32)
    assert shape("densenet121", image_size=48) == (3, 48, 48)
    assert shape("mlp", sizes=(7, 2)) == (7,)
    assert shape("highway", inputs=9) == (9,)
    assert shape("autoencoder") == (64,)
    assert shape("autoencoder-convolutional") == (1, 28, 28)
    assert shape("gpt") == (16,)
    assert shape("gpt", context=8) == (8,)
