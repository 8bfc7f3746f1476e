"""Formulas in place of kernels of torch that are not good to double precision, or slow.

* Soft-plus above its threshold is the identity in torch, which leaves out up to :math:`e^{-20}`; here the
  threshold is 700, and :math:`e^{-700}` is below the underflow that is counted.
* The backward of CELU is computed in single precision.
* Scales and shifts of normalisations are one pass instead of two.
* Anti-aliased interpolation to a width of one returns the first row in place of all, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.errors import UnsupportedOperation, describe
from surefoot.graph import Node
from surefoot.operations.record import record_of
from surefoot.operations.scaled import scale_shift

_USUAL, _FAR = 20.0, 700.0


def formula_of(node: Node) -> Callable[..., Any] | None:
    """The formula by which an operation is computed in double precision; ``None`` for torch's kernel.

    Raises:
        UnsupportedOperation: naming an operation whose kernel is wrong.
    """
    if node.op.startswith("aten._upsample_") and node.op.endswith("_aa") and node.specs[0].shape[-1] == 1:
        raise UnsupportedOperation(
            f"'{node.op}' in {describe(node.module)}: torch computes anti-aliased interpolation to a width "
            "of one wrongly; use antialias=False, or average pooling"
        )
    return _FORMULAS.get(node.op) or record_of(node).evaluate


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = _USUAL) -> Tensor:
    return F.softplus(x, beta, max(threshold, _FAR) if threshold >= _USUAL else threshold)


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha))


def _scale_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int) -> Tensor:
    if weight is None or bias is None:
        return scale_shift(x, weight, bias, dim)
    trailing = (1,) * (x.dim() - dim - weight.dim())
    return torch.addcmul(bias.reshape(bias.shape + trailing), x, weight.reshape(weight.shape + trailing))


_FORMULAS: dict[str, Callable[..., Any]] = {
    "aten.softplus": _softplus,
    "aten.celu": _celu,
    "surefoot.scale_shift": _scale_shift,
}
