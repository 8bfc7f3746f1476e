"""Models of the zoo against their formulas, written out by hand, and against `transformers`."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import zoo

D = torch.float64
ACTIVATIONS = {"softplus": F.softplus, "tanh": torch.tanh}


def agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def affine(linear: nn.Linear, x: Tensor) -> Tensor:
    product = x @ linear.weight.T
    return product if linear.bias is None else product + linear.bias


def through(model: Any, x: Tensor, act: Any, memory: int) -> Tensor:
    """x_t = a(Σ_s W_{t,s} x_s + w_t) over the last ``memory`` states, without the activation in the last layer."""
    states = [x]
    for layer in model.layers:
        assert len(layer.maps) == len(states[-memory:])
        total = sum(affine(one, state) for one, state in zip(layer.maps, states[-memory:], strict=True))
        states.append(act(total) if layer is not model.layers[-1] else total)
    return states[-1]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fully_connected_networks(activation: str, bias: bool) -> None:
    act, sizes, x = ACTIVATIONS[activation], (4, 6, 5, 2), torch.randn(3, 4, dtype=D)
    model = zoo.mlp(sizes, activation, bias).double()
    first, second, third = (module for module in model if isinstance(module, nn.Linear))
    agree(model(x), affine(third, act(affine(second, act(affine(first, x))))))
    assert (first.bias is not None) == bias
    encoder = zoo.autoencoder((4, 3, 2), activation, bias).double()
    layers = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    code = affine(layers[1], act(affine(layers[0], x)))
    agree(encoder.encoder(x), code)
    agree(encoder(x), affine(layers[3], act(affine(layers[2], code))))

    model = zoo.dense((4, 6, 5, 3, 2), activation, bias).double()
    agree(model(x), through(model, x, act, memory=9))
    weights = sum((4, 6, 5, 3)[s] * (6, 5, 3, 2)[t] for t in range(4) for s in range(t + 1))
    assert sum(p.numel() for p in model.parameters()) == weights + 16 * bias
    for depth in (1, 3):
        model = zoo.highway(6, depth, 4, 2, activation, bias).double()
        agree(model(x), through(model, x, act, memory=2))
        assert len(model.layers) == depth + 1


@pytest.mark.parametrize("bare", [True, False])
def test_residual_networks_add_the_penultimate_state(bare: bool) -> None:
    inputs, outputs = (6, None) if bare else (4, 2)
    model = zoo.residual(width=6, depth=4, inputs=inputs, outputs=outputs).double()
    x = torch.randn(3, inputs, dtype=D)
    states = [torch.zeros(3, 6, dtype=D), x if bare else affine(model.embedding, x)]
    for layer in model.layers:
        states.append(F.softplus(affine(layer.map, states[-1]) + states[-2]))
    agree(model(x), states[-1] if bare else affine(model.head, states[-1]))
    assert len(list(model.parameters())) == (8 if bare else 12)


def batch_normalized(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """With the running statistics in evaluation mode, with those of the batch in training."""
    mean, variance = norm.running_mean, norm.running_var
    if norm.training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    assert mean is not None
    assert variance is not None
    x = (x - mean[:, None, None]) / (variance[:, None, None] + norm.eps).sqrt()
    return x * norm.weight[:, None, None] + norm.bias[:, None, None] if norm.affine else x


# Filters of the 13 convolutions of the paper's appendix "Detailed network", and whether a pooling follows.
PAPER = [(64, 0), (64, 1), (128, 0), (128, 1), (256, 0), (256, 0), (256, 1)] + [(512, 0), (512, 0), (512, 1)] * 2


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [
        ("vgg16", {}, 32),
        ("vgg16-smooth", {}, 96),
        ("vgg16-batchnorm", {"batch_norm": 0.3}, 40),
        ("vgg16", {"batch_norm": 0.2, "batch_norm_affine": True, "batch_norm_position": "first"}, 32),
        ("vgg16", {"softmax": False}, 32),
    ],
)
def test_vgg_is_the_paper_s(name: str, options: dict[str, Any], side: int) -> None:
    """a_t = ν ∘ π ∘ α: activation, then pooling, then normalisation, which is first only where it is asked for."""
    model = zoo.build(name, width=1 / 16, image_size=side, num_classes=7, in_channels=2, **options).double()
    smooth, first = "-" in name, options.get("batch_norm_position") == "first"
    act, pool = (F.softplus, F.avg_pool2d) if smooth else (F.relu, F.max_pool2d)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.affine) for norm in norms} == ({(options["batch_norm"], first)} if norms else set())
    for norm in norms if first else []:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, 0.5, 1.5)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    state = x = torch.randn(3, 2, side, side, dtype=D)
    for t, ((filters, pooled), layer) in enumerate(zip(PAPER, layers, strict=False)):
        assert layer.weight.shape[0] == filters // 16
        state = F.conv2d(state, layer.weight, layer.bias, padding=1)
        state = batch_normalized(norms[t], state) if norms and first else state
        state = pool(act(state), 2) if pooled else act(state)
        state = batch_normalized(norms[t], state) if norms and not first else state
    state = state.flatten(1)
    assert [layer.weight.shape[0] for layer in layers[13:]] == [256, 256, 7]
    for layer in layers[13:15]:
        state = act(affine(layer, state))
    state = affine(layers[15], state)
    agree(model(x), state.softmax(1) if options.get("softmax", True) else state)


@pytest.mark.parametrize("small_input", [True, False])
def test_densenet_layers_read_all_features_before_them(small_input: bool) -> None:
    model = zoo.densenet121(5, growth=3, blocks=(2, 3, 1), small_input=small_input).double().eval()
    scramble(model)
    x = torch.randn(2, 3, 40, 40, dtype=D)

    def step(part: Any, state: Tensor) -> Tensor:
        weight = part.convolution.weight
        return F.conv2d(batch_normalized(part.normalization, state).relu(), weight, padding=weight.shape[-1] // 2)

    stride, padding = (1, 1) if small_input else (2, 3)
    state = F.conv2d(x, model.stem.convolution.weight, stride=stride, padding=padding)
    state = batch_normalized(model.stem.normalization, state).relu()
    state = state if small_input else F.max_pool2d(state, 3, stride=2, padding=1)
    for position in range(3):
        features = [state]
        for bottleneck, convolution in getattr(model, f"block{position}").layers:
            features.append(step(convolution, step(bottleneck, torch.cat(features, dim=1))))
        state = torch.cat(features, dim=1)
        if position < 2:
            state = F.avg_pool2d(step(getattr(model, f"transition{position}"), state), 2)
    agree(model(x), affine(model.classifier, batch_normalized(model.normalization, state).relu().mean((2, 3))))


def normalized(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def attended(attention: Any, x: Tensor, heads: int) -> Tensor:
    """Head by head: softmax(QKᵀ/√d) V."""
    size = x.shape[-1] // heads
    queries, keys, values = affine(attention.qkv, x).split(x.shape[-1], dim=-1)
    parts = [slice(head * size, (head + 1) * size) for head in range(heads)]
    scores = [queries[..., part] @ keys[..., part].transpose(1, 2) / math.sqrt(size) for part in parts]
    mixed = [score.softmax(-1) @ values[..., part] for score, part in zip(scores, parts, strict=True)]
    return affine(attention.projection, torch.cat(mixed, -1))


def test_vit() -> None:
    model = zoo.vit(5, 8, 4, in_channels=2, width=6, depth=2, heads=3).double()
    x = torch.randn(3, 2, 8, 8, dtype=D)
    patches = torch.stack([x[:, :, i : i + 4, j : j + 4].flatten(1) for i in (0, 4) for j in (0, 4)], dim=1)
    state = patches @ model.patches.weight.flatten(1).T + model.patches.bias
    state = torch.cat((model.positions.token.expand(3, 1, 6), state), dim=1) + model.positions.weight
    for block in model.blocks:
        state = state + attended(block.attention, normalized(block.attention_norm, state), heads=3)
        hidden = affine(block.mlp.expand, normalized(block.mlp_norm, state))
        state = state + affine(block.mlp.contract, block.mlp.activation(hidden))
    agree(model(x), affine(model.head, normalized(model.norm, state)[:, 0]))


def scramble(model: nn.Module) -> None:
    """Random weights and running statistics, so that nothing agrees by being zero or one."""
    for path, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.5 if path.endswith("var") else torch.randn(tensor.shape) / 4)


@pytest.mark.parametrize(
    ("name", "kind", "depths"), [("resnet18", "basic", [2, 2, 2, 2]), ("resnet50", "bottleneck", [3, 4, 6, 3])]
)
def test_resnet_computes_what_the_library_computes(name: str, kind: str, depths: list[int]) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [4 * k * (4 if kind == "bottleneck" else 1) for k in (1, 2, 4, 8)]
    config = ResNetConfig(embedding_size=4, hidden_sizes=sizes, depths=depths, layer_type=kind, num_labels=5)
    library = ResNetForImageClassification(config).eval()
    scramble(library)

    def renamed(path: str) -> str:
        path = path.replace("resnet.embedder.embedder.", "stem.")
        path = path.replace("resnet.encoder.", "").replace(".layers.", ".").replace("classifier.1.", "classifier.")
        return re.sub(r"\.layer\.(\d)", lambda digit: f".branch.{2 * int(digit[1])}", path)

    model = zoo.build(name, width=1 / 16, num_classes=5).eval()
    model.load_state_dict({renamed(path): tensor for path, tensor in library.state_dict().items()})
    x = torch.randn(2, 3, 64, 64, dtype=D)
    torch.testing.assert_close(model.double()(x), library.double()(x).logits, rtol=1e-10, atol=1e-12)


def test_gpt_computes_what_the_library_computes_and_does_not_look_ahead() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    library = GPT2LMHeadModel(config).eval()
    scramble(library)
    new_names = {
        "transformer.wte": "tokens", "transformer.wpe": "positions", "transformer.ln_f": "norm",
        "lm_head": "head", "transformer.h": "blocks", "ln_1": "attention_norm", "ln_2": "mlp_norm",
        "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.projection",
        "mlp.c_fc": "mlp.expand", "mlp.c_proj": "mlp.contract",
    }  # fmt: skip
    state = {}
    for path, tensor in library.state_dict().items():
        # The library stores the transposed matrix in its layers named c_….
        value = tensor.T if re.search(r"c_\w+\.weight$", path) else tensor
        for old, new in new_names.items():
            path = path.replace(old, new)
        state[path] = value
    for name in ("gpt", "gpt-tied"):
        model = zoo.build(name, vocabulary=11, context=6, width=8, depth=2, heads=2)
        model.load_state_dict(state)
        assert (model.head.weight is model.tokens.weight) == (name == "gpt-tied")
        ids = zoo.example_input("gpt", vocabulary=11, context=6)
        for length in (1, 4, 6):
            logits = library.double()(ids[:, :length]).logits
            torch.testing.assert_close(model.double()(ids[:, :length]), logits, rtol=1e-10, atol=1e-12)
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    agree(model(changed)[:, :4], model(ids)[:, :4])
    assert not torch.allclose(model(changed)[:, 4:], model(ids)[:, 4:])
