r"""The oracles people call: gradient (eq. grad_step), Gauss-Newton (eq. gn_step) and Newton (eq. newton_step).

Each is asked for a ``chain`` (the network and its batch) and an ``objective`` (a loss bound to its targets), at
the point ``params`` by path (the model's present parameters by default), with a ``regularizer`` added to the loss
and a proximal term of weight ``kappa`` > 0. Each refuses, by an :class:`OracleError`, what is not finite, is in
half precision, or does not fit.

**Data in pieces.** The chain may be that of a loader, ``surefoot.Chain(model, loader)`` with an objective without
targets; and with ``group``, a process group of ``torch.distributed``, every process passes the chain of its part
of the data, ``surefoot.Chain(model, [])`` where it has none. The step is that of the joined batch, the same on all
processes: outputs and targets of all samples are gathered, activations are those of one batch at a time
(:mod:`surefoot.chain.batched`). The price is a forward pass for each call where there are several batches.
Of the methods that need matrices of all samples at once there is ``"dual_gram"``, for which the factors of layers
are gathered on process 0 (:mod:`surefoot.oracles.gram`): their inputs are activations, and with no other method do
activations cross. So ``"auto"`` is ``"primal"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.graph import Graph
from surefoot.graph.checks import plainly
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.choice import Choice, Sizes, choose_gauss_newton, choose_newton
from surefoot.oracles.dual import solve_dual
from surefoot.oracles.dual_gram import DualGram
from surefoot.oracles.dynamic import solve_dynamic
from surefoot.oracles.factor import has_factor, require_convex
from surefoot.oracles.geodesic import Correct
from surefoot.oracles.kronecker import Kronecker
from surefoot.oracles.measured import is_measured, measured
from surefoot.oracles.newton_conjugate import solve_conjugate
from surefoot.oracles.primal import LOOSE, Primal
from surefoot.oracles.primal_gram import PrimalGram
from surefoot.oracles.problem import OracleError, ParameterSpace, Problem, Step, check_kappa, check_tolerance
from surefoot.processes import Processes

Method = Literal["auto", "primal", "primal_gram", "dual", "dual_gram", "dynamic"]
METHODS = ("auto", "primal", "primal_gram", "dual", "dual_gram", "dynamic")
IN_PIECES = ("primal", "dual", "dual_gram")
NEWTON_METHODS = ("auto", "cg", "dynamic")
_SHARE = 1e-2  # of the tolerance, that round-off may have in a residual that is not measured
_chosen: WeakKeyDictionary[Graph, dict[bool, tuple[Any, Choice]]] = WeakKeyDictionary()  # see _choice; for Newton?
_asked: WeakSet[Graph] = WeakSet()  # graphs of which a step was asked: at the next one their passes are traced


@dataclass(frozen=True)
class Solver:
    """A solver of one problem for as many κ as one likes.

    Attributes:
        solve: the step for κ, a tolerance and the most iterations; what does not depend on κ is kept.
        choice: why it was chosen, where it was.
        correct: solves for an acceleration with the κ of the last step (:mod:`surefoot.oracles.geodesic`), where a
            factor is at hand.
        unjudged: the step for κ and a tolerance where its residual is measured afterwards, so that the solver need
            not judge itself by passes of its own.
        resolves: whether the residual of the last step is known up to a part of the gradient, for all that
            round-off does, so that it need not be measured; where the solver can tell.
    """

    solve: Callable[[float, float, int | None], Step]
    choice: Choice | None = None
    correct: Correct | None = None
    unjudged: Callable[[float, float], Step] | None = None
    resolves: Callable[[float], bool] | None = None


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
        ParameterSpace(problem).gradient()  # which is finite
        direction = {path: -slope / kappa for path, slope in problem.gradient.items()}
        size = problem.steepness
        fall = 0.5 * size * size / kappa
        return Step(direction, kappa, fall, "solved in closed form", calls=problem.autodiff.calls)

    return problem.led(solve)


def _problem(
    chain: Chain, objective: Objective, params: Mapping[str, Tensor] | None, regularizer: Ridge | None, group: Any
) -> Problem:
    return Problem(chain, objective, params, regularizer, None if group is None else Processes(group))


@plainly
def gauss_newton(
    chain: Chain,
    objective: Objective,
    kappa: float = 0.1,
    method: Method = "auto",
    params: Mapping[str, Tensor] | None = None,
    regularizer: Ridge | None = None,
    tolerance: float | None = None,
    accumulate: torch.dtype | None = torch.float64,
    warm_start: Tensor | None = None,
    group: Any = None,
) -> Step:
    r"""The minimiser of the Gauss-Newton model.

    .. math:: \langle\nabla h, Jv\rangle + \tfrac12(Jv)^\top\nabla^2h\,Jv + \langle\nabla r, v\rangle
        + \tfrac12v^\top\nabla^2r\,v + \tfrac\kappa2\|v\|^2,

    with h and r at the present point and J the derivative of the chain there.

    Args:
        chain: see above, as for all that is not named here.
        objective: a convex loss.
        method: ``"auto"``: the one that is predicted to cost least (:mod:`surefoot.oracles.choice`), the status
            says why; ``"dual"``: conjugate gradients within 2d + 1 calls of the automatic-differentiation oracle,
            d the size of the output (:mod:`surefoot.oracles.dual`); ``"dual_gram"``: the same system from its
            Gram matrix, assembled layer by layer (:mod:`surefoot.oracles.dual_gram`); ``"primal"``: conjugate
            gradients on the parameters (:mod:`surefoot.oracles.primal`); ``"primal_gram"``: a Cholesky factor of
            the Gram matrix of the parameters (:mod:`surefoot.oracles.primal_gram`); ``"dynamic"``: dynamic
            programming over the chain.
        tolerance: of the gradient of the model at the result, relative to that at 0; by default 1e-6 in single and
            1e-12 in double precision.
        accumulate: the precision of the vectors of the dual solvers; that of the parameters if ``None``.
        warm_start: for the dual solvers a guess of Jv, such as the ``output_change`` of an earlier step.

    Raises:
        OracleError: also if the loss is not convex.

    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])
    >>> step = sf.oracles.gauss_newton(sf.Chain(nn.Linear(1, 1), x), sf.Square(y), kappa=1e-3)
    >>> step.solved, step.calls <= 5
    (True, True)
    """
    kappa = check_kappa(kappa)
    if method not in METHODS:
        raise OracleError(f"method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
    problem = _problem(chain, objective, params, regularizer, group)
    exact = check_tolerance(tolerance, problem.output.dtype)

    def solver() -> Solver:
        require_convex(problem.objective)
        return gauss_newton_solver(problem, method, exact, None, accumulate, warm_start)

    if problem.in_pieces:
        return measured(problem, problem.led(lambda: solver().solve(kappa, exact, None)), exact)
    if chain.graph in _asked:
        problem.trace()
    _asked.add(chain.graph)
    found = solver()
    if found.unjudged is not None and is_measured(problem):
        step = measured(problem, found.unjudged(kappa, exact), exact)
        if step.solved:
            return _explained(step, found.choice)
    step = _explained(found.solve(kappa, exact, None), found.choice)
    known = found.resolves if exact >= LOOSE and step.solved and is_measured(problem) else None
    return step if known is not None and known(_SHARE * exact) else measured(problem, step, exact)


def gauss_newton_solver(
    problem: Problem,
    method: Method,
    tolerance: float,
    most: int | None = None,
    accumulate: torch.dtype | None = torch.float64,
    warm_start: Tensor | None = None,
    preconditioner: Callable[[], Kronecker | None] | None = None,
) -> Solver:
    """The solver of a method, or of the one that is predicted to cost least.

    Args:
        problem: the objective around a point.
        method: as for :func:`gauss_newton`.
        tolerance: for which the method is chosen.
        most: the iterations for which it is chosen.
        accumulate: as for :func:`gauss_newton`.
        warm_start: likewise.
        preconditioner: of conjugate gradients on the parameters; asked only where these were chosen.
    """
    if problem.in_pieces:
        if method not in ("auto", *IN_PIECES):
            raise OracleError(
                f"method={method!r} needs all samples at once: for data in pieces use "
                f"{', '.join(map(repr, IN_PIECES))}, or pass them as one batch"
            )
        method = "primal" if method == "auto" else method
    choice = _choice(problem, tolerance, most) if method == "auto" else None
    chosen: str = method if choice is None else choice.method
    if chosen == "dynamic":
        ParameterSpace(problem)  # refuses a model in which nothing varies
        return Solver(lambda kappa, _, __: solve_dynamic(problem, kappa, model="gauss_newton"), choice)
    if chosen == "primal":
        inverse = None if preconditioner is None or problem.in_pieces else preconditioner()
        primal = Primal(problem, accumulate, inverse)
        return Solver(primal.solve, choice, resolves=primal.resolves if inverse is None else None)
    if chosen == "primal_gram":
        direct = PrimalGram(problem, accumulate)
        return Solver(lambda kappa, tolerance, _: direct.solve(kappa, tolerance), choice, direct.correct)
    if chosen == "dual_gram":
        gram = DualGram(problem, accumulate)
        bend = None if problem.in_pieces else gram.correct
        return Solver(
            lambda kappa, tolerance, _: gram.solve(kappa, tolerance, warm_start),
            choice,
            bend,
            lambda kappa, tolerance: gram.solve(kappa, tolerance, warm_start, judged=False),
        )
    return Solver(lambda kappa, tol, _: solve_dual(problem, kappa, tol, accumulate, warm_start), choice)


def _choice(problem: Problem, tolerance: float, most: int | None, *, newton: bool = False) -> Choice:
    """The method that is predicted to cost least, as it was predicted last where nothing differs."""
    known, asked = _chosen.setdefault(problem.chain.graph, {}), (tolerance, most, newton or has_factor(problem))
    if newton not in known or known[newton][0] != asked:
        sizes = sizes_of(problem)
        known[newton] = asked, choose_newton(sizes, *asked[:2]) if newton else choose_gauss_newton(sizes, *asked)
    return known[newton][1]


def sizes_of(problem: Problem) -> Sizes:
    """What the costs of methods are made of."""
    rows = problem.output.shape[0] if problem.output.dim() else 1
    return Sizes(problem.chain, rows, problem.output.numel() // max(rows, 1))


def _explained(step: Step, choice: Choice | None) -> Step:
    return step if choice is None else replace(step, status=f"{step.status} ({choice})")


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
        return _explained(solve_dynamic(problem, kappa, "newton", double), choice)
    step = problem.led(lambda: solve_conjugate(problem, kappa, double, tolerance))
    return _explained(measured(problem, step, 10 * exact, newton=True), choice)


def newton_method(
    problem: Problem, method: str, tolerance: float, most: int | None = None
) -> tuple[str, Choice | None]:
    """The way to a Newton step; and, where it was chosen here, why.

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
