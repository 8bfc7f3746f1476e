r"""What all losses have: a value, derivatives, constants, and refusals of outputs and targets that do not fit.

The constants of h are functions of the stacked outputs. For a mean :math:`h = \frac1n\sum_ih_i(\hat y_i)` the
gradient is the stack of the :math:`\nabla h_i/n` and the Hessian is block diagonal, so :math:`\ell =
\frac1n\|(\ell_i)_i\|_2 \le \max_i\ell_i/\sqrt n` and :math:`L = \max_iL_i/n` (ERRATA 12). What the paper prints
is in :mod:`surefoot.paper`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from surefoot.errors import ObjectiveError
from surefoot.magnitude import Magnitude
from surefoot.torch_private import with_buffer

Numbers: TypeAlias = "float | tuple[Numbers, ...]"


class Shaped(Protocol):
    """A tensor, or what stands for one: only its shape and its type matter."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Constants:
    r"""Constants of a loss over :math:`\|\hat y\|_2 \le \rho`.

    Attributes:
        lipschitz: :math:`\ell \ge \sup\|\nabla h\|_2`.
        smoothness: the Lipschitz constant L of :math:`\nabla h`; :math:`\sup\|\nabla^2h\|_{2,2}` where it exists.

    >>> round(float(sf.Square(torch.zeros(2, 1)).constants((2, 1), radius=1.0).smoothness), 9)
    0.5
    """

    lipschitz: Magnitude
    smoothness: Magnitude


class Objective(nn.Module):
    r"""A function :math:`h(\hat y)` or :math:`h(\hat y, y)` of all outputs, one sample per row.

    ``objective(outputs, y)`` is its value. An objective made with targets is bound to them and called as
    ``objective(outputs)``; so is one without targets. What a class does not state is not claimed: without
    ``nonnegative`` optimizers ask for a lower bound.

    Attributes:
        operation: the name under which it is recorded in graphs, if it has one.
        function: computes it from outputs, targets if there are any, and :attr:`options`.
        takes_targets: whether outputs are compared with targets.
        convex: whether h is convex.
        smooth: whether its gradient is Lipschitz continuous.
        nonnegative: whether h ≥ 0.
        quadratic: whether its Hessian is constant.

    Raises:
        ObjectiveError: by every method, if targets are missing or something does not fit.

    >>> outputs, y = torch.ones(2, 1), torch.zeros(2, 1)
    >>> float(sf.Square()(outputs, y)), float(sf.Square(y)(outputs))
    (0.5, 0.5)
    """

    operation = ""
    function: Callable[..., Tensor]
    targets: Tensor | None
    takes_targets = True
    convex = False
    smooth = True
    nonnegative = False
    quadratic = False

    def __init__(self, targets: Any = None) -> None:
        super().__init__()
        self.register_buffer("targets", None if targets is None else self.admitted(targets), persistent=False)

    def bound_to(self, targets: Any) -> Self:
        """The loss with the same options and these targets; ``None`` for no targets."""
        return with_buffer(self, "targets", None if targets is None else self.admitted(targets))

    def admitted(self, targets: Any) -> Tensor:
        """Targets as a tensor, after a check of their values."""
        try:
            tensor = (targets if isinstance(targets, Tensor) else torch.as_tensor(targets)).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ObjectiveError(f"targets are a tensor or what becomes one, got {targets!r}") from error
        if tensor.is_inference():  # through tensors made in inference mode there are no derivatives
            with torch.inference_mode(False):
                tensor = tensor.clone()
        if tensor.device.type != "meta":
            self.check_values(tensor)
        return tensor

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets with values that are not allowed; by default those that are not finite."""
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            raise ObjectiveError(f"the targets of {type(self).__name__} have entries that are not finite")

    @property
    def options(self) -> Mapping[str, Hashable]:
        return {}

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        """Refuse outputs and targets whose shapes or types do not fit."""

    def fit(self, outputs: Shaped, targets: Tensor) -> None:
        """Refuse targets that do not fit the outputs, by their shape or by their values."""
        self.check(outputs, targets)

    def forward(self, outputs: Tensor, targets: Any = None) -> Tensor:
        if not self.takes_targets:
            self.check(outputs, None)
            return type(self).function(outputs, **self.options)
        chosen = self.chosen(targets).to(outputs.device)
        if not torch.compiler.is_compiling():  # while a graph is recorded there are no values to look at
            self.fit(outputs, chosen)
        return type(self).function(*self.arranged(outputs, chosen), **self.options)

    def arranged(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets in the shapes that :attr:`function` reads; this may only move numbers."""
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
            return _derivative(self(point, targets), point).detach()

    def hessian_vector_product(self, outputs: Tensor, direction: Tensor, targets: Any = None) -> Tensor:
        r""":math:`\nabla^2h(\hat y)` applied to a direction, without a graph; where it jumps, from one side."""
        if direction.shape != outputs.shape:
            raise ObjectiveError(
                f"a direction has the shape of the outputs, {tuple(outputs.shape)}, got {tuple(direction.shape)}"
            )
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            slope = _derivative(self(point, targets), point)
            return _derivative(slope, point, direction.detach().to(slope)).detach()

    def constants(
        self, outputs: Tensor | Sequence[int], targets: Any = None, radius: float = math.inf
    ) -> Constants:
        r"""Lipschitz constants of h and of its gradient over :math:`\|\hat y\|_2 \le` ``radius``, outputs stacked.

        Args:
            outputs: a tensor of outputs, or its shape; their values do not matter.
            targets: by default those the loss is bound to; without any, the constants hold for all targets.
            radius: radius of the ball; infinite for the whole space.

        Raises:
            ObjectiveError: if something does not fit, or there are no constants of the objective.
        """
        try:
            shape = outputs.shape if isinstance(outputs, Tensor) else [int(size) for size in outputs]
            like, radius = torch.empty(shape, device="meta"), float(radius)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"outputs are a tensor or its shape, such as (samples, classes), got {outputs!r}"
            raise ObjectiveError(what) from error
        if not radius >= 0:
            raise ObjectiveError(f"the radius of a ball of outputs is a number ≥ 0, got {radius!r}")
        chosen = self.chosen(targets) if targets is not None or self.targets is not None else None
        if chosen is not None:
            self.fit(like, chosen)
            like, chosen = self.arranged(like, chosen)
        elif not self.takes_targets:
            self.check(like, None)
        unknown = chosen is None or chosen.device.type == "meta"
        slope, bend = self.suprema(like.shape, None if unknown else chosen, radius)
        slack = 1 + (like.numel() + 64) * 2.0**-51  # a few roundings for each entry
        return Constants(Magnitude.of(slope) * slack, Magnitude.of(bend) * slack)

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        """ℓ and L up to round-off, for these or for all targets."""
        raise ObjectiveError(
            f"{type(self).__name__} states no constants: surefoot.certify(nn.Identity(), outputs, objective, "
            "wrt='input', domain=…) has them"
        )

    def extra_repr(self) -> str:
        return "" if self.targets is None else f"targets: {shape_of(self.targets)}"


def _derivative(value: Tensor, point: Tensor, direction: Tensor | None = None) -> Tensor:
    """The derivative with respect to a point, contracted with a direction; zero if there is no dependence."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    (slope,) = torch.autograd.grad(value, point, direction, create_graph=direction is None, allow_unused=True)
    return torch.zeros_like(point) if slope is None else slope


class Loss(Objective):
    """A convex loss of outputs and targets.

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

    convex = nonnegative = True
    reductions: tuple[str, ...] = ("mean", "sum", "entries", "row")
    defaults: ClassVar[Mapping[str, Any]] = {}  # of the options besides these two
    low, high, allowed = -math.inf, math.inf, ""  # the range of targets, and the range in words if it is bounded

    def __init__(
        self, targets: Any = None, *, reduction: str = "mean", scale: float = 1.0, **others: Hashable
    ) -> None:
        name, choices = type(self).__name__, ", ".join(self.reductions)
        if reduction not in self.reductions:
            raise ObjectiveError(f"the reduction of {name} is one of {choices}, got {reduction!r}")
        if not 0 < float(scale) < math.inf:
            raise ObjectiveError(f"the scale of {name} is a positive number, got {scale!r}")
        if unknown := sorted(others.keys() - self.defaults.keys()):
            raise TypeError(f"{name} has no option {', '.join(unknown)}")
        self.reduction, self.scale = reduction, float(scale)
        for option, usual in self.defaults.items():
            setattr(self, option, others.get(option, usual))
        super().__init__(targets)

    @property
    def options(self) -> dict[str, Hashable]:
        return {name: getattr(self, name) for name in (*self.defaults, "reduction", "scale")}

    def check_values(self, targets: Tensor) -> None:
        within = (targets >= self.low) & (targets <= self.high)
        if self.allowed and not bool(within.all()):
            raise ObjectiveError(f"the targets of {type(self).__name__} are {self.allowed}")
        super().check_values(targets)

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        assert targets is not None
        name = type(self).__name__
        if tuple(outputs.shape) != tuple(targets.shape) or not outputs.shape:
            shapes = f"{shape_of(outputs)} and {shape_of(targets)}"
            raise ObjectiveError(f"{name} compares outputs and targets of one shape, got {shapes}")
        refuse_empty(name, outputs)

    def extra_repr(self) -> str:
        usual = {**self.defaults, "reduction": "mean", "scale": 1.0}
        changed = {name: value for name, value in self.options.items() if value != usual[name]}
        short = {k: f"{len(v)} numbers" if isinstance(v, tuple) else v for k, v in changed.items()}
        return ", ".join(filter(None, [*(f"{k}={v}" for k, v in short.items()), super().extra_repr()]))


def divisor(shape: Sequence[int], reduction: str) -> int:
    """What the sum over all entries is divided by, for outputs of this shape."""
    return math.prod({"mean": shape[:1], "entries": shape, "row": shape[1:]}.get(reduction, ()))


def refuse_empty(name: str, outputs: Shaped) -> None:
    if not math.prod(outputs.shape):
        raise ObjectiveError(f"{name} of {shape_of(outputs)} outputs is not defined: give at least one sample")


def shape_of(tensor: Shaped) -> str:
    """A shape as it reads in a sentence."""
    return "×".join(map(str, tensor.shape)) or "a number"


def as_tensor(numbers: Numbers, like: Tensor) -> Tensor:
    """Weights as a tensor of the type and on the device of another one."""
    return torch.tensor(numbers, dtype=torch.float64).to(like)


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

    def tuples(numbers: Any) -> Numbers:
        return tuple(map(tuples, numbers)) if isinstance(numbers, list) else float(numbers)

    return tuples(numbers.tolist())
