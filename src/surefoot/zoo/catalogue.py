"""Models by name: functions that build them, and inputs that they take."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from surefoot.zoo.autoencoders import autoencoder, convolutional_autoencoder
from surefoot.zoo.densenet import densenet121
from surefoot.zoo.fully_connected import dense, highway, mlp, residual
from surefoot.zoo.parts import ZooError, unknown
from surefoot.zoo.resnet import resnet18, resnet50, resnet152
from surefoot.zoo.transformer import gpt, vit
from surefoot.zoo.vgg import vgg16

_smooth = {"activation": "softplus", "pooling": "average"}

MODELS: dict[str, Callable[..., nn.Module]] = {
    "autoencoder": autoencoder,
    "autoencoder-convolutional": convolutional_autoencoder,
    "dense": dense,
    "densenet121": densenet121,
    "densenet121-smooth": partial(densenet121, **_smooth),  # type: ignore[arg-type]
    "gpt": gpt,
    "gpt-tied": partial(gpt, tie_weights=True),
    "highway": highway,
    "mlp": mlp,
    "residual": residual,
    "resnet152": resnet152,
    "resnet152-smooth": partial(resnet152, **_smooth),
    "resnet18": resnet18,
    "resnet18-smooth": partial(resnet18, **_smooth),
    "resnet50": resnet50,
    "resnet50-smooth": partial(resnet50, **_smooth),
    "vgg16": vgg16,
    "vgg16-batchnorm": partial(vgg16, batch_norm=1e-2, **_smooth),  # type: ignore[arg-type]
    "vgg16-smooth": partial(vgg16, **_smooth),  # type: ignore[arg-type]
    "vit": vit,
}

# Options for tests, by the first part of a name.
_STATES = {"width": 6, "depth": 3, "inputs": 5, "outputs": 3}
_RESNET = {"width": 1 / 16, "small_input": True, "num_classes": 5}
_SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"sizes": (5, 7, 6, 3)},
    "dense": {"sizes": (5, 7, 6, 3)},
    "highway": _STATES,
    "residual": _STATES,
    "resnet18": _RESNET,
    "resnet50": _RESNET,
    "resnet152": _RESNET,
    "densenet121": {"growth": 2, "blocks": (2, 3, 2), "small_input": True, "num_classes": 5},
    "vgg16": {"width": 1 / 16, "image_size": 32, "num_classes": 5},
    "vit": {"image_size": 8, "patch_size": 4, "num_classes": 5, "width": 8, "depth": 2, "heads": 2},
    "gpt": {"vocabulary": 11, "context": 6, "width": 8, "depth": 2, "heads": 2},
    "autoencoder": {"sizes": (9, 7, 3)},
    "autoencoder-convolutional": {"in_channels": 2, "image_size": 9, "channels": (3, 4), "code": 5},
}


def names() -> tuple[str, ...]:
    """All names, in alphabetical order."""
    return tuple(sorted(MODELS))


def options_of(name: str) -> dict[str, Any]:
    """The options of a model with their defaults.

    Raises:
        ZooError: there is no such model; the message gives the closest name and the list.
    """
    if name not in MODELS:
        raise unknown("model", name, names())
    return {option.name: option.default for option in inspect.signature(MODELS[name]).parameters.values()}


def build(name: str, /, **options: Any) -> nn.Module:
    """Build a model by name; under ``with torch.device("meta")`` without allocating its parameters.

    >>> sf.zoo.build("mlp", sizes=(4, 3, 2))[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    defaults = options_of(name)
    for option in options.keys() - defaults:
        raise ZooError(f"{name}: {unknown('option', option, defaults)}")
    return MODELS[name](**options)


def small_options(name: str) -> dict[str, Any]:
    """Options under which ``build(name, **options)`` and its example input are small and fast."""
    options_of(name)
    return dict(_SMALL.get(name) or _SMALL[name.partition("-")[0]])


def example_input(
    name: str,
    /,
    batch: int = 2,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    **options: Any,
) -> torch.Tensor:
    """A batch that ``build(name, **options)`` takes: normal numbers, or ids; on ``"meta"``, only shapes.

    The same seed gives the same numbers, and the global random state is left alone. Networks of any size of input
    have one more option: ``image_size`` for images, ``length`` for ids.

    >>> sf.zoo.example_input("resnet18", image_size=64, device="meta").shape
    torch.Size([2, 3, 64, 64])
    """
    defaults = options_of(name)
    allowed = [*defaults, "image_size", "length"]
    for option in options.keys() - set(allowed):
        raise ZooError(f"{name}: {unknown('option', option, allowed)}")
    all_options = {**defaults, **options}
    vocabulary = all_options.get("vocabulary")
    shape = (batch, *_sample_shape(all_options))
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type == "meta":
        return torch.empty(shape, dtype=torch.int64 if vocabulary else dtype, device=place)
    generator = torch.Generator("cpu").manual_seed(seed)  # numbers that do not depend on the device
    if vocabulary:
        return torch.randint(vocabulary, shape, generator=generator, device="cpu").to(place)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(place)


def _sample_shape(options: dict[str, Any]) -> tuple[int, ...]:
    if "sizes" in options:
        return (options["sizes"][0],)
    if "inputs" in options:
        return (options["inputs"],)
    if "context" in options:
        return (options.get("length") or min(options["context"], 16),)
    side = options.get("image_size") or (32 if options["small_input"] else 224)
    return (options["in_channels"], side, side)


def fitting(name: str, shape: tuple[int, ...], classes: int | None = None) -> dict[str, Any]:
    """Options that make a model take samples of this shape and, if it classifies, give this many classes.

    >>> sf.zoo.fitting("mlp", (1, 8, 8), classes=7)
    {'sizes': (64, 32, 32, 7)}
    """
    defaults = options_of(name)
    sizes = (math.prod(shape), *defaults.get("sizes", ())[1:])
    if classes is not None and name != "autoencoder":
        sizes = (*sizes[:-1], classes)
    options: dict[str, Any] = {"inputs": math.prod(shape), "sizes": sizes}
    if len(shape) == 3:
        options |= {"in_channels": shape[0], "image_size": shape[1]}
    if classes is not None:
        options |= {"num_classes": classes, "outputs": classes}
    return {option: value for option, value in options.items() if option in defaults}
