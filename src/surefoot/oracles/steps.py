r"""The oracles people call: gradient (eq. grad_step), Gauss-Newton (eq. gn_step) and Newton (eq. newton_step).

Each is asked for a ``chain`` (the network and its batch) and an ``objective`` (a loss bound to its targets), at
the point ``params`` by path (the model's present parameters by default), with a ``regularizer`` added to the loss
and a proximal term of weight ``kappa`` > 0. Each refuses, by an :class:`OracleError`, what is not finite, is in
half precision, or does not fit.

**Data in pieces.** The chain may be that of a loader, ``surefoot.Chain(model, loader)`` with an objective without
targets; and with ``group``, a process group of ``torch.distributed``, every process passes the chain of its part
of the data, ``surefoot.Chain(model, [])`` where it has none. The step is that of the joined batch, the same on all
processes: outputs and targets of all samples are gathered, activations are those of one batch at a time
(:mod:`surefoot.chain.batched`). The price is a forward pass for each call where there are several batches. Methods
that need matrices of all samples at once are not for pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.chain.autodiff import Autodiff
from surefoot.graph import Graph
from surefoot.linear_solve import inner, norm
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.choice import Choice, choose_gauss_newton, choose_newton
from surefoot.oracles.dynamic import solve_dynamic
from surefoot.oracles.gauss_newton import Dual, Primal
from surefoot.oracles.gram import Gram
from surefoot.oracles.losses import columns_of, require_convex
from surefoot.oracles.newton import solve_conjugate
from surefoot.oracles.problem import OracleError, Problem, Step, check_kappa, check_tolerance, curved_along
from surefoot.processes import Processes
from surefoot.program.checks import plainly

Method = Literal["auto", "primal", "primal_gram", "dual", "dual_gram", "dynamic"]
METHODS = ("auto", "primal", "primal_gram", "dual", "dual_gram", "dynamic")
IN_PIECES = ("primal", "dual")
NEWTON_METHODS = ("auto", "cg", "dynamic")
_PART = 0.1  # of a step, after which the output is compared with its linear model
_MOST = 0.75  # times the length of a step, from which an acceleration says that it is too long to be bent
_AGREE = 1e-5  # of two values of ⟨∇F(u), v⟩, relative to the lengths
Correct = Callable[[Tensor, Tensor], Tensor]
_chosen: WeakKeyDictionary[Graph, dict[bool, tuple[Any, Choice]]] = WeakKeyDictionary()  # for Newton steps or not
_asked: WeakSet[Graph] = WeakSet()  # graphs of which a step was asked: at the next one their passes are traced


@plainly
def gradient(
    chain: Chain,
    objective: Objective,
    kappa: float = 1.0,
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    group: Any = None,
) -> Step:
    r"""The minimiser of :math:`\langle\nabla F(u), v\rangle + \frac\kappa2\|v\|^2`.

    The minimiser is :math:`v = -\nabla F(u)/\kappa`, a gradient step of size 1/κ, and the model falls by
    :math:`\frac1{2\kappa}\|\nabla F(u)\|^2`.

    >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> chain, weights = sf.Chain(model, x), {"weight": torch.tensor([[1.0, 0.0]])}
    >>> step = sf.oracles.gradient(chain, sf.Square([[0.0]]), kappa=2.0, params=weights)
    >>> step.direction["weight"], step.model_decrease
    (tensor([[-4.5000, -6.0000]]), 56.25)
    """
    kappa = check_kappa(kappa)
    problem = _problem(chain, objective, params, regularizer, group)

    def solve() -> Step:
        problem.steep()  # which is finite
        direction = {path: -slope / kappa for path, slope in problem.gradient.items()}
        decrease = 0.5 * problem.steepness**2 / kappa
        return Step(direction, kappa, decrease, "solved in closed form", calls=problem.autodiff.calls)

    return problem.led(solve)


@plainly
def gauss_newton(
    chain: Chain,
    objective: Objective,
    kappa: float = 0.1,
    method: Method = "auto",
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    tolerance: float | None = None,
    group: Any = None,
    bend: bool = False,
) -> Step:
    r"""The minimiser of the Gauss-Newton model.

    .. math:: \langle\nabla h, Jv\rangle + \tfrac12(Jv)^\top\nabla^2h\,Jv + \langle\nabla r, v\rangle
        + \tfrac12v^\top\nabla^2r\,v + \tfrac\kappa2\|v\|^2,

    with h and r at the present point and J the derivative of the chain there.

    Args:
        chain: see above, as for all that is not named here.
        objective: a convex loss.
        method: ``"auto"``: the one that is predicted to cost least (:mod:`surefoot.oracles.choice`), the status
            says why; ``"primal"`` and ``"dual"``: conjugate gradients on the parameters, or on the dual within 2d
            + 1 calls of the automatic-differentiation oracle, d the size of the output
            (:mod:`surefoot.oracles.gauss_newton`); ``"primal_gram"`` and ``"dual_gram"``: a Cholesky factor of the
            Gram matrix of either (:mod:`surefoot.oracles.gram`); ``"dynamic"``: dynamic programming over the chain
            (:mod:`surefoot.oracles.dynamic`).
        tolerance: of the gradient of the model at the result, relative to that at 0; by default 1e-6 in single and
            1e-12 in double precision. A step in single precision that misses it is computed again in double.
        bend: whether the step is for somebody who looks at the objective where it leads: it comes with half its
            acceleration (:func:`accelerated`) where a factor is at hand, and its residual is the solver's.

    Raises:
        OracleError: also if the loss is not convex.

    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])
    >>> step = sf.oracles.gauss_newton(sf.Chain(nn.Linear(1, 1), x), sf.Square(y), 1e-3, "dual", tolerance=1e-4)
    >>> step.solved, step.calls <= 5
    (True, True)
    """
    kappa = check_kappa(kappa)
    if method not in METHODS:
        raise OracleError(f"method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
    problem = _problem(chain, objective, params, regularizer, group)
    exact = check_tolerance(tolerance, problem.output.dtype)
    if chain.graph in _asked and not problem.in_pieces:
        problem.trace()
    _asked.add(chain.graph)

    def solve(problem: Problem) -> Step:
        solver = gauss_newton_solver(problem, method, exact)
        step = solver.solve(kappa, exact, None)
        if bend and solver.correct is not None:
            step = accelerated(problem, step, solver.correct)
        return step if solver.choice is None else replace(step, status=f"{step.status} ({solver.choice})")

    step = problem.led(lambda: solve(problem))
    if bend:
        return step
    step = measured(problem, step, exact)
    if not step.solved and not problem.is_double:
        wide = problem.in_double()
        fine = wide.led(lambda: solve(wide))
        narrow = {path: fine.direction[path].to(u) for path, u in problem.parameters.items()}
        fine = measured(problem, replace(fine, direction=narrow, calls=step.calls + fine.calls), exact)
        if fine.residual is not None and step.residual is not None and fine.residual < step.residual:
            return fine
    return step


@dataclass(frozen=True)
class Solver:
    """A solver of one problem for as many κ as one likes.

    Attributes:
        solve: the step for κ, a tolerance and the most iterations; what does not depend on κ is computed once.
        choice: why it was chosen, where it was.
        correct: from a step and a secant of the output to half an acceleration, see :func:`accelerated`, with the
            κ of the last step; where a factor is at hand.
    """

    solve: Callable[[float, float, int | None], Step]
    choice: Choice | None = None
    correct: Correct | None = None


def gauss_newton_solver(problem: Problem, method: Method, tolerance: float, most: int | None = None) -> Solver:
    """The solver of a method, or of the one that is predicted to cost least.

    Args:
        problem: the objective around a point.
        method: as for :func:`gauss_newton`.
        tolerance: for which the method is chosen.
        most: the iterations for which it is chosen.
    """
    if problem.in_pieces:
        if method not in ("auto", *IN_PIECES):
            raise OracleError(
                f"method={method!r} needs all samples at once: for data in pieces use "
                f"{', '.join(map(repr, IN_PIECES))}, or pass them as one batch"
            )
        method = "primal" if method == "auto" else method
    problem.check_varying()
    require_convex(problem.objective)
    choice = _choice(problem, tolerance, most) if method == "auto" else None
    chosen = method if choice is None else choice.method
    if chosen == "dynamic":
        return Solver(lambda kappa, _, __: solve_dynamic(problem, kappa, model="gauss_newton"), choice)
    if chosen in ("primal_gram", "dual_gram"):
        gram = Gram(problem, "parameters" if chosen == "primal_gram" else "dual")
        return Solver(gram.solve, choice, gram.correct)
    return Solver((Primal(problem) if chosen == "primal" else Dual(problem)).solve, choice)


@plainly
def newton(
    chain: Chain,
    objective: Objective,
    kappa: float,
    method: Literal["auto", "dynamic", "cg"] = "auto",
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    double: bool = True,
    tolerance: float | None = None,
    group: Any = None,
) -> Step:
    r"""The minimiser of the quadratic model, :math:`\frac12v^\top\nabla^2Fv + \nabla F^\top v +
    \frac\kappa2\|v\|^2`.

    It has one if :math:`\nabla^2F(u) + \kappa I` is positive definite; every :math:`\kappa` above the smoothness
    of F will do.

    Args:
        chain: see above, as for all that is not named here.
        method: "auto", the one that is predicted to cost least; "dynamic", exact and linear in the depth
            (Algorithm "Newton oracle"); or "cg", conjugate gradients on Hessian-vector products, which needs no
            matrices.
        double: whether kappa is doubled until the model is bounded below; if not, the step is zero and not solved.
        tolerance: of "cg", on the relative residual; by default near what the precision allows.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> x, y = torch.tensor([[2.0]]), torch.tensor([[6.0]])
    >>> step = sf.oracles.newton(sf.Chain(model, x), sf.Square(y), kappa=1e-6, method="dynamic")
    >>> round(float(model.weight.detach() + step.direction["weight"]), 4)
    3.0
    >>> print(step.status)
    the minimiser of the Newton model with κ = 1e-06, by dynamic programming
    """
    if method not in NEWTON_METHODS:
        raise OracleError(f"the method of a Newton step is 'auto', 'dynamic' or 'cg', got {method!r}")
    problem = _problem(chain, objective, params, regularizer, group)
    exact = check_tolerance(tolerance, problem.output.dtype, 1e-5, 1e-10)
    chosen, choice = newton_method(problem, method, exact)
    if chosen == "dynamic":
        step = solve_dynamic(problem, kappa, "newton", double)
    else:
        step = problem.led(lambda: solve_conjugate(problem, kappa, double, tolerance))
        step = measured(problem, step, 10 * exact, newton=True)
    return step if choice is None else replace(step, status=f"{step.status} ({choice})")


def newton_method(
    problem: Problem, method: str, tolerance: float, most: int | None = None
) -> tuple[str, Choice | None]:
    """The way to a Newton step; and, where it was chosen now, why.

    Raises:
        OracleError: if the method is not one for data in pieces.
    """
    if problem.in_pieces:
        if method == "dynamic":
            raise OracleError("dynamic programming is about one batch: use method='cg' for data in pieces")
        return "cg", None
    if method != "auto":
        return method, None
    choice = _choice(problem, tolerance, most, newton=True)
    return choice.method, choice


def _problem(
    chain: Chain, objective: Objective, params: Mapping[str, Tensor] | None, regularizer: Ridge | None, group: Any
) -> Problem:
    return Problem(chain, objective, params, regularizer, None if group is None else Processes(group))


def _choice(problem: Problem, tolerance: float, most: int | None, *, newton: bool = False) -> Choice:
    """The method that is predicted to cost least, as it was predicted last where nothing differs."""
    columns = None if newton else columns_of(problem)
    before, asked = _chosen.setdefault(problem.chain.graph, {}), (tolerance, most, columns)
    if newton not in before or before[newton][0] != asked:
        fresh = (
            choose_newton(problem, tolerance, most)
            if newton
            else choose_gauss_newton(problem, columns, *asked[:2])
        )
        before[newton] = asked, fresh
    return before[newton][1]


def measured(problem: Problem, step: Step, tolerance: float, newton: bool = False) -> Step:
    r"""A step of a model in single precision with its residual and its decrease in double precision.

    Solvers judge themselves by passes in the precision of the model, before the step is rounded to it. Where a
    soft-max is saturated, or the model is ill-conditioned, both hide most of the residual. So
    :math:`\nabla m(v) = \nabla F(u) + J^\top\nabla^2h\,Jv + \nabla^2r\,v + \kappa v` (for Newton's model with the
    curvature of the chain along the slope of the loss) is evaluated once more, at v as it is returned: Jv comes
    with the forward pass where operations have forward derivatives, and a pull-back follows; another one for
    :math:`\|\nabla F(u)\|`, unless :math:`\langle\nabla F, v\rangle = \langle\nabla h, Jv\rangle + …` shows that
    the solver's is not round-off.
    """
    if problem.is_double or not problem.norm(step.direction):
        return step
    v = {path: part.double() for path, part in step.direction.items()}
    wide = problem.in_double(along=v)

    def judged() -> Step:
        oracle: Any = wide.autodiff
        change = getattr(oracle, "pushed", None)
        change = oracle.pushforward(v) if change is None else change
        slope, curved = curved_along(wide.objective, oracle.value, change)
        pulled = oracle.bent(v, slope, slope + curved) if newton else oracle.pullback(slope + curved)
        flat, ridge = wide.join(v), wide.metric(0.0)
        decayed = ridge * wide.join(wide.parameters)
        left = wide.join(pulled).add_(decayed).add_(flat, alpha=step.kappa).addcmul_(ridge, flat)
        inside = inner(slope, change) + inner(decayed, flat)
        rough, scale = problem.join(problem.gradient).double(), problem.steepness
        if (
            not abs(inside - inner(rough, flat)) <= _AGREE * scale * norm(flat) < math.inf
            or norm(left) > tolerance * scale
        ):
            scale = norm(wide.join(oracle.pullback(slope)).add_(decayed))
        residual = norm(left) / scale if scale else 0.0
        residual = math.inf if math.isnan(residual) else residual  # squares are beyond the range of doubles
        solved, status = residual <= tolerance, step.status
        if not (solved and step.solved):
            verdict = "solved" if solved else f"not solved to the tolerance {tolerance:.2g}"
            how = status.removeprefix("solved ")
            status = f"{verdict}: measured in double precision the residual is {residual:.2g}; {how}"
        decrease = max(-0.5 * (inside + inner(left, flat)), 0.0)
        return replace(
            step, direction={}, residual=residual, solved=solved, status=status, model_decrease=decrease
        )

    return replace(wide.led(judged), direction=step.direction)


def accelerated(problem: Problem, step: Step, correct: Correct) -> Step:
    r"""The step with half its geodesic acceleration as its ``bend``, where that is short beside the step.

    Along :math:`u(t) = u + tv + \frac{t^2}2a` the output is :math:`\psi(u) + tJv + \frac{t^2}2(Ja +
    D^2\psi(u)[v, v]) + O(t^3)`. The acceleration a makes the quadratic term small in the metric of the loss: it
    minimises :math:`\frac12\|R^\top(Ja + c)\|^2 + \frac12a^\top Ma` with :math:`c = D^2\psi(u)[v, v]`, whose
    matrix is that of the step; so with its factor it costs little more than one evaluation, for

    .. math:: c = \frac2h\Big(\frac{\psi(u + hv) - \psi(u)}h - Jv\Big) + O(h).

    Where narrow valleys are bent, as those of physics-informed networks, the damping falls faster (Transtrum and
    Sethna, Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares minimization,
    arXiv:1201.5885, 2012). Nothing is proved about the accelerated point: whoever goes there looks at the
    objective.

    Args:
        problem: the objective around a point.
        step: the minimiser of its Gauss-Newton model, solved.
        correct: see :class:`Solver`.
    """
    if not step.solved or step.model_decrease <= 0:
        return step
    moved = {path: torch.add(u, step.direction[path], alpha=_PART) for path, u in problem.parameters.items()}
    with torch.no_grad():
        after = problem.chain.value({**problem.point, **moved})
    bend = problem.split(correct(problem.join(step.direction), (after - problem.output) / _PART) / _PART)
    if not 2 * problem.norm(bend) <= _MOST * problem.norm(step.direction):  # also where it is not a number
        return step
    return replace(step, bend=bend)


__all__ = [
    "Autodiff",
    "Solver",
    "accelerated",
    "gauss_newton",
    "gauss_newton_solver",
    "gradient",
    "measured",
    "newton",
]
