"""The verdict of a theorem about a method that starts at the present weights."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from surefoot.guarantees import GuaranteeError
from surefoot.magnitude import Magnitude
from surefoot.numbers import down, short
from surefoot.report import fragment
from surefoot.report.document import plain
from surefoot.theorems.gradient_descent import SquareOnBall
from surefoot.theorems.interpolation import Interpolation
from surefoot.theorems.strongly_convex import NothingHere, StronglyConvex

SCHEMA = "surefoot/convergence/1"
METHODS = {
    "gauss_newton": "Gauss-Newton",
    "gradient": "gradient descent",
    "momentum": "gradient descent with momentum",
    "newton": "Newton's method",
}
_WIDTH = 110
_FIELDS = (
    "method", "theorem", "proved", "verdict", "radius", "distance", "rate", "step_size", "momentum", "missing",
    "loss",
)  # fmt: skip
_HYPOTHESIS_FIELDS = ("symbol", "meaning", "value", "bound", "needs", "holds")


@dataclass(frozen=True)
class Hypothesis:
    """One verified number.

    Attributes:
        symbol: its symbol in the theorem.
        meaning: its meaning in words.
        value: the bound that was proved.
        needs: what the theorem requires of it; empty if it requires nothing.
        holds: whether the requirement is met; ``None`` if there is none.
        lower: whether the bound is a lower one.

    >>> print(sf.theorems.Hypothesis("h", "the quotient", 0.25, "at most ½", True))
    h ≤ 0.25, the quotient; needs at most ½: yes
    """

    symbol: str
    meaning: str
    value: float
    needs: str = ""
    holds: bool | None = None
    lower: bool = False

    @property
    def bound(self) -> str:
        """The relation and the number."""
        return f"≥ {least(self.value)}" if self.lower else f"≤ {most(self.value)}"

    def __str__(self) -> str:
        requirement = "" if self.holds is None else f"; needs {self.needs}: {'yes' if self.holds else 'no'}"
        return f"{self.symbol} {self.bound}, {self.meaning}{requirement}"


@dataclass(frozen=True)
class Convergence:
    """Whether a method is proved to converge from the present weights.

    Attributes:
        method: ``"gauss_newton"``, ``"gradient"``, ``"momentum"`` or ``"newton"``.
        theorem: the name of the theorem.
        proved: whether all hypotheses are verified.
        hypotheses: the hypotheses with their verified numbers.
        missing: the factor by which the failing hypothesis is missed; 1 if convergence is proved, infinite if no
            factor would help.
        advice: sentences that say what would help.
        obstacles: what makes a constant infinite, such as the units that may meet a kink.
        statement: the theorem with these numbers; ``None`` where they do not exist.
        nothing: the largest ball that was proved to hold no stationary point, where this was tried.
        loss: a bound on the objective at the weights, its minimum taken as zero; ``None`` if there is none.

    >>> print(Convergence("newton", "Newton-Kantorovich theorem", False, (), 3.0).verdict)
    Convergence of Newton's method from here is not proved (Newton-Kantorovich theorem): a factor of 3 is missing.
    """

    method: str
    theorem: str
    proved: bool
    hypotheses: tuple[Hypothesis, ...]
    missing: float
    advice: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    statement: Interpolation | SquareOnBall | StronglyConvex | None = None
    nothing: NothingHere | None = None
    loss: float | None = field(default=None, compare=False)

    @property
    def radius(self) -> float | None:
        """The radius of the ball around the weights that the theorem speaks of."""
        return None if self.statement is None else self.statement.radius

    @property
    def distance(self) -> float | None:
        """A bound on the distance from the weights to the limit; ``None`` if no limit is proved to exist."""
        if not self.proved or self.statement is None:
            return None
        return self.statement.distance

    @property
    def rate(self) -> float | None:
        """The factor by which one step multiplies a bound; ``None`` if convergence is not proved.

        For gradient steps towards zero loss it is the bound on the objective; near a strict minimum, the bound on
        the distance; for quadratic convergence, the bound on the distance at the first step.
        """
        return self.statement.rate if self.proved and self.statement is not None else None

    @property
    def step_size(self) -> float | None:
        """The step size of gradient descent."""
        gradual = self.method in ("gradient", "momentum") and self.proved
        return getattr(self.statement, "step_size", None) if gradual else None

    @property
    def momentum(self) -> float | None:
        """The momentum of the heavy ball."""
        return getattr(self.statement, "momentum", None) if self.proved else None

    def iterations(self, eps: float) -> int:
        """A number of steps after which the objective is proved to be within eps of its minimum.

        Raises:
            GuaranteeError: if convergence is not proved, or no number can be given.
        """
        if not self.proved or self.statement is None:
            raise GuaranteeError(f"no number of steps is proved: {self.verdict}")
        if not 0 < eps < math.inf:
            raise GuaranteeError(f"the accuracy eps is a positive number, got {eps!r}")
        try:
            return self.statement.iterations(eps)
        except OverflowError as error:
            raise GuaranteeError(str(error)) from error

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        name = METHODS[self.method]
        if not self.proved:
            finite = math.isfinite(self.missing)
            lacks = f"a factor of {most(self.missing)} is missing" if finite else "no factor tells how far it is"
            return f"Convergence of {name} from here is not proved ({self.theorem}): {lacks}."
        statement = self.statement
        if isinstance(statement, Interpolation):
            return (
                "Gauss-Newton from here converges to an exact solution, zero loss, within "
                f"{most(statement.distance)} of the weights, "
                f"{'quadratically' if statement.h < 0.5 else 'at least linearly'} ({self.theorem})."
            )
        if isinstance(statement, SquareOnBall):
            size = f"steps of {down(self.step_size or 0.0)}"
            left = f"(1 - {down(1 - statement.rate, 3)})^k of the loss"
            if self.momentum is not None:
                size = f"{size} and momentum {self.momentum:.6g}"
            return (
                f"{name[0].upper()}{name[1:]} with {size} converges to the global minimum, zero loss, without "
                f"leaving the ball of radius {most(statement.radius)}: k steps leave at most {left} "
                f"({self.theorem})."
            )
        assert isinstance(statement, StronglyConvex)
        how = f"with steps of {down(statement.step_size)} " if self.method == "gradient" else ""
        return (
            f"{name[0].upper()}{name[1:]} {how}converges to a strict local minimum, the only stationary point "
            f"within {most(statement.radius)}. It is within {most(statement.distance)} of the weights, and the "
            f"objective is at most {most(statement.gap)} above it; each step multiplies the distance by at most "
            f"{most(statement.rate)} ({self.theorem})."
        )

    def __str__(self) -> str:
        lines = textwrap.wrap(self.verdict, _WIDTH)
        lines += [f"  {hypothesis}" for hypothesis in self.hypotheses]
        for text in self.remarks:
            lines += textwrap.wrap(text, _WIDTH)
        return "\n".join(lines)

    @property
    def remarks(self) -> list[str]:
        """Sentences about what is in the way, what would help, and how far any method has to go."""
        texts = [*self.obstacles, *self.advice]
        if self.nothing is not None and self.nothing.holds:
            texts.append(
                f"No stationary point is within {down(self.nothing.radius)} of the weights: any method has to "
                "travel farther."
            )
        return texts

    def to_html(self) -> str:
        """The verdict, its hypotheses and remarks as a part of a page.

        :func:`surefoot.report.write_report` writes a whole page.
        """
        return fragment(self.to_dict())

    _repr_html_ = to_html

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; infinity is ``"∞"``."""
        document: dict[str, Any] = plain(
            {
                "schema": SCHEMA,
                **{name: getattr(self, name) for name in _FIELDS},
                "hypotheses": [{name: getattr(h, name) for name in _HYPOTHESIS_FIELDS} for h in self.hypotheses],
                "advice": self.advice,
                "obstacles": self.obstacles,
                "no_stationary_point_within": self.nothing.radius if self.nothing and self.nothing.holds else None,
            }
        )
        return document

    def to_json(self, indent: int | None = 2) -> str:
        """The document of :meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)


def most(value: float) -> str:
    """An upper bound as text, rounded up."""
    return short(Magnitude.of(value)) if value >= 0 else f"-{down(-value)}" if value > -math.inf else "-∞"


def least(value: float) -> str:
    """A lower bound as text, rounded down."""
    return down(value) if value >= 0 else f"-{short(Magnitude.of(-value))}"
