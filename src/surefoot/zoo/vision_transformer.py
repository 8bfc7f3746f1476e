"""A small vision transformer (Dosovitskiy et al., "An image is worth 16x16 words", 2020)."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.zoo.naming import ZooError, unknown
from surefoot.zoo.parts import Activation, check_image
from surefoot.zoo.registry import register
from surefoot.zoo.samples import image
from surefoot.zoo.transformer import Block, ClassToken, Positions


class PatchEmbedding(nn.Module):
    """Cuts images into disjoint square patches and maps each to a vector, by one convolution."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images ``(batch, in_channels, height, width)`` to sequences ``(batch, patches, width)``."""
        return self.convolution(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Patches, class token, positions, blocks, norm, linear head; made by :func:`vit`."""

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        patch_size: int,
        num_classes: int,
        width: int,
        pooling: str,
        blocks: list[Block],
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.in_channels, self.image_size, self.pooling = in_channels, image_size, pooling
        patches = (image_size // patch_size) ** 2
        with_token = pooling == "class"
        self.patches = PatchEmbedding(in_channels, width, patch_size)
        self.class_token = ClassToken(width) if with_token else nn.Identity()
        self.positions = Positions(patches + with_token, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images ``(batch, in_channels, image_size, image_size)`` to logits ``(batch, num_classes)``."""
        check_image(x, self.in_channels, self.image_size, "the vision transformer")
        x = self.norm(self.blocks(self.positions(self.class_token(self.patches(x)))))
        return self.head(x[:, 0] if self.pooling == "class" else x.mean(dim=1))


@register(
    "vit",
    example=image,
    small={"image_size": 8, "patch_size": 4, "num_classes": 5, "width": 8, "depth": 2, "heads": 2},
    variants={"mean": {"pooling": "mean"}},
)
def vit(
    num_classes: int = 10,
    image_size: int = 32,
    patch_size: int = 4,
    in_channels: int = 3,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    pooling: str = "class",
    activation: Activation = "gelu",
    bias: bool = True,
    norm_eps: float = 1e-5,
) -> VisionTransformer:
    """Vision transformer, by default a small one for images of 32×32.

    The article's ViT-B/16 is ``vit(1000, 224, 16, width=768, depth=12, heads=12)``. The variant
    ``vit-mean`` reads the mean of the sequence instead of a class token.

    Args:
        num_classes: the number of logits.
        image_size: height and width of the images.
        patch_size: the side of a patch; divides ``image_size``.
        in_channels: the channels of the images.
        width: the size of each vector of the sequence.
        depth: the number of blocks.
        heads: the number of attention heads; divides ``width``.
        mlp_ratio: the hidden size of a block's perceptron, relative to ``width``.
        pooling: what the head reads: ``"class"``, a token of its own, or ``"mean"``, the mean of all vectors.
        activation: of the perceptrons, by name or class.
        bias: whether the matrix products of the blocks have intercepts.
        norm_eps: the ε of the layer normalisations.

    Raises:
        ZooError: the sizes do not divide, or there is no such pooling.
    """
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise ZooError(f"vit: patches of {patch_size} do not tile images of {image_size}: choose a divisor")
    if pooling not in ("class", "mean"):
        raise ZooError(unknown("pooling of vit", pooling, ("class", "mean")))
    blocks = [Block(width, heads, mlp_ratio, False, activation, bias, norm_eps) for _ in range(depth)]
    return VisionTransformer(in_channels, image_size, patch_size, num_classes, width, pooling, blocks, norm_eps)
