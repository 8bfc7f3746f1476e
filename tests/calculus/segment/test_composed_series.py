"""Products, quotients, soft-max, normalisations and parts of tensors along a segment contain the exact function to
every order: judged with sixty digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.segment.walk import expand, leaf_models
from surefoot.operations.call import Norms

D = torch.float64
EPS = 1e-5
_exp, _log, _sqrt = np.vectorize(mp.exp), np.vectorize(mp.log), np.vectorize(mp.sqrt)


def _groups(z: Any, shape: tuple[int, ...], centre: bool = True) -> Any:
    g = z.reshape(shape)
    g = g - g.sum(-1, keepdims=True) / g.shape[-1] if centre else g
    return (g / _sqrt((g * g).sum(-1, keepdims=True) / g.shape[-1] + mp.mpf(EPS))).reshape(z.shape)


def _softmax(z: Any) -> Any:
    e = _exp(z)
    return e / e.sum(-1, keepdims=True)


_APART = torch.tensor([27.0, 9.0, 0.0, 45.0, 18.0, 36.0], dtype=D)


def _descending(z: Any) -> Any:
    """Each row in order; the entries stay so far apart that it is always the same."""
    return (z + _APART.numpy())[:, _APART.argsort(descending=True).numpy()]


def _below(z: Any) -> Any:
    """Causal attention of three positions with two numbers each."""
    q = z.reshape(-1, 3, 2)
    rows = []
    for sample in q:
        e = np.tril(_exp((sample @ sample.T) / mp.sqrt(2)))
        rows.append((e / e.sum(-1, keepdims=True)) @ sample)
    return np.array(rows).reshape(z.shape)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "product": (lambda z: z * z.flip(1), lambda z: z * z[:, ::-1]),
    "copied": (lambda z: z * z[:, :1], lambda z: z * z[:, :1]),
    "quotient": (lambda z: z / (z[:, :1] + 9), lambda z: z / (z[:, :1] + 9)),
    "over": (lambda z: z[:, :2] / (z[:, 2:4] * z[:, 2:4] + 1), lambda z: z[:, :2] / (z[:, 2:4] * z[:, 2:4] + 1)),
    "matrices": (
        lambda z: z.reshape(-1, 2, 3) @ z.reshape(-1, 3, 2),
        lambda z: np.array([a @ b for a, b in zip(z.reshape(-1, 2, 3), z.reshape(-1, 3, 2), strict=True)]),
    ),
    "soft-max": (lambda z: z.softmax(1), _softmax),
    "soft-max over samples": (lambda z: z.softmax(0), lambda z: _softmax(z.T).T),
    "logarithm": (lambda z: z.log_softmax(1), lambda z: _log(_softmax(z))),
    "sum of exponentials": (lambda z: z.logsumexp(1), lambda z: _log(_exp(z).sum(1))),
    "layer": (lambda z: F.layer_norm(z, (6,), eps=EPS), lambda z: _groups(z, (-1, 6))),
    "root": (lambda z: F.rms_norm(z, (6,), eps=EPS), lambda z: _groups(z, (-1, 6), centre=False)),
    "group": (lambda z: F.group_norm(z, 2, eps=EPS), lambda z: _groups(z, (-1, 2, 3))),
    "batch": (
        lambda z: F.batch_norm(z, None, None, training=True, eps=EPS),
        lambda z: _groups(np.ascontiguousarray(z.T), (6, -1)).T,
    ),
    "attention": (
        lambda z: F.scaled_dot_product_attention(*[z.reshape(-1, 1, 3, 2)] * 3, is_causal=True).reshape(-1, 6),
        _below,
    ),
    "chunk": (lambda z: z.chunk(2, 1)[1] * z.chunk(2, 1)[0], lambda z: z[:, 3:] * z[:, :3]),
    "split": (lambda z: z.split([2, 4], 1)[1].tanh(), lambda z: np.vectorize(mp.tanh)(z[:, 2:])),
    "sorted": (
        lambda z: (z + _APART).sort(1, descending=True).values.tanh(),
        lambda z: np.vectorize(mp.tanh)(_descending(z)),
    ),
    "largest": (
        lambda z: (z + _APART).topk(2, 1).values * (z + _APART).max(1, keepdim=True).values,
        lambda z: _descending(z)[:, :2] * _descending(z)[:, :1],
    ),
    "smallest": (lambda z: (z + _APART).min(1).values, lambda z: _descending(z)[:, 5]),
    "largest at a place": (
        lambda z: (z + _APART).scatter_reduce(1, torch.zeros(len(z), 6, dtype=torch.int64), z, "amax").sin(),
        lambda z: np.vectorize(mp.sin)(z + _APART.numpy()),
    ),
    "unbind": (lambda z: z.unbind(1)[2].tanh(), lambda z: np.vectorize(mp.tanh)(z[:, 2])),
}


class Applied(nn.Module):
    """A function of a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.function = nn.Parameter(torch.randn(6, 4, dtype=D)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.linear(x, self.weight))


def exactly(value: Tensor) -> Any:
    return np.vectorize(mp.mpf, otypes=[object])(value.detach().numpy())


@pytest.mark.parametrize("length", [1e-6, 0.02])
@pytest.mark.parametrize("order", [3, 5])
@pytest.mark.parametrize("name", CASES)
def test_the_model_contains_the_function(name: str, order: int, length: float) -> None:
    function, exact = CASES[name]
    model = Applied(function)
    x, direction = torch.randn(5, 4, dtype=D), torch.randn(6, 4, dtype=D)
    prepared = Analysis.of(model, x).reading.prepared
    values = {leaf.name: model.weight if leaf.path == "weight" else x for leaf in prepared.leaves.values()}
    values |= {name: value for name, value in prepared.held.items() if name in prepared.leaves}
    (weight,) = (leaf.name for leaf in prepared.leaves.values() if leaf.path == "weight")
    leaves = leaf_models(prepared, values, {weight: direction}, length, order)
    (found,) = expand(prepared, leaves, order, Norms())
    far = name == "attention" and length > 0.01  # the sum of exponentials may vanish, and its rule has to do
    assert found.order == (2 if far else order)
    assert found.tail is not None
    rows = 5 if found.rowwise else 1
    tails = exactly(found.tail.expand(rows, 4))
    with mp.workdps(60):
        for part in (0.0, 0.3, 1.0):
            step = mp.mpf(part * length)
            z = exact(exactly(x) @ (exactly(model.weight) + step * exactly(direction)).T)
            polynomial = sum(exactly(c) * step**j for j, c in enumerate(found.coefficients) if c is not None)
            apart = (z.reshape(rows, -1) - polynomial.reshape(rows, -1)) ** 2
            allowed = tails @ np.array([step**found.order, mp.mpf(1), step, step**2], dtype=object)
            for distance, most in zip(apart.sum(axis=1), allowed, strict=True):
                assert mp.sqrt(distance) <= most
            if length < 1e-3:  # and is not much wider than the round-off
                assert max(allowed) <= 1e-8


def test_the_order_falls_where_a_derivative_jumps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 2)).double()
    x, y = torch.randn(6, 3, dtype=D), torch.tensor([0, 1, 0, 1, 0, 1])
    domain = {order: sf.Segment({"0.weight": torch.ones(8, 3, dtype=D)}, 0.5, order) for order in (2, 4)}
    found = {
        order: sf.certify(model, x, objective=sf.CrossEntropy(y), domain=segment).smoothness
        for order, segment in domain.items()
    }
    assert found[4].is_finite
    assert found[4] <= found[2] * 1.5
