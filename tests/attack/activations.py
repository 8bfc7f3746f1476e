"""Scalar functions: all of ``torch.nn``, and some written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from attack import parts
from attack.parts import Apply

_Make = Callable[[], nn.Module]


def _scalar(label: str, function: Callable[[torch.Tensor], torch.Tensor]) -> _Make:
    return lambda: Apply(label, function)


ACTIVATIONS: tuple[_Make, ...] = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Sigmoid,
    nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid,
    nn.Softshrink, nn.Hardshrink, nn.PReLU, partial(nn.GELU, approximate="tanh"), partial(nn.Softplus, beta=2.0),
    partial(nn.ELU, alpha=0.5), partial(nn.Threshold, 0.1, 0.0), partial(nn.PReLU, 2),
    parts.HandGELU, parts.HandSwish, parts.HandSquareReLU, parts.HandSoftsign,
    _scalar("sin", torch.sin), _scalar("cos", torch.cos), _scalar("exp", torch.exp), _scalar("atan", torch.atan),
    _scalar("abs", torch.abs), _scalar("square", torch.square), _scalar("cube", lambda x: x**3),
    _scalar("erf", torch.erf), _scalar("asinh", torch.asinh), _scalar("clamp", lambda x: x.clamp(-0.5, 0.7)),
    _scalar("log(1 + x²)", lambda x: torch.log(1 + x * x)), _scalar("√(1 + x²)", lambda x: (1 + x * x).sqrt()),
    _scalar("1/(1 + x²)", lambda x: 1 / (1 + x * x)),
)  # fmt: skip
