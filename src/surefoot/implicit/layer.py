"""The layer that minimises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.implicit.constants import Constants, ConstantsOf, ImplicitError, gradient_error
from surefoot.implicit.operation import minimiser, record
from surefoot.implicit.problem import Problem, Settings, Tensors
from surefoot.implicit.solvers import solved


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
        status: the result in words.

    >>> layer = sf.implicit.ArgMin(sf.implicit.Energy(inputs=2, size=3, strong_convexity=1.0), 3)
    >>> solution = layer.solution(torch.eye(2))
    >>> solution.beta.shape, bool(solution.error_bound.max() < 1e-3)
    (torch.Size([2, 3]), True)
    """

    beta: Tensor
    residual: Tensor
    iterations: int
    error_bound: Tensor | None
    gradient_error_bound: Tensor | None
    status: str


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
            norms of the arguments, by name, to one. By default ``zeta.constants``, if there is such an attribute.
        solver: ``"newton"``, with a line search, or ``"gradient"``, accelerated.
        tolerance: largest norm of the gradient of :math:`\zeta` in :math:`\beta`, relative to that at the start if
            it is above one; by default 1e-12 in double and 1e-4 in single precision.
        max_iterations: by default 100 of Newton's method, 10 000 of the gradient method.
        differentiate: ``"implicit"``, by the implicit function theorem, or ``"unroll"``, through the iterations.
            In graphs, that is for certificates and oracles, derivatives are implicit, and the first two are exact.
        linear: how Hessians are inverted: ``"cholesky"``, or ``"cg"``, which never forms them.
        order: number of exact derivatives; the cost of an "implicit" backward pass is in proportion.

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
        solver: Literal["newton", "gradient"] = "newton",
        tolerance: float | None = None,
        max_iterations: int | None = None,
        differentiate: Literal["implicit", "unroll"] = "implicit",
        linear: Literal["cholesky", "cg"] = "cholesky",
        order: int = 2,
    ) -> None:
        super().__init__()
        if not callable(zeta):
            raise ImplicitError(f"ζ is {zeta!r}", "Pass a module or a function of the inputs and β.")
        self.zeta = zeta if isinstance(zeta, nn.Module) else _Function(zeta)
        self.shape = _shape(shape)
        self.batched = bool(batched)
        self.constants = getattr(zeta, "constants", None) if constants is None else constants
        if not (self.constants is None or isinstance(self.constants, Constants) or callable(self.constants)):
            raise ImplicitError(
                f"the option constants is {self.constants!r}", "Pass sf.implicit.Constants(…) or a function."
            )
        self.settings = Settings(solver, differentiate, linear, tolerance, max_iterations, order)

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
        shape = problem.result_shape(tensors)
        rows = (problem.count(tensors),) if self.batched else ()
        constants = self.known(tensors)
        error = gradient = None
        if constants is not None:
            problem.refuse_overstated(outcome.beta, tensors, constants.strong_convexity)
            error = (outcome.residual / constants.strong_convexity * (1 + 1e-6)).reshape(rows)
            if constants.complete:
                arguments = (*problem.inputs, *problem.parameters)
                order = self.settings.order if self.settings.differentiate == "implicit" else 1
                bounds = [gradient_error(constants, arguments, float(e), order) for e in error.reshape(-1)]
                gradient = error.new_tensor(bounds).reshape(rows)
        largest, residual = float(outcome.residual.max()), outcome.residual.reshape(rows)
        status = f"solved in {outcome.iterations} iterations; the largest gradient norm is {largest:.3g}"
        return Solution(outcome.beta.reshape(shape), residual, outcome.iterations, error, gradient, status)

    def known(self, tensors: Tensors) -> Constants | None:
        """The constants at these tensors; ``None`` if none are declared."""
        if self.constants is None or isinstance(self.constants, Constants):
            return self.constants
        problem = self.problem(len(tensors))
        sizes = {}
        for k, (name, tensor) in enumerate(zip(problem.names, tensors, strict=True)):
            has_samples = self.batched and k < len(problem.inputs)
            flat = tensor.detach().double().reshape(len(tensor) if has_samples else 1, -1)
            sizes[name] = float(flat.norm(dim=1).max())
        return self.constants(sizes)

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
        return Problem(self.zeta, names, self.shape, self.batched, self.settings, self.constants)

    def extra_repr(self) -> str:
        """The shape of a minimiser and the solver."""
        kind = "per sample" if self.batched else "of the whole batch"
        return f"shape: {'×'.join(map(str, self.shape))} {kind}, solver: {self.settings.solver}"


class _Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def _input_names(zeta: nn.Module, count: int) -> tuple[str, ...]:
    """The names of the inputs of ζ; its last argument is β."""
    function: Any = zeta.function if isinstance(zeta, _Function) else zeta.forward
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return tuple(names[:count] if len(names) == count + 1 else (f"x{k}" for k in range(count)))


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ImplicitError(f"the shape of a minimiser is {shape!r}", "Pass a positive int, or several.")
    return sizes


_POTENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "log-cosh": lambda z: F.softplus(2 * z) - z,  # log(2 cosh z), written so that it does not overflow
    "square": lambda z: 0.5 * z.square(),
}


class Energy(nn.Module):
    r""":math:`\zeta(x, u, \beta) = \sum_ks((A\beta + Bx + c)_k) + \frac\mu2\|\beta\|^2`, where u is (A, B, c).

    The potential s is convex, so the energy is :math:`\mu`-strongly convex in :math:`\beta`, and all further
    constants are derived from its operations. With half the square it is ridge regression of :math:`-Bx - c` on
    the columns of A.

    Args:
        inputs: the size of x.
        size: the size of :math:`\beta`.
        hidden: number of terms; by default the size of :math:`\beta`.
        potential: ``"softplus"``, ``"log-cosh"`` or ``"square"`` (half the square).
        strong_convexity: :math:`\mu`.

    Raises:
        ImplicitError: if the potential is not one of these, or the strong convexity is not positive.

    >>> from surefoot.implicit import ArgMin
    >>> layer = ArgMin(sf.implicit.Energy(4, 3), 3)
    >>> layer(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        inputs: int,
        size: int,
        hidden: int | None = None,
        potential: Literal["softplus", "log-cosh", "square"] = "softplus",
        strong_convexity: float = 1.0,
    ) -> None:
        super().__init__()
        if potential not in _POTENTIALS:
            raise ImplicitError(f"the potential is {potential!r}", f"Pass one of {', '.join(_POTENTIALS)}.")
        self.constants = Constants(strong_convexity)
        self.potential = potential
        self.own = nn.Linear(size, hidden or size, bias=False)
        self.given = nn.Linear(inputs, hidden or size)

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        """The energy of one sample."""
        terms = _POTENTIALS[self.potential](self.own(beta) + self.given(x))
        return terms.sum() + 0.5 * self.constants.strong_convexity * beta.square().sum()

    def extra_repr(self) -> str:
        """The potential and the strong convexity."""
        return f"potential: {self.potential}, strong_convexity: {self.constants.strong_convexity:g}"
