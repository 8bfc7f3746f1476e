"""What ``train`` and ``step`` work on: a model with numbers, data in two parts, an objective without targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from surefoot.cli.frame import UsageError
from surefoot.cli.request import Request, case, objective_class, one_hot
from surefoot.data import Dataset
from surefoot.objectives import Objective, Reconstruction, Square


@dataclass(frozen=True)
class Subject:
    """A model, the data it is trained and tested on, and the objective."""

    model: nn.Module
    train: Dataset
    test: Dataset
    objective: Objective


def trainable(
    model: str,
    data: str,
    objective: str,
    weights: Path | None,
    smooth: bool,
    evaluation: bool,
    seed: int,
    test: float,
    single: bool,
) -> Subject:
    """Build and load all of it.

    Raises:
        SurefootError: if something does not exist or does not fit.
    """
    kind = objective_class(objective)
    request = Request(data=data, weights=weights, smooth=smooth, evaluation=evaluation, seed=seed, numbers=True)
    given = request.dataset
    assert given is not None
    if given.y is None and kind.takes_targets and kind is not Reconstruction:
        raise UsageError(f"--data {data} has no targets y, which --objective {objective} needs")
    found = case(model, request)
    if not any(value.requires_grad for value in found.model.parameters()):
        raise UsageError(f"'{model}' has no parameter that asks for gradients: there is nothing to train")
    dtype = torch.float32 if single else torch.float64
    y = (found.x if kind is Reconstruction else found.targets) if kind.takes_targets else None
    if kind is Square and y is not None and not y.is_floating_point():
        y = one_hot(y, given.classes or 1, dtype)
    whole = replace(given, x=found.x, y=y).to(dtype)
    train, held = whole.split(1 - test, seed)
    if not len(train):
        raise UsageError(f"--data {data} leaves no sample to train on: it has {len(given)}")
    return Subject(found.model.to(dtype), train, held, kind())
