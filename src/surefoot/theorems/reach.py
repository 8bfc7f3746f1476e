"""Layers of a network over a ball around its weights, sample by sample: values, slopes, second derivatives, and
how the outputs depend on them; see :mod:`surefoot.theorems.bending` for the notation and the proofs.
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
    """Numbers by what they are at most: at the weights, by how much they move on the ball, and on the ball."""

    here: Tensor
    move: Tensor
    bound: Tensor

    @staticmethod
    def of(here: Tensor, move: Tensor) -> Moving:
        """Where nothing better is known about the ball."""
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
    reads: Rounded  # what it reads at the weights
    before: Rounded  # what its linear map gives there
    rho: float  # how far its weight may move
    steps: Tensor  # how far what it reads may move, sample by sample
    spread: Tensor | None = None  # how far what its linear map gives may move; ``None`` while it is not known

    @property
    def count(self) -> int:
        """How many samples there are."""
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
        """What the parameters are multiplied by, as computed at the weights, and how far rows may be from it."""
        wrong = torch.linalg.vector_norm(self.reads.error.expand(self.reads.value.shape), dim=1)
        moved = (self.steps + wrong) * UP if self.layer.trains_weight else torch.zeros_like(self.steps)
        return features_at(self.layer, self.reads.value), moved

    @cached_property
    def sizes(self) -> Moving:
        """The norms of the rows."""
        value, moved = self.features
        return Moving.of(torch.linalg.vector_norm(value, dim=1) * UP, moved)

    @cached_property
    def norm(self) -> float:
        """The norm of the weight over the ball."""
        return (spectral_norm(self.layer.weight) + self.rho) * UP


def reaches_of(layered: Layered, radius: float, roots: Sequence[float]) -> list[Reach]:
    """The layers over the ball, up to the last one whose values are finite."""
    found: list[Reach] = []
    paths: list[Tensor] = []  # of what each layer gives, over what the layers move by
    steps = torch.zeros(layered.count, dtype=torch.float64)
    for layer, (reads, _, _), before, root in zip(
        layered.layers, layered.states, layered.sums, roots, strict=True
    ):
        met = Reach(layer, reads, before, radius * root if layer.trains_weight else 0.0, steps)
        if found:
            paths = [path * found[-1].slopes.bound.amax(1) * met.norm * UP for path in paths]
        paths.append(met.sizes.bound * root)
        spread = torch.linalg.vector_norm(torch.stack(paths), dim=0) * (radius * UP)
        if not bool(torch.isfinite(spread).all()):
            break
        found.append(replace(met, spread=spread))
        steps = found[-1].slopes.bound.amax(1) * spread * UP
    return found


def through_layers(met: list[Reach], last: int) -> list[Moving]:
    """Bounds on the derivatives of what one linear layer gives in what earlier ones give, sample by sample."""
    one = torch.ones(met[0].count, dtype=torch.float64)
    found = [Moving.of(one, torch.zeros_like(one))]
    for k in range(last - 1, -1, -1):
        weight = Moving.of(one * (met[k + 1].norm - met[k + 1].rho) * UP, one * met[k + 1].rho)
        found.insert(0, found[0] * weight * met[k].slopes.most())
    return found


@dataclass(frozen=True)
class Outputs:
    """How the outputs depend on a layer over the ball: bounds on the norms of B for each sample, and on those of
    the columns of Q, one per unit.
    """

    norms: Moving
    columns: Moving


def outputs_of(layered: Layered, met: list[Reach]) -> list[Outputs]:
    """How the outputs depend on each layer."""
    found: list[Outputs] = []
    varied = size = torch.zeros(layered.count, dtype=torch.float64)  # of B of the layer after
    for k in range(len(met) - 1, -1, -1):
        m, (through, slopes) = met[k], layered.sensitivities[k]
        columns: Moving
        if through is None:
            one = torch.ones_like(m.before.value)
            columns, varied = Moving.of(one, torch.zeros_like(one)), m.slopes.most().move
        else:
            after = met[k + 1]
            lengths = torch.linalg.vector_norm(after.layer.weight, dim=0) + after.rho
            here = torch.linalg.vector_norm(through.bound, dim=1) * UP
            columns = Moving.of(here, (varied[:, None] * lengths + size[:, None] * after.rho) * UP)
            varied = varied * after.norm + size * after.rho
            slope = m.slopes.most()
            varied = (varied * slope.bound + _sample_norms(through) * slope.move) * UP
        size = _sample_norms(slopes)
        found.insert(0, Outputs(Moving.of(size, varied), columns))
    return found


def features_at(layer: Layer, reads: Tensor) -> Tensor:
    """What the parameters of a layer are multiplied by, where it reads this."""
    value = reads.double() if layer.trains_weight else reads[:, :0].double()
    ones = [torch.ones(len(value), 1, dtype=torch.float64)] if layer.trains_bias else []
    return torch.cat([value, *ones], 1)


def _sample_norms(matrices: Rounded) -> Tensor:
    """Bounds on the norms of the exact matrices, one per sample."""
    error = torch.linalg.vector_norm(matrices.error.expand(matrices.value.shape), dim=(1, 2))
    return (batched_spectral_norm(matrices.value) + error) * UP


def kinks_near(m: Reach) -> Iterator[tuple[float, int, str, str]]:
    """Of the units that may meet a kink, the nearest: how far it is, the sample, and what is to be said."""
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
