"""Layers of a network over a ball around its weights, sample by sample.

For each layer: its values, slopes and second derivatives, and how the outputs depend on it. The notation and the
proofs are those of :mod:`surefoot.theorems.bending`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from surefoot.norms import batched_spectral_norm, spectral_norm
from surefoot.scalar import Rounded, sups_on
from surefoot.theorems.layered import Layer, Layered

UP = 1 + 1e-9
FEW = 3  # kinks that are named


@dataclass(frozen=True)
class Moving:
    """Upper bounds on numbers that move over the ball."""

    here: Tensor  # their size at the weights
    move: Tensor  # how far they move on the ball
    bound: Tensor  # their size on the ball

    @staticmethod
    def of(here: Tensor, move: Tensor) -> Moving:
        """The size on the ball is the sum of the other two."""
        return Moving(here, move, (here + move) * UP)

    def __mul__(self, other: Moving) -> Moving:
        here, bound = self.here * other.here * UP, self.bound * other.bound * UP
        move = (self.here * other.move + self.move * other.bound) * UP
        return Moving(here, torch.minimum(move, here + bound), bound)

    def most(self) -> Moving:
        """The largest in each sample."""
        return Moving(self.here.amax(1), self.move.amax(1), self.bound.amax(1))

    def rows(self) -> Moving:
        """One number per sample as a column."""
        return Moving(self.here[:, None], self.move[:, None], self.bound[:, None])


@dataclass(frozen=True, eq=False)
class Reach:
    """A layer over the ball."""

    layer: Layer  # the layer
    reads: Rounded  # its input at the weights
    before: Rounded  # the output of its linear map there
    rho: float  # how far its weight may move
    steps: Tensor  # how far its input may move, sample by sample
    spread: Tensor | None = None  # how far the output of its linear map may move; ``None`` before it is computed

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.steps)

    @cached_property
    def slopes(self) -> Moving:
        """The slopes, samples × width."""
        return self._moving(1)

    @cached_property
    def bends(self) -> Moving:
        """The second derivatives."""
        return self._moving(2)

    def _moving(self, order: int) -> Moving:
        """A derivative moves by at most the next one times the distance, and by at most twice its supremum."""
        value = self.before.value
        if self.layer.function is None:
            return Moving.of(torch.full_like(value, 2.0 - order), torch.zeros_like(value))
        assert self.spread is not None
        distance = self.spread[:, None]
        wrong = self.before.error.expand(value.shape) * UP + value.abs() * 2.0**-51
        largest, next_one = sups_on(
            self.layer.function, (order, order + 1), value - wrong - distance * UP, value + wrong + distance * UP
        )
        here = sups_on(self.layer.function, (order,), value - wrong, value + wrong)[0]
        moved = torch.minimum(next_one * distance * UP, 2 * largest)
        return Moving(torch.minimum(here, largest), moved, largest)

    @cached_property
    def features(self) -> tuple[Tensor, Tensor]:
        """The factors of the parameters as computed at the weights, and how far their rows may move."""
        wrong = torch.linalg.vector_norm(self.reads.error.expand(self.reads.value.shape), dim=1)
        moved = (self.steps + wrong) * UP if self.layer.trains_weight else torch.zeros_like(self.steps)
        return self.layer.features(self.reads.value), moved

    @cached_property
    def sizes(self) -> Moving:
        """The norms of the rows of :attr:`features`."""
        value, moved = self.features
        return Moving.of(torch.linalg.vector_norm(value, dim=1) * UP, moved)

    @cached_property
    def norm(self) -> float:
        """The norm of the weight over the ball."""
        return (spectral_norm(self.layer.weight) + self.rho) * UP


def reaches_of(layered: Layered, radius: float, roots: Sequence[float]) -> list[Reach]:
    """The layers over the ball, up to the last one whose values are finite."""
    reaches: list[Reach] = []
    paths: list[Tensor] = []  # bounds on how fast the output of this layer's linear map moves with each layer
    steps = torch.zeros(layered.count, dtype=torch.float64)
    for layer, (reads, _, _), before, root in zip(
        layered.layers, layered.states, layered.sums, roots, strict=True
    ):
        reach = Reach(layer, reads, before, radius * root if layer.trains_weight else 0.0, steps)
        if reaches:
            paths = [path * reaches[-1].slopes.bound.amax(1) * reach.norm * UP for path in paths]
        paths.append(reach.sizes.bound * root)
        spread = torch.linalg.vector_norm(torch.stack(paths), dim=0) * (radius * UP)
        if not bool(torch.isfinite(spread).all()):
            break
        reaches.append(replace(reach, spread=spread))
        steps = reaches[-1].slopes.bound.amax(1) * spread * UP
    return reaches


def through_layers(reaches: list[Reach], last: int) -> list[Moving]:
    """Bounds on the derivatives of the output of linear map ``last`` in those of earlier ones, by sample."""
    one = torch.ones(reaches[0].count, dtype=torch.float64)
    derivatives = [Moving.of(one, torch.zeros_like(one))]
    for k in range(last - 1, -1, -1):
        after = reaches[k + 1]
        weight = Moving.of(one * (after.norm - after.rho) * UP, one * after.rho)
        derivatives.insert(0, derivatives[0] * weight * reaches[k].slopes.most())
    return derivatives


@dataclass(frozen=True)
class Outputs:
    """How the outputs depend on a layer over the ball."""

    norms: Moving  # the norm of B, for each sample
    columns: Moving  # the norms of the columns of Q, one per sample and unit


def outputs_of(layered: Layered, reaches: list[Reach]) -> list[Outputs]:
    """How the outputs depend on each layer."""
    dependence: list[Outputs] = []
    varied = size = torch.zeros(layered.count, dtype=torch.float64)  # of B of the layer after
    for k in range(len(reaches) - 1, -1, -1):
        m, (through, slopes) = reaches[k], layered.sensitivities[k]
        columns: Moving
        if through is None:
            one = torch.ones_like(m.before.value)
            columns, varied = Moving.of(one, torch.zeros_like(one)), m.slopes.most().move
        else:
            after = reaches[k + 1]
            lengths = torch.linalg.vector_norm(after.layer.weight, dim=0) + after.rho
            here = torch.linalg.vector_norm(through.bound, dim=1) * UP
            columns = Moving.of(here, (varied[:, None] * lengths + size[:, None] * after.rho) * UP)
            varied = varied * after.norm + size * after.rho
            slope = m.slopes.most()
            varied = (varied * slope.bound + _sample_norms(through) * slope.move) * UP
        size = _sample_norms(slopes)
        dependence.insert(0, Outputs(Moving.of(size, varied), columns))
    return dependence


def _sample_norms(matrices: Rounded) -> Tensor:
    """Bounds on the norms of the exact matrices, one per sample."""
    error = torch.linalg.vector_norm(matrices.error.expand(matrices.value.shape), dim=(1, 2))
    return (batched_spectral_norm(matrices.value) + error) * UP


def kinks_near(m: Reach) -> Iterator[tuple[float, int, str, str]]:
    """The nearest kinks that units may meet: the distance, the sample, and two parts of a sentence about it."""
    bends = m.bends.bound
    if bool(torch.isfinite(bends).all()):
        return
    assert m.spread is not None
    spread = m.spread[:, None].expand(bends.shape)
    room = torch.where(torch.isfinite(bends), math.inf, m.before.value.abs() - spread)
    for place in room.flatten().argsort()[:FEW].tolist():
        n, i = divmod(place, bends.shape[1])
        if not math.isfinite(float(bends[n, i])):
            what = f"reads {float(m.before.value[n, i]):.3g} and moves by up to {float(spread[n, i]):.3g}"
            yield float(room[n, i]), n, f"unit {i} of '{m.layer.after}' may meet a kink", f"it {what}"
