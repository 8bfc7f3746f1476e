r"""The inner problem: :math:`\zeta` as a function of tensors, with its derivatives in :math:`\beta`.

Minimisers are rows of a matrix, one per sample. A problem with one :math:`\beta` for the whole batch is a batch of
one sample, in which every tensor is shared. So there is only one case: a function of one row, mapped over the
rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.implicit.constants import Constants, ConstantsOf, ImplicitError

Tensors = tuple[Tensor, ...]
_CHOICES = {
    "solver": ("newton", "gradient"),
    "differentiate": ("implicit", "unroll"),
    "linear": ("cholesky", "cg"),
}


@dataclass(frozen=True)
class Settings:
    """The options of :class:`~surefoot.implicit.ArgMin`: the ways to solve and to differentiate an inner problem.

    Raises:
        ImplicitError: if an option is not one of those.
    """

    solver: Literal["newton", "gradient"] = "newton"
    differentiate: Literal["implicit", "unroll"] = "implicit"
    linear: Literal["cholesky", "cg"] = "cholesky"
    tolerance: float | None = None
    max_iterations: int | None = None
    order: int = 2

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            self._expect(name, getattr(self, name) in allowed, " or ".join(map(repr, allowed)))
        tolerance, most, order = self.tolerance, self.max_iterations, self.order
        positive = isinstance(tolerance, int | float) and 0 < tolerance < math.inf
        self._expect("tolerance", tolerance is None or positive, "a positive number, or None")
        counts = isinstance(most, int) and most > 0
        self._expect("max_iterations", most is None or counts, "a positive whole number, or None")
        exact = isinstance(order, int) and order > 0
        self._expect("order", exact, "how many derivatives are to be exact: 1, 2, …")

    def _expect(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            end = "" if what.endswith("…") else "."
            raise ImplicitError(f"the option {name} is {getattr(self, name)!r}", f"Pass {what}{end}")

    def tolerance_for(self, dtype: torch.dtype) -> float:
        """The tolerance in an element type; by default 1e-12 in double and 1e-4 in single precision."""
        if self.tolerance is not None:
            return float(self.tolerance)
        return 1e-12 if dtype == torch.float64 else 1e-4

    @property
    def iterations(self) -> int:
        """The largest number of iterations."""
        return self.max_iterations or (100 if self.solver == "newton" else 10_000)


@dataclass(frozen=True, eq=False)
class Problem:
    """An inner problem whose tensors are given at every call: inputs, then parameters, then buffers of ζ."""

    zeta: nn.Module  # the function, as a module
    inputs: tuple[str, ...]  # the names of its inputs
    shape: tuple[int, ...]  # the shape of one minimiser
    batched: bool  # whether ζ is written for one sample and every sample has its own minimiser
    settings: Settings  # how it is solved
    constants: Constants | ConstantsOf | None = None  # its constants, if they are declared
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of ζ."""
        return tuple(name for name, _ in self.zeta.named_parameters())

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers of ζ."""
        return tuple(name for name, _ in self.zeta.named_buffers())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors besides β, in order."""
        return (*self.inputs, *self.parameters, *self.buffers)

    @property
    def size(self) -> int:
        """The number of entries of one minimiser."""
        return math.prod(self.shape)

    def count(self, tensors: Sequence[Tensor]) -> int:
        """The number of minimisers."""
        return int(tensors[0].shape[0]) if self.batched else 1

    def result_shape(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The shape of the result."""
        return (self.count(tensors), *self.shape) if self.batched else self.shape

    def dtype(self, tensors: Sequence[Tensor]) -> torch.dtype:
        """The element type of the result: that of the real tensors together."""
        real = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return functools.reduce(torch.promote_types, real) if real else torch.get_default_dtype()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse inputs that do not fit."""
        inputs = tensors[: len(self.inputs)]
        if not inputs:
            raise ImplicitError("an ArgMin layer was called without input", "Pass at least one tensor.")
        if not self.batched:
            return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        if any(not tensor.dim() for tensor in inputs) or len({tensor.shape[0] for tensor in inputs}) > 1:
            raise ImplicitError(
                f"inputs of shapes {shapes} do not have the same number of samples",
                "Samples lie along the first dimension; pass batched=False for one minimiser of the whole batch.",
            )
        if not inputs[0].shape[0]:
            raise ImplicitError("the batch is empty", "Pass at least one sample.")

    def take(self, tensors: Tensors, rows: Tensor) -> Tensors:
        """The tensors of some of the samples."""
        mapped = len(self.inputs) if self.batched else 0
        return (*(tensor[rows] for tensor in tensors[:mapped]), *tensors[mapped:])

    def values(self, beta: Tensor, tensors: Tensors) -> Tensor:
        """ζ for every row of β."""
        return torch.vmap(self._one, self._dims(tensors))(beta, *tensors)

    def gradient(self, beta: Tensor, tensors: Tensors) -> Tensor:
        r""":math:`\nabla_\beta\zeta` for every row."""
        return torch.vmap(torch.func.grad(self._one), self._dims(tensors))(beta, *tensors)

    def hessian(self, beta: Tensor, tensors: Tensors) -> Tensor:
        r""":math:`\nabla^2_{\beta\beta}\zeta` for every row."""

        def of_one(row: Tensor, *others: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda b: torch.func.grad(self._one)(b, *others), row)[1]
            return torch.vmap(pull)(torch.eye(self.size, dtype=row.dtype, device=row.device))[0]

        return torch.vmap(of_one, self._dims(tensors))(beta, *tensors)

    def least_curvature(self, beta: Tensor, tensors: Tensors) -> float:
        """The smallest eigenvalue of all Hessians."""
        hessian = self.hessian(beta, tensors)
        return float(torch.linalg.eigvalsh(0.5 * (hessian + hessian.mT)).min())

    def refuse_overstated(self, beta: Tensor, tensors: Tensors, mu: float) -> None:
        """Refuse a declared strong convexity that a Hessian contradicts."""
        least = self.least_curvature(beta, tensors)
        if least < mu * (1 - 1e3 * torch.finfo(beta.dtype).eps):
            raise ImplicitError(
                f"a strong convexity of {mu:g} was declared, and the Hessian of ζ has the eigenvalue {least:.3g}",
                "Declare what holds for all arguments, such as the weight of a ridge that ζ contains.",
            )

    def product(self, beta: Tensor, tensors: Tensors, direction: Tensor) -> Tensor:
        r""":math:`\nabla^2_{\beta\beta}\zeta` times a direction, for every row; the Hessian is symmetric."""
        pull = torch.func.vjp(lambda b: self.gradient(b, tensors), beta)[1]
        return pull(direction)[0]

    def _dims(self, tensors: Tensors) -> tuple[int | None, ...]:
        mapped = len(self.inputs) if self.batched else 0
        return (0, *(0 if k < mapped else None for k in range(len(tensors))))

    def _one(self, beta: Tensor, *tensors: Tensor) -> Tensor:
        """ζ at one minimiser, from all its tensors."""
        split = len(self.inputs)
        owned = dict(zip(self.names[split:], tensors[split:], strict=True))
        value = torch.func.functional_call(self.zeta, owned, (*tensors[:split], beta.reshape(self.shape)))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            kind = "one sample" if self.batched else "the whole batch"
            raise ImplicitError(
                f"ζ returned {got}, not one number",
                f"Write it for {kind} and one minimiser of shape {self.shape}, and return a sum.",
            )
        return value.reshape(())

    def refuse_hidden(self, tensors: Tensors) -> None:
        """Refuse a ζ that reads tensors which require gradients but are not parameters: they would get none."""
        beta = torch.zeros(1, self.size, dtype=self.dtype(tensors), device=tensors[0].device)
        first = torch.zeros(1, dtype=torch.long, device=tensors[0].device)
        with torch.enable_grad():
            value = self.values(beta, tuple(tensor.detach() for tensor in self.take(tensors, first)))
        if value.requires_grad:
            raise ImplicitError(
                "ζ reads a tensor that asks for gradients and is neither its input nor its parameter",
                "Pass it as an input, or make ζ an nn.Module that holds it as a parameter.",
            )
