"""Models of the ``transformers`` package from small configurations: their graphs compute what they compute."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.chain import Chain
from surefoot.operations.captured import capture

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"
transformers = importlib.import_module("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = TEXT | {
    "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# name: (configuration, model, settings); those of images have a size of 32.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", TEXT | {"intermediate_size": 24, "max_position_embeddings": 32}),
    "distilbert": (
        "DistilBertConfig", "DistilBertModel",
        {"vocab_size": 50, "max_position_embeddings": 32, "n_layers": 2, "n_heads": 4, "dim": 16,
         "hidden_dim": 24},
    ),
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "opt": (
        "OPTConfig", "OPTForCausalLM",
        TEXT | {"ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16},
    ),
    "t5": (
        "T5Config", "T5EncoderModel",
        {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", DECODER | {"head_dim": 4}),
    "vit": (
        "ViTConfig", "ViTForImageClassification",
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
         "image_size": 32, "patch_size": 8},
    ),
    "resnet": (
        "ResNetConfig", "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
    ),
    "convnext": (
        "ConvNextConfig", "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
    ),
    "swin": (
        "SwinConfig", "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
         "window_size": 4},
    ),
    "regnet": (
        "RegNetConfig", "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "mobilenet_v2": (
        "MobileNetV2Config", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32},
    ),
}  # fmt: skip
IMAGES = {"vit", "resnet", "convnext", "swin", "regnet", "mobilenet_v2"}


@pytest.fixture(autouse=True)
def _silent() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def build(name: str) -> tuple[nn.Module, Tensor]:
    configuration, model, settings = MODELS[name]
    built = getattr(transformers, model)(getattr(transformers, configuration)(**settings)).double().eval()
    for buffer in built.buffers():  # statistics that have been running
        if buffer.is_floating_point() and buffer.dim() == 1 and name in IMAGES:
            buffer.add_(torch.rand_like(buffer))
    if name in IMAGES:
        return built, torch.randn(2, 3, 32, 32, dtype=torch.float64)
    return built, torch.randint(0, 50, (2, 6))


def output(model: nn.Module, x: Any) -> Tensor:
    with torch.no_grad():
        result = model(**x) if isinstance(x, dict) else model(x)
    return result.logits if "logits" in result else result.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_model_computes(name: str) -> None:
    model, x = build(name)
    graph = capture(model, x)
    assert capture(model, x) is graph
    parameters = dict(model.named_parameters())
    for _ in range(2):
        with torch.no_grad():
            (value,) = graph.run(parameters, [x])
        assert torch.allclose(value, output(model, x), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


@pytest.mark.parametrize("name", ["bert", "resnet", "llama"])
def test_the_chain_computes_what_the_model_computes(name: str) -> None:
    model, x = build(name)
    chain = Chain(model, x)
    assert len(chain) > 5
    with torch.no_grad():
        (value,) = chain.states()[-1].values()
    assert torch.allclose(value, output(model, x), rtol=1e-12, atol=1e-12)


def test_an_attention_mask_is_an_input() -> None:
    model, ids = build("bert")
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    x = {"input_ids": ids, "attention_mask": mask}
    graph = capture(model, x)
    with torch.no_grad():
        (value,) = graph.run(dict(model.named_parameters()), [ids, mask])
    assert torch.allclose(value, output(model, x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(value, output(model, ids))


def test_a_large_model_on_the_meta_device() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8192, intermediate_size=28672, vocab_size=32000
    )
    with torch.device("meta"):
        model, ids = transformers.LlamaForCausalLM(config).eval(), torch.zeros(1, 16, dtype=torch.int64)
    graph = capture(model, ids)
    assert sum(leaf.spec.numel for leaf in graph.parameters) > 2e9
    assert set(graph.blocks) >= {"model.embed_tokens", "model.layers.1.mlp.gate_proj", "lm_head"}


def test_random_layers_are_named() -> None:
    model, x = build("bert")
    with pytest.raises(ValueError, match=r"In module 'embeddings.dropout': dropout with p = 0.1.*model\.eval"):
        capture(model.train(), x)
