"""The zoo: plain ``torch.nn`` models, for examples, tests and the command line.

* ``fully_connected``: ``mlp``, and the paper's ``dense``, ``highway`` and ``residual`` networks.
* ``vgg``: ``vgg16``, the network of the paper's application, smooth and batch-normalised on request.
* ``resnet``, ``densenet``, ``autoencoders``, and ``transformer`` with ``vit`` and ``gpt``.
* ``catalogue``: models by name, inputs for them; ``parts``: what several models share.

Options with one meaning everywhere: ``activation``, by name or class; ``bias``, whether layers have intercepts;
``num_classes``, the number of outputs; ``in_channels`` and ``image_size``, the channels and the side of images;
``inputs`` and ``outputs``, the sizes of vectors; ``norm_eps``, the ε of normalisations.

>>> with torch.device("meta"):
...     model = sf.zoo.build("vgg16-smooth")
...     x = sf.zoo.example_input("vgg16-smooth", batch=128)
>>> model(x).shape
torch.Size([128, 1000])
"""

from surefoot.zoo.autoencoders import autoencoder, convolutional_autoencoder
from surefoot.zoo.catalogue import MODELS, build, example_input, fitting, names, small_options
from surefoot.zoo.densenet import densenet121
from surefoot.zoo.fully_connected import dense, highway, mlp, residual
from surefoot.zoo.parts import ZooError
from surefoot.zoo.resnet import resnet18, resnet50, resnet152
from surefoot.zoo.transformer import gpt, vit
from surefoot.zoo.vgg import vgg16

__all__ = [
    "MODELS", "ZooError", "autoencoder", "build", "convolutional_autoencoder", "dense", "densenet121",
    "example_input", "fitting", "gpt", "highway", "mlp", "names", "residual", "resnet18", "resnet50", "resnet152",
    "small_options", "vgg16", "vit",
]  # fmt: skip
