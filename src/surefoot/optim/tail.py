"""The last steps of a run: on all data, where mini-batches trained before (:class:`WholeObjective`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.optim.all_data import AllData
from surefoot.optim.limited_memory import LimitedMemory
from surefoot.optim.point import Function, Passed, Point, StreamedPass
from surefoot.optim.wolfe import search

_PAIRS = 10  # of moves and changes of the gradient: few, as networks may be large


class WholeObjective:
    """The objective of all data as a function of the parameters that are trained, roughly, with its gradient.

    Mini-batches go far at first; near the end most of what their steps do is noise. The objective of all data has
    none, and in evaluation mode it is one function of the weights, so that a method with a memory (L-BFGS) needs
    about one gradient per step and lowers it by a factor each time. Nothing relies on that: values and gradients
    are those of the model as it runs, without errors, and what comes out is evaluated before it is kept.

    Args:
        all_data: the objective.
        trained: what the optimizer moves; other parameters stay.
    """

    name = ""

    def __init__(self, all_data: AllData, trained: Iterable[Tensor]) -> None:
        self._all_data, held = all_data, {id(value) for value in trained}
        named = all_data.model.named_parameters()
        self._live = {path: value.detach() for path, value in named if id(value) in held and value.requires_grad}

    def at(self, weights: Mapping[str, Tensor]) -> Passed:
        """One pass, for which the parameters of the model are set to these."""
        self._place(weights)
        found = self._all_data.slopes()
        slopes = {path: slope for path, slope in (found.gradient or {}).items() if path in self._live}
        return StreamedPass(replace(found, gradient=slopes))

    def _place(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for path, value in self._live.items():
                value.copy_(weights[path])

    def descend(self, passes: int) -> int:
        """Move the parameters by L-BFGS steps, with so many passes over all data at most; returns how many."""
        start = {path: value.detach().clone() for path, value in self._live.items()}
        function, direction = Function(self, None, start), LimitedMemory(_PAIRS)
        point, left, known = function.at(start), passes - 1, False

        def trial(step: float) -> Point:
            nonlocal left
            left -= 1
            return function.near(point, aim, step)

        while point.gradient_norm > 0 and left > 0:
            aim, first = direction.propose(point)
            found = search(point, aim, trial, first, trials=left)
            if found is not None:
                direction.learn(point, found.point, found.step)
                point = found.point
            elif known:
                direction.forget()
            else:
                break
            known = found is not None
        self._place(point.weights)
        return passes - left
