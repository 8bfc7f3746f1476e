r"""Auto-encoders: an encoder :math:`\psi^e` to a short code, then a decoder :math:`\psi^d` back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from surefoot.zoo.fully_connected import mlp
from surefoot.zoo.parts import Activation, check_sizes, make_activation
from surefoot.zoo.registry import ZooError, image, register, unknown, vector

_KINDS = ("dense", "convolutional")


class AutoEncoder(nn.Sequential):
    """``decoder(encoder(x))``; made by :func:`autoencoder`."""

    def __init__(self, encoder: nn.Sequential, decoder: nn.Sequential) -> None:
        super().__init__(OrderedDict(encoder=encoder, decoder=decoder))


@register(
    "autoencoder",
    example=lambda kind, sizes, in_channels, image_size: (
        vector(sizes[0]) if kind == "dense" else image(in_channels, image_size)
    ),
    small={"sizes": (9, 7, 3), "in_channels": 2, "image_size": 9, "channels": (3, 4), "code": 5},
    variants={"convolutional": {"kind": "convolutional"}},
)
def autoencoder(
    kind: str = "dense",
    sizes: Sequence[int] = (64, 32, 8),
    in_channels: int = 1,
    image_size: int = 28,
    channels: Sequence[int] = (8, 16),
    code: int | None = 16,
    activation: Activation = "softplus",
    bias: bool = True,
) -> AutoEncoder:
    """Auto-encoder with submodules ``encoder`` and ``decoder``, of vectors or of images.

    Neither the code nor the reconstruction passes through an activation. The variant
    ``autoencoder-convolutional`` is the one of images.

    Args:
        kind: ``"dense"``, two perceptrons, or ``"convolutional"``, convolutions that halve the image and
            transposed convolutions that double it again.
        sizes: dense: from the size of the input down to that of the code; the decoder mirrors it.
        channels: convolutional: the channels after each convolution.
        code: convolutional: the size of the code, reached by a matrix product; ``None`` to let the last
            feature map be the code.

    Raises:
        ZooError: the kind is not one of the two, or a size is not positive.

    >>> sf.zoo.autoencoder(sizes=(9, 7, 3)).encoder(torch.ones(2, 9)).shape
    torch.Size([2, 3])
    """
    if kind == "dense":
        sizes = check_sizes(sizes, "autoencoder")
        return AutoEncoder(mlp(sizes, activation, bias), mlp(sizes[::-1], activation, bias))
    if kind == "convolutional":
        return _convolutional(in_channels, image_size, channels, code, activation, bias)
    raise ZooError(unknown("kind of autoencoder", kind, _KINDS))


def _convolutional(
    in_channels: int,
    image_size: int,
    channels: Sequence[int],
    code: int | None,
    activation: Activation,
    bias: bool,
) -> AutoEncoder:
    """The auto-encoder of images.

    A 3×3 convolution of stride 2 and padding 1 takes a side of n pixels to ⌈n/2⌉; its transpose takes n to
    2n − 1, and one pixel of output padding makes up for an even side.
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
        return AutoEncoder(nn.Sequential(*encoder), nn.Sequential(*decoder))
    feature_map = (counts[-1], sides[-1], sides[-1])
    features = counts[-1] * sides[-1] ** 2
    encoder += [nn.Flatten(), nn.Linear(features, code, bias=bias)]
    expand = [nn.Linear(code, features, bias=bias), make_activation(activation), nn.Unflatten(1, feature_map)]
    return AutoEncoder(nn.Sequential(*encoder), nn.Sequential(*expand, *decoder))
