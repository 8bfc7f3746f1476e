"""Losses of ``torch.nn.functional`` inside a model: those that the model itself computes and returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.graph.structure import Graph, Node, Spec
from surefoot.operations.losses.cross_entropy import value
from surefoot.operations.record import Expansion, expansion
from surefoot.operations.written_out import steps, traced, written_out

_REDUCTIONS = {1: "mean", 2: "sum"}


def _reduced(entries: Tensor, reduction: int) -> Tensor:
    return entries.mean() if reduction == 1 else entries.sum() if reduction == 2 else entries


written_out("aten.mse_loss")(lambda self, target, reduction: _reduced((self - target).square(), reduction))
written_out("aten.soft_margin_loss")(
    lambda self, target, reduction: _reduced(F.softplus(-target * self), reduction)
)


@written_out("aten.l1_loss")
def _absolute(self: Tensor, target: Tensor, reduction: int) -> Tensor:
    return _reduced((self - target).abs(), reduction)


@written_out("aten.huber_loss")
def _huber(self: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """The Huber loss in units of δ, so that the pieces meet exactly."""
    r = (self - target) / delta
    inside = torch.where(r < -1.0, -r - 0.5, 0.5 * r.square())
    return _reduced(torch.where(r > 1.0, r - 0.5, inside), reduction) * delta**2


@written_out("aten.smooth_l1_loss")
def _smooth_absolute(self: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    return _huber(self, target, reduction, beta) / beta if beta > 0 else _absolute(self, target, reduction)


@written_out("aten.binary_cross_entropy")
def _binary_of_chances(self: Tensor, target: Tensor, weight: Any = None, reduction: int = 1) -> Tensor:
    """PyTorch cuts logarithms off at −100."""
    each = -(target * torch.log(self).clamp(min=-100) + (1 - target) * torch.log(1 - self).clamp(min=-100))
    return _reduced(each if weight is None else each * weight, reduction)


@written_out("aten.binary_cross_entropy_with_logits")
def _binary(
    self: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Tensor:
    log_probability = F.softplus(-self)
    if pos_weight is not None:
        log_probability = log_probability * (1 + (pos_weight - 1) * target)
    entries = (1 - target) * self + log_probability
    return _reduced(entries if weight is None else entries * weight, reduction)


@written_out("aten.kl_div")
def _divergence(self: Tensor, target: Tensor, reduction: int, log_target: bool) -> Tensor:
    if log_target:
        return _reduced(target.exp() * (target - self), reduction)
    return _reduced(torch.xlogy(target, target) - target * self, reduction)


def _likelihood(
    log_probability: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """Minus the log-probabilities of the classes, in dimension 1; a mean over the weights of those that count."""
    counts = target != ignore_index
    labels, dim = target.where(counts, 0), min(1, log_probability.dim() - 1)
    weights = counts.to(log_probability.dtype)
    if weight is not None:
        weights = weights * weight[labels]
    losses = -log_probability.gather(dim, labels.unsqueeze(dim)).squeeze(dim) * weights
    return losses.sum() / weights.sum() if reduction == 1 else _reduced(losses, reduction)


written_out("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d")(
    lambda self, target, weight, reduction, ignore_index: _likelihood(
        self, target, weight, reduction, ignore_index
    )
)


@expansion("aten.cross_entropy_loss")
def _cross_entropy(graph: Graph, node: Node) -> Expansion | None:
    """The operation of the objective for class numbers without weights; otherwise soft-max and sums."""
    a = node.arguments
    outputs, targets = (graph.spec(node.arguments[key].name) for key in ("self", "target"))
    assert isinstance(outputs, Spec)
    assert isinstance(targets, Spec)
    if targets.is_real or a["weight"] is not None or a["reduction"] not in _REDUCTIONS:
        return traced(graph, node, _general)

    def rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x, y) if x.dim() == 2 else (x.movedim(min(1, x.dim() - 1), -1).reshape(-1, classes), y.reshape(-1))

    classes = outputs.shape[min(1, len(outputs.shape) - 1)]
    given = {ref.name: spec for ref, spec in ((a["self"], outputs), (a["target"], targets))}
    before, args = steps(rows, given, node.name, node.module)
    options = {key: a[key] for key in ("label_smoothing", "ignore_index")}
    options["reduction"] = _REDUCTIONS[a["reduction"]]
    loss = replace(node, op="surefoot.cross_entropy", target=value, args=args, kwargs=options)
    return Expansion((*before, loss))


def _general(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float
) -> Any:
    dim = min(1, self.dim() - 1)
    logarithm = torch.log_softmax(self, dim)
    shape = [-1 if k == dim else 1 for k in range(self.dim())]
    if target.is_floating_point():
        shares = (1 - label_smoothing) * target + label_smoothing / self.shape[dim]
        losses = -(logarithm * (shares if weight is None else shares * weight.reshape(shape))).sum(dim)
        return losses.sum() / losses.numel() if reduction == 1 else _reduced(losses, reduction)
    loss = _likelihood(logarithm, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return loss
    counts = (target != ignore_index).to(self.dtype)
    spread = -(logarithm if weight is None else logarithm * weight.reshape(shape)).sum(dim) * counts
    if reduction == 1:
        weights = counts if weight is None else counts * weight[target.where(target != ignore_index, 0)]
        spread = spread.sum() / weights.sum()
    else:
        spread = _reduced(spread, reduction)
    return (1 - label_smoothing) * loss + label_smoothing / self.shape[dim] * spread
