r"""Auto-encoders: an encoder :math:`\psi^e` to a short code, then a decoder :math:`\psi^d` back.

Neither the code nor the reconstruction passes through an activation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from surefoot.zoo.fully_connected import mlp
from surefoot.zoo.parts import Activation, check_sizes, make_activation


def autoencoder(
    sizes: Sequence[int] = (64, 32, 8), activation: Activation = "softplus", bias: bool = True
) -> nn.Sequential:
    """Auto-encoder of vectors: a perceptron ``encoder`` with these sizes, and its mirror image ``decoder``."""
    sizes = check_sizes(sizes, "autoencoder")
    return nn.Sequential(
        OrderedDict(encoder=mlp(sizes, activation, bias), decoder=mlp(sizes[::-1], activation, bias))
    )


def convolutional_autoencoder(
    in_channels: int = 1,
    image_size: int = 28,
    channels: Sequence[int] = (8, 16),
    code: int | None = 16,
    activation: Activation = "softplus",
    bias: bool = True,
) -> nn.Sequential:
    """Auto-encoder of images: convolutions that halve the image, transposed ones that double it again.

    A 3×3 convolution of stride 2 and padding 1 takes a side of n pixels to ⌈n/2⌉; its transpose takes n to
    2n − 1, and one pixel of output padding makes up for an even side.

    Args:
        channels: the channels after each convolution.
        code: the size of the code, reached by a matrix product; ``None`` to let the last feature map be the code.
    """
    counts = check_sizes((in_channels, *channels), "autoencoder (its channels)")
    sides = [image_size]
    for _ in channels:
        sides.append((sides[-1] + 1) // 2)

    encoder: list[nn.Module] = []
    decoder: list[nn.Module] = []
    for inputs, outputs, side in zip(counts[:-1], counts[1:], sides[:-1], strict=True):
        encoder += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=bias), make_activation(activation)]
        even = 1 - side % 2
        back = nn.ConvTranspose2d(outputs, inputs, 3, stride=2, padding=1, output_padding=even, bias=bias)
        decoder = [back, make_activation(activation), *decoder]
    del decoder[-1]

    if code is None:
        del encoder[-1]
    else:
        shape, features = (counts[-1], sides[-1], sides[-1]), counts[-1] * sides[-1] ** 2
        encoder += [nn.Flatten(), nn.Linear(features, code, bias=bias)]
        expand = nn.Linear(code, features, bias=bias)
        decoder = [expand, make_activation(activation), nn.Unflatten(1, shape), *decoder]
    return nn.Sequential(OrderedDict(encoder=nn.Sequential(*encoder), decoder=nn.Sequential(*decoder)))
