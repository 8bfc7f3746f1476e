"""Transformers: of images (Dosovitskiy et al., "An image is worth 16x16 words", 2020), and of integer ids, causal,
of the shape of GPT-2 (Radford et al., 2019).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.zoo.parts import Activation, check_image, make_activation
from surefoot.zoo.registry import ZooError, image, register, tokens, unknown

_EMBEDDING_DEVIATION = 0.02


class Attention(nn.Module):
    """Multi-head self-attention through ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ZooError(f"width {width} does not divide into {heads} heads: choose heads that divide it")
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.projection = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences ``(batch, length, width)`` to sequences of the same shape."""
        # Each of the three is (batch, heads, length, width / heads).
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        causal: bool,
        activation: Activation,
        bias: bool,
        norm_eps: float,
    ) -> None:
        super().__init__()
        hidden = max(1, round(width * mlp_ratio))
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.attention = Attention(width, heads, causal, bias)
        self.mlp_norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = nn.Sequential(
            OrderedDict(
                expand=nn.Linear(width, hidden, bias=bias),
                activation=make_activation(activation),
                contract=nn.Linear(hidden, width, bias=bias),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Sequences ``(batch, length, width)`` to sequences of the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """Adds a learned vector to each position of a sequence of at most ``length``."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.weight, std=_EMBEDDING_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences ``(batch, length, width)`` to sequences of the same shape."""
        used, available = x.shape[1], self.weight.shape[0]
        if used > available:
            raise ZooError(
                f"the sequence has {used} positions and the model knows {available}: shorten it, or build "
                "the model with a longer context"
            )
        return x + (self.weight if used == available else self.weight[:used])


class ClassToken(nn.Module):
    """Puts one learned vector before each sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.weight, std=_EMBEDDING_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences ``(batch, length, width)`` to ``(batch, length + 1, width)``."""
        return torch.cat((self.weight.expand(x.shape[0], 1, -1), x), dim=1)


class PatchEmbedding(nn.Module):
    """Cuts images into disjoint square patches and maps each to a vector, by one convolution."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
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

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, in_channels, image_size, image_size)`` to logits ``(batch, num_classes)``."""
        check_image(x, self.in_channels, self.image_size, "the vision transformer")
        x = self.norm(self.blocks(self.positions(self.class_token(self.patches(x)))))
        return self.head(x[:, 0] if self.pooling == "class" else x.mean(dim=1))


@register("vit", example=image,
          small={"image_size": 8, "patch_size": 4, "num_classes": 5, "width": 8, "depth": 2, "heads": 2},
          variants={"mean": {"pooling": "mean"}})  # fmt: skip
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
        patch_size: the side of a patch; divides ``image_size``.
        width: the size of each vector of the sequence.
        depth: the number of blocks.
        heads: the number of attention heads; divides ``width``.
        mlp_ratio: the hidden size of a block's perceptron, relative to ``width``.
        pooling: what the head reads: ``"class"``, a token of its own, or ``"mean"``, the mean of all vectors.
        bias: whether the matrix products of the blocks have intercepts.

    Raises:
        ZooError: the sizes do not divide, or there is no such pooling.

    >>> sf.zoo.vit(width=16, depth=1)(torch.ones(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise ZooError(f"vit: patches of {patch_size} do not tile images of {image_size}: choose a divisor")
    if pooling not in ("class", "mean"):
        raise ZooError(unknown("pooling of vit", pooling, ("class", "mean")))
    blocks = [Block(width, heads, mlp_ratio, False, activation, bias, norm_eps) for _ in range(depth)]
    return VisionTransformer(in_channels, image_size, patch_size, num_classes, width, pooling, blocks, norm_eps)


class LanguageModel(nn.Sequential):
    """Token table, positions, causal blocks, norm, linear head: from ids to logits; made by :func:`gpt`."""

    def __init__(
        self, vocabulary: int, context: int, width: int, blocks: list[Block], tie_weights: bool, norm_eps: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        # As GPT-2 starts: where the table is the head's too, torch's deviation of one would give logits of √width.
        nn.init.normal_(self.tokens.weight, std=_EMBEDDING_DEVIATION)
        self.positions = Positions(context, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie_weights:
            self.head.weight = self.tokens.weight


@register("gpt", example=lambda context, vocabulary, length=None: tokens(length or min(context, 16), vocabulary),
          small={"vocabulary": 11, "context": 6, "width": 8, "depth": 2, "heads": 2},
          variants={"tied": {"tie_weights": True}})  # fmt: skip
def gpt(
    vocabulary: int = 256,
    context: int = 64,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    tie_weights: bool = False,
    activation: Activation = "gelu-tanh",
    bias: bool = True,
    norm_eps: float = 1e-5,
) -> LanguageModel:
    """Causal decoder of integer ids, by default a small one that reads bytes; sequences up to ``context``.

    GPT-2's smallest network is ``gpt(50257, 1024, 768, 12, 12, tie_weights=True)``.

    Args:
        vocabulary: the number of different ids.
        context: the longest sequence.
        width, depth, heads, mlp_ratio: as for :func:`vit`.
        tie_weights: whether the head's matrix is the token table itself (the variant ``gpt-tied``).
        bias: whether the matrix products of the blocks have intercepts; the head has none.

    >>> sf.zoo.gpt(width=16, depth=1)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """
    blocks = [Block(width, heads, mlp_ratio, True, activation, bias, norm_eps) for _ in range(depth)]
    return LanguageModel(vocabulary, context, width, blocks, tie_weights, norm_eps)
