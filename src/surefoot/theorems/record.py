"""What a theorem says about a method from the present weights, or what it lacks."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.certificate.document import plain
from surefoot.certificate.notebook import rendered
from surefoot.certificate.numbers import down, short
from surefoot.guarantees import GuaranteeError
from surefoot.magnitude import Magnitude
from surefoot.theorems.gradient_steps import SquareOnBall
from surefoot.theorems.majorised import DampedGaussNewton
from surefoot.theorems.momentum import FastHeavyBall, HeavyBall
from surefoot.theorems.statements import Interpolation, NothingHere, StronglyConvex
from surefoot.theorems.stochastic import StochasticDescent

SCHEMA = "surefoot/convergence/1"
METHODS = {
    "gauss_newton": "Gauss-Newton",
    "damped": "Gauss-Newton with a fixed damping",
    "gradient": "gradient descent",
    "momentum": "gradient descent with momentum",
    "stochastic": "stochastic gradient descent",
    "newton": "Newton's method",
}
_WIDTH = 110
_WRITTEN = (
    "method", "theorem", "proved", "verdict", "radius", "distance", "rate", "step_size", "momentum",
    "block_step_sizes", "missing", "loss",
)  # fmt: skip
_OF_HYPOTHESES = ("symbol", "meaning", "value", "needs", "holds")


@dataclass(frozen=True)
class Hypothesis:
    """One verified number.

    Attributes:
        symbol: as in the theorem.
        meaning: in words.
        value: the bound that was proved.
        needs: what the theorem asks of it, or nothing.
        holds: whether that is so; ``None`` if nothing is asked.
        lower: whether it is a lower bound.

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
        asked = "" if self.holds is None else f"; needs {self.needs}: {'yes' if self.holds else 'no'}"
        return f"{self.symbol} {self.bound}, {self.meaning}{asked}"


@dataclass(frozen=True)
class Convergence:
    """A verdict about a method, from the present weights.

    Attributes:
        method: ``"gauss_newton"``, ``"damped"``, ``"gradient"``, ``"momentum"``, ``"stochastic"`` or ``"newton"``.
        theorem: its name.
        proved: whether all hypotheses are verified.
        hypotheses: with their verified numbers.
        missing: the factor by which the hypothesis that fails does so; 1 if it is proved, infinite if no factor
            says it.
        advice: what would help, in sentences.
        obstacles: what makes a constant infinite, such as the units that may meet a kink.
        statement: the theorem with these numbers; ``None`` where they do not exist.
        nothing: the largest ball in which a stationary point was excluded, where that was asked.
        loss: a bound on the objective at the weights, its minimum taken as zero; ``None`` if it is not known.
        weights: :math:`L_b` by path, where norms are :math:`\\sum_bL_b\\|v_b\\|^2`; they are at least one, so that
            distances in the ordinary norm are not larger.

    >>> print(sf.Convergence("newton", "Newton-Kantorovich theorem", False, (), 3.0).verdict)
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
    weights: Mapping[str, float] | None = None

    @property
    def radius(self) -> float | None:
        """The radius of the ball around the weights that the theorem speaks of."""
        return None if self.statement is None else self.statement.radius

    @property
    def distance(self) -> float | None:
        """How far the limit may be from the weights; ``None`` if it is not proved to exist."""
        if not self.proved or self.statement is None:
            return None
        return self.statement.radius if isinstance(self.statement, SquareOnBall) else self.statement.distance

    @property
    def rate(self) -> float | None:
        """The factor of one step: of the objective for gradient steps by its gradient inequality, in expectation
        for random ones; of the distance near a strict minimum; for quadratic convergence that of the first bound
        on the distance to the second. ``None`` if it is not proved.
        """
        if not self.proved or self.statement is None:
            return None
        if isinstance(self.statement, Interpolation):
            first, second = (self.statement.after(k)[0] for k in (0, 1))
            return second / first if first > 0 else 0.0
        return self.statement.rate

    @property
    def step_size(self) -> float | None:
        """The step of gradient descent; with ``per_block`` that of blocks with :math:`L_b = 1`."""
        gradual = self.method in ("gradient", "momentum", "stochastic") and self.proved
        return getattr(self.statement, "step_size", None) if gradual else None

    @property
    def momentum(self) -> float | None:
        """That of the heavy ball."""
        return getattr(self.statement, "momentum", None) if self.proved else None

    @property
    def block_step_sizes(self) -> dict[str, float] | None:
        """The steps of gradient descent by path of the parameter; exact quotients, as the weights are powers of
        four.
        """
        if self.weights is None or self.step_size is None:
            return None
        return {path: self.step_size / weight for path, weight in self.weights.items()}

    def iterations(self, eps: float) -> int:
        """How many steps bring the objective within eps of its minimum, at most.

        Raises:
            GuaranteeError: if it is not proved, or no number can be given.
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
            return f"{self._steps()}: {self._progress()} ({self.theorem})."
        assert isinstance(statement, StronglyConvex)
        how = f"with steps of {down(statement.step_size)} " if self.method == "gradient" else ""
        return (
            f"{name[0].upper()}{name[1:]} {how}converges to a strict local minimum, the only stationary point "
            "within "
            f"{most(statement.radius)}. It is within {most(statement.distance)} of the weights, and the objective "
            f"is at most {most(statement.gap)} above it; each step multiplies the distance by at most "
            f"{most(statement.rate)} ({self.theorem})."
        )

    def _steps(self) -> str:
        """What gradient steps do, without how fast."""
        statement, name = self.statement, METHODS[self.method]
        size = f"steps of {down(self.step_size or 0.0)}"
        if self.weights is not None:
            size = (
                f"steps of {down((self.step_size or 0.0) / max(self.weights.values()))} to {size[9:]}, by block,"
            )
        if self.momentum is not None:
            size = f"{size} and momentum {self.momentum:.6g}"
        where = f"without leaving the ball of radius {most(self.radius or 0.0)}"
        sure = ""
        if isinstance(statement, StochasticDescent):
            size = f"{size} on batches of {statement.batch_size} of {statement.samples} samples"
            sure = f", with a probability of at least {math.floor(1e4 * (1 - statement.risk)) / 1e4:g}"
        if isinstance(statement, DampedGaussNewton):
            name, size = "Gauss-Newton", f"the damping {most(statement.kappa)}"
        return f"{name[0].upper()}{name[1:]} with {size} converges to the global minimum, zero loss, {where}{sure}"

    def _progress(self) -> str:
        """How fast."""
        power = f"(1 - {down(1 - (self.rate or 1.0), 3)})^k"
        if isinstance(self.statement, HeavyBall):
            return f"k steps leave at most {power} of the loss"
        if isinstance(self.statement, StochasticDescent):
            return f"in expectation k steps leave at most {most(self.statement.excess)}·{power} of the loss"
        if isinstance(self.statement, FastHeavyBall):
            return f"k steps leave at most {most(self.statement.excess)}·{power} of the loss"
        return f"each step takes at least {_part(1 - (self.rate or 1.0))} of the loss that is left"

    def __str__(self) -> str:
        lines = textwrap.wrap(self.verdict, _WIDTH)
        lines += [f"  {hypothesis}" for hypothesis in self.hypotheses]
        for text in self.remarks:
            lines += textwrap.wrap(text, _WIDTH)
        return "\n".join(lines)

    @property
    def remarks(self) -> list[str]:
        """What is in the way, what would help, and how far any method has to go, in sentences."""
        texts = [*self.obstacles, *self.advice]
        if self.weights is not None:
            largest = max(self.weights.values())
            texts.append(f"Norms of weights are weighted by blocks, with numbers between 1 and {largest:g}.")
        if self.nothing is not None and self.nothing.holds:
            texts.append(
                f"No stationary point is within {down(self.nothing.radius)} of the weights: any method has to "
                "travel farther."
            )
        return texts

    def to_html(self) -> str:
        """The verdict, its hypotheses and remarks as a part of a page; a page of its own with the proof is
        :func:`surefoot.report.write_convergence`.
        """
        return rendered("convergence.html.j2", verdict=self)

    _repr_html_ = to_html

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; infinity is ``"∞"``."""
        found: dict[str, Any] = plain(
            {
                "schema": SCHEMA,
                **{name: getattr(self, name) for name in _WRITTEN},
                "hypotheses": [{name: getattr(h, name) for name in _OF_HYPOTHESES} for h in self.hypotheses],
                "advice": self.advice,
                "obstacles": self.obstacles,
                "no_stationary_point_within": self.nothing.radius if self.nothing and self.nothing.holds else None,
            }
        )
        return found

    def to_json(self, indent: int | None = 2) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)


def most(value: float) -> str:
    """A bound from above, rounded upwards."""
    return short(Magnitude.of(value)) if value >= 0 else f"-{down(-value)}" if value > -math.inf else "-∞"


def least(value: float) -> str:
    """A bound from below, rounded downwards."""
    return down(value) if value >= 0 else f"-{short(Magnitude.of(-value))}"


def _part(value: float) -> str:
    """A part of the whole, rounded downwards."""
    return f"{down(100 * value, 3)} %"
