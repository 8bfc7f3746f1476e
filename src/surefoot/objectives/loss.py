"""What supervised losses share: a scale, what is averaged, and checks of options."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, TypedDict

import torch
from torch import Tensor

from surefoot.graph.nodes import Spec
from surefoot.objectives.base import Objective
from surefoot.objectives.constants import ObjectiveError
from surefoot.operations.losses.sums import Numbers


class Averaging(TypedDict, total=False):
    """The options that all losses have."""

    reduction: str
    scale: float


class Loss(Objective):
    """A loss of outputs and targets.

    Args:
        targets: bound to the loss, or ``None``.
        reduction: ``"mean"`` over the samples of sums over the entries of each; ``"sum"`` over everything;
            ``"entries"``, the mean over all entries, as losses of torch.nn have it; ``"row"``, the sum over the
            samples of the means over the entries of each.
        scale: a positive factor.
        own: the other options of its function.

    Raises:
        ObjectiveError: if an option is not one of these.
    """

    reductions: tuple[str, ...] = ("mean", "sum", "entries", "row")
    low, high, allowed = -math.inf, math.inf, ""  # what targets may be, and in words if not all numbers

    def __init__(
        self, targets: Any = None, *, reduction: str = "mean", scale: float = 1.0, **own: Hashable
    ) -> None:
        name, usual = type(self).__name__, self.facts().options
        if reduction not in self.reductions:
            raise ObjectiveError(
                f"the reduction of {name} is one of {', '.join(self.reductions)}, got {reduction!r}"
            )
        if not 0 < float(scale) < math.inf:
            raise ObjectiveError(f"the scale of {name} is a positive number, got {scale!r}")
        if own.keys() - usual.keys():
            raise TypeError(f"{name} has no option {', '.join(sorted(own.keys() - usual.keys()))}")
        self.reduction, self.scale = reduction, float(scale)
        for option in usual.keys() - {"reduction", "scale"}:
            setattr(self, option, own.get(option, usual[option]))
        super().__init__(targets)

    @property
    def options(self) -> dict[str, Hashable]:
        """The keyword arguments of :attr:`function`, by name."""
        return {name: getattr(self, name) for name in self.facts().options}

    @property
    def is_plain(self) -> bool:
        """Whether all options have their usual values: the mean over the samples that the paper speaks of."""
        return not self._unusual()

    def _unusual(self) -> dict[str, Hashable]:
        usual = self.facts().options
        return {name: value for name, value in self.options.items() if value != usual[name]}

    def check_values(self, targets: Tensor) -> None:
        """Targets are finite, and as large as they may be."""
        within = (targets >= self.low) & (targets <= self.high)
        if self.allowed and not bool(within.all()):
            raise ObjectiveError(f"the targets of {type(self).__name__} are {self.allowed}")
        super().check_values(targets)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Targets have the shape of the outputs, and there is at least one number."""
        assert targets is not None
        name = type(self).__name__
        if outputs.shape != targets.shape or not outputs.shape:
            shapes = f"{shape_of(outputs)} and {shape_of(targets)}"
            raise ObjectiveError(f"{name} compares outputs and targets of one shape, got {shapes}")
        refuse_empty(name, outputs)

    def extra_repr(self) -> str:
        """The options that are not the usual ones, and the shape of the targets."""
        given = [f"{name}={_short(value)}" for name, value in self._unusual().items()]
        return ", ".join(filter(None, [*given, super().extra_repr()]))


def refuse_empty(name: str, outputs: Spec) -> None:
    """Refuse outputs without entries, as their mean is not defined."""
    if not outputs.numel:
        raise ObjectiveError(f"{name} of {shape_of(outputs)} outputs is not defined: give at least one sample")


def shape_of(spec: Spec) -> str:
    """A shape as it reads in a sentence."""
    return "×".join(map(str, spec.shape)) or "a number"


def frozen_numbers(value: Any, what: str) -> Numbers | None:
    """Weights as numbers in tuples, which can be compared and hashed.

    Raises:
        ObjectiveError: if one of them is negative or not finite.
    """
    if value is None:
        return None
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObjectiveError(f"{what} is a tensor or what becomes one, got {value!r}") from error
    if not bool(((numbers >= 0) & (numbers < torch.inf)).all()):
        raise ObjectiveError(f"{what} has finite entries ≥ 0, got {value!r}")
    return _tuples(numbers.tolist())


def _tuples(numbers: Any) -> Numbers:
    return tuple(map(_tuples, numbers)) if isinstance(numbers, list) else float(numbers)


def _short(value: Any) -> str:
    return f"{len(value)} numbers" if isinstance(value, tuple) else str(value)
