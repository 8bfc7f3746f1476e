r"""What every oracle is asked, an objective of a chain around a point, and what it returns, a step.

:math:`F(u) = h(\psi(u)) + r(u)`, with a chain :math:`\psi`, a loss h of its output and a regulariser r that is a
sum over the parameters. Directions are vectors: all parameters that vary, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from surefoot.linear_solve import norm
from surefoot.objectives import Objective, ObjectiveError, Ridge
from surefoot.processes import Processes
from surefoot.torch_private import joined, parts_of

_LARGE = 1 << 16  # numbers of a forward pass from which it is traced


class OracleError(SurefootError, ValueError):
    """An oracle cannot be computed for this input."""


class Problem:
    """An objective around a point, with what all solvers share.

    Args:
        chain: the network and its batch; or that of a loader, whose batches bring the targets.
        objective: a loss bound to its targets.
        params: the point, by path; the model's present parameters by default.
        regularizer: a function of the parameters, or ``None``.
        processes: those that have a part of the data each; all of them make the problem at the same time, and
            process 0 solves it, inside :meth:`led`. Outputs and targets of all samples are gathered.
        oracle: the passes of one batch at the point, where they were made before.

    Attributes:
        parameters: the point, by path; only what varies. ``point`` has the values of frozen ones too.
        autodiff: the oracle at the point; it counts its calls.
        output: ψ(u). ``loss`` is h of it, and ``value`` is F(u).

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
        self._given = objective
        try:
            self.point = {path: value.detach() for path, value in chain._checked(params).items()}
            frozen = {leaf.path for leaf in chain.graph.frozen}
            self.parameters = {path: value for path, value in self.point.items() if path not in frozen}
            self.size = sum(value.numel() for value in self.parameters.values())
            self._check() if processes is None else processes.together(self._check)
            self.autodiff = chain.autodiff(self.point, processes) if oracle is None else oracle
            self.output: Tensor = self.autodiff.value
            if self.in_pieces:
                self.objective = self._of_all(objective)
            with torch.enable_grad():  # in double precision: a soft-max that is saturated cancels in single
                point = self.output.detach().double().requires_grad_()
                self._taped: tuple[Tensor, Tensor] | None = (self.objective(point), point)
            self.loss = float(self._taped[0].detach())
        except (ObjectiveError, ChainError, EvaluationError) as error:
            raise OracleError(str(error)) from error
        if not math.isfinite(self.loss):
            raise OracleError(f"the objective is {self.loss} at this point")

    def _check(self) -> None:
        for path, value in self.parameters.items():
            if value.dtype in (torch.float16, torch.bfloat16):
                raise OracleError(f"'{path}' is {value.dtype}: a linear solve needs single or double precision")
            if not all_finite(value):
                raise OracleError(f"'{path}' has entries that are not finite")
        if not all(all_finite(x) for x in self.chain.inputs if x.is_floating_point()):
            raise OracleError("the input has entries that are not finite")

    def _of_all(self, objective: Objective) -> Objective:
        """The loss bound to the targets of all batches of all processes."""
        batches, name = self.chain.batches, type(objective).__name__

        def targets() -> list[Tensor]:
            if not objective.takes_targets:
                raise ObjectiveError(f"{name} has no targets: data in pieces are pairs (x, y)")
            if batches is None:
                return [objective.chosen()]
            if objective.targets is not None and len(objective.targets):
                raise ObjectiveError(
                    f"{name} is bound to targets, but the batches bring their own: use one without"
                )
            return [y for _, _, y in batches]

        everyone = [targets()] if self.processes is None else self.processes.gathered(targets)
        return objective.bound_to(torch.cat([y.to(self.output.device) for part in everyone for y in part]))

    @property
    def is_double(self) -> bool:
        """Whether everything is in double precision."""
        return all(value.dtype == torch.float64 for value in (self.output, *self.parameters.values()))

    def in_double(self, along: Mapping[str, Tensor] | None = None) -> Problem:
        """The same problem with all passes in double precision, at these very weights; perhaps with a direction
        that is pushed forward on the way.
        """
        point = {path: in_double(value) for path, value in self.point.items()}
        oracle = (
            None
            if along is None or self.in_pieces
            else Autodiff(self.chain.graph, self.chain.inputs, point, along)
        )
        return Problem(self.chain, self._given, point, self.regularizer, self.processes, oracle)

    def led(self, solve: Callable[[], Step]) -> Step:
        """The step that process 0 computes while the others help, on all of them."""
        processes = self.processes
        if processes is None:
            return solve()
        direction: dict[str, Tensor] = {}

        def lead() -> Step:
            step = solve()
            direction.update(step.direction)
            return replace(step, direction={})

        step = processes.led(lead, self.serve, OracleError)
        direction = direction or {path: torch.empty_like(value) for path, value in self.parameters.items()}
        processes.spread(direction.values())
        return replace(step, direction=direction)

    def serve(self, word: Any) -> None:
        """On a process that does not lead: take part in a pass."""
        assert isinstance(self.autodiff, Batched)
        self.autodiff.serve(word)

    def trace(self) -> None:
        """Have passes traced, where many are to come and take longer than their calls."""
        oracle = self.autodiff
        numbers = sum(node.numel for node in self.chain.graph.nodes)
        if isinstance(oracle, Autodiff) and not oracle.is_traced and numbers >= _LARGE:
            oracle.trace()

    @cached_property
    def slope(self) -> Tensor:
        """∇h(ψ(u)), of the shape of the output and in its precision; computed in double."""
        taped, self._taped = self._taped, None
        fine = torch.autograd.grad(*taped)[0] if taped else slope_at(self.objective, self.output)
        return fine.to(self.output.dtype, memory_format=torch.contiguous_format)

    @property
    def value(self) -> float:
        """F(u)."""
        return self.loss + self._penalty(self.parameters)

    def _penalty(self, parameters: Mapping[str, Tensor]) -> float:
        ridge = self.regularizer
        return 0.0 if ridge is None else sum(float(ridge({p: value})) for p, value in parameters.items())

    def value_at(self, direction: Mapping[str, Tensor], part: float = 1.0) -> float:
        """F(u + tv) by a forward pass, for t = part."""
        moved = {p: torch.add(u, direction[p], alpha=part).to(u.dtype) for p, u in self.parameters.items()}
        with torch.no_grad():
            penalty, moved = self._penalty(moved), {**self.point, **moved}
            if isinstance(self.autodiff, Batched):
                output = self.autodiff.at(moved)
            else:
                (output,) = self.chain.graph.run(moved, self.chain.inputs)
            del moved  # before the loss takes memory of its own
            return float(self.objective(output.double())) + penalty

    def weight(self, path: str) -> float:
        """The curvature of the regulariser in a parameter."""
        return 0.0 if self.regularizer is None else self.regularizer.weight_of(path)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """∇F(u), by path: one call of the oracle."""
        slopes = self.autodiff.pullback(self.slope)
        if self.regularizer is None:
            return {path: slopes[path] for path in self.parameters}
        return {path: slopes[path] + self.weight(path) * value for path, value in self.parameters.items()}

    @cached_property
    def steepness(self) -> float:
        """‖∇F(u)‖."""
        return self.norm(self.gradient)

    @staticmethod
    def norm(direction: Mapping[str, Tensor]) -> float:
        """The norm of a direction, by path."""
        return math.hypot(*map(norm, direction.values()))

    @property
    def dtype(self) -> torch.dtype:
        """That of a vector of parameters."""
        return reduce(torch.promote_types, (value.dtype for value in self.parameters.values()))

    def join(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """One vector of a direction; a path that is missing is zero."""
        dtype = self.dtype if dtype is None else dtype
        if all(path in tensors and tensors[path].dtype == dtype for path in self.parameters):
            return joined([tensors[path] for path in self.parameters])
        vector = torch.zeros(self.size, dtype=dtype, device=self.output.device)
        for path, part in zip(self.parameters, parts_of(vector, list(self.parameters.values())), strict=True):
            if path in tensors:
                part.copy_(tensors[path])
        return vector

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector as tensors of the shapes and types of the parameters."""
        parts = parts_of(vector, list(self.parameters.values()))
        return {path: part.to(u.dtype) for (path, u), part in zip(self.parameters.items(), parts, strict=True)}

    def check_varying(self) -> None:
        """Refuse a model in which nothing varies."""
        if not self.parameters:
            raise OracleError("no parameter of the model asks for gradients: call model.requires_grad_(True)")

    def steep(self) -> Tensor:
        """∇F(u) as a vector.

        Raises:
            OracleError: if no parameter varies, or it is not finite.
        """
        self.check_varying()
        if not math.isfinite(self.steepness):
            for path, value in self.gradient.items():
                if not all_finite(value):
                    raise OracleError(
                        f"the gradient with respect to '{path}' is not finite: look for divisions by zero and "
                        "overflow there"
                    )
        return self.join(self.gradient)

    def metric(self, kappa: float) -> Tensor:
        """The diagonal of κI + ∇²r: one number if it is the same everywhere, else one per entry."""
        weights = [kappa + self.weight(path) for path in self.parameters]
        several = torch.tensor(weights, dtype=self.dtype, device=self.output.device)
        if len(set(weights)) == 1:
            return several[0]
        sizes = torch.tensor([value.numel() for value in self.parameters.values()], device=self.output.device)
        return several.repeat_interleave(sizes)

    def curve(self, change: Tensor) -> Tensor:
        """∇²h(ψ(u)) applied to a change of the output."""
        return curved_along(self.objective, self.output, change)[1]


@dataclass(frozen=True)
class Step:
    r"""The minimiser v of a model of the objective around u, plus :math:`\frac\kappa2\|v\|^2`.

    Attributes:
        direction: v, by parameter path; u + v is the new point.
        kappa: the weight of the proximal term that was used.
        model_decrease: the value of the model (with the proximal term) at 0 minus that at v, never negative.
        status: a sentence: solved, or what stood in the way.
        solved: whether v is the minimiser, up to the residual.
        calls: of the automatic-differentiation oracle: pull-backs and push-forwards through the whole chain, but
            for those that measure a residual in double precision.
        iterations: of the inner solver; where it is direct, how often its result was refined.
        residual: norm of the gradient of the model at v relative to that at 0; for models in single precision
            measured in double, at v as it is returned. ``None`` where no call was left for it.
        length: t, where a line search made tv of the minimiser v; then the direction is tv.
        doubled: how often kappa was doubled until the model was bounded below.
        unbounded_at: the computation at which the last infeasible kappa failed, counted from 1.
        gains: by dynamic programming, for each computation :math:`(K_t, k_t)`: the best change of its parameters
            after a change y of the state before is :math:`K_ty + k_t`.
        bend: half the acceleration, to be added to the direction (:func:`surefoot.oracles.steps.accelerated`).
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
    unbounded_at: int | None = None
    gains: Sequence[tuple[Tensor, Tensor]] = field(default=(), repr=False)
    bend: Mapping[str, Tensor] | None = field(default=None, repr=False)


_NAMES = {"gradient": "linear", "gauss_newton": "Gauss-Newton", "newton": "Newton"}


def solved_status(model: str, kappa: float, doubled: int, where: str, how: str) -> str:
    """What to say of a step, perhaps after kappa was doubled."""
    text = f"the minimiser of the {_NAMES[model]} model with κ = {kappa:g}, by {how}"
    if not doubled:
        return text
    times = "once" if doubled == 1 else f"{doubled} times"
    return f"{text}; the model was unbounded below {where}, and κ was doubled {times}"


def reached_status(how: str, residual: float, tolerance: float) -> str:
    """What to say of a step that was solved for up to a residual."""
    if residual <= tolerance:
        return f"solved by {how}"
    return (
        f"not solved to the tolerance {tolerance:.2g}: after {how} the residual is {residual:.2g}; "
        "use double precision, or a larger kappa or tolerance"
    )


def refused(problem: Problem, model: str, kappa: float, where: str, **fields: Any) -> Step:
    """The step zero, where the model has no minimiser."""
    return Step(
        {path: torch.zeros_like(value) for path, value in problem.parameters.items()},
        kappa,
        0.0,
        f"the {_NAMES[model]} model with κ = {kappa:g} is unbounded below {where}: take κ larger",
        solved=False,
        calls=problem.autodiff.calls,
        residual=1.0,
        **fields,
    )


def slope_at(objective: Objective, output: Tensor) -> Tensor:
    """∇h at an output, in double precision: a soft-max that is saturated cancels in single."""
    with torch.enable_grad():
        point = output.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(objective(point), point)
    return slope


def curved_along(objective: Objective, output: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """∇h at an output, in double precision, and ∇²h applied to a change of it; computed in double precision."""
    with torch.enable_grad():
        point = output.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(objective(point), point, create_graph=True)
        if not slope.requires_grad:
            raise OracleError(
                f"{type(objective).__name__} is linear in what the model returns, so that its Gauss-Newton model "
                "has no curvature: let the model return the outputs, of which a loss is taken, or use Newton"
            )
        (curved,) = torch.autograd.grad(slope, point, change.double())
    return slope.detach(), curved.to(change.dtype)


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
