"""The gradient of an objective over several batches, with a proved bound on its error.

Gradients of batches are added up by weight in double precision, over batches and processes. Their errors add up,
and the round-off of the sums is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.errors import EvaluationError
from surefoot.processes import Processes

T = TypeVar("T")


class Weighted(Protocol):
    """Batches."""

    def __call__(self, ask: Callable[[int, Analysis, Fraction], T]) -> list[T]:
        """What is asked of each: its number, its analysis, its weight."""


@dataclass
class _Part:
    """The batches of one process, added up by weight."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # gradients by path
    errors: dict[str, float] = field(default_factory=dict)  # bounds on the norms of their errors
    sizes: dict[str, float] = field(default_factory=dict)  # sums of the norms of what was added
    blocks: dict[str, list[str]] = field(default_factory=dict)  # paths by block
    value: float = 0.0
    total: Fraction = Fraction(0)  # of the weights
    count: int = 0  # of the batches


class ProvedSum:
    """The gradient at the weights; compare :class:`surefoot.calculus.adjoint.gradient.ProvedGradient`.

    All processes make it at the same time.

    Args:
        batches: the batches of this process.
        like: the parameters, by path.
        is_mean: whether the objective divides by the weights.
        processes: all processes, or ``None`` for this one alone.

    Attributes:
        value: the value of the objective, as computed.
        slopes: the gradient by path of the parameter.
        errors: bounds on the norms of its errors, by path.
        blocks: the paths of each block.

    Raises:
        EvaluationError: if there is nothing to add up.
    """

    def __init__(
        self, batches: Weighted, like: Mapping[str, Tensor], is_mean: bool, processes: Processes | None
    ) -> None:
        self._batches, self._processes = batches, processes
        here = self._here() if processes is None else processes.together(self._here)
        without_sums = replace(here, sums={})
        parts = [without_sums] if processes is None else processes.gathered(lambda: without_sums)
        self.blocks = next((part.blocks for part in parts if part.blocks), {})
        total = sum((part.total for part in parts), Fraction(0))
        if not self.blocks or not total:
            raise EvaluationError("no batch has a sample with a weight: there is no gradient")
        paths = [path for paths in self.blocks.values() for path in paths]
        sums = {p: here.sums.get(p, torch.zeros_like(like[p], dtype=torch.float64)) for p in paths}
        if processes is not None:
            processes.add(sums.values())
        self._whole = float(total) if is_mean else 1.0
        rounding = (sum(part.count for part in parts) + len(parts) + 9) * 2.0**-52
        self.value = sum(part.value for part in parts) / self._whole
        self.slopes = {path: value / self._whole for path, value in sums.items()}
        off = {
            p: sum(part.errors.get(p, 0.0) + rounding * part.sizes.get(p, 0.0) for part in parts) for p in paths
        }
        self.errors = {path: lost / self._whole * (1 + 1e-12) + 2.0**-1000 for path, lost in off.items()}
        self._sizes = {path: float(torch.linalg.vector_norm(slope)) for path, slope in self.slopes.items()}

    def _here(self) -> _Part:
        part = _Part()

        def add(_: int, analysis: Analysis, weight: Fraction) -> None:
            proved, factor = proved_gradient(analysis), float(weight)
            part.blocks = {block: [leaf.path for leaf in leaves] for block, leaves in analysis.variables().items()}
            for path in (path for paths in part.blocks.values() for path in paths):
                slope = proved.slopes[path] * factor
                part.sums[path] = part.sums[path].add_(slope) if path in part.sums else slope
                part.errors[path] = part.errors.get(path, 0.0) + proved.errors[path] * factor * (1 + 2.0**-50)
                part.sizes[path] = part.sizes.get(path, 0.0) + float(torch.linalg.vector_norm(slope)) * 1.0001
            part.value += factor * proved.value
            part.total += weight
            part.count += 1

        self._batches(add)
        return part

    def norms(self) -> dict[str, float]:
        """Bounds on the norm of the gradient, by block."""
        sizes = {}
        for block, paths in self.blocks.items():
            size = math.hypot(*(self._sizes[path] for path in paths))
            sizes[block] = (size + sum(self.errors[path] for path in paths)) * (1 + 1e-12) + 2.0**-1000
        return sizes
