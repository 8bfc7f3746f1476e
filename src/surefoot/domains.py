r"""Domains: the sets over which certificates hold.

* :class:`ProductBall`: every block in a ball of its own, the paper's
  :math:`C = \bigotimes_t B_{R_t}(\mathbb{R}^{p_t})` (Prop. smoothdeep), around the origin or around a point
  (Corollary smoothball).
* :class:`Ball`: all variables together in one ball.
* :class:`Box`: every entry in an interval.
* :class:`Segment`: from the present weights along a direction, for a single step.

A variable is a parameter tensor, or with ``wrt="input"`` an input tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.magnitude import Magnitude

Center = Literal["origin", "present"] | Mapping[str, Any]
VARIABLES = {"params": "parameters", "input": "the input"}  # what varies, in words, by the argument ``wrt``


class DomainError(SurefootError, ValueError):
    """The domain does not fit the model."""


@dataclass(frozen=True)
class ProductBall:
    r"""Every block :math:`s` within :math:`R_s` of its centre: :math:`\|u_s - u_s^*\|_2 \le R_s`.

    Args:
        radius: one for all blocks, or one per block, by module path.
        center: ``"origin"`` (the default: no weights needed), ``"present"`` for the model's weights, or
            a mapping from parameter paths to tensors.

    >>> print(sf.ProductBall(1.0))
    each block within 1 of the origin
    """

    radius: float | Mapping[str, float]
    center: Center = "origin"

    def __post_init__(self) -> None:
        for radius in self.radius.values() if isinstance(self.radius, Mapping) else [self.radius]:
            _check_radius(radius)

    def groups(self, blocks: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], float]]:
        """The variables that share a radius, with that radius."""
        if not isinstance(self.radius, Mapping):
            return [(variables, float(self.radius)) for variables in blocks.values()]
        if self.radius.keys() != blocks.keys():
            missing = sorted(blocks.keys() - self.radius.keys()) + sorted(self.radius.keys() - blocks.keys())
            raise DomainError(
                f"the radii do not name exactly the blocks of the model: check {', '.join(map(repr, missing))}"
            )
        return [(variables, float(self.radius[path])) for path, variables in blocks.items()]

    def extent(self, blocks: Iterable[str]) -> dict[str, float]:
        """The largest distance of each block from its centre."""
        radius = self.radius
        return {path: float(radius[path] if isinstance(radius, Mapping) else radius) for path in blocks}

    def __str__(self) -> str:
        where = "the origin" if self.center == "origin" else "its centre"
        size = "its own radius" if isinstance(self.radius, Mapping) else f"{self.radius:g}"
        return f"each block within {size} of {where}"


@dataclass(frozen=True)
class Ball:
    r"""All variables together within :math:`r` of the centre: :math:`\|u - u^*\|_2 \le r`.

    Args:
        radius: :math:`r`; zero is the point itself.
        center: ``"present"`` (the default), ``"origin"``, or a mapping from parameter paths to tensors.

    >>> print(sf.Ball(0.1))
    all variables together within 0.1 of the centre
    """

    radius: float
    center: Center = "present"

    def __post_init__(self) -> None:
        _check_radius(self.radius)

    def groups(self, blocks: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], float]]:
        """The variables that share a radius, with that radius."""
        return [(tuple(name for variables in blocks.values() for name in variables), float(self.radius))]

    def extent(self, blocks: Iterable[str]) -> float:
        """The largest distance from the centre."""
        return float(self.radius)

    def __str__(self) -> str:
        where = "the origin" if self.center == "origin" else "the centre"
        return f"all variables together within {self.radius:g} of {where}"


Bound = float | Mapping[str, Tensor | float]


@dataclass(frozen=True)
class Box:
    r"""Every entry of every variable in an interval: :math:`a_i \le u_i \le b_i`.

    A certificate over a box is one over the balls that contain its blocks: by Pythagoras, block s is within half
    of its diagonal, :math:`\frac12(\sum_{i \in s}(b_i - a_i)^2)^{1/2}`, of its middle.

    Args:
        lower: :math:`a`, one number for all entries, or numbers and tensors by parameter path.
        upper: :math:`b`, in the same form.

    >>> balls = sf.Box(-1.0, 1.0).around({"0": ("0.weight", "0.bias")}, {"0.weight": (3, 1), "0.bias": (1,)})
    >>> 2.0 <= balls.radius["0"] < 2.0 + 1e-12
    True
    """

    lower: Bound
    upper: Bound

    def ends(self, path: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The bounds of the entries of one variable, in double precision."""
        ends = []
        for bound in (self.lower, self.upper):
            if isinstance(bound, Mapping) and path not in bound:
                raise DomainError(f"the box has no bound for '{path}'")
            end = torch.as_tensor(bound[path] if isinstance(bound, Mapping) else bound).detach().double()
            if end.ndim and tuple(end.shape) != shape:
                raise DomainError(f"the bound of '{path}' has shape {tuple(end.shape)}, not {shape}")
            ends.append(end.expand(shape))
        lower, upper = ends
        if not bool((lower <= upper).all() and torch.isfinite(upper - lower).all()):
            raise DomainError(f"the bounds of '{path}' are finite numbers, the lower not above the upper")
        return lower, upper

    def contains(self, path: str, value: Tensor) -> bool:
        """Whether a value of a variable lies in the box."""
        lower, upper = (end.to(value.device) for end in self.ends(path, tuple(value.shape)))
        return bool(((value.detach() >= lower) & (value.detach() <= upper)).all())

    def around(self, blocks: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]) -> ProductBall:
        r"""Balls that contain the box; the errors of middles and differences, :math:`u(|a| + |b|)`, are added."""
        centre, radii = {}, {}
        for block, paths in blocks.items():
            total = 0.0
            for path in paths:
                lower, upper = self.ends(path, shapes[path])
                centre[path] = lower / 2 + upper / 2
                half = (upper - lower) / 2 + (lower.abs() + upper.abs()) * 2.0**-51 + 2.0**-1000
                total += float(half.square().sum()) * (1 + (half.numel() + 8) * 2.0**-52)
            radii[block] = total**0.5 * (1 + 2.0**-50)
        return ProductBall(radii, center=centre)

    def __str__(self) -> str:
        if isinstance(self.lower, float | int) and isinstance(self.upper, float | int):
            return f"every entry between {self.lower:g} and {self.upper:g}"
        return "every entry between bounds of its own"


@dataclass(frozen=True)
class Segment:
    r"""The points :math:`u + \eta d` with :math:`0 \le \eta \le \bar\eta`, from the present weights.

    Args:
        direction: d, from parameter paths to tensors; parameters that are not named do not move. ``None`` is the
            direction of steepest descent of the objective.
        length: :math:`\bar\eta`.
        order: number of Taylor coefficients, from 2 to 5: more coefficients cost more and prove longer steps.

    >>> sf.Segment(None, 0.1).order
    4
    """

    direction: Mapping[str, Tensor] | None
    length: float
    order: int = 4

    def __post_init__(self) -> None:
        _check_radius(self.length)
        if self.order not in range(2, 6):
            raise DomainError(f"a segment carries 2 to 5 Taylor coefficients, got {self.order!r}")

    def __str__(self) -> str:
        where = "the direction of steepest descent" if self.direction is None else "the direction"
        return f"from the present weights along {where}, up to a step of {self.length:g}"


Domain = ProductBall | Ball


def _check_radius(radius: Any) -> None:
    try:
        valid = 0 <= float(radius) < float("inf")
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise DomainError(f"a radius is a finite number ≥ 0, got {radius!r}")


@dataclass(frozen=True)
class Region:
    r"""A domain as a set of values of variables.

    Attributes:
        variables: names of the variable tensors; positions in this tuple index every Lipschitz vector.
        groups: positions that share a radius, with that radius.
        blocks: positions by block path, for reports.
    """

    variables: tuple[str, ...]
    groups: tuple[tuple[tuple[int, ...], float], ...]
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, domain: Domain, blocks: Mapping[str, tuple[str, ...]]) -> Region:
        """The region of a domain, for these blocks of variables."""
        variables = tuple(name for names in blocks.values() for name in names)
        position = {name: k for k, name in enumerate(variables)}
        groups = tuple((tuple(position[n] for n in names), radius) for names, radius in domain.groups(blocks))
        return cls(variables, groups, {path: tuple(position[n] for n in names) for path, names in blocks.items()})

    @cached_property
    def radii(self) -> dict[str, float]:
        """The largest distance of each variable from its centre."""
        return {self.variables[position]: radius for members, radius in self.groups for position in members}

    @cached_property
    def _rows(self) -> tuple[np.ndarray, Magnitude]:
        """The positions of each group, padded with one beyond the last variable, and its radius."""
        radii = Magnitude.of(np.array([radius for _, radius in self.groups]))
        return self.filled_up([members for members, _ in self.groups]), radii

    def filled_up(self, parts: Collection[Sequence[int]]) -> np.ndarray:
        """Positions, with a row for each part, padded with one beyond the last variable."""
        width, beyond = max(map(len, parts), default=0), len(self.variables)
        rows = [[*members, *[beyond] * (width - len(members))] for members in parts]
        return np.array(rows, dtype=np.intp).reshape(len(rows), width)

    def reach(self, lipschitz: Magnitude) -> Magnitude:
        r"""A bound on how far a function with these Lipschitz constants moves on the domain.

        By the mean-value inequality along the segment from the centre (the domain is convex)
        :math:`\|z(u) - z(u^*)\| \le \sum_s \ell_s\|u_s - u_s^*\|`, and by Cauchy-Schwarz the supremum over a
        group of variables with joint radius :math:`r` is :math:`r (\sum_s \ell_s^2)^{1/2}`.
        """
        rows, radii = self._rows
        return (Magnitude(np.append(lipschitz.log2, -np.inf))[rows].norm(axis=1) * radii).sum()
