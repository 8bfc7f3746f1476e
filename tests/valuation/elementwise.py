"""Element-wise operations, each with options, and numbers on which to try them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Scalar = Callable[[Tensor], Tensor]

OPERATIONS: dict[str, dict[str, Scalar]] = {
    "aten.relu": {"": torch.relu},
    "aten.relu6": {"": F.relu6},
    "aten.selu": {"": F.selu},
    "aten.silu": {"": F.silu},
    "aten.mish": {"": F.mish},
    "aten.sigmoid": {"": torch.sigmoid},
    "aten.log_sigmoid": {"": F.logsigmoid},
    "aten.tanh": {"": torch.tanh},
    "aten.hardswish": {"": F.hardswish},
    "aten.hardsigmoid": {"": F.hardsigmoid},
    "aten.sin": {"": torch.sin},
    "aten.cos": {"": torch.cos},
    "aten.tan": {"": torch.tan},
    "aten.atan": {"": torch.atan},
    "aten.sinh": {"": torch.sinh},
    "aten.cosh": {"": torch.cosh},
    "aten.asinh": {"": torch.asinh},
    "aten.exp": {"": torch.exp},
    "aten.expm1": {"": torch.expm1},
    "aten.log": {"": torch.log},
    "aten.log1p": {"": torch.log1p},
    "aten.sqrt": {"": torch.sqrt},
    "aten.rsqrt": {"": torch.rsqrt},
    "aten.reciprocal": {"": torch.reciprocal},
    "aten.square": {"": torch.square},
    "aten.abs": {"": torch.abs},
    "aten.sign": {"": torch.sign},
    "aten.erf": {"": torch.erf},
    "aten.erfc": {"": torch.erfc},
    "aten.exp2": {"": torch.exp2},
    "aten.log2": {"": torch.log2},
    "aten.log10": {"": torch.log10},
    "aten.asin": {"": torch.asin},
    "aten.acos": {"": torch.acos},
    "aten.atanh": {"": torch.atanh},
    "aten.acosh": {"": torch.acosh},
    "aten.logit": {"": torch.logit, "0.1": lambda x: torch.logit(x, 0.1)},
    "aten.special_entr": {"": torch.special.entr},
    "aten.leaky_relu": {"": F.leaky_relu, "2": lambda x: F.leaky_relu(x, 2.0)},
    "aten.elu": {"": F.elu, "0.3": lambda x: F.elu(x, 0.3)},
    "aten.celu": {"": F.celu, "0.7": lambda x: F.celu(x, 0.7)},
    "aten.gelu": {"": F.gelu, "tanh": lambda x: F.gelu(x, approximate="tanh")},
    "aten.softplus": {
        "": F.softplus,
        "2": lambda x: F.softplus(x, 2.0),
        "2, 1": lambda x: F.softplus(x, 2.0, 1.0),
        "1, 60": lambda x: F.softplus(x, 1.0, 60.0),
    },
    "aten.hardtanh": {"": F.hardtanh},
    "aten.threshold": {"": lambda x: F.threshold(x, 0.1, 20.0)},
    "aten.softshrink": {"": F.softshrink},
    "aten.hardshrink": {"": F.hardshrink},
    "aten.clamp": {"": lambda x: x.clamp(-0.7, 1.3)},
    "aten.clamp_min": {"": lambda x: torch.clamp_min(x, 0.2)},
    "aten.clamp_max": {"": lambda x: torch.clamp_max(x, 0.2)},
    "aten.rrelu": {"": lambda x: F.rrelu(x, 0.25, 0.25)},
    "aten.pow": {
        "2": lambda x: x**2,
        "3": lambda x: x**3,
        "-1": lambda x: x**-1,
        "0.5": lambda x: x**0.5,
        "2.5": lambda x: x**2.5,
        "7": lambda x: x**7,
        "2^x": lambda x: 2.0**x,
    },
    "aten.maximum": {"": lambda x: torch.maximum(x, torch.tensor(0.3, dtype=x.dtype))},
    "aten.minimum": {"": lambda x: torch.minimum(x, torch.tensor(0.3, dtype=x.dtype))},
    "aten.neg": {"": torch.neg},
    "aten.add": {"": lambda x: x + 0.1, "3": lambda x: torch.add(x, 0.1, alpha=3)},
    "aten.sub": {"": lambda x: x - 0.1},
    "aten.rsub": {"": lambda x: 0.1 - x, "3": lambda x: torch.rsub(x, 0.1, alpha=3)},
    "aten.mul": {"": lambda x: x * 0.1},
    "aten.multiply": {"": lambda x: torch.multiply(x, 0.1)},
    "aten.div": {"": lambda x: x / 0.3, "1/x": lambda x: 0.3 / x},
    "aten.divide": {"": lambda x: torch.divide(x, 0.3)},
    "aten.true_divide": {"": lambda x: torch.true_divide(x, 0.3)},
}


def numbers() -> Tensor:
    """Ordinary numbers, those near breaks, far out, tiny and huge."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(40, generator=generator, dtype=torch.float64) * s for s in (0.01, 1.0, 6.0, 40.0, 600.0)]
    ends = torch.tensor([0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.3, 3.0, 6.0, 18.3, 20.0, 36.0, 37.5, 40.0, 710.0, 745.0])
    powers = 10.0 ** torch.arange(-300, 0, 23, dtype=torch.float64)
    large = torch.tensor([1e5, 1e8, 1e15, 1e30, 1e100], dtype=torch.float64)
    more = torch.cat([ends.double(), powers, large])
    near = torch.cat([torch.nextafter(ends.double(), torch.tensor(s * torch.inf).double()) for s in (1.0, -1.0)])
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([*parts, more, -more, near, -near, zero])
