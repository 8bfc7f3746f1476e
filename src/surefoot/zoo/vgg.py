r"""The VGG network of the paper's application, and its smooth and batch-normalised variations.

Layer :math:`t` is :math:`x_t = \nu_t \circ \pi_t \circ \alpha_t(b_t(x_{t-1}, u_t))`: convolution or matrix
product, then activation, then pooling, then normalisation (paper, "Layer decomposition").
"""

from __future__ import annotations

import torch
from torch import nn

from surefoot.zoo.parts import Activation, ZooError, check_image, make_activation, make_pooling, scaled, unknown

# Channels and number of convolutions of each stage; a pooling ends it (paper, "Detailed network").
_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
_HIDDEN = 4096
_REDUCTION = 2 ** len(_STAGES)


class VGG(nn.Module):
    """Convolutions in ``features``, fully connected layers in ``classifier``; made by :func:`vgg16`."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential, channels: int, size: int) -> None:
        super().__init__()
        self.in_channels, self.image_size = channels, size
        self.features, self.flatten, self.classifier = features, nn.Flatten(), classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_image(x, self.in_channels, self.image_size, "VGG")
        return self.classifier(self.flatten(self.features(x)))


def vgg16(
    num_classes: int = 1000,
    image_size: int = 224,
    in_channels: int = 3,
    activation: Activation = "relu",
    pooling: str = "max",
    batch_norm: float | None = None,
    batch_norm_affine: bool = False,
    batch_norm_position: str = "last",
    softmax: bool = True,
    width: float = 1.0,
) -> VGG:
    """VGG-16: 13 convolutions, 5 poolings, 3 fully connected layers, soft-max.

    The list of layers is the paper's, appendix "Detailed network" (configuration D of Simonyan and Zisserman,
    2014). ``vgg16-smooth`` has soft-plus and average pooling; ``vgg16-batchnorm`` also has a batch-normalisation
    at each convolutional layer, with the smaller of the two ε that the paper compares; the other is 1e2.

    Args:
        batch_norm: the ε of a batch-normalisation at each convolutional layer; ``None`` for no normalisation.
        batch_norm_affine: whether the normalisation has a scale and a shift; the paper's has not.
        batch_norm_position: ``"last"``, after activation and pooling, as in the paper, or ``"first"``, directly
            after the convolution, as usual.
        softmax: whether the outputs are probabilities, as in the paper, or logits.
        width: multiplies all hidden channels and sizes.
    """
    if image_size < _REDUCTION:
        raise ZooError(f"vgg16 halves its images 5 times: image_size must be at least 32, not {image_size}")
    if batch_norm is not None and not batch_norm > 0:
        raise ZooError(f"batch_norm is the ε of the normalisation and must be positive, not {batch_norm}")
    if batch_norm_position not in ("first", "last"):
        raise unknown("batch_norm_position", batch_norm_position, ("first", "last"))

    features: list[nn.Module] = []
    inputs = in_channels
    for stage_channels, convolutions in _STAGES:
        channels = scaled(stage_channels, width)
        for position in range(1, convolutions + 1):
            features.append(nn.Conv2d(inputs, channels, kernel_size=3, padding=1))
            after = [make_activation(activation)]
            if position == convolutions:
                after.append(make_pooling(pooling, 2))
            if batch_norm is not None:
                normalization = nn.BatchNorm2d(channels, eps=batch_norm, affine=batch_norm_affine)
                after.insert(0 if batch_norm_position == "first" else len(after), normalization)
            features += after
            inputs = channels

    hidden = scaled(_HIDDEN, width)
    classifier: list[nn.Module] = []
    inputs *= (image_size // _REDUCTION) ** 2
    for _ in range(2):
        classifier += [nn.Linear(inputs, hidden), make_activation(activation)]
        inputs = hidden
    classifier += [nn.Linear(hidden, num_classes), *([nn.Softmax(dim=1)] if softmax else [])]
    return VGG(nn.Sequential(*features), nn.Sequential(*classifier), in_channels, image_size)
