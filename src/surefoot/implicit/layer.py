"""The layer that minimises."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.implicit.constants import BETA, Constants, ConstantsOf, ImplicitError, gradient_error
from surefoot.implicit.operation import minimiser, record
from surefoot.implicit.problem import Problem, Tensors
from surefoot.implicit.solver import solved


@dataclass(frozen=True)
class Solution:
    r"""The computed minimisers, with proved bounds on their errors (:mod:`surefoot.implicit.constants`).

    The bounds are one number per minimiser. They hold in real arithmetic for the residual as it was computed.

    Attributes:
        beta: the minimisers :math:`\hat\beta`, before any correction.
        residual: :math:`\|\nabla_\beta\zeta\|` at each.
        iterations: number of iterations of the solver.
        error_bound: a bound on :math:`\|\hat\beta - \beta^*\|`; ``None`` if no strong convexity was declared.
        gradient_error_bound: a bound on the spectral norm of the error of the derivative that the layer records,
            in the input of a sample and the parameters together; ``None`` if the constants are not declared.

    >>> from surefoot.implicit import ArgMin, Constants
    >>> layer = ArgMin(lambda x, beta: (beta - x).cosh().sum(), 3, constants=Constants(strong_convexity=1.0))
    >>> solution = layer.solution(torch.eye(3))
    >>> solution.beta.shape, bool(solution.error_bound.max() < 1e-3)
    (torch.Size([3, 3]), True)
    """

    beta: Tensor
    residual: Tensor
    iterations: int
    error_bound: Tensor | None
    gradient_error_bound: Tensor | None


class ArgMin(nn.Module):
    r"""The layer :math:`\phi(x, u) = \arg\min_\beta\zeta(x, u, \beta)` (the paper's "Implicit functions").

    :math:`\zeta` is twice differentiable, strongly convex in :math:`\beta` and written as ordinary PyTorch: a
    module ``zeta(x, beta)`` that returns one number, whose parameters u become those of the layer, or a function.
    With ``batched=True`` it is written for *one sample* and mapped over the first dimension of every input, so
    each sample has a minimiser of its own: the result has shape (samples, \*shape). With ``batched=False`` it
    reads the whole batch, and there is one minimiser, as in ridge regression.

    Args:
        zeta: :math:`\zeta`; its last argument is :math:`\beta`, of shape ``shape``.
        shape: shape of one minimiser; an int for a vector.
        batched: whether every sample has its own minimiser.
        constants: constants that certificates rely on: a :class:`Constants`, or a function from bounds on the
            norms of the arguments, by name, to one; ``"beta"`` is among them where :math:`\beta` is not the
            exact minimiser. By default ``zeta.constants``, if there is such an attribute.
        tolerance: largest norm of the gradient of :math:`\zeta` in :math:`\beta`, relative to that at the start if
            it is above one; by default 1e-12 in double and 1e-4 in single precision.
        max_iterations: the largest number of iterations of Newton's method.
        order: number of exact derivatives, by the implicit function theorem; the cost of a backward pass is in
            proportion. In graphs, that is for certificates and oracles, the first two are always exact.

    Raises:
        ImplicitError: if an option is not one of these; when called, if the inner problem cannot be solved.

    >>> x = torch.tensor([[1.0], [4.0]])
    >>> layer = sf.implicit.ArgMin(lambda x, beta: 0.5 * (beta - x).square().sum() + 0.5 * beta.square().sum(), 1)
    >>> layer(x)
    tensor([[0.5000],
            [2.0000]])
    """

    def __init__(
        self,
        zeta: nn.Module | Callable[..., Tensor],
        shape: int | Sequence[int],
        *,
        batched: bool = True,
        constants: Constants | ConstantsOf | None = None,
        tolerance: float | None = None,
        max_iterations: int = 100,
        order: int = 2,
    ) -> None:
        super().__init__()
        constants = getattr(zeta, "constants", None) if constants is None else constants
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        positive = isinstance(tolerance, int | float) and 0 < tolerance < math.inf
        declared = constants is None or isinstance(constants, Constants) or callable(constants)

        def expect(name: str, value: Any, holds: bool, what: str) -> None:
            if not holds:
                raise ImplicitError(f"{name} is {value!r}", f"Pass {what}.")

        expect("ζ", zeta, callable(zeta), "a module or a function of the inputs and β")
        shaped = bool(sizes) and all(map(_counts, sizes))
        expect("the shape of a minimiser", shape, shaped, "a positive int, or several")
        expect("the option constants", constants, declared, "sf.implicit.Constants(…) or a function")
        expect("the option tolerance", tolerance, tolerance is None or positive, "a positive number, or None")
        expect("the option max_iterations", max_iterations, _counts(max_iterations), "a positive whole number")
        expect("the option order", order, _counts(order), "how many derivatives are to be exact: 1, 2 or more")
        self.zeta = zeta if isinstance(zeta, nn.Module) else _Function(zeta)
        self.shape, self.batched, self.constants = sizes, bool(batched), constants
        self.options = (tolerance, max_iterations, order)

    def forward(self, *inputs: Tensor, start: Tensor | None = None) -> Tensor:
        """The minimisers, differentiable in the inputs and the parameters.

        Args:
            *inputs: the arguments of ζ before β.
            start: where the solver starts, of the shape of the result, such as the result for similar inputs; by
                default zero. Neither the result nor its derivatives depend on it.

        Raises:
            ImplicitError: with the gradient norm that was reached, if the problem is not strongly convex, is
                unbounded, diverges, or meets NaN.
        """
        problem, tensors = self._posed(inputs, start)
        if torch.compiler.is_exporting() or any(tensor.device.type == "meta" for tensor in tensors):
            return record(self, tensors)
        return minimiser(problem, tensors, start).reshape(problem.result_shape(tensors))

    def solution(self, *inputs: Tensor, start: Tensor | None = None) -> Solution:
        """The minimisers without derivatives, with bounds on their errors.

        Raises:
            ImplicitError: as for a call.
        """
        problem, tensors = self._posed(inputs, start)
        tensors = tuple(tensor.detach() for tensor in tensors)
        problem.check(tensors)
        outcome = solved(problem, tensors, start)
        rows = (problem.count(tensors),) if self.batched else ()
        sizes = {}
        for k, (name, tensor) in enumerate(zip(problem.names, tensors, strict=True)):
            flat = tensor.double().reshape(len(tensor) if k < problem.samples else 1, -1)
            sizes[name] = float(flat.norm(dim=1).max())
        constants, error, gradient = problem.constants_at(sizes), None, None
        if constants is not None:
            mu = constants.strong_convexity
            problem.refuse_overstated(outcome.beta, tensors, mu)
            error = (outcome.residual / mu * (1 + 1e-6)).reshape(rows)
            sizes[BETA] = float(outcome.beta.norm(dim=1).max() + 2 * error.max())
            constants = problem.constants_at(sizes)
            if constants is not None and constants.complete:
                arguments = (*problem.inputs, *problem.parameters)
                bounds = [gradient_error(constants, arguments, float(e), problem.order) for e in error.flatten()]
                gradient = error.new_tensor(bounds).reshape(rows)
        beta = outcome.beta.reshape(problem.result_shape(tensors))
        return Solution(beta, outcome.residual.reshape(rows), outcome.iterations, error, gradient)

    def _posed(self, inputs: Sequence[Tensor], start: Tensor | None) -> tuple[Problem, Tensors]:
        for value in inputs:
            if not isinstance(value, Tensor):
                raise ImplicitError(f"an input is of type {type(value).__name__}", "Pass tensors.")
        tensors = (*inputs, *self.zeta.parameters(), *self.zeta.buffers())
        problem = self.problem(len(tensors))
        if start is not None and inputs and tuple(start.shape) != problem.result_shape(inputs):
            raise ImplicitError(
                f"the start has shape {tuple(start.shape)}", f"Pass one of shape {problem.result_shape(inputs)}."
            )
        return problem, tensors

    def problem(self, count: int) -> Problem:
        """The inner problem with this many tensors, including those that ζ owns."""
        inputs = count - len(list(self.zeta.parameters())) - len(list(self.zeta.buffers()))
        names = _input_names(self.zeta, inputs)
        return Problem(self.zeta, names, self.shape, self.batched, self.constants, *self.options)

    def extra_repr(self) -> str:
        return f"shape: {'×'.join(map(str, self.shape))} {'per sample' if self.batched else 'of the whole batch'}"


class _Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def _counts(number: Any) -> bool:
    return isinstance(number, int) and number > 0


def _input_names(zeta: nn.Module, count: int) -> tuple[str, ...]:
    """The names of the inputs of ζ; its last argument is β."""
    function: Any = zeta.function if isinstance(zeta, _Function) else zeta.forward
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return tuple(names[:count] if len(names) == count + 1 else (f"x{k}" for k in range(count)))
