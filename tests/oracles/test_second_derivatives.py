"""Second derivatives of the kernels of PyTorch that Newton steps rest on, against differences of first ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.torch_private import FORMULAS

Shapes = tuple[tuple[int, ...], ...]
LABELS = torch.tensor([0, 2, 1])
IMAGE: Shapes = ((2, 4, 4, 4),)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def positive(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.square() + 0.5)


def normalised(x: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    return F.batch_norm(x, mean, var, weight, bias, training)


SMOOTH = ["tanh", "sigmoid", "gelu", "silu", "mish", "softplus", "logsigmoid", "tanhshrink", "softsign", "elu",
          "selu", "celu", "relu", "leaky_relu", "hardtanh", "relu6", "softshrink", "hardswish"]  # fmt: skip
POSITIVE = ["log", "sqrt", "rsqrt", "reciprocal", "log1p"]
PLAIN = ["exp", "sin", "cos", "erf", "atan", "sinh", "expm1", "square", "abs"]

KERNELS: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    **{name: (getattr(F, name), ((3, 4),)) for name in SMOOTH},
    **{name: (getattr(torch, name), ((3, 4),)) for name in PLAIN},
    **{
        name: (positive(getattr(torch, name)), ((3, 4),))
        for name in ("log", "sqrt", "rsqrt", "reciprocal", "log1p")
    },
    "gelu, tanh": (partial(F.gelu, approximate="tanh"), ((3, 4),)),
    "logsumexp": (lambda x: x.logsumexp(1), ((3, 4),)),
    "pow": (positive(lambda x: x**1.7), ((3, 4),)),
    "softmax": (lambda x: x.softmax(1), ((3, 4),)),
    "log_softmax": (lambda x: x.log_softmax(1), ((3, 4),)),
    "prelu": (F.prelu, ((2, 3, 2), (3,))),
    "linear": (F.linear, ((2, 5, 3), (4, 3), (4,))),
    "bilinear": (F.bilinear, ((2, 3), (2, 2), (4, 3, 2), (4,))),
    "bmm": (torch.bmm, ((2, 3, 2), (2, 2, 3))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 3, 2), (2, 4, 2))),
    "conv1d": (partial(F.conv1d, stride=2, padding=1), ((2, 2, 5), (3, 2, 3), (3,))),
    "conv2d": (partial(F.conv2d, dilation=2, padding=1, groups=2), ((1, 2, 5, 5), (2, 1, 3, 3), (2,))),
    "conv_transpose2d": (partial(F.conv_transpose2d, stride=2), ((1, 2, 3, 3), (2, 2, 2, 2), (2,))),
    "conv3d": (F.conv3d, ((1, 1, 3, 3, 3), (2, 1, 2, 2, 2), (2,))),
    "avg_pool2d": (lambda x: F.avg_pool2d(x.sin(), 2), IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x.sin(), 2), IMAGE),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x.sin(), 3), IMAGE),
    "interpolate": (lambda x: F.interpolate(x.sin(), size=(6, 6), mode="bilinear"), IMAGE),
    "batch_norm, train": (partial(normalised, training=True), ((3, 4, 2), (4,), (4,))),
    "batch_norm, eval": (partial(normalised, training=False), ((3, 4, 2), (4,), (4,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ((3, 4), (4,), (4,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 3), (4,), (4,))),
    "instance_norm": (F.instance_norm, ((2, 3, 4),)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), ((3, 4), (4,))),
    "normalize": (F.normalize, ((3, 4),)),
    "vector_norm": (torch.linalg.vector_norm, ((3, 4),)),
    "cosine_similarity": (F.cosine_similarity, ((3, 4), (3, 4))),
    "glu": (F.glu, ((3, 4),)),
    "var": (lambda x: x.var(1), ((3, 4),)),
    "prod": (lambda x: x.prod(1), ((3, 4),)),
    "cumsum": (lambda x: x.sin().cumsum(1), ((3, 4),)),
    "attention": (attention, ((1, 2, 3, 2),) * 3),
    "embedding": (lambda table: F.embedding(LABELS, table).sin(), ((4, 3),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), ((3, 4),)),
    "nll_loss": (lambda x: F.nll_loss(x.log_softmax(1), LABELS), ((3, 4),)),
    "binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.full((3, 4), 0.3, dtype=x.dtype)),
        ((3, 4),),
    ),
    "mse_loss": (F.mse_loss, ((3, 4), (3, 4))),
    "huber_loss": (F.huber_loss, ((3, 4), (3, 4))),
    "smooth_l1_loss": (F.smooth_l1_loss, ((3, 4), (3, 4))),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="sum"), ((3, 4), (3, 4))),
    "weight_norm, as it is run here": (FORMULAS["aten._weight_norm"], ((4, 3), (4, 1))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_the_second_derivative_that_differences_show(name: str) -> None:
    function, shapes = KERNELS[name]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_the_kernel_that_is_replaced_is_wrong() -> None:
    """If this fails, PyTorch has mended it, and the formula can go."""
    v, g = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 1, dtype=torch.float64) + 0.5
    inputs = [v.requires_grad_(), g.requires_grad_()]
    assert not torch.autograd.gradgradcheck(
        lambda v, g: torch._weight_norm(v, g, 0), inputs, raise_exception=False
    )
