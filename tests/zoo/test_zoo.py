"""Models by name: what every one of them must do, what is built and refused, and the published sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from surefoot import zoo
from surefoot.errors import SurefootError
from surefoot.zoo.parts import ACTIVATIONS, make_activation, make_pooling

NAMES = zoo.names()
D = torch.float64
# The shape of one output of each small model, by the first part of its name; a new model adds its line here.
OUTPUTS = {
    "autoencoder": (9,), "autoencoder-convolutional": (2, 9, 9), "dense": (3,), "densenet121": (5,),
    "gpt": (6, 11), "highway": (3,), "mlp": (3,), "residual": (3,), "resnet18": (5,), "resnet50": (5,),
    "resnet152": (5,), "vgg16": (5,), "vit": (5,),
}  # fmt: skip
# Strict capture interprets every line of Python, which takes seconds for deep networks.
QUICK = ("autoencoder-convolutional", "dense", "gpt-tied", "highway", "mlp", "residual", "vgg16")

BASE = {"width": 768, "depth": 12, "heads": 12}
# torchvision's ``num_params`` of its weights; GPT-2 is the released small model, its tied table counted once.
PUBLISHED = [
    ("vgg16", {}, 138_357_544),
    ("vgg16-smooth", {}, 138_357_544),
    ("vgg16-batchnorm", {}, 138_357_544),
    ("vgg16-batchnorm", {"batch_norm_affine": True, "batch_norm_position": "first"}, 138_365_992),
    ("resnet18", {}, 11_689_512),
    ("resnet50", {}, 25_557_032),
    ("resnet152", {}, 60_192_808),
    ("densenet121", {}, 7_978_856),
    ("densenet121", {"blocks": (6, 12, 32, 32)}, 14_149_480),
    ("vit", BASE | {"num_classes": 1000, "image_size": 224, "patch_size": 16}, 86_567_656),
    ("gpt-tied", BASE | {"vocabulary": 50257, "context": 1024}, 124_439_808),
]


def small(name: str, batch: int = 3, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    options = zoo.small_options(name) | options
    return zoo.build(name, **options).double(), zoo.example_input(name, batch=batch, dtype=D, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_plain_and_treats_samples_one_by_one(name: str) -> None:
    model, x = small(name)
    y = model(x)
    assert y.shape == (3, *(OUTPUTS.get(name) or OUTPUTS[name.partition("-")[0]]))
    assert y.dtype == D
    assert not torch.equal(y[0], y[1]), "the input is not read"
    y.square().sum().backward()
    assert [path for path, parameter in model.named_parameters() if parameter.grad is None] == []
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    assert len(modules) == len(set(modules)), "a module is used under two paths"
    assert not any(getattr(module, "inplace", False) or isinstance(module, nn.Dropout) for module in modules)
    assert not list(model.parameters(recurse=False)), "a parameter without a module of its own"
    model.eval()
    torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_default_sizes_run_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model, x = zoo.build(name), zoo.example_input(name, batch=4)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), x))
    assert model(x).shape[0] == 4
    assert x.dtype == (torch.int64 if name.startswith("gpt") else torch.float32)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_strict_export_has_no_graph_breaks_and_leaves_the_batch_free(name: str) -> None:
    model, x = small(name)
    model.eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), strict=True, dynamic_shapes=({0: batch},))
    assert not program.graph_signature.inputs_to_lifted_tensor_constants, "a tensor was baked into the graph"
    more = small(name, batch=7)[1]
    torch.testing.assert_close(program.module()(more), model(more), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options", "count"), PUBLISHED)
def test_number_of_parameters(name: str, options: dict[str, object], count: int) -> None:
    with torch.device("meta"):
        model = zoo.build(name, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("name", "options", "inside", "absent"),
    [
        ("vgg16", {}, {nn.ReLU, nn.MaxPool2d}, {nn.Softplus, nn.AvgPool2d, nn.BatchNorm2d}),
        ("vgg16-smooth", {}, {nn.Softplus, nn.AvgPool2d}, {nn.ReLU, nn.MaxPool2d, nn.BatchNorm2d}),
        ("vgg16-batchnorm", {}, {nn.Softplus, nn.AvgPool2d, nn.BatchNorm2d}, {nn.ReLU, nn.MaxPool2d}),
        ("vgg16-smooth", {"activation": "tanh"}, {nn.Tanh, nn.AvgPool2d}, {nn.Softplus, nn.ReLU}),
        ("resnet50-smooth", {"small_input": False}, {nn.Softplus, nn.AvgPool2d}, {nn.ReLU, nn.MaxPool2d}),
        ("densenet121", {"small_input": False}, {nn.ReLU, nn.MaxPool2d}, {nn.Softplus}),
        ("gpt", {}, {nn.GELU}, {nn.ReLU}),
    ],
)
def test_variants_preset_what_the_caller_may_change(
    name: str, options: dict[str, object], inside: set[type], absent: set[type]
) -> None:
    with torch.device("meta"):
        kinds = {type(module) for module in small(name, **options)[0].modules()}
    assert inside <= kinds
    assert not absent & kinds


SHAPES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("vgg16", {}, (3, 224, 224)),
    ("vgg16", {"image_size": 64, "in_channels": 1}, (1, 64, 64)),
    ("resnet50", {}, (3, 224, 224)),
    ("resnet50", {"small_input": True}, (3, 32, 32)),
    ("densenet121", {"image_size": 48}, (3, 48, 48)),
    ("mlp", {"sizes": (7, 2)}, (7,)),
    ("highway", {"inputs": 9}, (9,)),
    ("autoencoder", {}, (64,)),
    ("autoencoder-convolutional", {}, (1, 28, 28)),
    ("gpt", {}, (16,)),
    ("gpt", {"context": 8}, (8,)),
    ("gpt", {"length": 5}, (5,)),
]


@pytest.mark.parametrize(("name", "options", "shape"), SHAPES)
def test_example_inputs_follow_the_options(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = zoo.example_input(name, batch=1, device="meta", **options)
    assert x.is_meta
    assert x.shape == (1, *shape)


def test_example_inputs_are_repeatable_and_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (zoo.example_input("mlp", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    ids = zoo.example_input("gpt", batch=50, vocabulary=3, context=10)
    assert set(ids.unique().tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "shape", "classes", "output"),
    [("mlp", (1, 8, 8), 7, (2, 7)), ("vgg16", (2, 32, 32), 4, (2, 4)), ("autoencoder", (12,), 3, (2, 12)),
     ("highway", (12,), 3, (2, 3))],
)  # fmt: skip
def test_options_that_fit_data(name: str, shape: tuple[int, ...], classes: int, output: tuple[int, ...]) -> None:
    options = zoo.fitting(name, shape, classes) | ({"width": 1 / 16} if name == "vgg16" else {})
    x = torch.randn(2, *shape)
    assert zoo.build(name, **options)(x if len(shape) == 3 and name == "vgg16" else x.flatten(1)).shape == output


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
@pytest.mark.parametrize("size", [(32, 32), (65, 40)])
def test_image_networks_take_any_size_through_the_large_stem(name: str, size: tuple[int, int]) -> None:
    model, _ = small(name, small_input=False, in_channels=2)
    assert model(torch.randn(3, 2, *size, dtype=D)).shape == (3, 5)


@pytest.mark.parametrize("image_size", [7, 16])
@pytest.mark.parametrize("code", [None, 5])
@pytest.mark.parametrize("channels", [(3,), (3, 4, 2)])
def test_convolutional_autoencoders_give_back_the_shape(image_size: int, code: int | None, channels: Any) -> None:
    model = zoo.convolutional_autoencoder(image_size=image_size, code=code, channels=channels)
    x = torch.randn(2, 1, image_size, image_size)
    hidden = model.encoder(x)
    assert hidden.ndim == (4 if code is None else 2)
    assert model(x).shape == x.shape
    # Neither the code nor the reconstruction passes through an activation.
    assert not {type(model.encoder[-1]), type(model.decoder[-1])} & {nn.Softplus}


def test_module_paths_read_well() -> None:
    expected = {
        "vgg16": {"features.0.weight", "classifier.4.weight"},
        "resnet50": {"stages.1.0.shortcut.convolution.weight", "classifier.bias"},
        "densenet121": {"block1.layers.2.0.convolution.weight", "transition0.normalization.weight"},
        "vit": {"blocks.1.attention.qkv.weight", "blocks.0.mlp.expand.bias", "positions.weight"},
        "gpt": {"tokens.weight", "blocks.1.attention.projection.weight", "head.weight"},
        "dense": {"layers.2.maps.0.weight", "layers.2.maps.2.bias"},
        "autoencoder-convolutional": {"encoder.0.weight", "decoder.0.weight"},
    }
    for name, paths in expected.items():
        assert paths <= {path for path, _ in small(name)[0].named_parameters()}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("vgg16-smoth", {}, "did you mean 'vgg16-smooth'"),
    ("zzzzzz", {}, r"there is no model 'zzzzzz'\. There are: autoencoder, .*vit"),
    ("vgg16", {"activations": "relu"}, "vgg16: there is no option 'activations': did you mean 'activation'"),
    ("gpt", {"length": 5}, "no option 'length'"),
    ("mlp", {"sizes": (3,)}, "mlp: sizes lists"),
    ("mlp", {"activation": "Relu"}, "did you mean 'relu'"),
    ("mlp", {"activation": nn.ReLU()}, "shared by all layers: pass its class"),
    ("mlp", {"activation": dict}, "must be a name or make an nn.Module"),
    ("dense", {"sizes": (3, 0)}, r"all positive: not \(3, 0\)"),
    ("highway", {"width": 0}, "highway: sizes"),
    ("residual", {"outputs": 0}, "residual: sizes"),
    ("autoencoder-convolutional", {"channels": ()}, "its channels"),
    ("vit", {"patch_size": 5}, "patches of 5 do not tile images of 32"),
    ("gpt", {"heads": 5}, "does not divide into 5 heads"),
    ("densenet121", {"blocks": ()}, "must be positive"),
    ("densenet121", {"growth": 0}, "must be positive"),
    ("vgg16", {"image_size": 31}, "at least 32, not 31"),
    ("vgg16", {"batch_norm": 0.0}, "must be positive, not 0.0"),
    ("vgg16", {"batch_norm": float("nan")}, "must be positive, not nan"),
    ("vgg16", {"batch_norm_position": "middle"}, "no batch_norm_position 'middle'"),
    ("vgg16", {"pooling": "mean"}, "no pooling 'mean'"),
    ("vgg16", {"width": 0.0}, "must be positive, not 0.0"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_cannot_be_built_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(zoo.ZooError, match=message) as caught:
        zoo.build(name, **options)
    assert isinstance(caught.value, SurefootError)


def test_inputs_that_do_not_fit_are_refused_with_the_remedy() -> None:
    with pytest.raises(zoo.ZooError, match=r"shape \(batch, 3, 32, 32\) and got \(2, 3, 64, 64\): build it with"):
        zoo.vgg16(width=1 / 16, image_size=32)(torch.zeros(2, 3, 64, 64))
    with pytest.raises(zoo.ZooError, match="has 7 positions and the model knows 6"):
        small("gpt")[0](torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(zoo.ZooError, match="no option 'imagesize': did you mean 'image_size'"):
        zoo.example_input("resnet18", imagesize=32)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_each_activation_acts_entry_by_entry_and_not_in_place(name: str) -> None:
    x = torch.randn(4, 5, dtype=D)
    before = x.clone()
    y = make_activation(name)(x)
    assert torch.equal(x, before)
    # One entry at a time: a vectorised kernel may differ in the last digit.
    alone = torch.stack([make_activation(name)(entry) for entry in x.flatten()]).view_as(x)
    torch.testing.assert_close(y, alone, rtol=1e-14, atol=1e-15)


def test_parts_by_class_and_name() -> None:
    model = zoo.mlp((2, 3, 3, 1), partial(nn.ELU, alpha=0.5))
    assert [module.alpha for module in model if isinstance(module, nn.ELU)] == [0.5, 0.5]
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert make_pooling("max", 2)(x).flatten().tolist() == [5, 7, 13, 15]
    assert make_pooling("average", 2)(x).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert make_pooling("max", 3, stride=2, padding=1)(x).flatten().tolist() == [5, 7, 13, 15]
