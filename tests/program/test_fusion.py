"""Formulas that are spelled out become the functions that they are, with the same values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.program import trace


def stable_softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def stable_sum(x: Tensor) -> Tensor:
    m = x.max(1, keepdim=True).values
    return m.squeeze(1) + (x - m).exp().sum(1).log()


def layer_norm(x: Tensor) -> Tensor:
    c = x - x.mean(1, keepdim=True)
    return c / (c.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()


def group_norm(x: Tensor) -> Tensor:
    return (x - x.mean((0, 1), keepdim=True)) * torch.rsqrt(x.var((0, 1), unbiased=False, keepdim=True) + 1e-3)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_by_products(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) / 2


def masked_softmax(x: Tensor) -> Tensor:
    y = x.masked_fill(torch.eye(4, 5, dtype=torch.bool), -math.inf)
    return y.exp() / y.exp().sum(1, keepdim=True)


PATTERNS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("softmax", stable_softmax), ("softmax", lambda x: x.exp() / x.exp().sum(1, keepdim=True)),
    ("softmax", masked_softmax), ("logsumexp", stable_sum), ("logsumexp", lambda x: x.exp().sum(0).log()),
    ("logsumexp", lambda x: x.softmax(1).log()), ("normalize", layer_norm), ("normalize", group_norm),
    ("gelu_tanh", gelu_new), ("gelu_tanh", gelu_by_products), ("gelu",
        lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    ("silu", lambda x: x * x.sigmoid()), ("silu", lambda x: x / (1 + (-x).exp())), ("sigmoid",
        lambda x: 1 / (1 + (-x).exp())),
    ("mish", lambda x: x * F.softplus(x).tanh()), ("softplus(1)", lambda x: (1 + x.exp()).log()),
    ("softplus(1)", lambda x: x.exp().log1p()), ("relu", lambda x: torch.where(x > 0, x, 0.0)),
    ("relu", lambda x: torch.where(x > 0, x, 0.1 * x)), ("relu", lambda x: x * (x > 0)), ("square",
        lambda x: x * x),
]  # fmt: skip


class Formula(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(("word", "function"), PATTERNS)
def test_a_formula_is_recognised(word: str, function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    program = trace(Formula(function), x)
    names = [
        str(n.options["function"]) if n.primitive.name == "scalar" else n.primitive.name for n in program.nodes
    ]
    assert word in names
    assert not {"exp", "log", "erf", "tanh", "rsqrt", "sqrt", "reciprocal", "relu'"} & set(names), names
    torch.testing.assert_close(program.results({"x": x})[0], function(x), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp() / (2 * x).exp().sum(1, keepdim=True),
        lambda x: x.exp() / x.exp().sum((0, 1), keepdim=True),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt(),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt(),
        lambda x: (x - x.mean(0, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt(),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044 * x**3))),
        lambda x: x * (1 + torch.erf(x)),
        lambda x: x * (2 * x).sigmoid(),
        lambda x: (2 + x.exp()).log(),
        lambda x: 1 / (1 + x.exp()) + x * (x > 1),
        lambda x: x * (1 - (x > 1).double()) + x.max(1, keepdim=True).values + (x - 1).exp().sum(1,
            keepdim=True).log(),
    ],
)  # fmt: skip
def test_what_only_looks_like_one_has_its_own_value(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(
        trace(Formula(function), x).results({"x": x})[0], function(x), rtol=1e-13, atol=1e-14
    )
