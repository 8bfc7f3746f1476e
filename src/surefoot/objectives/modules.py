"""Losses of torch.nn and any other modules as objectives, and models that return their loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.errors import ObjectiveError
from surefoot.objectives.classes import CrossEntropy
from surefoot.objectives.entrywise import BinaryCrossEntropy, Huber, Poisson, SoftMargin, Square
from surefoot.objectives.loss import Loss, Objective, Shaped, shape_of


def from_torch(loss: nn.Module, targets: Any = None) -> Objective:
    """The objective whose value is that of a loss of torch.nn, up to round-off.

    Args:
        loss: one of CrossEntropyLoss, MSELoss, BCEWithLogitsLoss, HuberLoss, SmoothL1Loss, SoftMarginLoss,
            MultiLabelSoftMarginLoss and PoissonNLLLoss, with its options.
        targets: targets to bind to the objective, or ``None``.

    Raises:
        ObjectiveError: if it is another loss, or its reduction is ``"none"``.

    >>> outputs, y = torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 0.0]])
    >>> float(sf.objectives.from_torch(nn.MSELoss(), y)(outputs)), float(nn.MSELoss()(outputs, y))
    (5.0, 5.0)
    """
    kind = type(loss)
    if kind not in _READERS:
        why = _REFUSED.get(kind, f"from_torch reads {', '.join(sorted(cls.__name__ for cls in _READERS))}")
        raise ObjectiveError(f"{kind.__name__} is not covered: {why}. A module that maps outputs to one number "
                             "is a loss, too")  # fmt: skip
    if loss.reduction == "none":
        raise ObjectiveError(f"{kind.__name__} with reduction='none' is no single number: use 'mean' or 'sum'")
    objective = _READERS[kind](loss)
    return objective if targets is None else objective.bound_to(targets)


def as_objective(loss: object, targets: Any = None) -> Objective:
    """An objective from an objective, a loss of torch.nn or any module that maps the outputs to one number.

    Raises:
        ObjectiveError: if it is none of these, or targets are given to what takes none.

    >>> float(sf.objectives.as_objective(nn.MSELoss(), torch.zeros(1, 2))(torch.tensor([[3.0, 1.0]])))
    5.0
    """
    if not isinstance(loss, nn.Module):
        name = getattr(loss, "__name__", repr(loss)[:40])
        if isinstance(loss, type) and issubclass(loss, nn.Module):
            name = f"the class {name}: write {name}()"
        raise ObjectiveError(
            f"an objective is a loss such as surefoot.CrossEntropy(y) or torch.nn.CrossEntropyLoss(), or a module "
            f"that maps the outputs to one number, got {name}"
        )
    if isinstance(loss, Objective):
        objective = loss
    else:
        objective = from_torch(loss) if type(loss) in _READERS or type(loss) in _REFUSED else OwnLoss(loss)
    if targets is None:
        return objective
    name = type(loss).__name__
    if not objective.takes_targets:
        raise ObjectiveError(f"{name} is no loss with targets: leave y out")
    if objective.targets is not None:
        raise ObjectiveError(f"{name} has its targets already: leave y out")
    return objective.bound_to(targets)


def _read(kind: type[Loss], loss: Any, **changed: Any) -> Loss:
    """The loss with the options of torch's; a mean in torch is over all entries, or over weighted samples."""
    options = {name: getattr(loss, name) for name in (*kind.defaults, "reduction") if hasattr(loss, name)}
    if "entries" in kind.reductions:
        options["reduction"] = {"mean": "entries", "sum": "sum"}[loss.reduction]
    return kind(**{**options, **changed})


def _many_labels(loss: Any) -> Loss:
    """Torch's loss of many labels: a mean over the classes for each sample, then a mean or a sum."""
    return _read(BinaryCrossEntropy, loss, reduction="entries" if loss.reduction == "mean" else "row")


def _smooth_absolute(loss: Any) -> Loss:
    """Torch's smooth L1 is the Huber loss over β."""
    if loss.beta == 0:
        raise ObjectiveError(f"SmoothL1Loss with beta=0 is not covered: {_KINKS}")
    return _read(Huber, loss, delta=loss.beta, scale=1 / loss.beta)


def _poisson(loss: Any) -> Loss:
    if not loss.log_input:
        raise ObjectiveError(
            "PoissonNLLLoss with log_input=False is defined for positive outputs only: return logarithms of rates "
            "and use log_input=True"
        )
    return _read(Poisson, loss)


_READERS: dict[type, Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: partial(_read, CrossEntropy, class_dim=1),
    nn.MSELoss: partial(_read, Square, scale=2.0),
    nn.BCEWithLogitsLoss: partial(_read, BinaryCrossEntropy),
    nn.HuberLoss: partial(_read, Huber),
    nn.SmoothL1Loss: _smooth_absolute,
    nn.SoftMarginLoss: partial(_read, SoftMargin),
    nn.MultiLabelSoftMarginLoss: _many_labels,
    nn.PoissonNLLLoss: _poisson,
}

_KINKS = "it has kinks, and no smoothness; use a smooth loss such as HuberLoss or SoftMarginLoss"
_SCORES = "it reads logarithms of probabilities; return scores and use CrossEntropyLoss"
_REFUSED: dict[type, str] = {
    **dict.fromkeys([nn.L1Loss, nn.HingeEmbeddingLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss], _KINKS),
    **dict.fromkeys([nn.NLLLoss, nn.KLDivLoss], _SCORES),
    nn.BCELoss: "its slope is infinite at probabilities 0 and 1; return logits and use BCEWithLogitsLoss",
    nn.GaussianNLLLoss: "it is neither convex nor smooth in the variance; fix the variance and use MSELoss",
}


class ModelLoss(Objective):
    """The loss that the model itself computes and returns, from targets among its inputs.

    It is not claimed to be non-negative, so optimizers need a lower bound for some guarantees. As a function of
    the one output it is the identity.

    >>> float(sf.objectives.ModelLoss()(torch.tensor(3.0)))
    3.0
    """

    operation = "surefoot.returned"
    takes_targets = False
    convex = True

    @staticmethod
    def function(outputs: Tensor) -> Tensor:
        return outputs.reshape(())

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        if torch.Size(outputs.shape).numel() != 1:
            raise ObjectiveError(
                f"ModelLoss is for models that return one number, their loss, got {shape_of(outputs)} outputs"
            )

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        return 1.0, 0.0


class OwnLoss(Objective):
    """Any module that maps the outputs to one number, as an objective: its value and its derivatives.

    Args:
        module: maps the outputs to one number.
        convex: whether it is convex in the outputs.
        nonnegative: whether it is never negative.
    """

    takes_targets = False

    def __init__(self, module: nn.Module, *, convex: bool = False, nonnegative: bool = False) -> None:
        super().__init__()
        self.module, self.convex, self.nonnegative = module, convex, nonnegative

    def forward(self, outputs: Tensor, targets: Any = None) -> Tensor:
        if targets is not None:
            raise ObjectiveError(f"{type(self.module).__name__} reads outputs only: leave y out")
        value: Tensor = self.module(outputs)
        if value.numel() != 1:
            raise ObjectiveError(f"an objective returns one number, got {shape_of(value)} numbers")
        return value.reshape(())
