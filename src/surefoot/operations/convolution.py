r"""Convolutions in one, two and three dimensions, plain and transposed.

Let every input entry lie in at most :math:`c` patches. Then (the paper's lemma on convolutions)

.. math:: \|\beta(x, w)\|^2 = \sum_{j,k} \langle w_j, \Pi_k x\rangle^2
    \le \sum_j\|w_j\|^2 \sum_k\|\Pi_k x\|^2 \le c\,\|w\|^2\|x\|^2,

so the bilinear part is :math:`\sqrt{c}`-smooth, whatever the groups. The number :math:`c` is counted with the
real padding, stride and dilation. A bias entry is copied to every position of every sample: :math:`\sqrt{m
n^p}` (the paper's :math:`\sqrt{m}\lceil k/s\rceil` is not a bound). The transposed convolution is the adjoint
in x for fixed w, and :math:`|\langle y, \beta^\top(x, w)\rangle| = |\langle\beta(y, w), x\rangle|`, so it has
the same constants as the convolution from its output to its input.

The constant :math:`\sqrt c` is reached where patches do not overlap, c = 1. Where they do it is a limit: equal
taps and n equal entries along each of p sides, with stride and dilation 1 and no padding, give
:math:`\|\beta(x, w)\| = \sqrt c\,\|x\|\|w\|\,((n - k + 1)/n)^{p/2}`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, maximum, minimum
from surefoot.norms import convolution_norm, patch_overlap, spectral_norm
from surefoot.operations.bilinear import along_segment
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import root, spatial
from surefoot.operations.gram import convolution_rows
from surefoot.operations.products import Partial, added, biaffine, costate_norm
from surefoot.operations.record import Form, GramRows, InSingle, declare, operation
from surefoot.operations.sparsity import Sparsity, product

_MANY, _FEW = 2**22, 2**20  # numbers of patches: more are made in pieces of so many
_LARGEST_MATRIX = 2**24  # entries of the matrix of patches
_LARGEST_GRAM = 2e9  # multiplications for its Gram matrix


@dataclass(frozen=True)
class Setting:
    """How a convolution walks over its input.

    Padding is before the first entry, and after the last one as needed: ``"same"`` with an odd number of entries
    to pad puts one more there.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    outputs: tuple[int, ...] | None = None

    @property
    def overlap(self) -> int:
        """The largest number of patches that contain one entry of the input."""
        return patch_overlap(self.size, self.kernel, self.stride, self.padding, self.dilation, self.outputs)

    def norm(self, weight: Tensor) -> Magnitude:
        """The operator norm of the convolution with a weight."""
        walk = (self.size, self.stride, self.padding, self.dilation)
        return Magnitude.of(convolution_norm(weight, *walk, self.groups, self.outputs))


def _batched(use: Use) -> list[Slot]:
    """The data, unless they are a single image."""
    return ["input"] if len(use.shapes["input"]) == len(use.shapes["weight"]) else []


def _cost(use: Use) -> Sparsity:
    r""":math:`s_\beta = m\, n^p\, n^f\, s^f`, patches times coefficients of all filters.

    Each coefficient of the weight (:math:`n^f s^f` of them, whatever the groups) meets each patch once. A
    convolution has one patch per output position, its transpose one per input position. Zero padding is not
    subtracted, as in the paper, so with padding this is above the number of non-zero entries.
    """
    weight, inputs = use.shapes["weight"], use.shapes["input"]
    axes = len(weight) - 2
    batch = inputs[0] if len(inputs) == axes + 2 else 1
    transposed = "transpose" in use.op or bool(use["transposed"])
    patches = math.prod((inputs if transposed else use.shape)[-axes:])
    return product(use, batch * patches * math.prod(weight), "input", "weight", "bias")


_READINGS: dict[str, Any] = {
    "form": Form.PRODUCT, "factors": ("input", "weight"), "rows": _batched, "cost": _cost, "errata": (2,),
    "taylor": partial(along_segment, data="input", weights="weight", shift="bias"),
}  # fmt: skip


@operation("aten.conv1d", "aten.conv2d", "aten.conv3d", **_READINGS, single=InSingle.MATRIX, shifts=("bias",))
def convolution(call: Call) -> Bounds:
    r"""L = √c, Jacobians: the operator norm of the convolution, the norm of the matrix of patches, and √(m·n^p).

    Over the domain :math:`\|\beta(\cdot, w)\| \le \|\beta(\cdot, \hat w)\| + \sqrt{c}\,\|w - \hat w\|`; without a
    centre it is at most :math:`\sqrt{c}\,\|w\|`. Contracted with costates :math:`\Lambda`, as a matrix of
    positions × channels, and with P the matrix of patches of :math:`\dot x`: :math:`\langle\dot W, \Lambda^\top
    P\rangle \le \|\Lambda\|_2\|\dot w\|\|P\|_F \le \sqrt c\,\|\Lambda\|_2\|\dot w\|\|\dot x\|`, and with groups
    the largest of theirs.
    """
    dims = int(call.node.op[-2])
    w, padding, size = call["weight"], call["padding"], call["input"].shape[-dims:]
    stride, dilation = spatial(call["stride"], dims), spatial(call["dilation"], dims)
    before, outputs = (0,) * dims, None
    if padding == "same":
        before, outputs = tuple(d * (k - 1) // 2 for k, d in zip(w.shape[2:], dilation, strict=True)), size
    elif padding != "valid":
        before = spatial(padding, dims)
    setting = Setting(size, w.shape[2:], stride, before, dilation, call["groups"], outputs)
    bounds = _bounds(call, setting, inner=math.prod(w.shape[1:]))
    constant, groups = root(setting.overlap), setting.groups

    def along(costate: Enclosure) -> dict[tuple[str, str], Magnitude]:
        return {("input", "weight"): constant * _largest_group(costate, dims, groups)}

    return replace(bounds, curvature_along=along)


def _largest_group(costate: Enclosure, dims: int, groups: int) -> Magnitude:
    """The largest spectral norm over the groups of costates as matrices, positions of all samples × channels."""
    channels = costate.value.movedim(-dims - 1, -1)
    parts = channels.reshape(-1, groups, channels.shape[-1] // groups).unbind(1)
    return maximum(*(costate_norm(costate, part) for part in parts))


def _in_pieces(input: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
    """In double precision torch lays out the patches of all samples at once. Where these are many numbers, the
    memory is asked for anew at each call, which takes longer than the products; so few samples come at a time.
    """
    patches = weight[0].numel() * math.prod(input.shape[-2:])
    if input.dtype is not torch.float64 or input.dim() < 4 or patches * len(input) <= _MANY:
        return F.conv2d(input, weight, *rest, **options)
    parts = input.split(max(1, _FEW // patches))
    return torch.cat([F.conv2d(part, weight, *rest, **options) for part in parts])


declare("aten.conv2d", evaluate=_in_pieces)
declare("aten.conv1d", "aten.conv2d", gram=GramRows(("weight", "bias"), convolution_rows,
        lambda use: not isinstance(use["padding"], str) and bool(_batched(use))))  # fmt: skip
declare("aten.convolution", **{**_READINGS, "taylor": None})


@operation("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d", **_READINGS)
def transposed_convolution(call: Call) -> Bounds:
    """The adjoint of the convolution from its output to its input, with the same weights: the same constants."""
    dims = int(call.node.op[-2])
    x, w = call["input"], call["weight"]
    stride, padding, dilation = (spatial(call[key], dims) for key in ("stride", "padding", "dilation"))
    setting = Setting(call.shape[-dims:], w.shape[2:], stride, padding, dilation, call["groups"], x.shape[-dims:])
    inner = w.shape[0] // setting.groups * math.prod(setting.kernel)
    return _bounds(call, setting, inner)


def _bounds(call: Call, setting: Setting, inner: int) -> Bounds:
    """What both share; ``inner`` products are added up for one entry."""
    x, w, bias = call["input"], call["weight"], call["bias"]
    dims, constant = len(setting.size), root(setting.overlap)
    norm_w = constant * w.bound
    if isinstance(w.value, Tensor) and not x.is_constant:
        norm_w = minimum(norm_w, setting.norm(w.value) + constant * w.spread)
    centre_x = minimum(constant * x.centre_norm, _patch_norm(call, x, setting))
    norm_x = minimum(constant * x.bound, centre_x + constant * x.spread)
    constants = Partial(norm_w, norm_x, centre_x, constant)
    shift = added(call, bias, shape=(*bias.shape, *(1,) * dims)) if isinstance(bias, Enclosure) else None
    return biaffine(call, ("input", "weight", "bias"), x, w, shift, constants, inner=inner)


def _patch_norm(call: Call, x: Enclosure, setting: Setting) -> Magnitude:
    r"""The norm of :math:`w \mapsto \beta(\hat x, w)`: the spectral norm of the matrix of patches, per group.

    One column per tap and channel, found by applying the operation to x with unit weights, one channel at a time;
    each sum has one term, so the entries are exact. Only where the matrix costs little.
    """
    channels, taps = x.shape[-len(setting.size) - 1], math.prod(setting.kernel)
    patch = channels // setting.groups * taps
    positions = call.numel // max(1, call.shape[-len(setting.size) - 1])
    entries = patch * positions * setting.groups
    small = entries <= _LARGEST_MATRIX and patch * entries <= _LARGEST_GRAM
    if not isinstance(x.value, Tensor) or not small or not positions:
        return Magnitude.infinity()
    data = x.value if len(x.shape) == len(setting.size) + 2 else x.value.unsqueeze(0)
    units = torch.eye(taps, dtype=torch.float64, device=data.device).reshape(taps, 1, *setting.kernel)
    plain = "transpose" not in call.node.op
    units = (
        units.repeat(channels, *[1] * (units.dim() - 1))
        if plain
        else units.movedim(0, 1).repeat_interleave(channels, 0)
    )
    operation = getattr(F, call.node.op.removeprefix("aten."))
    keys = ("stride", "padding", "dilation", *(() if plain else ("output_padding",)))
    columns = operation(data, units, groups=channels, **{key: call[key] for key in keys})
    grouped = columns.reshape(len(data), setting.groups, patch, -1).permute(1, 2, 0, 3).flatten(2)
    return Magnitude.of(max(spectral_norm(part) for part in grouped))
