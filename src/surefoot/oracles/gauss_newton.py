r"""Gauss-Newton steps by conjugate gradients: on the parameters, or on the dual problem (Prop. dual_gn_step).

**The problem.** With :math:`g = \nabla h`, :math:`\nabla^2h = RR^\top`, :math:`q = \nabla r` at the point, J the
derivative of the chain and :math:`M = \kappa I + \nabla^2r`, the oracle minimises

.. math:: m(v) = \langle g, Jv\rangle + \tfrac12\|R^\top Jv\|^2 + \langle q, v\rangle + \tfrac12v^\top Mv.

Its gradient is :math:`\nabla m(v) = \nabla F + J^\top RR^\top Jv + Mv`, and at any v
:math:`m(v) = \frac12\langle\nabla F + \nabla m(v), v\rangle`, because m is quadratic.

**The dual.** m is strongly convex, so v is its minimiser if and only if :math:`\nabla m(v) = 0`. Put
:math:`w = R^\top Jv`. Then

.. math:: v = v(w) := -M^{-1}\big(\nabla F + J^\top Rw\big) = v_0 - M^{-1}J^\top Rw, \qquad v_0 = -M^{-1}\nabla
F(u),

and inserting v(w) into the definition of w gives a linear system of the size of the output,

.. math:: Sw = R^\top Jv_0, \qquad S = I + R^\top JM^{-1}J^\top R \succeq I.

Conversely, if w solves it then :math:`w = R^\top Jv(w)`, and v(w) satisfies the condition above. The paper's dual
variable is :math:`\mu = g + Rw`; the change of variable keeps the system positive definite where
:math:`\nabla^2h` is singular, as that of the cross-entropy always is. For any w the gradient of the model at v(w)
is :math:`\nabla m(v(w)) = J^\top Rr`, :math:`r = R^\top Jv(w) - w`, the pull-back of the residual.

**Calls.** The gradient and :math:`Jv_0` are two calls; an iteration pulls Rp back and pushes v forward. The
length of the step, :math:`\|r\|^2/(\|p\|^2 + \langle J^\top Rp, M^{-1}J^\top Rp\rangle)`, needs the pull-back
only, so the last iteration needs no push-forward. The d-th iterate is exact in exact arithmetic: :math:`2 + 2d -
1 = 2d + 1` calls. For most losses the start v = 0 saves the first two where there is no regulariser, and the
result is measured.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.chain.batched import Batched
from surefoot.linear_solve import Conjugate, Flat, InPlace, Orthogonal, inner, norm
from surefoot.oracles.losses import factor_of
from surefoot.oracles.problem import OracleError, Problem, Step, reached_status

LOOSE = 1e-3  # from here on residuals are taken as conjugate gradients update them
_ROUNDS = 4  # of refinement
_PATIENCE = 50  # iterations without a smaller residual before round-off is taken to be in the way
_ORTHOGONAL = 512  # residuals of the dual that later ones are made orthogonal to


class Model:
    """The Gauss-Newton model of a problem, with the damping that was set last; vectors are in its precision.

    Attributes:
        gradient: ∇F(u).
        scale: its norm.
        factor: R.
        metric: M, one number or one per entry.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.kappa = problem, 1.0
        self.gradient, self.scale = problem.steep(), problem.steepness
        self.factor = factor_of(problem, problem.dtype)
        self.metric = problem.metric(1.0)
        self._start = problem.autodiff.calls

    def damped(self, kappa: float) -> None:
        """Set κ; calls are counted from now on, with one for the gradient."""
        self.kappa, self.metric, self._start = kappa, self.problem.metric(kappa), self.problem.autodiff.calls

    @property
    def calls(self) -> int:
        """Of the oracle since the damping was set, and one for the gradient."""
        return 1 + self.problem.autodiff.calls - self._start

    def push(self, v: Tensor) -> Tensor:
        """Jv, of the shape of the output: one call."""
        return self.problem.autodiff.pushforward(self.problem.split(v)).to(v.dtype)

    def pull(self, slope: Tensor) -> Tensor:
        """Jᵀμ: one call."""
        return self.problem.join(self.problem.autodiff.pullback(slope.to(self.problem.output.dtype)))

    def pull_onto(self, vector: Tensor, slope: Tensor) -> Tensor:
        """x + Jᵀμ in place of x, without another vector where the precisions allow it: one call."""
        oracle, slope = self.problem.autodiff, slope.to(self.problem.output.dtype)
        if isinstance(oracle, Batched) or any(u.dtype != vector.dtype for u in self.problem.parameters.values()):
            return vector.add_(self.problem.join(oracle.pullback(slope)))
        oracle.pull_onto(self.problem.split(vector), slope)
        return vector

    def slope_at(self, v: Tensor, change: Tensor) -> Tensor:
        """∇m(v), given Jv: one call."""
        return self.pull(self.factor.curved(change)).add_(self.gradient).addcmul_(self.metric, v)

    def step(self, v: Tensor, slope: Tensor | None, tolerance: float, how: str, iterations: int) -> Step:
        """The step v at which the model has this gradient; ``None`` where it is not measured."""
        residual = None if slope is None else norm(slope) / self.scale
        residual = math.inf if residual is not None and math.isnan(residual) else residual  # beyond all doubles
        decrease = -0.5 * (inner(self.gradient, v) + (0.0 if slope is None else inner(slope, v)))
        return Step(
            direction=self.problem.split(v),
            kappa=self.kappa,
            model_decrease=decrease if decrease > 0 else 0.0,
            status=how if residual is None else reached_status(how, residual, tolerance),
            solved=residual is not None and residual <= tolerance,
            calls=self.calls,
            iterations=iterations,
            residual=residual,
        )

    def at_rest(self) -> Step:
        """The step zero, where the gradient is."""
        zero = self.problem.split(torch.zeros_like(self.gradient))
        return Step(zero, self.kappa, 0.0, "the gradient is zero", calls=self.calls)


class Primal:
    r"""Conjugate gradients for :math:`(J^\top RR^\top J + M)v = -\nabla F`, for as many κ as one likes.

    The residual of this system is minus the gradient of the model, so the tolerance is judged by what is at hand.
    Each iteration lowers the model in exact arithmetic: however early one stops, the last point is the best. One
    iteration is a push-forward and a pull-back. Another κ changes the residual by :math:`(\kappa - \kappa')v`,
    which costs no call: so the next solve at the same point starts where the last one ended.
    """

    def __init__(self, problem: Problem) -> None:
        self.model = Model(problem)
        self._last: tuple[float, Tensor, Tensor] | None = None  # κ, v, minus the gradient of the model
        self._half: list[Tensor] = []  # PᵀJp of the direction p with PPᵀ = RRᵀ, as long as it is needed

    def solve(self, kappa: float, tolerance: float, most: int | None = None) -> Step:
        """The minimiser for one κ, up to a residual relative to the gradient, or by so many iterations."""
        model, loose = self.model, tolerance >= LOOSE
        model.damped(kappa)
        if model.scale == 0:
            return model.at_rest()
        v, rest = torch.zeros_like(model.gradient), -model.gradient
        if self._last is not None:
            before, v, rest = self._last
            v, rest = v.clone(), torch.add(rest, v, alpha=before - kappa)
        most = 10 * len(v) + 100 if most is None else min(most, 10 * len(v) + 100)
        goal, iterations = tolerance * model.scale, 0
        for _ in range(1 if loose else _ROUNDS):
            first = norm(rest)
            v, rest, count = self._iterate(v, rest, goal, most - iterations)
            iterations += count
            if loose:
                break
            rest = -model.slope_at(v, model.push(v))  # updated residuals add up round-off
            if not goal < norm(rest) < 0.5 * first or iterations >= most:
                break
        self._last = kappa, v, rest
        how = f"{iterations} iteration{'s' * (iterations != 1)} of conjugate gradients on the parameters"
        step = model.step(v, -rest, tolerance, how, iterations)
        if step.solved or iterations < most:
            return step
        assert step.residual is not None
        much = f"stopped after {how}, as many as were allowed, with a relative residual of {step.residual:.2g}"
        return replace(step, status=much)

    def _iterate(self, v: Tensor, rest: Tensor, goal: float, most: int) -> tuple[Tensor, Tensor, int]:
        """Until the residual is small, round-off is in the way, or the iterations are spent."""
        run = Conjugate(self, v, rest, InPlace())
        size, smallest, waited = norm(rest, run.square), math.inf, 0
        while size > goal and run.iterations < most and waited <= _PATIENCE:
            run.step()
            size = norm(run.residual, run.square)
            waited, smallest = (0, size) if size < smallest else (waited + 1, smallest)
        return run.x, run.residual, run.iterations

    def curvature(self, direction: Tensor) -> float:
        """⟨p, Ap⟩, by a push-forward."""
        model = self.model
        self._half = [model.factor.halved(model.push(direction))]
        curved = norm(self._half[0]) ** 2 + inner(direction, model.metric * direction)
        if not math.isfinite(curved):
            raise OracleError("derivatives are not finite at this point")
        return curved

    def residual(self, before: Tensor, direction: Tensor, length: float) -> Tensor:
        """The residual after a step, by a pull-back."""
        rest = before.clone() if before is direction else before
        rest.addcmul_(self.model.metric, direction, value=-length)
        return self.model.pull_onto(rest, self.model.factor.completed(self._half.pop().mul_(-length)))


class Dual:
    """Conjugate gradients on S, within 2d + 1 calls of the automatic-differentiation oracle for d outputs.

    The residual r is evaluated anew from v in each iteration, which costs as much as updating it. In the end the
    gradient of the model is evaluated from its definition, if a call is left, and that is what is reported. Where
    as many iterations as the dual has dimensions were needed, there is none. Residuals are orthogonal to each
    other in exact arithmetic, and the first few hundred are made so by force: without it, round-off lets the last
    of d iterations miss the solution where κ is small.
    """

    def __init__(self, problem: Problem) -> None:
        self.model = Model(problem)

    def solve(self, kappa: float, tolerance: float, most: int | None = None) -> Step:
        """The minimiser for one κ, up to a residual relative to the gradient."""
        model, problem = self.model, self.model.problem
        model.damped(kappa)
        if model.scale == 0:
            return model.at_rest()
        self._budget = 2 * problem.output.numel() + 1
        self._goal, self._most, self.iterations = tolerance * model.scale, most or self._budget, 0
        self._pulled: Tensor | None = None
        self._spent = False  # whether v is beyond the last push-forward
        if problem.regularizer is None and model.factor.slope is not None:
            # with Rw̄ = g the start w = −w̄ has v(w) = 0, Jv = 0, and the pull-back of its residual is ∇F
            self._w, self._v, self._pulled = -model.factor.slope, torch.zeros_like(model.gradient), model.gradient
            self._change = torch.zeros_like(problem.output, dtype=self._v.dtype)
        else:
            self._v = -model.gradient / model.metric
            self._w = self._v.new_zeros(model.factor.samples, model.factor.columns)
            self._change = model.push(self._v)
        slope: Tensor | None = None
        for _ in range(_ROUNDS):
            slope = self._iterate()
            if slope is not None and model.calls < self._budget:
                slope = model.slope_at(self._v, self._change)
            if slope is None or norm(slope) <= self._goal or model.calls + 5 > self._budget:
                break
            self._w = model.factor.back(self._change)  # begin again from there: v(w) as it is defined
            self._v = -(model.gradient + model.pull(model.factor.forth(self._w))) / model.metric
            self._change = model.push(self._v)
        how = f"{self.iterations} iteration{'s' * (self.iterations != 1)} of conjugate gradients on the dual"
        if slope is None:
            how += ", as many as it has dimensions, which solve it but for round-off; no call was left to measure"
            how += " the residual"
        return model.step(self._v, slope, tolerance, how, self.iterations)

    def _iterate(self) -> Tensor | None:
        """The gradient of the model at the v that is reached; ``None`` where no call is left to know it."""
        r = self.model.factor.back(self._change) - self._w
        self._basis = Orthogonal(r, _ORTHOGONAL)
        run = Conjugate(self, self._w, r, Flat())
        smallest, waited, before = math.inf, 0, self._v
        while True:
            run.look()
            pulled = self._image
            slope = torch.sub(pulled, before, alpha=run.beta) if run.beta else pulled  # JᵀRr, r = p − βp′
            size = norm(slope)
            waited, smallest = (0, size) if size < smallest else (waited + 1, smallest)
            calls, full = self.model.calls, self._basis.full
            if size <= self._goal or waited > _PATIENCE or self.iterations >= self._most:
                return slope
            if calls + 2 > self._budget and not full:  # v stays where it is measured
                return slope
            run.step()
            if self._spent:
                return None
            if full:  # what is left is round-off: measure it, and begin again from there
                run = Conjugate(self, run.x, run.residual, Flat())
            before = pulled

    def curvature(self, direction: Tensor) -> float:
        """⟨p, Sp⟩, by a pull-back."""
        model = self.model
        self._image = model.pull(model.factor.forth(direction)) if self._pulled is None else self._pulled
        self._pulled = None
        return inner(direction, direction) + inner(self._image, self._image / model.metric)

    def residual(self, before: Tensor, direction: Tensor, length: float) -> Tensor:
        """RᵀJv − w after the step, orthogonal to those before; zero where no call is left to push v forward."""
        self._w = self._w + length * direction
        self._v = self._v.addcdiv(self._image, self.model.metric, value=-length)
        self.iterations += 1
        if self.model.calls + 2 > self._budget:
            self._spent = True
            return torch.zeros_like(before)
        self._change = self.model.push(self._v)
        fresh = self.model.factor.back(self._change) - self._w
        return fresh if self._basis.full else self._basis.add(fresh)
