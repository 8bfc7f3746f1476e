"""Claims of the library put to the exact judge: certificates, segments, steps, values.

A *case* is one claim at one point: the three constants of a certificate there, the decrease that a step promises,
or the interval of a value.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flint
import torch
from flint import arb
from torch import Tensor

import surefoot as sf
from attack.exact_subject import Material, Subject
from judges.exact import PRECISIONS, Array, Undecided, exactly, holds, run, settled, stored, truth, value_of
from surefoot.errors import SurefootError

METHODS: dict[str, Callable[[Subject], Any]] = {
    "evaluation": lambda s: sf.optim.CertifiedDescent(s.model, s.loss),
    "proposed": lambda s: sf.optim.CertifiedDescent(s.model, s.loss, direction=torch.optim.Adam),
    "segment": lambda s: sf.optim.CertifiedDescent(s.model, s.loss, proof="segment"),
    "gauss_newton": lambda s: sf.optim.GaussNewton(s.model, s.loss, proof="evaluation"),
    "newton": lambda s: sf.optim.Newton(s.model, s.loss, proof="evaluation"),
}


@dataclass(frozen=True)
class Violation:
    """A claim that is not true, or an error that is not the library's own."""

    family: str
    check: str
    seed: int
    subject: str
    claim: str
    truth: str

    def __str__(self) -> str:
        return f"{self.family}({self.seed}) {self.check} [{self.subject}]: claimed {self.claim}, true {self.truth}"


@dataclass
class Findings:
    """What came of many cases.

    Attributes:
        violations: what is wrong.
        count: cases by family, and of them those ``refused`` (an error of ours), ``undecided`` (3000 bits do not
            tell) and ``empty`` (nothing finite was claimed).
    """

    violations: list[Violation] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)


class Trial:
    """One subject before the judge."""

    def __init__(self, family: str, seed: int, subject: Subject, findings: Findings) -> None:
        self.family, self.seed, self.subject, self.findings = family, seed, subject, findings
        self.dice = Material(seed + 1_000_003)

    def run(self, checks: tuple[str, ...]) -> None:
        """Make the checks; an error that is not ours is a violation."""
        for check in checks:
            try:
                getattr(self, f"_{check}")()
            except SurefootError:
                self.findings.count[self.family] += 1
                self.findings.count["refused"] += 1
            except Undecided:
                self.findings.count["undecided"] += 1
            except NotImplementedError as error:
                if "exact judge" in str(error):
                    raise
                self._crash(check, error)
            except Exception as error:
                self._crash(check, error)

    def _crash(self, check: str, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/src/')[2]}:{last.lineno}"
        self.findings.count[self.family] += 1
        self._wrong(
            f"{check}: crash", "no error but ours", f"{type(error).__name__}: {str(error)[:90]} at {where}"
        )

    def _wrong(self, check: str, claim: str, fact: str) -> None:
        self.findings.violations.append(Violation(self.family, check, self.seed, self.subject.name, claim, fact))

    def _value(self) -> None:
        """The interval of the objective at the weights."""
        s = self.subject
        found = sf.evaluate(s.model, s.x, s.loss.bound_to(s.y))
        self.findings.count[self.family] += 1

        def inside() -> bool | None:
            (number,) = run(s.objective, s.model, {p: stored(p) for p in s.model.parameters()})
            return holds(exactly(found.error), abs(value_of(number) - exactly(found.value)))

        answer = settled(inside)
        self.findings.count["undecided"] += answer is None
        if answer is False:
            self._wrong("value", f"{found.value:.17g} ± {found.error:.3g}", "another")

    def _certificate(self) -> None:
        """Constants of the outputs on a ball."""
        s, radius = self.subject, self.dice.one_of(*self.subject.radii)
        certificate = sf.certify(s.model, s.x, domain=sf.Ball(radius), wrt=s.wrt)
        self._constants("certificate", certificate, s.outputs, radius)

    def _a_priori(self) -> None:
        """Constants of the outputs for all weights that are no larger than these, judged at these."""
        s = self.subject
        if s.wrt != "params" or not s.variables:
            return
        size = math.hypot(*(float(entry) for v in s.variables.values() for entry in v.detach().double().flatten()))
        certificate = sf.certify(s.model, s.x, domain=sf.ProductBall(size * (1 + 1e-9) or 1.0))
        self._constants("a priori", certificate, s.outputs, 0.0)

    def _objective(self) -> None:
        """Constants of the objective on a ball, and the step that follows from them."""
        s, radius = self.subject, self.dice.one_of(*self.subject.radii)
        objective = s.loss.bound_to(s.y)
        certificate = sf.certify(s.model, s.x, objective=objective, domain=sf.Ball(radius), wrt=s.wrt)
        self._constants("objective", certificate, s.objective, radius)
        if s.wrt == "params" and certificate.smoothness.is_finite:
            self._guaranteed_step(certificate, radius)

    def _constants(self, check: str, certificate: Any, function: Callable[[], Tensor], radius: float) -> None:
        """The three constants at the centre and at two points of the ball, and in each along one direction."""
        claims = {name: getattr(certificate, name) for name in ("bound", "lipschitz", "smoothness")}
        for name, claim in claims.items():
            if math.isnan(float(claim)):
                self._wrong(f"{check}: {name}", "nan", "a number")
        with torch.no_grad():
            count = function().numel()
        variables = self.subject.variables
        for place in range(3 if radius else 1):
            move = self._random(variables)
            size = math.sqrt(sum(float(t.square().sum()) for t in move.values())) or 1.0
            part = 0.0 if place == 0 else radius * self.dice.one_of(0.5, 0.999) / size
            direction = {variables[name]: value for name, value in self._random(variables).items()}
            weights = [1.0] if count == 1 else self.dice.normal(count).tolist()
            name = f"{check}: {'centre' if place == 0 else 'ball'}"

            def facts(
                part: float = part, move: Any = move, direction: Any = direction, weights: Any = weights
            ) -> Any:
                point = self._moved(variables, move, part)
                fact = truth(function, self.subject.model, point, direction, weights)
                return {"bound": fact.bound, "lipschitz": fact.lipschitz, "smoothness": fact.smoothness}

            self._compare(name, claims, facts)

    def _compare(self, check: str, claims: Mapping[str, Any], facts: Callable[[], Mapping[str, arb]]) -> None:
        """Every claim against the facts, with more bits for what stays open."""
        self.findings.count[self.family] += 1
        open_ = {name for name, claim in claims.items() if claim.is_finite}
        if not open_:
            self.findings.count["empty"] += 1
        for bits in PRECISIONS:
            if not open_:
                break
            with flint.ctx.workprec(bits):
                try:
                    found = facts()
                except Undecided:
                    continue
                for name in list(open_):
                    claim = _ball(claims[name])
                    answer = holds(claim, found[name])
                    if answer is not None:
                        open_.remove(name)
                    if answer is False:
                        self._wrong(
                            f"{check} {name}", claim.str(20, radius=False), found[name].str(20, radius=False)
                        )
        self.findings.count["undecided"] += bool(open_)

    def _guaranteed_step(self, certificate: Any, radius: float) -> None:
        """The printed step along minus the gradient of the function does not ascend; nor does it along what torch
        computes of it, if that is the gradient to six digits.
        """
        step = certificate.step_size
        if not step or not math.isfinite(step) or not radius:
            return
        s = self.subject
        variables = s.variables
        slopes = self._gradient(variables)
        if slopes is None:
            return
        numbers = iter(slopes)
        exact = {
            n: torch.tensor([-next(numbers) for _ in range(v.numel())], dtype=torch.float64)
            for n, v in variables.items()
        }
        found = torch.autograd.grad(s.objective(), list(variables.values()), allow_unused=True)
        computed = {
            name: -torch.zeros_like(v).reshape(-1).double() if g is None else -g.double().reshape(-1)
            for (name, v), g in zip(variables.items(), found, strict=True)
        }
        near = all(bool(((m - exact[n]).norm() <= 1e-6 * exact[n].norm()).all()) for n, m in computed.items())
        for move in (exact, computed) if near else (exact,):
            if all(bool(torch.isfinite(m).all()) for m in move.values()):
                self._no_ascent(
                    "objective: step_size", lambda m=move: self._moved(variables, m, step), f"step {step:.3g}"
                )

    def _gradient(self, variables: Mapping[str, Tensor]) -> list[float] | None:
        """The gradient, every entry the double next to it, or next but one; ``None`` if 3000 bits do not tell."""
        for bits in PRECISIONS:
            with flint.ctx.workprec(bits):
                try:
                    slopes = truth(self.subject.objective, self.subject.model, self._moved(variables, {}, 0.0))
                except Undecided:
                    continue
                if all(slope.is_exact() or slope.rel_accuracy_bits() > 53 for slope in slopes.gradient):
                    return [float(slope) for slope in slopes.gradient]
        return None

    def _no_ascent(
        self, check: str, point: Callable[[], dict[Tensor, Array]], claim: str, least: float = 0.0
    ) -> None:
        """The objective at the point is lower than at the weights by this much at least."""
        s = self.subject
        variables = s.variables

        def decrease() -> arb:
            here = run(s.objective, s.model, self._moved(variables, {}, 0.0))
            there = run(s.objective, s.model, point())
            return value_of(here[0]) - value_of(there[0])

        self._promise(check, decrease, claim, least)

    def _promise(self, check: str, decrease: Callable[[], arb], claim: str, least: float) -> None:
        """A decrease is at least what was promised."""
        self.findings.count[self.family] += 1
        for bits in PRECISIONS:
            with flint.ctx.workprec(bits):
                try:
                    fact = decrease()
                except Undecided:
                    continue
                answer = holds(fact, exactly(least))
                if answer is False:
                    self._wrong(check, claim, fact.str(20, radius=False))
                if answer is not None:
                    return
        self.findings.count["undecided"] += 1

    def _along(self) -> None:
        """Constants along a segment, and its safe step."""
        s = self.subject
        if s.wrt != "params":
            return
        variables = s.variables
        direction = self._random(variables)
        if self.dice.chance(0.6):
            gradient = torch.autograd.grad(s.objective(), list(variables.values()), allow_unused=True)
            direction = {
                name: torch.zeros_like(v, dtype=torch.float64) if g is None else -g.double()
                for (name, v), g in zip(variables.items(), gradient, strict=True)
            }
        length = self.dice.power(-6, 0)
        domain = sf.Segment(direction, length, order=self.dice.whole(2, 5))
        certificate = sf.certify(s.model, s.x, objective=s.loss.bound_to(s.y), domain=domain)
        tangents = {variables[name]: value for name, value in direction.items()}
        for part in (length, length * self.dice.between(0, 1)):

            def facts(part: float = part) -> dict[str, arb]:
                here = truth(s.objective, s.model, self._moved(variables, {}, 0.0), tangents)
                there = run(s.objective, s.model, self._moved(variables, direction, part))
                moves = [exactly(e) for t in tangents.values() for e in t.double().reshape(-1).tolist()]
                slope = sum((g * m for g, m in zip(here.gradient, moves, strict=True)), arb(0))
                change = value_of(there[0]) - here.values[0]
                eta = exactly(part)
                bend = 2 * (change - slope * eta) / (eta * eta)
                return {
                    "bound": abs(value_of(there[0])),
                    "lipschitz": abs(change) / eta,
                    "smoothness": bend,
                }

            claims = {name: getattr(certificate, name) for name in ("bound", "lipschitz", "smoothness")}
            self._compare("segment", claims, facts)
        step = certificate.safe_step
        if step:
            self._no_ascent(
                "segment: safe_step", lambda: self._moved(variables, direction, step), f"step {step:.17g}"
            )

    def _steps(self) -> None:
        """Steps of optimizers with a promise, judged by the weights as stored before and after."""
        s = self.subject
        if s.wrt != "params":
            return
        name = self.dice.one_of("segment", "evaluation", "evaluation", *METHODS)
        optimizer = METHODS[name](s)
        for k in range(3 if name == "segment" else 2):
            s.change(k)
            before = {parameter: stored(parameter) for parameter in s.model.parameters()}
            optimizer.step(s.x, s.y)
            after = {parameter: stored(parameter) for parameter in s.model.parameters()}
            promised = optimizer.history[-1].proved_decrease
            if promised is None or math.isnan(promised):
                self._wrong(f"{name}: promise", str(promised), "a number")
                return
            if not promised:
                continue

            def decrease(before: Any = before, after: Any = after) -> arb:
                values = [value_of(run(s.objective, s.model, point)[0]) for point in (before, after)]
                return values[0] - values[1]

            self._promise(f"steps: {name}", decrease, f"step {k} promised {promised:.17g}", promised)

    def _random(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.dice.normal(*value.shape) for name, value in variables.items()}

    @staticmethod
    def _moved(variables: Mapping[str, Tensor], move: Mapping[str, Tensor], part: float) -> dict[Tensor, Array]:
        """The variables plus a part of a move, exactly."""
        point = {}
        for name, value in variables.items():
            numbers = stored(value).reshape(-1)
            if part and name in move:
                steps = move[name].double().reshape(-1).tolist()
                for k, step in enumerate(steps):
                    numbers[k] = numbers[k] + exactly(part) * exactly(step)
            point[value] = numbers
        return point


def _ball(claim: Any) -> arb:
    """A magnitude as it is, or as the floating-point number that is printed if that is less."""
    bits = float(claim.log2)
    exact = arb(0) if bits == -math.inf else arb(2) ** arb(bits)
    shown = float(claim)
    return exactly(shown) if 0 < shown < math.inf and exactly(shown) < exact else exact


def investigate(family: str, build: Callable[[int], Subject], number: int, cases: int) -> Findings:
    """Judge so many claims on subjects of a family, two to four kinds of claim each; the number decides which."""
    findings = Findings()
    for seed in itertools.count(number * 100_000):
        if findings.count[family] >= cases:
            break
        subject = build(seed)
        kinds = ("along", "steps") if seed % 2 == 0 and subject.wrt == "params" else ("certificate", "objective")
        kinds = (*kinds, "value") if seed % 5 == 0 else kinds
        Trial(family, seed, subject, findings).run((*kinds, "a_priori") if seed % 3 == 0 else kinds)
    return findings
