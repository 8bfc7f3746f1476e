"""What Gauss-Newton and Newton optimizers share: how strong the damping is, and how far to go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.batches import Batches
from surefoot.calculus.adjoint.gradient import ProvedGradient
from surefoot.certificate import Certificate
from surefoot.certificate.pieces import InPieces
from surefoot.certificate.proving import certify_proved
from surefoot.certificate.summed import ProvedSum
from surefoot.chain import Chain
from surefoot.chain.autodiff import Autodiff
from surefoot.domains import Ball
from surefoot.errors import EvaluationError, SurefootError
from surefoot.objectives import Objective, Ridge
from surefoot.optim.base import Closure, GuaranteedOptimizer, OptimizerError
from surefoot.optim.forcing import Forcing, relaxed
from surefoot.optim.moving_ball import INSIDE, MovingBall
from surefoot.optim.record import StepRecord
from surefoot.optim.stored import Proposal, Tensors, norm_of, promised, resolution, rounded, square_of, stored
from surefoot.optim.trust_region import next_radius, on_ball
from surefoot.oracles.problem import OracleError, Problem, Step
from surefoot.oracles.search import armijo
from surefoot.processes import Processes
from surefoot.program.checks import is_loader

Damping = Literal["adapted", "trust_region", "certified"] | float
Solver = Callable[[float], Step]
Proved = ProvedGradient | ProvedSum

_TRIALS = 40  # values of κ before giving up
_ACCEPTED = 1e-4  # part of the predicted decrease that a step must achieve
_START = 1e-2  # first radius, relative to the parameters
_RANGE = 1e-12, 1e12  # of an adapted κ


class SecondOrder(GuaranteedOptimizer):
    r"""What Gauss-Newton and Newton steps share: the damping κ and how far to go.

    * ``damping="adapted"`` (Levenberg and Marquardt): a step is taken if the objective falls by a part of what the
      model predicts, else κ grows and the step is computed anew. After a step κ is multiplied by
      :math:`\max(\frac13, 1 - (2\varrho - 1)^3)`, ϱ the ratio of the actual to the predicted decrease (Nielsen's
      rule). So every step that is taken descends, as measured; for a proof of that, use
      :class:`surefoot.CertifiedDescent` with ``direction="gauss_newton"``, where the ratio is one of enclosed
      values.
    * ``damping="trust_region"``: κ is such that the step has the length of a radius
      (:mod:`surefoot.optim.trust_region`). It doubles after a step with ϱ > ¾, and becomes a quarter of the
      length of a step with ϱ < ¼.
    * ``damping="certified"``: κ is such that the model majorises the objective on a ball around the parameters. So
      the decrease of the model is one of the objective, and the record holds it as promised before the
      step is taken: that of the model at the move between stored weights, in double precision
      (:mod:`surefoot.optim.stored`). A step that would leave the ball is shortened to its boundary: with
      :math:`m(0) = 0` and m convex, :math:`m(tv) \le t\,m(v)`.
    * a number: that κ at every step.

    A regulariser :math:`r(u) = \sum_t\frac{\rho_t}2\|u_t\|^2` is part of the objective: of the losses in the
    history, of the model, and of predicted and promised decreases. It needs no further damping. Proof: r is
    quadratic, so :math:`r(u + v) = r(u) + \langle\nabla r(u), v\rangle + \frac12v^\top\nabla^2r\,v`, which is its
    part of the model. So the model with κ majorises the sum as soon as the model of the loss alone with that κ
    majorises the loss. The smoothness in the record is :math:`L + \max_t\rho_t`, a bound on the second
    derivative of the sum.

    Args:
        model: the network.
        objective: a convex loss without targets.
        damping: see above.
        line_search: ``"armijo"`` halves a step until it descends enough; not with certified damping, which needs
            none.
        kappa: the first κ where it is adapted.
        group: a process group of ``torch.distributed`` whose processes have the same model and a part of the data
            each, none at all allowed: ``step`` is then called by all of them, on the objective of all samples
            together. Process 0 decides; weights, history and state are the same on all.
        options: ``regularizer``, ``params``, ``lower``, ``until``, ``progress``; see :class:`GuaranteedOptimizer`.

    With a loader, ``step(loader)``, and with a group the objective is that of all data
    (:mod:`surefoot.chain.batched`).
    """

    takes = (Ridge,)
    takes_loaders = True

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        damping: Damping = "adapted",
        line_search: Literal["armijo"] | None = None,
        kappa: float = 1.0,
        group: Any = None,
        **options: Any,
    ) -> None:
        is_number = isinstance(damping, int | float) and not isinstance(damping, bool)
        named = damping in ("adapted", "trust_region", "certified")
        if not named and not (is_number and 0 < float(damping) < math.inf):
            raise ValueError(
                f"damping is 'adapted', 'trust_region', 'certified' or a positive number, got {damping!r}"
            )
        if line_search not in (None, "armijo"):
            raise ValueError(f"line_search is 'armijo' or None, got {line_search!r}")
        if line_search and damping == "certified":
            raise ValueError("a certified step needs no line search: its decrease is proved")
        if not 0 < kappa < math.inf:
            raise ValueError(f"kappa is a positive number, got {kappa!r}")
        if group is not None and options.get("until") is not None:
            raise ValueError("with a group there is no until='proved', which is about the data of one process")
        super().__init__(model, objective, **options)
        self.damping, self.line_search = damping, line_search
        self.kappa = float(damping) if is_number else float(kappa)
        self._ball = MovingBall(_START)
        self._region: float | None = None  # the radius of a trust region
        self._forcing = Forcing()
        self._chain: Chain | None = None  # that of the last step
        self._ahead: Autodiff | None = None  # its passes at the weights that it left
        self._read: list[Tensor] = []  # copies of what they read: PyTorch does not count what NumPy writes
        self._again = False  # whether a step is on the data of the last one, so that these are kept
        self.processes = None if group is None else Processes(group)

    @property
    def adapts(self) -> bool:
        """Whether κ follows the ratio of the actual to the predicted decrease."""
        return self.damping in ("adapted", "trust_region")

    def forget(self) -> None:
        """Drop what the next tolerance and the next length rest on."""
        self._forcing, self._region, self._chain, self._ahead = Forcing(), None, None, None

    def forced(self, exact: float) -> tuple[float, int | None]:
        """The tolerance and the most iterations of the next solve: by the forcing sequence where κ is adapted."""
        if not self.adapts:
            return exact, None
        return self._forcing.tolerance(exact), self._forcing.most

    def solver(self, problem: Problem, data: str) -> Solver:
        """κ ↦ the minimiser of the model at the present point."""
        raise NotImplementedError

    def certified_kappa(self, certificate: Certificate) -> float:
        """A κ with which the model majorises the objective on the domain of the certificate."""
        raise NotImplementedError

    def curvature(self, proved: Proved, move: Tensors, certificate: Certificate) -> float:
        r"""A bound on :math:`2(F(u + v) - F(u) - \langle\nabla F, v\rangle)` for a move v in the domain."""
        raise NotImplementedError

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One step."""
        if self.processes is None and not is_loader(x):
            if closure is not None or next(self.model.buffers(), None) is not None:  # a pass updates buffers
                loss, problem = self.value(x, y, closure), self._problem(x, y)
            else:
                try:
                    problem = self._problem(x, y)
                    loss = problem.value
                except SurefootError:
                    self.value(x, y)  # says it of the loss, where that is not finite
                    raise
            return self._advanced(problem, loss, self.fingerprint(x, y), x, y)
        if closure is not None:
            raise OptimizerError("a closure knows the loss of one batch: leave it out for loaders and groups")
        problem = self._problem(x, y)
        batches, processes = problem.chain.batches, self.processes
        name = self.fingerprint(x, y) if batches is None else batches.name
        pieces = self._pieces(batches, x, y) if self.damping == "certified" else None
        if processes is None:
            return self._advanced(problem, problem.value, name, x, y, pieces)
        told = processes.gathered(lambda: (name, self.changed))
        if any(changed for _, changed in told):
            self.changed = True
            self.forget()
        name = "".join(part for part, _ in told)[:64]
        record, state = processes.led(
            lambda: (self._advanced(problem, problem.value, name, x, y, pieces), self.extra_state()),
            lambda word: pieces.serve(word) if pieces is not None and _is_asked(word) else problem.serve(word),
            OptimizerError,
        )
        self.load_extra_state(state)
        processes.spread(self.trainable.values())
        return record

    def value(self, x: Any, y: Any = None, closure: Closure | None = None) -> float:
        """The objective at the present parameters, without derivatives; of all data, if they come in pieces."""
        if self.processes is None and not is_loader(x):
            return super().value(x, y, closure)
        return self._problem(x, y).value

    def _problem(self, x: Any, y: Any) -> Problem:
        """The objective at the present weights, perhaps of all batches of a loader, or of all processes."""

        def read() -> Chain:
            if self.quiet and self._chain is not None and self.watch.same_graph(x) is self._chain.graph:
                return self._chain
            chain = Chain(self.model, [] if self.processes is not None and y is not None and not len(y) else x)
            if chain.graph.nodes:
                self.graph(x if chain.batches is None else chain.inputs, chain.graph)  # notices another function
            return chain

        try:
            chain = read() if self.processes is None else self.processes.together(read)
            self._again, ahead, self._ahead = chain is self._chain, self._ahead, None
            self._chain = chain if self.processes is None and chain.batches is None else None
            objective = self.objective if chain.batches is not None else self.objective.bound_to(y)
            same = self._again and all(map(torch.equal, chain.inputs, self._read))
            return Problem(chain, objective, None, self.ridge, self.processes, ahead if same else None)
        except (OracleError, EvaluationError) as error:
            raise OptimizerError(str(error)) from error

    def _pieces(self, batches: Batches | None, x: Any, y: Any) -> InPieces:
        """What is proved of data in pieces."""
        given = Batches([(x, y)] if len(y) else []) if batches is None else batches
        return InPieces(self.model, given, self.objective, processes=self.processes)

    def _advanced(
        self, problem: Problem, loss: float, data: str, x: Any, y: Any, pieces: InPieces | None = None
    ) -> StepRecord:
        try:
            gradient = problem.gradient
            size = problem.steepness
            if not math.isfinite(size):
                raise OptimizerError(f"the gradient is not finite at loss {loss:g}")
            self._forcing.at(data, size)
            for name, parameter in self.trainable.items():
                parameter.grad = gradient[name] if name in gradient else torch.zeros_like(parameter)
            if size == 0:
                promise = 0.0 if self.damping == "certified" else None
                proposal = Proposal({}, 0.0, promised=promise, note="the gradient is zero")
            elif self.damping == "certified":
                certify = partial(certify_proved, self.model, x, objective=problem.objective)
                proved: Proved
                if pieces is None:
                    proved, on = self.proved_gradient(x, y, loss), lambda ball: certify(domain=ball)
                else:
                    proved, on = pieces.gradient(), pieces.on
                    self.check_value(proved.value + self.penalty, loss)
                proposal = self._certified(problem, self.solver(problem, data), on, proved)
            else:
                proposal = self._measured(problem, self.solver(problem, data))
        except OracleError as error:
            raise OptimizerError(str(error)) from error
        return self.take(proposal, loss, size, data)

    def _measured(self, problem: Problem, solver: Solver) -> Proposal:
        """A step with the given or the adapted κ, judged by the objective after it."""
        growth, adapted = 2.0, self.adapts
        for _ in range(_TRIALS):
            if self._region is None:
                step = solver(self.kappa)
                length = problem.norm(step.direction)
            else:
                step, length = on_ball(solver, self.kappa, self._region, _RANGE[0], problem.norm)
            self.kappa = step.kappa if adapted else self.kappa
            straight = dict(step.direction)
            predicted = step.model_decrease + 0.5 * step.kappa * length * length
            resolution = 4 * torch.finfo(problem.output.dtype).eps * max(abs(problem.value), 1e-30)
            if predicted <= resolution:
                return Proposal({}, 0.0, note="no step: descent cannot be told from round-off here")
            for move in (straight,) if step.bend is None else (_bent(straight, step.bend), straight):
                after = problem.value_at(move, keep=self._again)
                ratio = (problem.value - after) / predicted if math.isfinite(after) else -math.inf
                if ratio >= _ACCEPTED:
                    break
            self._forcing.learn(step.iterations, ratio)
            plain = not adapted and self.line_search is None and math.isfinite(after)
            if ratio >= _ACCEPTED or plain:
                self._relax(ratio, length)
                self._ahead = problem.ahead
                self._read = [] if self._ahead is None else [value.clone() for value in problem.chain.inputs]
                rose = f"the loss rose by {after - problem.value:.3g}: take a larger damping" if ratio < 0 else ""
                return Proposal(rounded(problem.parameters, move), 1 / step.kappa, note=rose)
            slope = sum(float((move[name].double() * g.double()).sum()) for name, g in problem.gradient.items())
            if self.line_search and slope < 0:
                found = armijo(lambda t: problem.value_at(move, t), problem.value, slope, first=0.5)  # noqa: B023
                if found is not None:
                    self._tighten(growth, length)
                    shortened = rounded(problem.parameters, {name: found[0] * m for name, m in move.items()})
                    return Proposal(shortened, found[0] / step.kappa, note="shortened")
            if not adapted:
                break
            self._tighten(growth, length)
            growth *= 2
        return Proposal({}, 0.0, note="no step: none was found that descends")

    def _relax(self, ratio: float, length: float) -> None:
        """κ, or the radius, after a step that was taken."""
        if self.damping == "adapted":
            self.kappa = min(max(relaxed(self.kappa, ratio), _RANGE[0]), _RANGE[1])
        elif self.damping == "trust_region":
            self._region = next_radius(length if self._region is None else self._region, length, ratio)

    def _tighten(self, growth: float, length: float) -> None:
        """κ, or the radius, after a step that was too long."""
        if self.damping == "adapted":
            self.kappa = min(self.kappa * growth, _RANGE[1])
        elif self.damping == "trust_region":
            self._region = length / 4

    def _certified(
        self, problem: Problem, solver: Solver, certify: Callable[[Ball], Certificate], proved: Proved
    ) -> Proposal:
        """A step on a ball whose radius follows the length of the steps."""
        ridges = {name: problem.weight(name) for name in problem.parameters}
        wide = {name: value.double() for name, value in problem.parameters.items()}
        pulls = {name: ridges[name] * value for name, value in wide.items()}
        gradient = {name: slope + pulls[name] for name, slope in proved.slopes.items() if name in pulls}
        errors = {  # the product and the sum are rounded
            name: proved.errors[name]
            + 2.0**-50 * (norm_of({name: slope}) + norm_of({name: pulls[name]}))
            + 2.0**-1022
            for name, slope in gradient.items()
        }

        def propose(certificate: Certificate, radius: float) -> Proposal:
            self.kappa = max(self.certified_kappa(certificate), _RANGE[0])
            step = solver(self.kappa)
            length = norm_of(step.direction)
            part = min(1.0, radius * INSIDE / length) if length > 0 else 0.0
            wanted = {name: part * value.double() for name, value in step.direction.items()}
            after, move = stored(problem.parameters, wanted)
            bent = sum(ridges[name] * square_of({name: m}) for name, m in move.items())
            bent += self.curvature(proved, move, certificate)
            inside = norm_of(move) <= radius
            promise = promised(gradient, move, 0.0, errors) - 0.5 * bent * (1 + 2.0**-40) if inside else 0.0
            smoothness = float(certificate.smoothness)
            if max(ridges.values()):
                smoothness = math.nextafter(smoothness + max(ridges.values()), math.inf)
            note = "" if promise > 0 else resolution(problem.parameters)
            return Proposal(after, part / step.kappa, smoothness, promise, radius, part * length, note)

        return self._ball.step(certify, problem.parameters, propose)

    def extra_state(self) -> dict[str, Any]:
        """The damping, the radius and the tolerance of the next step."""
        state = {"kappa": self.kappa, "radius": self._ball.radius, "forcing": self._forcing.state()}
        return state if self._region is None else {**state, "region": self._region}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.kappa, self._ball.radius = float(state["kappa"]), state["radius"]
        self._forcing.load(state["forcing"])
        self._region = state.get("region")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the chain and its passes, which are those of this model."""
        return {**super().__getstate__(), "_chain": None, "_ahead": None}

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        if self.damping != "certified":
            return "nothing is proved: steps are judged by the objective after them. Use damping='certified'"
        return self.promises_kept() if self.history else "nothing yet: the first step brings its own proof"


def _is_asked(word: Any) -> bool:
    """Whether it is about what is proved, and not about passes."""
    return isinstance(word, Ball | tuple)


def _bent(move: Tensors, bend: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() + bend[name] for name, value in move.items()}
