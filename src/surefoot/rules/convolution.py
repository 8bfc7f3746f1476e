r"""Convolutions in one, two and three dimensions, plain and transposed.

Let every input entry lie in at most :math:`c` patches. Then (the paper's lemma on convolutions)

.. math:: \|\beta(x, w)\|^2 = \sum_{j,k} \langle w_j, \Pi_k x\rangle^2
    \le \sum_j\|w_j\|^2 \sum_k\|\Pi_k x\|^2 \le c\,\|w\|^2\|x\|^2,

so the bilinear part is :math:`\sqrt{c}`-smooth, whatever the groups. The number :math:`c` is counted with the
real padding, stride and dilation. A bias entry is copied to every position of every sample: :math:`\sqrt{m
n^p}` (the paper's :math:`\sqrt{m}\lceil k/s\rceil` is not a bound). The transposed convolution is the adjoint
in x for fixed w, and :math:`|\langle y, \beta^\top(x, w)\rangle| = |\langle\beta(y, w), x\rangle|`, so it has
the same constants as the convolution from its output to its input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from surefoot.calculus.enclosure import Enclosure, norm
from surefoot.magnitude import Magnitude, minimum
from surefoot.norms import convolution_norm, patch_overlap, spectral_norm
from surefoot.rules.common import root, spatial
from surefoot.rules.products import Partial, biaffine
from surefoot.rules.registry import Bounds, Call, register_rule

_LARGEST_PATCH_GRAM = 1024


@register_rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: Call) -> Bounds:
    r"""L = √c, Jacobians: the operator norm of the convolution, the norm of the matrix of patches, and √(m·n^p).

    Over the domain :math:`\|\beta(\cdot, w)\| \le \|\beta(\cdot, \hat w)\| + \sqrt{c}\,\|w - \hat w\|`; without
    a centre it is at most :math:`\sqrt{c}\,\|w\|`.
    """
    dims = int(call.node.op[-2])
    x, w = call["input"], call["weight"]
    if len(x.shape) != dims + 2:
        raise call.refuse("an input without a batch dimension is not covered; add one with unsqueeze(0)")
    size, kernel = x.shape[2:], w.shape[2:]
    stride, dilation = spatial(call["stride"], dims), spatial(call["dilation"], dims)
    padding = _padding(call, dims, kernel, dilation)
    constant = root(patch_overlap(size, kernel, stride, padding, dilation))
    setting = {"stride": stride, "padding": padding, "dilation": dilation, "groups": call["groups"]}
    norm_w = constant * w.bound
    if isinstance(w.value, torch.Tensor) and not x.is_constant:
        at_centre = Magnitude.of(convolution_norm(w.value, size, **setting))
        norm_w = minimum(norm_w, at_centre + constant * w.spread)
    centre_x = minimum(constant * _centre_bound(x), _patch_norm(x, kernel, setting))
    norm_x = minimum(constant * x.bound, centre_x + constant * x.spread)
    inner = math.prod(w.shape[1:])
    copies = call.numel // max(1, w.shape[0])
    partial = Partial(norm_w, norm_x, centre_x, constant)
    return biaffine(call, ("input", "weight", "bias"), x, w, call["bias"], partial, copies, inner)


def _padding(call: Call, dims: int, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    padding = call["padding"]
    if padding == "valid":
        return (0,) * dims
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        if any(t % 2 for t in total):
            raise call.refuse("padding='same' with an even kernel pads one side more; pad explicitly before")
        return tuple(t // 2 for t in total)
    return spatial(padding, dims)


def _centre_bound(x: Enclosure) -> Magnitude:
    """The norm of x at its centre."""
    return x.bound if x.value is None else norm(x.value)


def _patch_norm(x: Enclosure, kernel: tuple[int, ...], setting: dict[str, Any]) -> Magnitude:
    r"""The norm of :math:`w \mapsto \beta(\hat x, w)`: the spectral norm of the matrix of patches, per group.

    Only for images whose patches are small enough that the Gram matrix costs little.
    """
    patch = x.shape[1] // setting["groups"] * math.prod(kernel)
    if not isinstance(x.value, torch.Tensor) or len(kernel) != 2 or patch > _LARGEST_PATCH_GRAM:
        return Magnitude.infinity()
    columns = F.unfold(
        x.value, kernel, dilation=setting["dilation"], padding=setting["padding"], stride=setting["stride"]
    )
    grouped = columns.reshape(x.shape[0], setting["groups"], patch, -1).permute(1, 2, 0, 3)
    return Magnitude.of(max(spectral_norm(part.reshape(patch, -1)) for part in grouped))


@register_rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed_convolution(call: Call) -> Bounds:
    """The adjoint of the convolution with the same weights: the same constants, on the output's size."""
    dims = int(call.node.op[-2])
    x, w = call["input"], call["weight"]
    if len(x.shape) != dims + 2:
        raise call.refuse("an input without a batch dimension is not covered; add one with unsqueeze(0)")
    stride, dilation = spatial(call["stride"], dims), spatial(call["dilation"], dims)
    padding = spatial(call["padding"], dims)
    setting = {"stride": stride, "padding": padding, "dilation": dilation, "groups": call["groups"]}
    size = call.shape[2:]
    constant = root(patch_overlap(size, w.shape[2:], stride, padding, dilation))
    norm_w = constant * w.bound
    if isinstance(w.value, torch.Tensor) and not x.is_constant:
        at_centre = Magnitude.of(
            convolution_norm(w.value, size, **setting)
        )  # of the convolution it is the adjoint of
        norm_w = minimum(norm_w, at_centre + constant * w.spread)
    centre_x = constant * _centre_bound(x)
    norm_x = minimum(constant * x.bound, centre_x + constant * x.spread)
    inner = w.shape[0] // call["groups"] * math.prod(w.shape[2:])
    copies = call.numel // max(1, call.shape[1])
    partial = Partial(norm_w, norm_x, centre_x, constant)
    return biaffine(call, ("input", "weight", "bias"), x, w, call["bias"], partial, copies, inner)
