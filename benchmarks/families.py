"""Families of the ``transformers`` package: which have certificates, from small configurations and random weights.

Each model is built from a configuration of one or two layers, in double precision, and certified on a ball around
its weights, of radius 1e-5, for a batch of two: the Lipschitz constant of its outputs in the weights and that of
their derivative. ReLU and max-pooling have kinks: there the second one is infinite, and nowhere else should it be.

``python -m benchmarks.families`` writes ``docs/families.md``; names of families restrict it to these and print.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.errors import SurefootError

RADIUS = 1e-5
_TEXT: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DECODER = _TEXT | {"num_key_value_heads": 2}
_HEADED = _DECODER | {"head_dim": 4}
_OLD = {
    "vocab_size": 50,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BOTH = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
_IMAGE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip

# name: (configuration, model, settings); "eager" writes attention out by hand
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", "AlbertModel", _TEXT | {"embedding_size": 8}),
    "bert": ("BertConfig", "BertModel", _TEXT),
    "bigbird": ("BigBirdConfig", "BigBirdModel", _TEXT | {"attention_type": "original_full"}),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", _TEXT),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "camembert": ("CamembertConfig", "CamembertModel", _TEXT),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", _OLD | {"rotary_dim": 4}),
    "cohere": ("CohereConfig", "CohereForCausalLM", _DECODER),
    "convbert": ("ConvBertConfig", "ConvBertModel", _TEXT | {"embedding_size": 16}),
    "ctrl": (
        "CTRLConfig",
        "CTRLLMHeadModel",
        {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "dff": 24},
    ),
    "data2vec-text": ("Data2VecTextConfig", "Data2VecTextModel", _TEXT),
    "deberta": ("DebertaConfig", "DebertaModel", _TEXT),
    "deberta-v2": ("DebertaV2Config", "DebertaV2Model", _TEXT),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {
            "vocab_size": 50,
            "max_position_embeddings": 32,
            "n_layers": 1,
            "n_heads": 4,
            "dim": 16,
            "hidden_dim": 24,
        },
    ),
    "electra": ("ElectraConfig", "ElectraModel", _TEXT | {"embedding_size": 16}),
    "ernie": ("ErnieConfig", "ErnieModel", _TEXT),
    "esm": ("EsmConfig", "EsmModel", _TEXT | {"mask_token_id": 3}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "flaubert": (
        "FlaubertConfig",
        "FlaubertModel",
        {"vocab_size": 50, "emb_dim": 16, "n_layers": 1, "n_heads": 4},
    ),
    "fnet": (
        "FNetConfig",
        "FNetModel",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        },
    ),
    "funnel": (
        "FunnelConfig",
        "FunnelBaseModel",
        {
            "vocab_size": 50,
            "block_sizes": [1],
            "num_decoder_layers": 1,
            "d_model": 16,
            "n_head": 4,
            "d_head": 4,
            "d_inner": 24,
        },
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _HEADED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _HEADED),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _HEADED),
    "glm": ("GlmConfig", "GlmForCausalLM", _HEADED),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _OLD),
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _OLD),
    "gpt-neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 4,
            "attention_types": [[["global"], 1]],
            "max_position_embeddings": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _OLD | {"rotary_dim": 4}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _DECODER),
    "helium": ("HeliumConfig", "HeliumForCausalLM", _HEADED),
    "ibert": ("IBertConfig", "IBertModel", _TEXT),
    "layoutlm": ("LayoutLMConfig", "LayoutLMModel", _TEXT),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "llama eager": ("LlamaConfig", "LlamaForCausalLM", _DECODER | {"attn_implementation": "eager"}),
    "mbart": ("MBartConfig", "MBartModel", _BOTH),
    "bart": ("BartConfig", "BartModel", _BOTH),
    "megatron-bert": ("MegatronBertConfig", "MegatronBertModel", _TEXT),
    "mistral": ("MistralConfig", "MistralForCausalLM", _DECODER),
    "mobilebert": (
        "MobileBertConfig",
        "MobileBertModel",
        _TEXT | {"embedding_size": 16, "intra_bottleneck_size": 16},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertModel", _TEXT | {"cls_token_id": 1, "sep_token_id": 2}),
    "mpnet": ("MPNetConfig", "MPNetModel", _TEXT),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": 50, "d_model": 16, "n_layers": 1, "n_heads": 4, "max_seq_len": 32},
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _DECODER),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _DECODER),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _DECODER),
    "openai-gpt": (
        "OpenAIGPTConfig",
        "OpenAIGPTLMHeadModel",
        {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 4},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", _TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "phi": ("PhiConfig", "PhiForCausalLM", _TEXT | {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _HEADED),
    "rembert": ("RemBertConfig", "RemBertModel", _TEXT | {"input_embedding_size": 8, "output_embedding_size": 8}),
    "roberta": ("RobertaConfig", "RobertaModel", _TEXT),
    "roformer": ("RoFormerConfig", "RoFormerModel", _TEXT | {"embedding_size": 16}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _DECODER),
    "squeezebert": ("SqueezeBertConfig", "SqueezeBertModel", _TEXT | {"embedding_size": 16}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _DECODER),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", _DECODER),
    "t5": (
        "T5Config",
        "T5EncoderModel",
        {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4},
    ),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel", _TEXT),
    "xlnet": (
        "XLNetConfig",
        "XLNetModel",
        {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 4, "d_inner": 24},
    ),
    "beit": ("BeitConfig", "BeitModel", _IMAGE),
    "deit": ("DeiTConfig", "DeiTModel", _IMAGE),
    "vit": ("ViTConfig", "ViTModel", _IMAGE),
    "dinov2": ("Dinov2Config", "Dinov2Model", _IMAGE),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", _IMAGE),
    "clip both": ("CLIPConfig", "CLIPModel", {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 8}),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", _IMAGE),
    "convnext": ("ConvNextConfig", "ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "convnextv2": (
        "ConvNextV2Config",
        "ConvNextV2Model",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetModel",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "swin": (
        "SwinConfig",
        "SwinModel",
        {
            "image_size": 16,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
    ),
    "mobilenet-v2": ("MobileNetV2Config", "MobileNetV2Model", {"depth_multiplier": 0.25, "image_size": 16}),
    "segformer": (
        "SegformerConfig",
        "SegformerModel",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "poolformer": (
        "PoolFormerConfig",
        "PoolFormerModel",
        {
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "mlp_ratio": 2.0,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "conv_dim": (8, 8),
            "conv_kernel": (4, 3),
            "conv_stride": (2, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ),
}
IDS = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(0))


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of a family, and a batch."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    kind, model, given = FAMILIES[name]
    settings = dict(given)
    attention = settings.pop("attn_implementation", None)
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if attention is not None:
        config._attn_implementation = attention
    built = getattr(transformers, model)(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
    if name == "wav2vec2":
        return built, {"input_values": torch.randn(2, 60, generator=generator, dtype=torch.float64)}
    if "image_size" in settings or "depths" in settings:
        return built, {"pixel_values": images}
    batch = {"input_ids": IDS}
    if name == "clip both":
        batch["pixel_values"] = images
    return built, batch | ({"decoder_input_ids": IDS} if "decoder_layers" in settings else {})


@dataclass(frozen=True)
class Row:
    """One family: constants, the reason for an infinite one or a refusal, and the time."""

    name: str
    model: str
    lipschitz: float
    smoothness: float
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        numbers = (f"{x:.3g}" if math.isfinite(x) else "∞" for x in (self.lipschitz, self.smoothness))
        return f"| {self.name} | {self.model} | {' | '.join(numbers)} | {self.seconds:.1f} | {self.why} |"


def certified(name: str) -> Row:
    """The certificate of a family; a refusal counts as infinite, any other error is not caught."""
    model, batch = build(name)
    start = time.process_time()
    try:
        certificate = sf.certify(model, batch, domain=sf.Ball(RADIUS))
        constants = float(certificate.lipschitz), float(certificate.smoothness)
        why = "" if math.isfinite(constants[1]) else certificate.reasons[0]
    except SurefootError as error:
        constants, why = (math.inf, math.inf), str(error)
    short = why.split(": use")[0].replace("|", "/")
    return Row(name, FAMILIES[name][1], *constants, time.process_time() - start, short)


def page(rows: list[Row]) -> str:
    """The table with a sentence before it."""
    first = sum(math.isfinite(row.lipschitz) for row in rows)
    second = sum(math.isfinite(row.smoothness) for row in rows)
    head = (
        "# Families of transformers\n\nGenerated by `python -m benchmarks.families`. Models of the `transformers` "
        "package from small configurations with random weights, in double precision, on a ball of radius 1e-5 "
        "around the weights: the Lipschitz constant ℓ of all outputs in the weights, that of their derivative, L, "
        f"and the processor time of the certificate.\n\nOf {len(rows)} models, ℓ is finite for {first} and L for "
        f"{second}.\n\n| family | model | ℓ | L | seconds | why ∞ |\n|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(map(str, rows)) + "\n"


def main(names: list[str]) -> None:
    """Certify families and write the page, or print the rows of some."""
    rows = []
    for name in names or FAMILIES:
        rows.append(certified(name))
        print(rows[-1], flush=True)
    if not names:
        (Path(__file__).parent.parent / "docs" / "families.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
