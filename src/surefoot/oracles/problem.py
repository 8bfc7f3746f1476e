r"""What every oracle is asked, an objective of a chain around a point, and what it returns, a step.

:math:`F(u) = h(\psi(u)) + r(u)`, with a chain :math:`\psi`, a loss h of its output and a regulariser r that is a
sum over the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from surefoot.chain import Chain
from surefoot.chain.autodiff import Autodiff
from surefoot.chain.batched import Batched
from surefoot.errors import ChainError, EvaluationError, SurefootError
from surefoot.graph.nodes import in_double
from surefoot.linear_solve import inner, norm
from surefoot.objectives import Objective, ObjectiveError, Ridge
from surefoot.processes import Processes
from surefoot.torch_private import joined, parts_of

_LARGE, _KEPT = 1 << 16, 1 << 21  # numbers of a forward pass from which it is traced, and up to which it is kept
_WIDE = 8  # it is not kept where outputs are more than this part of it: the loss then takes most of the memory


class OracleError(SurefootError, ValueError):
    """An oracle cannot be computed for this input."""


def require_real(chain: Chain) -> None:
    """Refuse states of complex numbers where they are vectors: derivatives in these would miss half of them."""
    if chain.graph.is_complex:
        raise OracleError(
            "the model computes with complex numbers, which are no vectors of real ones: use method='primal' for "
            "Gauss-Newton and method='cg' for Newton steps"
        )


class Problem:
    """An objective around a point, with what all solvers share.

    Args:
        chain: the network and its batch.
        objective: a loss bound to its targets.
        params: the point, by path; the model's present parameters by default.
        regularizer: a function of the parameters, or ``None``.
        processes: those that have a part of the data each; all of them make the problem at the same time, and
            process 0 solves it, inside :meth:`led`. Then, and with a loader, the objective is that of all outputs
            and targets, which are gathered.
        oracle: the passes of one batch at the point, where they were made before.

    Attributes:
        parameters: the point, detached, by path; only what varies.
        point: the same with the values that were given for frozen parameters.
        size: how many numbers vary.
        autodiff: the oracle at the point; it counts its calls.
        loss: h(ψ(u)).
        ahead: the passes at the point of which the value was asked last, where they are kept.

    Raises:
        OracleError: if something is not finite, is in half precision, or does not fit.
    """

    def __init__(
        self,
        chain: Chain,
        objective: Objective,
        params: Mapping[str, Tensor] | None = None,
        regularizer: Ridge | None = None,
        processes: Processes | None = None,
        oracle: Autodiff | None = None,
    ) -> None:
        if not isinstance(objective, Objective):
            raise OracleError(f"the objective is a loss such as surefoot.CrossEntropy(y), got {objective!r}")
        if regularizer is not None and not isinstance(regularizer, Ridge):
            raise OracleError(f"the regulariser is a surefoot.objectives.Ridge or None, got {regularizer!r}")
        self.processes, self.in_pieces = processes, chain.batches is not None or processes is not None
        if len(chain.graph.outputs) > 1 or not (chain.graph.outputs or self.in_pieces):
            raise OracleError(f"an objective reads one tensor, the model returns {len(chain.graph.outputs)}")
        self.chain, self.objective, self.regularizer = chain, objective, regularizer
        self.ahead: Autodiff | None = None
        try:
            given = chain._checked(params)
        except ChainError as error:
            raise OracleError(str(error)) from error
        self.point = {path: value.detach() for path, value in given.items()}
        frozen = {leaf.path for leaf in chain.graph.frozen}
        self.parameters = {path: value for path, value in self.point.items() if path not in frozen}
        self.size = sum(value.numel() for value in self.parameters.values())
        self._check() if processes is None else processes.together(self._check)
        try:
            self.autodiff = self.oracle() if oracle is None else oracle
            self.output: Tensor = self.autodiff.value
            if self.in_pieces:
                self.objective = objective = self._of_all(objective)
            with torch.enable_grad():  # in double precision: a soft-max that is saturated cancels in single
                point = self.output.detach().double().requires_grad_()
                self._taped: tuple[Tensor, Tensor] | None = (objective(point), point)
            self.loss = float(self._taped[0].detach())
        except (ObjectiveError, ChainError, EvaluationError) as error:
            raise OracleError(str(error)) from error
        if not math.isfinite(self.loss):
            raise OracleError(f"the objective is {self.loss} at this point")

    def oracle(self, *, double: bool = False) -> Autodiff | Batched:
        """That of automatic differentiation at the point; in double precision, if that is asked for."""
        point = {path: in_double(value) for path, value in self.point.items()} if double else self.point
        return self.chain.autodiff(point, self.processes)

    def dot(self, a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
        """⟨a, b⟩ for one tensor, or part of it, for each parameter; in double precision."""
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))

    def norm(self, direction: Mapping[str, Tensor]) -> float:
        """The norm of a direction, or of a gradient, by path."""
        return math.hypot(*map(norm, direction.values()))

    def _check(self) -> None:
        """Parameters and inputs are finite, and in a precision for linear solves."""
        for path, value in self.parameters.items():
            if value.dtype in (torch.float16, torch.bfloat16):
                raise OracleError(f"'{path}' is {value.dtype}: a linear solve needs single or double precision")
            if not all_finite(value):
                raise OracleError(f"'{path}' has entries that are not finite")
        for value in self.chain.inputs:
            if value.is_floating_point() and not all_finite(value):
                raise OracleError("the input has entries that are not finite")

    def _of_all(self, objective: Objective) -> Objective:
        """The loss bound to the targets of all batches of all processes."""
        batches, name = self.chain.batches, type(objective).__name__

        def here() -> list[Tensor]:
            if not objective.takes_targets:
                raise ObjectiveError(f"{name} has no targets: data in pieces are pairs (x, y)")
            if batches is None:
                return [objective.chosen()]
            if objective.targets is not None and len(objective.targets):
                raise ObjectiveError(
                    f"{name} is bound to targets, but the batches bring their own: use one without"
                )
            return [y for _, _, y in batches]

        everyone = [here()] if self.processes is None else self.processes.gathered(here)
        return objective.bound_to(torch.cat([y.to(self.output.device) for part in everyone for y in part]))

    def led(self, solve: Callable[[], Step], oracle: Batched | None = None) -> Step:
        """The step that process 0 finds while the others help, with this oracle or another, on all of them."""
        if self.processes is None:
            return solve()
        direction: dict[str, Tensor] = {}

        def lead() -> tuple[Step, list[str]]:
            found = solve()
            direction.update(found.direction)
            return replace(found, direction={}), list(direction)

        step, paths = self.processes.led(lead, lambda word: self.serve(word, oracle), OracleError)
        likes = {path: self.parameters[path] for path in paths}
        here = {p: direction[p].to(like) if direction else torch.empty_like(like) for p, like in likes.items()}
        self.processes.spread(here.values())
        return replace(step, direction=here)

    def serve(self, word: Any, oracle: Batched | None = None) -> None:
        """On a process that does not lead: take part in a pass of an oracle, or in a function of the problem."""
        asked = self.autodiff if oracle is None else oracle
        assert isinstance(asked, Batched)
        word(self) if callable(word) else asked.serve(word)

    def trace(self) -> None:
        """Have passes traced, where many are to come and take longer than their calls."""
        oracle = self.autodiff
        if isinstance(oracle, Autodiff) and not oracle.is_traced and self._numbers >= _LARGE:
            oracle.trace()

    @property
    def _numbers(self) -> int:
        """How many a forward pass computes."""
        return sum(node.numel for node in self.chain.graph.nodes)

    @cached_property
    def slope(self) -> Tensor:
        """∇h(ψ(u)), of the shape of the output and in its precision; computed in double."""
        taped, self._taped = self._taped, None
        fine = torch.autograd.grad(*taped)[0] if taped else slope_at(self.objective, self.output)
        return fine.to(self.output.dtype, memory_format=torch.contiguous_format)

    def forget_slope(self) -> None:
        """Drop ∇h(ψ(u)), which is as large as the output, where no solver needs it any more."""
        self.__dict__.pop("slope", None)

    @property
    def value(self) -> float:
        """F(u)."""
        return self.loss + self._penalty(self.parameters)

    def _penalty(self, parameters: Mapping[str, Tensor]) -> float:
        ridge = self.regularizer
        return 0.0 if ridge is None else sum(float(ridge({p: value})) for p, value in parameters.items())

    def value_at(self, direction: Mapping[str, Tensor], part: float = 1.0, keep: bool = False) -> float:
        """F(u + tv) for a direction v and t = part by a forward pass, perhaps kept as ``ahead`` if it is small."""
        self.ahead = None
        moved = {p: torch.add(u, direction[p], alpha=part).to(u.dtype) for p, u in self.parameters.items()}
        with torch.no_grad():
            penalty, oracle = self._penalty(moved), self.autodiff
            moved = {**self.point, **moved}
            if isinstance(oracle, Batched):
                outputs = oracle.at(moved)
            elif keep and oracle.is_traced and _WIDE * self.output.numel() <= self._numbers <= _KEPT:
                self.ahead = Autodiff(self.chain.graph, self.chain.inputs, moved)
                outputs = self.ahead.value
            else:
                (outputs,) = self.chain.graph.run(moved, self.chain.inputs)
            del moved  # before the loss takes memory of its own
            outputs = outputs.double()
            return float(self.objective(outputs)) + penalty

    def weight(self, path: str) -> float:
        """The curvature of the regulariser in a parameter."""
        return 0.0 if self.regularizer is None else self.regularizer.weight_of(path)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """∇F(u), by path."""
        return self.space.split(self.whole_gradient) if self.parameters else {}

    @cached_property
    def whole_gradient(self) -> Tensor:
        """∇F(u) as one vector: one call of the oracle, counted."""
        found = self.autodiff.pullback(self.slope)
        if self.regularizer is not None:
            found = {path: slope + self.weight(path) * self.parameters[path] for path, slope in found.items()}
        return self.space.join(found)

    @cached_property
    def steepness(self) -> float:
        """‖∇F(u)‖."""
        return self.space.norm(self.whole_gradient) if self.parameters else 0.0

    @cached_property
    def space(self) -> ParameterSpace:
        """Its parameters side by side, in their precision."""
        return ParameterSpace(self)

    def curve(self, direction: Tensor) -> Tensor:
        """∇²h(ψ(u)) applied to a change of the output."""
        return curved_along(self.objective, self.output, direction)[1]


class ParameterSpace:
    r"""The parameters of a problem side by side in one vector, and the metric :math:`M = \kappa I + \nabla^2 r`.

    Args:
        problem: whose parameters.
        dtype: of the vectors; by default that of the parameters.

    Attributes:
        paths: the parameters, in the order of the vector.
        dtype: of the vectors.

    Raises:
        OracleError: if no parameter varies.
    """

    def __init__(self, problem: Problem, dtype: torch.dtype | None = None) -> None:
        if not problem.parameters:
            raise OracleError("no parameter of the model asks for gradients: call model.requires_grad_(True)")
        self.problem, self.paths = problem, tuple(problem.parameters)
        self._like = tuple(problem.parameters.values())
        self._sizes = [value.numel() for value in self._like]
        given = reduce(torch.promote_types, (value.dtype for value in self._like))
        self.dtype = given if dtype is None else dtype

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector; a path that is missing is zero."""
        if all(path in tensors and tensors[path].dtype == self.dtype for path in self.paths):
            return joined([tensors[path] for path in self.paths])
        vector = torch.zeros(sum(self._sizes), dtype=self.dtype, device=self._like[0].device)
        for path, part in self._parts(vector):
            if path in tensors:
                part.copy_(tensors[path])
        return vector

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector as tensors of the shapes and types of the parameters."""
        return {path: part.to(self.problem.parameters[path].dtype) for path, part in self._parts(vector)}

    def _parts(self, vector: Tensor) -> Iterable[tuple[str, Tensor]]:
        return zip(self.paths, parts_of(vector, self._like), strict=True)

    def metric(self, kappa: float) -> Tensor:
        """The diagonal of κI + ∇²r: one number if it is the same everywhere, else one per entry."""
        weights = [kappa + self.problem.weight(path) for path in self.paths]
        device = self._like[0].device
        if len(set(weights)) == 1:
            return torch.tensor(weights[0], dtype=self.dtype, device=device)
        sizes = torch.tensor(self._sizes, device=device)
        return torch.tensor(weights, dtype=self.dtype, device=device).repeat_interleave(sizes)

    def gradient(self) -> Tensor:
        """∇F(u): one call of the oracle the first time.

        Raises:
            OracleError: if it is not finite.
        """
        if not math.isfinite(self.problem.steepness):
            for path, value in self.problem.gradient.items():
                if not all_finite(value):
                    raise OracleError(
                        f"the gradient with respect to '{path}' is not finite: look for divisions by zero and "
                        "overflow there"
                    )
        return self.problem.whole_gradient.to(self.dtype)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """⟨a, b⟩, see :func:`surefoot.linear_solve.inner`."""
        return inner(a, b)

    def norm(self, a: Tensor, square: float | None = None) -> float:
        """‖a‖, see :func:`surefoot.linear_solve.norm`; ⟨a, a⟩ may be known."""
        return norm(a, square)


@dataclass(frozen=True)
class Step:
    r"""The minimiser v of a model of the objective around u, plus :math:`\frac\kappa2\|v\|^2`.

    Attributes:
        direction: v, by parameter path; u + v is the new point.
        kappa: the weight of the proximal term that was used.
        model_decrease: the value of the model (with the proximal term) at 0 minus that at v, never negative.
        status: a sentence: solved, or what stood in the way.
        solved: whether v is the minimiser, up to the residual.
        calls: of the automatic-differentiation oracle: pull-backs and push-forwards through the whole chain.
            Dynamic programming makes such passes itself, and they count; the matrices of single computations,
            which it differentiates one by one, do not, nor does what measures a residual in double precision or
            estimates its round-off.
        iterations: of the inner solver; where it is direct, how often its result was refined.
        residual: norm of the gradient of the model at v relative to that at 0. Oracles measure it in double
            precision, at v as it is returned (:mod:`surefoot.oracles.measured`). There is one exception: where the
            tolerance is 1e-3 or more, conjugate gradients on the parameters report the residual that they updated,
            if an estimate of its round-off (not a bound) is below a hundredth of the tolerance. For a model in
            double precision it is ``None`` where the calls that are allowed were spent before.
        length: t, where a line search made tv of the minimiser v; then the direction is tv.
        doubled: how often kappa was doubled until the model was bounded below.
        unbounded_at: the computation at which the last infeasible kappa failed, counted from 1.
        output_change: Jv, the change of the output that the linear model predicts, where the solver knows it.
        bend: half the acceleration, to be added to the direction (:mod:`surefoot.oracles.geodesic`).
    """

    direction: Mapping[str, Tensor]
    kappa: float
    model_decrease: float
    status: str
    solved: bool = True
    calls: int = 0
    iterations: int = 0
    residual: float | None = 0.0
    length: float = 1.0
    doubled: int = 0
    unbounded_at: int | None = field(default=None)
    output_change: Tensor | None = field(default=None, repr=False)
    bend: Mapping[str, Tensor] | None = field(default=None, repr=False)


_NAMES = {"gradient": "linear", "gauss_newton": "Gauss-Newton", "newton": "Newton"}


def solved_status(model: str, kappa: float, doubled: int, where: str | None, how: str) -> str:
    """What to say of a step that was found, perhaps after kappa was doubled."""
    found = f"the minimiser of the {_NAMES[model]} model with κ = {kappa:g}, by {how}"
    if not doubled:
        return found
    times = "once" if doubled == 1 else f"{doubled} times"
    return f"{found}; the model was unbounded below {where}, and κ was doubled {times}"


def reached_status(how: str, residual: float, tolerance: float, rounds: int = 1) -> str:
    """What to say of a step that was solved for up to a residual, perhaps in several rounds."""
    how += f" and {rounds - 1} rounds of refinement" if rounds > 1 else ""
    if residual <= tolerance:
        return f"solved by {how}"
    return (
        f"not solved to the tolerance {tolerance:.2g}: after {how} the residual is {residual:.2g}; "
        "use double precision, or a larger kappa or tolerance"
    )


def refused(
    problem: Problem,
    model: str,
    kappa: float,
    doubled: int,
    where: str,
    unbounded: int | None,
    iterations: int = 0,
) -> Step:
    """The step zero, where the model has no minimiser."""
    return Step(
        direction={path: torch.zeros_like(value) for path, value in problem.parameters.items()},
        kappa=kappa,
        model_decrease=0.0,
        status=f"the {_NAMES[model]} model with κ = {kappa:g} is unbounded below {where}: take κ larger",
        solved=False,
        calls=problem.autodiff.calls,
        iterations=iterations,
        residual=1.0,
        doubled=doubled,
        unbounded_at=unbounded,
    )


def slope_at(objective: Objective, output: Tensor) -> Tensor:
    """∇h at an output, in double precision: a soft-max that is saturated cancels in single."""
    with torch.enable_grad():
        point = output.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(objective(point), point)
    return slope


def curved_along(objective: Objective, output: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """∇h at an output, in double precision, and ∇²h applied to a change of it; computed in double precision."""
    with torch.enable_grad():
        point = output.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(objective(point), point, create_graph=True)
        if not slope.requires_grad:
            raise OracleError(
                f"{type(objective).__name__} is linear in what the model returns, so that its Gauss-Newton model "
                "has no curvature: let the model return the outputs, of which a loss is taken, or use Newton"
            )
        (curved,) = torch.autograd.grad(slope, point, direction.double())
    return slope.detach(), curved.to(direction.dtype)


def all_finite(value: Tensor) -> bool:
    """Whether no entry is infinite or NaN: a finite sum says so; an infinite one may come from large entries."""
    return math.isfinite(float(value.sum())) or bool(torch.isfinite(value).all())


def check_kappa(kappa: float) -> float:
    """The weight of the proximal term, which is a positive number."""
    if not (isinstance(kappa, int | float) and 0 < kappa < math.inf):
        raise OracleError(f"kappa is a positive number, got {kappa!r}")
    return float(kappa)


def check_tolerance(
    tolerance: float | None, dtype: torch.dtype, single: float = 1e-6, double: float = 1e-12
) -> float:
    """The tolerance, which is between 0 and 1, or the default for the type."""
    if tolerance is None:
        return double if dtype == torch.float64 else single
    if not 0 < tolerance < 1:
        raise OracleError(f"the tolerance is between 0 and 1, got {tolerance!r}")
    return float(tolerance)
