"""Models as people write them, of a few hundred numbers each, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH = 4, 4, 8


class Apply(nn.Module):
    """A function of named modules and of the inputs."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def _causal(dtype: torch.dtype = torch.float64) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=dtype)


def _decoder(function: Callable[..., Tensor]) -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
    model = Apply(function, decoder=nn.TransformerDecoder(layer, 1), head=nn.Linear(WIDTH, 3))
    model.register_buffer("mask", _causal())
    return model


def _transformer() -> nn.Module:
    whole = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0, activation="gelu", batch_first=True)

    def run(m: Any, source: Tensor, target: Tensor) -> Tensor:
        return m.head(m.whole(source, target, tgt_mask=_causal())).mean(1)

    return Apply(run, whole=whole, head=nn.Linear(WIDTH, 3))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
    stack = nn.TransformerEncoder(layer, 1)
    return Apply(lambda m, x: m.head(m.stack(x, mask=_causal())).mean(1), stack=stack, head=nn.Linear(WIDTH, 3))


MASKED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "mask in a buffer": (
        lambda: _decoder(lambda m, x, y: m.head(m.decoder(x, y, tgt_mask=m.mask)).mean(1)), ("states", "memory"),
    ),
    "mask made in forward": (
        lambda: _decoder(lambda m, x, y: m.head(m.decoder(x, y, tgt_mask=_causal(x.dtype))).mean(1)),
        ("states", "memory"),
    ),
    "mask of truth values": (
        lambda: _decoder(lambda m, x, y: m.head(m.decoder(x, y, tgt_mask=m.mask.isinf())).mean(1)),
        ("states", "memory"),
    ),
    "mask as an input": (
        lambda: _decoder(lambda m, x, y, mask: m.head(m.decoder(x, y, tgt_mask=mask)).mean(1)),
        ("states", "memory", "mask"),
    ),
    "hint": (
        lambda: _decoder(lambda m, x, y: m.head(m.decoder(x, y, tgt_mask=m.mask, tgt_is_causal=True)).mean(1)),
        ("states", "memory"),
    ),
    "transformer": (_transformer, ("memory", "states")),
    "encoder": (_encoder, ("states",)),
}  # fmt: skip


def _bags(mode: str, padding: int | None = None, offsets: bool = False, learned: bool = False) -> nn.Module:
    def run(m: Any, ids: Tensor, more: Tensor | None = None) -> Tensor:
        weights = m.own if learned else None if offsets else more
        return m.head(m.bags(ids.reshape(-1), more) if offsets else m.bags(ids, per_sample_weights=weights))

    model = Apply(run, bags=nn.EmbeddingBag(10, 4, mode=mode, padding_idx=padding), head=nn.Linear(4, 2))
    if learned:
        model.own = nn.Parameter(torch.rand(BATCH, 3))
    return model


def _unet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        fine = F.gelu(m.first(x))
        return m.last(torch.cat([m.up(F.gelu(m.down(fine))), fine], 1)).flatten(1)

    return Apply(run, first=nn.Conv2d(1, 2, 3, padding=1), down=nn.Conv2d(2, 3, 3, stride=2, padding=1),
                 up=nn.ConvTranspose2d(3, 2, 2, stride=2), last=nn.Conv2d(4, 1, 3, padding=1))  # fmt: skip


def _mixture_of_experts() -> nn.Module:
    experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2)) for _ in range(3))

    def run(m: Any, x: Tensor) -> Tensor:
        return torch.einsum("be,beo->bo", m.gate(x).softmax(-1), torch.stack([e(x) for e in m.experts], 1))

    return Apply(run, experts=experts, gate=nn.Linear(5, 3))


def _messages() -> nn.Module:
    def run(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        gathered = torch.zeros(len(x), 4).to(x).index_add(0, edges[1], torch.tanh(m.message(x[edges[0]])))
        return m.update(torch.cat([x, gathered], -1))

    return Apply(run, message=nn.Linear(5, 4), update=nn.Linear(9, 2))


def _coupling_flow() -> nn.Module:
    nets = nn.ModuleList(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def run(m: Any, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x)).to(x)
        for net in m.nets:
            kept, moved = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            scale = scale.tanh()
            x, volume = torch.cat([moved * scale.exp() + shift, kept], -1), volume + scale.sum(-1)
        return (0.5 * (x**2).sum(-1) - volume).unsqueeze(-1)

    return Apply(run, nets=nets)


def _mixture_density() -> nn.Module:
    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(m.body(x))
        width = F.softplus(m.width(h)) + 0.1
        density = m.weight(h).log_softmax(-1) - 0.5 * ((y - m.mean(h)) / width) ** 2 - width.log()
        return -torch.logsumexp(density, -1, keepdim=True)

    parts = {name: nn.Linear(4, 3) for name in ("weight", "mean", "width")}
    return Apply(run, body=nn.Linear(5, 4), **parts)


def _contrastive() -> nn.Module:
    body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    return Apply(lambda m, a, b: F.cosine_similarity(m.body(a)[:, None], m.body(b)[None], dim=-1) / 0.5, body=body)


def _cross_attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        latent = m.latent.weight.expand(len(x), -1, -1)
        return m.head((latent + m.attention(latent, x, x, need_weights=False)[0]).mean(1))

    return Apply(run, latent=nn.Embedding(2, WIDTH), head=nn.Linear(WIDTH, 2),
                 attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True))  # fmt: skip


def _distances() -> nn.Module:
    return Apply(lambda m, x: m.last(torch.pdist(m.first(x))[None]), first=nn.Linear(5, 3), last=nn.Linear(6, 2))


def _scattered(reduce: str) -> nn.Module:
    places = torch.tensor([0, 1, 0, 2]).unsqueeze(1).expand(BATCH, 4)
    return Apply(lambda m, x: torch.ones(3, 4).to(x).scatter(0, places, m.layer(x), reduce=reduce),
                 layer=nn.Linear(5, 4))  # fmt: skip


def _dueling() -> nn.Module:
    def run(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
        h = F.elu(m.body(x))
        advantage = m.advantage(h)
        return (m.value(h) + advantage - advantage.mean(1, keepdim=True)).gather(1, chosen.unsqueeze(1))

    return Apply(run, body=nn.Linear(5, 6), value=nn.Linear(6, 1), advantage=nn.Linear(6, 3))


ORDINARY: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "bags, weighted": (lambda: _bags("sum"), ("ids", "weights")),
    "bags, own weights": (lambda: _bags("sum", 3, learned=True), ("ids",)),
    "bags, largest": (lambda: _bags("max"), ("distinct",)),
    "bags, largest but padding": (lambda: _bags("max", 3), ("distinct",)),
    "bags with offsets": (lambda: _bags("mean", offsets=True), ("ids", "offsets")),
    "U-Net": (_unet, ("image",)),
    "mixture of experts": (_mixture_of_experts, ("vectors",)),
    "messages on a graph": (_messages, ("vectors", "edges")),
    "coupling flow": (_coupling_flow, ("quadruples",)),
    "mixture density": (_mixture_density, ("vectors", "numbers")),
    "contrastive": (_contrastive, ("vectors", "others")),
    "cross-attention": (_cross_attention, ("states",)),
    "distances": (_distances, ("vectors",)),
    "scattered sums": (lambda: _scattered("add"), ("vectors",)),
    "scattered products": (lambda: _scattered("multiply"), ("vectors",)),
    "dueling": (_dueling, ("vectors", "choices")),
}


def inputs(names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Inputs by what they are."""
    generator = torch.Generator().manual_seed(1)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    known = {
        "states": real(BATCH, LENGTH, WIDTH), "memory": real(BATCH, 3, WIDTH), "mask": _causal().isinf(),
        "vectors": real(BATCH, 5), "others": real(BATCH, 5), "numbers": real(BATCH, 1),
        "quadruples": real(BATCH, 4), "image": real(BATCH, 1, 4, 4), "weights": real(BATCH, 3),
        "choices": torch.tensor([0, 2, 1, 0]), "ids": torch.tensor([[3, 3, 1], [0, 3, 9], [5, 5, 5], [2, 7, 1]]),
        "offsets": torch.tensor([0, 2, 2, 7]),
        "distinct": torch.tensor([[3, 8, 1], [0, 3, 9], [5, 4, 6], [2, 7, 1]]),
        "edges": torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]),
    }  # fmt: skip
    return tuple(known[name] for name in names)
