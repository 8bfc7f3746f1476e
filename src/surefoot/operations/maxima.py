r"""Largest entries of patches.

With every entry in at most :math:`c` patches, :math:`|\max_P x - \max_P y|^2 \le \max_{i\in P}(x_i - y_i)^2 \le
\sum_{i\in P}(x_i - y_i)^2`, summed over patches at most :math:`c\|x - y\|^2`: Lipschitz with :math:`\sqrt c`,
reached where one entry is the largest of all patches it lies in.

Where the same entry stays the largest of its patch over the whole domain the map is linear there, and the
curvature is zero; otherwise it has a kink. An entry that leads by more than :math:`\sqrt2\,r` keeps its lead when
the sample moves by at most :math:`r`, as :math:`|\delta_i| + |\delta_j| \le \sqrt2\,\|\delta\|`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Slot, Use
from surefoot.operations.common import ZERO, normalized_dims, root, spatial, unless_along
from surefoot.operations.pooling import batched, patch_entries
from surefoot.operations.record import InSingle, declare, operation
from surefoot.operations.sparsity import Sparsity
from surefoot.scalar import Rounded

_LARGEST = 2**22  # entries of all patches together that are looked at
_REASON = (
    "max-pooling has a kink where the largest entry of a patch changes: use average pooling (surefoot.smooth), or "
    "shrink the domain"
)


def _one_of_each_patch(use: Use) -> Sparsity:
    """Every entry of a patch is compared, one of them is passed on."""
    outputs = use.node.specs[0].numel
    return Sparsity(evaluation=patch_entries(use), jacobian=outputs, application=outputs)


def _one_of_each_group(use: Use) -> Sparsity:
    outputs = use.node.specs[0].numel
    return Sparsity(evaluation=math.prod(use.shapes["self"]), jacobian=outputs, application=outputs)


_SETTINGS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


def _pull_max_pool(call: Call, costate: Tensor) -> dict[Slot, Rounded]:
    """Costates go to the entries that are the largest of their patches; one that is that of c patches gets their
    sum, which is off by γ_c of that of their absolute values, in whatever order.
    """
    x, dims, adaptive = call["self"].value, int(call.node.op[-2]), "adaptive" in call.node.op
    pool = getattr(F, f"{'adaptive_' if adaptive else ''}max_pool{dims}d")
    settings = {key: call[key] for key in (("output_size",) if adaptive else _SETTINGS)}
    given = {key: value for key, value in settings.items() if value not in (None, [])}
    places = pool(x, **given, return_indices=True)[1].flatten(-dims)
    slopes = costate.flatten(-dims)
    parts = (slopes, slopes.abs(), torch.ones_like(slopes))
    total, sizes, count = (
        torch.zeros_like(x).flatten(-dims).scatter_add(-1, places, part).reshape(x.shape) for part in parts
    )
    return {"self": Rounded(total, torch.where(count > 1, sizes * (count * 2.0**-52), 0.0))}


@operation("aten.max_pool1d", "aten.max_pool1d_with_indices", "aten.max_pool2d", "aten.max_pool2d_with_indices",
           "aten.max_pool3d", "aten.max_pool3d_with_indices", rows=batched, cost=_one_of_each_patch, errata=(15,),
           rounds=False, pullback=_pull_max_pool)  # fmt: skip
@operation("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d", rows=batched,
           errata=(15,), rounds=False, pullback=_pull_max_pool)  # fmt: skip
def max_pool(call: Call) -> Bounds:
    """Slope √c; curvature 0 where every maximum keeps its place over the domain, otherwise a kink.

    Where the places are returned as well, they are whole numbers and nothing is claimed about them. Adaptive
    pooling has the windows [⌊iN/P⌋, ⌈(i+1)N/P⌉), which may overlap.
    """
    dims = int(call.node.op.removesuffix("_with_indices")[-2])
    outputs, sides = call.shape[-dims:], call["self"].shape[-dims:]
    if "adaptive" in call.op:
        windows = [
            [list(range(i * n // m, -(-(i + 1) * n // m))) for i in range(m)]
            for n, m in zip(sides, outputs, strict=True)
        ]
    else:
        kernel = spatial(call["kernel_size"], dims)
        stride = spatial(call["stride"] or kernel, dims)
        padding, dilation = spatial(call["padding"], dims), spatial(call["dilation"], dims)
        windows = [
            [[i * s + t * d - p for t in range(k)] for i in range(m)]
            for m, k, s, p, d in zip(outputs, kernel, stride, padding, dilation, strict=True)
        ]
    tables = [_inside(window, n) for window, n in zip(windows, sides, strict=True)]
    counts = [torch.bincount(t.reshape(-1), minlength=n + 1)[:n].max() for t, n in zip(tables, sides, strict=True)]
    return _bounds(call, call["self"], math.prod(map(int, counts)), _patch_margin(call["self"], tables))


declare("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool2d_with_indices", single=InSingle.ENTRIES)

_SORTED = "entries change their order within the domain, which makes a kink: shrink the domain"


@operation("aten.sort", "aten.topk", "aten.kthvalue", "aten.median", "aten.cummax", "aten.cummin",
           rows=unless_along(), cost=_one_of_each_group, rounds=False)  # fmt: skip
def ordered(call: Call) -> Bounds:
    r"""Entries along one dimension in order, or some of them: slope 1; cumulative maxima of n entries √n.

    Sorting is Lipschitz with 1: by the rearrangement inequality :math:`\langle x^\uparrow, y^\uparrow\rangle \ge
    \langle x, y\rangle`, so :math:`\|x^\uparrow - y^\uparrow\| \le \|x - y\|`, and leaving entries out makes
    it no larger. A cumulative maximum moves by at most the largest move before it. Where no two entries next to
    each other in order, of which one is taken, may change their order over the domain, the same entries are taken
    everywhere and the map is linear.
    """
    x, whole = call["self"], call.op == "aten.median" and call["dim"] is None
    dim = -1 if call["dim"] is None else call["dim"]
    length = x.numel if whole else (x.shape or (1,))[dim]
    kink = length > 1
    if kink and isinstance(x.value, Tensor) and x.numel:
        lines = x.value.reshape(-1) if whole else x.value.movedim(dim, -1)
        first, last = _decisive(call, length)
        gaps = lines.sort(dim=-1).values.diff(dim=-1)[..., first:last]
        margin = gaps * (1 - 2.0**-50) - math.sqrt(2) * _moves(call, x, lines) * (1 + 1e-12)
        kink = not bool((margin > 0).all())
    steps = length if "cum" in call.node.op else 1
    return Bounds(
        jacobian={"self": root(steps)},
        curvature={("self", "self"): Magnitude.infinity() if kink else ZERO},
        offset=ZERO,
        peak=x.peak if len(call.node.specs) == 1 else None,
        reason=_SORTED if kink else "",
    )


def _decisive(call: Call, length: int) -> tuple[int, int]:
    """The gaps between entries in ascending order that decide what is taken: from the first to before the last."""
    if call.op == "aten.topk":
        k = call["k"]
        return (0, k) if call["largest"] is False else (max(0, length - 1 - k), length)
    if call.op in ("aten.kthvalue", "aten.median"):
        k = (length - 1) // 2 if call.op == "aten.median" else call["k"] - 1
        return max(0, k - 1), k + 1
    return 0, length


def _moves(call: Call, x: Enclosure, lines: Tensor) -> Tensor:
    """How far entries of lines, along their last dimension, may move: row by row where these stay apart."""
    radius = x.radius()
    if radius is None or not radius.dim() or lines.dim() < 2 or not unless_along()(call):
        return x.spread.tensor(lines)
    return radius.reshape(-1, *[1] * (lines.dim() - 1))


@operation("aten.amax", "aten.amin", "aten.max", "aten.min", rows=unless_along(), cost=_one_of_each_group,
           rounds=False)  # fmt: skip
def extreme(call: Call) -> Bounds:
    """The largest or smallest entry along some dimensions: one patch per result, slope 1."""
    x = call["self"]
    if call["other"] is not None:
        raise call.refuse("the larger of two tensors is not covered; use the largest entry of a stack of both")
    dims = normalized_dims(call["dim"], len(x.shape))
    kept = [k for k in range(len(x.shape)) if k not in dims]
    margin = None
    if isinstance(x.value, Tensor) and x.shape and x.numel:
        value = x.value if "max" in call.node.op else -x.value
        patches = value.permute(*kept, *dims).reshape(*(x.shape[k] for k in kept), -1)
        margin = _margin(patches, _moves(call, x, patches).squeeze(-1))
    return _bounds(call, x, 1, margin)


def _inside(window: list[list[int]], side: int) -> Tensor:
    """Positions of each window as a table; those outside, and what is missing to a rectangle, are ``side``."""
    width = max(len(places) for places in window)
    rows = [[i if 0 <= i < side else side for i in places] + [side] * (width - len(places)) for places in window]
    return torch.tensor(rows)


def _bounds(call: Call, x: Enclosure, overlap: int, margin: Tensor | None) -> Bounds:
    kink = margin is None or not bool((margin > 0).all())
    return Bounds(
        jacobian={"self": root(overlap)},
        curvature={("self", "self"): Magnitude.infinity() if kink else ZERO},
        offset=ZERO,
        peak=x.peak if len(call.node.specs) == 1 else None,
        reason=_REASON if kink else "",
    )


def _patch_margin(x: Enclosure, windows: list[Tensor]) -> Tensor | None:
    """For each patch, by how much its largest entry stays above the second over the domain."""
    dims = len(windows)
    entries = x.numel // max(1, math.prod(x.shape[-dims:])) * math.prod(w.numel() for w in windows)
    radius = x.radius()
    if radius is None or not isinstance(x.value, Tensor) or entries > _LARGEST:
        return None
    patches = F.pad(x.value, (0, 1) * dims, value=-math.inf)
    for place, window in enumerate(windows, start=len(x.shape) - dims):
        # one spatial dimension becomes two: windows, and places within each, which go last
        chosen = patches.index_select(place, window.reshape(-1).to(patches.device))
        patches = chosen.unflatten(place, tuple(window.shape)).movedim(place + 1, -1)
    return _margin(patches.flatten(-dims), radius)


def _margin(patches: Tensor, move: Tensor) -> Tensor:
    """The lead of the largest entry of each patch (last dimension) over the second, minus what it may lose."""
    if patches.shape[-1] == 1:
        return torch.ones(())
    top = patches.topk(2, dim=-1).values
    lead = top[..., 0] - top[..., 1]
    return lead * (1 - 2.0**-50) - math.sqrt(2) * move * (1 + 1e-12)
