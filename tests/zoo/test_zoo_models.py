"""Every model of the zoo, small: shapes, devices, precision, plainness, and capture by torch.export."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from surefoot import zoo

NAMES = zoo.names()
# The shape of one output of each model when it is small; a new model adds its line here.
OUTPUTS = {
    "autoencoder": (9,),
    "autoencoder-convolutional": (2, 9, 9),
    "dense": (3,),
    "densenet121": (5,),
    "gpt": (6, 11),
    "highway": (3,),
    "mlp": (3,),
    "residual": (3,),
    "resnet18": (5,),
    "resnet50": (5,),
    "resnet152": (5,),
    "vgg16": (5,),
    "vit": (5,),
}
# These differ from their namesakes in an activation, and take long to capture.
DEEP_VARIANTS = ("densenet121-smooth", "resnet18-smooth", "resnet50-smooth", "resnet152-smooth")


def slow(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def small(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(name, **(zoo.small_options(name) | options)).double()


def small_input(name: str, batch: int = 3) -> torch.Tensor:
    return zoo.example_input(name, batch=batch, dtype=torch.float64, **zoo.small_options(name))


@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_small_versions_run_in_double_precision(name: str, batch: int) -> None:
    x = small_input(name, batch)
    y = small(name)(x)
    assert y.shape == (batch, *(OUTPUTS.get(name) or OUTPUTS[name.partition("-")[0]]))
    assert y.dtype == torch.float64
    assert bool(y.isfinite().all())
    # Samples differ, so a network that reads them has outputs that differ.
    assert not torch.equal(y[0], y[1])


@pytest.mark.parametrize("name", NAMES)
def test_one_sample_is_enough_in_evaluation_mode_and_samples_do_not_interact(name: str) -> None:
    model, x = small(name).eval(), small_input(name)
    torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_default_sizes_build_and_run_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
        x = zoo.example_input(name, batch=4)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    y = model(x)
    assert y.is_meta
    assert y.shape[0] == 4


@pytest.mark.parametrize("name", NAMES)
def test_models_are_plain(name: str) -> None:
    model = small(name)
    every_path = dict(model.named_modules(remove_duplicate=False))
    assert len(every_path) == len(dict(model.named_modules())), "a module is used under two paths"
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
    assert not list(model.parameters(recurse=False)), "a parameter without a module of its own"
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_gradient(name: str) -> None:
    model = small(name)
    model(small_input(name)).square().sum().backward()
    assert [path for path, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", [*(name for name in NAMES if name not in DEEP_VARIANTS), *slow(DEEP_VARIANTS)])
def test_export_captures_the_whole_model(name: str) -> None:
    model, x = small(name), small_input(name)
    program = torch.export.export(model, (x,))
    signature = program.graph_signature
    captured = set(signature.inputs_to_parameters.values())
    assert {id(model.get_parameter(path)) for path in captured} == {id(p) for p in model.parameters()}
    assert not signature.inputs_to_lifted_tensor_constants, "a tensor was baked into the graph"

    counters = {path for path, _ in model.named_buffers() if path.endswith("num_batches_tracked")}
    paths = set(dict(model.named_modules()))
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target.__name__.split(".")[0].endswith("_"):
            # Batch-normalisation counts its batches in place; nothing that is computed depends on it.
            assert signature.inputs_to_buffers[node.args[0].name] in counters
        assert {path for path, _ in node.meta["nn_module_stack"].values()} <= paths
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-12, atol=1e-12)


# Strict capture interprets every line of Python, which takes seconds for deep networks.
QUICK = ("autoencoder-convolutional", "dense", "gpt-tied", "highway", "mlp", "residual", "vgg16")


@pytest.mark.parametrize("name", [*QUICK, *slow(name for name in NAMES if name not in QUICK)])
def test_export_is_free_of_graph_breaks(name: str) -> None:
    """Strict mode raises at the first graph break; the batch size stays free."""
    model, x = small(name).eval(), small_input(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), strict=True, dynamic_shapes=({0: batch},))
    more = small_input(name, batch=7)
    torch.testing.assert_close(program.module()(more), model(more), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "densenet121"])
@pytest.mark.parametrize("pooling", ["max", "average"])
@pytest.mark.parametrize("size", [(32, 32), (65, 40)])
def test_image_networks_take_any_size_through_the_large_stem(
    name: str, pooling: str, size: tuple[int, int]
) -> None:
    options = zoo.small_options(name) | {"small_input": False, "in_channels": 2, "pooling": pooling}
    model = zoo.build(name, **options).double()
    x = torch.randn(3, 2, *size, dtype=torch.float64)
    assert model(x).shape == (3, 5)
    kinds = {type(module) for module in model.stem.modules()}
    assert (nn.MaxPool2d in kinds) == (pooling == "max")
    assert (nn.AvgPool2d in kinds) == (pooling == "average")


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_export_captures_the_large_stem(name: str) -> None:
    model = small(name, small_input=False).eval()
    x = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("image_size", [4, 7, 9, 16])
@pytest.mark.parametrize("code", [None, 5])
@pytest.mark.parametrize("channels", [(3,), (3, 4, 2)])
def test_convolutional_autoencoder_gives_back_the_shape(
    image_size: int, code: int | None, channels: tuple[int, ...]
) -> None:
    model = zoo.convolutional_autoencoder(image_size=image_size, code=code, channels=channels)
    x = torch.randn(2, 1, image_size, image_size)
    hidden = model.encoder(x)
    assert hidden.ndim == (4 if code is None else 2)
    assert code is None or hidden.shape == (2, code)
    assert model.decoder(hidden).shape == x.shape
    assert any(isinstance(module, nn.ConvTranspose2d) for module in model.decoder)
    # Neither the code nor the reconstruction passes through an activation.
    assert not isinstance(model.encoder[-1], nn.Softplus)
    assert not isinstance(model.decoder[-1], nn.Softplus)
    torch.testing.assert_close(model(x), model.decoder(hidden))


def test_dense_autoencoder_mirrors_its_sizes() -> None:
    model = zoo.autoencoder(sizes=(9, 7, 3), bias=False)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [(one.in_features, one.out_features) for one in linears] == [(9, 7), (7, 3), (3, 7), (7, 9)]
    assert model.encoder(torch.randn(4, 9)).shape == (4, 3)
    assert all(one.bias is None for one in linears)


def test_module_paths_read_well() -> None:
    def paths(name: str) -> set[str]:
        return {path for path, _ in small(name).named_parameters()}

    assert {"features.0.weight", "classifier.0.bias", "classifier.4.weight"} <= paths("vgg16")
    assert {"stages.1.0.shortcut.convolution.weight", "classifier.bias"} <= paths("resnet50")
    assert {"block1.layers.2.0.convolution.weight", "transition0.normalization.weight"} <= paths("densenet121")
    assert {"blocks.1.attention.qkv.weight", "blocks.0.mlp.expand.bias", "positions.weight"} <= paths("vit")
    assert {"tokens.weight", "blocks.1.attention.projection.weight", "head.weight"} <= paths("gpt")
    assert {"layers.2.maps.0.weight", "layers.2.maps.2.bias"} <= paths("dense")
    assert {"layers.1.maps.1.bias", "layers.1.maps.0.weight"} <= paths("highway")
    assert {"encoder.0.weight", "decoder.0.weight"} <= paths("autoencoder-convolutional")
