r"""The algebraic form of each operation: linear, a product, element-wise, or neither.

The form says how the degree of a result in the state :math:`x` and the parameters :math:`u` follows from the
degrees of the arguments. That is all a chain needs to find the biaffine part :math:`b_t` of a computation:
what is at most of degree one in each of the two, as in the paper's
:math:`b(x, u) = \beta(x, u) + \beta^u(u) + \beta^x(x) + \beta^0`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from surefoot.graph.structure import Node, Ref


class Form(Enum):
    """How an operation depends on its tensor arguments."""

    LAYOUT = "moves numbers"  # reshape, permute, slice, …: linear, without arithmetic
    LINEAR = "affine in all its arguments together"
    PRODUCT = "a product of its factors, plus affine terms"
    QUOTIENT = "linear in the numerator, not affine in the denominator"
    ELEMENTWISE = "one scalar function on every entry"
    OTHER = "none of these"


@dataclass(frozen=True)
class Degree:
    """Degree of a tensor as a polynomial of the state and of the parameters; ``None`` if it is none."""

    state: int | None = 0
    parameters: int | None = 0

    @property
    def is_biaffine(self) -> bool:
        """At most of degree one in the state and at most of degree one in the parameters."""
        return self.state in (0, 1) and self.parameters in (0, 1)

    @property
    def is_constant(self) -> bool:
        """Depends on neither."""
        return self.state == 0 and self.parameters == 0

    def __add__(self, other: Degree) -> Degree:
        return Degree(_total(self.state, other.state), _total(self.parameters, other.parameters))

    def __or__(self, other: Degree) -> Degree:
        return Degree(_largest(self.state, other.state), _largest(self.parameters, other.parameters))


NOT_POLYNOMIAL = Degree(None, None)


def _total(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _largest(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def form_of(node: Node) -> Form:
    """The form of an operation; :attr:`Form.OTHER` for one that is not known."""
    arguments = node.arguments
    if node.op in _STATISTICS:
        return Form.LINEAR if arguments["running_mean"] is not None else Form.OTHER
    if node.op == "aten.embedding_bag":
        weighted, largest = arguments["per_sample_weights"] is not None, arguments["mode"] == 2
        return Form.OTHER if weighted or largest else Form.LINEAR
    if arguments.get("rounding_mode") is not None or arguments.get("reduce") is not None:
        return Form.OTHER
    return _FORMS.get(node.op, Form.OTHER)


def degree_of(node: Node, degrees: dict[str, Degree]) -> Degree:
    """The degree of a result from the degrees of its arguments (missing ones are constants)."""
    known = {name: degrees.get(name, Degree()) for name in node.inputs}
    if all(degree.is_constant for degree in known.values()):
        return Degree()
    if node.op in _CASTS and not all(spec.is_real for spec in node.specs):
        return NOT_POLYNOMIAL  # rounding to integers
    match form_of(node):
        case Form.LAYOUT | Form.LINEAR:
            selectors = _selectors(node)
            if any(None in (known[n].state, known[n].parameters) for n in selectors):
                return NOT_POLYNOMIAL  # decided by real numbers; ids and masks of the data are not
            fixed = [_argument_degree(node.arguments[key], known) for key in _STATISTICS.get(node.op, ())]
            if not all(degree.is_constant for degree in fixed):
                return NOT_POLYNOMIAL
            ignored = _SHAPE_ONLY.get(node.op)
            values = [value for key, value in node.arguments.items() if key != ignored and key not in _SELECTORS]
            return _argument_degree(values, known)
        case Form.PRODUCT:
            factors = _FACTORS.get(node.op, ("self", "other"))
            product = Degree()
            for key in factors:
                argument = node.arguments.get(key)
                for factor in argument if isinstance(argument, list | tuple) else [argument]:
                    product = product + _argument_degree(factor, known)
            others = [
                _argument_degree(value, known) for key, value in node.arguments.items() if key not in factors
            ]
            return _union([product, *others])
        case Form.QUOTIENT:
            if _argument_degree(node.arguments["other"], known).is_constant:
                return _argument_degree(node.arguments["self"], known)
            return NOT_POLYNOMIAL
        case _:
            return NOT_POLYNOMIAL


def _union(degrees: list[Degree]) -> Degree:
    total = Degree()
    for degree in degrees:
        total = total | degree
    return total


def _argument_degree(argument: Any, known: dict[str, Degree]) -> Degree:
    if isinstance(argument, Ref):
        return known[argument.name]
    if isinstance(argument, list | tuple):
        return _union([_argument_degree(item, known) for item in argument])
    return Degree()


def _selectors(node: Node) -> set[str]:
    """Arguments that choose entries (ids, conditions, masks) rather than contribute numbers."""
    found: set[str] = set()
    for key in _SELECTORS:
        argument = node.arguments.get(key)
        items = argument if isinstance(argument, list | tuple) else [argument]
        found.update(item.name for item in items if isinstance(item, Ref))
    return found


def _table(form: Form, names: str) -> dict[str, Form]:
    return {f"aten.{name}": form for name in names.split()}


_SELECTORS = ("indices", "index", "condition", "mask", "offsets", "repeats")
_STATISTICS = dict.fromkeys(("aten.batch_norm", "aten.instance_norm"), ("running_mean", "running_var"))
_CASTS = {"aten.to", "aten._to_copy", "aten.type_as"}
_SHAPE_ONLY = {
    "aten.expand_as": "other",
    "aten.view_as": "other",
    "aten.reshape_as": "other",
    "aten.type_as": "other",
    "aten.copy": "self",
}
_FACTORS = {
    "aten.linear": ("input", "weight"),
    "aten.conv1d": ("input", "weight"),
    "aten.conv2d": ("input", "weight"),
    "aten.conv3d": ("input", "weight"),
    "aten.conv_transpose1d": ("input", "weight"),
    "aten.conv_transpose2d": ("input", "weight"),
    "aten.conv_transpose3d": ("input", "weight"),
    "aten.convolution": ("input", "weight"),
    "aten.bilinear": ("input1", "input2", "weight"),
    "aten.einsum": ("tensors",),
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.baddbmm": ("batch1", "batch2"),
    "aten.mv": ("self", "vec"),
    "aten.dot": ("self", "tensor"),
    "aten.vdot": ("self", "other"),
    "aten.inner": ("self", "other"),
    "aten.addcmul": ("tensor1", "tensor2"),
    "aten.outer": ("self", "vec2"),
    "surefoot.scale_shift": ("x", "weight"),
}
_FORMS: dict[str, Form] = {
    **_table(
        Form.LAYOUT,
        "view reshape _unsafe_view flatten unflatten permute transpose t numpy_T movedim squeeze unsqueeze "
        "expand expand_as broadcast_to contiguous clone alias view_as reshape_as type_as to _to_copy copy dropout "
        "feature_dropout alpha_dropout narrow slice select split split_with_sizes chunk unbind tensor_split "
        "cat stack concat hstack vstack pad constant_pad_nd index index_select gather flip roll repeat "
        "repeat_interleave tile unfold im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle diagonal "
        "tril triu swapaxes mT mH adjoint embedding where masked_fill lift_fresh_copy reflection_pad1d "
        "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d select_scatter "
        "slice_scatter diagonal_scatter index_put index_copy scatter real imag view_as_real",
    ),
    "getitem": Form.LAYOUT,
    **_table(
        Form.LINEAR,
        "add sub rsub neg sum mean cumsum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 "
        "fft_ifft2 index_add scatter_add",
    ),
    **_table(Form.PRODUCT, "mul multiply matmul"),
    **dict.fromkeys(_FACTORS, Form.PRODUCT),
    **_table(Form.QUOTIENT, "div divide true_divide"),
    **_table(
        Form.ELEMENTWISE,
        "relu relu6 leaky_relu elu celu selu gelu silu mish softplus sigmoid log_sigmoid tanh softsign hardtanh "
        "hardswish hardsigmoid softshrink hardshrink threshold prelu sin cos tan atan sinh cosh asinh exp expm1 "
        "log log1p log2 sqrt rsqrt reciprocal square pow abs sign erf clamp clamp_min clamp_max tanhshrink",
    ),
}
