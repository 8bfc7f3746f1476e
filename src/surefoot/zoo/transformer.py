"""What the two transformers of the zoo share: attention, the pre-norm block, learned positions."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from surefoot.zoo.naming import ZooError
from surefoot.zoo.parts import Activation, make_activation

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences ``(batch, length, width)`` to sequences of the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """Adds a learned vector to each position of a sequence of at most ``length``."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.weight, std=_EMBEDDING_DEVIATION)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences ``(batch, length, width)`` to ``(batch, length + 1, width)``."""
        return torch.cat((self.weight.expand(x.shape[0], 1, -1), x), dim=1)


def token_embedding(vocabulary: int, width: int) -> nn.Embedding:
    """An embedding table with entries of standard deviation 0.02, as GPT-2 starts from.

    The table may be the head's weight too, where torch's default deviation of one would give logits of
    size √width.
    """
    table = nn.Embedding(vocabulary, width)
    nn.init.normal_(table.weight, std=_EMBEDDING_DEVIATION)
    return table
