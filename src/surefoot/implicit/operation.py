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
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from surefoot.graph.nodes import Node
from surefoot.implicit.constants import ImplicitError
from surefoot.implicit.problem import Problem, Tensors
from surefoot.implicit.solver import factorised, solved
from surefoot.torch_private import FakeTensor


@dataclass(frozen=True, eq=False)
class Minimiser:
    """An inner problem as a differentiable function of its tensors, to be called by a graph."""

    problem: Problem

    def __call__(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Tensor:
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
    beta, inverse = _Solve.apply(problem, start, *tensors)
    for _ in range(problem.order):
        beta = beta - (inverse @ problem.gradient(beta, tensors)[..., None])[..., 0]
    return beta


class _Solve(torch.autograd.Function):
    """The solver as an operation without derivative: minimisers and inverse Hessians."""

    @staticmethod
    def forward(problem: Problem, start: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = tuple(tensor.detach() for tensor in tensors)
        outcome = solved(problem, tensors, start)
        hessian = problem.hessian(outcome.beta, tensors)
        factor = factorised(hessian, outcome.iterations, float(outcome.residual.max()))
        return outcome.beta, torch.cholesky_inverse(factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[None, ...]:
        return None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], problem: Problem, *values: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """One problem after the other."""
        results = []
        for k in range(info.batch_size):
            pairs = zip(values, in_dims[1:], strict=True)
            chosen = (v if v is None or dim is None else v.select(dim, k) for v, dim in pairs)
            results.append(_Solve.apply(problem, *chosen))
        return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0, 0)


_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # ArgMin layers by identity
_Item = TypeVar("_Item")


@torch.library.custom_op("surefoot::argmin", mutates_args=())
def _operation(tensors: list[Tensor], layer: int) -> Tensor:
    minimiser, arguments = read(tensors, layer)
    return minimiser(*arguments).detach().clone()


@_operation.register_fake
def _shape(tensors: list[Tensor], layer: int) -> Tensor:
    problem = read(tensors, layer)[0].problem
    return tensors[0].new_empty(problem.result_shape(tensors), dtype=problem.dtype(tensors))


def record(layer: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
    """The operation, while a program is exported or on the ``meta`` device.

    Where modules are shared, ``torch.export`` calls short-lived stand-ins for them; the module they stand for is
    the one to remember.
    """
    stands_for: Any = getattr(layer, "get_base", None)
    layer = layer if stands_for is None else stands_for()
    _layers[id(layer)] = layer
    result: Tensor = _operation(list(tensors), id(layer))
    return result


def read(tensors: Sequence[_Item], layer: int) -> tuple[Minimiser, tuple[list[_Item], list[_Item], list[_Item]]]:
    """The function that a recorded operation stands for, and its inputs, parameters and buffers.

    Readings of a graph rely on second derivatives, so these are always exact here.
    """
    source = _layers.get(layer)
    if source is None:
        raise ImplicitError(
            "an exported ArgMin layer runs only as long as the layer it was exported from exists",
            "Keep the model, or export it again.",
        )
    problem = source.problem(len(tensors))
    problem = replace(problem, order=max(2, problem.order))
    first, second = len(problem.inputs), len(problem.inputs) + len(problem.parameters)
    arguments = list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])
    return Minimiser(problem), arguments


def rewrite(node: Node) -> Iterator[Node]:
    """The recorded operation as a node whose function is the minimiser itself, which is differentiable."""
    minimiser, arguments = read(*node.args)
    yield replace(node, target=minimiser, args=arguments)
