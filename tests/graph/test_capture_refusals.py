"""A forward pass that is no function of its input and the weights is refused: what, where, what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refused import X, assert_refused, at_top, inside
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from surefoot.errors import CaptureError, SurefootError
from surefoot.operations.captured import capture


def branch(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.sum() > 0:
        return y
    return -y


def loop(self: Any, x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return self.layer(x)


def write_parameter(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.layer.weight.mul_(2)
    return self.layer(x)


def write_data(self: Any, x: Tensor) -> Tensor:
    self.layer.weight.data.mul_(2)
    return self.layer(x)


def write_buffer(self: Any, x: Tensor) -> Tensor:
    self.average.mul_(0.9).add_(x.mean(0))
    return self.layer(x - self.average)


def assign_buffer(self: Any, x: Tensor) -> Tensor:
    self.average = self.average + 1
    return self.layer(x - self.average)


def create_layer(self: Any, x: Tensor) -> Tensor:
    if self.head is None:
        self.head = nn.Linear(x.shape[1], 2)
    return self.head(x)


def write_input(self: Any, x: Tensor) -> Tensor:
    x += 1
    return self.layer(x)


def store(self: Any, x: Tensor) -> Tensor:
    self.features = self.layer(x)
    return self.features


def store_in_list(self: Any, x: Tensor) -> Tensor:
    self.history.append(self.layer(x))
    return self.history[-1]


def count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.layer(x) * self.calls


def remember(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if self.memory:
        y = y + self.memory[0]()
    self.memory.append(lambda: y)
    return y


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layer(x)
    return self.layer(x) + y


def detached_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y.detach().mul_(2)
    return y


def lower_precision(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layer(x)


# name: (model, input, what the message says, the module it names; None: no module is to blame)
CASES: dict[str, tuple[Callable[[], Any], Any, str, str | None]] = {
    "branch on data": (
        lambda: inside(branch), X, r"control flow depends on the data.*if y\.sum\(\) > 0.*torch\.where", "1",
    ),
    "packed sequence": (
        lambda: inside(
            lambda s, x: s.cell(nn.utils.rnn.pack_padded_sequence(x[None], [2], batch_first=True))[1][-1],
            cell=nn.GRU(3, 3, batch_first=True),
        ),
        X, r"size of a tensor depends on the values of another.*padded batch", "1.cell",
    ),
    "loop on data": (lambda: inside(loop), X, r"control flow.*while x\.norm\(\) > 1", "1"),
    "item": (lambda: inside(lambda s, x: s.layer(x) * x.max().item()), X, r"\.item\(\)", "1"),
    "item of a parameter": (lambda: inside(lambda s, x: x * s.layer.weight.max().item()), X, r"\.item\(\)", "1"),
    "item of a buffer": (lambda: inside(lambda s, x: s.layer(x) * s.average[0].item()), X, r"\.item\(\)", "1"),
    "float": (lambda: inside(lambda s, x: s.layer(x) * float(x.max())), X, "control flow.*number", "1"),
    "tolist": (lambda: inside(lambda s, x: s.layer(x) * sum(x[0].tolist())), X, "tolist", "1"),
    "range of data": (lambda: inside(lambda s, x: sum(x for _ in range(int(x.sum())))), X, "loop", "1"),
    "mask selects": (lambda: inside(lambda s, x: s.layer(x)[x > 0]), X, "shape.*depends on the data", "1"),
    "torch.cond": (
        lambda: inside(lambda s, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (s.layer(x),))),
        X, "control flow", "1",
    ),
    "writes parameter": (lambda: inside(write_parameter), X, "writes into the parameter 'weight'", "1.layer"),
    "writes parameter.data": (lambda: inside(write_data), X, r"\.data", "1"),
    "writes buffer": (lambda: inside(write_buffer), X, "reads the buffer 'average' and writes", "1"),
    "assigns buffer": (lambda: inside(assign_buffer), X, "assigns another value.*'average'", "1"),
    "creates a layer": (lambda: inside(create_layer, head=None), X, "creates the.*model\\(x\\) once", "1.head"),
    "writes input": (lambda: at_top(write_input), X, r"writes into its input.*clone", ""),
    "writes attribute": (
        lambda: inside(lambda s, x: s.layer(x) * s.total.add_(1), total=torch.zeros(3)), X,
        "outlives it, 'total'", "1",
    ),
    "embedding with max_norm": (
        lambda: nn.Embedding(5, 3, max_norm=1.0), torch.tensor([1]), "writes into the parameter 'weight'", "",
    ),
    "spectral norm while training": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))), X, r"model\.eval\(\)",
        "0.parametrizations.weight.0",
    ),
    "stores tensor": (lambda: inside(store), X, "stores a tensor on self, as 'features'", "1"),
    "stores in list": (lambda: inside(store_in_list, history=[]), X, "stores a tensor on self, as 'history'", "1"),
    "counts calls": (lambda: inside(count, calls=0), X, "changes 'calls', and the next", "1"),
    "remembers": (lambda: inside(remember, memory=[]), X, "changes 'memory', and the next", "1"),
    "detach": (lambda: inside(lambda s, x: s.layer(x).detach() + x), X, "is detached.*derivative", "1"),
    "detach in place": (lambda: inside(detached_in_place), X, "is detached", "1"),
    "no_grad": (lambda: inside(without_gradient), X, r"torch\.no_grad\(\)", "1.layer"),
    "data": (lambda: inside(lambda s, x: s.layer(x).data + s.layer(x)), X, r"Do without \.data", "1"),
    "numpy": (lambda: inside(lambda s, x: torch.from_numpy(s.layer(x).numpy())), X, r"\.numpy\(\)", "1"),
    "reentrant checkpoint": (
        lambda: inside(lambda s, x: checkpoint(s.layer, x, use_reentrant=True)), X, "use_reentrant=False",
        "1.layer",
    ),
    "autocast": (lambda: inside(lower_precision), X, "precision", "1"),
    "dropout module": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), X, r"dropout.*model\.eval", "1"),
    "dropout function": (lambda: inside(lambda s, x: functional.dropout(s.layer(x), 0.2)), X, "p = 0.2", "1"),
    "alpha dropout": (
        lambda: inside(lambda s, x: functional.alpha_dropout(s.layer(x), 0.2, True)), X, "p = 0.2", "1",
    ),
    "attention dropout": (
        lambda: inside(lambda s, x: functional.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.1)), X,
        "p = 0.1", "1",
    ),
    "attention module dropout": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.1, batch_first=True), torch.ones(1, 2, 4), "p = 0.1",
        "dropout",
    ),
    "recurrent dropout": (lambda: nn.GRU(3, 3, 2, dropout=0.3), torch.ones(2, 1, 3), "p = 0.3", ""),
    "rrelu": (lambda: nn.Sequential(nn.RReLU()), X, "random slopes", "0"),
    "rrelu function": (lambda: inside(lambda s, x: functional.rrelu(s.layer(x), training=True)), X, "draws", "1"),
    "noise": (lambda: inside(lambda s, x: s.layer(x) + torch.randn_like(x)), X, "draws random numbers", "1"),
    "noise in place": (lambda: inside(lambda s, x: s.layer(x) + torch.empty(3).uniform_()), X, "draws", "1"),
    "gumbel": (lambda: inside(lambda s, x: functional.gumbel_softmax(s.layer(x))), X, "draws random numbers", "1"),
    "python's random": (lambda: inside(lambda s, x: s.layer(x) * random.random()), X, r"\(from random\)", ""),
    "numpy's random": (lambda: inside(lambda s, x: s.layer(x) * np.random.rand()), X, "numpy.random", ""),  # noqa: NPY002
    "own random": (
        lambda: inside(lambda s, x: s.layer(x) * s.generator.random(), generator=random.Random(0)), X,
        r"from '1\.generator'", "",
    ),
    "own numpy random": (
        lambda: inside(lambda s, x: s.layer(x) * s.generator.random(), generator=np.random.default_rng(0)), X,
        r"from '1\.generator'", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_clear_message(name: str) -> None:
    assert_refused(*CASES[name])


def test_a_refusal_is_a_value_error_of_surefoot() -> None:
    assert issubclass(CaptureError, SurefootError)
    assert issubclass(CaptureError, ValueError)


def test_a_refusal_is_not_remembered_as_a_capture() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    for _ in range(2):
        with pytest.raises(CaptureError):
            capture(model, X)
    assert len(capture(model.eval(), X).nodes) == 2
