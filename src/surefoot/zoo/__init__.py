"""The zoo: plain ``torch.nn`` models by name, for examples, tests and the command line.

* ``registry`` keeps the names: ``register``, ``build``, ``names``, ``example_input``, ``small_options``; and the
  kinds of inputs: ``vector``, ``image``, ``tokens``.
* ``parts`` holds the common parts of several models: activations and poolings by name.
* ``fully_connected`` has ``mlp`` and the paper's ``dense``, ``highway`` and ``residual`` networks.
* ``vgg`` has ``vgg16``, the network of the paper's application, smooth and batch-normalised on request.
* ``resnet`` has ``resnet18``, ``resnet50`` and ``resnet152``, residual networks for images.
* ``densenet`` has ``densenet121``, the densely connected network for images.
* ``autoencoders`` has ``autoencoder``, an encoder and a decoder, of vectors or of images.
* ``transformer`` has ``vit``, a small transformer of images, and ``gpt``, a small causal one of integer ids.

Options with one meaning everywhere: ``activation``, by name or class; ``bias``, whether layers have intercepts;
``num_classes``, the number of outputs; ``in_channels`` and ``image_size``, the channels and the side of images;
``inputs`` and ``outputs``, the sizes of vectors; ``norm_eps``, the ε of normalisations.

>>> from surefoot import zoo
>>> with torch.device("meta"):
...     model = zoo.build("vgg16-smooth")
...     x = zoo.example_input("vgg16-smooth", batch=128)
>>> model(x).shape
torch.Size([128, 1000])
"""

from surefoot.zoo.autoencoders import autoencoder
from surefoot.zoo.densenet import densenet121
from surefoot.zoo.fully_connected import dense, highway, mlp, residual
from surefoot.zoo.registry import (
    Entry,
    Sample,
    UnknownModel,
    ZooError,
    build,
    entry,
    example_input,
    image,
    image_of_any_size,
    names,
    register,
    small_options,
    tokens,
    unregister,
    vector,
)
from surefoot.zoo.resnet import resnet18, resnet50, resnet152
from surefoot.zoo.transformer import gpt, vit
from surefoot.zoo.vgg import vgg16

__all__ = [
    "Entry", "Sample", "UnknownModel", "ZooError", "autoencoder", "build", "dense", "densenet121", "entry",
    "example_input", "gpt", "highway", "image", "image_of_any_size", "mlp", "names", "register", "residual",
    "resnet18", "resnet50", "resnet152", "small_options", "tokens", "unregister", "vector", "vgg16", "vit",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
