"""A small causal language model, of the shape of GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.zoo.parts import Activation
from surefoot.zoo.registry import register
from surefoot.zoo.samples import tokens
from surefoot.zoo.transformer import Block, Positions, token_embedding


class LanguageModel(nn.Module):
    """Token table, positions, causal blocks, norm, linear head; made by :func:`gpt`."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        blocks: list[Block],
        tie_weights: bool,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.tokens = token_embedding(vocabulary, width)
        self.positions = Positions(context, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie_weights:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Integer ids ``(batch, length)`` to logits of each next token ``(batch, length, vocabulary)``."""
        return self.head(self.norm(self.blocks(self.positions(self.tokens(ids)))))


@register(
    "gpt",
    example=lambda context, vocabulary, length=None: tokens(length or min(context, 16), vocabulary),
    small={"vocabulary": 11, "context": 6, "width": 8, "depth": 2, "heads": 2},
    variants={"tied": {"tie_weights": True}},
)
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
        width: the size of each vector of the sequence.
        depth: the number of blocks.
        heads: the number of attention heads; divides ``width``.
        mlp_ratio: the hidden size of a block's perceptron, relative to ``width``.
        tie_weights: whether the head's matrix is the token table itself (the variant ``gpt-tied``).
        activation: of the perceptrons, by name or class.
        bias: whether the matrix products of the blocks have intercepts; the head has none.
        norm_eps: the ε of the layer normalisations.
    """
    blocks = [Block(width, heads, mlp_ratio, True, activation, bias, norm_eps) for _ in range(depth)]
    return LanguageModel(vocabulary, context, width, blocks, tie_weights, norm_eps)
