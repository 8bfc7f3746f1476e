r"""Projection on a product of balls, or on one ball of all parameters.

The nearest point of :math:`\{u : \|u_s - c_s\| \le R_s\}` is found group by group: inside it is the point itself,
outside :math:`c_s + R_s(u_s - c_s)/\|u_s - c_s\|`. Proof: the squared distance is a sum over groups, and on one
ball the triangle inequality gives :math:`\|u - z\| \ge \|u - c\| - R` for every z in it, which that point attains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.domains import Domain, DomainError
from surefoot.enclosure import norm
from surefoot.graph import Graph


@dataclass(frozen=True)
class Balls:
    """A set of parameters: groups of them, each within a radius of its centre.

    Attributes:
        groups: names of parameters that share a radius, with that radius.
        centre: by name, in double precision; zero where a name is missing.
    """

    groups: tuple[tuple[tuple[str, ...], float], ...]
    centre: Mapping[str, Tensor]

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

    def project(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The nearest point of the set, in double precision; what is in no group stays."""
        found = {name: value.detach().double() for name, value in values.items()}
        for names, radius in self.groups:
            inner = {name: found[name] for name in names}
            length = self._distance(inner)
            if length > radius:
                found |= self._scaled(inner, radius / length)
        return found

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

    def _offset(self, name: str, value: Tensor) -> Tensor:
        value = value.detach().double()
        return value - self.centre[name].to(value.device) if name in self.centre else value

    def _distance(self, values: Mapping[str, Tensor]) -> float:
        """Rounded up: the norm is, and each difference errs by a relative 2^-53."""
        return float(norm([self._offset(name, value) for name, value in values.items()]) * (1 + 2.0**-52))

    def _scaled(self, values: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        found = {}
        for name, value in values.items():
            moved = self._offset(name, value) * factor
            found[name] = moved + self.centre[name].to(moved.device) if name in self.centre else moved
        return found


__all__ = ["Balls"]
