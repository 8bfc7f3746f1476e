"""Published networks: numbers of parameters, and values against the implementations of `transformers`.

The numbers are torchvision's (``num_params`` in the metadata of its weights); GPT-2's is the size of the
released small model, its tied table counted once.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from surefoot import zoo

BASE = {"width": 768, "depth": 12, "heads": 12}
VIT_B_16 = BASE | {"num_classes": 1000, "image_size": 224, "patch_size": 16}
GPT_2 = BASE | {"vocabulary": 50257, "context": 1024}

PUBLISHED = [
    ("vgg16", {}, 138_357_544),
    ("vgg16-smooth", {}, 138_357_544),
    ("vgg16-batchnorm", {}, 138_357_544),
    ("vgg16-batchnorm", {"batch_norm_affine": True, "batch_norm_position": "first"}, 138_365_992),
    ("resnet18", {}, 11_689_512),
    ("resnet50", {}, 25_557_032),
    ("resnet152", {}, 60_192_808),
    ("densenet121", {}, 7_978_856),
    ("densenet121", {"blocks": (6, 12, 32, 32)}, 14_149_480),
    ("vit", VIT_B_16, 86_567_656),
    ("gpt-tied", GPT_2, 124_439_808),
]


@pytest.mark.parametrize(("name", "options", "count"), PUBLISHED)
def test_number_of_parameters(name: str, options: dict[str, object], count: int) -> None:
    with torch.device("meta"):
        model = zoo.build(name, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def scramble(model: nn.Module) -> None:
    """Random weights and running statistics, so that nothing agrees by being zero or one."""
    torch.manual_seed(0)
    for path, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.5 if path.endswith("var") else torch.randn(tensor.shape) / 4)


@pytest.mark.parametrize(
    ("name", "kind", "depths"), [("resnet18", "basic", [2, 2, 2, 2]), ("resnet50", "bottleneck", [3, 4, 6, 3])]
)
def test_resnet_computes_what_the_library_computes(name: str, kind: str, depths: list[int]) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    multiple = 4 if kind == "bottleneck" else 1
    config = ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4 * multiple, 8 * multiple, 16 * multiple, 32 * multiple],
        depths=depths,
        layer_type=kind,
        num_labels=5,
    )
    library = ResNetForImageClassification(config).eval()
    scramble(library)

    def renamed(path: str) -> str:
        path = path.replace("resnet.embedder.embedder.", "stem.")
        path = path.replace("resnet.encoder.", "").replace(".layers.", ".").replace("classifier.1.", "classifier.")
        return re.sub(r"\.layer\.(\d)", lambda found: f".branch.{2 * int(found[1])}", path)

    model = zoo.build(name, width=1 / 16, num_classes=5).eval()
    model.load_state_dict({renamed(path): tensor for path, tensor in library.state_dict().items()})
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model.double()(x), library.double()(x).logits, rtol=1e-10, atol=1e-12)


def test_gpt_computes_what_the_library_computes() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    library = GPT2LMHeadModel(config).eval()
    scramble(library)
    new_names = {
        "transformer.wte": "tokens",
        "transformer.wpe": "positions",
        "transformer.ln_f": "norm",
        "lm_head": "head",
        "transformer.h": "blocks",
        "ln_1": "attention_norm",
        "ln_2": "mlp_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.projection",
        "mlp.c_fc": "mlp.expand",
        "mlp.c_proj": "mlp.contract",
    }
    state = {}
    for path, tensor in library.state_dict().items():
        # The library stores the transposed matrix in its layers named c_….
        turned = tensor.T if re.search(r"c_\w+\.weight$", path) else tensor
        for old, new in new_names.items():
            path = path.replace(old, new)
        state[path] = turned
    model = zoo.build("gpt-tied", vocabulary=11, context=6, width=8, depth=2, heads=2)
    model.load_state_dict(state)
    ids = zoo.example_input("gpt", vocabulary=11, context=6)
    torch.testing.assert_close(model.double()(ids), library.double()(ids).logits, rtol=1e-10, atol=1e-12)
