"""Random expressions of scalar functions, and those in which digits cancel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attack.dice import Dice

Scalar = Callable[[Tensor], Tensor]

LEAVES: dict[str, Scalar] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "elu": F.elu,
    "celu": lambda z: F.celu(z, 0.7),
    "selu": F.selu,
    "silu": F.silu,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "erf": torch.erf,
    "square": torch.square,
    "expm1": torch.expm1,
    "exp": torch.exp,
    "gauss": lambda z: torch.exp(-z * z),
    "root": lambda z: torch.sqrt(1 + z * z),
    "cauchy": lambda z: 1 / (1 + z**2),
    "log": lambda z: torch.log(2 + z * z),
    "leaky": F.leaky_relu,
    "clamp": lambda z: z.clamp(-1.5, 2.0),
    "abs": torch.abs,
    "identity": lambda z: z,
}

CANCELLING: dict[str, Scalar] = {
    "tanhshrink": F.tanhshrink,
    "1-tanh²": lambda z: 1 - torch.tanh(z) ** 2,
    "exp-1": lambda z: torch.exp(z) - 1,
    "z-sin z": lambda z: z - torch.sin(z),
    "1-cos": lambda z: 1 - torch.cos(z),
    "root-1": lambda z: torch.sqrt(1 + z * z) - 1,
    "root-z": lambda z: torch.sqrt(1 + z * z) - z,
    "s(1-s)": lambda z: torch.sigmoid(z) * (1 - torch.sigmoid(z)),
    "softplus-z": lambda z: F.softplus(z) - z,
    "1-erf": lambda z: 1 - torch.erf(z),
    "(z+1)²-z²": lambda z: (z + 1) ** 2 - z**2,
    "expm1-z": lambda z: torch.expm1(z) - z,
    "log ratio": lambda z: torch.log(1 + z * z) - torch.log(2 + z * z),
}
LARGE = (1e3, 1e7, 1e12)


def shifted(function: Scalar, by: float) -> Scalar:
    """The function plus a large number, minus that."""
    return lambda z: (function(z) + by) - by


def tree(dice: Dice, depth: int) -> tuple[str, Scalar]:
    """A random expression of one variable, with its text."""
    kind = dice.whole(0, 5) if depth else 0
    name = dice.one_of(*LEAVES)
    if kind == 0:
        return name, LEAVES[name]
    left, f = tree(dice, depth - 1)
    if kind == 1:
        return f"{name}({left})", lambda z, g=LEAVES[name]: g(f(z))
    if kind == 2:
        by = dice.one_of(*LARGE)
        return f"({left}+{by:g})-{by:g}", shifted(f, by)
    if kind == 3:
        factor = round(dice.between(-3, 3), 3)
        return f"{factor}*({left})", lambda z: factor * f(z)
    right, g = tree(dice, depth - 1)
    if kind == 4:
        return f"({left})-({right})", lambda z: f(z) - g(z)
    return f"({left})*({right})", lambda z: f(z) * g(z)


class Expression(nn.Module):
    """A scalar function of the entries."""

    def __init__(self, function: Scalar) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z)
