"""A chain computes what its model computes, one computation after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import zoo
from surefoot.chain import Chain
from surefoot.errors import ChainError


class Recurrent(nn.Module):
    """A recurrent network, unrolled: the same cell at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.embed(x))
        for _ in range(3):
            state = torch.tanh(self.cell(state) + state)
        return self.head(state)


class EncoderDecoder(nn.Module):
    """Attention of one sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, self.encoder(source))


def check(model: nn.Module, x: Any) -> Chain:
    """The chain, whose value and last state are the model's output."""
    chain = Chain(model, x)
    with torch.no_grad():
        expected = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        assert torch.allclose(chain.value(), expected, rtol=1e-12, atol=1e-12)
        states = chain.states()
    assert len(states) == len(chain) + 1
    (last,) = states[-1].values()
    assert torch.allclose(last, expected, rtol=1e-12, atol=1e-12)
    for before, computation, after in zip(states, chain, states[1:], strict=False):
        assert tuple(before) == computation.before
        assert tuple(after) == computation.after
        assert computation.state_size == sum(value.numel() for value in after.values())
    parameters = [path for computation in chain for path in computation.parameters]
    assert sorted(parameters) == sorted(chain.parameters)
    sizes = sum(computation.parameter_size for computation in chain)
    assert sizes == sum(value.numel() for value in chain.parameters.values())
    return chain


REPEATED = [
    "resnet152",
    *(name for name in zoo.names() if name.endswith("-smooth") and name != "vgg16-smooth"),
]  # no new structure


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in REPEATED else name for name in zoo.names()]
)
def test_models_of_the_zoo(name: str) -> None:
    options = zoo.small_options(name)
    model = zoo.build(name, **options).double()
    check(model, zoo.example_input(name, batch=3, dtype=torch.float64, **options))


def test_a_weight_that_is_used_at_every_step_is_in_one_computation() -> None:
    chain = check(Recurrent().double(), torch.randn(5, 3, dtype=torch.float64))
    assert [computation.blocks for computation in chain] == [("embed",), ("cell",), ("head",)]
    assert [node.op for node in chain[1].nodes] == ["aten.linear", "aten.add", "aten.tanh"] * 3


def test_a_tied_weight_joins_all_between_its_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.table = nn.Linear(3, 3), nn.Linear(3, 3)
            self.middle, self.head, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.table(torch.tanh(self.before(x))))
            return self.last(torch.tanh(self.head(torch.tanh(self.middle(y)))))

    model = Tied().double()
    chain = check(model, torch.randn(4, 3, dtype=torch.float64))
    assert [computation.blocks for computation in chain] == [("before",), ("table", "middle", "head"), ("last",)]
    other = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    renamed = {("head.weight" if path == "table.weight" else path): value for path, value in other.items()}
    assert torch.equal(chain.value(renamed), chain.value(other))
    with pytest.raises(ChainError, match=r"'table\.weight', 'head\.weight' were given different values"):
        chain.value({**other, "head.weight": other["table.weight"] + 1})


def test_an_encoder_and_a_decoder() -> None:
    source, target = (torch.randn(2, n, 4, dtype=torch.float64) for n in (5, 3))
    check(EncoderDecoder().double(), (source, target))
    check(EncoderDecoder().double(), {"target": target, "source": source})


def test_a_batch_is_one_stacked_state() -> None:
    model = zoo.mlp(sizes=(3, 4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    chain = check(model, x)
    assert [tuple(value.shape) for state in chain.states() for value in state.values()] == [(5, 3), (5, 4), (5, 2)]
    assert chain[0].state_size == 20


def test_other_parameters_may_be_given() -> None:
    model = zoo.mlp(sizes=(3, 4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    chain = Chain(model, x)
    other = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    expected = torch.func.functional_call(model, other, (x,))
    assert torch.allclose(chain.value(other), expected, rtol=1e-12)
    assert torch.allclose(*chain.states(other)[-1].values(), expected, rtol=1e-12)


def test_the_present_parameters_are_those_of_the_model_now() -> None:
    model = zoo.mlp(sizes=(3, 4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    chain = Chain(model, x)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2)
        assert torch.allclose(chain.value(), model(x), rtol=1e-12)


def test_frozen_and_unused_parameters() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.free, self.idle = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 3)
            self.fixed.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.free(torch.tanh(self.fixed(x)))

    model, x = Partly().double(), torch.randn(4, 3, dtype=torch.float64)
    chain = Chain(model, x)
    assert list(chain.parameters) == ["free.weight", "free.bias", "idle.weight", "idle.bias"]
    assert [computation.blocks for computation in chain] == [(), ("free",)]
    other = {path: torch.randn_like(value) for path, value in model.named_parameters()}
    expected = torch.func.functional_call(model, other, (x,))
    assert torch.allclose(chain.value(other), expected, rtol=1e-12)
    assert torch.allclose(*chain.states(other)[-1].values(), expected, rtol=1e-12)
    del other["idle.weight"], other["fixed.bias"]
    expected = torch.func.functional_call(model, other, (x,))
    assert torch.allclose(chain.value(other), expected, rtol=1e-12)


def test_a_model_without_parameters_is_one_computation() -> None:
    x = torch.randn(2, 3)
    chain = Chain(nn.Tanh(), x)
    assert [computation.blocks for computation in chain] == [()]
    assert not chain.parameters
    assert torch.equal(chain.value(), torch.tanh(x))


def test_a_model_that_returns_its_input_is_an_empty_chain() -> None:
    x = torch.randn(2, 3)
    chain = Chain(nn.Identity(), x)
    assert len(chain) == 0
    assert chain.value() is x
    assert len(chain.states()) == 1
    assert str(chain) == "Chain of 0 computations"


def test_outputs_of_all_kinds_are_in_the_last_state() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.two(torch.tanh(self.one(x)))
            return y, x, self.one.weight, self.two.weight.square().sum(), y, torch.ones(2)

    model, x = Many(), torch.randn(4, 3)
    chain = Chain(model, x)
    expected = model(x)
    for value, wanted in zip(chain.value(), expected, strict=True):
        assert torch.allclose(value, wanted)
    last = chain.states()[-1]
    assert list(dict.fromkeys(chain.graph.outputs)) == list(last)
    for name, wanted in zip(chain.graph.outputs, expected, strict=True):
        assert torch.allclose(last[name], wanted)


def test_wrong_parameters_are_refused() -> None:
    chain = Chain(nn.Linear(3, 2), torch.ones(1, 3))
    with pytest.raises(ChainError, match="no value was given for parameter 'bias'"):
        chain.value({"weight": torch.ones(2, 3)})
    with pytest.raises(ChainError, match=r"parameter 'weight' has shape \(2, 3\), got \(3, 2\)"):
        chain.states({"weight": torch.ones(3, 2), "bias": torch.ones(2)})


def test_a_chain_is_a_sequence_of_computations() -> None:
    chain = Chain(zoo.mlp(sizes=(3, 4, 5, 2)), torch.ones(1, 3))
    assert len(chain) == 3
    assert list(chain) == [chain[0], chain[1], chain[2]]
    assert chain[1:] == (chain[1], chain[-1])
    assert str(chain[0]) == "linear → softplus"
