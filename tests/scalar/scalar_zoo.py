"""Activations next to torch's own, their differentiable judges, and what is finite about them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.scalar import ScalarFunction


@dataclass(frozen=True)
class Case:
    """An activation: torch's version, one that autograd differentiates three times, and its facts.

    ``finite`` are the orders of the derivatives that are bounded on the real line; ``kinks`` are where one-sided
    derivatives differ, ``smoothness`` the order of the first one that does.
    """

    name: str
    torch: Callable[[Tensor], Tensor]
    judge: Callable[[Tensor], Tensor]
    finite: str
    kinks: tuple[float, ...] = ()
    smoothness: int = 8
    parameters: dict[str, float | str] = field(default_factory=dict)

    @property
    def function(self) -> ScalarFunction:
        return ScalarFunction.named(self.name, **self.parameters)

    def __str__(self) -> str:
        return "-".join([self.name, *(str(value) for value in self.parameters.values())])


def normal(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2.0))


def smooth(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exponential_linear(x: Tensor, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> Tensor:
    return scale * torch.where(x > 0, x, alpha * torch.expm1(inner * torch.clamp(x, max=0)))


def hard_sigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x + 3, 0, 6) / 6


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

CASES = [
    Case("identity", lambda x: x, lambda x: 1 * x, "123"),
    Case("relu", F.relu, lambda x: torch.clamp(x, min=0), "1", (0.0,), 1),
    Case("leaky_relu", F.leaky_relu, lambda x: torch.where(x > 0, x, 0.01 * x), "1", (0.0,), 1),
    Case(
        "leaky_relu",
        lambda x: F.leaky_relu(x, -1.5),
        lambda x: torch.where(x > 0, x, -1.5 * x),
        "1",
        (0.0,),
        1,
        {"negative_slope": -1.5},
    ),
    Case(
        "prelu",
        lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype)),
        lambda x: torch.where(x > 0, x, 0.3 * x),
        "1",
        (0.0,),
        1,
        {"weight": 0.3},
    ),
    Case("rrelu", F.rrelu, lambda x: torch.where(x > 0, x, x * ((1 / 8 + 1 / 3) / 2)), "1", (0.0,), 1),
    Case("elu", F.elu, exponential_linear, "12", (0.0,), 2),
    Case(
        "elu",
        lambda x: torch.ops.aten.elu(x, 2.0, 0.7, 1.5),
        lambda x: exponential_linear(x, 2.0, 0.7, 1.5),
        "1",
        (0.0,),
        1,
        {"alpha": 2.0, "scale": 0.7, "input_scale": 1.5},
    ),
    Case(
        "celu",
        lambda x: F.celu(x, 0.3),
        lambda x: exponential_linear(x, 0.3, 1.0, 1 / 0.3),
        "12",
        (0.0,),
        2,
        {"alpha": 0.3},
    ),
    Case("selu", F.selu, lambda x: exponential_linear(x, SELU_ALPHA, SELU_SCALE), "1", (0.0,), 1),
    Case("gelu", F.gelu, lambda x: x * normal(x), "123"),
    Case("gelu", lambda x: F.gelu(x, approximate="tanh"), tanh_gelu, "123", parameters={"approximate": "tanh"}),
    Case("silu", F.silu, lambda x: x * torch.sigmoid(x), "123"),
    Case("mish", F.mish, lambda x: x * torch.tanh(smooth(x)), "123"),
    Case("softplus", F.softplus, smooth, "123"),
    Case(
        "softplus",
        lambda x: F.softplus(x, beta=5.0),
        lambda x: smooth(5 * x) / 5,
        "123",
        parameters={"beta": 5.0},
    ),
    Case("sigmoid", F.sigmoid, torch.sigmoid, "0123"),
    Case("log_sigmoid", F.logsigmoid, lambda x: -smooth(-x), "123"),
    Case("tanh", F.tanh, torch.tanh, "0123"),
    Case("softsign", F.softsign, lambda x: x / (1 + torch.abs(x)), "012", (0.0,), 2),
    Case("hardtanh", F.hardtanh, lambda x: torch.clamp(x, -1, 1), "01", (-1.0, 1.0), 1),
    Case(
        "clamp",
        lambda x: torch.clamp(x, min=-0.3),
        lambda x: torch.clamp(x, min=-0.3),
        "1",
        (-0.3,),
        1,
        {"min": -0.3},
    ),
    Case("relu6", F.relu6, lambda x: torch.clamp(x, 0, 6), "01", (0.0, 6.0), 1),
    Case("hardswish", F.hardswish, lambda x: x * hard_sigmoid(x), "1", (-3.0, 3.0), 1),
    Case("hardsigmoid", F.hardsigmoid, hard_sigmoid, "01", (-3.0, 3.0), 1),
    Case("tanhshrink", F.tanhshrink, lambda x: x - torch.tanh(x), "123"),
    Case("softshrink", F.softshrink, lambda x: x - torch.clamp(x, -0.5, 0.5), "1", (-0.5, 0.5), 1),
    Case("hardshrink", F.hardshrink, lambda x: torch.where(x.abs() > 0.5, x, 0 * x), "", (-0.5, 0.5), 0),
    Case(
        "threshold",
        lambda x: F.threshold(x, 0.7, 0.1),
        lambda x: torch.where(x > 0.7, x, 0 * x + 0.1),
        "",
        (0.7,),
        0,
        {"threshold": 0.7, "value": 0.1},
    ),
    Case("abs", torch.abs, torch.abs, "1", (0.0,), 1),
    Case("sign", torch.sign, lambda x: torch.sign(x) + 0 * x, "0", (0.0,), 0),
    Case("square", torch.square, lambda x: x * x, "23"),
    Case("sin", torch.sin, torch.sin, "0123"),
    Case("cos", torch.cos, torch.cos, "0123"),
    Case("erf", torch.erf, torch.erf, "0123"),
    Case("erfc", torch.erfc, torch.erfc, "0123"),
    Case("atan", torch.atan, torch.atan, "0123"),
    Case("asinh", torch.asinh, torch.asinh, "123"),
    Case("exp", torch.exp, torch.exp, ""),
    Case("expm1", torch.expm1, torch.expm1, ""),
    Case("sinh", torch.sinh, torch.sinh, ""),
    Case("cosh", torch.cosh, torch.cosh, ""),
    Case("pow", lambda x: x**3, lambda x: x * x * x, "3", parameters={"exponent": 3.0}),
]

# defined on x > 0 only: (name, torch's function, parameters)
HALF_LINE = [
    ("log", torch.log, {}),
    ("sqrt", torch.sqrt, {}),
    ("rsqrt", torch.rsqrt, {}),
    ("reciprocal", torch.reciprocal, {}),
    ("pow", lambda x: x**2.5, {"exponent": 2.5}),
    ("pow", lambda x: x**-2.0, {"exponent": -2.0}),
]


def derivatives(judge: Callable[[Tensor], Tensor], points: Tensor, orders: int = 4) -> list[Tensor]:
    """f, f', f'', … at the points, by automatic differentiation."""
    x = points.detach().clone().requires_grad_(True)
    values = [judge(x)]
    for _ in range(orders - 1):
        values.append(
            torch.autograd.grad(values[-1].sum(), x, create_graph=True, allow_unused=True, materialize_grads=True)[
                0
            ]
            if values[-1].requires_grad
            else torch.zeros_like(points)
        )
    return [value.detach() for value in values]


def off_kinks(points: Tensor, kinks: tuple[float, ...], gap: float = 1e-9) -> Tensor:
    """The points that are not at a kink, where automatic differentiation picks some subgradient."""
    for kink in kinks:
        points = points[(points - kink).abs() > gap]
    return points
