"""Transformers: of images (Dosovitskiy et al., "An image is worth 16x16 words", 2020), and of integer ids, causal,
of the shape of GPT-2 (Radford et al., 2019). Sequences are ``(batch, length, width)``.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.zoo.parts import Activation, ZooError, check_image, make_activation

_EMBEDDING_DEVIATION = 0.02


class Attention(nn.Module):
    """Multi-head self-attention through ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ZooError(f"width {width} does not divide into {heads} heads: choose heads that divide it")
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Each of the three is (batch, heads, length, width / heads).
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with a perceptron of four widths."""

    def __init__(self, width: int, heads: int, causal: bool, activation: Activation) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        expand, contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        layers = OrderedDict(expand=expand, activation=make_activation(activation), contract=contract)
        self.mlp = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """Adds a learned vector to each position of at most ``length``, behind a learned class token if asked."""

    def __init__(self, length: int, width: int, class_token: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length + class_token, width))
        self.token = nn.Parameter(torch.empty(width)) if class_token else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_EMBEDDING_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = torch.cat((self.token.expand(x.shape[0], 1, -1), x), dim=1)
        used, available = x.shape[1], self.weight.shape[0]
        if used > available:
            raise ZooError(
                f"the sequence has {used} positions and the model knows {available}: shorten it, or build "
                "the model with a longer context"
            )
        return x + (self.weight if used == available else self.weight[:used])


class VisionTransformer(nn.Module):
    """Patches, class token, positions, blocks, norm, linear head; made by :func:`vit`."""

    def __init__(
        self, num_classes: int, image_size: int, patch_size: int, in_channels: int, width: int, blocks: list[Block]
    ) -> None:
        super().__init__()
        self.in_channels, self.image_size = in_channels, image_size
        self.patches = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)
        self.positions = Positions((image_size // patch_size) ** 2, width, class_token=True)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        check_image(x, self.in_channels, self.image_size, "the vision transformer")
        patches = self.patches(x).flatten(2).transpose(1, 2)  # (batch, patches, width)
        return self.head(self.norm(self.blocks(self.positions(patches)))[:, 0])


def vit(
    num_classes: int = 10,
    image_size: int = 32,
    patch_size: int = 4,
    in_channels: int = 3,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    activation: Activation = "gelu",
) -> VisionTransformer:
    """Vision transformer, by default a small one for images of 32×32.

    ``heads`` divides ``width``, and ``patch_size``, the side of a patch, divides ``image_size``. The article's
    ViT-B/16 is ``vit(1000, 224, 16, width=768, depth=12, heads=12)``.
    """
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise ZooError(f"vit: patches of {patch_size} do not tile images of {image_size}: choose a divisor")
    blocks = [Block(width, heads, False, activation) for _ in range(depth)]
    return VisionTransformer(num_classes, image_size, patch_size, in_channels, width, blocks)


def gpt(
    vocabulary: int = 256,
    context: int = 64,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    tie_weights: bool = False,
    activation: Activation = "gelu-tanh",
) -> nn.Sequential:
    """Causal decoder of integer ids, by default a small one that reads bytes; sequences up to ``context``.

    With ``tie_weights`` the head's matrix is the token table itself. GPT-2's smallest network is
    ``gpt(50257, 1024, 768, 12, 12, tie_weights=True)``.
    """
    model = nn.Sequential()
    model.tokens = nn.Embedding(vocabulary, width)
    # As GPT-2 starts: where the table is the head's too, torch's deviation of one would give logits of √width.
    nn.init.normal_(model.tokens.weight, std=_EMBEDDING_DEVIATION)
    model.positions = Positions(context, width)
    model.blocks = nn.Sequential(*(Block(width, heads, True, activation) for _ in range(depth)))
    model.norm = nn.LayerNorm(width)
    model.head = nn.Linear(width, vocabulary, bias=False)
    if tie_weights:
        model.head.weight = model.tokens.weight
    return model
