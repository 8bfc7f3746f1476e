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
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.implicit.constants import Constants, ConstantsOf, ImplicitError

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """An inner problem whose tensors are arguments of every call: inputs, then parameters, then buffers of ζ."""

    zeta: nn.Module  # the function, as a module
    inputs: tuple[str, ...]  # the names of its inputs
    shape: tuple[int, ...]  # the shape of one minimiser
    batched: bool  # whether ζ is written for one sample and every sample has its own minimiser
    constants: Constants | ConstantsOf | None = None  # its constants, if they are declared
    tolerance: float | None = None
    max_iterations: int = 100
    order: int = 2  # how many derivatives are exact
    graphs: dict[Any, Any] = field(default_factory=dict, repr=False)  # of the gradient, by shapes

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.zeta.named_parameters())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors besides β, in order."""
        return (*self.inputs, *self.parameters, *(name for name, _ in self.zeta.named_buffers()))

    @property
    def size(self) -> int:
        """The number of entries of one minimiser."""
        return math.prod(self.shape)

    @property
    def samples(self) -> int:
        """How many tensors, the first ones, have one row per minimiser."""
        return len(self.inputs) if self.batched else 0

    def count(self, tensors: Sequence[Tensor]) -> int:
        """The number of minimisers."""
        return int(tensors[0].shape[0]) if self.batched else 1

    def result_shape(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return (self.count(tensors), *self.shape) if self.batched else self.shape

    def dtype(self, tensors: Sequence[Tensor]) -> torch.dtype:
        """The element type of the result: that of the real tensors together."""
        real = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return functools.reduce(torch.promote_types, real) if real else torch.get_default_dtype()

    def constants_at(self, sizes: dict[str, float]) -> Constants | None:
        """The declared constants where tensors have at most these norms; ``None`` if none are declared."""
        of = self.constants
        return of if of is None or isinstance(of, Constants) else of(sizes)

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

    def _dims(self, tensors: Tensors) -> tuple[int | None, ...]:
        return (0, *(0 if k < self.samples else None for k in range(len(tensors))))

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

    def check(self, tensors: Tensors) -> None:
        """Refuse inputs that do not fit, and tensors that ζ reads behind the back of its arguments."""
        inputs = tensors[: len(self.inputs)]
        if not inputs:
            raise ImplicitError("an ArgMin layer was called without input", "Pass at least one tensor.")
        if self.batched:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
            if any(not tensor.dim() for tensor in inputs) or len({tensor.shape[0] for tensor in inputs}) > 1:
                raise ImplicitError(
                    f"inputs of shapes {shapes} do not have the same number of samples",
                    "Samples lie along the first dimension; pass batched=False for one minimiser of the batch.",
                )
            if not inputs[0].shape[0]:
                raise ImplicitError("the batch is empty", "Pass at least one sample.")
        first = tuple(tensor[:1] if k < self.samples else tensor for k, tensor in enumerate(tensors))
        beta = torch.zeros(1, self.size, dtype=self.dtype(tensors), device=tensors[0].device)
        with torch.enable_grad():
            value = self.values(beta, tuple(tensor.detach() for tensor in first))
        if value.requires_grad:  # such a tensor would get no derivative
            raise ImplicitError(
                "ζ reads a tensor that asks for gradients and is neither its input nor its parameter",
                "Pass it as an input, or make ζ an nn.Module that holds it as a parameter.",
            )

    def refuse_overstated(self, beta: Tensor, tensors: Tensors, mu: float) -> None:
        """Refuse a declared strong convexity that a Hessian contradicts."""
        hessian = self.hessian(beta, tensors)
        least = float(torch.linalg.eigvalsh(0.5 * (hessian + hessian.mT)).min())
        if least < mu * (1 - 1e3 * torch.finfo(beta.dtype).eps):
            raise ImplicitError(
                f"a strong convexity of {mu:g} was declared, and the Hessian of ζ has the eigenvalue {least:.3g}",
                "Declare what holds for all arguments, such as the weight of a ridge that ζ contains.",
            )
