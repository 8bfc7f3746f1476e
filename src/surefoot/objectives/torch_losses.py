"""Losses of torch.nn as objectives with constants, and models that return their loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from surefoot.errors import ObjectiveError
from surefoot.graph.nodes import Spec
from surefoot.objectives.base import Loss, Objective, shape_of
from surefoot.objectives.cross_entropy import CrossEntropy, NegativeLogLikelihood
from surefoot.objectives.entrywise import (
    Absolute,
    BinaryCrossEntropy,
    Divergence,
    Huber,
    Poisson,
    SoftMargin,
    Square,
)


def from_torch(loss: nn.Module, targets: Any = None) -> Objective:
    """The objective whose value is that of a loss of torch.nn, up to round-off.

    Args:
        loss: one of CrossEntropyLoss, MSELoss, BCEWithLogitsLoss, HuberLoss, SmoothL1Loss, L1Loss, NLLLoss,
            KLDivLoss, SoftMarginLoss, MultiLabelSoftMarginLoss and PoissonNLLLoss, with its options.
        targets: targets to bind to the objective, or ``None``.

    Raises:
        ObjectiveError: if there are no constants for it, or its reduction is ``"none"``.

    >>> outputs, y = torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 0.0]])
    >>> float(sf.objectives.from_torch(nn.MSELoss(), y)(outputs)), float(nn.MSELoss()(outputs, y))
    (5.0, 5.0)
    """
    kind = type(loss)
    if kind in _REFUSED:
        raise ObjectiveError(f"{kind.__name__} is not covered: {_REFUSED[kind]}")
    if kind not in _READERS:
        covered = ", ".join(sorted(cls.__name__ for cls in _READERS))
        raise ObjectiveError(
            f"{kind.__name__} is not covered: from_torch reads {covered}, not what is derived from them. Any "
            "module that maps the outputs to one number may be given to surefoot.certify as it is"
        )
    if loss.reduction == "none":
        raise ObjectiveError(f"{kind.__name__} with reduction='none' is no single number: use 'mean' or 'sum'")
    objective = _READERS[kind](loss)
    return objective if targets is None else objective.bound_to(targets)


def as_objective(given: object, targets: Any = None) -> nn.Module:
    """Turn a loss of torch.nn into an objective, and bind targets to it; other modules stay as they are.

    Args:
        given: an objective, a loss of torch.nn, or any module that maps the outputs to one number.
        targets: targets to bind to it, or ``None``.

    Raises:
        ObjectiveError: if it is none of these, or targets are given to what takes none.

    >>> float(sf.objectives.as_objective(nn.MSELoss(), torch.zeros(1, 2))(torch.tensor([[3.0, 1.0]])))
    5.0
    """
    if not isinstance(given, nn.Module):
        name = getattr(given, "__name__", repr(given)[:40])
        if isinstance(given, type) and issubclass(given, nn.Module):
            name = f"the class {name}: write {name}()"
        raise ObjectiveError(
            f"an objective is a loss such as surefoot.CrossEntropy(y) or torch.nn.CrossEntropyLoss(), or a module "
            f"that maps the outputs to one number, got {name}"
        )
    if type(given) in _READERS or type(given) in _REFUSED:
        given = from_torch(given)
    if targets is None:
        return given
    if not isinstance(given, Objective):
        raise ObjectiveError(f"{type(given).__name__} is no loss with targets: leave y out")
    if given.targets is not None:
        raise ObjectiveError(f"{type(given).__name__} has its targets already: leave y out")
    return given.bound_to(targets)


def _read(kind: type[Loss], loss: Any, **changed: Any) -> Loss:
    """The loss with the options of torch's; a mean in torch is over all entries, or over weighted samples."""
    options = {name: getattr(loss, name) for name in kind.facts().options if hasattr(loss, name)}
    if "entries" in kind.reductions:
        options["reduction"] = {"batchmean": "mean", "mean": "entries", "sum": "sum"}[loss.reduction]
    return kind(**{**options, **changed})


def _cross_entropy(loss: Any) -> Loss:
    if loss.label_smoothing == 1.0:
        raise ObjectiveError("label_smoothing=1 leaves nothing of the targets: use a value below 1")
    return _read(CrossEntropy, loss, class_dim=1)


def _smooth_absolute(loss: Any) -> Loss:
    """Torch's smooth L1 is the Huber loss over β, and the absolute value for β = 0."""
    if loss.beta == 0:
        return _read(Absolute, loss)
    return _read(Huber, loss, delta=loss.beta, scale=1 / loss.beta)


def _many_labels(loss: Any) -> Loss:
    """Torch's loss of many labels: a mean over the classes for each sample, then a mean or a sum."""
    return _read(BinaryCrossEntropy, loss, reduction="entries" if loss.reduction == "mean" else "row")


def _poisson(loss: Any) -> Loss:
    if not loss.log_input:
        raise ObjectiveError(
            "PoissonNLLLoss with log_input=False is defined for positive outputs only: return logarithms of rates "
            "and use log_input=True"
        )
    return _read(Poisson, loss)


_READERS: dict[type, Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.MSELoss: partial(_read, Square, scale=2.0),
    nn.BCEWithLogitsLoss: partial(_read, BinaryCrossEntropy),
    nn.HuberLoss: partial(_read, Huber),
    nn.SmoothL1Loss: _smooth_absolute,
    nn.L1Loss: partial(_read, Absolute),
    nn.NLLLoss: partial(_read, NegativeLogLikelihood, class_dim=1),
    nn.KLDivLoss: partial(_read, Divergence),
    nn.SoftMarginLoss: partial(_read, SoftMargin),
    nn.MultiLabelSoftMarginLoss: _many_labels,
    nn.PoissonNLLLoss: _poisson,
}

_SEVERAL = "it compares several outputs; write it as a module that maps one output to one number"
_HINGE = "it has kinks, and no smoothness; use a logistic loss such as SoftMarginLoss"
_REFUSED: dict[type, str] = {
    nn.BCELoss: "its slope is infinite at probabilities 0 and 1; return logits and use BCEWithLogitsLoss",
    nn.GaussianNLLLoss: "it is neither convex nor smooth in the variance; fix the variance and use MSELoss",
    nn.CosineEmbeddingLoss: _SEVERAL,
    nn.TripletMarginLoss: _SEVERAL,
    nn.TripletMarginWithDistanceLoss: _SEVERAL,
    nn.MarginRankingLoss: _SEVERAL,
    nn.HingeEmbeddingLoss: _HINGE,
    nn.MultiMarginLoss: _HINGE,
    nn.MultiLabelMarginLoss: _HINGE,
    nn.CTCLoss: "it sums over alignments; no constants are known",
    nn.AdaptiveLogSoftmaxWithLoss: "it has parameters of its own; make it part of the model",
}


class ModelLoss(Objective):
    """The loss that the model itself computes and returns, from targets among its inputs.

    It is not claimed to be convex or non-negative, so optimizers need a lower bound for some guarantees.

    >>> float(sf.objectives.ModelLoss()(torch.tensor(3.0)))
    3.0
    """

    operation = "surefoot.returned"
    takes_targets = False

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse outputs of more than one number."""
        if outputs.numel != 1:
            raise ObjectiveError(
                f"ModelLoss is for models that return one number, their loss, got {shape_of(outputs)} outputs"
            )
