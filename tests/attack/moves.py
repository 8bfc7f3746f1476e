"""Operations without weights that any shape of rank two or more knows: layout, sums, products with itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attack.dice import Dice
from attack.parts import Apply

Shape = tuple[int, ...]


def scaling(dice: Dice, shape: Shape) -> nn.Module:
    return dice.one_of(
        Apply("x·0.5", lambda x: x * 0.5),
        Apply("-2x", lambda x: -2 * x),
        Apply("-x", torch.neg),
        Apply("x/3 + 1", lambda x: x / 3 + 1),
        Apply("1 - x", lambda x: 1 - x),
        Apply("x - row mean", lambda x: x - x.mean(-1, keepdim=True)),
        Apply("x·(fixed vector)", lambda x: x * torch.linspace(-1, 2, x.shape[-1], dtype=x.dtype)),
        Apply("(fixed vector)/x", lambda x: torch.linspace(-1, 2, x.shape[-1], dtype=x.dtype) / (x * x + 1)),
        Apply("x + 2x", lambda x: torch.add(x, x, alpha=2)),
        Apply("identity", lambda x: x),
    )


def softmax(dice: Dice, shape: Shape) -> nn.Module:
    dim = dice.whole(0, len(shape) - 1)
    return dice.one_of(
        Apply(f"softmax({dim})", lambda x: x.softmax(dim)),
        Apply(f"log_softmax({dim})", lambda x: x.log_softmax(dim)),
        Apply(f"softmax({dim}) of 3x", lambda x: (3 * x).softmax(dim)),
        Apply(f"logsumexp({dim})", lambda x: x.logsumexp(dim, keepdim=True)),
    )


def layout(dice: Dice, shape: Shape) -> nn.Module:
    """Every number of the result is a number of the input, or a constant."""
    choices = [
        Apply("flip", lambda x: x.flip(-1)),
        Apply("flip samples", lambda x: x.flip(0)),
        Apply("roll", lambda x: x.roll(1, -1)),
        Apply("roll all", lambda x: x.roll(1)),
        Apply("cat with itself", lambda x: torch.cat([x, 2 * x], dim=-1)),
        Apply("cat samples", lambda x: torch.cat([x, x], dim=0)),
        Apply("hstack", lambda x: torch.hstack([x, torch.tanh(x)])),
        Apply("pad", lambda x: F.pad(x, (1, 2), value=0.5)),
        Apply("pad and crop", lambda x: F.pad(x, (2, -1), value=-1.5)),
        Apply("repeat", lambda x: x.repeat(*[1] * (x.dim() - 1), 2)),
        Apply("repeat samples", lambda x: x.repeat(2, *[1] * (x.dim() - 1))),
        Apply("repeat_interleave", lambda x: x.repeat_interleave(2, dim=-1)),
        Apply("expand", lambda x: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]).flatten(0, 1)),
        Apply("index", lambda x: x[..., torch.tensor([0, 0, x.shape[-1] - 1])]),
        Apply("index samples", lambda x: x[torch.tensor([0, x.shape[0] - 1, 0])]),
        Apply("index_select", lambda x: x.index_select(1, torch.tensor([0, 0]))),
        Apply("gather", lambda x: x.gather(-1, torch.zeros_like(x, dtype=torch.long))),
        Apply("where", lambda x: torch.where(torch.arange(x.shape[-1]) % 2 == 0, x, 0.5 * x * x)),
        Apply("masked_fill", lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 0, 0.25)),
        Apply("unbind and stack", lambda x: torch.stack(x.unbind(-1)[::-1], dim=-1)),
        Apply("unbind samples", lambda x: torch.stack(x.unbind(0)[::-1], dim=1)),
        Apply("tril", torch.tril),
        Apply("flatten", lambda x: x.flatten(1)),
        Apply("flatten from zero", lambda x: x.flatten(0, 1).unsqueeze(0)),
        Apply("transpose", lambda x: x.transpose(0, 1)),
        Apply("swapaxes", lambda x: x.swapaxes(-1, -2)),
        Apply("joined", lambda x: x.reshape(x.shape[0] * x.shape[1], -1)),
        Apply("all in one row", lambda x: x.reshape(1, -1)),
    ]
    if shape[-1] > 1:
        choices += [
            Apply("slice", lambda x: x[..., 1:]),
            Apply("every other", lambda x: x[..., ::2]),
            Apply("narrow", lambda x: x.narrow(-1, 0, x.shape[-1] - 1)),
            Apply("select", lambda x: x.select(-1, 0).unsqueeze(-1)),
            Apply("tensor_split", lambda x: torch.cat(x.tensor_split(2, -1)[::-1], -1)),
        ]
    return dice.one_of(*choices)


def reduction(dice: Dice, shape: Shape) -> nn.Module:
    return dice.one_of(
        Apply("sum kept", lambda x: x.sum(-1, keepdim=True)),
        Apply("mean kept", lambda x: x.mean(1, keepdim=True)),
        Apply("mean of samples", lambda x: x.mean(0, keepdim=True)),
        Apply("sum of samples", lambda x: x.sum(0, keepdim=True)),
        Apply("cumsum", lambda x: x.cumsum(-1)),
        Apply("cumsum of samples", lambda x: x.cumsum(0)),
        Apply("maximum", lambda x: x.amax(-1, keepdim=True)),
        Apply("minimum of samples", lambda x: x.amin(0, keepdim=True)),
    )


def product(dice: Dice, shape: Shape) -> nn.Module:
    """Products of the input with itself, in all ways of broadcasting."""
    choices = [
        Apply("x ∘ row mean", lambda x: x * x.mean(-1, keepdim=True)),
        Apply("x ∘ sample sum", lambda x: x * x.sum(0, keepdim=True)),
        Apply("x ∘ first sample", lambda x: x * x[0]),
        Apply("x ∘ flipped", lambda x: x * x.flip(-1)),
        Apply("x / (1 + row mean²)", lambda x: x / (1 + x.square().mean(-1, keepdim=True))),
        Apply("einsum", lambda x: torch.einsum("...i,...j->...ij", x, x).flatten(-2)),
        Apply("outer product", lambda x: x.unsqueeze(-1) * x.unsqueeze(-2)),
    ]
    if shape[-1] > 1:
        choices.append(Apply("split and multiply", lambda x: x.split([1, x.shape[-1] - 1], -1)[0] * x[..., 1:]))
    if shape[-1] % 2 == 0:
        choices += [
            Apply("glu", lambda x: F.glu(x, dim=-1)),
            Apply("chunks multiplied", lambda x: torch.mul(*x.chunk(2, dim=-1))),
        ]
    return dice.one_of(*choices)


def turn(dice: Dice, shape: Shape) -> nn.Module:
    """To another rank."""
    if len(shape) == 2:
        return dice.one_of(
            Apply("as signal", lambda x: x.unsqueeze(1)),
            Apply("as sequence", lambda x: x.unsqueeze(-1)),
            Apply("pairs of samples", lambda x: x[:, None, :] - x[None, :, :]),
        )
    return dice.one_of(
        Apply("mean of the rest", _mean_of_the_rest),
        Apply("first position", lambda x: x[:, 0]),
        Apply("channels last", lambda x: x.movedim(1, -1)),
    )


def _mean_of_the_rest(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())))
