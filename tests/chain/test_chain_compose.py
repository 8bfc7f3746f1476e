"""Chains can be cut in parts and put one behind the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from judges.models import Halves
from surefoot import zoo
from surefoot.chain import Chain
from surefoot.errors import ChainError
from surefoot.graph import Source

X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp(*sizes: int) -> nn.Module:
    return zoo.mlp(sizes=sizes).double()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "residual", "highway", "dense", "resnet18", "gpt", "autoencoder", "vit"])
def test_parts_one_behind_the_other_are_the_whole(name: str) -> None:
    options = zoo.small_options(name)
    chain = Chain(
        zoo.build(name, **options).double(),
        zoo.example_input(name, batch=2, dtype=torch.float64, **options),
    )
    states = chain.states()
    for start, stop in ((0, 1), (0, len(chain)), (1, len(chain)), (len(chain) // 2, len(chain) // 2 + 1)):
        part = chain.split(start, stop)
        assert [computation.blocks for computation in part] == [c.blocks for c in chain[start:stop]]
        values = part.value() if isinstance(part.value(), tuple) else (part.value(),)
        for value, expected in zip(values, states[stop].values(), strict=True):
            assert value.dtype == expected.dtype
            assert torch.allclose(value, expected, rtol=1e-12, atol=1e-12)
    joined = chain.split(0, 1)
    for t in range(1, len(chain)):
        joined = joined >> chain.split(t, t + 1)
    assert close(joined.value(), chain.value())
    assert set(joined.parameters) == set(chain.parameters)
    assert len(joined) == len(chain)


def test_a_part_reads_only_its_own_parameters() -> None:
    chain = Chain(mlp(3, 4, 5, 2), X)
    part = chain.split(1, 2)
    assert list(part.parameters) == list(chain[1].parameters)
    assert part.parameters.keys() < chain.parameters.keys()
    assert close(part.value(chain.parameters), part.value())


def test_a_part_of_a_split_tensor() -> None:
    model, x = Halves().double(), torch.randn(3, 5, dtype=torch.float64)
    chain = Chain(model, x)
    assert len(chain) == 2
    assert close((chain.split(0, 1) >> chain.split(1, 2)).value(), model(x))


def test_a_part_uses_constants_and_buffers() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.register_buffer("shift", torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)) + torch.exp(self.shift)) + torch.arange(3)

    model = Shifted().double()
    chain = Chain(model, X)
    first, second = chain.split(0, 1), chain.split(1, 2)
    assert not any(leaf.source is Source.BUFFER for leaf in second.graph.leaves.values())
    assert close((first >> second).value(), model(X))
    model.shift.data.add_(1)
    assert close((first >> second).value(), model(X))


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 1), (0, 4)])
def test_states_that_do_not_exist_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ChainError, match=f"3 computations has states 0 to 3: cannot go from state {start} to"):
        Chain(mlp(3, 4, 5, 2), X).split(start, stop)


def test_a_composition_computes_one_after_the_other() -> None:
    encoder, decoder = mlp(3, 4, 2), mlp(2, 4, 3)
    both = Chain(encoder, X) >> Chain(decoder, encoder(X).detach())
    assert close(both.value(), decoder(encoder(X)))
    assert len(both) == 4
    assert len(both.states()) == 5


def test_paths_that_clash_are_those_of_a_sequence() -> None:
    encoder, decoder = mlp(3, 4, 2), mlp(2, 4, 3)
    both = Chain(encoder, X) >> Chain(decoder, encoder(X).detach())
    sequence = nn.Sequential(encoder, decoder)
    assert both.parameters.keys() == dict(sequence.named_parameters()).keys()
    assert [c.blocks for c in both] == [c.blocks for c in Chain(sequence, X)]
    assert [node.module for node in both.graph.nodes] == [node.module for node in Chain(sequence, X).graph.nodes]
    other = {path: torch.randn_like(value) for path, value in sequence.named_parameters()}
    assert close(both.value(other), torch.func.functional_call(sequence, other, (X,)))


def test_paths_that_do_not_clash_stay() -> None:
    one, two = nn.ModuleDict({"a": nn.Linear(3, 3)}).double(), nn.ModuleDict({"b": nn.Linear(3, 3)}).double()
    one.forward = lambda x: one["a"](x)
    two.forward = lambda x: two["b"](x)
    both = Chain(one, X) >> Chain(two, X)
    assert list(both.parameters) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_chain_behind_itself_uses_its_parameters_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    chain = Chain(model, X)
    both = chain >> chain
    assert list(both.parameters) == ["0.weight", "0.bias"]
    assert len(both) == 1
    assert close(both.value(), model(model(X)))


def test_a_tensor_that_both_use_is_one_parameter() -> None:
    one, two = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), nn.Sequential(nn.Linear(3, 3)).double()
    two[0].weight = one[0].weight
    both = Chain(one, X) >> Chain(two, X)
    assert list(both.parameters) == ["0.0.weight", "0.0.bias", "1.0.bias"]
    assert close(both.value(), two(one(X)))
    with torch.no_grad():
        one[0].weight.mul_(2)
    assert close(both.value(), two(one(X)))


def test_frozen_parameters_of_both_are_kept_apart() -> None:
    one, two = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    one.requires_grad_(False)
    two.weight.requires_grad_(False)
    both = Chain(one, X) >> Chain(two, X)
    assert list(both.parameters) == ["1.bias"]
    assert [leaf.path for leaf in both.graph.frozen] == ["0.weight", "0.bias", "1.weight"]
    assert close(both.value(), two(one(X)))
    doubled = {**both.parameters, "1.weight": 2 * two.weight}
    assert close(both.value(doubled), 2 * one(X) @ two.weight.T + two.bias)


def test_unused_parameters_of_both_are_listed() -> None:
    one, two = (nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(1, 1)}).double() for _ in range(2))
    one.forward = lambda x: one["used"](x)
    two.forward = lambda x: two["used"](x)
    both = Chain(one, X) >> Chain(two, X)
    assert both.parameters.keys() == {
        f"{k}.{n}.{p}" for k in "01" for n in ("used", "idle") for p in ("weight", "bias")
    }


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ChainError, match=r"returns \(5, 2\) torch.float64, the second reads \(5, 3\) torch.float64"
    ):
        Chain(mlp(3, 2), X) >> Chain(mlp(3, 2), X)
    with pytest.raises(ChainError, match="float32"):
        Chain(mlp(3, 3), X) >> Chain(mlp(3, 2).float(), X.float())
    with pytest.raises(TypeError):
        Chain(mlp(3, 3), X) >> torch.sin  # type: ignore[operator]
