"""The small networks against their formulas, written out by hand in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from surefoot import zoo

ACTIVATIONS = {"softplus": nn.functional.softplus, "tanh": torch.tanh}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def affine(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = x @ linear.weight.T
    return product if linear.bias is None else product + linear.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation: str, bias: bool) -> None:
    model = zoo.mlp((4, 6, 5, 2), activation, bias).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    first, second, third = (module for module in model if isinstance(module, nn.Linear))
    act = ACTIVATIONS[activation]
    agree(model(x), affine(third, act(affine(second, act(affine(first, x))))))
    assert (first.bias is not None) == bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_reads_all_states(activation: str, bias: bool) -> None:
    sizes = (4, 6, 5, 3, 2)
    model = zoo.dense(sizes, activation, bias).double()
    states = [torch.randn(3, 4, dtype=torch.float64)]
    for t, layer in enumerate(model.layers, start=1):
        assert len(layer.maps) == t
        total = sum(affine(one, state) for one, state in zip(layer.maps, states, strict=True))
        states.append(total if t == len(sizes) - 1 else ACTIVATIONS[activation](total))
    agree(model(states[0]), states[-1])
    weights = sum(sizes[s] * sizes[t] for t in range(1, 5) for s in range(t))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == weights + (sum(sizes[1:]) if bias else 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_highway_reads_the_last_two_states(depth: int, bias: bool) -> None:
    model = zoo.highway(width=6, depth=depth, inputs=4, outputs=2, activation="tanh", bias=bias).double()
    states = [torch.randn(3, 4, dtype=torch.float64)]
    assert len(model.layers) == depth + 1
    for t, layer in enumerate(model.layers, start=1):
        total = sum(affine(one, state) for one, state in zip(layer.maps, states[-2:], strict=True))
        states.append(total if t == depth + 1 else torch.tanh(total))
    agree(model(states[0]), states[-1])


@pytest.mark.parametrize("bare", [True, False])
def test_residual_adds_the_penultimate_state(bare: bool) -> None:
    inputs, outputs = (6, None) if bare else (4, 2)
    model = zoo.residual(width=6, depth=4, inputs=inputs, outputs=outputs).double()
    x = torch.randn(3, inputs, dtype=torch.float64)
    states = [torch.zeros(3, 6, dtype=torch.float64), x if bare else affine(model.embedding, x)]
    for layer in model.layers:
        states.append(nn.functional.softplus(affine(layer.map, states[-1]) + states[-2]))
    agree(model(x), states[-1] if bare else affine(model.head, states[-1]))
    assert len(list(model.parameters())) == (8 if bare else 12)


def normalized(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def attended(attention: nn.Module, x: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    """Head by head: softmax(QKᵀ/√d) V, where a causal position sees none after it."""
    length, width = x.shape[1:]
    size = width // heads
    queries, keys, values = affine(attention.qkv, x).split(width, dim=-1)
    mixed = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = queries[..., part] @ keys[..., part].transpose(1, 2) / math.sqrt(size)
        if causal:
            scores = scores + torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
        mixed.append(scores.softmax(-1) @ values[..., part])
    return affine(attention.projection, torch.cat(mixed, -1))


def through_blocks(model: nn.Module, x: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    for block in model.blocks:
        x = x + attended(block.attention, normalized(block.attention_norm, x), heads, causal)
        hidden = affine(block.mlp.expand, normalized(block.mlp_norm, x))
        x = x + affine(block.mlp.contract, block.mlp.activation(hidden))
    return normalized(model.norm, x)


def test_vit() -> None:
    model = zoo.vit(5, 8, 4, in_channels=2, width=6, depth=2, heads=3).double()
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    corners = [(0, 0), (0, 4), (4, 0), (4, 4)]
    patches = torch.stack([x[:, :, i : i + 4, j : j + 4].flatten(1) for i, j in corners], dim=1)
    state = patches @ model.patches.weight.flatten(1).T + model.patches.bias
    state = torch.cat((model.positions.token.expand(3, 1, 6), state), dim=1)
    state = through_blocks(model, state + model.positions.weight, heads=3, causal=False)
    agree(model(x), affine(model.head, state[:, 0]))


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("length", [1, 4, 6])
def test_gpt(length: int, tie_weights: bool) -> None:
    model = zoo.gpt(11, 6, width=6, depth=2, heads=2, tie_weights=tie_weights).double()
    ids = torch.randint(11, (3, length))
    state = model.tokens.weight[ids] + model.positions.weight[:length]
    agree(model(ids), through_blocks(model, state, heads=2, causal=True) @ model.head.weight.T)
    assert (model.head.weight is model.tokens.weight) == tie_weights
    assert isinstance(model.blocks[0].mlp.activation, nn.GELU)
    assert model.blocks[0].mlp.activation.approximate == "tanh"


def test_gpt_does_not_look_ahead() -> None:
    model = zoo.gpt(11, 6, width=8, depth=2, heads=2).double()
    ids = torch.randint(11, (2, 6))
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    agree(model(changed)[:, :4], model(ids)[:, :4])
    assert not torch.allclose(model(changed)[:, 4:], model(ids)[:, 4:])


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(zoo.ZooError, match="has 7 positions and the model knows 6"):
        zoo.gpt(11, 6, width=8, depth=1, heads=2)(torch.zeros(1, 7, dtype=torch.int64))


def batch_normalized(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    """With the running statistics, as in evaluation mode."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return x * scale[:, None, None] + (norm.bias - norm.running_mean * scale)[:, None, None]


@pytest.mark.parametrize("small_input", [True, False])
def test_densenet_layers_read_all_features_before_them(small_input: bool) -> None:
    model = zoo.densenet121(5, growth=3, blocks=(2, 3, 1), small_input=small_input).double().eval()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
            tensor.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 40, 40, dtype=torch.float64)

    def step(part: nn.Module, state: torch.Tensor) -> torch.Tensor:
        weight = part.convolution.weight
        return nn.functional.conv2d(
            batch_normalized(part.normalization, state).relu(), weight, padding=weight.shape[-1] // 2
        )

    stride, padding = (1, 1) if small_input else (2, 3)
    weight = model.stem.convolution.weight
    assert weight.shape[2:] == ((3, 3) if small_input else (7, 7))
    state = nn.functional.conv2d(x, weight, stride=stride, padding=padding)
    state = batch_normalized(model.stem.normalization, state).relu()
    state = state if small_input else nn.functional.max_pool2d(state, 3, stride=2, padding=1)
    for position in range(3):
        block = getattr(model, f"block{position}")
        features = [state]
        for bottleneck, convolution in block.layers:
            features.append(step(convolution, step(bottleneck, torch.cat(features, dim=1))))
        state = torch.cat(features, dim=1)
        if position < 2:
            state = nn.functional.avg_pool2d(step(getattr(model, f"transition{position}"), state), 2)
    agree(model(x), affine(model.classifier, batch_normalized(model.normalization, state).relu().mean((2, 3))))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"sizes": (3,)}, "mlp: sizes lists"),
        ("dense", {"sizes": (3, 0)}, "all positive: not \\(3, 0\\)"),
        ("highway", {"width": 0}, "highway: sizes"),
        ("residual", {"outputs": 0}, "residual: sizes"),
        ("autoencoder-convolutional", {"channels": ()}, "its channels"),
        ("vit", {"patch_size": 5}, "patches of 5 do not tile images of 32"),
        ("gpt", {"heads": 5}, "does not divide into 5 heads"),
        ("densenet121", {"blocks": ()}, "must be positive"),
        ("densenet121", {"growth": 0}, "must be positive"),
    ],
)
def test_options_without_a_meaning_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(zoo.ZooError, match=message):
        zoo.build(name, **options)
