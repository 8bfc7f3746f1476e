r"""A smooth version of a network: a copy in which a smooth counterpart replaces every module with a kink.

=================================  =====================================================================
module                             counterpart
=================================  =====================================================================
``ReLU``                           ``Softplus``, :math:`\log(1 + e^x)` (paper, "Smooth VGG")
``MaxPool1d``, ``2d``, ``3d``      ``AvgPool`` with the same patches (paper, "Smooth VGG")
``AdaptiveMaxPool``                ``AdaptiveAvgPool`` with the same outputs
``LeakyReLU``, ``PReLU``           :math:`\alpha x + (1-\alpha)\log(1 + e^x)`, the same slopes at ±∞
``Hardtanh``, ``ReLU6``            :math:`l + \log(1 + e^{x-l}) - \log(1 + e^{x-h})`, the same limits l and h
``Hardswish``                      ``SiLU``, which it was made to approximate (Howard et al., 2019)
``Hardsigmoid``                    ``Sigmoid``, which it was made to approximate
=================================  =====================================================================

The counterparts replace :math:`\max(x, 0)` by soft-plus in :math:`\max(x,0) + \alpha\min(x,0) = \alpha x +
(1-\alpha)\max(x,0)` and in :math:`\min(\max(x,l),h) = l + \max(x-l,0) - \max(x-h,0)`. Soft-plus exceeds
:math:`\max(x, 0)` by 0 to log 2, so they differ from the originals by at most :math:`|1-\alpha|\log 2` and log 2.

Modules with a kink but no counterpart are refused: ``RReLU``, ``SELU``, ``ELU`` with α ≠ 1 (``CELU`` has a
continuous derivative for every α), the shrinking functions, ``Threshold``, ``LPPool``, fractional and un-pooling.
``ELU`` with α = 1, ``CELU`` and ``Softsign`` stay: their derivatives are Lipschitz-continuous.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.errors import SurefootError, describe
from surefoot.graph import Node, Role
from surefoot.operations.captured import capture
from surefoot.torch_private import children_of


class NotSmooth(SurefootError, ValueError):
    """Something in the model has a kink and no smooth counterpart."""


class LeakySoftplus(nn.Module):
    r"""The smooth counterpart of ``LeakyReLU`` and ``PReLU``: :math:`\alpha x + (1-\alpha)\log(1+e^x)`.

    Its derivative :math:`\alpha + (1-\alpha)\sigma(x)` lies between :math:`\alpha` and 1.

    Args:
        weight: the slope :math:`\alpha`, or a parameter with one or one per channel, the second dimension.
    """

    def __init__(self, weight: float | nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """The function on every entry."""
        slope: float | Tensor = self.weight
        smooth = F.softplus(x)
        if isinstance(slope, Tensor):
            slope = slope.reshape(() if slope.numel() == 1 else (-1, *[1] * (x.dim() - 2)))
        return smooth + slope * (x - smooth)

    def extra_repr(self) -> str:
        """The slope, or how many are learned."""
        return f"{self.weight.numel()} slopes" if isinstance(self.weight, Tensor) else f"slope={self.weight:g}"


class SoftClamp(nn.Module):
    r"""The smooth counterpart of ``Hardtanh`` and ``ReLU6``.

    :math:`l + \log(1+e^{x-l}) - \log(1+e^{x-h})` increases from :math:`l` to :math:`h`, with derivative
    :math:`\sigma(x-l) - \sigma(x-h) \in (0, 1)`.
    """

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = float(low), float(high)

    def forward(self, x: Tensor) -> Tensor:
        """The function on every entry."""
        return self.low + F.softplus(x - self.low) - F.softplus(x - self.high)

    def extra_repr(self) -> str:
        """The limits."""
        return f"low={self.low:g}, high={self.high:g}"


def smooth(model: nn.Module, x: Any = None) -> nn.Module:
    """A deep copy of the model with smooth counterparts in place of modules that have kinks.

    The original does not change. A module used in several places stays one module; parameters, names and training
    mode are those of the original.

    Args:
        model: any module; on the ``meta`` device nothing is allocated.
        x: an example input. With it, the result is captured, and operations with kinks that modules call as
            functions (``F.relu``, ``torch.max``), which cannot be replaced, are reported.

    Raises:
        NotSmooth: naming the modules that have a kink and no counterpart, or that call such a function.
        CaptureError: if ``x`` is given and the model cannot be captured.

    >>> sf.smooth(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    Sequential(
      (0): Linear(in_features=2, out_features=3, bias=True)
      (1): Softplus(beta=1.0, threshold=20.0)
    )
    """
    copied = copy.deepcopy(model)
    counterparts: dict[int, nn.Module] = {}
    refused: list[str] = []
    for path, module in copied.named_modules():
        try:
            counterpart = _counterpart(module)
        except NotSmooth as error:
            refused.append(f"{describe(path)}: {error}")
            continue
        if counterpart is not None:
            counterparts[id(module)] = counterpart.train(module.training)
    _refuse("modules that have kinks and no smooth counterpart", refused)
    for parent in list(copied.modules()):
        for name, child in list(children_of(parent).items()):
            if id(child) in counterparts:
                children_of(parent)[name] = counterparts[id(child)]
    result = counterparts.get(id(copied), copied)
    if x is not None:
        graph = capture(result, x)
        kinked = [node for node in graph.nodes if graph.roles[node.name] is not Role.CONSTANT and _has_kink(node)]
        places = [f"{describe(node.module)}: {node.op.rpartition('.')[2]}" for node in kinked]
        _refuse("operations with kinks that are called as functions", places)
    return result


def _refuse(what: str, places: list[str]) -> None:
    if places:
        lines = "".join(f"\n  {place}" for place in dict.fromkeys(places))
        raise NotSmooth(f"the model has {what}; write modules with a smooth counterpart instead:{lines}")


def _has_kink(node: Node) -> bool:
    """Whether an operation has a kink. That of ELU and CELU depends on their slope at zero."""
    name, options = node.op.removeprefix("aten."), node.arguments
    if name == "elu":  # scale · α(e^{x · input_scale} − 1) below zero, scale · x above
        return bool(abs(options["alpha"] * options["input_scale"] - 1) > 1e-9)
    return name in _KINKED or "max_pool" in name


def _counterpart(module: nn.Module) -> nn.Module | None:
    """The smooth counterpart, or ``None`` for a module that stays.

    A subclass counts as its base class unless it has another forward pass.
    """
    for kind, make in _COUNTERPARTS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            if isinstance(make, str):
                raise NotSmooth(f"{type(module).__name__} {make}")
            return make(module)
    return None


def _average(module: Any) -> nn.Module:
    """The average pooling with the patches of a max-pooling, adaptive or not."""
    if module.return_indices:
        raise NotSmooth("the indices of maxima that it returns have no counterpart")
    kind = next(kind for kind in _MAX_POOLS if isinstance(module, kind))
    if "Adaptive" in kind.__name__:
        return _MAX_POOLS[kind](module.output_size)
    dilation = module.dilation
    if any(step != 1 for step in (dilation if isinstance(dilation, list | tuple) else (dilation,))):
        raise NotSmooth(f"average pooling has no dilation, and here it is {dilation}")
    options = {"stride": module.stride, "padding": module.padding, "ceil_mode": module.ceil_mode}
    return _MAX_POOLS[kind](module.kernel_size, **options)


def _exponential(module: Any) -> None:
    if module.alpha != 1:
        raise NotSmooth(f"ELU with α = {module.alpha:g} has a kink at zero: use CELU, or α = 1")


def _kinds(name: str, dims: str = "123") -> list[type[nn.Module]]:
    """The modules of torch with this name, one for each number of dimensions."""
    return [getattr(nn, f"{name}{dim}d") for dim in dims]


_MAX_POOLS: dict[type[nn.Module], Any] = {
    **dict(zip(_kinds("MaxPool"), _kinds("AvgPool"), strict=True)),
    **dict(zip(_kinds("AdaptiveMaxPool"), _kinds("AdaptiveAvgPool"), strict=True)),
}
_COUNTERPARTS: dict[type[nn.Module], str | Callable[[Any], nn.Module | None]] = {  # or why there is none
    nn.ReLU: lambda module: nn.Softplus(),
    nn.LeakyReLU: lambda module: LeakySoftplus(module.negative_slope),
    nn.PReLU: lambda module: LeakySoftplus(module.weight),
    nn.Hardtanh: lambda module: SoftClamp(module.min_val, module.max_val),
    nn.Hardswish: lambda module: nn.SiLU(),
    nn.Hardsigmoid: lambda module: nn.Sigmoid(),
    nn.ELU: _exponential,
    nn.SELU: "has a kink at zero: use CELU",
    nn.RReLU: "draws random slopes: use LeakyReLU",
    nn.Hardshrink: "jumps: use Tanhshrink",
    nn.Softshrink: "has kinks: use Tanhshrink",
    nn.Threshold: "jumps: use Softplus",
    **dict.fromkeys(_MAX_POOLS, _average),
    **dict.fromkeys(_kinds("LPPool"), "has no derivative at zero: use AvgPool"),
    **dict.fromkeys(_kinds("FractionalMaxPool", "23"), "draws random patches: use AvgPool"),
    **dict.fromkeys(_kinds("MaxUnpool"), "needs the indices of maxima: use Upsample"),
}
_KINKED = {  # operations
    "relu", "relu6", "leaky_relu", "prelu", "_prelu_kernel", "rrelu", "rrelu_with_noise", "selu", "hardtanh",
    "hardswish", "hardsigmoid", "hardshrink", "softshrink", "threshold", "abs", "sign", "sgn", "floor", "ceil",
    "round", "trunc", "frac", "heaviside", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "fmax",
    "fmin", "max", "min", "amax", "amin", "aminmax", "median", "kthvalue", "sort", "topk", "cummax", "cummin",
    "norm", "linalg_vector_norm", "dist", "cdist", "remainder", "fmod", "floor_divide",
}  # fmt: skip
