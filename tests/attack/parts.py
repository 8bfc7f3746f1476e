"""Building blocks that ``torch.nn`` does not have: combinations of branches, attention, layers written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Apply(nn.Module):
    """A function without parameters, with a label for reports."""

    def __init__(self, label: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.label, self.function = label, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.label


class Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Dense(nn.Module):
    """The input next to what a block makes of it, as in dense networks."""

    def __init__(self, block: nn.Module, dim: int) -> None:
        super().__init__()
        self.block, self.dim = block, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.block(x), 0.5 * x], dim=self.dim)


class Highway(nn.Module):
    def __init__(self, block: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.block, self.gate = block, gate

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * self.block(x) + (1 - t) * x


class Product(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(x)


class Quotient(nn.Module):
    """A branch divided by one that stays away from zero."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) / (2.0 + torch.tanh(self.second(x)))


class Shared(nn.Module):
    """One block applied twice: its weights are used twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.block(x)))


class HandRMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, dim: int, eps: float = 1e-2) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class HandLinear(nn.Module):
    """A product with a function of the weights, and a broadcast bias."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, out)), nn.Parameter(torch.randn(1, out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.tanh(self.weight) + torch.sin(self.bias)


class TiedPair(nn.Module):
    """Encoder and decoder with one matrix, transposed."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dim) / math.sqrt(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


class TiedModules(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.softplus(self.first(x)))


class Positions(nn.Module):
    """A table added to every sample: trained, or fixed."""

    def __init__(self, length: int, dim: int, trained: bool) -> None:
        super().__init__()
        table = torch.randn(length, dim)
        if trained:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Gram(nn.Module):
    """Products of all pairs of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(-1, -2)


class SelfBilinear(nn.Module):
    def __init__(self, dim: int, out: int, bias: bool) -> None:
        super().__init__()
        self.form = nn.Bilinear(dim, dim, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, torch.tanh(x))


class Conditioned(nn.Module):
    """A normalisation whose scale and shift are computed from the batch, as conditional networks do."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(rows, 1), nn.Linear(rows, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = (layer(x.t()).flatten() for layer in (self.scale, self.shift))
        return F.layer_norm(x, x.shape[-1:], scale, shift, eps=1e-2)


class Mixed(nn.Module):
    """A table of matrices, one per position, applied to every sample: factors of different rank."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Linear(dim, dim * dim)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        matrices = self.table(x).reshape(-1, self.dim, self.dim)  # one per sample
        stacked = x.unsqueeze(1).unsqueeze(1).expand(-1, x.shape[0], 1, self.dim)
        return (stacked @ matrices).flatten(1)


class GatedUnit(nn.Module):
    """The feed-forward part of recent language models."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(dim, width), nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Self-attention through the fused operation; the mode says how positions are masked or weighted."""

    MODES = ("plain", "causal", "boolean mask", "real mask", "scaled", "grouped")

    def __init__(self, dim: int, heads: int, mode: str) -> None:
        super().__init__()
        self.heads, self.mode, self.width = heads, mode, 2
        groups = 1 if mode == "grouped" else heads
        self.query = nn.Linear(dim, heads * self.width)
        self.key, self.value = nn.Linear(dim, groups * self.width), nn.Linear(dim, groups * self.width)
        self.out = nn.Linear(heads * self.width, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (f(x).reshape(n, t, -1, self.width).transpose(1, 2) for f in (self.query, self.key, self.value))
        options: dict[str, object] = {}
        if self.mode == "causal":
            options["is_causal"] = True
        elif self.mode == "boolean mask":
            options["attn_mask"] = torch.ones(t, t, dtype=torch.bool).tril(1)
        elif self.mode == "real mask":
            options["attn_mask"] = torch.linspace(-1, 1, t * t, dtype=x.dtype).reshape(t, t)
        elif self.mode == "scaled":
            options["scale"] = 1.5
        elif self.mode == "grouped":
            options["enable_gqa"] = True
        mixed = F.scaled_dot_product_attention(q, k, v, **options)
        return self.out(mixed.transpose(1, 2).reshape(n, t, -1))

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, heads={self.heads}"


class HandAttention(nn.Module):
    """Self-attention written out, with a mask of minus infinity."""

    def __init__(self, dim: int, masked: bool) -> None:
        super().__init__()
        self.project, self.masked = nn.Linear(dim, 3 * dim), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        if self.masked:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, float("-inf"))
        return torch.matmul(scores.softmax(dim=-1), v)


class MultiHead(nn.Module):
    """``nn.MultiheadAttention`` on itself, with or without its weights among the results."""

    def __init__(self, dim: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(dim, heads, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=self.weights)
        return torch.cat([mixed, weights], dim=-1) if self.weights else mixed


class HandGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class HandSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.5 * x)


class HandSquareReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class HandSoftsign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(1.0 + x * x)
