"""All primitives: each once, with how it is run and how it is transposed.

The transpose of a primitive maps a costate, the derivative of the value in its result, to those of its inputs; it
is made of primitives too, so a program and its transpose are written in one language. Kinds:

* ``linear``: linear in all real inputs together, with coefficients that are not negative but for the signs of
  ``scale`` and ``weigh``: run on absolute values (and absolute factors) it bounds the absolute values.
* ``product``: linear in each of two inputs.
* ``scalar``: a function of each entry.
* ``fused``: soft-max, log-sum-exp, normalisation, their transposes, and linear systems: a proof each.
* ``selection``: the entries of a tensor that are chosen by the order of their values.

Options are static and hashable, dimensions are counted from 0 and sorted. Index tensors and masks are nodes of the
primitive ``constant``. The factor of ``scale`` is a rounded number where a model divides by one, or takes a mean:
it is then within half a unit in its last place of the true factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.program.scalars import Scalar

if TYPE_CHECKING:
    from surefoot.program.builder import Builder
    from surefoot.program.ir import Node

Costates = tuple[int | None, ...]
_aten: Any = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Primitive:
    """What can compute a tensor of a program.

    Attributes:
        name: its name.
        kind: one of those above, or ``input`` or ``constant``.
        run: from tensors, one per input, and options by name, to a tensor.
        transpose: from a builder, a node and the node of its costate to the costates of the node's inputs, None
            where there is none.
    """

    name: str
    kind: str
    run: Callable[..., Tensor]
    transpose: Callable[[Builder, Node, int], Costates]

    def __repr__(self) -> str:
        return f"Primitive({self.name!r})"


PRIMITIVES: dict[str, Primitive] = {}


def _define(name: str, kind: str, run: Callable[..., Tensor], transpose: Callable[..., Costates]) -> None:
    PRIMITIVES[name] = Primitive(name, kind, run, transpose)


def _unavailable(*_: Any, **__: Any) -> Any:
    raise RuntimeError("inputs and constants are given, not computed")


_define("input", "input", _unavailable, lambda b, n, c: ())
_define("constant", "constant", _unavailable, lambda b, n, c: ())


# Linear: sums and multiples.


def _add(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for term in tensors[1:]:
        total = total + term
    return total


_define("add", "linear", _add, lambda b, n, c: (c,) * len(n.inputs))
_define(
    "scale",
    "linear",
    lambda t, factor: t[0] * factor,
    lambda b, n, c: (b.emit("scale", c, factor=n.options["factor"]),),
)
_define(  # by a constant, which is broadcast
    "weigh", "linear", lambda t: t[0] * t[1], lambda b, n, c: (b.emit("weigh", c, n.inputs[1]), None)
)


def _sum_back(b: Builder, node: Node, c: int) -> Costates:
    shape = b.shape(node.inputs[0])
    kept = tuple(1 if k in node.options["dims"] else size for k, size in enumerate(shape))
    return (b.emit("expand", b.emit("reshape", c, shape=kept), shape=tuple(shape)),)


def _expand_back(b: Builder, node: Node, c: int) -> Costates:
    shape = b.shape(node.inputs[0])
    extra = len(node.shape) - len(shape)
    dims = [k for k, size in enumerate(node.shape) if k < extra or shape[k - extra] != size]
    return (b.emit("reshape", b.emit("sum", c, dims=tuple(dims), keepdim=False), shape=tuple(shape)),)


def _sum(t: Sequence[Tensor], dims: Sequence[int], keepdim: bool) -> Tensor:
    return t[0].sum(list(dims), keepdim=keepdim) if dims else t[0].clone()  # torch: no dimension is all of them


_define("sum", "linear", _sum, _sum_back)
_define("expand", "linear", lambda t, shape: t[0].expand(shape), _expand_back)
_define(
    "cumsum", "linear", lambda t, dim: t[0].cumsum(dim),
    lambda b, n, c: (b.emit("flip", b.emit("cumsum", b.emit("flip", c, dims=(n.options["dim"],)), **n.options),
                            dims=(n.options["dim"],)),),
)  # fmt: skip


# Linear: entries that are moved.


def _permute_back(b: Builder, node: Node, c: int) -> Costates:
    dims = node.options["dims"]
    return (b.emit("permute", c, dims=tuple(dims.index(k) for k in range(len(dims)))),)


def _slice(t: Sequence[Tensor], dim: int, start: int, stop: int, step: int) -> Tensor:
    return t[0][(slice(None),) * dim + (slice(start, stop, step),)]


def _embed(t: Sequence[Tensor], shape: Sequence[int], dim: int, start: int, step: int) -> Tensor:
    """Zeros of this shape with the tensor at start, start + step, … of one dimension."""
    whole = t[0].new_zeros(shape)
    stop = start + step * (t[0].shape[dim] - 1) + 1 if t[0].shape[dim] else start
    whole[(slice(None),) * dim + (slice(start, stop, step),)] = t[0]
    return whole


def _slice_back(b: Builder, node: Node, c: int) -> Costates:
    options = {key: node.options[key] for key in ("dim", "start", "step")}
    return (b.emit("embed", c, shape=tuple(b.shape(node.inputs[0])), **options),)


def _embed_back(b: Builder, node: Node, c: int) -> Costates:
    options, size = node.options, b.shape(node.inputs[0])[node.options["dim"]]
    stop = options["start"] + options["step"] * (size - 1) + 1
    return (b.emit("slice", c, dim=options["dim"], start=options["start"], stop=stop, step=options["step"]),)


def _pad_back(b: Builder, node: Node, c: int) -> Costates:
    for dim, (before, _) in enumerate(node.options["widths"]):
        c = b.emit("slice", c, dim=dim, start=before, stop=before + b.shape(node.inputs[0])[dim], step=1)
    return (c,)


def _cat_back(b: Builder, node: Node, c: int) -> Costates:
    dim, start, parts = node.options["dim"], 0, []
    for k in node.inputs:
        size = b.shape(k)[dim]
        parts.append(b.emit("slice", c, dim=dim, start=start, stop=start + size, step=1))
        start += size
    return tuple(parts)


def _reshape_back(b: Builder, node: Node, c: int) -> Costates:
    return (b.emit("reshape", c, shape=tuple(b.shape(node.inputs[0]))),)


_define("reshape", "linear", lambda t, shape: t[0].reshape(shape), _reshape_back)
_define("permute", "linear", lambda t, dims: t[0].permute(dims), _permute_back)
_define("flip", "linear", lambda t, dims: t[0].flip(dims), lambda b, n, c: (b.emit("flip", c, **n.options),))
_define("slice", "linear", _slice, _slice_back)
_define("embed", "linear", _embed, _embed_back)
_define(  # with zeros; widths: (before, after) for each dimension
    "pad",
    "linear",
    lambda t, widths: functional.pad(t[0], [w for pair in reversed(widths) for w in pair]),
    _pad_back,
)
_define("cat", "linear", lambda t, dim: torch.cat(list(t), dim), _cat_back)


def _scatter(t: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Zeros of this shape to which each entry is added at its place in the flattened tensor."""
    flat = t[0].new_zeros(math.prod(shape))
    return flat.index_add(0, t[1].reshape(-1), t[0].reshape(-1)).reshape(shape)


def _rows_back(t: Sequence[Tensor], dim: int, size: int) -> Tensor:
    """Zeros to which each row along a dimension is added at its index."""
    shape = (*t[0].shape[:dim], size, *t[0].shape[dim + 1 :])
    return t[0].new_zeros(shape).index_add(dim, t[1], t[0])


_define(  # out = a.reshape(-1)[index]
    "gather", "linear", lambda t: t[0].reshape(-1)[t[1]],
    lambda b, n, c: (b.emit("scatter", c, n.inputs[1], shape=tuple(b.shape(n.inputs[0]))), None),
)  # fmt: skip
_define("scatter", "linear", _scatter, lambda b, n, c: (b.emit("gather", c, n.inputs[1]), None))
_define(  # the rows (along a dimension) of these indices, a vector
    "rows", "linear", lambda t, dim: t[0].index_select(dim, t[1]),
    lambda b, n, c: (b.emit("rows_back", c, n.inputs[1], dim=n.options["dim"],
                            size=b.shape(n.inputs[0])[n.options["dim"]]), None),
)  # fmt: skip
_define(
    "rows_back", "linear", _rows_back, lambda b, n, c: (b.emit("rows", c, n.inputs[1], dim=n.options["dim"]), None)
)


def _unfold(t: Sequence[Tensor], kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The windows of images (im2col), as columns."""
    return functional.unfold(t[0], kernel, dilation, padding, stride)


def _fold(t: Sequence[Tensor], size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    return functional.fold(t[0], size, kernel, dilation, padding, stride)


_define(
    "unfold", "linear", _unfold,
    lambda b, n, c: (b.emit("fold", c, size=tuple(b.shape(n.inputs[0])[2:]), **n.options),),
)  # fmt: skip
_define(
    "fold", "linear", _fold,
    lambda b, n, c: (b.emit("unfold", c, **{k: v for k, v in n.options.items() if k != "size"}),),
)  # fmt: skip


# Products.


def _mul_back(b: Builder, node: Node, c: int) -> Costates:
    left, right = node.inputs
    return b.emit("mul", c, right), b.emit("mul", c, left)


def transposed(b: Builder, k: int) -> int:
    """The node of matrices with their last two dimensions exchanged."""
    size = len(b.shape(k))
    return b.emit("permute", k, dims=(*range(size - 2), size - 1, size - 2))


def _matmul_back(b: Builder, node: Node, c: int) -> Costates:
    left, right = node.inputs
    return b.emit("matmul", c, transposed(b, right)), b.emit("matmul", transposed(b, left), c)


def _solve_back(b: Builder, node: Node, c: int) -> Costates:
    """x = A⁻¹b: the costate of b is A⁻ᵀc, that of A is −A⁻ᵀc xᵀ."""
    back = b.emit("solve", transposed(b, node.inputs[0]), c)
    outer = b.emit("matmul", back, transposed(b, node.index))
    return b.emit("scale", outer, factor=-1.0), back


def _conv(
    t: Sequence[Tensor], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    zeros = [0] * len(stride)
    return _aten.convolution(t[0], t[1], None, stride, padding, dilation, False, zeros, groups)


def _conv_part(
    part: int, c: Tensor, x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """A transpose of a convolution: in its images (0) or in its kernels (1), the other being given."""
    zeros, mask = [0] * len(stride), [part == 0, part == 1, False]
    return _aten.convolution_backward(
        c, x, w, None, stride, padding, dilation, False, zeros, groups, mask
    )[part]  # fmt: skip


def _conv_input(t: Sequence[Tensor], shape: Sequence[int], **options: Any) -> Tensor:
    return _conv_part(0, t[0], t[0].new_empty(1).expand(shape), t[1], **options)


def _conv_weight(t: Sequence[Tensor], shape: Sequence[int], **options: Any) -> Tensor:
    return _conv_part(1, t[0], t[1], t[0].new_empty(1).expand(shape), **options)


def _conv_back(b: Builder, node: Node, c: int) -> Costates:
    x, w = node.inputs
    return (
        b.emit("conv_input", c, w, shape=tuple(b.shape(x)), **node.options),
        b.emit("conv_weight", c, x, shape=tuple(b.shape(w)), **node.options),
    )


def _conv_input_back(b: Builder, node: Node, c: int) -> Costates:
    g, w = node.inputs
    options = {k: v for k, v in node.options.items() if k != "shape"}
    weight = b.emit("conv_weight", g, c, shape=tuple(b.shape(w)), **options)
    return b.emit("conv", c, w, **options), weight


def _conv_weight_back(b: Builder, node: Node, c: int) -> Costates:
    g, x = node.inputs
    options = {k: v for k, v in node.options.items() if k != "shape"}
    return b.emit("conv", x, c, **options), b.emit("conv_input", g, c, shape=tuple(b.shape(x)), **options)


_define("mul", "product", lambda t: t[0] * t[1], _mul_back)
_define("matmul", "product", lambda t: t[0] @ t[1], _matmul_back)
_define("conv", "product", _conv, _conv_back)  # of images with kernels, in one to three dimensions
_define("conv_input", "product", _conv_input, _conv_input_back)  # of costates with kernels; shape of the images
_define("conv_weight", "product", _conv_weight, _conv_weight_back)  # of costates with images; shape of the kernels
_define("solve", "fused", lambda t: torch.linalg.solve(t[0], t[1]), _solve_back)


# Scalar functions.


def _scalar_back(b: Builder, node: Node, c: int) -> Costates:
    slope = b.emit("scalar", node.inputs[0], function=node.options["function"].derivative)
    return (b.emit("mul", c, slope),)


def _scalar(t: Sequence[Tensor], function: Scalar) -> Tensor:
    return function(t[0])


_define("scalar", "scalar", _scalar, _scalar_back)


# Fused.


def _masked(t: Sequence[Tensor]) -> Tensor:
    """The first of the tensors; minus infinity where the second, a mask, is 0."""
    return t[0] if len(t) == 1 else t[0].masked_fill(t[1] == 0, -math.inf)


def _softmax(t: Sequence[Tensor], dim: int) -> Tensor:
    """Probabilities in proportion to exp(a) where the mask, if there is one, is 1; and 0 elsewhere."""
    y = _masked(t).softmax(dim)
    return y if len(t) == 1 else y.masked_fill(t[1] == 0, 0.0)  # where all of a fibre is masked too


def _softmax_back(t: Sequence[Tensor], dim: int) -> Tensor:
    g, y = t
    return y * (g - (g * y).sum(dim, keepdim=True))


def _back_of_softmax(b: Builder, node: Node, c: int) -> Costates:
    back = b.emit("softmax_back", c, node.index, dim=node.options["dim"])
    return (back, None)[: len(node.inputs)]


def _back_of_softmax_back(b: Builder, node: Node, c: int) -> Costates:
    """Of y(g − ⟨g, y⟩): symmetric in g; in y it is c(g − ⟨g, y⟩) − g⟨c, y⟩."""
    (g, y), dim = node.inputs, node.options["dim"]

    def inner(a: int) -> int:
        total = b.emit("sum", b.emit("mul", a, y), dims=(dim,), keepdim=True)
        return b.emit("expand", total, shape=tuple(node.shape))

    centred = b.emit("add", g, b.emit("scale", inner(g), factor=-1.0))
    rest = b.emit("scale", b.emit("mul", g, inner(c)), factor=-1.0)
    return b.emit("softmax_back", c, y, dim=dim), b.emit("add", b.emit("mul", c, centred), rest)


def _back_of_logsumexp(b: Builder, node: Node, c: int) -> Costates:
    """The costate times the probabilities."""
    probabilities, dim = b.emit("softmax", *node.inputs, dim=node.options["dim"]), node.options["dim"]
    shape = b.shape(node.inputs[0])
    kept = (*shape[:dim], 1, *shape[dim + 1 :])
    wide = b.emit("expand", b.emit("reshape", c, shape=kept), shape=tuple(shape))
    return (b.emit("mul", wide, probabilities), None)[: len(node.inputs)]


_define("softmax", "fused", _softmax, _back_of_softmax)
_define("softmax_back", "fused", _softmax_back, _back_of_softmax_back)
_define("logsumexp", "fused", lambda t, dim, keepdim: _masked(t).logsumexp(dim, keepdim), _back_of_logsumexp)


def _rstd(t: Sequence[Tensor], dims: Sequence[int], eps: float) -> Tensor:
    """1/√(variance + ε) along the dimensions, which stay with size 1."""
    return (t[0].var(list(dims), correction=0, keepdim=True) + eps).rsqrt()


def _normalize(t: Sequence[Tensor], dims: Sequence[int], eps: float) -> Tensor:
    """(a − mean)/√(variance + ε) along the dimensions."""
    return (t[0] - t[0].mean(list(dims), keepdim=True)) * _rstd(t, dims, eps)


def _normalize_back(t: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """r(g − mean(g) − z mean(gz)), with z the normalised tensor and r = 1/σ."""
    g, z, r = t
    return r * (g - g.mean(list(dims), keepdim=True) - z * (g * z).mean(list(dims), keepdim=True))


def _group(b: Builder, node: Node) -> tuple[Callable[[int], int], Callable[[int], int]]:
    """The mean over the groups of a normalisation, and a tensor of one number per group spread over them."""
    dims, shape = node.options["dims"], tuple(b.shape(node.inputs[0]))
    count = math.prod(shape[k] for k in dims)

    def mean(a: int) -> int:
        return b.emit("scale", b.emit("sum", a, dims=dims, keepdim=True), factor=1 / count)

    return mean, lambda a: b.emit("expand", a, shape=shape)


def _back_of_normalize(b: Builder, node: Node, c: int) -> Costates:
    r = b.emit("rstd", node.inputs[0], **node.options)
    return (b.emit("normalize_back", c, node.index, r, dims=node.options["dims"]),)


def _back_of_rstd(b: Builder, node: Node, c: int) -> Costates:
    """∂r/∂a = −r² z/n."""
    _, spread = _group(b, node)
    z = b.emit("normalize", node.inputs[0], **node.options)
    shape = b.shape(node.inputs[0])
    count = math.prod(shape[k] for k in node.options["dims"])
    square = b.emit("mul", node.index, node.index)
    factor = b.emit("scale", b.emit("mul", c, square), factor=-1 / count)
    return (b.emit("mul", spread(factor), z),)


def _back_of_normalize_back(b: Builder, node: Node, c: int) -> Costates:
    """Symmetric in g; in z: −r(c mean(gz) + g mean(cz)); in r: Σ c(g − mean(g) − z mean(gz))."""
    g, z, r = node.inputs
    dims = node.options["dims"]
    mean, spread = _group(b, node)
    gz, cz = (spread(mean(b.emit("mul", a, z))) for a in (g, c))
    rest = b.emit("add", b.emit("mul", c, gz), b.emit("mul", g, cz))
    in_z = b.emit("scale", b.emit("mul", spread(r), rest), factor=-1.0)
    centred = [spread(mean(g)), b.emit("mul", z, gz)]
    without_r = b.emit("add", g, *(b.emit("scale", a, factor=-1.0) for a in centred))
    in_r = b.emit("sum", b.emit("mul", c, without_r), dims=dims, keepdim=True)
    return b.emit("normalize_back", c, z, r, dims=dims), in_z, in_r


_define("normalize", "fused", _normalize, _back_of_normalize)
_define("rstd", "fused", _rstd, _back_of_rstd)
_define("normalize_back", "fused", _normalize_back, _back_of_normalize_back)


# Selection.


def _amax(t: Sequence[Tensor], dims: Sequence[int], keepdim: bool) -> Tensor:
    return t[0].amax(list(dims), keepdim=keepdim) if dims else t[0]


def attaining(a: Tensor, dims: Sequence[int]) -> Tensor:
    """1 at the first entry along the dimensions that is the largest, 0 elsewhere."""
    rest = [k for k in range(a.dim()) if k not in dims]
    order = (*rest, *dims)
    flat = a.permute(order).reshape([a.shape[k] for k in rest] + [-1])
    mask = torch.zeros_like(flat).scatter(-1, flat.argmax(-1, keepdim=True), 1.0)
    back = [order.index(k) for k in range(a.dim())]
    return mask.reshape([a.shape[k] for k in order]).permute(back)


def _select_like(t: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """The first tensor, of one entry (size 1) along the dimensions, at the largest entry of the second."""
    return t[0] * attaining(t[1], dims) if dims else t[0]


def _pick_like(t: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """The entry of the first tensor where the second is largest along the dimensions, which stay with size 1."""
    return (t[0] * attaining(t[1], dims)).sum(list(dims), keepdim=True) if dims else t[0]


def _back_of_amax(b: Builder, node: Node, c: int) -> Costates:
    dims = node.options["dims"]
    kept = tuple(1 if k in dims else size for k, size in enumerate(b.shape(node.inputs[0])))
    return (b.emit("select_like", b.emit("reshape", c, shape=kept), node.inputs[0], dims=dims),)


def _back_of_maximum(b: Builder, node: Node, c: int) -> Costates:
    """The costate goes to the larger one: to the second where both are equal."""
    left, right = node.inputs
    difference = b.emit("add", left, b.emit("scale", right, factor=-1.0))
    to_left = b.emit("mul", c, b.emit("scalar", difference, function=Scalar("relu", (), 1)))
    return to_left, b.emit("add", c, b.emit("scale", to_left, factor=-1.0))


def _sort(t: Sequence[Tensor], dim: int, descending: bool) -> Tensor:
    return t[0].sort(dim=dim, descending=descending, stable=True).values


def _places(t: Sequence[Tensor], dim: int, descending: bool) -> Tensor:
    return t[1].sort(dim=dim, descending=descending, stable=True).indices


def _unsort_like(t: Sequence[Tensor], dim: int, descending: bool) -> Tensor:
    """The first tensor in the order that the second had before it was sorted."""
    return torch.zeros_like(t[0]).scatter(dim, _places(t, dim, descending), t[0])


def _sort_like(t: Sequence[Tensor], dim: int, descending: bool) -> Tensor:
    """The first tensor in the order that sorts the second."""
    return t[0].gather(dim, _places(t, dim, descending))


_define("amax", "selection", _amax, _back_of_amax)
_define(
    "select_like", "selection", _select_like,
    lambda b, n, c: (b.emit("pick_like", c, n.inputs[1], **n.options), None),
)  # fmt: skip
_define(
    "pick_like", "selection", _pick_like,
    lambda b, n, c: (b.emit("select_like", c, n.inputs[1], **n.options), None),
)  # fmt: skip
_define("maximum", "selection", lambda t: torch.maximum(t[0], t[1]), _back_of_maximum)
_define("sort", "selection", _sort, lambda b, n, c: (b.emit("unsort_like", c, n.inputs[0], **n.options),))
_define(
    "unsort_like", "selection", _unsort_like,
    lambda b, n, c: (b.emit("sort_like", c, n.inputs[1], **n.options), None),
)  # fmt: skip
_define(
    "sort_like", "selection", _sort_like,
    lambda b, n, c: (b.emit("unsort_like", c, n.inputs[1], **n.options), None),
)  # fmt: skip
