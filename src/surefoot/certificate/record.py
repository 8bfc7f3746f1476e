"""The certificate: constants with a proof, what they rest on, and what limits them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot import __version__, blockwise, guarantees
from surefoot.attained import Estimate, LowerBound, bracket
from surefoot.certificate.document import CITATION, dump, parse, read, require_same_problem, write
from surefoot.certificate.plot import data_frame, figure_of
from surefoot.certificate.rows import Row
from surefoot.certificate.text import render, table
from surefoot.magnitude import Magnitude
from surefoot.report import fragment, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Certificate:
    r"""Proved bounds of a function over a domain.

    Attributes:
        bound: :math:`m \ge \sup\|f\|_2`.
        lipschitz: :math:`\ell \ge \sup\|Df\|_{2,2}`.
        smoothness: :math:`L \ge \sup\|D^2f\|_{2,2,2}`.
        block_lipschitz: the Lipschitz constant with respect to each block alone.
        block_smoothness: the matrix of bounds for pairs of blocks, in the order of ``block_lipschitz``.
        reasons: why the smoothness is infinite, and what to do about it.
        domain: the set where the bounds hold, in words.
        wrt: what varies: ``"params"`` or ``"input"``.
        constants: ``"certified"``, or ``"paper"``.
        flags: constants of the paper that were used and are not upper bounds; empty for certified constants.
        remarks: other things to know, such as assumptions about operations that were registered from outside.
        scalar: whether the function is real-valued, so that gradient descent makes sense.
        block_gradients: for a real-valued function with values at the centre, the norm of its gradient there with
            respect to each block.
        nonnegative: whether the function is known to be non-negative, as losses are.
        segment_step: on a segment, the step along it that is proved to descend; see :attr:`safe_step`.
        radius: how far the domain reaches from the weights, or from the input if that varies: one number for a
            ball, one per block for a product of balls; ``None`` where the domain is around another point.
        weights_inside: whether the present weights, or inputs, lie in the domain; ``None`` if they have no values.
        curvature: a value below :math:`\|\nabla^2F\|` at the weights, by a few products with the Hessian: steps
            longer than its inverse are beyond what it allows. An estimate, and no part of a proof.
        one_step: :math:`\bar L \le L` for single moves d from the weights, at most as long as the radius:
            :math:`F(u + d) \le F(u) + \langle\nabla F(u), d\rangle + \frac{\bar L}2\|d\|^2`; ``None`` if it is L.
            See :func:`surefoot.guarantees.seen_from_weights`.
        gradient_step: a step against the gradient at the weights that is proved on its own segment, and may leave
            the domain; ``None`` if none was looked for. See :mod:`surefoot.certificate.downhill`.
        effort: how much it was allowed to cost; see :func:`surefoot.certify`.
        gradients: its cost in gradients, including all balls and segments that were tried; ``None`` if it needed
            none.
        estimate: lower bounds found by a search, to be shown next to the upper ones; see :meth:`with_estimate`.
        regularizer: the function that was added to the objective, in words; empty if there is none.
        version: the version of surefoot that made it.
        make_rows: computes the rows of the table when they are needed.
        make_damping: for a loss of a network's outputs, computes :math:`\ell_hL_\psi` and says whether the loss is
            quadratic.
        written_block_steps: the step sizes by block of a certificate that was read from a document, so that they
            are not rounded differently on another machine.

    >>> certificate = sf.certify(nn.Linear(2, 1), torch.eye(2), domain=sf.ProductBall(1.0))
    >>> float(certificate.smoothness), sf.Certificate.from_json(certificate.to_json()).domain
    (0.0, 'each block within 1 of the origin')
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
    remarks: Sequence[str] = ()
    scalar: bool = False
    block_gradients: Mapping[str, float] | None = None
    nonnegative: bool = False
    segment_step: float | None = None
    radius: float | Mapping[str, float] | None = None
    weights_inside: bool | None = None
    curvature: LowerBound | None = None
    one_step: Magnitude | None = None
    gradient_step: float | None = None
    effort: str = "normal"
    gradients: int | None = None
    estimate: Estimate | None = None
    regularizer: str = ""
    version: str = __version__
    make_rows: Callable[[], Sequence[Row]] = field(default=tuple, repr=False, compare=False)
    make_damping: Callable[[], tuple[Magnitude, bool]] | None = field(default=None, repr=False, compare=False)
    written_block_steps: Mapping[str, float] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The table: one row per operation that varies."""
        return tuple(self.make_rows())

    @property
    def inverse_smoothness(self) -> float:
        """1/L, rounded down; 0 if L is infinite. Gradient steps up to it descend while they stay in the domain."""
        return guarantees.step_from(self.smoothness)

    @property
    def step_size(self) -> float:
        r"""The step of gradient descent from the weights that is proved to descend: safe to take.

        On a ball of radius r around the weights it is :math:`\min(1/L, r/\|\nabla F\|)`, with :attr:`one_step` in
        place of L if there is one, and for a product of balls with the smallest such quotient over the blocks; see
        :func:`surefoot.guarantees.longest_step`. Around another point, and for a function that is not real-valued,
        it is 1/L. On a segment it is :attr:`safe_step`. If :attr:`gradient_step` is longer, it is that.
        """
        if self.segment_step is not None:
            return self.segment_step
        within = min(guarantees.inverse_of_one_step(self), guarantees.longest_step(self))
        return max(within, self.gradient_step or 0.0)

    @cached_property
    def block_step_sizes(self) -> dict[str, float]:
        """A step size for each block, proved together; see :func:`surefoot.blockwise.block_step_sizes`.

        Raises:
            GuaranteeError: if the function is not real-valued or the constants are not bounds.
        """
        written = self.written_block_steps
        return blockwise.block_step_sizes(self) if written is None else dict(written)

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
            GuaranteeError: if the function is not a loss of a network's outputs, or no bound is finite.
        """
        return guarantees.damping(self)

    def iterations(self, eps: float, gap: float | None = None) -> int:
        r"""How many steps 1/L of gradient descent make :math:`\min_k\|\nabla F(u_k)\| \le \varepsilon`.

        :math:`N \ge 2L(F(u_0) - F_{\mathrm{low}})/\varepsilon^2`, proved in
        :func:`surefoot.guarantees.iterations`. On a ball around the weights, the iterates must be proved to stay
        in it (:func:`surefoot.guarantees.require_room`); on other sets they have to be projected, and the gradient
        is that of :class:`surefoot.optim.ProjectedGradient`.

        Args:
            eps: the accuracy.
            gap: :math:`F(u_0) - F_{\mathrm{low}}`, for a loss that is not negative its value at the start. By
                default
                what follows from the bound: the bound itself for a function that is not negative, else twice the
                bound.

        Raises:
            GuaranteeError: if the smoothness is infinite or otherwise guarantees nothing, or the ball is too
                small; the message then says which radius would be large enough.
        """
        guarantees.require_smooth(self)
        distance = guarantees.gap_of(self) if gap is None else gap
        count = guarantees.iterations(self.smoothness, distance, eps)
        guarantees.require_room(self, distance, eps)
        return count

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
        return bracket(self, estimate)

    def with_estimate(self, estimate: Estimate) -> Certificate:
        """The same certificate, shown together with lower bounds found by :func:`surefoot.estimate`.

        Raises:
            Contradiction: if a value was attained that the certificate excludes.
            CertificateError: if the search was over another domain or other variables.
        """
        require_same_problem(self, estimate)
        self.bracket(estimate)
        return replace(self, estimate=estimate, make_rows=lambda: self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; see :mod:`surefoot.certificate.document` for the schema."""
        return write(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The document of :meth:`to_dict` as JSON text."""
        return dump(self, indent)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Certificate:
        """The certificate that :meth:`to_dict` described, with every constant as it was.

        Raises:
            CertificateError: if it is no such document, has another schema, or was changed.
        """
        return cls(**read(document))

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that :meth:`to_json` described.

        Raises:
            CertificateError: as :meth:`from_dict`, or if it is not JSON.
        """
        return cls.from_dict(parse(text))

    def to_pandas(self) -> DataFrame:
        """The table as a data frame; see :func:`surefoot.certificate.plot.data_frame`."""
        return data_frame(self)

    def plot(self) -> tuple[Figure, tuple[Axes, Axes]]:
        """Growth of m, ℓ and L, and the matrix of blocks, as a figure; see :mod:`surefoot.certificate.plot`."""
        return figure_of(self)

    def table(self, depth: int | None = None, rows: int | None = None) -> str:
        """The table of operations alone.

        Args:
            depth: modules at this depth are one line each; by default all operations are shown.
            rows: the largest number of lines; deep modules are folded until they fit. By default there is no
                limit.
        """
        return table(self, depth, rows)

    @staticmethod
    def citation() -> str:
        """How to cite the paper and the software, in BibTeX."""
        return CITATION

    def __eq__(self, other: object) -> bool:
        """Whether all constants and what they rest on are the same; the tables are not compared."""
        if not isinstance(other, Certificate):
            return NotImplemented
        matrix, others = (np.asarray(c.block_smoothness.log2) for c in (self, other))
        return self._compared() == other._compared() and np.array_equal(matrix, others)

    def __hash__(self) -> int:
        return hash((self.bound, self.lipschitz, self.smoothness, self.domain))

    def __reduce__(self) -> tuple[Callable[[], Certificate], tuple[()]]:
        """Copy and pickle with the table written out, as the functions that make it cannot be pickled."""
        damping = self.make_damping and partial(tuple, self.make_damping())
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {"make_rows": partial(tuple, self.rows), "make_damping": damping}
        return partial(type(self), **values), ()

    def _compared(self) -> dict[str, Any]:
        values = {
            f.name: getattr(self, f.name) for f in fields(self) if f.compare and f.name != "block_smoothness"
        }
        return values | {name: tuple(getattr(self, name)) for name in ("reasons", "flags", "remarks")}

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        return fragment(self.to_dict())

    def to_html(self, path: str | os.PathLike[str], title: str | None = None) -> Path:
        """Write a page to look at, with nothing outside of it; see :func:`surefoot.report.write_report`."""
        return write_report(path, self, title=title)
