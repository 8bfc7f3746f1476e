"""The domain as a set of vectors: all variables side by side in one vector, in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from surefoot.domains import Region

_Factor = Callable[[float, float], float]

# Points are kept this much inside the domain, so that rounding does not carry them out of it.
_INSIDE = 1 - 2.0**-40


@dataclass(frozen=True, eq=False)
class Space:
    r"""A product of balls :math:`\{u : \|u_g - c_g\|_2 \le r_g \text{ for every group } g\}`.

    Attributes:
        names: of the variable tensors, in the order in which they lie in the vector.
        shapes: of the variable tensors.
        center: the vector :math:`c`.
        groups: positions in ``names`` that share a radius, with that radius.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    center: Tensor
    groups: tuple[tuple[tuple[int, ...], float], ...]

    @classmethod
    def of(cls, region: Region, centers: Mapping[str, Tensor]) -> Space:
        """A region, with the centres of its variables by name."""
        values = [centers[name].to(torch.float64) for name in region.variables]
        flat = torch.cat([value.reshape(-1) for value in values])
        return cls(region.variables, tuple(value.shape for value in values), flat, region.groups)

    @cached_property
    def radius(self) -> float:
        """The largest radius: the scale of the domain."""
        return max(radius for _, radius in self.groups)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The variables by name, as views of a vector."""
        parts = vector.split([shape.numel() for shape in self.shapes])
        return {
            name: part.reshape(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def project(self, vector: Tensor) -> Tensor:
        """The nearest point of the domain, a hair inside of it."""
        return self.center + self._per_group(
            vector - self.center, lambda size, radius: min(1.0, _ratio(radius * _INSIDE, size))
        )

    def ascend(self, vector: Tensor, gradient: Tensor, step: float) -> Tensor:
        """The projection of a step along the gradient whose part in every group is ``step`` of its radius long."""
        return self.project(vector + self._per_group(gradient, lambda size, radius: _ratio(step * radius, size)))

    def random(self, generator: torch.Generator, fraction: float = 1.0) -> Tensor:
        """A random point at a fraction of the radius from the centre in every group."""
        noise = torch.randn(self.center.shape, dtype=torch.float64, generator=generator).to(self.center.device)
        return self.project(
            self.center + self._per_group(noise, lambda size, radius: _ratio(fraction * radius, size))
        )

    def _per_group(self, vector: Tensor, factor: _Factor) -> Tensor:
        """The vector with the part in every group scaled by a function of its norm and the group's radius."""
        parts = list(vector.split([shape.numel() for shape in self.shapes]))
        for members, radius in self.groups:
            size = math.hypot(*(float(torch.linalg.vector_norm(parts[k])) for k in members))
            scale = factor(size, radius)
            for k in members:
                parts[k] = parts[k] * scale
        return torch.cat(parts)


def _ratio(wanted: float, size: float) -> float:
    """By what to multiply a vector of this norm to give it the wanted one; zero stays zero."""
    return wanted / size if size > 0 else 0.0


def unit(vector: Tensor) -> Tensor:
    """The vector divided by its norm; zero stays zero."""
    size = torch.linalg.vector_norm(vector)
    return vector / size if bool(size > 0) else vector


def flat(values: Sequence[Tensor]) -> Tensor:
    """Tensors side by side in one vector."""
    return torch.cat([value.reshape(-1) for value in values])
