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

from surefoot.oracles.dual_system import DualSystem
from surefoot.oracles.problem import Problem
from surefoot.oracles.step import Step

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
    run = _Conjugate(system, tolerance, 2 * problem.output.numel() + 1)
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
        residual=None if run.terminated else run.residual,
        output_change=None if run.terminated else run.change,
    )


class _Conjugate:
    """Conjugate gradients with a budget of calls.

    If round-off leaves more than the tolerance, the same model is minimised around the v that was reached: there
    its gradient is ∇m(v) in place of ∇F, and everything else is as before (iterative refinement).

    Attributes:
        slope: the gradient of the model at v, zero where it is that by finite termination.
        residual: its norm relative to that at 0, as measured last.
        terminated: whether v is the last of as many iterates as the dual has dimensions, and not measured.
        solved: whether v is the minimiser up to the tolerance.
    """

    def __init__(self, system: DualSystem, tolerance: float, budget: int) -> None:
        self.system, self.tolerance, self.budget = system, tolerance, budget
        self.iterations, self.residual, self.solved, self.terminated = 0, 1.0, False, False
        self._around: tuple[Tensor, Tensor] | None = None  # v and Jv that are refined

    def begin(self, w: Tensor, v: Tensor, change: Tensor | None) -> None:
        """Start from w and v(w); if Jv is known, it is zero, and the pull-back of the residual is ∇F."""
        self._w, self._v, self.slope = w, v, torch.zeros_like(v)
        self._pulled = None if change is None else self.system.gradient
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

    def iterate(self) -> None:
        """Until the tolerance is met, round-off is in the way, or the calls are spent."""
        system = self.system
        r = system.factor.back(self._change) - self._w
        kept, p, before, beta = Orthogonal(r), r, self._v, 0.0
        best, waited = float("inf"), 0
        room = torch.empty_like(self._v)  # made once: fresh memory costs more than the arithmetic
        while True:
            pulled = system.pull(p) if self._pulled is None else self._pulled
            self._pulled = None
            self.slope = torch.sub(pulled, before, alpha=beta, out=room) if beta else pulled  # Jᵀ R r
            self.residual = float(self.slope.norm()) / system.scale
            waited = 0 if self.residual < best else waited + 1
            best = min(best, self.residual)
            if self.residual <= self.tolerance or waited > _PATIENCE:
                return
            last = system.calls + 2 > self.budget
            if last and not kept.full:  # v stays where it was measured
                return
            alpha = float(r.square().sum()) / (float(p.square().sum()) + system.square(pulled))
            self._w = self._w + alpha * p
            system.descend(self._v, pulled, alpha)
            self.iterations += 1
            if last:
                self.terminated = True
                return
            self._change = system.push(self._v)
            fresh = system.factor.back(self._change) - self._w
            spent = kept.full  # then what is left is round-off: measure it, and begin again from there
            fresh = fresh if spent else kept.add(fresh)
            beta = 0.0 if spent else float(fresh.square().sum() / r.square().sum())
            r, p, before = fresh, fresh + beta * p, pulled

    def finished(self) -> bool:
        """Whether to stop: solved, or no calls left. As long as one is left, the model itself is asked."""
        if self.terminated:
            self.solved, self.slope = True, torch.zeros_like(self.v)
            return True
        if self.system.calls < self.budget:
            self.slope = self.system.slope_at(self.v, self.change)
            self.residual = float(self.slope.norm()) / self.system.scale
        self.solved = self.residual <= self.tolerance
        return self.solved or self.system.calls + 3 > self.budget

    @property
    def status(self) -> str:
        """How it ended, in words."""
        if self.terminated:
            return (
                f"solved by {self.iterations} iterations of conjugate gradients on the dual, as many as it has "
                "dimensions; no call was left to measure the residual"
            )
        if self.solved:
            return f"solved by {self.iterations} iterations of conjugate gradients on the dual"
        return (
            f"not solved to the tolerance {self.tolerance:.2g}: after {self.iterations} iterations round-off "
            f"keeps the residual at {self.residual:.2g}; use double precision, or a larger kappa or tolerance"
        )


class Orthogonal:
    """Keeps vectors orthogonal to those before them, as far as there is room."""

    def __init__(self, first: Tensor) -> None:
        self._basis = first.new_empty(min(first.numel(), _KEPT), first.numel())
        self._count = 0
        self.add(first)

    @property
    def full(self) -> bool:
        """Whether nothing but zero is orthogonal to all of them."""
        return self._count == self._basis.shape[1]

    def add(self, vector: Tensor) -> Tensor:
        """The part of the vector that is orthogonal to those before; it is kept for those to come."""
        if self._count == len(self._basis):
            return vector
        flat, basis = vector.reshape(-1), self._basis[: self._count]
        for _ in range(2):  # the second time removes what round-off of the first one left
            flat = flat - basis.T @ (basis @ flat)
        length = float(flat.norm())
        if length > 0:
            self._basis[self._count] = flat / length
            self._count += 1
        return flat.reshape(vector.shape)


__all__ = ["solve_dual"]
