"""Families of the ``transformers`` package: which have certificates, from small configurations and random weights.

Each model is built from a configuration of one or two layers, in double precision, and certified on a ball around
its weights, of radius 1e-5, for a batch of two: the Lipschitz constant of its outputs in the weights and that of
their derivative. ReLU and max-pooling have kinks: there the second one is infinite, and nowhere else should it be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.runner import Case, benchmark
from benchmarks.timing import seconds
from surefoot.errors import SurefootError

# ruff: noqa: C408
# fmt: off
TEXT: dict[str, Any] = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
DECODER = TEXT | dict(num_key_value_heads=2)
HEADED = DECODER | dict(head_dim=4)
OLD: dict[str, Any] = dict(
    vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
)
BOTH: dict[str, Any] = dict(
    vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
)
IMAGE: dict[str, Any] = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24, image_size=16, patch_size=8
)
# name: (name of the configuration before "Config", the model's name or what it adds to that, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("Albert", "Model", TEXT | dict(embedding_size=8)),
    "bert": ("Bert", "Model", TEXT),
    "bigbird": ("BigBird", "Model", TEXT | dict(attention_type="original_full")),
    "biogpt": ("BioGpt", "ForCausalLM", TEXT),
    "bloom": ("Bloom", "ForCausalLM", dict(vocab_size=50, hidden_size=16, n_layer=1, n_head=4)),
    "camembert": ("Camembert", "Model", TEXT),
    "codegen": ("CodeGen", "ForCausalLM", OLD | dict(rotary_dim=4)),
    "cohere": ("Cohere", "ForCausalLM", DECODER),
    "convbert": ("ConvBert", "Model", TEXT | dict(embedding_size=16)),
    "ctrl": ("CTRL", "LMHeadModel", dict(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=4, dff=24)),
    "data2vec-text": ("Data2VecText", "Model", TEXT),
    "deberta": ("Deberta", "Model", TEXT),
    "deberta-v2": ("DebertaV2", "Model", TEXT),
    "distilbert": ("DistilBert", "Model", dict(
        vocab_size=50, max_position_embeddings=32, n_layers=1, n_heads=4, dim=16, hidden_dim=24)),
    "electra": ("Electra", "Model", TEXT | dict(embedding_size=16)),
    "ernie": ("Ernie", "Model", TEXT),
    "esm": ("Esm", "Model", TEXT | dict(mask_token_id=3)),
    "falcon": ("Falcon", "ForCausalLM", dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, bos_token_id=1,
        eos_token_id=2)),
    "flaubert": ("Flaubert", "Model", dict(vocab_size=50, emb_dim=16, n_layers=1, n_heads=4)),
    "fnet": ("FNet", "Model", dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, intermediate_size=24, max_position_embeddings=32)),
    "funnel": ("Funnel", "BaseModel", dict(
        vocab_size=50, block_sizes=[1], num_decoder_layers=1, d_model=16, n_head=4, d_head=4, d_inner=24)),
    "gemma": ("Gemma", "ForCausalLM", HEADED),
    "gemma2": ("Gemma2", "ForCausalLM", HEADED),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", HEADED),
    "glm": ("Glm", "ForCausalLM", HEADED),
    "gpt2": ("GPT2", "LMHeadModel", OLD),
    "gpt-bigcode": ("GPTBigCode", "ForCausalLM", OLD),
    "gpt-neo": ("GPTNeo", "ForCausalLM", dict(
        vocab_size=50, hidden_size=16, num_layers=1, num_heads=4, attention_types=[[["global"], 1]],
        max_position_embeddings=32, bos_token_id=1, eos_token_id=2)),
    "gpt-neox": ("GPTNeoX", "ForCausalLM", TEXT),
    "gptj": ("GPTJ", "ForCausalLM", OLD | dict(rotary_dim=4)),
    "granite": ("Granite", "ForCausalLM", DECODER),
    "helium": ("Helium", "ForCausalLM", HEADED),
    "ibert": ("IBert", "Model", TEXT),
    "layoutlm": ("LayoutLM", "Model", TEXT),
    "llama": ("Llama", "ForCausalLM", DECODER),
    "llama eager": ("Llama", "ForCausalLM", DECODER | dict(attn_implementation="eager")),
    "mbart": ("MBart", "Model", BOTH),
    "bart": ("Bart", "Model", BOTH),
    "megatron-bert": ("MegatronBert", "Model", TEXT),
    "mistral": ("Mistral", "ForCausalLM", DECODER),
    "mobilebert": ("MobileBert", "Model", TEXT | dict(embedding_size=16, intra_bottleneck_size=16)),
    "modernbert": ("ModernBert", "Model", TEXT | dict(cls_token_id=1, sep_token_id=2)),
    "mpnet": ("MPNet", "Model", TEXT),
    "mpt": ("Mpt", "ForCausalLM", dict(vocab_size=50, d_model=16, n_layers=1, n_heads=4, max_seq_len=32)),
    "nemotron": ("Nemotron", "ForCausalLM", DECODER),
    "olmo": ("Olmo", "ForCausalLM", DECODER),
    "olmo2": ("Olmo2", "ForCausalLM", DECODER),
    "openai-gpt": ("OpenAIGPT", "LMHeadModel", dict(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=4)),
    "opt": ("OPT", "ForCausalLM", TEXT | dict(ffn_dim=24, word_embed_proj_dim=16)),
    "phi": ("Phi", "ForCausalLM", TEXT | dict(partial_rotary_factor=0.5)),
    "phi3": ("Phi3", "ForCausalLM", DECODER),
    "qwen2": ("Qwen2", "ForCausalLM", DECODER),
    "qwen3": ("Qwen3", "ForCausalLM", HEADED),
    "rembert": ("RemBert", "Model", TEXT | dict(input_embedding_size=8, output_embedding_size=8)),
    "roberta": ("Roberta", "Model", TEXT),
    "roformer": ("RoFormer", "Model", TEXT | dict(embedding_size=16)),
    "smollm3": ("SmolLM3", "ForCausalLM", DECODER),
    "squeezebert": ("SqueezeBert", "Model", TEXT | dict(embedding_size=16)),
    "stablelm": ("StableLm", "ForCausalLM", DECODER),
    "starcoder2": ("Starcoder2", "ForCausalLM", DECODER),
    "t5": ("T5", "EncoderModel", dict(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)),
    "xlm-roberta": ("XLMRoberta", "Model", TEXT),
    "xlnet": ("XLNet", "Model", dict(vocab_size=50, d_model=16, n_layer=1, n_head=4, d_inner=24)),
    "beit": ("Beit", "Model", IMAGE),
    "deit": ("DeiT", "Model", IMAGE),
    "vit": ("ViT", "Model", IMAGE),
    "dinov2": ("Dinov2", "Model", IMAGE),
    "clip": ("CLIPVision", "Model", IMAGE),
    "clip both": ("CLIP", "Model", dict(text_config=TEXT, vision_config=IMAGE, projection_dim=8)),
    "siglip": ("SiglipVision", "Model", IMAGE),
    "convnext": ("ConvNext", "Model", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
    "convnextv2": ("ConvNextV2", "Model", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
    "resnet": ("ResNet", "Model", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")),
    "swin": ("Swin", "Model", dict(
        image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)),
    "mobilenet-v2": ("MobileNetV2", "Model", dict(depth_multiplier=0.25, image_size=16)),
    "segformer": ("Segformer", "Model", dict(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2])),
    "poolformer": ("PoolFormer", "Model", dict(
        depths=[1, 1], hidden_sizes=[8, 16], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
        padding=[2, 1], mlp_ratio=2.0)),
    "wav2vec2": ("Wav2Vec2", "Model", dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24, conv_dim=(8, 8),
        conv_kernel=(4, 3), conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2)),
    "mamba": ("Mamba", "ForCausalLM", dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)),
}
# fmt: on
IDS = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(0))


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of a family, and a batch."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    family, kind, settings = FAMILIES[name]
    torch.manual_seed(0)
    given = {key: value for key, value in settings.items() if key != "attn_implementation"}
    config = getattr(transformers, f"{family}Config")(**given)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if "attn_implementation" in settings:  # "eager" writes attention out by hand
        config._attn_implementation = settings["attn_implementation"]
    model = getattr(transformers, kind if kind.startswith("Gemma3") else f"{family}{kind}")
    built = model(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
    if name == "wav2vec2":
        return built, {"input_values": torch.randn(2, 60, generator=generator, dtype=torch.float64)}
    if "image_size" in settings or "depths" in settings:
        return built, {"pixel_values": images}
    batch = {"input_ids": IDS, **({"pixel_values": images} if name == "clip both" else {})}
    return built, batch | ({"decoder_input_ids": IDS} if "decoder_layers" in settings else {})


def certified(name: str) -> tuple[float, float, str]:
    """ℓ and L of a family, and why L is infinite; a refusal counts as infinite, any other error is not caught."""
    model, batch = build(name)
    try:
        found = sf.certify(model, batch, domain=sf.Ball(1e-5))
    except SurefootError as error:
        return math.inf, math.inf, str(error)
    smoothness = float(found.smoothness)
    return float(found.lipschitz), smoothness, "" if math.isfinite(smoothness) else found.reasons[0]


@benchmark("families", "families", "family | model | ℓ | L | seconds | why ∞")
def families() -> Iterator[Case]:
    """One row for each family."""
    yield from ((name, partial(_row, name)) for name in FAMILIES)


def _row(name: str) -> list[str]:
    found: list[tuple[float, float, str]] = []
    taken = seconds(lambda: found.append(certified(name)))
    first, second, why = found[0]
    numbers = (f"{x:.3g}" if math.isfinite(x) else "∞" for x in (first, second))
    family, kind, _ = FAMILIES[name]
    model = kind if kind.startswith("Gemma3") else f"{family}{kind}"
    return [name, model, *numbers, f"{taken:.1f}", why.split(": use")[0].replace("|", "/")]
