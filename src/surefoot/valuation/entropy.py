r"""The logistic loss of class numbers, computed without cancellation, with its error and its derivative.

With :math:`a` the place of the largest entry of a row and :math:`t_k = \hat y_a - \hat y_k \ge 0`, the loss of the
row is :math:`t_y + \log(1 + s)`, :math:`s = \sum_{k\ne a}e^{-t_k}`. Both terms are non-negative. The subtraction
rounds t by a relative u, so that exponentials are off by a relative :math:`2ut_k` and, elementary functions being
within 8 units in the last place, 16u; their sum by a relative Ku more. As :math:`\log(1 + s)` has the slope
:math:`1/(1 + s)` and :math:`s/(1 + s) \le \log(1 + s)`, it is off by at most :math:`(K + 32)u\log(1 + s) +
2u\sum_kt_ke^{-t_k}`, with one rounding of the sum :math:`(K + 34)u` of the row. Rows are added in stages, so that
none goes through more than k additions, and divided and scaled. Together at most

.. math:: (K + k + 48)\,u\,F + 3u\,\frac1n\sum_{ik}t_{ik}e^{-t_{ik}} .

The last sum follows from the losses. With :math:`e^{-t_k} = sq_k` for shares q of the K - 1 others, which have an
entropy of at most :math:`\log(K - 1)`, that of a row is at most :math:`g(s) = s\log\frac{K - 1}s`. This is
concave, so that its mean is at most g of the mean of s, and grows up to :math:`g(\frac{K - 1}e) = \frac{K - 1}e`.
As :math:`s \le (1 + s)\log(1 + s)`, the mean of s is at most :math:`1 + \sup s` times that of the losses.

Where t is more than 700, it is taken to be that, as numbers below :math:`2^{-1022}` take processors long: an
exponential is then off by less than :math:`2^{-1009}`, which counts as underflow.

The gradient of a row of loss l is the soft-max :math:`p = e^{-t}/(1 + s)` less one at y, where it is
:math:`e^{-l} - 1`: so it is as good as l, relative to itself, however small the loss is.

*Curvature.* The second derivative of a row is :math:`\mathrm{diag}(p) - pp^\top`, whose norm is at most its
largest row sum of absolute values :math:`2p_k(1 - p_k)` (Gershgorin), hence at most 1/2 and, as :math:`1 - p_a`
and all other :math:`p_k` are at most s, at most 2s. Where a row moves by r, differences of two entries move by at
most :math:`\sqrt2\,r` and s grows by no more than the factor :math:`e^{\sqrt2\,r}`. So where the network is sure
of the classes the loss is hardly curved.

*Slope.* The gradient of a row of loss l has the norm :math:`\|p - 1_y\| \le \sqrt2(1 - p_y) = \sqrt2(1 - e^{-l})`,
since the other shares add up to :math:`1 - p_y`. The computed l is off by a relative
:math:`(K + 34)u + 2u\sup t < 2^{-40}`, as exponentials underflow beyond t = 746; and where outputs move by r in
all, the gradient of all rows moves by no more than the curvature times r.

So the norm of all :math:`q = 1 - e^{-l}` says how steep the loss is and, as :math:`s \le e^l - 1 = q/(1 - q)` and
:math:`s \le K - 1`, how curved. The latter is told by the largest s of each sample, where these are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.graph import Node
from surefoot.valuation.normalising import depth, staged

ENTROPY = "surefoot.cross_entropy"
_UNIT, _ROOT = 2.0**-53, math.sqrt(2) * (1 + 2.0**-50)
_FARTHEST = 700.0
_PLAIN: dict[str, Any] = {"weight": None, "label_smoothing": 0.0, "ignore_index": None}


@dataclass(frozen=True)
class Logistic:
    """What is known of a logistic loss as computed.

    Attributes:
        error: how far the value is off.
        doubt: a bound on s of all rows, or of those of each sample.
        factor: of the sum over the rows.
        steepness: of the loss, where the argument does not move; likewise.
        value: of the loss.
    """

    error: float
    doubt: Any
    factor: float
    steepness: Any
    value: float

    def curvature(self, moved: Any) -> Any:
        """On the second derivative, where the argument may move by so much."""
        growth: Any = math.inf
        if isinstance(moved, np.ndarray):
            growth = np.where(moved < 400, np.exp(1.5 * np.minimum(moved, 400)), math.inf)
        elif moved < 400:
            growth = math.exp(1.5 * moved)
        limit = np.minimum if isinstance(self.doubt, np.ndarray) else min
        return abs(self.factor) * limit(0.5, 2 * self.doubt * growth) * (1 + 1e-9)

    def slope(self, moved: Any) -> Any:
        """On the gradient, likewise."""
        return (self.steepness + self.curvature(moved) * moved) * (1 + 1e-9)


def is_plain(node: Node, targets: torch.dtype) -> bool:
    """Whether options and targets of a logistic loss are covered here."""
    usual = all(node.kwargs.get(key, value) == value for key, value in _PLAIN.items())
    return usual and not targets.is_floating_point


def entropy(node: Node, values: Mapping[str, Any], samples: int = 0) -> tuple[Tensor, Logistic] | None:
    """The loss and what is known of it, per sample if there are several; ``None`` for another operation, or for
    options that are not covered.
    """
    if node.op != ENTROPY:
        return None
    outputs, targets = (values[name] for name in node.inputs)
    options = node.kwargs
    if not is_plain(node, targets.dtype):
        return None
    scale, mean = float(options.get("scale", 1.0)), options.get("reduction", "mean") == "mean"
    count, classes = outputs.shape
    factor = scale / count if mean else scale
    value, total, steep, rest = _Entropy.apply(outputs, targets, factor, samples)
    steep = steep * (1 + 2.0**-20) + count**0.5 * 2.0**-500
    if rest is None:
        rest = min(steep / (1 - steep), classes - 1.0) if steep < 1 else classes - 1.0
    doubt = rest * (1 + 2.0**-20) + 2.0**-1000
    most = float(doubt.max()) if samples else doubt
    share = (1 + most) * abs(total / (factor * count)) * (1 + 2.0**-20) + 2.0**-1000
    error = (classes + depth(count) + 48) * abs(total) + 3 * abs(factor) * count * _spread(share, classes - 1)
    error = error * _UNIT * (1 + 1e-9) + outputs.numel() * max(1.0, abs(factor)) * 2.0**-1000
    return value, Logistic(error, doubt, factor, _ROOT * abs(factor) * steep * (1 + 2.0**-50), total)


def _spread(share: float, others: int) -> float:
    """The bound g on the sum of all :math:`te^{-t}` of a row, from one on their sum s."""
    return share * math.log(others / share) if share < others / math.e else others / math.e


class _Entropy(torch.autograd.Function):
    """The loss times a factor; also as a number, and the norm of the :math:`1 - e^{-l}`; if there are several
    samples, the norm and the largest s of each.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, labels: Tensor, factor: float, samples: int) -> tuple[Any, ...]:
        top, place = outputs.max(dim=1, keepdim=True)
        own = labels.long()[:, None]
        below = outputs - top  # minus t
        missed = below.gather(1, own)
        shares = below.clamp_(min=-_FARTHEST).exp_().scatter_(1, place, 0.0)
        rest = shares.sum(dim=1, keepdim=True)
        rows = torch.log1p(rest).sub_(missed)
        value = staged(rows, 0).reshape(()) * factor
        steep = rows.neg_().expm1_()
        ctx.save_for_backward(shares, rest, place, own, steep)
        ctx.factor = factor
        if samples:
            largest = rest.reshape(samples, -1).amax(dim=1).cpu().numpy()
            each = torch.linalg.vector_norm(steep.reshape(samples, -1), dim=1).cpu().numpy()
            return value, float(value), each, largest
        return value, float(value), float(torch.linalg.vector_norm(steep)), None

    @staticmethod
    def backward(ctx: Any, costate: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        shares, rest, place, own, less_one = ctx.saved_tensors
        slope = shares.scatter(1, place, 1.0).div_(1 + rest).scatter_(1, own, less_one)
        return slope.mul_(costate * ctx.factor), None, None, None
