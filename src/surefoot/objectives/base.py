"""Objectives: a loss as a module, its derivatives and its constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, Self, TypedDict

import torch
from torch import Tensor, nn

from surefoot.errors import ObjectiveError
from surefoot.graph.checks import as_targets
from surefoot.graph.nodes import Spec
from surefoot.objectives.constants import Constants, certified
from surefoot.operations.losses.sums import Numbers
from surefoot.operations.record import LossFacts, records
from surefoot.torch_private import with_buffer

_UNSTATED = LossFacts(
    lambda *arguments: NotImplemented,
    convex=True,
    smooth=True,
    nonnegative=True,
    options={"reduction": "mean", "scale": 1.0},
)


class _Fact:
    """An attribute that is read from the record of the operation, unless the class sets it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Objective | None, owner: type[Objective]) -> Any:
        return getattr(owner.facts(), self.name)


def _fact() -> Any:
    return _Fact()


class Objective(nn.Module):
    """A function :math:`h(\\hat y)` or :math:`h(\\hat y, y)` of all outputs, one sample per row.

    ``objective(outputs, y)`` is its value. An objective made with targets is bound to them and called as
    ``objective(outputs)``; so is one without targets (clustering).

    The mathematics is that of its operation (:mod:`surefoot.operations.losses`), whose record has the function and
    says whether it is convex, smooth, non-negative and quadratic (:class:`~surefoot.operations.record.LossFacts`).
    If neither the record nor the class says so, the first three are claimed.

    Attributes:
        operation: the name of the operation.
        takes_targets: whether outputs are compared with targets.

    Raises:
        ObjectiveError: by every method, if targets are missing or something does not fit.

    >>> outputs, y = torch.ones(2, 1), torch.zeros(2, 1)
    >>> float(sf.Square()(outputs, y)), float(sf.Square(y)(outputs))
    (0.5, 0.5)
    """

    operation: str
    takes_targets: bool = True
    targets: Tensor | None
    function: Callable[..., Tensor] = _fact()
    convex: bool = _fact()
    smooth: bool = _fact()
    nonnegative: bool = _fact()
    quadratic: bool = _fact()

    def __init__(self, targets: Any = None) -> None:
        super().__init__()
        self.register_buffer("targets", None if targets is None else self.admitted(targets), persistent=False)

    @classmethod
    def facts(cls) -> LossFacts:
        """The facts about the loss in the record of the operation."""
        record = records().get(cls.operation)
        return _UNSTATED if record is None or record.loss is None else record.loss

    def bound_to(self, targets: Any) -> Self:
        """The loss with the same options and these targets; ``None`` for no targets."""
        return with_buffer(self, "targets", None if targets is None else self.admitted(targets))

    def admitted(self, targets: Any) -> Tensor:
        """Targets as a tensor, after a check of their values."""
        try:
            tensor = as_targets(targets).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ObjectiveError(f"targets are a tensor or what becomes one, got {targets!r}") from error
        if tensor.device.type != "meta":
            self.check_values(tensor)
        return tensor

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets with values that are not allowed; by default those that are not finite."""
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            raise ObjectiveError(f"the targets of {type(self).__name__} have entries that are not finite")

    @property
    def options(self) -> dict[str, Hashable]:
        """The keyword arguments of :attr:`function`, by name."""
        return {}

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse outputs and targets whose shapes or types do not fit."""
        raise NotImplementedError

    def target_spec(self, outputs: Spec) -> Spec:
        """The usual shape and type of targets for these outputs."""
        return outputs

    def fit(self, outputs: Spec, targets: Tensor) -> None:
        """Refuse targets that do not fit the outputs, by their shape or by their values."""
        self.check(outputs, spec_of(targets))

    def forward(self, outputs: Tensor, targets: Any = None) -> Tensor:
        """The value, differentiable in the outputs."""
        if not self.takes_targets:
            self.check(spec_of(outputs), None)
            return type(self).function(outputs, **self.options)
        chosen = self.chosen(targets).to(outputs.device)
        self.fit(spec_of(outputs), chosen)
        return type(self).function(*self.arranged(outputs, chosen), **self.options)

    def arranged(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets in the shapes that the operation reads; this may only move numbers."""
        return outputs, targets

    def chosen(self, targets: Any = None) -> Tensor:
        """These targets, or those the loss is bound to; refused if there are none."""
        if targets is not None:
            return self.admitted(targets)
        if self.targets is None:
            name = type(self).__name__
            raise ObjectiveError(
                f"{name} has no targets: pass them, as y=…, or bind them once with {name}(targets)"
            )
        return self.targets

    def gradient(self, outputs: Tensor, targets: Any = None) -> Tensor:
        """The gradient in the outputs, of their shape and without a graph."""
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            return _derivative(self(point, targets), point, None)

    def hessian_vector_product(self, outputs: Tensor, direction: Tensor, targets: Any = None) -> Tensor:
        r""":math:`\nabla^2h(\hat y)` applied to a direction, of the shape of the outputs and without a graph.

        The Hessian exists almost everywhere; where it jumps (:class:`~surefoot.objectives.Huber` at a distance of
        δ), this is its value on one side.
        """
        if direction.shape != outputs.shape:
            raise ObjectiveError(
                f"a direction has the shape of the outputs, {tuple(outputs.shape)}, got {tuple(direction.shape)}"
            )
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            slope = _derivative(self(point, targets), point, None, create_graph=True)
            return _derivative(slope, point, direction.detach().to(slope))

    def constants(
        self,
        outputs: Tensor | Sequence[int],
        targets: Any = None,
        radius: float = math.inf,
        table: Literal["certified", "paper"] = "certified",
    ) -> Constants:
        r"""Lipschitz constants of h and of its gradient over :math:`\|\hat y\|_2 \le` ``radius``, outputs stacked.

        Args:
            outputs: a tensor of outputs, or its shape; their values do not matter.
            targets: by default those the loss is bound to; without any, the constants hold for all targets.
            radius: radius of the ball; infinite for the whole space.
            table: ``"certified"``, or ``"paper"`` for the paper's constants, flagged where they do not hold.

        Raises:
            ObjectiveError: if something does not fit, or the paper has no constants of the objective.
        """
        spec, radius = spec_of(outputs), float(radius)
        if not radius >= 0:
            raise ObjectiveError(f"the radius of a ball of outputs is a number ≥ 0, got {radius!r}")
        chosen = self.chosen(targets) if targets is not None or self.targets is not None else None
        if chosen is not None:
            self.fit(spec, chosen)
        elif not self.takes_targets:
            self.check(spec, None)
        if table == "certified":
            return certified(self, spec, chosen, radius)
        if table == "paper":
            return self.paper_constants(spec, chosen, radius)
        raise ObjectiveError(f"the table of constants is 'certified' or 'paper', got {table!r}")

    def paper_constants(self, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
        """The constants that the paper prints for this objective; refused if there are none."""
        raise ObjectiveError(
            f"the paper gives no constants of {type(self).__name__} with these options: use table='certified'"
        )

    def extra_repr(self) -> str:
        """The shape of the targets."""
        return "" if self.targets is None else f"targets: {'×'.join(map(str, self.targets.shape))}"


def _derivative(value: Tensor, point: Tensor, direction: Tensor | None, create_graph: bool = False) -> Tensor:
    """The derivative with respect to a point, contracted with a direction; zero if there is no dependence."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    (slope,) = torch.autograd.grad(value, point, direction, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(point) if slope is None else slope


class Averaging(TypedDict, total=False):
    """The options that all losses have."""

    reduction: str
    scale: float


class Loss(Objective):
    """A loss of outputs and targets.

    Args:
        targets: targets to bind to the loss, or ``None``.
        reduction: ``"mean"`` over the samples of sums over the entries of each; ``"sum"`` over everything;
            ``"entries"``, the mean over all entries, as losses of torch.nn have it; ``"row"``, the sum over the
            samples of the means over the entries of each.
        scale: a positive factor.
        others: the other options of its function.

    Raises:
        ObjectiveError: if an option is not one of these.

    >>> y = torch.zeros(2, 3)
    >>> [float(sf.Square(y, reduction=how)(torch.ones(2, 3))) for how in ("mean", "sum", "entries")]
    [1.5, 3.0, 0.5]
    """

    reductions: tuple[str, ...] = ("mean", "sum", "entries", "row")
    low, high, allowed = -math.inf, math.inf, ""  # the range of targets, and the range in words if it is bounded

    def __init__(
        self, targets: Any = None, *, reduction: str = "mean", scale: float = 1.0, **others: Hashable
    ) -> None:
        name, usual = type(self).__name__, self.facts().options
        if reduction not in self.reductions:
            raise ObjectiveError(
                f"the reduction of {name} is one of {', '.join(self.reductions)}, got {reduction!r}"
            )
        if not 0 < float(scale) < math.inf:
            raise ObjectiveError(f"the scale of {name} is a positive number, got {scale!r}")
        if unknown := sorted(others.keys() - usual.keys()):
            raise TypeError(f"{name} has no option {', '.join(unknown)}")
        self.reduction, self.scale = reduction, float(scale)
        for option in usual.keys() - {"reduction", "scale"}:
            setattr(self, option, others.get(option, usual[option]))
        super().__init__(targets)

    @property
    def options(self) -> dict[str, Hashable]:
        """The keyword arguments of :attr:`function`, by name."""
        return {name: getattr(self, name) for name in self.facts().options}

    @property
    def is_plain(self) -> bool:
        """Whether all options have their default values: the paper's mean over the samples."""
        return not self._unusual()

    def _unusual(self) -> dict[str, Hashable]:
        usual = self.facts().options
        return {name: value for name, value in self.options.items() if value != usual[name]}

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets that are out of range or not finite."""
        within = (targets >= self.low) & (targets <= self.high)
        if self.allowed and not bool(within.all()):
            raise ObjectiveError(f"the targets of {type(self).__name__} are {self.allowed}")
        super().check_values(targets)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse targets of another shape than the outputs, and empty outputs."""
        assert targets is not None
        name = type(self).__name__
        if outputs.shape != targets.shape or not outputs.shape:
            shapes = f"{shape_of(outputs)} and {shape_of(targets)}"
            raise ObjectiveError(f"{name} compares outputs and targets of one shape, got {shapes}")
        refuse_empty(name, outputs)

    def extra_repr(self) -> str:
        """The options that are not the defaults, and the shape of the targets."""
        options = [f"{name}={_short(value)}" for name, value in self._unusual().items()]
        return ", ".join(filter(None, [*options, super().extra_repr()]))


def refuse_empty(name: str, outputs: Spec) -> None:
    """Refuse outputs without entries, as their mean is not defined."""
    if not outputs.numel:
        raise ObjectiveError(f"{name} of {shape_of(outputs)} outputs is not defined: give at least one sample")


def shape_of(spec: Spec | Tensor) -> str:
    """A shape as it reads in a sentence."""
    return "×".join(map(str, spec.shape)) or "a number"


def frozen_numbers(value: Any, what: str) -> Numbers | None:
    """Weights as numbers in tuples, which can be compared and hashed."""
    if value is None:
        return None
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObjectiveError(f"{what} is a tensor or what becomes one, got {value!r}") from error
    if not bool(((numbers >= 0) & (numbers < torch.inf)).all()):
        raise ObjectiveError(f"{what} has finite entries ≥ 0, got {value!r}")
    return _tuples(numbers.tolist())


def _tuples(numbers: Any) -> Numbers:
    return tuple(map(_tuples, numbers)) if isinstance(numbers, list) else float(numbers)


def _short(value: Any) -> str:
    return f"{len(value)} numbers" if isinstance(value, tuple) else str(value)


def spec_of(outputs: Tensor | Sequence[int]) -> Spec:
    """Shape and type of a tensor of outputs, or of a shape; refuses anything else."""
    if isinstance(outputs, Tensor):
        return Spec(tuple(outputs.shape), outputs.dtype)
    try:
        shape = tuple(int(size) for size in outputs)
    except (TypeError, ValueError):
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise ObjectiveError(f"outputs are a tensor or its shape, such as (samples, classes), got {outputs!r}")
    return Spec(shape, torch.get_default_dtype())
