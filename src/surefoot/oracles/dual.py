r"""Gauss-Newton by conjugate gradients on the dual problem (Prop. dual_gn_step).

**The problem.** With :math:`g = \nabla h`, :math:`\nabla^2h = RR^\top`, :math:`q = \nabla r` at the point, J the
derivative of the chain and :math:`M = \kappa I + \nabla^2r`, the oracle minimises

.. math:: m(v) = \langle g, Jv\rangle + \tfrac12\|R^\top Jv\|^2 + \langle q, v\rangle + \tfrac12v^\top Mv.

**The dual.** m is strongly convex, so v is its minimiser if and only if
:math:`J^\top(g + RR^\top Jv) + q + Mv = 0`. Put :math:`w = R^\top Jv`. Then

.. math:: v = v(w) := -M^{-1}\big(J^\top(g + Rw) + q\big) = v_0 - M^{-1}J^\top Rw, \qquad v_0 = -M^{-1}\nabla F(u),

and inserting v(w) into the definition of w gives a linear system of the size of the output,

.. math:: Sw = R^\top Jv_0, \qquad S = I + R^\top JM^{-1}J^\top R \succeq I.

Conversely, if w solves it then :math:`w = R^\top Jv(w)`, and v(w) satisfies the condition above. The paper's dual
variable is :math:`\mu = g + Rw`; the change of variable keeps the system positive definite where
:math:`\nabla^2h` is singular, as that of the cross-entropy always is.

**The residual.** For any w the gradient of the model at v(w) is

.. math:: \nabla m(v(w)) = J^\top(g + RR^\top Jv) + q - J^\top(g + Rw) - q = J^\top R\,r, \qquad
    r = R^\top Jv(w) - w,

the pull-back of the residual of the dual system, and
:math:`m(v) = \frac12\langle\nabla F(u) + \nabla m(v), v\rangle` because m is quadratic.

**Calls.** The gradient and :math:`Jv_0` are two calls; an iteration pulls Rp back and pushes v forward. The
length of the step, :math:`\|r\|^2/(\|p\|^2 + \langle J^\top Rp, M^{-1}J^\top Rp\rangle)`, needs the pull-back
only, so the last iteration needs no push-forward. The d-th iterate is exact in exact arithmetic: :math:`2 + 2d -
1 = 2d + 1` calls. For most losses the start v = 0 saves the first two where there is no regulariser, and the
result is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.chain.batched import Batched
from surefoot.linear_solve import Conjugate, Flat, Orthogonal
from surefoot.oracles.factor import Factor, factor_of
from surefoot.oracles.problem import OracleError, ParameterSpace, Problem, Step, reached_status

_PATIENCE = 50  # iterations without a smaller residual before round-off is taken to be in the way
_ROUNDS = 4  # of refinement
_KEPT = 512  # residuals that later ones are kept orthogonal to


def solve_dual(
    problem: Problem,
    kappa: float,
    tolerance: float,
    accumulate: torch.dtype | None = torch.float64,
    warm_start: Tensor | None = None,
) -> Step:
    """The Gauss-Newton oracle within 2d + 1 calls of the automatic-differentiation oracle, d the output's size.

    The residual r is evaluated anew from v in each iteration, which costs as much as updating it. In the end the
    gradient of the model is evaluated from its definition, if a call is left, and that is what is reported. If
    none is left, the reported one is that of the last iteration, at the same v; where as many iterations as the
    dual has dimensions were needed, there is none.
    Residuals are orthogonal to each other in exact arithmetic, and the first few hundred are kept so by force:
    without it, round-off lets the last of d iterations miss the solution where κ is small.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term.
        tolerance: of the gradient of the model at the result, relative to that at 0.
        accumulate: the precision of the vectors; the calls are made in that of the model.
        warm_start: a guess of Jv, of the shape of the output. It costs one of the calls.
    """
    system = DualSystem(problem, kappa, accumulate)
    if system.scale == 0:
        return Step(system.space.split(-system.gradient), kappa, 0.0, "the gradient is zero", calls=system.calls)
    run = _Run(system, tolerance, 2 * problem.output.numel() + 1)
    run.begin(*system.start(warm_start if run.budget > 3 else None))
    for _ in range(_ROUNDS):
        run.iterate()
        if run.finished():
            break
        run.refine()
    return Step(
        direction=system.space.split(run.v),
        kappa=kappa,
        model_decrease=system.decrease(run.v, run.slope),
        status=run.status,
        solved=run.solved,
        calls=system.calls,
        iterations=run.iterations,
        residual=None if run.terminated else run.residual_norm,
        output_change=None if run.terminated else run.change,
    )


class DualSystem:
    """S as an operator, and what its solution says about the primal problem.

    Args:
        problem: the objective around a point.
        kappa: the weight of the proximal term.
        accumulate: the precision of the vectors; that of the parameters if ``None``.
        factor: R, if it is known already.

    Attributes:
        gradient: ∇F(u), as a vector.
        scale: its norm.
        calls: how often the automatic-differentiation oracle was called since the system was made.
    """

    def __init__(
        self, problem: Problem, kappa: float, accumulate: torch.dtype | None = None, factor: Factor | None = None
    ) -> None:
        self.problem, self.kappa = problem, kappa
        self.space = ParameterSpace(problem, accumulate)
        self.factor = factor_of(problem, self.space.dtype) if factor is None else factor
        self.metric = self.space.metric(kappa)
        self._calls_before = problem.autodiff.calls
        self.gradient = gradient = self.space.gradient()
        self.scale = problem.steepness if gradient is problem.whole_gradient else self.space.norm(gradient)
        ridge = problem.regularizer
        self._regulariser = None if ridge is None else self.space.join(ridge.gradient(problem.parameters))

    @property
    def calls(self) -> int:
        """How often the automatic-differentiation oracle was called since the system was made."""
        return self.problem.autodiff.calls - self._calls_before

    def pull(self, z: Tensor) -> Tensor:
        """JᵀRz, a vector of parameters, for z of samples × columns: one call."""
        slope = self.factor.forth(z).to(self.problem.output.dtype)
        return self.space.join(self.problem.autodiff.pullback(slope))

    def pull_onto(self, vector: Tensor, slope: Tensor) -> Tensor:
        """x + Jᵀμ in place of x, where the precisions allow it without another vector: one call."""
        oracle, slope = self.problem.autodiff, slope.to(self.problem.output.dtype)
        if isinstance(oracle, Batched) or any(u.dtype != vector.dtype for u in self.problem.parameters.values()):
            return vector.add_(self.space.join(oracle.pullback(slope)))
        oracle.pull_onto(self.space.split(vector), slope)
        return vector

    def weighed(self, v: Tensor) -> float:
        """⟨v, Mv⟩."""
        if self.metric.dim() == 0:
            return self.space.dot(v, v) * float(self.metric)
        return self.space.dot(v, self.metric * v)

    def push(self, v: Tensor) -> Tensor:
        """Jv, of the shape of the output: one call."""
        return self.problem.autodiff.pushforward(self.space.split(v)).to(self.space.dtype)

    def start(self, warm_start: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        r"""A first w, v(w), and Jv if it is known without a call.

        A guess of Jv gives :math:`w = R^\top Jv`. Without one and without a regulariser, w = −w̄ with
        :math:`R\bar w = g` has v = 0, the start of least calls: there :math:`J^\top Rr = J^\top R\bar w = \nabla
        F`. Else w = 0, :math:`v = v_0`.

        Raises:
            OracleError: if the guess has not the shape of the output.
        """
        if warm_start is None and self.problem.regularizer is None and self.factor.slope is not None:
            change = torch.zeros_like(self.problem.output, dtype=self.space.dtype)
            return -self.factor.slope, self.gradient.new_zeros(()).expand_as(self.gradient), change
        v = -self.gradient / self.metric
        if warm_start is None:
            return v.new_zeros(self.factor.samples, self.factor.columns), v, None
        if warm_start.shape != self.factor.shape:
            expected, given = tuple(self.factor.shape), tuple(warm_start.shape)
            raise OracleError(f"a warm start has the shape of the output, {expected}, got {given}")
        w = self.factor.back(warm_start.to(v))
        return w, self.primal(w), None

    def primal(self, w: Tensor) -> Tensor:
        """v(w): one call."""
        return (self.gradient + self.pull(w)).div_(self.metric).neg_()

    def square(self, pulled: Tensor) -> float:
        """⟨x, M⁻¹x⟩ for a vector of parameters."""
        if self.metric.dim() == 0:
            size = self.space.norm(pulled)
            return size * size / float(self.metric)
        return self.space.dot(pulled, pulled / self.metric)

    def descend(self, v: Tensor, pulled: Tensor, length: float) -> None:
        """v − length·M⁻¹x, in place of v."""
        if self.metric.dim() == 0:
            v.add_(pulled, alpha=-length / float(self.metric))
        else:
            v.addcdiv_(pulled, self.metric, value=-length)

    def slope_at(self, v: Tensor, change: Tensor) -> Tensor:
        """The gradient of the model at v, from its definition: one call."""
        output = self.problem.output
        curved = self.problem.slope + self.factor.curved(change).to(output.dtype)
        found = self.space.join(self.problem.autodiff.pullback(curved)).addcmul_(self.metric, v)
        return found if self._regulariser is None else found.add_(self._regulariser)

    def decrease(self, v: Tensor, slope: Tensor | None = None) -> float:
        """−m(v), from the gradient of the model at v, which is zero where it is not given."""
        twice = self.space.dot(self.gradient if slope is None else self.gradient + slope, v)
        return max(-0.5 * twice, 0.0)


class _Run:
    """Conjugate gradients on the dual, with a budget of calls.

    The system hands :class:`~surefoot.linear_solve.Conjugate` curvatures and residuals: the curvature of a
    direction needs its pull-back only, and the residual is evaluated anew from v. If round-off leaves more than
    the tolerance, the same model is minimised around the v that was reached: there its gradient is ∇m(v) in place
    of ∇F, and everything else is as before (iterative refinement).

    Attributes:
        slope: the gradient of the model at v, zero where it is that by finite termination.
        residual_norm: its norm relative to that at 0, as measured last.
        terminated: whether v is the last of as many iterates as the dual has dimensions, and not measured.
        solved: whether v is the minimiser up to the tolerance.
    """

    def __init__(self, system: DualSystem, tolerance: float, budget: int) -> None:
        self.system, self.tolerance, self.budget = system, tolerance, budget
        self.iterations, self.residual_norm, self.solved, self.terminated = 0, 1.0, False, False
        self._around: tuple[Tensor, Tensor] | None = None  # v and Jv that are refined

    def begin(self, w: Tensor, v: Tensor, change: Tensor | None) -> None:
        """Start from w and v(w); if Jv is known, it is zero, and the pull-back of the residual is ∇F."""
        self._w, self._v = w, v.clone(memory_format=torch.contiguous_format)
        self.slope = torch.zeros_like(self._v)
        self._given = None if change is None else self.system.gradient
        self._change = self.system.push(v) if change is None else change

    def refine(self) -> None:
        """Start again around v."""
        self._around = self.v, self.change
        self.begin(torch.zeros_like(self._w), -self.slope / self.system.metric, None)

    @property
    def v(self) -> Tensor:
        """The minimiser so far."""
        return self._v if self._around is None else self._around[0] + self._v

    @property
    def change(self) -> Tensor:
        """Jv as of the last push-forward."""
        return self._change if self._around is None else self._around[1] + self._change

    def curvature(self, direction: Tensor) -> float:
        """⟨p, Sp⟩, by a pull-back."""
        self._pulled = self.system.pull(direction) if self._given is None else self._given
        self._given = None
        return float(direction.square().sum()) + self.system.square(self._pulled)

    def residual(self, before: Tensor, direction: Tensor, length: float) -> Tensor:
        """RᵀJv − w after the step, orthogonal to those before; zero where no call is left to push v forward."""
        self._w = self._w + length * direction
        self.system.descend(self._v, self._pulled, length)
        self.iterations += 1
        if self.system.calls + 2 > self.budget:
            self.terminated = True
            return torch.zeros_like(before)
        self._change = self.system.push(self._v)
        fresh = self.system.factor.back(self._change) - self._w
        return fresh if self._kept.full else self._kept.add(fresh)

    def iterate(self) -> None:
        """Until the tolerance is met, round-off is in the way, or the calls are spent."""
        r = self.system.factor.back(self._change) - self._w
        self._kept = Orthogonal(r, _KEPT)
        run = Conjugate(self, self._w, r, Flat())
        best, waited, before = float("inf"), 0, self._v
        room = torch.empty_like(self._v)  # made once: fresh memory costs more than the arithmetic
        while not self.terminated:
            run.look()
            pulled = self._pulled
            self.slope = torch.sub(pulled, before, alpha=run.beta, out=room) if run.beta else pulled  # Jᵀ R r
            self.residual_norm = self.system.space.norm(self.slope) / self.system.scale
            waited = 0 if self.residual_norm < best else waited + 1
            best = min(best, self.residual_norm)
            if self.residual_norm <= self.tolerance or waited > _PATIENCE:
                return
            spent = self._kept.full  # then what is left is round-off: measure it, and begin again from there
            if self.system.calls + 2 > self.budget and not spent:  # v stays where it was measured
                return
            run.step()
            if spent:
                run = Conjugate(self, run.x, run.residual, Flat())
            before = pulled

    def finished(self) -> bool:
        """Whether to stop: solved, or no calls left. As long as one is left, the model itself is asked."""
        if self.terminated:
            self.solved, self.slope = False, torch.zeros_like(self.v)
            return True
        if self.system.calls < self.budget:
            self.slope = self.system.slope_at(self.v, self.change)
            self.residual_norm = self.system.space.norm(self.slope) / self.system.scale
        self.solved = self.residual_norm <= self.tolerance
        return self.solved or self.system.calls + 3 > self.budget

    @property
    def status(self) -> str:
        """How it ended, in words."""
        if self.terminated:
            return (
                f"{self.iterations} iterations of conjugate gradients on the dual, as many as it has dimensions, "
                "which solve it but for round-off; no call was left to measure the residual"
            )
        how = f"{self.iterations} iteration{'s' * (self.iterations != 1)} of conjugate gradients on the dual"
        return reached_status(how, self.residual_norm, self.tolerance)
