r"""Minimisers as differentiable functions of the input and the parameters, and as one operation of a graph.

*Graphs.* ``torch.export`` cannot follow a solver, whose iterations depend on the data. Instead it records one
operation on all the tensors of the inner problem, with a number that stands for the problem. When the program is
read as a graph, the operation becomes a node whose function is the minimiser: ordinary, differentiable Python.

*Implicit.* Let :math:`\beta(\alpha)` be the minimiser, :math:`g = \nabla_\beta\zeta`, and let :math:`\hat\beta,
\hat H` be the minimiser and its Hessian :math:`\nabla_\beta g` at the present :math:`\alpha_0`, as *constants*.
The corrections

.. math:: \beta_0 = \hat\beta, \qquad \beta_{k+1}(\alpha) = \beta_k(\alpha) - \hat H^{-1}g(\alpha, \beta_k(\alpha))

have the value :math:`\hat\beta` at :math:`\alpha_0`, and :math:`\beta_k` has the derivatives of :math:`\beta` at
:math:`\alpha_0` up to order k. Proof, with :math:`\delta = \alpha - \alpha_0` and :math:`e_k = \beta_k - \beta`:
:math:`e_0 = O(\delta)`, and as :math:`g(\alpha, \beta(\alpha)) = 0`,

.. math:: e_{k+1} = e_k - \hat H^{-1}\big(g(\alpha, \beta_k) - g(\alpha, \beta)\big)
    = \Big(I - \hat H^{-1}\int_0^1\nabla_\beta g(\alpha, \beta + te_k)\,dt\Big)e_k = O(\delta)\,e_k ,

because the average of the Hessians tends to :math:`\hat H`. So :math:`e_k = O(\delta^{k+1})`. The first derivative
of :math:`\beta_1` is :math:`-\hat H^{-1}\nabla_\alpha g`, the implicit function theorem. Nothing but ordinary
operations is recorded: every transform of ``torch.func`` and every order of ``backward`` works on them, and a
backward pass never factors a matrix.

*Unrolled.* The solver runs once without being recorded; then its iterations are made again, with the same step
sizes and momenta, and recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from surefoot.graph.nodes import Node
from surefoot.implicit.constants import ImplicitError
from surefoot.implicit.problem import Problem, Tensors
from surefoot.implicit.solvers import factorised, inverse_product, solved, starting_point
from surefoot.torch_private import FakeTensor


@dataclass(frozen=True, eq=False)
class Minimiser:
    """An inner problem as a differentiable function of its tensors, to be called by a graph."""

    problem: Problem

    def __call__(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Tensor:
        """The minimisers."""
        if any(isinstance(value, FakeTensor) for value in (*inputs, *parameters)):
            raise ImplicitError(
                "how many operations a minimiser takes depends on the data",
                "Count those of the model without its ArgMin layers.",
            )
        result = minimiser(self.problem, (*inputs, *parameters, *buffers))
        return result.reshape(self.problem.result_shape(inputs))


def minimiser(problem: Problem, tensors: Tensors, start: Tensor | None = None) -> Tensor:
    """The minimisers, rows × size."""
    problem.check(tensors)
    problem.refuse_hidden(tensors)
    beta, inverse, steps, momenta = _Solve.apply(problem, start, *tensors)
    if problem.settings.differentiate == "unroll":
        return _unrolled(problem, tensors, starting_point(problem, tensors, start), steps, momenta)
    corrected = beta
    for _ in range(problem.settings.order):
        slope = problem.gradient(corrected, tensors)
        if problem.settings.linear == "cg":
            corrected = corrected - _Inverse.apply(problem, slope, beta, *tensors)
        else:
            corrected = corrected - (inverse @ slope[..., None])[..., 0]
    return corrected


def _unrolled(problem: Problem, tensors: Tensors, start: Tensor, steps: Tensor, momenta: Tensor) -> Tensor:
    beta = ahead = start
    for k in range(steps.shape[-1]):
        slope = problem.gradient(ahead, tensors)
        if problem.settings.solver == "newton":
            # not torch.linalg.solve, whose forward derivative of a forward derivative is wrong (PyTorch 2.13)
            slope = (torch.linalg.inv(problem.hessian(ahead, tensors)) @ slope[..., None])[..., 0]
        moved = ahead - steps[..., k, None] * slope
        moved = torch.where(steps[..., k, None] > 0, moved, beta)
        ahead = moved + momenta[..., k, None] * (moved - beta)
        beta = moved
    return beta


class _Solve(torch.autograd.Function):
    """The solver as an operation without derivative: minimisers, inverse Hessians, step sizes, momenta."""

    @staticmethod
    def forward(problem: Problem, start: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = tuple(tensor.detach() for tensor in tensors)
        outcome = solved(problem, tensors, start)
        settings = problem.settings
        if settings.linear == "cg" or settings.differentiate == "unroll":
            inverse = outcome.beta.new_zeros(())
        else:
            hessian = problem.hessian(outcome.beta, tensors)
            inverse = torch.cholesky_inverse(
                factorised(hessian, outcome.iterations, float(outcome.residual.max()))
            )
        return outcome.beta, inverse, outcome.steps, outcome.momenta

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[None, ...]:
        return None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], problem: Problem, start: Tensor | None, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """One problem after the other; shorter paths are filled up with steps of size zero."""
        results = _one_by_one(_Solve, info, in_dims, problem, start, *tensors)
        longest = max(steps.shape[-1] for _, _, steps, _ in results)

        def filled(path: Tensor) -> Tensor:
            return torch.nn.functional.pad(path, (0, longest - path.shape[-1]))

        rows = ((beta, inverse, filled(steps), filled(momenta)) for beta, inverse, steps, momenta in results)
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0, 0, 0, 0)


class _Inverse(torch.autograd.Function):
    """The inverse Hessian at a fixed point times a vector, by conjugate gradients: linear and symmetric."""

    @staticmethod
    def forward(problem: Problem, right: Tensor, beta: Tensor, *tensors: Tensor) -> Tensor:
        return inverse_product(problem, beta.detach(), tuple(t.detach() for t in tensors), right.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        problem, _, *tensors = inputs
        ctx.problem, ctx.count = problem, len(inputs)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        solution = _Inverse.apply(ctx.problem, slope, *ctx.saved_tensors)
        return (None, solution, *(None,) * (ctx.count - 2))

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor, *__: Any) -> Tensor:
        return _Inverse.apply(ctx.problem, tangent, *ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], problem: Problem, right: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        if all(dim is None for dim in in_dims[2:]) and right.dim() == tensors[0].dim() + 1:
            return _Inverse.apply(problem, right.movedim(in_dims[1] or 0, 0), *tensors), 0
        return torch.stack(_one_by_one(_Inverse, info, in_dims, problem, right, *tensors)), 0


def _one_by_one(
    function: Any, info: Any, in_dims: tuple[int | None, ...], problem: Problem, *values: Tensor | None
) -> list[Any]:
    """The results of a function for each element of a mapped batch."""

    def chosen(k: int) -> list[Tensor | None]:
        return [
            value if value is None or dim is None else value.select(dim, k)
            for value, dim in zip(values, in_dims[1:], strict=True)
        ]

    return [function.apply(problem, *chosen(k)) for k in range(info.batch_size)]


class Layer(Protocol):
    """An ArgMin layer, as far as it is used here."""

    def problem(self, count: int) -> Problem:
        """The inner problem with this many tensors."""


_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_Item = TypeVar("_Item")


@torch.library.custom_op("surefoot::argmin", mutates_args=())
def _operation(tensors: list[Tensor], layer: int) -> Tensor:
    minimiser, arguments = read(tensors, layer)
    return minimiser(*arguments).detach().clone()


@_operation.register_fake
def _shape(tensors: list[Tensor], layer: int) -> Tensor:
    problem = read(tensors, layer)[0].problem
    return tensors[0].new_empty(problem.result_shape(tensors), dtype=problem.dtype(tensors))


def record(layer: Layer, tensors: Sequence[Tensor]) -> Tensor:
    """The operation, while a program is exported or on the ``meta`` device.

    Where modules are shared, ``torch.export`` calls short-lived stand-ins for them; the module they stand for is
    the one to remember.
    """
    stands_for = getattr(layer, "get_base", None)
    layer = layer if stands_for is None else stands_for()
    _layers[id(layer)] = layer
    result: Tensor = _operation(list(tensors), id(layer))
    return result


def read(tensors: Sequence[_Item], layer: int) -> tuple[Minimiser, tuple[list[_Item], list[_Item], list[_Item]]]:
    """The function that a recorded operation stands for, and its inputs, parameters and buffers.

    Readings of a graph rely on second derivatives, so these are always implicit and exact here.
    """
    source = _layers.get(layer)
    if source is None:
        raise ImplicitError(
            "an exported ArgMin layer runs only as long as the layer it was exported from exists",
            "Keep the model, or export it again.",
        )
    problem = source.problem(len(tensors))
    settings = replace(problem.settings, differentiate="implicit", order=max(2, problem.settings.order))
    first, second = len(problem.inputs), len(problem.inputs) + len(problem.parameters)
    arguments = list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])
    return Minimiser(replace(problem, settings=settings)), arguments


def rewrite(node: Node) -> Iterator[Node]:
    """The recorded operation as a node whose function is the minimiser itself, which is differentiable."""
    minimiser, arguments = read(*node.args)
    yield replace(node, target=minimiser, args=arguments)
