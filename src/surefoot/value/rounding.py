r"""How far one primitive, as computed, is from its exact value at the same arguments: its *local error*.
 **Assumed of floating point** (the one assumption; the tests compare the kernels with ball arithmetic): sums,
products, quotients and square roots are rounded to nearest with unit :math:`u` (:math:`2^{-53}` in double,
:math:`2^{-24}` in single precision); an inner product of k numbers is a sum of k products in some order, so that
it is off by at most :math:`\gamma_k|a|^\top|b|`, :math:`\gamma_k = ku/(1 - ku)` (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1; the BLAS does, and torch convolves by copying patches and multiplying matrices,
where methods of Winograd and Fourier are switched off); and the elementary functions of torch are within 8 units
in the last place, that is 16u.

* What moves or selects numbers rounds nothing; *sums* of n numbers are taken in stages, so that none goes through
  more than :func:`additions` roundings (section 4.2 there).
* A *product* of matrices: :math:`(|a||b|)_{ij} \le \|a_i\|\|b^j\|` (Cauchy-Schwarz), from the norms of rows and
  columns; a convolution likewise from those of patches and kernels.
* A *scalar function* has the relative error of its kernel, or that of :mod:`surefoot.bounds.scalars`: its exact
  value is in the range over the interval [x, x].
* *Soft-max* divides :math:`e^{-t_i}`, :math:`t_i = \max x - x_i`, by their sum :math:`S \ge 1`. Rounding
  :math:`t_i` changes :math:`e^{-t_i}` by a relative :math:`ut_i`, and as :math:`te^{-t} < 0.37` the sum by
  :math:`0.37nu`. Exponential, sum and quotient add 16u, (n + 16)u and u: together :math:`p_i(t_i + 1.4n + 40)u`.
  *Log-sum-exp* is :math:`\max x + \log S`: off by :math:`(|z| + 16\log n + 1.4n + 18)u`.
* *Normalisation*: with k additions, the mean is off by :math:`\mu = \gamma_{k+2}\,\mathrm{mean}|a|`, and
  :math:`d = a - m` by :math:`\mu + u|d|`. At d the quotient :math:`d/\rho(d)` with a computed
  :math:`\hat\rho` is off by a relative :math:`(k/2 + 8)u`, and its derivative is
  :math:`\delta \mapsto r(\delta - z\,\mathrm{mean}(z\delta))`, :math:`r = 1/\rho`. So an entry is off by
  :math:`(1 + 10^{-3})(r\mu(1 + |z_i|) + (k/2 + 12)u|z_i|)`, and r by a relative
  :math:`(1 + 10^{-3})(r\mu + (k/2 + 10)u)`, wherever :math:`r\mu < 10^{-4}`; nothing is known elsewhere.
 Underflow takes at most the smallest normal number from an intermediate result; :data:`FLOOR` per entry covers it
as long as what multiplies it afterwards is below its inverse square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from surefoot.bounds.scalars import enclose
from surefoot.errors import UnsupportedOperation
from surefoot.program import Node
from surefoot.torch_private import norms_together, products_together

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
FLOOR = {torch.float64: 2.0**-1000, torch.float32: 2.0**-110}

EXACT = frozenset(
    [
        "input",
        "constant",
        "reshape",
        "permute",
        "flip",
        "slice",
        "embed",
        "pad",
        "expand",
        "gather",
        "rows",
        "cat",
        "unfold",
        "amax",
        "maximum",
        "sort",
        "select_like",
        "pick_like",
        "sort_like",
        "unsort_like",
    ]
)
"""Primitives that round nothing."""

PIECES = frozenset(["relu", "abs", "relu6"])  # which only select
_KERNELS = {  # relative errors in units; what is not here is compared with its range
    "exp": 16, "log": 16, "log1p": 16, "expm1": 16, "tanh": 16, "sigmoid": 24, "softplus": 40, "logsigmoid": 40,
    "silu": 28, "erf": 16, "sin": 16, "cos": 16, "sinh": 16, "cosh": 16, "atan": 16, "arcsinh": 16, "sqrt": 4,
    "rsqrt": 4, "reciprocal": 2, "square": 1, "softsign": 4, "leaky_relu": 2, "hardtanh": 1, "mish": 80,
}  # fmt: skip
_CANCEL = {"gelu": 12.0, "gelu_tanh": 20.0}  # 1 + erf: relative to |x|


def rounds(node: Node, constants: Mapping[int, Tensor]) -> bool:
    """Whether a primitive has a local error at all."""
    match node.primitive.name:
        case "scale":
            return math.frexp(abs(node.options["factor"]))[0] != 0.5
        case "weigh":
            return node.inputs[1] not in constants or not is_mask(constants[node.inputs[1]])
        case "scalar":
            function = node.options["function"]
            return function.name not in PIECES
        case "scatter" | "rows_back":
            return multiplicity(constants[node.inputs[1]]) > 1
    return node.primitive.name not in EXACT


def gamma(k: float, unit: float) -> float:
    """The relative error that k roundings add up to; infinite where they are too many to bound."""
    return k * unit / (1 - k * unit) if k * unit < 0.5 else math.inf


def additions(count: int) -> int:
    """How many roundings a number goes through in a sum of so many."""
    root = math.isqrt(count)
    return max(count - 1, 0) if count <= 32 else root + -(-count // root)


def staged_sum(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """The sum along dimensions, first of pieces of √n numbers each, then of their sums."""
    count = math.prod(x.shape[d] for d in dims)
    if count <= 32 or x.numel() == 0:
        return x.sum(list(dims), keepdim=keepdim) if dims else x
    rest = [k for k in range(x.dim()) if k not in dims]
    kept = [1 if k in dims else x.shape[k] for k in range(x.dim())] if keepdim else [x.shape[k] for k in rest]
    if len(dims) == 1 and dims[0] != x.dim() - 1:  # along columns, which is as quick without copying them
        flat, axis = x, dims[0]
    else:
        flat, axis = x.permute(*rest, *dims).reshape([x.shape[k] for k in rest] + [count]), len(rest)
    root = math.isqrt(count)
    whole = count // root * root
    pieces = flat.narrow(axis, 0, whole).unflatten(axis, (whole // root, root)).sum(axis + 1)
    total = pieces.sum(axis)
    if whole < count:
        total = total + flat.narrow(axis, whole, count - whole).sum(axis)
    return total.reshape(kept)


def row_norms(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Norms along dimensions, which stay with size 1; in double precision."""
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float64)


def local_error(node: Node, t: Callable[[int], Tensor], unit: float, staged: bool = True) -> Tensor | None:
    """A bound of the local error of each entry, in double precision.

    Args:
        node: the primitive.
        t: the tensors as computed, by node.
        unit: the unit of rounding they were computed with.
        staged: whether a sum was taken in stages.

    Returns:
        A tensor that broadcasts to the shape of the node; None where nothing rounds.

    Raises:
        UnsupportedOperation: naming a primitive whose error is not known.
    """
    name, options, inputs = node.primitive.name, node.options, node.inputs
    if name in EXACT:
        return None
    size: Callable[[int], Tensor] = lambda k: t(k).double().abs()  # noqa: E731
    match name:
        case "add":
            if len(inputs) == 2:
                return size(node.index) * unit
            return sum(map(size, inputs)) * gamma(len(inputs) - 1, unit)  # type: ignore[return-value]
        case "scale":
            return None if not rounds(node, {}) else size(node.index) * gamma(3, unit)
        case "weigh":
            return None if is_mask(t(inputs[1])) else size(node.index) * gamma(3, unit)
        case "mul":
            return size(node.index) * unit
        case "sum":
            count = math.prod(t(inputs[0]).shape[d] for d in options["dims"])
            steps = additions(count) if staged else count
            return size(inputs[0]).sum(options["dims"], keepdim=options["keepdim"]) * gamma(steps, unit)
        case "cumsum":
            x = size(inputs[0])
            return x.cumsum(options["dim"]) * gamma(x.shape[options["dim"]], unit)
        case "scatter" | "rows_back":
            many = multiplicity(t(inputs[1]))
            total = node.primitive.run([size(inputs[0]), t(inputs[1])], **options)
            return total * gamma(many - 1, unit) if many > 1 else None
        case "fold":
            return node.primitive.run([size(inputs[0])], **options) * gamma(math.prod(options["kernel"]), unit)
        case "matmul":
            a, b = (t(k) for k in inputs)
            return row_norms(a, -1) * row_norms(b, -2) * gamma(a.shape[-1] + 1, unit)
        case "conv":
            return _convolution_error(node, t(inputs[0]), t(inputs[1]), unit)
        case "conv_input" | "conv_weight":
            terms = product_terms(node, t(inputs[0]).shape, t(inputs[1]).shape)
            return node.primitive.run([size(k) for k in inputs], **options) * gamma(terms + 1, unit)
        case "scalar":
            return _scalar_error(node, t(inputs[0]), t(node.index), unit)
        case "softmax":
            x, p, dim = t(inputs[0]).double(), size(node.index), options["dim"]
            if len(inputs) > 1:
                x = x.masked_fill(t(inputs[1]) == 0, -math.inf)
            far = (x.amax(dim, keepdim=True) - x).nan_to_num(750.0).clamp(max=750.0)
            return p * (far + (1.4 * x.shape[dim] + 40)) * (unit * 1.01)
        case "logsumexp":
            n = t(inputs[0]).shape[options["dim"]]
            return (size(node.index) + (16 * math.log(n) + 1.4 * n + 18)) * (unit * 1.01)
        case "softmax_back":
            g, y, dim = size(inputs[0]), size(inputs[1]), options["dim"]
            return y * (g + (g * y).sum(dim, keepdim=True)) * gamma(g.shape[dim] + 4, unit)
        case "solve":
            (a, b), x = (t(k).double() for k in inputs), t(node.index).double()
            spread = gamma(a.shape[-1] + 3, unit) * (a.abs() @ x.abs() + b.abs())
            return solution_error(a, (a @ x - b).abs() + spread, None)
        case "normalize" | "rstd":
            return _normalisation_error(node, t, unit)
        case "normalize_back":
            g, z, r = map(size, inputs)
            dims = options["dims"]
            n = math.prod(g.shape[d] for d in dims)
            mean = lambda x: x.mean(dims, keepdim=True)  # noqa: E731
            return r * (g + mean(g) + z * mean(g * z)) * gamma(n + 8, unit)
    raise UnsupportedOperation(
        f"how far '{name}' in {node.path or 'the objective'} is off by rounding is not known: the "
        "value has no error; write it without that operation"
    )


def leading(node: Node) -> tuple[float, tuple[int, ...]] | None:
    r"""Units c and nodes such that the local error is at most :math:`\gamma_c` times the entries of the one node,
    or the products of the norms of rows and columns of the two; None for others.
    """
    name, inputs, z = node.primitive.name, node.inputs, node.index
    if name == "mul" or (name == "add" and len(inputs) == 2):
        return 1.0, (z,)
    if name in ("weigh", "scale"):
        return 3.0, (z,)
    if name == "matmul":
        return -1.0, inputs
    if name == "scalar" and node.options["function"].order == 0:
        function = node.options["function"]
        if function.name in _CANCEL:
            return _CANCEL[function.name], inputs
        if function.name in _KERNELS and (function.name != "softplus" or function.parameters in ((), (1.0,))):
            return _KERNELS[function.name], (z,)
    return None


def charges(nodes: Sequence[Node], t: Callable[[int], Tensor], costates: Sequence[Tensor], unit: float) -> float:
    r"""The sum :math:`\sum_k\sum_i|\lambda_{ki}||\delta_{ki}|` over the entries of these nodes, in few passes."""
    factors, left, right, rest = [], [], [], []
    for node, costate in zip(nodes, costates, strict=True):
        known = leading(node)
        if known is None:
            error = local_error(node, t, unit)
            if error is not None:
                rest.append((error * costate.double().abs()).sum())
        elif len(known[1]) == 1:
            factors.append(gamma(known[0], unit))
            left.append(t(known[1][0]))
            right.append(costate)
        else:
            a, b = (t(k) for k in node.inputs)
            columns = torch.linalg.vector_norm(b, dim=-2, keepdim=True).to(costate.dtype).mT
            rows = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
            sizes = (costate.abs() @ columns) * rows
            rest.append(sizes.sum(dtype=torch.float64) * gamma(a.shape[-1] + 1, unit))
    sums = norms_together(products_together(left, right), 1, torch.float64)
    found = torch.stack([*sums, *rest]).tolist() if sums or rest else []
    return sum(f * x for f, x in zip([*factors, *[1.0] * len(rest)], found, strict=True))


def solution_error(a: Tensor, residual: Tensor, moved: Tensor | None) -> Tensor:
    r"""How far a solution of :math:`ax = b` is off whose residual is that, where a is off by as much as ``moved``.

    With an approximate inverse R and :math:`E = I - Ra`, :math:`\|E\|_\infty < 1`, and as
    :math:`a^{-1} = (I - E)^{-1}R`, an entry of :math:`a^{-1}\rho` is at most that of :math:`|R|\rho` and
    :math:`\|E\|_\infty/(1 - \|E\|_\infty)` times the largest one.
    """
    n = a.shape[-1]
    inverse = torch.linalg.inv_ex(a).inverse
    error = (torch.eye(n, dtype=a.dtype, device=a.device) - inverse @ a).abs()
    error = error + gamma(n + 2, 2.0**-53) * (inverse.abs() @ a.abs() + 1)
    if moved is not None:
        error = error + inverse.abs() @ moved
    size = error.sum(-1).amax(-1)[..., None, None]
    found = inverse.abs() @ residual * (1 + 1e-9)
    known = torch.where(size < 0.5, size / (1 - size), math.inf)
    return (found + known * found.amax(-2, keepdim=True)).nan_to_num(math.inf, math.inf, math.inf)


def is_mask(w: Tensor) -> bool:
    """Whether all factors are 0, 1 or -1."""
    return not w.is_floating_point() or bool(((w == 0) | (w.abs() == 1)).all())


def multiplicity(index: Tensor) -> int:
    """How often the most frequent index occurs."""
    return int(torch.bincount(index.reshape(-1)).max()) if index.numel() else 0


def product_terms(node: Node, left: Sequence[int], right: Sequence[int]) -> int:
    """How many products are added up for an entry of a product."""
    match node.primitive.name:
        case "matmul":
            return left[-1]
        case "conv":  # images with kernels (out, in / groups, *size)
            return math.prod(right[1:])
        case "conv_input":  # costates with kernels: at most all outputs at all places of the kernel
            return right[0] // node.options["groups"] * math.prod(right[2:])
        case "conv_weight":  # costates with images: all images at all places
            return left[0] * math.prod(left[2:])
    return 1


def _convolution_error(node: Node, x: Tensor, w: Tensor, unit: float) -> Tensor:
    """By the norms of patches and kernels."""
    groups, options = node.options["groups"], node.options
    squares = x.double().square().reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(2)
    ones = torch.ones(groups, 1, *w.shape[2:], dtype=torch.float64, device=x.device)
    patches = node.primitive.run([squares, ones], **options).clamp_(min=0).sqrt_()
    patches = patches.repeat_interleave(w.shape[0] // groups, 1) if groups > 1 else patches
    kernels = row_norms(w.flatten(1), 1).reshape(1, -1, *[1] * (x.dim() - 2))
    return patches * kernels * (gamma(math.prod(w.shape[1:]) + 1, unit) * (1 + 1e-6))


def _scalar_error(node: Node, x: Tensor, z: Tensor, unit: float) -> Tensor | None:
    function = node.options["function"]
    if function.name in PIECES:
        return None
    if function.order == 0:
        if function.name in _KERNELS:
            error = z.double().abs() * gamma(_KERNELS[function.name], unit)
            if function.name == "softplus" and function.parameters not in ((), (1.0,)):
                error = error + x.double().abs() * gamma(2, unit)  # βx is rounded
            return error
        if function.name in _CANCEL:
            return x.double().abs() * gamma(_CANCEL[function.name], unit)
    point = x.double()
    low, high = enclose(function, 0, point, point)
    known = low.isfinite() & high.isfinite()
    return torch.where(known, torch.maximum(high - z, z - low), math.inf)


def _normalisation_error(node: Node, t: Callable[[int], Tensor], unit: float) -> Tensor:
    a, dims, eps = t(node.inputs[0]).double(), node.options["dims"], node.options["eps"]
    k = additions(math.prod(a.shape[d] for d in dims))
    centred = a - a.mean(dims, keepdim=True)
    r = (centred.square().mean(dims, keepdim=True) + eps).rsqrt() * (1 + 1e-6)
    shift = a.abs().mean(dims, keepdim=True) * gamma(k + 3, unit) * r
    known = torch.where(shift < 1e-4, 1 + 1e-3, math.inf)
    if node.primitive.name == "rstd":
        return (r * (shift + gamma(k / 2 + 10, unit))) * known
    z = centred.abs() * r
    return (shift * (1 + z) + z * gamma(k / 2 + 12, unit)) * known
