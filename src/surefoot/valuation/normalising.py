r"""Normalisations, computed in few passes, with how far they are off.

A group of M numbers is :math:`z = c/\rho_\epsilon(c)`, where c is x without its mean (or x itself) and
:math:`\rho_\epsilon(c) = \sqrt{\|c\|^2/M + \epsilon}`. Sums are taken in stages, so that no number goes through
more than k additions, and their relative error to the sum of absolute values is :math:`\gamma_k` instead of
:math:`\gamma_M` (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

*Centring.* The computed mean :math:`\hat m` is off by at most :math:`\gamma_{k+2}\|x\|/\sqrt M` (Cauchy-Schwarz),
and :math:`d = \mathrm{fl}(x - \hat m)` by :math:`u\|d\|`. As :math:`\|x\| \le (1 + u)\|d\| + \sqrt M|\hat m|`,

.. math:: \|d - c\| \le e = (k + 8)u\,(2\|d\| + \sqrt M|\hat m|) .

*Dividing.* :math:`\hat\rho`, computed from d, has a relative error of at most :math:`(k + 8)u`, and the quotient
rounds twice. Between d and c the map has slope at most :math:`1/\min\rho_\epsilon`, and :math:`\rho_\epsilon`
changes by at most :math:`\|d - c\|/\sqrt M`. So the group is off by

.. math:: (k + 12)u\,\|\hat z\| + e/(\hat\rho - e/\sqrt M) , \qquad \|\hat z\| \le (1 + (k + 12)u)\sqrt M .

*Range.* Only groups with :math:`\epsilon \ge 2^{-100}`, all sums of squares below :math:`2^{900}`, and e below
:math:`2^{-30}\hat\rho\sqrt M` are computed here: nothing overflows, and what underflows, at most
:math:`2^{-1020}` of an entry, is divided by no less than :math:`2^{-51}`. Others are computed by
:mod:`surefoot.operations.normalised_groups`, which scales and centres twice.

*Slopes* (proved there): the Jacobian of a group has norm :math:`1/\rho_\epsilon`, its second derivative at most
:math:`(2/\sqrt3)/(\sqrt M\rho_\epsilon^2)`. Where x may move by r, :math:`\rho_\epsilon \ge \hat\rho(1 - (k + 8)u)
- (e + r)/\sqrt M`.

The derivative is that of the exact map at d, computed by torch's kernels from centred numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.graph import Node
from surefoot.operations.normalisation import BATCH, layout_of

_UNIT = 2.0**-53
_LARGEST, _LEAST_EPSILON, _TRUSTED = 2.0**900, 2.0**-100, 2.0**-30
_CURVED = 2 / math.sqrt(3) * (1 + 1e-12)
_UP = 1 + 1e-9
_ops = torch.ops.aten


@dataclass(frozen=True)
class Normalised:
    """What is known of a normalisation as computed.

    Attributes:
        error: how far the result is off, in all or, if there are samples, each of them.
        least: a lower bound on ρ of all groups, or of those of each sample, where the argument does not move.
        size: numbers per group.
    """

    error: float
    least: Any
    size: int

    def slopes(self, moved: Any) -> tuple[Any, Any]:
        """Jacobian and curvature where the argument may move by so much; infinite where nothing is known."""
        rho = self.least - moved / math.sqrt(self.size) * _UP
        if not (rho > 0 if isinstance(rho, float) else rho.min() > 0):
            return math.inf, math.inf
        return _UP / rho, _CURVED * _UP / (math.sqrt(self.size) * rho * rho)


@dataclass(frozen=True)
class Statistics:
    """What one batch-normalisation computed from its batch.

    Attributes:
        module: the path of the module that called it.
        mean: of each channel.
        variance: likewise, without bias.
    """

    module: str
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Recipe:
    """What is known of a normalisation before it is computed.

    Attributes:
        argument: the name of what is normalised.
        eps: added to the mean of squares.
        centre: whether the mean of a group is subtracted.
        shape: samples × groups × places of the argument.
        module: the path of the module that called a batch-normalisation; ``None`` for others.
    """

    argument: str
    eps: float
    centre: bool
    shape: tuple[int, int, int]
    module: str | None

    @property
    def size(self) -> int:
        """Numbers per group."""
        return self.shape[0] * self.shape[2]

    @cached_property
    def unit(self) -> float:
        """The relative error :math:`(k + 12)u`."""
        return (depth(self.shape[0]) + depth(self.shape[2]) + 12) * _UNIT * _UP


def recipe_of(node: Node) -> Recipe | None:
    """How a normalisation is computed here; ``None`` if it is not."""
    arguments, layout = node.arguments, layout_of(node)
    if layout is None or any(arguments.get(key) is not None for key in ("weight", "bias")) or not arguments["eps"]:
        return None
    eps = float(arguments["eps"])
    if eps < _LEAST_EPSILON or not math.prod(layout.shape):
        return None
    split = layout.shape[0] if layout.turned else 1
    shape = split, layout.count, layout.size // split
    return Recipe(arguments["input"].name, eps, layout.centre, shape, node.module if node.op == BATCH else None)


def normalised(recipe: Recipe, x: Tensor, samples: int = 0) -> tuple[Tensor, Normalised, Statistics | None] | None:
    """The result of a normalisation, what is known of it, per sample if there are several, and the statistics of
    a batch; ``None`` if it is out of range.
    """
    shape, size = recipe.shape, recipe.size
    if recipe.centre and shape[0] == 1:
        z, mean, rho = _rows_normalised(x.reshape(shape[1:]), recipe.eps)
    else:
        z, mean, rho = _Normalise.apply(x.reshape(shape), recipe.eps, recipe.centre)
    mean, rho = mean.reshape(-1), rho.reshape(-1)
    facts = _facts(recipe, mean.cpu().numpy(), rho.cpu().numpy(), samples)
    if facts is None:
        return None
    statistics = None
    if recipe.module is not None:
        variance = (rho.square() - recipe.eps).clamp_(min=0) * (size / max(size - 1, 1))
        statistics = Statistics(recipe.module, mean, variance)
    return z.reshape(x.shape), facts, statistics


def _facts(recipe: Recipe, means: np.ndarray, spreads: np.ndarray, samples: int) -> Normalised | None:
    """See the module; ``None`` out of range, as where something is not a number."""
    size, unit, root = recipe.size, recipe.unit, math.sqrt(recipe.size)
    shift = means / spreads  # e/√M is at most unit (2 + |shift|) ρ, as ‖d‖ ≤ √M ρ
    groups = math.sqrt(len(spreads) // (samples or 1))
    least: Any = spreads.reshape(samples or 1, -1).min(axis=1)
    farthest = max(float(shift.max()), -float(shift.min()))
    ratio = unit * (2 + farthest * _UP)
    if not (float(spreads.max()) < math.sqrt(_LARGEST / size) and ratio < _TRUSTED and float(least.min()) > 0):
        return None
    shifts = farthest * groups if samples else math.sqrt(shift @ shift)
    relative = unit * ((2 * groups + shifts * _UP) / (1 - unit - ratio) + groups)  # of √M, all groups together
    least = (least if samples else float(least[0])) * ((1 - unit - ratio) / _UP)
    return Normalised(relative * root * _UP + groups * root * 2.0**-900, least, size)


def _split(count: int) -> int:
    """Pieces of which so many numbers are added: a root of the count."""
    return math.isqrt(count) if count > 64 else 1


def depth(count: int) -> int:
    """Through how many additions a number goes at most."""
    pieces = _split(count)
    return count if pieces == 1 else 2 * pieces + count - pieces * pieces + 2


def staged(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, first of pieces, then of their sums; that dimension has size one after."""
    count = x.shape[dim]
    pieces = _split(count)
    if count == 1:
        return x
    if pieces == 1:
        return x.sum(dim=dim, keepdim=True)
    square = x.narrow(dim, 0, pieces * pieces).unflatten(dim, (pieces, pieces)).sum(dim=dim + 1)
    total = square.sum(dim=dim, keepdim=True)
    rest = x.narrow(dim, pieces * pieces, count - pieces * pieces)
    return total + rest.sum(dim=dim, keepdim=True) if rest.numel() else total


def _rows_normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Groups that are the rows of a matrix; also their means and ρ.

    The derivative in d is the one in x, since a shift of all of a row changes nothing; so torch's kernel is called
    for its derivative, and its result is overwritten.
    """
    size = x.shape[1]
    mean = staged(x.detach(), 1).div_(size) if size > 1 else x.detach()
    d = x - mean
    centred = d.detach()
    norms = torch.linalg.vector_norm(centred, dim=1, keepdim=True).square_() if size <= 64 else None
    rho = (staged(centred * centred, 1) if norms is None else norms).div_(size).add_(eps).sqrt_()
    if not d.requires_grad:
        return centred / rho, mean, rho
    z = torch.layer_norm(d, (size,), None, None, eps)
    torch.div(centred, rho, out=z.detach())
    return z, mean, rho


class _Normalise(torch.autograd.Function):
    """Groups along the middle of three dimensions; also their means and ρ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, centre: bool) -> tuple[Tensor, Tensor, Tensor]:
        size = x.shape[0] * x.shape[2]
        mean = staged(staged(x, 2), 0) / size
        d = x - mean if centre else x
        mean = mean if centre else torch.zeros_like(mean)
        places = (
            torch.linalg.vector_norm(d, dim=2, keepdim=True).square() if x.shape[2] <= 64 else staged(d * d, 2)
        )
        rho = (staged(places, 0) / size + eps).sqrt()
        ctx.save_for_backward(d, 1 / rho)
        ctx.eps, ctx.centre = eps, centre
        ctx.mark_non_differentiable(mean, rho)
        return d / rho, mean, rho

    @staticmethod
    def backward(ctx: Any, costate: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        d, inverse = ctx.saved_tensors
        costate = costate.contiguous()
        _, groups, places = d.shape
        if not ctx.centre:
            z = d * inverse
            along = (costate * z).sum(dim=2, keepdim=True) / places
            return (costate - z * along) * inverse, None, None
        zeros = torch.zeros(groups, dtype=d.dtype, device=d.device)
        back = _ops.native_batch_norm_backward(
            costate, d, None, None, None, zeros, inverse.reshape(-1), True, ctx.eps, [True, False, False]
        )[0]
        return back.reshape(d.shape), None, None
