"""The biaffine part of a computation is biaffine, and the parts are all there is: on random networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from random_networks import CHANNELS, LENGTH, networks
from torch import Tensor, nn

from surefoot import zoo
from surefoot.chain import Chain, Computation
from surefoot.chain.cut import initial_degrees
from surefoot.graph import Role
from surefoot.operations.captured import capture
from surefoot.operations.forms import NOT_POLYNOMIAL, Degree, Form, degree_of, form_of


def biaffine_values(
    computation: Computation, state: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What the biaffine part computes, from the state and the parameters and from nothing else."""
    graph = computation.graph
    values = {**graph.constants, **state}
    values |= {
        leaf.name: parameters[leaf.path] for leaf in graph.parameters if leaf.path in computation.parameters
    }
    for node in computation.biaffine:
        values[node.name] = node.run(values)
    found: dict[str, Tensor] = {}
    for node in computation.biaffine:
        for k, value in enumerate(
            values[node.name] if isinstance(values[node.name], list | tuple) else [values[node.name]]
        ):
            found[f"{node.name}.{k}"] = value
    return found


def moved(values: Mapping[str, Tensor], direction: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {
        name: value + factor * direction[name] if name in direction else value for name, value in values.items()
    }


def assert_biaffine(chain: Chain) -> None:
    """Second differences vanish in the state alone and in the parameters alone."""
    with torch.no_grad():
        states = chain.states()
        parameters = chain.parameters
        for computation, state in zip(chain, states, strict=False):
            real = {name: torch.randn_like(v) for name, v in state.items() if v.is_floating_point()}
            push = {path: torch.randn_like(v) for path, v in parameters.items()}
            middle = biaffine_values(computation, state, parameters)
            for ahead, behind in (
                [biaffine_values(computation, moved(state, real, f), parameters) for f in (1.0, -1.0)],
                [biaffine_values(computation, state, moved(parameters, push, f)) for f in (1.0, -1.0)],
            ):
                for name, value in middle.items():
                    if value.is_floating_point():
                        scale = 1 + max(float(v.abs().max()) for v in (value, ahead[name], behind[name]))
                        assert float((ahead[name] + behind[name] - 2 * value).abs().max()) < 1e-12 * scale, name


def assert_complete(chain: Chain) -> None:
    """Every operation that depends on something is in one part of one computation, and every block in one."""
    nodes = [node.name for computation in chain for node in computation.nodes]
    assert nodes == [n.name for n in chain.graph.nodes if chain.graph.roles[n.name] != Role.CONSTANT]
    for computation in chain:
        parts = [*computation.biaffine, *(node for part in computation.nonaffine for node in part)]
        assert sorted(node.name for node in parts) == sorted(node.name for node in computation.nodes)
    blocks = [path for computation in chain for path in computation.blocks]
    assert sorted(blocks) == sorted(chain.graph.blocks)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(networks())
def test_random_networks(model: nn.Sequential) -> None:
    assert_all(model)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(networks(depth=3))
def test_many_random_networks(model: nn.Sequential) -> None:
    assert_all(model)


def assert_all(model: nn.Sequential) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, CHANNELS, LENGTH, dtype=torch.float64)
    chain = Chain(model, x)
    states = chain.states()
    with torch.no_grad():
        assert torch.allclose(*states[-1].values(), model(x), rtol=1e-12, atol=1e-12)
    assert_complete(chain)
    assert_biaffine(chain)
    for middle in range(1, len(chain)):
        first, second = chain.split(0, middle), chain.split(middle, len(chain))
        assert torch.allclose((first >> second).value(), chain.value(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["autoencoder-convolutional", "densenet121", "gpt", "resnet18", "vit"])
def test_models_of_the_zoo(name: str) -> None:
    options = zoo.small_options(name)
    model = zoo.build(name, **options).double()
    chain = Chain(model, zoo.example_input(name, batch=2, dtype=torch.float64, **options))
    assert_complete(chain)
    assert_biaffine(chain)


class Function(nn.Module):
    """A function of a parameter and the input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    ("function", "state", "parameters"),
    [
        (lambda x, w: x + w, 1, 1),
        (lambda x, w: x * w, 1, 1),
        (lambda x, w: x * w + 3 * x - w.sum(), 1, 1),
        (lambda x, w: x @ w @ w, 1, 2),
        (lambda x, w: x @ x.T @ w, 2, 1),
        (lambda x, w: x.addcmul(x, w), 1, 1),
        (lambda x, w: torch.addmm(w, x, w), 1, 1),
        (lambda x, w: torch.einsum("ij,jk->ik", x, w), 1, 1),
        (lambda x, w: x / 2 + w.cumsum(0), 1, 1),
        (lambda x, w: torch.where(torch.eye(3, dtype=torch.bool), x, w), 1, 1),
        (lambda x, w: x.expand_as(torch.exp(w)), 1, 0),
        (lambda x, w: x.type_as(torch.exp(w)) * w, 1, 1),
        (lambda x, w: torch.fft.fft(x).real, 1, 0),
        (lambda x, w: torch.cat([x, w]).roll(1), 1, 1),
        (lambda x, w: (x * w).to(torch.float64), 1, 1),
        (lambda x, w: x / w, None, None),
        (lambda x, w: w / x, None, None),
        (lambda x, w: torch.div(x, 2, rounding_mode="floor") * w, None, None),
        (lambda x, w: (x * 2).int().float() * w, None, None),
        (lambda x, w: torch.exp(w) * x, None, None),
        (lambda x, w: torch.where(x > 0, x, w), None, None),
        (lambda x, w: w[x.argmax(1)] * 1.0 + 0 * x, None, None),
        (lambda x, w: x.scatter_reduce(0, torch.zeros(3, 3, dtype=torch.int64), w, "prod"), None, None),
    ],
)
def test_degrees(function: Any, state: int | None, parameters: int | None) -> None:
    graph = capture(Function(function), torch.rand(3, 3) + 0.5)
    degrees = initial_degrees(graph, graph.live[0])
    for node in graph.nodes:
        degrees[node.name] = degree_of(node, degrees)
    assert degrees[graph.outputs[0]] == Degree(state, parameters)


def test_sums_of_embeddings_are_linear_and_largest_entries_are_not() -> None:
    ids = torch.tensor([[0, 1]])
    bag, *_ = [n for n in capture(nn.EmbeddingBag(4, 3), ids).nodes if n.op == "aten.embedding_bag"]
    assert form_of(bag) is Form.LINEAR
    bag, *_ = [n for n in capture(nn.EmbeddingBag(4, 3, mode="max"), ids).nodes if n.op == "aten.embedding_bag"]
    assert form_of(bag) is Form.OTHER


def test_degrees_add_in_products_and_are_the_largest_in_sums() -> None:
    x, u = Degree(state=1), Degree(parameters=1)
    assert x + u == Degree(1, 1)
    assert (x + u) | x == Degree(1, 1)
    assert x + x == Degree(2, 0)
    assert x | NOT_POLYNOMIAL == NOT_POLYNOMIAL
    assert (x + u).is_biaffine
    assert not (u + u).is_biaffine
