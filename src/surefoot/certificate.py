"""The certificate: constants with a proof, what they rest on, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.lower import Estimate


@dataclass(frozen=True)
class Row:
    """One operation of the table.

    Attributes:
        module: path of the module that calls it.
        operation: its name.
        shape: of the result.
        bound: on the norm of the result.
        lipschitz: of the result in the variables.
        smoothness: of the result in the variables.
        share: of the operation's own curvature in the smoothness of the output, between 0 and 1.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    bound: Magnitude
    lipschitz: Magnitude
    smoothness: Magnitude
    share: float


@dataclass(frozen=True)
class Certificate:
    r"""Proved bounds of a function over a domain.

    Attributes:
        bound: :math:`m \ge \sup\|f\|_2`.
        lipschitz: :math:`\ell \ge \sup\|Df\|_{2,2}`.
        smoothness: :math:`L \ge \sup\|D^2f\|_{2,2,2}`.
        block_lipschitz: the Lipschitz constant with respect to each block alone.
        block_smoothness: the matrix of bounds for pairs of blocks, in the order of ``block_lipschitz``.
        reasons: why the smoothness is infinite, and what to do about it.
        domain: where it holds, in words.
        wrt: what varies.
        constants: ``"certified"``, or ``"paper"``.
        flags: constants of the paper that were used and are not upper bounds; empty for certified ones.
        scalar: whether the function is real-valued, so that 1/L is a step size of gradient descent.
        make_rows: computes the rows of the table when they are asked for.
    """

    bound: Magnitude
    lipschitz: Magnitude
    smoothness: Magnitude
    block_lipschitz: Mapping[str, Magnitude]
    block_smoothness: Magnitude
    reasons: Sequence[str] = ()
    domain: str = ""
    wrt: str = "params"
    constants: str = "certified"
    flags: Sequence[str] = ()
    scalar: bool = False
    make_rows: Callable[[], Sequence[Row]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table: one row per operation that varies."""
        return tuple(self.make_rows())

    @property
    def step_size(self) -> float:
        """1/L, rounded down; 0 if L is infinite.

        For a real-valued function it is the step of gradient descent that is proved to descend, as long as it
        stays in the domain.
        """
        smoothness = float(self.smoothness)
        if smoothness == 0:
            return math.inf
        return 0.0 if math.isinf(smoothness) else math.nextafter(1.0 / smoothness, 0.0)

    def by_module(self) -> dict[str, Row]:
        """The last row of each module: its output."""
        return {row.module: row for row in self.rows}

    def by_operation(self) -> dict[str, float]:
        """The share of the smoothness that comes from each kind of operation, largest first."""
        shares: dict[str, float] = {}
        for row in self.rows:
            shares[row.operation] = shares.get(row.operation, 0.0) + row.share
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def bracket(self, estimate: Estimate) -> str:
        """``lower ≤ true ≤ upper`` and their ratio, with lower bounds found by :func:`surefoot.estimate`."""
        from surefoot.lower import bracket

        return bracket(self, estimate)

    def to_dict(self) -> dict[str, Any]:
        """The constants as text (exact beyond the range of a double) with everything they rest on."""
        return {
            "domain": self.domain,
            "wrt": self.wrt,
            "constants": self.constants,
            "bound": str(self.bound),
            "lipschitz": str(self.lipschitz),
            "smoothness": str(self.smoothness),
            "step_size": self.step_size,
            "blocks": {path: str(value) for path, value in self.block_lipschitz.items()},
            "reasons": list(self.reasons),
            "flags": list(self.flags),
        }

    def __str__(self) -> str:
        from surefoot.report.text import render

        return render(self)
