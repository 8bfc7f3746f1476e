"""The zoo: plain ``torch.nn`` models by name, for examples, tests and the command line.

* ``registry`` keeps the names: ``register``, ``build``, ``names``, ``example_input``, ``small_options``.
* ``samples`` says what an input looks like: ``vector``, ``image``, ``tokens``.
* ``parts`` holds what several models share: activations and poolings by name.
* ``naming`` holds the zoo's errors, with the closest match for a wrong name.
* ``perceptron`` has ``mlp``, fully connected layers in a chain.
* ``vgg`` has ``vgg16``, the network of the paper's application, smooth and batch-normalised on request.
* ``resnet`` has ``resnet18``, ``resnet50`` and ``resnet152``, residual networks for images.
* ``densenet`` has ``densenet121``, the densely connected network for images.
* ``dense_network`` has ``dense``, the paper's network whose layers read all states before them.
* ``highway_network`` has ``highway``, the paper's network on the last two states, and Srivastava's gated one.
* ``residual_network`` has ``residual``, the paper's residual network of fully connected layers.
* ``autoencoders`` has ``autoencoder``, an encoder and a decoder, of vectors or of images.
* ``transformer`` holds attention and the block of the two transformers.
* ``vision_transformer`` has ``vit``, a small transformer of images.
* ``language_model`` has ``gpt``, a small causal transformer of integer ids.

>>> import torch
>>> from surefoot import zoo
>>> with torch.device("meta"):
...     model = zoo.build("vgg16-smooth")
...     x = zoo.example_input("vgg16-smooth", batch=128)
>>> model(x).shape
torch.Size([128, 1000])
"""

from surefoot.zoo.autoencoders import autoencoder
from surefoot.zoo.dense_network import dense
from surefoot.zoo.densenet import densenet121
from surefoot.zoo.highway_network import highway
from surefoot.zoo.language_model import gpt
from surefoot.zoo.naming import UnknownModel, ZooError
from surefoot.zoo.perceptron import mlp
from surefoot.zoo.registry import (
    Entry,
    build,
    entry,
    example_input,
    names,
    register,
    small_options,
    unregister,
)
from surefoot.zoo.residual_network import residual
from surefoot.zoo.resnet import resnet18, resnet50, resnet152
from surefoot.zoo.samples import Sample, image, image_of_any_size, tokens, vector
from surefoot.zoo.vgg import vgg16
from surefoot.zoo.vision_transformer import vit

__all__ = [
    "Entry",
    "Sample",
    "UnknownModel",
    "ZooError",
    "autoencoder",
    "build",
    "dense",
    "densenet121",
    "entry",
    "example_input",
    "gpt",
    "highway",
    "image",
    "image_of_any_size",
    "mlp",
    "names",
    "register",
    "residual",
    "resnet18",
    "resnet50",
    "resnet152",
    "small_options",
    "tokens",
    "unregister",
    "vector",
    "vgg16",
    "vit",
]
