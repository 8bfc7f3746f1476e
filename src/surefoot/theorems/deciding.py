r"""``surefoot.convergence``: which theorem applies from the present weights, on which ball.

The radius is searched for: :math:`\omega` is computed on balls up to :math:`2\eta`, which contains the solution,
or up to :math:`1/\omega(0)`, beyond which nothing can be proved. A residual that is smaller by the factor
``missing``, at the same Jacobian, is proved to be enough: the largest first step that the theorem covers does not
depend on the residual, and the first step is proportional to it.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any, Literal

from torch import Tensor, nn

from surefoot.batches import Batches
from surefoot.calculus.leaves import ordinary_device
from surefoot.guarantees import GuaranteeError
from surefoot.norms.hermitian import up
from surefoot.objectives import Objective, Ridge, Square
from surefoot.processes import Processes
from surefoot.program.checks import is_loader, plainly, unwrapped
from surefoot.theorems.convex import DENSE, strongly_convex
from surefoot.theorems.descent import Chosen, descent
from surefoot.theorems.pieces import Pieces
from surefoot.theorems.problem import Problem, not_onto, refused
from surefoot.theorems.record import METHODS, Convergence, Hypothesis, most
from surefoot.theorems.statements import Interpolation

Method = Literal["gauss_newton", "damped", "gradient", "momentum", "stochastic", "newton"]
_KANTOROVICH = "Newton-Kantorovich theorem, underdetermined"


@plainly
def convergence(
    model: nn.Module,
    x: Any,
    objective: nn.Module,
    regularizer: Ridge | None = None,
    method: Method = "gauss_newton",
    effort: Literal["low", "high"] = "high",
    *,
    momentum: float | None = None,
    batch_size: int = 1,
    confidence: float = 0.95,
    per_block: bool = False,
    group: Any = None,
) -> Convergence:
    """Whether a method is proved to converge from the present weights, to what and how fast.

    Args:
        model: the network; it is not changed.
        x: all the data of the objective as one batch; or any re-iterable of batches ``(x, y)``, which are read one
            by one (:mod:`surefoot.theorems.pieces`).
        objective: a loss bound to its targets; without targets where the batches bring them.
        regularizer: a ridge that is added to the objective.
        method: ``"gauss_newton"`` (square loss: to an exact solution), ``"damped"`` (the same with a fixed
            damping, ``statement.kappa``, at a linear rate), ``"gradient"`` (to zero loss, or to a strict local
            minimum), ``"momentum"`` (to zero loss, the steps of ``torch.optim.SGD`` with momentum),
            ``"stochastic"`` (to zero loss, on random batches, with some probability), ``"newton"`` (to a strict
            local minimum).
        effort: ``"low"`` for a quick look with coarser constants.
        momentum: momentum of the heavy ball, between 0 and 1; by default several are tried, and the one with the
            best rate is taken.
        batch_size: number of samples of each stochastic step.
        confidence: probability with which stochastic steps have to converge.
        per_block: whether each layer (of other networks, each parameter) has a step size of its own. These are
            ``block_step_sizes`` of the result, and norms are weighted accordingly.
        group: a process group of ``torch.distributed``. Each process has a part of the data, possibly none, and
            all have the same weights and call this function. Process 0 decides, and all get its verdict.

    Returns:
        The verdict with its theorem, the verified numbers, and what is missing where it is not proved.

    Raises:
        GuaranteeError: if no theorem covers this method and objective.
        CaptureError: if the model cannot be read.
        UnsupportedOperation: if an operation has no rule.

    >>> model, x = nn.Linear(2, 1).double(), torch.eye(2).double()
    >>> verdict = sf.convergence(model, x, sf.Square(torch.zeros(2, 1)))
    >>> verdict.proved, verdict.iterations(1e-20)
    (True, 1)
    """
    if method not in METHODS:
        raise GuaranteeError(f"the method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if not isinstance(objective, Objective) or not objective.takes_targets:
        raise GuaranteeError(
            "convergence is proved for losses of surefoot that are bound to targets, such as surefoot.Square(y), "
            f"got {objective!r}"
        )
    if regularizer is not None and not isinstance(regularizer, Ridge):
        raise GuaranteeError(f"the theorems know a surefoot.Ridge or no regulariser, got {regularizer!r}")
    chosen = Chosen(method, momentum, batch_size, confidence)
    _check(chosen, per_block)
    model = unwrapped(model)
    interpolates = isinstance(objective, Square) and regularizer is None
    if not interpolates and (per_block or method not in ("gradient", "newton")):
        name = "step sizes per block" if per_block else METHODS[method]
        raise GuaranteeError(
            f"the theorem about {name} is about exact solutions: surefoot.Square without a regulariser. For other "
            "objectives use method='newton' or method='gradient'"
        )
    with ordinary_device():
        loss = objective

        def read() -> tuple[Batches | list[tuple[None, Any, Tensor]], Objective]:
            if is_loader(x):
                return Batches(x, ordered=True), loss
            targets = loss.chosen()  # refuses a loss without targets
            if group is None:
                return [(None, x, targets)], loss.bound_to(None)
            return Batches([(x, targets)] if len(targets) else []), loss.bound_to(None)

        processes = None if group is None else Processes(group)
        batches, free = read() if processes is None else processes.together(read)
        pieces = Pieces(model, batches, free, processes, effort == "high")
        verdict: Convergence = pieces.led(
            lambda: _decided(Problem(pieces, regularizer, effort, per_block), chosen)
        )
        return verdict


def _decided(problem: Problem, chosen: Chosen) -> Convergence:
    """The verdict of the theorem that applies, or of the one that is nearest to applying."""
    method = chosen.method
    if method == "gauss_newton":
        return _interpolation(problem)
    if method == "newton" or not isinstance(problem.objective, Square) or problem.regularizer is not None:
        return strongly_convex(problem, method)
    first = descent(problem, chosen)
    if first.proved or method != "gradient" or problem.per_block or problem.parameters > DENSE:
        return first
    second = strongly_convex(problem, method)
    return second if second.proved or second.missing < first.missing else first


def _check(chosen: Chosen, per_block: bool) -> None:
    method, momentum, batch_size, confidence = astuple(chosen)
    if momentum is not None and not 0 < momentum < 1:
        raise GuaranteeError(f"the momentum is between 0 and 1, got {momentum!r}")
    if momentum is not None and method != "momentum":
        raise GuaranteeError("a momentum goes with method='momentum'")
    if not (isinstance(batch_size, int) and batch_size >= 1) or not 0 < confidence < 1:
        raise GuaranteeError(
            f"batches have at least one sample and the confidence is between 0 and 1, got {batch_size!r} and "
            f"{confidence!r}"
        )
    if per_block and method in ("gauss_newton", "damped", "newton"):
        raise GuaranteeError(f"{METHODS[method]} has no step sizes: per_block goes with gradient steps")


def _interpolation(problem: Problem) -> Convergence:
    why = not_onto(problem, ": use a larger network, fewer samples, or method='newton'")
    if why:
        return refused(problem, "gauss_newton", _KANTOROVICH, why)
    linear, weight = problem.linearised, problem.weight()
    profile = problem.profile(2 * linear.least, lambda tried: linear.least / max(tried.room()[0], 1e-300))
    best = Interpolation(linear.least, profile, linear.norm, linear.length, weight)
    omega = profile.steps[-1][1] if profile.steps else math.inf
    missing = 1.0 if best.holds else 2 * best.h  # beyond ½ it is the first step over what is covered
    advice = (
        f"h = {most(best.h)}, needs ½: a residual {missing:.3g} times smaller at the same Jacobian is "
        "enough; or a better conditioned Jacobian (more units, fewer samples)."
    )
    return Convergence(
        method="gauss_newton",
        theorem=_KANTOROVICH,
        proved=best.holds,
        hypotheses=(
            Hypothesis("‖r‖", "the residual", linear.length),
            Hypothesis(
                "σ", "the smallest singular value of the Jacobian", linear.sigma, "> 0", holds=True, lower=True
            ),
            Hypothesis("η", "the length of the first step", linear.least),
            Hypothesis(
                "ω", f"how fast the Jacobian changes within {profile.radius:.4g}, relative to itself", omega
            ),
            Hypothesis("h", "the first step over twice the longest that is covered", best.h, "≤ ½", best.holds),
            Hypothesis("t*", "the distance to a solution", best.distance),
        ),
        missing=missing,
        advice=(advice,) if not best.holds and math.isfinite(missing) else (),
        obstacles=() if best.holds else problem.obstacles(2 * linear.least),
        statement=best,
        nothing=None if best.holds else problem.nothing(),
        loss=up(weight / 2 * linear.length**2),
    )
