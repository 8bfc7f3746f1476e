"""The certificate: constants with a proof, what they rest on, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.graph import Graph
from surefoot.magnitude import Magnitude
from surefoot.rules.registry import label

if TYPE_CHECKING:
    from surefoot.calculus.assemble import Term
    from surefoot.calculus.forward import Pass
    from surefoot.domains import Domain


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
        rows: one per operation that varies.
        reasons: why the smoothness is infinite, and what to do about it.
        domain: where it holds, in words.
        wrt: what varies.
        constants: ``"certified"``, or ``"paper"``.
        flags: constants of the paper that were used and are not upper bounds; empty for certified ones.
    """

    bound: Magnitude
    lipschitz: Magnitude
    smoothness: Magnitude
    block_lipschitz: Mapping[str, Magnitude]
    block_smoothness: Magnitude
    rows: Sequence[Row] = ()
    reasons: Sequence[str] = ()
    domain: str = ""
    wrt: str = "params"
    constants: str = "certified"
    flags: Sequence[str] = field(default_factory=tuple)

    @property
    def step_size(self) -> float:
        """1/L, rounded down: the step of gradient descent that is proved to descend; 0 if there is none."""
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


def summarise(
    *,
    result: Pass,
    graph: Graph,
    domain: Domain,
    wrt: str,
    bound: Magnitude,
    lipschitz: Magnitude,
    matrix: Magnitude,
    smoothness: Magnitude,
    summands: Sequence[Term],
) -> Certificate:
    """A certificate from a forward pass and its matrix of smoothness bounds."""
    blocks = result.region.blocks
    return Certificate(
        bound=bound,
        lipschitz=lipschitz.norm(),
        smoothness=smoothness,
        block_lipschitz={path: lipschitz[list(members)].norm() for path, members in blocks.items()},
        block_smoothness=_by_block(matrix, list(blocks.values())),
        rows=tuple(_rows(result, summands)),
        reasons=tuple(_reasons(summands)),
        domain=str(domain),
        wrt=wrt,
    )


def _by_block(matrix: Magnitude, blocks: Sequence[Sequence[int]]) -> Magnitude:
    """The matrix over pairs of blocks: the Frobenius norm of each part, a bound on its spectral norm."""
    if not blocks:
        return Magnitude.zero((0, 0))
    starts = np.array([members[0] for members in blocks])  # variables are ordered by blocks
    sizes = np.array([len(members) for members in blocks])
    log2 = matrix.log2
    top = np.maximum.reduceat(np.maximum.reduceat(log2, starts, axis=0), starts, axis=1)
    spread_out = np.where(np.isfinite(top), top, 0.0).repeat(sizes, axis=0).repeat(sizes, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.exp2(2 * np.where(np.isposinf(log2), -np.inf, log2 - spread_out))
    total = np.add.reduceat(np.add.reduceat(squares, starts, axis=0), starts, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        norm = 0.5 * np.log2(np.maximum(total, 2.0**-1000)) + np.where(np.isfinite(top), top, 0.0)
    return Magnitude(np.where(np.isfinite(top), norm + (np.abs(norm) + 8.0) * 2.0**-48, top))


def _rows(result: Pass, summands: Sequence[Term]) -> list[Row]:
    smooth: dict[str, Magnitude] = {}
    amounts = _shares(summands)
    rows = []
    for step in result.steps:
        total = Magnitude.zero()
        for slot, name in step.names.items():
            total = total + step.bounds.jacobian[slot] * smooth.get(name, Magnitude.zero())
        size = {slot: result.enclosures[name].lipschitz.norm() for slot, name in step.names.items()}
        for (first, second), curvature in step.bounds.curvature.items():
            if first in size and second in size:
                total = total + curvature * size[first] * size[second] * (1.0 if first == second else 2.0)
        smooth[step.node.name] = total
        enclosure = result.enclosures[step.node.name]
        rows.append(
            Row(
                module=step.node.module,
                operation=label(step.node),
                shape=step.node.specs[0].shape,
                bound=enclosure.bound,
                lipschitz=enclosure.lipschitz.norm(),
                smoothness=total,
                share=amounts.get(step.node.name, 0.0),
            )
        )
    return rows


def _shares(summands: Sequence[Term]) -> dict[str, float]:
    """How much of the sum each operation contributes, by the norm of its summand."""
    sizes: dict[str, float] = {}
    logs: dict[str, list[float]] = {}
    for term in summands:
        size = term.weight * term.left.norm() * term.right.norm()
        logs.setdefault(term.step.node.name, []).append(float(size.log2))
    if not logs:
        return {}
    top = max(max(values) for values in logs.values())
    if math.isinf(top):
        infinite = [name for name, values in logs.items() if max(values) == top]
        return {name: 1.0 / len(infinite) for name in infinite}
    for name, values in logs.items():
        sizes[name] = sum(2.0 ** (value - top) for value in values)
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items()}


def _reasons(summands: Sequence[Term]) -> list[str]:
    """For every operation that makes the smoothness infinite: where it is and what to do."""
    found: dict[str, None] = {}
    for term in summands:
        if not term.weight.is_finite or not term.left.is_finite or not term.right.is_finite:
            step = term.step
            place = f"{step.node.module or 'model'} ({label(step.node)})"
            found[f"{place}: {step.bounds.reason or 'its arguments are not bounded'}"] = None
    return list(found)
