"""Element-wise operations: each is its scalar function, and everything else follows from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.operations.common import aligned
from surefoot.operations.record import Form, InSingle, Scalar, declare
from surefoot.scalar import ScalarFunction
from surefoot.torch_private import hard_sigmoid

_USUAL, _FAR = 20.0, 700.0  # thresholds of soft-plus


def elementwise(*names: str, scalar: Callable[..., ScalarFunction | None], keys: tuple[str, ...] = ()) -> None:
    """Register operations that are one scalar function on every entry.

    Args:
        names: the operations.
        scalar: their scalar function, from that of the argument; options are passed by keyword.
        keys: the arguments that are options, as the operation's signature names them.

    >>> sf.operations.elementwise("doctest.same", scalar=lambda x: x)
    >>> sf.operations.records()["doctest.same"].form.name
    'ELEMENTWISE'
    """

    def build(o: dict[str, Any]) -> ScalarFunction | None:
        options = {key: o[key] for key in keys if o.get(key) is not None}
        if any(isinstance(value, ScalarFunction) for value in options.values()):
            return None
        x = next(value for value in o.values() if isinstance(value, ScalarFunction))
        return scalar(x, **options)

    _declare(*names, scalar=build)


def _declare(*names: str, scalar: Scalar | None = None) -> None:
    declare(*names, form=Form.ELEMENTWISE, rows=aligned, scalar=scalar)


def _named(name: str) -> Callable[..., ScalarFunction]:
    """A function of :mod:`surefoot.scalar` by its name there."""
    return lambda x, **options: ScalarFunction.named(name, **options).compose(x)


def _power(o: dict[str, Any]) -> ScalarFunction | None:
    base, exponent = o["self"], o["exponent"]
    if isinstance(base, ScalarFunction) and isinstance(exponent, int | float):
        return base ** float(exponent)
    if isinstance(exponent, ScalarFunction) and isinstance(base, int | float) and base > 0:
        return _EXP.compose(exponent * _LOG.compose(ScalarFunction.constant(base)))
    return None


def _arcsine(x: ScalarFunction) -> ScalarFunction:
    return ScalarFunction.named("atan").compose(x / (1.0 - x**2.0) ** 0.5)


def _area_tangent(x: ScalarFunction) -> ScalarFunction:
    log = ScalarFunction.named("log1p")
    return 0.5 * (log.compose(x) - log.compose(-x))


def _logit(x: ScalarFunction, eps: float | None = None) -> ScalarFunction:
    z = x if eps is None else ScalarFunction.named("clamp", min=eps, max=1 - eps).compose(x)
    return _LOG.compose(z) - _LOG.compose(1.0 - z)


def _extreme(name: str) -> Scalar:
    return lambda o: ScalarFunction.apply(name, o["self"], o["other"])


_EXP, _LOG = _named("exp")(ScalarFunction.variable()), _named("log")(ScalarFunction.variable())
_LOG_2, _LOG_10 = (_LOG.compose(ScalarFunction.constant(base)) for base in (2.0, 10.0))
_RIGHT_ANGLE = 2.0 * ScalarFunction.named("atan").compose(ScalarFunction.constant(1.0))
for _name in [
    "relu", "relu6", "selu", "silu", "mish", "sigmoid", "log_sigmoid", "tanh", "hardswish", "hardsigmoid", "sin",
    "cos", "tan", "atan", "sinh", "cosh", "asinh", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal",
    "square", "abs", "sign", "erf", "erfc",
]:  # fmt: skip
    elementwise(f"aten.{_name}", scalar=_named(_name))
for _name, _keys in {
    "leaky_relu": ("negative_slope",), "elu": ("alpha", "scale", "input_scale"), "celu": ("alpha",),
    "gelu": ("approximate",), "softplus": ("beta", "threshold"), "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold", "value"), "softshrink": ("lambd",), "hardshrink": ("lambd",),
    "clamp": ("min", "max"),
}.items():  # fmt: skip
    elementwise(f"aten.{_name}", scalar=_named(_name), keys=_keys)
elementwise("aten.clamp_min", "aten.clamp_max", scalar=_named("clamp"), keys=("min", "max"))
elementwise("aten.rrelu", scalar=_named("rrelu"), keys=("lower", "upper"))  # while training it is refused before
elementwise("aten.exp2", scalar=lambda x: _EXP.compose(x * _LOG_2))
elementwise("aten.log2", scalar=lambda x: _LOG.compose(x) / _LOG_2)
elementwise("aten.log10", scalar=lambda x: _LOG.compose(x) / _LOG_10)
elementwise("aten.asin", scalar=_arcsine)
elementwise("aten.acos", scalar=lambda x: _RIGHT_ANGLE - _arcsine(x))
elementwise("aten.atanh", scalar=_area_tangent)
elementwise("aten.acosh", scalar=lambda x: _LOG.compose(x + (x**2.0 - 1.0) ** 0.5))
elementwise("aten.logit", scalar=_logit, keys=("eps",))
elementwise("aten.special_entr", scalar=lambda x: -(x * _LOG.compose(x)))
_declare("aten.pow", scalar=_power)
_declare("aten.softsign", "aten.tanhshrink")
_declare("aten.maximum", scalar=_extreme("maximum"))
_declare("aten.minimum", scalar=_extreme("minimum"))
declare("aten.neg", scalar=lambda o: ScalarFunction.named("neg").compose(o["self"]))


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = _USUAL) -> Tensor:
    """Torch's is the identity above its threshold, which leaves out up to e⁻²⁰; e⁻⁷⁰⁰ is below the underflow that
    is counted. A threshold below the usual one is part of the function.
    """
    return functional.softplus(x, beta, max(threshold, _FAR) if threshold >= _USUAL else threshold)


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Torch's derivative is computed in single precision."""
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha))


declare("aten.softplus", evaluate=_softplus)
declare("aten.celu", evaluate=_celu)
declare("aten.hardsigmoid", evaluate=hard_sigmoid)
declare("aten.relu", "aten.relu6", "aten.leaky_relu", "aten.tanh", "aten.sigmoid", "aten.silu", "aten.gelu",
        "aten.softplus", "aten.elu", single=InSingle.ENTRIES)  # fmt: skip
