"""The certificate: constants with a proof, what they rest on, and what limits them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from surefoot import blockwise, guarantees
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
        block_gradients: for a real-valued function with a known centre, the norm of its gradient there with
            respect to each block.
        nonnegative: whether it is known not to be negative, as losses are.
        segment_step: on a segment, the step along it that is proved to descend; see :attr:`safe_step`.
        make_rows: computes the rows of the table when they are asked for.
        make_damping: for a loss of a network's outputs, computes :math:`\ell_hL_\psi` and says whether the loss is
            quadratic.
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
    block_gradients: Mapping[str, float] | None = None
    nonnegative: bool = False
    segment_step: float | None = None
    make_rows: Callable[[], Sequence[Row]] = field(default=tuple, repr=False, compare=False)
    make_damping: Callable[[], tuple[Magnitude, bool]] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table: one row per operation that varies."""
        return tuple(self.make_rows())

    @property
    def step_size(self) -> float:
        """1/L, rounded down; 0 if L is infinite.

        For a real-valued function it is the step of gradient descent that is proved to descend, as long as it
        stays in the domain. On a segment it is :attr:`safe_step`.
        """
        return guarantees.step_from(self.smoothness) if self.segment_step is None else self.segment_step

    @cached_property
    def block_step_sizes(self) -> dict[str, float]:
        """A step size for each block, proved together; see :func:`surefoot.blockwise.block_step_sizes`.

        Raises:
            GuaranteeError: if the function is not real-valued or the constants are not bounds.
        """
        return blockwise.block_step_sizes(self)

    @property
    def safe_step(self) -> float:
        """On a segment: the step along its direction that is proved to descend the most.

        Raises:
            GuaranteeError: if the domain is not a segment.
        """
        if self.segment_step is None:
            raise guarantees.GuaranteeError(
                f"a safe step is one along a direction, and the domain is: {self.domain}. Certify on a Segment: "
                "surefoot.certify(model, x, objective=…, domain=surefoot.Segment(direction, length))"
            )
        return self.segment_step

    @property
    def damping(self) -> float:
        """κ with which the Gauss-Newton model majorises the objective; see :func:`surefoot.guarantees.damping`.

        Raises:
            GuaranteeError: if the function is not a loss of a network's outputs, or nothing finite is known.
        """
        return guarantees.damping(self)

    def iterations(self, eps: float, gap: float | None = None) -> int:
        r"""How many steps 1/L of gradient descent make :math:`\min_k\|\nabla F(u_k)\| \le \varepsilon`.

        :math:`N \ge 2L(F(u_0) - F_{\mathrm{low}})/\varepsilon^2`, as long as the iterates stay in the domain;
        proved in :func:`surefoot.guarantees.iterations`.

        Args:
            eps: the accuracy.
            gap: :math:`F(u_0) - F_{\mathrm{low}}`, the loss at the start if that is not negative. By default what
                the bound says: at most the bound for a function that is not negative, at most twice the bound
                otherwise.

        Raises:
            GuaranteeError: if the smoothness is infinite or otherwise guarantees nothing.
        """
        guarantees.require_smooth(self)
        return guarantees.iterations(self.smoothness, guarantees.gap_of(self) if gap is None else gap, eps)

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
            "scalar": self.scalar,
            "step_size": _plain(self.step_size),
            "block_step_sizes": {path: _plain(step) for path, step in self._proved_block_steps().items()},
            "safe_step": self.segment_step,
            "damping": self._known_damping(),
            "blocks": {path: str(value) for path, value in self.block_lipschitz.items()},
            "block_gradients": None if self.block_gradients is None else dict(self.block_gradients),
            "reasons": list(self.reasons),
            "flags": list(self.flags),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def _proved_block_steps(self) -> dict[str, float]:
        """The step sizes per block where there are any."""
        return self.block_step_sizes if self.scalar and not self.flags and self.block_lipschitz else {}

    def _known_damping(self) -> float | None:
        try:
            return self.damping
        except guarantees.GuaranteeError:
            return None

    def __str__(self) -> str:
        from surefoot.report.text import render

        return render(self)


def _plain(number: float) -> float | str:
    """A number that JSON can hold."""
    return number if math.isfinite(number) else "∞"
