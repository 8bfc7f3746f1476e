r"""Nearest points of sets: products of balls, one ball of all parameters, boxes; with absolute values or without.

Found is :math:`\arg\min_p\frac12\|p - u\|^2 + \sum_i\lambda_i|p_i|` over the set; without :math:`\lambda` it is
the nearest point. For balls that of :math:`\{u : \|u_s - c_s\| \le R_s\}` is found group by group: inside it is
the point itself, outside :math:`c_s + R_s(u_s - c_s)/\|u_s - c_s\|`. Proof: the squared distance is a sum over
groups, and on one ball the triangle inequality gives :math:`\|u - z\| \ge \|u - c\| - R` for every z in it,
which that point attains. With :math:`\lambda` let :math:`S_\lambda(z) = \mathrm{sign}(z)\max(|z| - \lambda, 0)`,
which minimises :math:`\frac12(p - z)^2 + \lambda|p|`. If :math:`S_\lambda(u)` is in the ball, it is the point;
else a multiplier :math:`\mu > 0` of the constraint :math:`\frac12\|p - c\|^2 \le \frac12R^2` makes it that of
:math:`\frac12\|p - u\|^2 + \frac\mu2\|p - c\|^2 + \lambda\|p\|_1`, which is :math:`S_{\lambda/(1+\mu)}((u + \mu
c)/(1 + \mu))`; its distance from :math:`c` falls with :math:`\mu`, so :math:`\mu` is found by bisection. In a
box every entry is for itself: a convex function of one number is least on an interval at the end nearest to its
least point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.domains import Box, Domain, DomainError
from surefoot.enclosure import norm
from surefoot.graph import Graph

Tensors = dict[str, Tensor]
Thresholds = Mapping[str, float]
_NONE: Thresholds = {}
_BISECTIONS = 100


def shrunk(values: Mapping[str, Tensor], thresholds: Thresholds) -> Tensors:
    """Every entry moved towards zero by a threshold, and no farther."""
    found = dict(values)
    for name, threshold in thresholds.items():
        if threshold and name in found:
            found[name] = torch.sign(found[name]) * (found[name].abs() - threshold).clamp_min(0.0)
    return found


@dataclass(frozen=True)
class Balls:
    """A set of parameters: groups of them, each within a radius of its centre."""

    groups: tuple[tuple[tuple[str, ...], float], ...]  # names of parameters that share a radius, with that radius
    centre: Mapping[str, Tensor]  # by name, in double precision; zero where a name is missing

    @classmethod
    def of(cls, domain: Domain, graph: Graph, centre: Mapping[str, Tensor]) -> Balls:
        """A domain read on the trainable parameters of a model.

        Raises:
            DomainError: if the radii do not name exactly the blocks of the model.
        """
        leaves = graph.leaves
        blocks = {
            path: tuple(leaves[name].path for name in block.parameters if leaves[name].trainable)
            for path, block in graph.blocks.items()
        }
        return cls(tuple(domain.groups({path: names for path, names in blocks.items() if names})), centre)

    def distance(self, values: Mapping[str, Tensor]) -> dict[tuple[str, ...], float]:
        """How far each group is from its centre, rounded up."""
        return {names: self._distance({name: values[name] for name in names}) for names, _ in self.groups}

    def contains(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the point is proved to be in the set, round-off included."""
        distance = self.distance(values)
        return all(distance[names] <= radius for names, radius in self.groups)

    def reach(self, values: Mapping[str, Tensor]) -> float:
        """How far any point of the set is from this one, at most."""
        away = self.distance(values)
        return math.hypot(*(radius + away[names] for names, radius in self.groups)) * (1 + 2.0**-48)

    def project(self, values: Mapping[str, Tensor], thresholds: Thresholds = _NONE) -> dict[str, Tensor]:
        """The nearest point of the set, in double precision; what is in no group is free.

        Args:
            values: the point.
            thresholds: the weights of absolute values, by name.
        """
        given = {name: value.detach().double() for name, value in values.items()}
        found = shrunk(given, thresholds)
        for names, radius in self.groups:
            inner = {name: found[name] for name in names}
            length = self._distance(inner)
            if length <= radius:
                continue
            if any(name in self.centre and thresholds.get(name) for name in names):
                found |= self._between({name: given[name] for name in names}, radius, thresholds)
            else:
                found |= self._scaled(inner, radius / length)
        return found

    def _between(self, values: Tensors, radius: float, thresholds: Thresholds) -> Tensors:
        """With absolute values on a ball that is not around the origin: bisection on the multiplier."""

        def at(part: float) -> Tensors:  # 1/(1 + μ)
            mixed = {n: part * value + (1 - part) * self._middle(n, value) for n, value in values.items()}
            return shrunk(mixed, {n: part * thresholds.get(n, 0.0) for n in values})

        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            part = (low + high) / 2
            low, high = (part, high) if self._distance(at(part)) <= radius else (low, part)
        return at(low)

    def rounded(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A point of the set in the precision of ``like``, next to a point of the set in double precision.

        Rounding to the nearest may leave a ball by a unit in the last place. Then the point is drawn towards the
        centre by so much that its rounded version is proved to be inside.

        Raises:
            DomainError: if the radius is so small that the precision has no number within it.
        """
        found = {name: value.to(like[name].dtype) for name, value in values.items()}
        for names, radius in self.groups:
            inner = {name: values[name] for name in names}
            slack = max(
                max(torch.finfo(like[name].dtype).eps for name in names) / 64,
                (sum(value.numel() for value in inner.values()) + 64) * 2.0**-51,
            )
            candidate = {name: found[name] for name in names}
            while self._distance(candidate) > radius:
                if slack > 4:
                    raise DomainError(
                        f"no number of type {found[names[0]].dtype} is within {radius:g} of the centre of "
                        f"'{names[0]}': take a larger radius or double precision"
                    )
                shrunk = self._scaled(inner, max(1.0 - slack, 0.0))
                candidate = {name: shrunk[name].to(like[name].dtype) for name in names}
                slack *= 4
            found |= candidate
        return found

    def _middle(self, name: str, value: Tensor) -> Tensor:
        wide = value.detach().double()
        return self.centre[name].to(wide.device) if name in self.centre else torch.zeros_like(wide)

    def _distance(self, values: Mapping[str, Tensor]) -> float:
        """Rounded up: the norm is, and each difference errs by a relative 2^-53."""
        away = [value.detach().double() - self._middle(name, value) for name, value in values.items()]
        return float(norm(away) * (1 + 2.0**-52))

    def _scaled(self, values: Mapping[str, Tensor], factor: float) -> Tensors:
        middles = {name: self._middle(name, value) for name, value in values.items()}
        return {
            name: (values[name].detach().double() - middle) * factor + middle for name, middle in middles.items()
        }


@dataclass(frozen=True)
class Intervals:
    """A box: every entry of every parameter between two numbers, in double precision."""

    lower: Mapping[str, Tensor]
    upper: Mapping[str, Tensor]

    @classmethod
    def of(cls, box: Box, values: Mapping[str, Tensor]) -> Intervals:
        """A box read on the parameters of a model.

        Raises:
            DomainError: if it does not fit.
        """
        ends = {n: [end.to(v.device) for end in box.ends(n, tuple(v.shape))] for n, v in values.items()}
        return cls({name: pair[0] for name, pair in ends.items()}, {name: pair[1] for name, pair in ends.items()})

    def contains(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the point is in the set."""
        return all(
            bool(((value.detach() >= self.lower[name]) & (value.detach() <= self.upper[name])).all())
            for name, value in values.items()
        )

    def reach(self, values: Mapping[str, Tensor]) -> float:
        """How far any point of the set is from this one, at most."""
        wide = {name: value.detach().double() for name, value in values.items()}
        ends = [torch.maximum(self.upper[n] - value, value - self.lower[n]).abs() for n, value in wide.items()]
        return float(norm(ends)) * (1 + 2.0**-48)

    def project(self, values: Mapping[str, Tensor], thresholds: Thresholds = _NONE) -> Tensors:
        """The nearest point of the set, in double precision."""
        near = shrunk({name: value.detach().double() for name, value in values.items()}, thresholds)
        return {name: torch.clamp(value, self.lower[name], self.upper[name]) for name, value in near.items()}

    def rounded(self, values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
        """A point of the set in the precision of ``like``, next to a point of the set in double precision.

        Raises:
            DomainError: if an interval holds no number of that precision.
        """
        found = {name: value.to(like[name].dtype) for name, value in values.items()}
        for name, value in found.items():
            up, down = torch.full_like(value, torch.inf), torch.full_like(value, -torch.inf)
            value = torch.where(value < self.lower[name], torch.nextafter(value, up), value)
            found[name] = torch.where(value > self.upper[name], torch.nextafter(value, down), value)
        if not self.contains(found):
            raise DomainError("an interval of the box holds no number of the type of the parameters: widen it")
        return found
