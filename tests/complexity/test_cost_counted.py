"""Predicted multiplications against PyTorch's counter, and memory against a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from surefoot import zoo
from surefoot.chain import Chain
from surefoot.complexity import Cost, chain_cost, cost

SMALL = ["autoencoder-convolutional", "dense", "gpt-tied", "residual", "resnet18", "vgg16-batchnorm", "vit"]


def _assert_agrees(found: Cost) -> None:
    assert found.products == found.counted.forward
    assert found.products_backward == found.counted.backward


def _real_run(chain: Chain) -> tuple[int, int, int]:
    """Forward and backward multiplications and bytes held, from a run on numbers."""
    saved: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(value.detach())
        return saved[-1]

    with FlopCounterMode(display=False) as forward, saved_tensors_hooks(keep, lambda value: value):
        oracle = chain.autodiff()
    with FlopCounterMode(display=False) as backward:
        oracle.pullback(torch.ones_like(oracle.value))
    known = [*chain.parameters.values(), *chain.inputs, *chain.graph.constants.values()]
    excluded = {value.untyped_storage()._cdata for value in known}
    storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in saved}
    held = sum(size for key, size in storages.items() if key not in excluded)
    return forward.get_total_flops() // 2, backward.get_total_flops() // 2, held


@pytest.mark.parametrize("name", SMALL)
def test_zoo_agrees_with_a_real_run(name: str) -> None:
    options = zoo.small_options(name)
    torch.manual_seed(0)
    chain = Chain(zoo.build(name, **options), zoo.example_input(name, batch=3, **options))
    found = chain_cost(chain)
    _assert_agrees(found)
    assert (found.counted.forward, found.counted.backward, found.counted.bytes) == _real_run(chain)
    assert 1 < found.structured.ratio <= 3
    assert found.structured.forward_backward <= found.refined.forward_backward


def _on_meta(name: str, batch: int) -> Cost:
    with torch.device("meta"):
        return cost(zoo.build(name), zoo.example_input(name, batch=batch))


def test_vgg16_full_size() -> None:
    found = _on_meta("vgg16", batch=128)
    _assert_agrees(found)
    # 13 convolutions and 3 matrix products, per image.
    sides = {224: (3 * 64, 64 * 64), 112: (64 * 128, 128 * 128), 56: (128 * 256, 2 * 256 * 256)}
    sides |= {28: (256 * 512, 2 * 512 * 512), 14: (3 * 512 * 512,)}
    convolutions = sum(9 * side**2 * pairs for side, counts in sides.items() for pairs in counts)
    assert found.products == 128 * (convolutions + 7 * 7 * 512 * 4096 + 4096 * 4096 + 4096 * 1000)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "autoencoder-convolutional"])
def test_full_size(name: str) -> None:
    _assert_agrees(_on_meta(name, batch=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["densenet121", "densenet121-smooth", "resnet152"])
def test_full_size_deep(name: str) -> None:
    found = _on_meta(name, batch=2)
    _assert_agrees(found)
    assert 1 < found.structured.ratio <= 3


def test_densenet_small() -> None:
    options = zoo.small_options("densenet121")
    with torch.device("meta"):
        model = zoo.build("densenet121", **options)
        _assert_agrees(cost(model, zoo.example_input("densenet121", **options)))


def test_evaluation_mode() -> None:
    options = zoo.small_options("resnet18")
    chain = Chain(zoo.build("resnet18", **options).eval(), zoo.example_input("resnet18", **options))
    found = chain_cost(chain)
    _assert_agrees(found)
    assert found.counted.bytes == _real_run(chain)[2]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    groups=st.sampled_from([1, 2, 4]),
    transposed=st.booleans(),
    bias=st.booleans(),
)
def test_convolutions(
    kernel: tuple[int, int],
    stride: int,
    dilation: int,
    padding: int,
    groups: int,
    transposed: bool,
    bias: bool,
) -> None:
    kind: Any = nn.ConvTranspose2d if transposed else nn.Conv2d
    with torch.device("meta"):
        first = kind(4, 8, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias)
        try:
            shape = first(torch.ones(3, 4, 7, 6)).shape
        except RuntimeError:  # the padding leaves nothing
            assume(False)
        assume(min(shape) > 0)
        model = nn.Sequential(first, nn.Tanh(), nn.Conv2d(8, 2, 1))
        found = cost(model, torch.ones(3, 4, 7, 6))
    _assert_agrees(found)
    patches = 42 if transposed else shape[2] * shape[3]
    assert found.computations[0].bilinear == 3 * patches * 4 * 8 // groups * kernel[0] * kernel[1]
    assert found.computations[0].affine_parameters == (3 * 8 * shape[2] * shape[3] if bias else 0)


class _Contractions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 5))
        self.b = nn.Parameter(torch.ones(2, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("nhi,ij->nhj", x, self.a)
        z = torch.einsum("nhj,hjk,nlk->nhl", y, self.b, y.mean(2, keepdim=True).expand(-1, -1, 3))
        return torch.matmul(z.unsqueeze(1), y.unsqueeze(2).transpose(-1, -2).tanh()[:, :, :2])


def test_contractions() -> None:
    _assert_agrees(cost(_Contractions(), torch.ones(6, 2, 4)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_attention(causal: bool, shared: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(8, 8)
            self.key = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            query = self.query(x).unflatten(-1, (4, 2)).transpose(1, 2)
            key = self.key(x).unflatten(-1, (2, 2)).transpose(1, 2)
            if not shared:
                key = torch.cat([key, key], dim=1)
            return nn.functional.scaled_dot_product_attention(
                query, key, key.tanh(), is_causal=causal, enable_gqa=shared
            )

    found = cost(Attention(), torch.ones(3, 5, 8))
    _assert_agrees(found)
    assert found.products == 3 * 5 * (8 * 8 + 8 * 4) + 2 * (3 * 4 * 5 * 5 * 2)


def test_products_with_vectors() -> None:
    """PyTorch counts a vector on the left as a matrix of one row, and a vector on the right not at all."""
    _assert_agrees(cost(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)), torch.ones(4)))

    class Right(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vector = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.vector

    found = cost(Right(), torch.ones(2, 3, 4))
    _assert_agrees(found)
    assert found.computations[0].bilinear == 24


@pytest.mark.parametrize(("kind", "gates"), [("rnn_tanh", 1), ("gru", 3), ("lstm", 4)])
def test_recurrent_layers(kind: str, gates: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = [(gates * 3, size) for layer in (4, 3) for size in (layer, 3)]
            self.weights = nn.ParameterList([torch.ones(shape) for shape in shapes])

        def forward(self, x: Tensor) -> Tensor:
            first = torch.zeros(2, 2, 3)
            start: Any = (first, first) if kind == "lstm" else first
            layers = getattr(torch, kind)
            return layers(x, start, list(self.weights), False, 2, 0.0, False, False, True)[0]

    found = cost(Recurrent(), torch.ones(2, 5, 4))
    assert found.products == 2 * 5 * gates * 3 * (4 + 3 + 3 + 3)
    if kind != "lstm":  # a fused kernel, which PyTorch does not count
        assert found.counted.forward == found.products
    assert found.structured.ratio <= 3
    assert found.refined.backward > found.structured.backward


def test_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cost(model, torch.randn(6, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(isinstance(value, torch._subclasses.FakeTensor) for value in model.state_dict().values())
    chain = Chain(model, torch.randn(6, 4))
    assert torch.isfinite(chain.value()).all()  # the cached graph kept real buffers
